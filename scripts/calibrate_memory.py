#!/usr/bin/env python3
"""Fit the memory model's constants to measured starts of TensorRT-LLM, and say how far it is off.

    python scripts/calibrate_memory.py --points FILE [--json OUT] [--write]

FILE is a JSON list of starts: hw, prec (fp8, fp4v1, fp4v2), tp, ep, adp, mtp, moe (backend), pw (piecewise graphs), img
(version), conc (largest CUDA graph), mnt (max_num_tokens), frac (free_gpu_memory_fraction), kvtok (KV tokens it logged).
For every start the model's weights and formulas are subtracted from the memory that was not free; what remains is fitted
by least squares, each start weighted so that an error counts as a share of its KV tokens. Three errors are printed:
  fitted           on the points that were fitted
  cross-validated  each configuration (all but concurrency and prompt length) predicted from the others alone
  shipped          of the constants in pipeline/planner/memory_terms.json on these points
`--write` replaces that file.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.config.load import load  # noqa: E402
from pipeline.config.schema import Config  # noqa: E402
from pipeline.core.errors import ConfigError  # noqa: E402
from pipeline.models.arch import Arch  # noqa: E402
from pipeline.planner.memory import kv_tokens, memory_of  # noqa: E402
from pipeline.planner.overhead import features, formulas  # noqa: E402
from pipeline.planner.params import LINEAR_CLASSES  # noqa: E402
from pipeline.planner.setup import Layout, Setup  # noqa: E402
from scripts._options import result_file  # noqa: E402

TERMS_FILE = ROOT / "pipeline" / "planner" / "memory_terms.json"
NVFP4 = dict.fromkeys(("dense_mlp", "shared_experts", "routed_experts"), "nvfp4")
FORMATS = {"fp8": dict.fromkeys((*LINEAR_CLASSES, "mtp"), "fp8_block"), "fp4v1": NVFP4, "fp4v2": NVFP4 | {"o_proj": "nvfp4"}}
CONFIGURATION = ("hw", "prec", "tp", "ep", "adp", "mtp", "moe", "pw", "img")
MEANING = {
    "base": "CUDA context, workspaces, static tensors",
    "graph": "each captured CUDA graph",
    "piecewise": "piecewise CUDA graphs",
    "piecewise_long": "more of them above 8,320 tokens; cause unknown",
    "deepgemm": "DEEPGEMM in place of TRTLLM, beside its workspace",
    "fp4_spread": "FP4 experts over 8 or more ranks; cause unknown, not seen at TP4+EP4",
    "line_1_3": "version line 1.3",
}
SOURCES = [
    "server logs of zufayu/ClaudeSkillsE2EPerf @f655ecbe: DeepSeek-R1 on 8 B200, TensorRT-LLM 1.2.0rc6 to 1.3.0rc10",
    "NVIDIA/TensorRT-LLM tensorrt_llm/_torch/modules/fused_moe/fused_moe_deepgemm.py (workspace, chunk limit)",
    "NVIDIA/nccl src/init.cc, src/transport/nvls.cc; issue 1685 (sizes of NCCL's buffers)",
    "NVIDIA/TensorRT-LLM tensorrt_llm/plugin/plugin.py, tensorrt_llm/_torch/distributed/ops.py (all-reduce workspaces)",
]


@dataclass(frozen=True, slots=True)
class Start:
    """One measured start."""

    setup: Setup
    configuration: str
    kv_tokens: int
    counts: NDArray[np.float64]
    """How often each term counts."""
    rest: float
    """Bytes that weights and formulas leave to be explained."""
    weight: float
    """1 / bytes that were free."""

    def predicted(self, constants: NDArray[np.float64]) -> float:
        """KV tokens with these constants."""
        free = 1 / self.weight + self.rest - self.counts @ constants
        return self.kv_tokens * free * self.weight


def main() -> int:
    """Fit, validate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=Path, required=True)
    parser.add_argument("--json", type=result_file, help="write errors and constants here")
    parser.add_argument("--write", action="store_true", help=f"replace {TERMS_FILE.relative_to(ROOT)}")
    options = parser.parse_args()
    starts = [start(point) for point in json.loads(options.points.read_text(encoding="utf-8"))]
    result = report(starts)
    print("\n".join(table(result)))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.write:
        kept = {key: result[key] for key in ("terms", "points_scored", "configurations", "fitted", "cross_validated")}
        TERMS_FILE.write_text(json.dumps(kept | {"sources": SOURCES}, indent=1) + "\n", encoding="utf-8")
    return 0


