"""One expert from FP8 blocks to NVFP4 as torch and nvidia-modelopt do it on a CPU, timed; `bench_convert.py` starts it.

    python scripts/bench_convert_peer.py INPUT.npz torch|modelopt SECONDS

In a process of its own, since the peer may live in another interpreter and changes torch when it is imported. One thread.
INPUT.npz holds `codes` U8 [N, K], `scales` F32 [N/128, K/128] and `amax`; the last line printed is JSON with the CPU seconds
of each repetition and digests of the results, by which the caller knows that the same was computed.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np
import torch
from torch import Tensor

BOUNDS = ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False))
"""Between the E2M1 codes; whether a value exactly there rounds up."""
STRIP = 128


def dequantised(codes: Tensor, scales: Tensor) -> Tensor:
    """To BF16, as DeepSeek's weight_dequant does on a GPU."""
    spread = scales.repeat_interleave(128, 0)[: codes.shape[0]].repeat_interleave(128, 1)[:, : codes.shape[1]]
    return (codes.view(torch.float8_e4m3fn).float() * spread).bfloat16()


def by_modelopt(codes: Tensor, scales: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """ModelOpt's own class."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    weight, block_scales, _ = NVFP4QTensor.quantize(dequantised(codes, scales), 16, None, amax / 2688.0)
    return weight._quantized_data, block_scales


def by_torch(codes: Tensor, scales: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Vectorised over strips of rows, whose temporaries stay in the cache: what one writes after reading the above."""
    strips = [_strip(codes[r : r + STRIP], scales[r // 128 : r // 128 + 1], amax / 2688.0) for r in range(0, len(codes), STRIP)]
    return torch.cat([packed for packed, _ in strips]), torch.cat([block_scales for _, block_scales in strips])


def _strip(codes: Tensor, scales: Tensor, scale_2: Tensor) -> tuple[Tensor, Tensor]:
    blocks = dequantised(codes, scales).float().view(codes.shape[0], -1, 16)
    wanted = blocks.abs().amax(-1) / (6 * scale_2)
    wanted[wanted == 0] = 1
    block_scales = wanted.clamp(2.0**-9, 448).to(torch.float8_e4m3fn)
    values = blocks / (block_scales.float() * scale_2)[..., None]
    size, found = values.abs(), torch.zeros(values.shape, dtype=torch.uint8)
    for bound, up in BOUNDS:
        found += (size >= bound) if up else (size > bound)
    found += (values < 0).to(torch.uint8) << 3
    found = found.view(codes.shape[0], -1)
    return found[:, 0::2] | (found[:, 1::2] << 4), block_scales


def timed(work: Callable[[], Any], seconds: float) -> list[float]:
    """CPU seconds of each repetition, after one that is not counted."""
    work()
    times, started = [], time.perf_counter()
    while len(times) < 2 or time.perf_counter() - started < seconds:
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return times


def main() -> None:
    """See the module."""
    file, name, seconds = sys.argv[1:]
    torch.set_num_threads(1)
    data = np.load(file)
    codes, scales, amax = (torch.from_numpy(data[key]) for key in ("codes", "scales", "amax"))
    way = {"torch": by_torch, "modelopt": by_modelopt}[name]
    packed, block_scales = way(codes, scales, amax)
    digests = [hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for t in (packed, block_scales)]
    packages = ("torch", "nvidia-modelopt") if name == "modelopt" else ("torch",)
    versions = {package: metadata.version(package) for package in packages}
    times = timed(lambda: way(codes, scales, amax), float(seconds))
    print(json.dumps({"cpu_seconds": times, "digests": digests, "versions": versions}))


if __name__ == "__main__":
    main()
