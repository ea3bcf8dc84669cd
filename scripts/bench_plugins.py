#!/usr/bin/env python3
"""R1's kernels on this GPU beside eager torch, torch.compile, every peer that loads, and the limit, in one run.

    python scripts/bench_plugins.py [--only NAME ...] [--quick] [--json FILE] [--peers DIR]
    python scripts/bench_plugins.py --table FILE                 # a result as tables of Markdown; needs no GPU
    python scripts/bench_plugins.py --readme FILE                # the same, into README.md, between its two comments

Times are medians of CUDA graph replays, in microseconds. `--peers DIR`: extension libraries (*.so) of vLLM and sgl-kernel to
load; others (flashinfer, trtllm_kernel, flash_mla, deep_gemm) are taken if they can be imported. `overlap` is ours with
programmatic dependent launch, `floor` an empty kernel, `limit` the floor plus the slower of the bytes that must move (over the
measured bandwidth of copying, or of reading alone) and the arithmetic over the measured rate. Every answer is compared with the
reference's. A plugin that fails leaves a note and the rows that it had; the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from plugins.bench import Bench  # noqa: E402
from plugins.timing import machine, one_stream  # noqa: E402
from scripts._options import result_file  # noqa: E402
from scripts._readme import placed  # noqa: E402

Row = dict[str, Any]
SIZES = "heads", "experts", "batch", "rows", "tokens", "context", "length"
SHAPE = ("model", "product", *SIZES, "scales", "dtype", "cache")
SHOWN: dict[str, dict[str, tuple[Any, ...]]] = {
    "topk_router": {"model": ("deepseek_r1",), "tokens": (1, 256, 1024, 4096)},
    "router_gemm": {"tokens": (1, 2, 4, 8, 16, 32, 64)},
    "qkv_a_gemm": {"tokens": (1, 16)},
    "norm_rope_cache": {"tokens": (1, 4096), "cache": ("bf16",)},
    "fp8_quantize": {"tokens": (1, 1024, 4096)},
    "nvfp4_quantize": {"tokens": (4096,), "scales": ("tiled",)},
    "kv_quantize": {"tokens": (4096,), "dtype": ("float8_e4m3fn",)},
    "fp4_pack": {"tokens": (4096,)},
    "mla_decode": {"heads": (128,), "batch": (1, 64), "length": (4096,)},
    "mla_prefill": {"heads": (128,), "batch": (1,), "tokens": (512, 4096), "context": (512, 4096)},
    "mla_absorb": {"heads": (128,), "tokens": (1,)},
    "moe_gate_up": {"rows": (8, 128), "dtype": ("fp8",)},
    "moe_down": {"rows": (8,), "dtype": ("fp8",)},
    "moe_fp8_block": {"experts": (256,), "tokens": (64,)},
    "moe_w4a16_nvfp4": {"experts": (256,), "tokens": (64,)},
}
"""Kernel -> what a row must be to stand in the table; where ours loses stands in the second table, whichever the row."""
LAST = "moe_grouped_gemm", "fp4_allgather"
"""Those that use other streams, or whose peers may: that slows down all that is measured after them (`timing.one_stream`)."""
IMPORTED = "deep_gemm", "flash_mla", "flashinfer", "trtllm_kernel"
"""Peers that are packages."""


def main() -> int:
    """Measure, print a line a row; the file is written after each."""
    plugins = benchmarks()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=plugins, default=plugins, help="these plugins")
    parser.add_argument("--quick", action="store_true", help="DeepSeek-R1 only, no torch.compile")
    parser.add_argument("--json", type=result_file, help="write the rows and the machine here")
    parser.add_argument("--peers", type=Path, help="folder of extension libraries to compare with")
    parser.add_argument("--table", type=Path, help="print this result's tables")
    parser.add_argument("--readme", type=Path, help="write this result's tables into README.md")
    options = parser.parse_args()
    if file := options.table or options.readme:
        return tabled(json.loads(file.read_text(encoding="utf-8"))["rows"], ROOT / "README.md" if options.readme else None)
    if not torch.cuda.is_available():
        sys.exit("No GPU that torch can use: this benchmark needs one.")
    with one_stream():
        bench, result = Bench(options.quick), Result(options.json)
        for library in sorted(options.peers.glob("*.so")) if options.peers else ():
            load(library, bench)
        failed = [name for name in plugins if name in options.only and not measured(name, bench, result)]
        result.peers = versions(options.peers)
        result.written(bench)
    print("\n".join(bench.notes))
    return int(bool(failed))


def benchmarks() -> list[str]:
    """Plugins, in the order in which they are measured."""
    return sorted((file.parent.name for file in (ROOT / "plugins").glob("*/bench.py")), key=lambda name: (name in LAST, name))


class Result:
    """The rows so far, and the file that has them at any time."""

    def __init__(self, file: Path | None) -> None:
        self.file, self.rows, self.seconds = file, list[Row](), dict[str, float]()
        self.machine, self.peers = machine(), dict[str, str]()

    def written(self, bench: Bench) -> None:
        """Rows, what they are measured against, seconds that each plugin took, peers' versions in the end, and the machine."""
        if self.file is None:
            return
        bandwidths = {"copy_gb_per_s": round(bench.bandwidth / 1e9), "read_gb_per_s": round(bench.read_bandwidth / 1e9)}
        ceilings = bandwidths | {"bf16_tflop_per_s": round(bench.flops / 1e12)}
        whole = {"rows": self.rows, **ceilings, "notes": bench.notes, "seconds": self.seconds, "peers": self.peers, **self.machine}
        self.file.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def measured(name: str, bench: Bench, result: Result) -> bool:
    """Whether all of a plugin's rows could be measured; those before a failure count."""
    begin = time.monotonic()
    try:
        bench.measure_floor()
        for row in importlib.import_module(f"plugins.{name}.bench").rows(bench):
            result.rows.append(row)
            print(line(row), flush=True)
            result.written(bench)
    except Exception as error:  # any: the other plugins' rows are worth having
        bench.note(f"{name} stopped: {type(error).__name__} {str(error).strip()[:300]}")
        return False
    finally:
        result.seconds[name] = round(time.monotonic() - begin, 1)
        torch.cuda.empty_cache()
    return True


