#!/usr/bin/env python3
"""Builds torch engines for this GPU in bfloat16, with plugins off and auto, checks them against float32, and times them.

    python scripts/check_engine_cuda.py [--only MODEL ...] [--part build|check|time] [--eager] [--out FOLDER] [--json FILE]

    tiny  the embedded model, from its checkpoint, with the settings that an engine has by itself
    wide  DeepSeek-R1's widths (256 experts in FP8, 128 heads), a dense layer and a MoE layer, random weights (`_wide.py`): 13 GB,
          or 25 with plugins off, which keep experts in BF16
    fp4   the same with 64 experts in NVFP4, with plugins alone; beside it stands the graph without them, not compiled
    kv8   `wide` over an FP8 cache, 13 GB more, with plugins alone; beside it the graph without them over such a cache, not compiled

`_tokens.py` says when an engine's words are right; each other word is printed with the proof. It needs torch, numpy, ml_dtypes,
safetensors, tokenizers and a C++ compiler, and no configuration. Exit code 1: a check failed. Without --part all three are done;
--part check and time take what --part build has left in --out. With --eager nothing is compiled, and the graphs' words alone are
checked: a minute a model, instead of some 70 CPU seconds for each of the two forms of each engine. Where torch carries an older
C++ library than the compiler, loading a package ends in a segmentation fault; so the script starts itself again with the
compiler's library preloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "triton_repo" / "torch" / "1")]

from scripts._options import result_file  # noqa: E402

TINY_R1 = ROOT / "pipeline" / "data" / "tiny_r1"
COMMON = {
    "device": "cuda", "dtype": "bfloat16", "kv_dtype": "auto", "compiler": "aoti", "expanded_from": None, "page_size": 64,
    "prefill_chunk": 512, "threads": 0,
}  # fmt: skip
SETTINGS = {
    "tiny": COMMON | {"max_batch_size": 64, "max_seq_len": 1024},
    "wide": COMMON | {"max_batch_size": 128, "max_seq_len": 4096},
    "kv8": COMMON | {"max_batch_size": 128, "max_seq_len": 4096, "kv_dtype": "fp8"},
    "fp4": COMMON | {"max_batch_size": 64, "max_seq_len": 1024},
}
VARIANTS = {"tiny": ("off", "auto"), "wide": ("off", "auto"), "kv8": ("auto",), "fp4": ("auto",)}
EXPERTS = {"wide": ("fp8_block", 256), "kv8": ("fp8_block", 256), "fp4": ("w4a16_nvfp4", 64)}
"""Format and number of the experts of random models."""
PARTS, CACHE = ("build", "check", "time"), "R1_PIPELINE_CACHE"
CHOSEN = ("taken", "left", "experts", "products")
TOKENS, PROMPTS = 64, (1, 70, 300, 700)
MAX_ERROR = 0.10
"""Of logits: of BF16 without plugins against float32, and of a captured step against the same package called plainly."""


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


def main(models: list[str], parts: list[str], out: Path, eager: bool, result: Path | None) -> int:
    """Build all side by side, then check and time each model's; one JSON line a result."""
    import torch

    from plugins.timing import machine

    rows: list[dict[str, Any]] = []
    built = "build" not in parts or build_all(models, out, eager)
    good = [built]
    steps = [step for part, step in (("check", checked_eager if eager else checked), ("time", timed)) if built and part in parts]
    compiled = Path(os.environ[CACHE])
    for model, step in ((model, step) for model in models for step in steps):
        os.environ[CACHE] = str(compiled / model)  # of which another model's do not count
        with torch.inference_mode():
            for row in step(model, out / model):
                good.append(row.get("good", True))
                rows.append({"model": model, **row})
                print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    if result:
        result.write_text(json.dumps({"rows": rows, **machine()}, indent=1) + "\n", encoding="utf-8")
    print("OK" if all(good) else "FAILED")
    return 0 if all(good) else 1


