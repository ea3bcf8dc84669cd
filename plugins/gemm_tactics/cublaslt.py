"""cuBLASLt's matrix product through ctypes: its candidates for a shape, and a product by one of them.

Row-major y [N, O] = x [N, K] @ weight [O, K]^T in BF16 with float32 sums is, in cuBLASLt's column-major words, D [O, N] = A^T B of
A = weight [K, O] and B = x [K, N]. An algorithm is 64 opaque bytes that mean the same only to the same version of the library.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from pipeline.core.errors import MissingToolError, StageError
from plugins.nvrtc import wheels

__all__ = ["Algorithm", "candidates", "product", "version"]

Algorithm = tuple[int, ...]
"""cublasLtMatmulAlgo_t: eight 64-bit words"""
WORKSPACE = 32 << 20
COMPUTE_32F, R_32F, R_16BF, OP_T = 68, 0, 14, 1
TRANSPOSE_A, MAX_WORKSPACE, REDUCTION_SCHEMES = 3, 1, 3
"""CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES and _REDUCTION_SCHEME_MASK"""
IN_COMPUTE_TYPE = 2
"""CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: what is split over K is summed in float32, not in BF16."""


class _Candidate(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def version() -> int:
    """Of the library: algorithms are kept with it."""
    library = _library()
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return int(library.cublasLtGetVersion())


def candidates(tokens: int, out: int, hidden: int, most: int) -> list[Algorithm]:
    """Algorithms for a shape that the library holds to be good, best first."""
    found, count = (_Candidate * most)(), ctypes.c_int()
    preference = ctypes.c_void_p()
    _ok(_library().cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
    for name, value in ((MAX_WORKSPACE, ctypes.c_size_t(WORKSPACE)), (REDUCTION_SCHEMES, ctypes.c_uint32(IN_COMPUTE_TYPE))):
        _ok(_library().cublasLtMatmulPreferenceSetAttribute(preference, name, ctypes.byref(value), ctypes.sizeof(value)))
    operation, (a, b, d) = _operation(), _layouts(tokens, out, hidden)
    shape = operation, a, b, d, d, preference
    code = _library().cublasLtMatmulAlgoGetHeuristic(_handle(torch.cuda.current_device()), *shape, most, found, ctypes.byref(count))
    _library().cublasLtMatmulPreferenceDestroy(preference)
    _ok(code)
    return [tuple(one.algorithm) for one in found[: count.value] if one.state == 0]


def product(x: Tensor, weight: Tensor, out: Tensor, algorithm: Algorithm) -> None:
    """out [N, O] = x [N, K] @ weight [O, K]^T on the current device and stream; all BF16, contiguous, aligned to 16 bytes."""
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
    chosen = (ctypes.c_uint64 * 8)(*algorithm)
    a, b, d = _layouts(len(x), *weight.shape)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (weight, x, out)]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    space = _workspace(x.device.index or 0)
    terms = ctypes.byref(one), pointers[0], a, pointers[1], b, ctypes.byref(zero), pointers[2], d, pointers[2], d
    rest = ctypes.byref(chosen), ctypes.c_void_p(space.data_ptr()), ctypes.c_size_t(WORKSPACE), stream
    _ok(_library().cublasLtMatmul(_handle(torch.cuda.current_device()), _operation(), *terms, *rest))


@functools.cache
def _library() -> ctypes.CDLL:
    """That of torch's CUDA wheels, which torch has loaded already, else the system's."""
    for name in (*wheels("libcublasLt"), "libcublasLt.so.13", "libcublasLt.so.12"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise MissingToolError("libcublasLt.so.13 (or .12) was not found: install nvidia-cublas, or torch with CUDA, which brings it.")


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    """The library's context of the current device: it is of the one that it was made on."""
    handle = ctypes.c_void_p()
    _ok(_library().cublasLtCreate(ctypes.byref(handle)))
    return handle


@functools.cache
def _operation() -> ctypes.c_void_p:
    operation, transpose = ctypes.c_void_p(), ctypes.c_int32(OP_T)
    _ok(_library().cublasLtMatmulDescCreate(ctypes.byref(operation), COMPUTE_32F, R_32F))
    _ok(_library().cublasLtMatmulDescSetAttribute(operation, TRANSPOSE_A, ctypes.byref(transpose), 4))
    return operation


@functools.lru_cache(maxsize=4096)
def _layouts(tokens: int, out: int, hidden: int) -> tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]:
    layouts = []
    for rows, columns in ((hidden, out), (hidden, tokens), (out, tokens)):
        layout, sizes = ctypes.c_void_p(), (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
        _ok(_library().cublasLtMatrixLayoutCreate(ctypes.byref(layout), R_16BF, *sizes))
        layouts.append(layout)
    return layouts[0], layouts[1], layouts[2]


@functools.cache
def _workspace(device: int) -> Tensor:
    """Products on several streams at once must not share it: those of one decoder follow each other."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=f"cuda:{device}")


def _ok(code: Any) -> None:
    if code:
        raise StageError(f"cuBLASLt refused a product (cublasStatus_t {code}).")
