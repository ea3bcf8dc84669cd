"""What each recipe costs the embedded model: checkpoint size, KL, top-1 agreement and perplexity, in one table.

    python scripts/accuracy_table.py [--quick] [--json FILE] [RECIPE[@LAYOUT] ...]

Converts tiny_r1 by every recipe of conf/quant, some of them in other tools' layouts too (or those named), in a scratch folder,
and lets the reference model predict its held-out text with each result; float32 activations, so it is what the weights lost.
The source's predictions are made once. `--quick` takes 1,024 tokens instead of all.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.checkpoint import Checkpoint  # noqa: E402
from pipeline.config.load import choices, load  # noqa: E402
from pipeline.core.jsonio import write_json  # noqa: E402
from pipeline.core.stage import StageContext  # noqa: E402
from pipeline.stages import convert, plan  # noqa: E402
from pipeline.verify.logits import Reference  # noqa: E402
from pipeline.verify.logits import load as load_model  # noqa: E402
from pipeline.verify.text import windows_of  # noqa: E402
from scripts._options import result_file  # noqa: E402

MODEL = ROOT / "pipeline" / "data" / "tiny_r1"
ALL, QUICK, WINDOW = 28_000, 1_024, 512
IN_LAYOUTS = ("nvfp4@compressed_tensors", "int4_awq@compressed_tensors", "int4_awq@autoawq", "int4_awq@gptq")
HEADER = ("recipe", "checkpoint", "mean KL, nats", "top-1 agreement", "perplexity")


class Silent:
    """A `Progress` that nobody watches."""

    def start(self, total: int, unit: str) -> None:
        """Nothing."""

    def advance(self, amount: int = 1) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""


def converted(recipe: str, work: Path) -> Checkpoint:
    """The embedded model by one recipe, as the pipeline plans and converts it."""
    name, _, layout = recipe.partition("@")
    config = load(["+hw=cpu", f"quant={name}", *([f"quant.layout={layout}"] if layout else [])])
    for name in ("plan", "convert"):
        (work / name).mkdir(parents=True)
    first = StageContext(config=config, inputs={}, checkpoint=MODEL, out=work / "plan", progress=Silent())
    plan.run(first)
    inputs = {"plan": work / "plan"}
    convert.run(StageContext(config=config, inputs=inputs, checkpoint=MODEL, out=work / "convert", progress=Silent()))
    return Checkpoint.open(work / "convert")


def measured(recipes: list[str], tokens: int) -> Iterator[dict[str, Any]]:
    """A row for each recipe."""
    source = Checkpoint.open(MODEL)
    windows = windows_of(MODEL / "heldout.txt", MODEL / "tokenizer.json", source.arch, tokens=tokens, window=WINDOW)
    reference = Reference(source, windows, lambda amount: None)
    for recipe in recipes:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = converted(recipe, Path(folder))
            found = reference.compare(load_model(checkpoint), lambda amount: None)
            size = sum(file.stat().st_size for file in checkpoint.shards)
        yield {
            "recipe": recipe, "bytes": size, "tokens": found.tokens, "kl": found.kl, "top1": found.top1,
            "ppl_source": found.ppl_source, "ppl": found.ppl_converted,
        }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> list[str]:
    """As Markdown, the least harm first."""
    cells = [
        (f"`{r['recipe']}`", f"{r['bytes'] / 1e6:.1f} MB", f"{r['kl']:.4f}", f"{r['top1']:.1%}", f"{r['ppl']:.4f}")
        for r in sorted(rows, key=lambda row: (row["kl"], row["recipe"]))
    ]
    return [f"| {' | '.join(row)} |" for row in (HEADER, ("---",) * len(HEADER), *cells)]


def main() -> None:
    """Print the table; write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", help="of conf/quant, with @LAYOUT of pipeline/layouts; all by default")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} tokens")
    parser.add_argument("--json", type=result_file, help="file for the numbers")
    options = parser.parse_args()
    rows = []
    for row in measured(options.recipes or [*choices("quant"), *IN_LAYOUTS], QUICK if options.quick else ALL):
        print(json.dumps(row), file=sys.stderr, flush=True)
        rows.append(row)
    print(f"{rows[0]['tokens']:,} held-out tokens; the source's perplexity is {rows[0]['ppl_source']}\n")
    print("\n".join(table(rows)))
    if options.json:
        write_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