def build_all(models: list[str], out: Path, eager: bool) -> bool:
    """Each in a process of its own; what an earlier run left in `out` is not built again."""
    began, running = time.perf_counter(), []
    for engine in (f"{model}/{plugins}" for model in models for plugins in (["auto"] if eager else VARIANTS[model])):
        if not (out / engine).is_dir():
            command = [sys.executable, __file__, "--build", engine, "--out", str(out), *(["--eager"] if eager else [])]
            running.append((engine, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)))
    for engine, process in running:
        text = process.communicate()[0]
        print(f"--- {engine}, {time.perf_counter() - began:.0f} s\n{text[-6000:]}", flush=True)
    return all(process.returncode == 0 for _, process in running)


def build_one(model: str, plugins: str, out: Path, eager: bool) -> None:
    """One engine folder, which takes its name when it is finished."""
    from pipeline.engines.torch import build

    if eager:
        build.compile_forms, build.check = (lambda *_: None), (lambda *_: "not compiled")
    settings: Any = SimpleNamespace(plugins=plugins, **SETTINGS[model])
    part = out / model / f".{plugins}"
    part.mkdir(parents=True)
    if model == "tiny":
        build_tiny(settings, part)
    else:
        from scripts._wide import build_wide

        build_wide(settings, TINY_R1, part, *EXPERTS[model])
    part.rename(out / model / plugins)


def build_tiny(settings: Any, folder: Path) -> None:
    """From the embedded model, whose experts are in FP8."""
    from pipeline.core.stage import StageContext
    from pipeline.engines.torch.build import build

    config: Any = SimpleNamespace(engine=SimpleNamespace(torch=settings))
    build(StageContext(config=config, inputs={"convert": TINY_R1}, checkpoint=TINY_R1, out=folder, progress=Printer()))


def checked(model: str, out: Path) -> Iterator[dict[str, Any]]:
    """What must hold of a model's engines."""
    engines = load(model, out)
    chosen = engines["auto"].info["plugins"]
    yield {name: chosen[name] for name in CHOSEN}
    for plugins, engine in engines.items():
        size = sum(file.stat().st_size for file in (out / plugins).rglob("*") if file.is_file())
        yield {"plugins": plugins, "bytes": size, "expanded_from": engine.info["expanded_from"]}
        yield from ({"plugins": plugins, **row} for row in check_graphs(engine))
    yield from check_tokens(model, out, engines)


def checked_eager(model: str, out: Path) -> Iterator[dict[str, Any]]:
    """Of an engine that is not compiled."""
    from safetensors.torch import load_file

    from pipeline.engines.torch.plugged import ops
    from scripts._eager import Eager

    info = json.loads((out / "auto" / "engine.json").read_text(encoding="utf-8"))
    yield {name: info["plugins"][name] for name in CHOSEN} | {"expanded_from": info["expanded_from"]}
    weights = load_file(out / "auto" / "weights.safetensors", device="cuda")
    yield from check_tokens(model, out, {"auto, not compiled": Eager(info, weights, ops(info["plugins"]))})


def timed(model: str, out: Path) -> Iterator[dict[str, Any]]:
    """Decode and prefill of a model's engines."""
    engines = load(model, out)
    for rows in (1, 8, 64, 128):
        if rows <= engines["auto"].info["max_batch_size"]:
            yield decode_timed(engines, rows)
    yield prefill_timed(engines)


def load(model: str, out: Path) -> dict[str, Any]:
    """Its engines by what `plugins` was."""
    from runtime import CompiledEngine

    from pipeline.engines.torch import plugged  # noqa: F401  before an engine brings its own part of it

    return {plugins: CompiledEngine.load(out / plugins) for plugins in VARIANTS[model]}


