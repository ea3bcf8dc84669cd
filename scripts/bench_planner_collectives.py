#!/usr/bin/env python3
"""The planner's collective times, and its order of layouts for one layer, beside what was measured.

    python scripts/bench_planner_collectives.py COLLECTIVES [--block BLOCK] [--json OUT]

COLLECTIVES and BLOCK are files of scripts/bench_collectives.py and scripts/bench_block.py. Predicted is what the speed model takes
for one collective under attention DP: its latency, and the bytes that a rank receives over the calibrated share of the link. That
share and latency were fitted to whole serving runs, where ranks wait for one another, quantise and unpack within them; alone, no
rank is late. So beside each kind stands what a straight line through its measured times says: microseconds at zero bytes, and
GB/s. (Held at the measured share, 0.45, the fit predicts runs that it has not seen no better, 3.6 % either way: what packing costs
then moves to other terms.) A layer is a step's terms without the host's and the head, over the layers; what its collectives take
in place is the time without them less. All is R1 in FP8.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.config.load import load  # noqa: E402
from pipeline.models.arch import Arch  # noqa: E402
from pipeline.planner.perf import Machine, PerfCase, checkpoint_formats  # noqa: E402
from pipeline.planner.perf.calibration import shipped  # noqa: E402
from pipeline.planner.perf.step import SWITCHES, decode_terms, link_speed, start_s  # noqa: E402
from pipeline.planner.perf.work import columns  # noqa: E402
from scripts._options import result_file  # noqa: E402

LAYER = ("kernels", "collective_latency", "collective_transfer", "dense", "experts", "attention", "elementwise")
"""Terms of a step that its layers make."""


def main() -> int:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("collectives", type=Path, help="a file of bench_collectives.py")
    parser.add_argument("--block", type=Path, help="a file of bench_block.py")
    parser.add_argument("--json", type=result_file, help="write the result here")
    options = parser.parse_args()
    result = compared(json.loads(options.collectives.read_text(encoding="utf-8")))
    if options.block:
        result |= {"layers": layers(json.loads(options.block.read_text(encoding="utf-8")))}
    print("\n".join(table(result)))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def compared(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Every row of the file with its prediction, and each kind's line."""
    case = case_of(measured, tp=measured["ranks"], adp=True, ep=measured["ranks"])
    cols, e = columns([case], SWITCHES), shipped().arrays([case])
    start, speed = float(start_s(cols, e)[0]) * 1e6, float(link_speed(cols, e)[0]) / 1e9
    rows = []
    for row in measured["rows"]:
        predicted = round(start + row["received_bytes"] / speed / 1e3, 2)
        kept = {name: row[name] for name in ("collective", "precision", "tokens_a_rank", "received_bytes", "us")}
        rows.append(kept | {"predicted_us": predicted, "ratio": round(predicted / row["us"], 3)})
    return {"start_us": round(start, 2), "gb_per_s": round(speed, 1), "kinds": kinds(rows), "rows": rows}


def kinds(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Start and speed of each collective and precision, and how the predictions for it lie."""
    found = []
    for name in dict.fromkeys((row["collective"], row["precision"]) for row in rows):
        own = [row for row in rows if (row["collective"], row["precision"]) == name]
        us, size, ratio = (np.array([row[key] for row in own]) for key in ("us", "received_bytes", "ratio"))
        slope, start = np.polyfit(size, us, 1, w=1 / us)
        line = {"start_us": round(float(start), 2), "gb_per_s": round(1e-3 / float(slope), 1)}
        ratios = [float(ratio[0]), round(float(np.median(ratio)), 3), float(ratio[-1])]
        found.append({"collective": name[0], "precision": name[1], **line, "ratio_fewest_median_most": ratios})
    return found


def layers(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The fastest measured variant of each layout at each number of tokens, and its prediction; `exchange_us` is what collectives
    take in it: the time without them less."""
    best: dict[tuple[int, str], Mapping[str, Any]] = {}
    silent: dict[tuple[int, str], float] = {}
    for row in measured["rows"]:
        key = row["tokens"], row["layout"]
        if row["exchange"]:
            best[key] = min(best.get(key, row), row, key=lambda one: one["us"])
        else:
            silent[key] = min(silent.get(key, row["us"]), row["us"])
    found = []
    for (tokens, layout), row in best.items():
        adp, ep = layout.startswith("ADP"), measured["ranks"] if "EP" in layout else 1
        case = case_of(measured, tp=measured["ranks"], adp=adp, ep=ep)
        cols, e = columns([case], SWITCHES), shipped().arrays([case])
        terms = decode_terms(cols, e, np.array([float(tokens)]), np.array([float(measured["context"])]))
        terms["dense"] = terms["dense"] - tokens / (measured["ranks"] if adp else 1) * cols.shard.head_s / e["dense_flops"]
        parts = {name: round(float(terms[name][0]) * 1e6 / case.arch.num_hidden_layers, 1) for name in LAYER}
        us, predicted = row["us"], round(sum(parts.values()), 1)
        exchange = round(us - silent[tokens, layout], 1) if (tokens, layout) in silent else None
        beside = {"predicted_us": predicted, "ratio": round(predicted / us, 3), "exchange_us": exchange, "terms": parts}
        found.append({"tokens": tokens, "layout": layout, "us": us, **beside})
    return found


def case_of(measured: Mapping[str, Any], tp: int, adp: bool, ep: int) -> PerfCase:
    """DeepSeek-R1 in FP8 with a BF16 cache on the machine of the file."""
    config = load([f"+hw={measured['device'].split()[-1].lower()}", "model=deepseek_r1"])
    arch, formats = Arch.from_hf(dict(config.model.hf)), checkpoint_formats("fp8")
    return PerfCase(
        machine=Machine.of(config.hw), arch=arch, formats=formats, kv_format="bf16", tp=tp, ep=ep, attention_dp=adp, concurrency=1,
        isl=1024, osl=1024, kv_tokens=1e6, runner="direct",
    )  # fmt: skip


def table(result: Mapping[str, Any]) -> list[str]:
    """What is printed."""
    lines = [f"{'collective':21s} {'':6s} {'tokens a rank':>13s} {'us':>9s} {'predicted':>10s} {'predicted/measured':>19s}"]
    for row in result["rows"]:
        name = f"{row['collective']:21s} {row['precision']:6s} {row['tokens_a_rank']:13d}"
        lines.append(f"{name} {row['us']:9.1f} {row['predicted_us']:10.1f} {row['ratio']:19.2f}")
    lines.append(f"\nplanner: {result['start_us']:.1f} us + bytes at {result['gb_per_s']:.0f} GB/s; measured:")
    for kind in result["kinds"]:
        name = f"{kind['collective']:21s} {kind['precision']:6s} {kind['start_us']:5.1f} us + bytes at {kind['gb_per_s']:4.0f} GB/s"
        ratios = ", ".join(f"{ratio:.2f}" for ratio in kind["ratio_fewest_median_most"])
        lines.append(f"{name}; predicted/measured {ratios} (fewest tokens, median, most)")
    for row in result.get("layers", ()):
        name = f"one layer, {row['tokens']:4d} tokens, {row['layout']:9s}"
        line = f"{name} {row['us']:8.1f} us, predicted {row['predicted_us']:8.1f} ({row['ratio']:.2f})"
        share = row["terms"]["collective_latency"] + row["terms"]["collective_transfer"]
        lines.append(line + (f"; of it collectives {row['exchange_us']}, predicted {share:.1f}" if row["exchange_us"] else ""))
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
