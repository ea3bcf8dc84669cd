"""CUDA kernels compiled at first use by NVRTC (torch ships it: no nvcc, no C++ compiler) and launched on torch's stream.

A `Source` is one .cu file, with the text of what it includes by a path beside it and no other headers;
`source.module(**defines)` is that compiled for the current GPU with `-DNAME=VALUE`. Cubins are kept in `$R1_PIPELINE_CACHE` or
`~/.cache/r1-pipeline/kernels` under the hash of everything that went in; each appears by one rename, so that any number of
processes may compile at once. `carried` names a folder of cubins that is looked into first; then nothing needs to be compiled.
Launches may be captured in CUDA graphs. torch is imported when a kernel is asked for, not before.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.core.errors import MissingToolError, StageError

__all__ = [
    "Module", "Source", "aligned", "carried", "compile_source", "compiler_version", "heads_matrix", "processors",
    "source_text", "tensor_map", "wheels",
]  # fmt: skip

FLAGS = ("--std=c++17",)
BOUND = re.compile(r"sm\d+_")
INCLUDE = re.compile(rb'^#include "([^"]+)"$', re.MULTILINE)
STATIC_SHARED = 48 << 10
"""More shared memory than this a kernel must be allowed."""
TENSOR_MAP, PROMOTE_256B = 128, 3
"""sizeof(CUtensorMap); CU_TENSOR_MAP_L2_PROMOTION_L2_256B"""
TENSOR_MAP_KINDS, SWIZZLES = {1: 0, 2: 9, 4: 7}, {64: 2, 128: 3}
"""Of elements of 1, 2 and 4 bytes: CU_TENSOR_MAP_DATA_TYPE_UINT8, _BFLOAT16, _FLOAT32; of rows of 64 and 128:
CU_TENSOR_MAP_SWIZZLE_64B, _128B"""
PROGRAMMATIC_SERIALIZATION = 6
"""CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION"""
MAX_DYNAMIC_SHARED, CLUSTER_WIDTH, ANY_CLUSTER = 8, 11, 14
"""CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, _REQUIRED_CLUSTER_WIDTH, _NON_PORTABLE_CLUSTER_SIZE_ALLOWED"""
PORTABLE_CLUSTER, INVALID_CLUSTER = 8, 912
"""A wider cluster a kernel must be allowed; CUDA_ERROR_INVALID_CLUSTER_SIZE"""


_carried: list[Path] = []


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: an id, then a 64-byte union of which an int is used here."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Launch(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_OVERLAP = _Attribute(id=PROGRAMMATIC_SERIALIZATION, value=1)


class Source:
    """One .cu file; if its name begins with a chip's, as sm90_, for that alone (sm_90a), with instructions that no other has."""

    def __init__(self, path: Path) -> None:
        self.path, self.suffix = path, "a" if BOUND.match(path.name) else ""
        self._modules: dict[tuple[Any, ...], Module] = {}

    def module(self, **defines: int | float) -> Module:
        """Compiled for the current GPU, or taken from the cache; MissingToolError without a GPU or NVRTC."""
        key = (_architecture() + self.suffix, *sorted(defines.items()))
        if key not in self._modules:
            options = (f"--gpu-architecture={key[0]}", *FLAGS, *(f"-D{name}={value}" for name, value in sorted(defines.items())))
            self._modules[key] = Module(_cached(source_text(self.path), options))
        return self._modules[key]


