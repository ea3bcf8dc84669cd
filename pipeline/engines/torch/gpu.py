"""Which GPUs the driver offers, asked without torch, so that a build can refuse before it starts."""

from __future__ import annotations

import ctypes
from functools import cache

__all__ = ["compute_capabilities"]

_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR of cuda.h."""


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
