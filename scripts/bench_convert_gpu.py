#!/usr/bin/env python3
"""FP8 blocks -> NVFP4 on the GPU beside torch and the copy bandwidth, in one run.

    python scripts/bench_convert_gpu.py [--quick] [--json FILE]

For R1's matrices (batched: experts), the kernel in BF16-rounding (modelopt) and exact mode and the amax pass, in GB/s of
bytes read and written; the limit is a device-to-device copy that moves as many bytes in the same turns. Inputs and outputs
rotate through several sets, more than the L2 holds. Before anything is timed, a whole expert is compared with the numpy
reference, to the bit. Exit code 1: it differed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from plugins.nvfp4_convert import op, reference  # noqa: E402
from plugins.timing import copy_bandwidth, graph_seconds, machine  # noqa: E402
from scripts._options import result_file  # noqa: E402

SHAPES = {
    "expert gate/up": (1, 2048, 7168),
    "expert down": (1, 7168, 2048),
    "o_proj": (1, 7168, 16384),
    "dense gate/up": (1, 18432, 7168),
    "32 experts": (32, 2048, 7168),
    "32 experts down": (32, 7168, 2048),
}
QUICK = ("expert gate/up", "32 experts")
ROTATED_BYTES = 600 << 20
E2M1_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def main() -> int:
    """Check, time, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two shapes, no torch.compile")
    parser.add_argument("--json", type=result_file, help="write the rows and the machine here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("No GPU that torch can use: this benchmark needs one.")
    if not check():
        print("the GPU's bytes differ from the reference's: nothing is timed")
        return 1
    rows = [measure(name, SHAPES[name], options.quick) for name in (QUICK if options.quick else SHAPES)]
    print(f"GB/s {'shape':>30s}  modelopt   exact    amax   torch  compile    copy  modelopt / copy")
    for row in rows:
        rates = "{modelopt:9.0f} {exact:7.0f} {amax:7.0f} {torch:7.0f} {compile:8.0f} {copy:7.0f}".format(**row["gb_per_s"])
        print(f"{row['name']:16s} {row['shape']!s:>18s} {rates}          {row['fraction_of_copy']:6.1%}")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows, **machine()}, indent=1) + "\n", encoding="utf-8")
    return 0


def checkpoint_like(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Codes and block scales of normal weights, quantised as DeepSeek does."""
    batch, n, k = shape
    codes = torch.empty(shape, dtype=torch.float8_e4m3fn, device="cuda")
    scale = torch.empty(batch, n // 128, k // 128, device="cuda")
    for index in range(batch):
        tiles = (torch.randn(n, k, device="cuda") * 0.02).view(n // 128, 128, k // 128, 128)
        scale[index] = tiles.abs().amax(dim=(1, 3)) / 448
        codes[index] = (tiles / scale[index][:, None, :, None]).view(n, k).to(codes.dtype)
    return codes, scale


def check() -> bool:
    """A whole expert in both modes, against numpy."""
    codes, scale = checkpoint_like((1, 2048, 7168))
    amax = op.fp8_block_amax(codes, scale)
    arrays = codes[0].view(torch.uint8).cpu().numpy(), scale[0].cpu().numpy()
    equal = amax.item() == reference.amax(*arrays)
    for exact in (False, True):
        wanted = reference.quantize(*arrays, amax.item(), exact)
        found = [tensor[0].view(torch.uint8) for tensor in op.fp8_block_to_nvfp4(codes, scale, amax, exact)[:2]]
        equal &= all((a.cpu().numpy() == b).all() for a, b in zip(found, wanted, strict=False))
    return bool(equal)


def measure(name: str, shape: tuple[int, int, int], quick: bool) -> dict[str, Any]:
    """One row."""
    elements = shape[0] * shape[1] * shape[2]
    traffic = elements + elements // 2 + elements // 16 + elements // 128**2 * 4
    sets = max(2, ROTATED_BYTES // traffic)
    inputs = [checkpoint_like(shape) for _ in range(sets)]
    amax = op.fp8_block_amax(*inputs[0])
    seconds = {
        mode: graph_seconds([lambda i=i, e=exact: op.fp8_block_to_nvfp4(*i, amax, e) for i in inputs])
        for mode, exact in (("modelopt", False), ("exact", True))
    }
    rates = {mode: traffic / time for mode, time in seconds.items()}
    rates["amax"] = elements / graph_seconds([lambda i=i: op.fp8_block_amax(*i) for i in inputs])
    torch_calls = inputs[:2] if elements < 1 << 28 else inputs[:1]
    small = [(codes[:8], scale[:8]) for codes, scale in torch_calls]  # its float32 temporaries are eight times the codes
    share = small[0][0].numel() / elements
    rates["torch"] = share * traffic / graph_seconds([lambda i=i: with_torch(*i, amax[:8]) for i in small], 5)
    compiled = with_torch if quick else torch.compile(with_torch, dynamic=False)
    rates["compile"] = 0.0 if quick else share * traffic / graph_seconds([lambda i=i: compiled(*i, amax[:8]) for i in small], 10)
    rates["copy"] = copy_bandwidth(traffic, sets)
    gb_per_s = {key: round(rate / 1e9, 1) for key, rate in rates.items()}
    micros = {key: round(time * 1e6, 2) for key, time in seconds.items()}
    fraction = round(rates["modelopt"] / rates["copy"], 3)
    return {"name": name, "shape": shape, "bytes": traffic, "us": micros, "gb_per_s": gb_per_s, "fraction_of_copy": fraction}


def with_torch(codes: Tensor, scale: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same in vectorised torch, all float32 on the device."""
    batch, n, k = codes.shape
    tiles = codes.float().view(batch, n // 128, 128, k // 128, 128) * scale[:, :, None, :, None]
    blocks = tiles.bfloat16().float().view(batch, n, k // 16, 16)
    scale_2 = amax / 2688
    wanted = blocks.abs().amax(dim=-1) / (6 * scale_2)[:, None, None]
    block_scale = torch.where(wanted == 0, 1, wanted).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    values = blocks / (block_scale.float() * scale_2[:, None, None])[..., None]
    size, e2m1 = values.abs(), (values < 0).byte() << 3
    for index, bound in enumerate(E2M1_BOUNDS):
        e2m1 = e2m1 + (size >= bound if index % 2 else size > bound).byte()
    e2m1 = e2m1.view(batch, n, k)
    return e2m1[..., 0::2] | e2m1[..., 1::2] << 4, block_scale, scale_2


if __name__ == "__main__":
    sys.exit(main())
