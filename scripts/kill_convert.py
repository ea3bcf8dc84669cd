"""Kills conversions at random moments and proves that nothing is lost: `convert` must end with the bytes of a quiet run.

    python scripts/kill_convert.py [--kills 200] [--seed 0] [--json FILE]

Every trial converts a random checkpoint and is killed with SIGKILL up to six times in a row: at a random call that changes
files (before it, after it, or half-way through a write; fsync, rename and what describes the result included) or at a
random time. Then it may finish. After each kill no visible shard may be torn; at the end every file must be that of the
quiet run, and every digest in the manifest that of the file. Equal seeds choose equal kills.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.core.store import describe_tree  # noqa: E402
from scripts._options import result_file  # noqa: E402
from tests._utils import random_checkpoint  # noqa: E402
from tests._utils.killing import Kill, Trial, small_steps  # noqa: E402
from tests._utils.run_stage import convert  # noqa: E402

__all__ = ["kill_often"]

IN_A_ROW = 6


def kill_often(folder: Path, kills: int, seed: int, say: bool = False) -> Counter[str]:
    """Kill so often, with new trials as needed; returns how often children died at which call. Raises what it finds."""
    rng = random.Random(seed)
    source = random_checkpoint.write(folder / "source", {"num_hidden_layers": 3, "n_routed_experts": 8}, seed)
    quiet = Trial(source, folder / "quiet")
    clean, calls, seconds = _quiet(quiet, folder)
    seen: Counter[str] = Counter()
    trial = 0
    while (killed := sum(count for name, count in seen.items() if name != "done")) < kills:
        work = Trial(source, folder / f"trial{trial}")
        for _ in range(min(IN_A_ROW, kills - killed)):
            if work.run(Kill.of(rng, calls, seconds)):
                break
            if torn := work.torn(clean):
                raise SystemExit(f"torn after a kill, seed {seed}: {torn}")
        result = work.run()
        with small_steps():
            same = result is not None and describe_tree(result.out) == result.manifest["outputs"]
        if result is None or not same or _differ(result.out, clean):
            raise SystemExit(f"trial {trial} of seed {seed} did not end with the bytes of the quiet run: see {work.root}")
        seen += work.seen
        shutil.rmtree(work.root)
        trial += 1
        if say:
            print(f"{sum(seen.values()) - seen['done']} kills, {trial} results, all equal", flush=True)
    return seen


def _quiet(trial: Trial, folder: Path) -> tuple[Path, dict[str, int], float]:
    """What must come out, computed with ordinary sizes by an ordinary run; and how many calls and seconds a run takes."""
    clean = convert(trial.source, folder / "clean", trial.table)
    started = time.monotonic()
    result = trial.run(Kill(call=1 << 30))
    assert result is not None and not _differ(result.out, clean), "small blocks and tasks change the bytes"
    return clean, trial.calls, time.monotonic() - started


def _differ(one: Path, other: Path) -> list[str]:
    names = {file.relative_to(folder).as_posix() for folder in (one, other) for file in folder.rglob("*") if file.is_file()}
    pairs = ((one / name, other / name, name) for name in sorted(names))
    return [name for a, b, name in pairs if not (a.is_file() and b.is_file() and a.read_bytes() == b.read_bytes())]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=result_file)
    arguments = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kill-convert-") as folder:
        seen = kill_often(Path(folder), arguments.kills, arguments.seed, say=True)
    seconds = round(time.monotonic() - started, 1)
    done = seen.pop("done", 0)
    table = {"kills": seen.total(), "by_call": dict(sorted(seen.items())), "runs_that_ended": done, "lost": 0, "seconds": seconds}
    print(json.dumps(table, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