def check_tokens(model: str, out: Path, engines: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every engine's logits along the words that the one without plugins writes, judged by float32's (`_tokens`)."""
    import torch

    from scripts._eager import Eager, dequantized, without_experts
    from scripts._tokens import judge, others

    info, texts = json.loads((out / "auto" / "engine.json").read_text(encoding="utf-8")), prompts(model)
    weights = dequantized(out / ("off" if "off" in engines else "auto"), torch.bfloat16)
    plain = Eager(info, weights)
    reference = engines.get("off", plain)
    written = [write(reference, prompt) for prompt in texts]
    words, logits = [words for words, _ in written], {}
    for name, engine in {"off, not compiled": plain, **engines}.items():
        logits[name] = written_by(engine, texts, words)
    yield from kernels(out, engines)
    if info["plugins"]["experts"] == "fp8_block" and info["plugins"]["taken"] != ["moe_grouped_gemm"]:
        other = Eager(info, weights, without_experts(info))  # whose shared expert's products are kernels that no engine has
        logits["auto, experts in BF16, not compiled"] = written_by(other, texts, words)
        del other
    del plain, weights, reference, engine
    torch.cuda.empty_cache()
    wanted, least = float32(model, out, texts, words), torch.cat([rows for _, rows in written])
    coarse = info["kv_dtype"] != info["dtype"]
    for name, found in logits.items():
        kept = name in engines and name != "off" and info["plugins"]["experts"]
        row = judge(wanted, (least, logits["off, not compiled"]), found, fp8=coarse or kept == "fp8_block")
        if name == "off":
            row["good"] = row["error"] <= MAX_ERROR
        yield {"plugins": name, **row}
        yield from ({"plugins": name, "other_word": proof} for proof in others(wanted, least, found))


def prompts(model: str) -> list[Any]:
    """Random words; of the embedded model, which was trained, also beginnings of the text that it was not trained on."""
    import torch

    random = [torch.randint(3, 1024, (length,), generator=torch.Generator().manual_seed(length)) for length in PROMPTS]
    if model != "tiny":
        return random
    from tokenizers import Tokenizer

    text = (TINY_R1 / "heldout.txt").read_text(encoding="utf-8")[:20000]
    words = torch.tensor(Tokenizer.from_file(str(TINY_R1 / "tokenizer.json")).encode(text).ids)
    return [*random, *(words[1000 : 1000 + length] for length in PROMPTS)]


def float32(model: str, out: Path, texts: list[Any], words: list[list[int]]) -> Any:
    """Logits [N, V] behind each prompt and each of its words but the last: of the checkpoint, or of the random weights."""
    import torch

    from pipeline.checkpoint import dequantized
    from pipeline.models.arch import Arch
    from pipeline.models.deepseek_v3 import build
    from scripts._eager import exact

    if model != "tiny":
        graph = exact(out / "auto")
        return written_by(graph, texts, words)
    reference = build(Arch.from_dir(TINY_R1), {name: torch.from_numpy(value) for name, value in dequantized(TINY_R1)}).cuda()
    whole = [torch.cat([prompt, torch.tensor(text[:-1])])[None].cuda() for prompt, text in zip(texts, words, strict=True)]
    return torch.cat([reference(ids)[0, -TOKENS:].cpu() for ids in whole])


def kernels(out: Path, engines: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Of an engine with plugins: those that came with it, and those that its steps had to compile."""
    if "auto" in engines:
        carried, compiled = (len(list(folder.glob("kernels/*"))) for folder in (out / "auto" / "ops", Path(os.environ[CACHE])))
        yield {"kernels_carried": carried, "kernels_compiled_while_serving": compiled, "good": not compiled}


def written_by(engine: Any, texts: list[Any], words: list[list[int]]) -> Any:
    """Logits [N, V] behind each prompt and each of its words but the last."""
    import torch

    return torch.cat([write(engine, prompt, text)[1] for prompt, text in zip(texts, words, strict=True)])


def write(engine: Any, prompt: Any, words: list[int] | None = None) -> tuple[list[int], Any]:
    """TOKENS greedy tokens after `prompt`, or after `words` so far, and the logits."""
    import torch

    chunk, size = engine.info["prefill_chunk"], engine.info["page_size"]
    pages = torch.arange(1, 1 + -(-(len(prompt) + TOKENS) // size))[None]
    for start in range(0, len(prompt), chunk):
        end = min(start + chunk, len(prompt))
        logits = engine.step(prompt[None, start:end], torch.arange(start, end)[None], pages[:, : -(-end // size)])
    text, rows = [], []
    for count in range(TOKENS):
        position = len(prompt) + count
        rows.append(logits[0].cpu())
        text.append(words[count] if words else int(rows[-1].argmax()))
        logits = engine.step(torch.tensor([text[-1:]]), torch.tensor([[position]]), pages[:, : position // size + 1])
    return text, torch.stack(rows)


def check_graphs(engine: Any) -> Any:
    """A replayed decode step against the same package called plainly; batch 5 is padded to 8."""
    from scripts._tokens import relative

    for rows in (1, 5, 64):
        inputs = decode_inputs(engine, rows, 128)
        plain = engine.forms["absorbed"]([*(value.cuda() for value in inputs), *engine.caches])
        engine.step(*inputs)  # the first of a size is not captured
        error = relative(engine.step(*inputs), plain)
        yield {"rows": rows, "graph_against_plain": round(error, 6), "good": error < MAX_ERROR}


def decode_inputs(engine: Any, rows: int, context: int) -> list[Any]:
    """One token of each row, the last of `context`; pages of their own as far as there are any."""
    import torch

    random, pages = torch.Generator().manual_seed(rows), -(-context // engine.info["page_size"])
    tokens = torch.randint(3, engine.info["vocab_size"], (rows, 1), generator=random)
    table = 1 + torch.arange(rows * pages).view(rows, pages) % (engine.info["num_pages"] - 1)
    return [tokens, torch.full((rows, 1), context - 1), table]


def decode_timed(engines: dict[str, Any], rows: int) -> dict[str, Any]:
    """Microseconds of a decode step over the longest context: its CUDA graph alone, `step` with it, and the package uncaptured."""
    row: dict[str, Any] = {"rows": rows, "context": engines["auto"].info["max_seq_len"]}
    for plugins, engine in engines.items():
        inputs = decode_inputs(engine, rows, row["context"])
        there = [value.cuda() for value in inputs]
        row[f"{plugins}_step_us"] = median(lambda engine=engine, inputs=inputs: engine.step(*inputs))
        step = next(step for size, step in engine._graphs.items() if size[:2] == (rows, 1))
        row[f"{plugins}_graph_us"] = median(step.graph.replay)
        call = engine.forms["absorbed"]
        row[f"{plugins}_package_us"] = median(lambda call=call, there=there, engine=engine: call([*there, *engine.caches]), 20)
    return row | gain(row, "graph_us")


def prefill_timed(engines: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a chunk of prompt after as many tokens: the expanded form."""
    import torch

    row: dict[str, Any] = {}
    for plugins, engine in engines.items():
        chunk, size = engine.info["prefill_chunk"], engine.info["page_size"]
        pages = torch.arange(1, 1 + -(-2 * chunk // size))[None]
        inputs = torch.arange(3, 3 + chunk)[None] % engine.info["vocab_size"], torch.arange(chunk, 2 * chunk)[None], pages
        row[f"{plugins}_prefill_ms"] = round(median(lambda engine=engine, inputs=inputs: engine.step(*inputs), 20) / 1e3, 3)
    return {"chunk": chunk, **row} | gain(row, "prefill_ms")


def gain(row: dict[str, Any], name: str) -> dict[str, float]:
    """Of plugins, where there is an engine without."""
    return {"gain": round(row[f"off_{name}"] / row[f"auto_{name}"], 3)} if f"off_{name}" in row else {}


def median(call: Callable[[], Any], count: int = 60) -> float:
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SETTINGS, help="some of the models")
    parser.add_argument("--part", choices=PARTS, help="one of the parts")
    parser.add_argument("--eager", action="store_true", help="compile nothing, check words alone")
    parser.add_argument("--out", type=Path, help="keep the engines here")
    parser.add_argument("--json", type=result_file, help="write the lines here")
    parser.add_argument("--build", metavar="MODEL/PLUGINS", help="one engine, which a run starts by itself")
    options = parser.parse_args()
    if options.build:
        sys.exit(build_one(*options.build.split("/"), options.out, options.eager))
    models = options.only or list(SETTINGS)
    parts = [options.part] if options.part else list(PARTS[: 2 if options.eager else 3])
    with tempfile.TemporaryDirectory() as scratch:
        os.environ[CACHE] = str(Path(scratch) / "cache")
        sys.exit(main(models, parts, options.out or Path(scratch), options.eager, options.json))
