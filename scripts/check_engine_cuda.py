#!/usr/bin/env python3
"""Builds the torch engine for this GPU in bfloat16 from the embedded model, checks it against the reference, times it.

    python scripts/check_engine_cuda.py [OUT_FOLDER]

It needs torch, numpy, ml_dtypes, safetensors and a C++ compiler, and no configuration. Exit code 1: a check failed.
Where torch carries an older C++ library than the compiler, loading a package ends in a segmentation fault; so the
script starts itself again with the compiler's library preloaded.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TINY_R1 = ROOT / "pipeline" / "data" / "tiny_r1"
SETTINGS = SimpleNamespace(
    device="cuda", dtype="bfloat16", compiler="aoti", expanded_from=256, max_batch_size=64, max_seq_len=1024,
    prefill_chunk=512, page_size=32, threads=0,
)  # fmt: skip
TOKENS = 64
MIN_TOP1, MAX_ERROR = 0.95, 0.10
"""Against the float32 reference: share of equal next tokens, and relative error of the logits, of bfloat16."""


def preload_cxx_library() -> None:
    """Start again under the compiler's own C++ library."""
    if "LD_PRELOAD" not in os.environ:
        asked = subprocess.run(["g++", "-print-file-name=libstdc++.so.6"], capture_output=True, text=True, check=True)
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"LD_PRELOAD": asked.stdout.strip()})


class Printer:
    """A `Progress` for a log."""

    def start(self, total: int, unit: str) -> None:
        print(f"{total} {unit}")

    def advance(self, amount: int = 1) -> None:
        pass

    def note(self, text: str) -> None:
        print(text, flush=True)


def main(out: Path) -> int:
    """Build, check, time; print one JSON line a result."""
    import torch

    sys.path[:0] = [str(ROOT), str(ROOT / "triton_repo" / "torch" / "1")]
    from runtime import CompiledEngine

    from pipeline.core.stage import StageContext
    from pipeline.engines.torch.build import build

    config: Any = SimpleNamespace(engine=SimpleNamespace(torch=SETTINGS))
    began = time.perf_counter()
    build(StageContext(config=config, inputs={"convert": TINY_R1}, checkpoint=TINY_R1, out=out, progress=Printer()))
    sizes = {file.name: file.stat().st_size for file in sorted(out.iterdir())}
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(json.dumps({"device": device, "build_seconds": round(time.perf_counter() - began, 1), "bytes": sizes}))
    engine = CompiledEngine.load(out)
    with torch.inference_mode():
        good = [check_text(engine), check_graphs(engine)]
        time_all(engine, out)
    print("OK" if all(good) else "FAILED")
    return 0 if all(good) else 1


def check_text(engine: Any) -> bool:
    """Greedy text against the float32 reference, which is asked for its choice after the engine's own words."""
    import torch

    from pipeline.checkpoint import dequantized
    from pipeline.models.arch import Arch
    from pipeline.models.deepseek_v3 import build

    reference = build(Arch.from_dir(TINY_R1), {name: torch.from_numpy(value) for name, value in dequantized(TINY_R1)}).cuda()
    good = True
    for length in (1, 255, 256, 257, 700):
        prompt = torch.randint(3, engine.info["vocab_size"], (length,), generator=torch.Generator().manual_seed(length))
        text, logits = write(engine, prompt)
        expected = reference(torch.cat([prompt, torch.tensor(text[:-1])])[None].cuda())[0, -TOKENS:].cpu()
        top1 = (expected.argmax(-1) == torch.tensor(text)).float().mean().item()
        error = ((logits - expected).norm() / expected.norm()).item()
        good &= top1 >= MIN_TOP1 and error <= MAX_ERROR
        print(json.dumps({"prompt": length, "top1": round(top1, 4), "relative_error": round(error, 4)}), flush=True)
    return good


def write(engine: Any, prompt: Any) -> tuple[list[int], Any]:
    """TOKENS greedy tokens after `prompt`, and their logits."""
    import torch

    chunk, size, pages = engine.info["prefill_chunk"], engine.info["page_size"], torch.arange(1, 33)[None]
    for start in range(0, len(prompt), chunk):
        end = min(start + chunk, len(prompt))
        logits = engine.step(prompt[None, start:end], torch.arange(start, end)[None], pages[:, : -(-end // size)])
    text, rows = [], []
    for position in range(len(prompt), len(prompt) + TOKENS):
        rows.append(logits[0].cpu())
        text.append(int(rows[-1].argmax()))
        logits = engine.step(torch.tensor([text[-1:]]), torch.tensor([[position]]), pages[:, : position // size + 1])
    return text, torch.stack(rows)


def check_graphs(engine: Any) -> bool:
    """A replayed decode step against the same package called plainly; batch 5 is padded to 8."""
    good = True
    for rows in (1, 5, 64):
        inputs = decode_inputs(engine, rows)
        plain = engine.forms["absorbed"]([*(value.cuda() for value in inputs), *engine.caches])
        replayed = engine.step(*inputs)
        error = ((replayed - plain).norm() / plain.norm()).item()
        good &= error < MAX_ERROR
        print(json.dumps({"rows": rows, "graph_against_plain": round(error, 6)}), flush=True)
    return good


def decode_inputs(engine: Any, rows: int) -> list[Any]:
    """One token of each row at position 127."""
    import torch

    random = torch.Generator().manual_seed(rows)
    tokens = torch.randint(3, engine.info["vocab_size"], (rows, 1), generator=random)
    return [tokens, torch.full((rows, 1), 127), torch.arange(1, 1 + 4 * rows).view(rows, 4)]


def time_all(engine: Any, out: Path) -> None:
    """Microseconds of a decode step: eager, compiled, and `step` with its CUDA graph (over all pages of a row)."""
    from pipeline.engines.torch.export import load_decoder

    eager = load_decoder(out, "absorbed")
    for rows in (1, 8, 64):
        inputs = decode_inputs(engine, rows)
        there = [value.cuda() for value in inputs]
        row = {
            "rows": rows,
            "eager_us": median(lambda there=there: eager(*there, engine.caches)),
            "compiled_us": median(lambda there=there: engine.forms["absorbed"]([*there, *engine.caches])),
            "step_with_graph_us": median(lambda inputs=inputs: engine.step(*inputs)),
            "graph_alone_us": median(engine._graphs[rows].graph.replay),
        }
        print(json.dumps(row), flush=True)


def median(call: Callable[[], Any], count: int = 100) -> float:
    """Median microseconds of a call with its GPU work."""
    import torch

    times = []
    for _ in range(count + 10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return round(statistics.median(times[10:]) * 1e6, 1)


if __name__ == "__main__":
    preload_cxx_library()
    if len(sys.argv) > 1:
        folder = Path(sys.argv[1])
        folder.mkdir(parents=True)
        sys.exit(main(folder))
    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(main(Path(scratch)))