class Module:
    """A loaded cubin."""

    def __init__(self, cubin: bytes) -> None:
        self._library = ctypes.c_void_p()
        self._functions: dict[tuple[str, int], ctypes.c_void_p] = {}
        self._clusters: dict[tuple[str, int, int, int], int] = {}
        _ok(_driver().cuLibraryLoadData(ctypes.byref(self._library), cubin, None, None, 0, None, None, 0), "load a kernel")

    def launch(
        self, name: str, grid: tuple[int, int, int], threads: int, *args: Any, overlap: bool = False, shared: int = 0
    ) -> None:
        """Launch on the current stream. Tensors are passed as pointers, int as int, float as float, ctypes as they are.

        `overlap`: programmatic dependent launch; only for kernels that wait (`griddepcontrol.wait`) before they read.
        `shared`: bytes of dynamic shared memory.
        """
        import torch

        values = [_argument(value) for value in args]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        stream = torch.cuda.current_stream().cuda_stream
        config = _Launch(*grid, threads, 1, 1, shared, stream, ctypes.pointer(_OVERLAP) if overlap else None, int(overlap))
        _ok(_driver().cuLaunchKernelEx(ctypes.byref(config), self._function(name, shared), pointers, None), f"launch {name}")

    def clusters(self, name: str, threads: int, shared: int = 0) -> int:
        """How many clusters of a kernel the current GPU runs at once, with nothing else on it: 0 where none fits."""
        import torch

        key = name, torch.cuda.current_device(), threads, shared
        if key not in self._clusters:
            count, kernel = ctypes.c_int(), self._function(name, shared)
            config = _Launch(max(1, self._width(kernel, key[1])), 1, 1, threads, 1, 1, shared)
            found = _driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), kernel, ctypes.byref(config))
            _ok(found if found != INVALID_CLUSTER else 0, f"count clusters of {name}")
            self._clusters[key] = count.value
        return self._clusters[key]

    def _function(self, name: str, shared: int) -> ctypes.c_void_p:
        import torch

        key = name, torch.cuda.current_device()  # what is allowed is so on one GPU
        if key not in self._functions:
            kernel = ctypes.c_void_p()
            _ok(_driver().cuLibraryGetKernel(ctypes.byref(kernel), self._library, name.encode()), f"find {name}")
            if self._width(kernel, key[1]) > PORTABLE_CLUSTER:
                _ok(_driver().cuKernelSetAttribute(ANY_CLUSTER, 1, kernel, key[1]), f"allow {name} a cluster of its size")
            if shared > STATIC_SHARED:
                _ok(_driver().cuKernelSetAttribute(MAX_DYNAMIC_SHARED, shared, kernel, key[1]), f"give {name} {shared} bytes")
            self._functions[key] = kernel
        return self._functions[key]

    @staticmethod
    def _width(kernel: ctypes.c_void_p, device: int) -> int:
        """CTAs of its cluster; 0 without."""
        width = ctypes.c_int()
        _ok(_driver().cuKernelGetAttribute(ctypes.byref(width), CLUSTER_WIDTH, kernel, device), "ask a kernel for its cluster")
        return width.value


def aligned(tensor: Any) -> Any:
    """The tensor, or a copy of it, contiguous and from a multiple of 16 bytes on, as vector loads need it."""
    whole = tensor.contiguous()
    return whole.clone() if whole.data_ptr() % 16 else whole


@functools.cache
def processors(device: Any) -> int:
    """Multiprocessors of a torch device."""
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count


def heads_matrix(x: Any) -> tuple[Any, int]:
    """x [T, A, D] as a matrix [T, .] for `tensor_map`, and the columns from one head to the next; copied only where it must be."""
    rows, heads, width = x.shape
    row, head, one = x.stride()
    if one != 1 or row % 8 or head % 8 or x.data_ptr() % 16 or (rows > 1 and row < (heads - 1) * head + width):
        x = x.new_empty(x.shape).copy_(x)
        row, head, _ = x.stride()
    columns = (heads - 1) * head + width
    return x.as_strided((rows, columns), (max(row, columns), 1)), 0 if heads == 1 else head


def tensor_map(matrix: Any, rows: int, columns: int = 64, swizzle: bool | None = None) -> Any:
    """CUtensorMap of a matrix [R, C] for TMA copies of `rows` x `columns`: a kernel argument, by value.

    `swizzle`: 16-byte pieces of rows of 128 or 64 bytes in the matrix instructions' order; only BF16's unless said.
    """
    kind = matrix.element_size(), matrix.element_size() == 2 if swizzle is None else swizzle
    return _tensor_map(_pointer(matrix), *matrix.shape, matrix.stride(0), *kind, rows, columns)


