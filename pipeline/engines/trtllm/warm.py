"""Start a bundle once, so that later starts find tuned tactics and compiled kernels (engine.trtllm.warm).

The engine keeps two things on request: the autotuner's choices (TLLM_AUTOTUNER_CACHE_PATH) and DeepGEMM's kernels
(TRTLLM_DG_CACHE_DIR, with TRTLLM_DG_JIT_DUMP_CUBIN). Both go to `cache/ROLE/`, and the launchers name them to each rank. The
engine runs in a process of its own, whose milestones are shown; if it crashes, its last lines are the error.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.core.errors import MissingToolError, StageError
from pipeline.core.process import die_with_parent
from pipeline.core.stage import Progress
from pipeline.engines.trtllm.roles import arguments_file

__all__ = ["MILESTONES", "cache_variables", "main", "warm"]

MILESTONES = (
    (r"Autotun\w+ process starts", "tunes kernels"),
    (r"Autotuner Cache size after warmup (?P<count>\d+)", "has tuned {count} shapes"),
    (r"Creating CUDA graph instances for (?P<count>\d+) batch sizes", "captures {count} CUDA graphs"),
    (r"^WARM (?P<what>.+)$", "{what}"),
)
"""What a line of the engine's log tells, and what is said of it."""
_LAST_LINES = 12
DEADLINE_S = 3 * 3600
"""A first load of R1 is said to take an hour."""


def warm(out: Path, arguments: Mapping[str, Mapping[str, Any]], variables: list[dict[str, str]], progress: Progress) -> list[str]:
    """Warm every role of the bundle in `out`; the files that it left.

    Raises:
        MissingToolError: there are fewer GPUs here than an instance takes.
        StageError: the engine ended with an error, or not within the deadline.
    """
    kept = []
    for role, args in arguments.items():
        _require_gpus(role, args)
        folder = out / "cache" / role
        folder.mkdir(parents=True)
        env = {**os.environ, **{row["name"]: row["value"] for row in variables}, **cache_variables(folder)}
        file = str(out / arguments_file(role))
        command = [sys.executable, "-m", "pipeline.engines.trtllm.warm", str(out / "checkpoint"), file]
        _follow(role, command, env, progress)
        kept += sorted(path.relative_to(out).as_posix() for path in folder.rglob("*") if path.is_file())
    return kept


def cache_variables(folder: Path) -> dict[str, str]:
    """What makes the engine keep its work in `folder`."""
    return {
        "TLLM_AUTOTUNER_CACHE_PATH": str(folder / "autotuner.json"),
        "TRTLLM_DG_CACHE_DIR": str(folder / "deep_gemm"),
        "TRTLLM_DG_JIT_DUMP_CUBIN": "1",
    }


def _require_gpus(role: str, args: Mapping[str, Any]) -> None:
    wanted, here = args["tensor_parallel_size"] * args["pipeline_parallel_size"], len(_gpus())
    if here < wanted:
        raise MissingToolError(
            f"engine.trtllm.warm=true starts one {role} instance, which takes {wanted} GPUs, and this machine shows {here}: "
            f"build on such a node, or set engine.trtllm.warm=false."
        )


def _gpus() -> list[str]:
    """A line for each GPU that the driver shows."""
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line for line in found.stdout.splitlines() if line.startswith("GPU ")]


def _follow(role: str, command: Sequence[str], env: Mapping[str, str], progress: Progress) -> None:
    """Run to the end, saying each milestone once."""
    last: deque[str] = deque(maxlen=_LAST_LINES)
    with subprocess.Popen(
        command, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        preexec_fn=die_with_parent,
    ) as process:  # fmt: skip
        alarm = threading.Timer(DEADLINE_S, process.kill)
        alarm.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                last.append(line.rstrip())
                if said := _milestone(line):
                    progress.note(f"{role}: the engine {said}")
            code = process.wait()
        finally:
            alarm.cancel()
            process.kill()
    if code:
        raise StageError(_ended(role, code, last))


def _milestone(line: str) -> str | None:
    for pattern, said in MILESTONES:
        if found := re.search(pattern, line):
            return said.format(**found.groupdict())
    return None


def _ended(role: str, code: int, last: Sequence[str]) -> str:
    how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
    said = "\n".join(f"  {line}" for line in last) or "  (it said nothing)"
    return f"The engine {how} while the {role} instance was warmed; its last lines:\n{said}"


def main(words: Sequence[str]) -> int:
    """In the engine's own process: load, tune, capture, answer once, leave."""
    # NOTE: imports torch and CUDA libraries.
    from tensorrt_llm import LLM, SamplingParams

    checkpoint, file = words
    args = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    args.pop("cache_transceiver_config", None)  # there is no other side to talk to
    print("WARM loads the weights", flush=True)
    llm = LLM(model=checkpoint, **args)
    try:
        print("WARM answers a first prompt", flush=True)
        list(llm.generate(["1, 2, 3,"], SamplingParams(max_tokens=8)))
    finally:
        llm.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