def start(point: dict[str, Any]) -> Start:
    """One row of the points file."""
    setup = setup_of(point)
    (rank,) = memory_of(setup)
    free = point["kvtok"] * rank.kv_bytes_counted / point["frac"]
    known = sum(formulas(setup, setup.max_num_tokens).values())
    counts = features(setup, setup.max_num_tokens, setup.captured)
    return Start(
        setup=setup,
        configuration=" ".join(f"{name}={point[name]}" for name in CONFIGURATION),
        kv_tokens=point["kvtok"],
        counts=np.array([float(counts[name]) for name in MEANING]),
        rest=float(rank.visible - rank.loaded - known - free),
        weight=1 / free,
    )


def setup_of(point: dict[str, Any]) -> Setup:
    """A row as the planner's question."""
    config = _config(point["hw"].lower())
    if point["prec"] not in FORMATS:
        raise ConfigError(f"prec={point['prec']} is not known: choose one of {', '.join(FORMATS)}.")
    version = re.match(r"\d+\.\d+", point["img"])
    return Setup(
        arch=Arch.from_hf(config.model.hf),
        hw=config.hw,
        formats=FORMATS[point["prec"]],
        layout=Layout(point["tp"], int(point["ep"]), point["adp"]),
        version=version.group() if version else "1.2",
        mtp=point["mtp"],
        moe_backend=point["moe"],
        max_num_tokens=point["mnt"],
        graph_batch=point["conc"],
        piecewise=point["pw"],
        fraction=point["frac"],
    )


@cache
def _config(hw: str) -> Config:
    return load([f"+hw={hw}", "model=deepseek_r1"])


def fit(starts: list[Start]) -> NDArray[np.float64]:
    """Least squares; a term that no start has becomes 0."""
    rows = np.array([item.counts * item.weight for item in starts])
    return np.linalg.lstsq(rows, np.array([item.rest * item.weight for item in starts]), rcond=None)[0]


def report(starts: list[Start]) -> dict[str, Any]:
    """Errors and constants."""
    constants = fit(starts)
    names = sorted({item.configuration for item in starts})
    held_out = {
        name: _errors(own, fit([item for item in starts if item.configuration != name]))
        for name in names
        if (own := [item for item in starts if item.configuration == name])
    }
    shipped = np.array([float(kv_tokens(item.setup)) / item.kv_tokens - 1 for item in starts])
    seen = np.count_nonzero([item.counts for item in starts], axis=0)
    validated = _summary(np.concatenate(list(held_out.values())))
    return {
        "points_scored": len(starts),
        "mean_abs_error": validated["mean_abs_error"],
        "configurations": len(names),
        "fitted": _summary(_errors(starts, constants)),
        "cross_validated": validated,
        "shipped": _summary(shipped),
        "by_configuration": {name: _summary(errors) | {"points": len(errors)} for name, errors in held_out.items()},
        "terms": {
            name: {"bytes": round(float(value)), "starts": int(count), "means": MEANING[name]}
            for name, value, count in zip(MEANING, constants, seen, strict=True)
        },
    }


def table(result: dict[str, Any]) -> list[str]:
    """The report as text."""
    lines = [f"{result['points_scored']} starts, {result['configurations']} configurations; error of the KV tokens:"]
    for kind in ("fitted", "cross_validated", "shipped"):
        row = result[kind]
        lines.append(f"  {kind:<16} mean {row['mean_abs_error']:.2%}  worst {row['max_abs_error']:.2%}  bias {row['bias']:+.2%}")
    lines += [f"  {row['mean_abs_error']:7.2%} of {row['points']:2}  {name}" for name, row in result["by_configuration"].items()]
    for name, row in result["terms"].items():
        lines.append(f"{name:<16}{row['bytes'] / 2**30:8.3f} GiB  {row['starts']:2} starts  {row['means']}")
    return lines


def _errors(starts: list[Start], constants: NDArray[np.float64]) -> NDArray[np.float64]:
    """Predicted / measured - 1."""
    return np.array([item.predicted(constants) / item.kv_tokens - 1 for item in starts])


def _summary(errors: NDArray[np.float64]) -> dict[str, float]:
    size = np.abs(errors)
    return {
        "mean_abs_error": round(float(size.mean()), 6),
        "median_abs_error": round(float(np.median(size)), 6),
        "max_abs_error": round(float(size.max()), 6),
        "bias": round(float(errors.mean()), 6),
    }


if __name__ == "__main__":
    sys.exit(main())