@functools.lru_cache(maxsize=1024)
def _tensor_map(pointer: int, height: int, width: int, stride: int, element: int, swizzle: bool, rows: int, columns: int) -> Any:
    space = (ctypes.c_ubyte * (2 * TENSOR_MAP))()
    encoded = (ctypes.c_ubyte * TENSOR_MAP).from_buffer(space, -ctypes.addressof(space) % TENSOR_MAP)
    sizes, pitches = (ctypes.c_uint64 * 2)(width, height), (ctypes.c_uint64 * 1)(stride * element)
    box, steps = (ctypes.c_uint32 * 2)(columns, rows), (ctypes.c_uint32 * 2)(1, 1)
    kind, order = TENSOR_MAP_KINDS[element], SWIZZLES[columns * element] if swizzle else 0
    described = kind, 2, ctypes.c_void_p(pointer), sizes, pitches, box, steps, 0, order, PROMOTE_256B, 0
    _ok(_driver().cuTensorMapEncodeTiled(encoded, *described), f"describe a [{height}, {width}] matrix for TMA")
    return encoded


def source_text(path: Path) -> bytes:
    """The file, with each `#include "path"` replaced by that file; one level deep."""
    return INCLUDE.sub(lambda found: (path.parent / found[1].decode()).read_bytes(), path.read_bytes())


def _argument(value: Any) -> Any:
    if isinstance(value, ctypes.Array | ctypes._SimpleCData):
        return value
    if isinstance(value, float):
        return ctypes.c_float(value)
    return ctypes.c_int(value) if isinstance(value, int) else ctypes.c_void_p(_pointer(value))


def _pointer(tensor: Any) -> int:
    """Where a GPU finds it: an address of the host's memory would end the process's work on the GPU."""
    if not tensor.is_cuda:
        raise StageError(f"A kernel was given a {list(tensor.shape)} tensor on {tensor.device}: move it to the GPU of the others.")
    return tensor.data_ptr()


def _architecture() -> str:
    """sm_90, of the current GPU."""
    import torch

    if not torch.cuda.is_available():
        raise MissingToolError("This kernel needs an NVIDIA GPU that torch can use; torch.cuda.is_available() is false here.")
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def _cached(source: bytes, options: Sequence[str]) -> bytes:
    """The cubin from a carried folder or the cache, or compiled into the latter."""
    known = hashlib.sha256(repr((source, options)).encode()).hexdigest()
    for file in (file for folder in _carried for file in sorted(folder.glob(f"{known}-*.cubin"))):
        return file.read_bytes()
    folder = Path(os.environ.get("R1_PIPELINE_CACHE") or Path.home() / ".cache" / "r1-pipeline") / "kernels"
    file = folder / f"{known}-{'.'.join(map(str, compiler_version()))}.cubin"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f"{file.stem}.{os.getpid()}.{threading.get_ident()}"
        partial.write_bytes(compile_source(source, options))
        partial.replace(file)
    return file.read_bytes()


def carried(folder: Path) -> None:
    """Take kernels from here first, whichever NVRTC compiled them: a copy of a cache's `kernels`, for this GPU."""
    _carried.append(folder)


def compiler_version() -> tuple[int, int]:
    """Of NVRTC, as (13, 0); MissingToolError without it."""
    version = (ctypes.c_int(), ctypes.c_int())
    _compiler().nvrtcVersion(*(ctypes.byref(part) for part in version))
    return version[0].value, version[1].value


def compile_source(source: bytes, options: Sequence[str], *, ptx: bool = False) -> bytes:
    """The cubin of a source, or its PTX; needs NVRTC, but no GPU."""
    nvrtc, program, size = _compiler(), ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernel.cu", 0, None, None)
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), words)
    what = "ProgramLog" if failed else "PTX" if ptx else "CUBIN"
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    result = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, result)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise StageError(f"NVRTC refused a kernel ({' '.join(options)}): {result.value.decode()}")
    return result.raw


def wheels(library: str) -> list[str]:
    """The files of a library in torch's CUDA wheels."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations or () if spec else ()
    return sorted(str(file) for root in roots for file in Path(root).glob(f"*/lib/{library}.so.*"))


@functools.cache
def _compiler() -> ctypes.CDLL:
    """NVRTC of torch's own CUDA wheels, else the system's."""
    for name in (*wheels("libnvrtc"), "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            for builtins in Path(name).parent.glob("libnvrtc-builtins.so.*"):  # it looks for them by name alone
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise MissingToolError("libnvrtc.so.13 (or .12) was not found: install nvidia-cuda-nvrtc, or torch with CUDA, which brings it.")


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MissingToolError(f"The NVIDIA driver's libcuda.so.1 cannot be loaded: {error}") from error


def _ok(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise StageError(f"CUDA could not {what}: {(text.value or b'unknown error').decode()} ({code})")
