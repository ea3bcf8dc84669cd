"""DeepSeek-R1's checkpoint with every header, and with weights in a few of its shards: what `bench_convert.py` converts.

    python scripts/r1_shards.py FOLDER [--shards 163] [--fill 4]

The other shards are holes. Weights are normal numbers in FP8 blocks, cut from one generated pool at random places, so they
cost little to make and nothing is to be gained from their repeating; norms and the router are normal, too.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.checkpoint.directio import aligned, allocate, open_direct, write_all  # noqa: E402
from pipeline.checkpoint.reader import TensorInfo, read_header  # noqa: E402
from pipeline.formats import FORMATS  # noqa: E402
from pipeline.formats.numerics import BF16  # noqa: E402
from scripts.make_r1_headers import R1_SHARDS, r1_config, write  # noqa: E402

__all__ = ["fill", "make", "middle"]

POOL_SHAPE = (2048, 7168)
WRITE_BYTES = 16 << 20


def make(folder: Path, num_shards: int, num_filled: int) -> list[Path]:
    """A checkpoint of `num_shards` files; returns those that have weights."""
    write(folder, r1_config(), num_shards)
    chosen = middle(sorted(folder.glob("*.safetensors")), num_filled)
    for number, file in enumerate(chosen):
        fill(file, number)
    return chosen


def middle(files: list[Path], count: int) -> list[Path]:
    """Files of routed experts, which are 97 % of R1, each with what else lies between them."""
    start = (len(files) - count) // 2
    return files[start : start + count]


def fill(file: Path, seed: int) -> None:
    """Give every tensor of a shard a content, past the page cache."""
    rng = np.random.default_rng(seed)
    pools = _pools(rng)
    infos, size = list(read_header(file).values()), file.stat().st_size
    with file.open("rb") as stream:
        header = memoryview(stream.read(infos[0].start))
    descriptor, _ = open_direct(file, os.O_RDWR)
    buffer, used, offset = allocate(WRITE_BYTES), 0, 0
    for data in chain([header], *(_content(info, pools, rng) for info in infos)):
        while data:
            count = min(len(data), WRITE_BYTES - used)
            buffer[used : used + count], data, used = data[:count], data[count:], used + count
            if used == WRITE_BYTES:
                write_all(descriptor, buffer, offset)
                offset, used = offset + used, 0
    write_all(descriptor, buffer[: aligned(used)], offset)
    os.ftruncate(descriptor, size)
    os.fsync(descriptor)
    os.close(descriptor)


def _pools(rng: np.random.Generator) -> dict[str, memoryview]:
    weight = rng.standard_normal(POOL_SHAPE, np.float32) * np.float32(0.02)
    codes = FORMATS["fp8_block"].quantize(weight, amax=0.0, input_scale=1.0)["weight"]
    scales = np.abs(rng.standard_normal(1 << 18, np.float32)) * np.float32(1e-4) + np.float32(1e-4)
    arrays = {"F8_E4M3": codes, "BF16": weight.astype(BF16), "F32": scales}
    return {dtype: memoryview(array.reshape(-1).view(np.uint8)) for dtype, array in arrays.items()}


def _content(info: TensorInfo, pools: dict[str, memoryview], rng: np.random.Generator) -> Iterator[memoryview]:
    """Cuts from the pool of the tensor's type."""
    pool, left = pools[info.dtype], info.num_bytes
    while left:
        start = int(rng.integers(0, len(pool) // 2)) // 128 * 128
        data = pool[start : start + min(left, len(pool) - start)]
        yield data
        left -= len(data)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shards", type=int, default=R1_SHARDS)
    parser.add_argument("--fill", type=int, default=4)
    arguments = parser.parse_args()
    for file in make(arguments.folder, arguments.shards, arguments.fill):
        print(f"{file}: {file.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