def versions(libraries: Path | None) -> dict[str, str]:
    """Of the peers: distributions that were imported, and of extension libraries the first digits of their SHA-256."""
    owners = metadata.packages_distributions()
    imported = {name: metadata.version(name) for peer in IMPORTED if peer in sys.modules for name in owners.get(peer, ())}
    files = sorted(libraries.glob("*.so")) if libraries else ()
    return imported | {file.name: hashlib.sha256(file.read_bytes()).hexdigest()[:12] for file in files}


def load(library: Path, bench: Bench) -> None:
    """An extension library, or a note of why it does not load here."""
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        bench.note(f"{library.name}: {str(error).splitlines()[0]}")


def line(row: Row) -> str:
    """A row for people."""
    times = {name: row[f"{name}_us"] for name in ("ours", "overlap", "cold", "eager", "compile") if row.get(f"{name}_us")}
    times |= row["peers"] | {f"{name} cold": time for name, time in row.get("peers_cold", {}).items()}
    shown = "  ".join(f"{name} {time:.2f}" for name, time in times.items())
    more = [f"{row['tokens_that_differ']} differ"] if "tokens_that_differ" in row else []
    more += [f"{key.replace('_', ' ')} {row[key]} %" for key in ("loses", "loses_cold") if key in row]
    tail = ", ".join([f"limit {row['limit_us']:.2f}, floor {row['floor_us']:.2f}, error {row['error']:.1e}", *more])
    return f"{row['plugin']:16s} {shape_of(row):18s}  {shown}  {tail}"


