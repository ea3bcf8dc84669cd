#!/usr/bin/env python3
"""One decoder layer of DeepSeek-R1 at its real size, decoding: what each optimisation is worth, added one by one and left out.

    python scripts/bench_layer.py [--quick] [--json FILE]
    python scripts/bench_layer.py --readme FILE             # write this result's ladder into README.md

`scripts/_layer.py` is the layer: latent attention (128 heads, absorbed, paged cache), 256 routed experts, 8 a token, and the shared
one, random weights in R1's FP8 with 128x128 scales, all on one GPU. The first line is plain torch, eager, on weights dequantised
to BF16 before; each line after it adds a step to all before it (`ladder`), in a CUDA graph from the second on. Below are all steps
but one (`without`); without `graph`, and without it and `streams`, the same kernels are launched one by one, after all else, as
launches on two streams in turn slow down what follows (`timing.one_stream`).

`us` is the median of graph replays (without graph: of wall clock). `gain` is the line before over this one, and under `without`
the layer without the step over the one with all. `error`: relative to the first line, of what the layer adds to its input, over
tokens that have the same experts there; `rerouted`: share of those that have not (random weights make many choices close).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from plugins.timing import clocked, graph_seconds, machine, one_stream, replayed  # noqa: E402
from scripts._layer import FASTEST, R1, STEPS, Layer, State, deviation  # noqa: E402
from scripts._options import result_file  # noqa: E402
from scripts._readme import placed  # noqa: E402

BATCHES, QUICK_BATCHES, LENGTH = (1, 8, 32, 128), (1, 32), 4096
LINE = "{batch:4d} {kind:7s} {step:16s} {us:9.1f} us  gain {gain:5.2f}  error {error:.1e}, rerouted {rerouted:.1%}"
PLACE = "layer's ladder"
WEIGHTS = "random FP8, 128x128 scales; plain lines: the same, dequantised to BF16 before"


def main() -> int:
    """Every batch, every line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="batches 1 and 32")
    parser.add_argument("--json", type=result_file, help="write the rows and the machine here")
    parser.add_argument("--readme", type=Path, help="write this result's ladder into README.md")
    options = parser.parse_args()
    if options.readme:
        rows, readme = json.loads(options.readme.read_text(encoding="utf-8"))["rows"], ROOT / "README.md"
        readme.write_text(placed(readme.read_text(encoding="utf-8"), PLACE, table(rows)), encoding="utf-8")
        return 0
    if not torch.cuda.is_available():
        sys.exit("No GPU that torch can use: this benchmark needs one.")
    rows = []
    with one_stream():
        for row in measured(Layer(R1, torch.device("cuda")), QUICK_BATCHES if options.quick else BATCHES):
            rows.append(row)
            print(LINE.format(**row), flush=True)
            if options.json:
                result = {"rows": rows, "context": LENGTH, "weights": WEIGHTS, "steps": STEPS, **machine()}
                options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Microseconds after each step, and what it gains there; the last line: all steps, launched one by one."""
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    lines = [f"| step | {' | '.join(f'batch {batch}' for batch in batches)} |", "|---" * (len(batches) + 1) + "|"]
    for step in ("eager", *STEPS):
        found = [row for row in rows if (row["kind"], row["step"]) == ("ladder", step)]
        name = step if step == "eager" else f"+ {step}"
        lines.append(f"| {name} | {' | '.join(_cell(row) for row in found)} |")
    plain = [f"{row['us']:,.0f}" for row in rows if (row["kind"], row["step"]) == ("without", "graph")]
    return "\n".join([*lines, f"| all, no graph | {' | '.join(plain)} |"])


def _cell(row: Mapping[str, Any]) -> str:
    """688 (5.29 x)"""
    return f"{row['us']:,.0f}" + (f" ({row['gain']:.2f} x)" if row["step"] != "eager" else "")


def measured(layer: Layer, batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Each batch's ladder and all steps but one; then, of each, the steps that are not captured."""
    later: list[Iterator[dict[str, Any]]] = []
    for batch in batches:
        case = Case.random(layer, batch)
        us = yield from case.ladder()
        yield from case.without([step for step in STEPS if step != "graph"], us)
        later.append(case.without(["graph", "graph streams"], us))
    for rows in later:
        yield from rows


class Case(NamedTuple):
    """Tokens, their sequences, and what plain torch adds to them, with their experts."""

    layer: Layer
    x: Tensor
    state: State
    wanted: tuple[Tensor, Tensor]

    @classmethod
    def random(cls, layer: Layer, batch: int) -> Case:
        """Sequences of LENGTH tokens."""
        state = State.random(layer.shape, [LENGTH] * batch, layer.device)
        x = torch.randn(batch, layer.shape.hidden, device=layer.device, dtype=torch.bfloat16)
        return cls(layer, x, state, (layer(x, state, frozenset()) - x, layer.chosen))

    def ladder(self) -> Generator[dict[str, Any], None, float]:
        """Step upon step; returns the microseconds of all."""
        before = us = 0.0
        for count, step in enumerate(("eager", *STEPS)):
            us, differs = self.timed(frozenset(list(STEPS)[:count]))
            yield {"batch": len(self.x), "kind": "ladder", "step": step, "us": us, "gain": round((before or us) / us, 3), **differs}
            before = us
        return us

    def without(self, steps: Sequence[str], us: float) -> Iterator[dict[str, Any]]:
        """All steps but each of these (or several, by spaces), beside `us` of all."""
        for step in steps:
            slower, differs = self.timed(FASTEST.difference(step.split()))
            yield {"batch": len(self.x), "kind": "without", "step": step, "us": slower, "gain": round(slower / us, 3), **differs}

    def timed(self, on: frozenset[str]) -> tuple[float, dict[str, float]]:
        """Microseconds, and how what is added to x differs."""
        call = lambda: self.layer(self.x, self.state, on)  # noqa: E731
        captured = "graph" in on and self.x.is_cuda
        differs = deviation((replayed(call) if captured else call()) - self.x, self.layer.chosen, *self.wanted)
        seconds = graph_seconds([call] * 2, replays=10) if captured else clocked(call)
        return round(seconds * 1e6, 2), differs


if __name__ == "__main__":
    sys.exit(main())
