"""How fast weights are compared with their source, beside the conversion that made them and the reading that both need.

    python scripts/bench_verify.py [--quick] [--json FILE]

Routed experts of DeepSeek-R1's shapes, generated in FP8 blocks and converted to NVFP4, in a temporary folder (page cache):

  verify, kernels   `pipeline.verify.weights` with the compiled kernels, one thread and all
  verify, numpy     the same numbers by the reference, on a few tensors
  convert           read, amax, requantise, write, by the same kernels, one thread
  read              the limit: both checkpoints' bytes read into one buffer

GB/s are of the source's FP8 bytes; a second of CPU is what counts where machines are shared. The last line multiplies it out
to R1's routed experts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline import native  # noqa: E402
from pipeline.checkpoint import Checkpoint, Entry, ShardWriter  # noqa: E402
from pipeline.core.jsonio import write_json  # noqa: E402
from pipeline.formats import FORMATS, fast  # noqa: E402
from pipeline.formats.numerics import E4M3, Array  # noqa: E402
from pipeline.verify.rows import Arena, read_rows, row_pieces  # noqa: E402
from pipeline.verify.weights import compare_weights, num_threads  # noqa: E402
from scripts._options import result_file  # noqa: E402
from scripts.make_r1_headers import r1_config  # noqa: E402

SOURCE, TARGET = FORMATS["fp8_block"], FORMATS["nvfp4"]
SHAPES = {"gate": (2048, 7168), "up": (2048, 7168), "down": (7168, 2048)}
R1_EXPERT_BYTES = 653.9e9
REPEATS = 3


def source_tensors(experts: int) -> dict[str, dict[str, Array]]:
    """Normal weights in FP8 blocks; every tensor is the same pool, cut at another place."""
    weight = np.random.default_rng(0).normal(0, 0.02, SHAPES["gate"]).astype(np.float32)
    pool = SOURCE.quantize(weight, amax=0.0, input_scale=1.0)
    made = {}
    for number in range(experts):
        for offset, (name, (n, k)) in enumerate(SHAPES.items()):
            codes = np.roll(pool["weight"].view(np.uint8).reshape(-1), 7919 * (3 * number + offset)).view(E4M3)
            scales = pool["weight_scale_inv"].reshape(n // 128, k // 128)
            made[f"model.layers.3.mlp.experts.{number}.{name}_proj"] = {"weight": codes.reshape(n, k), "weight_scale_inv": scales}
    return made


def write(folder: Path, tensors: dict[str, dict[str, Array]]) -> Checkpoint:
    """As one file, which is all of a checkpoint that is needed here."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(r1_config()))
    dtypes = {"float8_e4m3fn": "F8_E4M3", "float32": "F32", "uint8": "U8"}
    plan = [(f"{m}.{s}", dtypes[a.dtype.name], a.shape) for m, stored in tensors.items() for s, a in stored.items()]
    with ShardWriter(folder / "model.safetensors", plan) as writer:
        for module, stored in tensors.items():
            for suffix, array in stored.items():
                writer.write(f"{module}.{suffix}", array)
    return Checkpoint.survey(folder)[0]


def convert(source: Checkpoint, out: Path) -> Checkpoint:
    """What conversion does to each tensor, without its overlap."""
    made = {}
    for entry in source.entries.values():
        stored = read_rows(entry, slice(0, entry.shape[0]))
        amax = fast.amax(SOURCE, stored)
        made[entry.place.module] = fast.requantize(SOURCE, stored, TARGET, amax=amax, input_scale=1.0)
    return write(out, made)


def read_all(*sides: Checkpoint) -> None:
    """Every byte, into the same buffer again and again."""
    arena = Arena()
    for entry in (entry for side in sides for entry in side.entries.values()):
        for rows in row_pieces(entry):
            arena.reset()
            read_rows(entry, rows, arena)


def timed(work: Callable[[], Any], num_bytes: int, repeats: int = REPEATS) -> dict[str, float]:
    """Best of some runs: GB/s a second of CPU and of wall clock."""
    runs = []
    for _ in range(repeats):
        cpu, wall = time.process_time(), time.perf_counter()
        work()
        runs.append((time.process_time() - cpu, time.perf_counter() - wall))
    return {
        "gb_per_cpu_s": round(num_bytes / min(run[0] for run in runs) / 1e9, 4),
        "gb_per_s": round(num_bytes / min(run[1] for run in runs) / 1e9, 4),
    }


def measure(folder: Path, experts: int) -> dict[str, Any]:
    """All rows."""
    source = write(folder / "source", source_tensors(experts))
    converted = convert(source, folder / "converted")
    entries = list(converted.entries.values())
    size, few = (sum(source.entries[entry.name].main.num_bytes for entry in some) for some in (entries, entries[:1]))

    def verify(some: list[Entry], threads: int) -> Callable[[], Any]:
        return lambda: list(compare_weights(source, some, threads))

    rows = {"verify, kernels, 1 thread": timed(verify(entries, 1), size)}
    rows[f"verify, kernels, {num_threads()} threads"] = timed(verify(entries, num_threads()), size)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kernels = os.environ.get(native.VARIABLE)
    os.environ[native.VARIABLE] = "off"
    rows["verify, numpy, 1 thread"] = timed(verify(entries[:1], 1), few, 1)
    os.environ.pop(native.VARIABLE) if kernels is None else os.environ.update({native.VARIABLE: kernels})
    rows["convert, 1 thread"] = timed(lambda: convert(source, folder / "again"), size)
    rows["read (limit)"] = timed(lambda: read_all(source, converted), size)
    speed = rows["verify, kernels, 1 thread"]["gb_per_cpu_s"]
    return {
        "rows": rows, "fp8_bytes": size, "kernels": list(native.levels()), "load": os.getloadavg()[0],
        "share_of_convert": round(speed / rows["convert, 1 thread"]["gb_per_cpu_s"], 3),
        "peak_rss_bytes": memory * (1 if sys.platform == "darwin" else 1024), "machine": platform.processor() or platform.machine(),
        "r1_core_minutes": round(R1_EXPERT_BYTES / 1e9 / speed / 60, 1), "numpy": np.__version__,
    }  # fmt: skip


def main() -> None:
    """Measure, print, and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer experts: under 50 s on 2 cores")
    parser.add_argument("--json", type=result_file, help="file for the numbers")
    options = parser.parse_args()
    if not native.available():
        print(f"without compiled kernels, all rows are numpy's: {native.problem() or native.VARIABLE + '=off'}")
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), 1 if not native.available() else 2 if options.quick else 8)
    print(f"{'':32}  GB/s a CPU second  GB/s of wall clock  (load {result['load']:.1f})")
    for name, row in result["rows"].items():
        print(f"{name:32}  {row['gb_per_cpu_s']:17.3f}  {row['gb_per_s']:18.3f}")
    print(f"{result['share_of_convert']:.0%} of convert's speed; R1's 654 GB of experts: {result['r1_core_minutes']} core-minutes")
    if options.json:
        write_json(options.json, result)


if __name__ == "__main__":
    main()
