"""Which GPUs the driver offers, asked without torch, so that a build can refuse before it starts."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib import metadata

from pipeline.core.errors import ConfigError, MissingToolError

__all__ = ["compute_capabilities", "require_cuda"]

_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h."""


def require_cuda(field: str, least: tuple[int, int], way_out: str) -> None:
    """Refuse `field`=cuda where torch cannot use a GPU, or none of the compute capability `least`.

    Raises:
        MissingToolError: without a GPU, then with `way_out`; without torch, or with one for CPUs.
        ConfigError: the GPU is too old.
    """
    if not (found := compute_capabilities()):
        raise MissingToolError(f"{field}=cuda needs a GPU, and this machine offers none: {way_out}")
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError as error:
        raise MissingToolError(
            f"{field}=cuda needs torch, which is not installed: pip install 'r1-pipeline[torch]', or set {field}=cpu."
        ) from error
    if version.endswith("+cpu"):
        raise MissingToolError(f"torch {version} is built without CUDA: install a CUDA build of torch, or set {field}=cpu.")
    if max(found) < least:
        (major, minor), (wanted, part) = max(found), least
        raise ConfigError(f"The GPU is sm_{major}{minor}, below sm_{wanted}{part} of the kernels: set {field}=cpu.")


@cache
def compute_capabilities() -> tuple[tuple[int, int], ...]:
    """(major, minor) of each GPU that CUDA_VISIBLE_DEVICES leaves visible; empty without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ()
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple((_attribute(cuda, _MAJOR, index), _attribute(cuda, _MINOR, index)) for index in range(count.value))


def _attribute(cuda: ctypes.CDLL, which: int, index: int) -> int:
    device, value = ctypes.c_int(), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetAttribute(ctypes.byref(value), which, device)
    return value.value