def shape_of(row: Row) -> str:
    """What was measured, in words."""
    return " ".join(str(row[key]) for key in SHAPE if key in row)


# --- tables ------------------------------------------------------------------------------------------------------


def tabled(rows: list[Row], readme: Path | None) -> int:
    """Print the tables, or write them into the file."""
    if readme is None:
        print(tables(rows))
    else:
        readme.write_text(inserted(readme.read_text(encoding="utf-8"), rows), encoding="utf-8")
    return 0


def inserted(text: str, rows: list[Row]) -> str:
    """The text with the tables between its two comments."""
    return placed(text, "plugins' table", tables(rows))


def tables(rows: list[Row]) -> str:
    """The shown rows, then all that ours loses."""
    return "\n".join([*table(row for row in rows if is_shown(row)), "", *losses(rows)])


def is_shown(row: Row) -> bool:
    """Whether it stands in the first table."""
    wanted = SHOWN.get(row["plugin"])
    return wanted is not None and all(row.get(key) in values for key, values in wanted.items())


def table(rows: Iterator[Row]) -> Iterator[str]:
    """A line a row; where it was measured with nothing in the L2, too, both times."""
    yield "| kernel | shape | ours | *pdl* | best peer | eager | compile | limit | behind |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        peer = f"{row['peer']} {both(row, 'peer_us', 'peer_cold_us')}" if row["peer"] else "none"
        plain = [both(row, f"{name}_us") for name in ("eager", "compile", "limit")]
        cells = [labelled(row), both(row, "ours_us", "cold_us"), both(row, "overlap_us"), peer, *plain, percent(row)]
        yield f"| `{row['plugin']}` | {' | '.join(cells)} |"


def both(row: Row, hot: str, cold: str = "") -> str:
    """12.3, or 12.3 / 14.5 with the cold time."""
    return " / ".join(f"{row[key]:,.{0 if row[key] >= 100 else 1}f}" for key in (hot, cold) if row.get(key) is not None)


def percent(row: Row) -> str:
    """By how much ours loses, hot or cold."""
    return ", ".join(f"{kind}{row[key]:.0f} %" for key, kind in (("loses", ""), ("loses_cold", "cold ")) if key in row)


def labelled(row: Row) -> str:
    """The shape, each size with its name."""
    words = [str(row[key]) for key in SHAPE if key in row and key not in SIZES and key != "model"]
    return ", ".join([f"{key} {row[key]:,}" for key in sizes_of(row)] + words)


def sizes_of(row: Row) -> list[str]:
    """Its sizes' names; tokens that follow from sequences, or from an expert's rows, are left out."""
    derived = ["tokens"] if "length" in row or "rows" in row else []
    return [key for key in SIZES if key in row and key not in derived]


def losses(rows: list[Row]) -> Iterator[str]:
    """Kernels and variants where ours is behind, with each size's per cent, and why."""
    yield "| ours loses | to | behind, at which sizes | why |"
    yield "|---|---|---|---|"
    lost = [row for row in rows if "loses" in row or "loses_cold" in row]
    for (plugin, kind, rival, why), group in groupby(sorted(lost, key=_reason), key=_reason):
        found = list(group)
        sizes = [key for key in sizes_of(found[0]) if len({row[key] for row in found}) > (len(found) > 1)]
        at = "; ".join(f"{percent(row)} at {' x '.join(f'{row[key]:,}' for key in sizes)}" for row in found)
        yield f"| {' '.join((f'`{plugin}`', kind)).strip()} | {rival} | {' x '.join(sizes)}: {at} | {why} |"


def _reason(row: Row) -> tuple[str, str, str, str]:
    kind = " ".join(str(row[key]) for key in SHAPE if key in row and key not in SIZES)
    return row["plugin"], kind, row.get("loses_to") or row["peer"], row.get("why", "")


if __name__ == "__main__":
    sys.exit(main())
