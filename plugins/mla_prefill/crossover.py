"""From how many tokens on a chunk is attended to faster with its cache decompressed: measured (`crossover.json`), not assumed.

    absorbed   absorb_query, mla_decode over the cached latents, absorb_output
    expanded   the context's latents out of their pages, kv_b's product of all of them, mla_prefill_kv

    python scripts/bench_mla_forms.py --json FILE         # on the GPU
    python -m plugins.mla_prefill.crossover FILE          # writes crossover.json from it
"""

from __future__ import annotations

import functools
import json
import math
import sys
from pathlib import Path
from typing import Any, Literal

__all__ = ["expanded_from", "form"]

FILE = Path(__file__).with_name("crossover.json")
Cache = Literal["bf16", "fp8"]


def form(tokens: int, context: int, cache: Cache = "bf16") -> Literal["absorbed", "expanded"]:
    """The faster form for the last `tokens` tokens of a sequence of `context`, all 128 heads."""
    return "expanded" if tokens >= expanded_from(context, cache) else "absorbed"


@functools.lru_cache(maxsize=4096)
def expanded_from(context: int, cache: Cache = "bf16") -> int:
    """The fewest tokens of a chunk at the end of `context` for which the expanded form is the faster one, also for all more.

    Between measured contexts the logarithms are interpolated; outside, the nearest one counts.
    """
    known = sorted(_crossings(cache).items())
    below = max((pair for pair in known if pair[0] <= context), default=known[0])
    above = min((pair for pair in known if pair[0] >= context), default=known[-1])
    if below[0] == above[0]:
        return below[1]
    share = math.log(context / below[0]) / math.log(above[0] / below[0])
    return round(math.exp(math.log(below[1]) * (1 - share) + math.log(above[1]) * share))


@functools.cache
def _crossings(cache: Cache) -> dict[int, int]:
    """Context -> the crossing."""
    rows = json.loads(FILE.read_text(encoding="utf-8"))["rows"]
    return {row["context"]: row["expanded_from"] for row in rows if row["cache"] == cache}


def crossing(rows: list[dict[str, Any]]) -> int:
    """Where the difference of the two times changes its sign for the last time, linear between measured numbers of tokens."""
    rows = sorted(rows, key=lambda row: row["tokens"])
    gains = [(row["tokens"], row["absorbed_us"] - row["expanded_us"]) for row in rows]
    last = max((place for place, (_, gain) in enumerate(gains) if gain <= 0), default=-1)
    if last < 0:
        return gains[0][0]
    if last == len(gains) - 1:
        return gains[-1][0] + 1
    (few, loss), (many, gain) = gains[last : last + 2]
    return math.ceil(few + (many - few) * -loss / (gain - loss))


def _main(file: Path) -> None:
    measured = json.loads(file.read_text(encoding="utf-8"))
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in measured["rows"]:
        groups.setdefault((row["cache"], row["context"]), []).append(row)
    rows = [{"cache": cache, "context": context, "expanded_from": crossing(group)} for (cache, context), group in groups.items()]
    kept = {"version": 1, "device": measured["device"], "rows": rows}
    FILE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _main(Path(sys.argv[1])) if len(sys.argv) == 2 else sys.exit(__doc__)
