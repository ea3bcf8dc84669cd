#!/usr/bin/env python3
"""R1's kernels on this GPU beside eager torch, torch.compile, every peer that loads, and the limit, in one run.

    python scripts/bench_plugins.py [--only NAME ...] [--quick] [--json FILE] [--peers DIR]
    python scripts/bench_plugins.py --table FILE ...             # results as the README's table; needs no GPU

Times are medians of CUDA graph replays, in microseconds. `--peers DIR`: extension libraries (*.so) of vLLM and sgl-kernel to
load; others (flashinfer, trtllm_kernel, flash_mla, deep_gemm) are taken if they can be imported. `overlap` is ours with
programmatic dependent launch, `floor` an empty kernel, `limit` the floor plus the slower of the bytes that must move (over the
measured bandwidth of copying, or of reading alone) and the arithmetic over the measured rate. Every answer is compared with the
reference's.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from plugins.bench import Bench  # noqa: E402
from plugins.timing import machine  # noqa: E402
from scripts._options import result_file  # noqa: E402

SHAPE = ("model", "product", "heads", "experts", "batch", "tokens", "context", "length", "scales", "dtype", "cache")


def main() -> int:
    """Measure, print a table; the file is written after every row."""
    plugins = sorted(file.parent.name for file in (ROOT / "plugins").glob("*/bench.py"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=plugins, default=plugins, help="these plugins")
    parser.add_argument("--quick", action="store_true", help="DeepSeek-R1 only, no torch.compile")
    parser.add_argument("--json", type=result_file, help="write the rows and the machine here")
    parser.add_argument("--peers", type=Path, help="folder of extension libraries to compare with")
    parser.add_argument("--table", type=Path, nargs="+", help="print these results as a table of Markdown; a row's last counts")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(latest(options.table))))
        return 0
    if not torch.cuda.is_available():
        sys.exit("No GPU that torch can use: this benchmark needs one.")
    bench = Bench(options.quick)
    bench.notes += [note for library in sorted(options.peers.glob("*.so")) if (note := load(library))] if options.peers else []
    rows = []
    for row in measured(options.only, bench):
        rows.append(row)
        print(line(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps(described(rows, bench), indent=1) + "\n", encoding="utf-8")
    print("\n".join(sorted(set(bench.notes))))
    return 0


def measured(plugins: list[str], bench: Bench) -> Iterator[dict[str, Any]]:
    """Every plugin's rows."""
    for name in plugins:
        yield from importlib.import_module(f"plugins.{name}.bench").rows(bench)


def described(rows: list[dict[str, Any]], bench: Bench) -> dict[str, Any]:
    """Rows, what they are measured against, and the machine."""
    bandwidths = {"copy_gb_per_s": round(bench.bandwidth / 1e9), "read_gb_per_s": round(bench.read_bandwidth / 1e9)}
    ceilings = bandwidths | {"bf16_tflop_per_s": round(bench.flops / 1e12)}
    return {"rows": rows, **ceilings, "notes": sorted(set(bench.notes)), **machine()}


def latest(files: list[Path]) -> list[dict[str, Any]]:
    """The rows of several results; of those of one plugin and shape, that of the last file."""
    rows = {}
    for file in files:
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
            rows[row["plugin"], *(row.get(key) for key in SHAPE)] = row
    return list(rows.values())


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """A line a plugin and shape: ours, with overlap, cold, the best peer's, eager torch's, and the limit; microseconds."""
    yield "| kernel | shape | ours | *pdl* | cold | best peer | peer, cold | eager torch | limit |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        peer = f"{row['peer']} {row['peer_us']:.1f}" if row["peer"] else ""
        times = [row.get(key) for key in ("ours_us", "overlap_us", "cold_us", "peer_cold_us", "eager_us", "limit_us")]
        shown = [f"{time:.1f}" if time else "" for time in times]
        yield f"| `{row['plugin']}` | {shape_of(row)} | {' | '.join((*shown[:3], peer, *shown[3:]))} |"


def shape_of(row: dict[str, Any]) -> str:
    """What was measured, in words."""
    return " ".join(str(row[key]) for key in SHAPE if key in row)


def load(library: Path) -> str:
    """Nothing, or why the library does not load here."""
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"{library.name}: {str(error).splitlines()[0]}"
    return ""


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    times = {name: row[f"{name}_us"] for name in ("ours", "overlap", "cold", "eager", "compile") if row.get(f"{name}_us")}
    times |= row["peers"] | {f"{name} cold": time for name, time in row.get("peers_cold", {}).items()}
    shown = "  ".join(f"{name} {time:.2f}" for name, time in times.items())
    differ = f", {row['tokens_that_differ']} differ" if "tokens_that_differ" in row else ""
    tail = f"limit {row['limit_us']:.2f}, floor {row['floor_us']:.2f}, error {row['error']:.1e}{differ}"
    return f"{row['plugin']:16s} {shape_of(row):18s}  {shown}  {tail}"


if __name__ == "__main__":
    sys.exit(main())
