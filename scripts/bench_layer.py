#!/usr/bin/env python3
"""One decoder layer of DeepSeek-R1 at its real size, decoding: what each optimisation is worth, added one by one and left out.

    python scripts/bench_layer.py [--quick] [--json FILE]

`scripts/_layer.py` is the layer: latent attention (128 heads, absorbed, paged cache), 256 routed experts, 8 a token, and the shared
one, random weights in R1's FP8 with 128x128 scales, all on one GPU. The first line is plain torch, eager, on weights dequantised
to BF16 before; each line after it adds a step to all before it (`ladder`), in a CUDA graph from the second on. Below are all steps
but one (`without`): without `graph` the same kernels are launched one by one.

`us` is the median of graph replays (without graph: of wall clock). `gain` is the line before over this one, and under `without`
the layer without the step over the one with all. `error`: relative to the first line, of what the layer adds to its input, over
tokens that have the same experts there; `rerouted`: share of those that have not (random weights make many choices close).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from plugins.timing import clocked, graph_seconds, machine  # noqa: E402
from scripts._layer import FASTEST, R1, STEPS, Layer, State, deviation  # noqa: E402
from scripts._options import result_file  # noqa: E402

BATCHES, QUICK_BATCHES, LENGTH = (1, 8, 32, 128), (1, 32), 4096
LINE = "{batch:4d} {kind:7s} {step:16s} {us:9.1f} us  gain {gain:5.2f}  error {error:.1e}, rerouted {rerouted:.1%}"
WEIGHTS = "random FP8, 128x128 scales; plain lines: the same, dequantised to BF16 before"


def main() -> int:
    """Every batch, every line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="batches 1 and 32")
    parser.add_argument("--json", type=result_file, help="write the rows and the machine here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("No GPU that torch can use: this benchmark needs one.")
    layer, rows = Layer(R1, torch.device("cuda")), []
    for batch in QUICK_BATCHES if options.quick else BATCHES:
        for row in measured(layer, batch):
            rows.append(row)
            print(LINE.format(**row), flush=True)
            if options.json:
                result = {"rows": rows, "context": LENGTH, "weights": WEIGHTS, "steps": STEPS, **machine()}
                options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def measured(layer: Layer, batch: int) -> Iterator[dict[str, Any]]:
    """The ladder, then all steps but one."""
    state = State.random(layer.shape, [LENGTH] * batch, layer.device)
    x = torch.randn(batch, layer.shape.hidden, device=layer.device, dtype=torch.bfloat16)
    wanted = layer(x, state, frozenset()) - x, layer.chosen
    before = us = 0.0
    for count, step in enumerate(("eager", *STEPS)):
        us, differs = timed(layer, x, state, frozenset(list(STEPS)[:count]), wanted)
        yield {"batch": batch, "kind": "ladder", "step": step, "us": us, "gain": round((before or us) / us, 3), **differs}
        before = us
    for step in STEPS:
        slower, differs = timed(layer, x, state, FASTEST - {step}, wanted)
        yield {"batch": batch, "kind": "without", "step": step, "us": slower, "gain": round(slower / us, 3), **differs}


def timed(
    layer: Layer, x: Tensor, state: State, on: frozenset[str], wanted: tuple[Tensor, Tensor]
) -> tuple[float, dict[str, float]]:
    """Microseconds, and how what is added to x differs."""
    call = lambda: layer(x, state, on)  # noqa: E731
    differs = deviation(call() - x, layer.chosen, *wanted)
    seconds = graph_seconds([call] * 2, replays=10) if "graph" in on and x.is_cuda else clocked(call)
    return round(seconds * 1e6, 2), differs


if __name__ == "__main__":
    sys.exit(main())
