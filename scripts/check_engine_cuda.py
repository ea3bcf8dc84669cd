#!/usr/bin/env python3
"""Builds torch engines for this GPU in bfloat16, with plugins off and auto, checks both, compares their text, and times them.

    python scripts/check_engine_cuda.py [--only tiny|wide] [--out FOLDER] [--json FILE]

tiny is the embedded model; its text is checked against the float32 reference. wide has DeepSeek-R1's widths (256 experts in FP8,
128 heads), a dense layer and a MoE layer, and random weights made here: 13 GB, or 25 with plugins off, which keep experts in
BF16. Its routes and words are near ties, so rounding alone changes some: the line "off, not compiled" says how many.
It needs torch, numpy, ml_dtypes, safetensors and a C++ compiler, and no configuration. Exit code 1: a check failed.
Where torch carries an older C++ library than the compiler, loading a package ends in a segmentation fault; so the
script starts itself again with the compiler's library preloaded.
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
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "triton_repo" / "torch" / "1")]

from scripts._options import result_file  # noqa: E402

TINY_R1 = ROOT / "pipeline" / "data" / "tiny_r1"
COMMON = {"device": "cuda", "dtype": "bfloat16", "compiler": "aoti", "expanded_from": 256, "prefill_chunk": 512, "threads": 0}
SETTINGS = {
    "tiny": COMMON | {"max_batch_size": 64, "max_seq_len": 1024, "page_size": 32},
    "wide": COMMON | {"max_batch_size": 128, "max_seq_len": 4096, "page_size": 64},
}
WIDE = {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_attention_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
}  # fmt: skip
PLUGINS = ("off", "auto")
CACHE = "R1_PIPELINE_CACHE"
TOKENS = 64
MIN_TOP1, MAX_ERROR = 0.95, 0.10
"""Against the float32 reference: share of equal next tokens, and relative error of the logits, of bfloat16. Against plugins=off
errors may be larger by what rounding alone makes of them."""


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


def main(models: list[str], out: Path, result: Path | None) -> int:
    """Build all side by side, then check, compare and time each model's two; one JSON line a result."""
    import torch

    from plugins.timing import machine

    rows: list[dict[str, Any]] = []
    built = build_all(models, out)
    good = [built]
    for model in models if built else ():
        with torch.inference_mode():
            for row in measured(model, out / model):
                good.append(row.pop("good", True))
                rows.append({"model": model, **row})
                print(json.dumps(rows[-1]), flush=True)
        torch.cuda.empty_cache()
    if result:
        result.write_text(json.dumps({"rows": rows, **machine()}, indent=1) + "\n", encoding="utf-8")
    print("OK" if all(good) else "FAILED")
    return 0 if all(good) else 1


def build_all(models: list[str], out: Path) -> bool:
    """Each in a process of its own; what an earlier run left in `out` is not built again."""
    began, running = time.perf_counter(), []
    for model, plugins in ((model, plugins) for model in models for plugins in PLUGINS):
        if not (out / model / plugins).is_dir():
            command = [sys.executable, __file__, "--build", model, plugins, "--out", str(out)]
            running.append((model, plugins, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)))
    for model, plugins, process in running:
        text = process.communicate()[0]
        print(f"--- {model} plugins={plugins}, {time.perf_counter() - began:.0f} s\n{text[-6000:]}", flush=True)
    return all(process.returncode == 0 for _, _, process in running)


def build_one(model: str, plugins: str, out: Path) -> None:
    """One engine folder, which takes its name when it is finished."""
    settings: Any = SimpleNamespace(plugins=plugins, **SETTINGS[model])
    part = out / model / f".{plugins}"
    part.mkdir(parents=True)
    {"tiny": build_tiny, "wide": build_wide}[model](settings, part)
    part.rename(out / model / plugins)


def build_tiny(settings: Any, folder: Path) -> None:
    """From the embedded model, whose experts are in FP8."""
    from pipeline.core.stage import StageContext
    from pipeline.engines.torch.build import build

    config: Any = SimpleNamespace(engine=SimpleNamespace(torch=settings))
    build(StageContext(config=config, inputs={"convert": TINY_R1}, checkpoint=TINY_R1, out=folder, progress=Printer()))


def build_wide(settings: Any, folder: Path) -> None:
    """The steps of a build, on weights that are written here instead of read from a checkpoint."""
    from pipeline.core.jsonio import write_json
    from pipeline.engines.torch import build, carry, choose
    from pipeline.models.arch import Arch

    choose.formats = lambda *_: {"routed_experts": {"fp8_block"}, "router": {"BF16"}}
    info = build.describe(replace(Arch.from_dir(TINY_R1), **WIDE), settings, TINY_R1)
    write_json(folder / "engine.json", info)
    carry.carry(info["plugins"]["taken"], folder)
    began = time.perf_counter()
    write_random(info, folder / "weights.safetensors")
    print(f"weights written in {time.perf_counter() - began:.0f} s", flush=True)
    build.compile_forms(folder, info)
    print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
    print(build.check(folder), f"after {time.perf_counter() - began:.0f} s")


def write_random(info: dict[str, Any], path: Path) -> None:
    """Weights that keep their inputs' size, the same whatever they are stored in."""
    import ml_dtypes
    import torch

    from pipeline.checkpoint import ShardWriter
    from pipeline.engines.torch.build import stored_as

    numpy = {"F32": "float32", "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}
    plan = [(name, *kind) for name, kind in stored_as(info["weights"]).items()]
    with ShardWriter(path, plan) as writer:
        for name, kind, shape in plan:
            value = random_weight(name, shape, getattr(torch, info["weights"][name][0]), info["arch"])
            writer.write(name, value.contiguous().view(torch.uint8).flatten().cpu().numpy().view(numpy[kind]).reshape(shape))


def random_weight(name: str, shape: tuple[int, ...], dtype: Any, arch: dict[str, Any]) -> Any:
    """One weight on the GPU. Experts are E4M3 with a scale for each 128x128, also where they are asked for in BF16."""
    import torch

    from pipeline.models.arch import Arch

    if name == "inv_freq":
        return torch.tensor(Arch(**arch).inv_freq(), device="cuda")
    module = name.rpartition(".")[0]
    random = torch.Generator("cuda").manual_seed(zlib.crc32(module.encode()))
    if len(shape) != 3 or module.endswith("kv_b"):
        spread = 0.1 if name.endswith("bias") else shape[-1] ** -0.5
        noise = torch.randn(shape, device="cuda", generator=random)
        return (1 + noise * 0.05 if module.endswith("norm") else noise * spread).bfloat16().to(dtype)
    if name.endswith("weight_scale_inv"):
        return scales_of(shape, random)
    blocks = (shape[0], shape[1] // 128, shape[2] // 128)
    scales, out = scales_of(blocks, random), torch.empty(shape, dtype=dtype, device="cuda")
    for expert in range(shape[0]):
        codes = torch.randn(shape[1:], device="cuda", generator=random).mul_(64).to(torch.float8_e4m3fn)
        wide = scales[expert].repeat_interleave(128, 0).repeat_interleave(128, 1)
        out[expert] = codes if dtype == torch.float8_e4m3fn else (codes.float() * wide).to(dtype)
    return out


def scales_of(shape: tuple[int, ...], random: Any) -> Any:
    """F32, so that codes of magnitude 64 become weights of 1 / sqrt(columns)."""
    import torch

    return (0.5 + torch.rand(shape, device="cuda", generator=random)) * ((128 * shape[-1]) ** -0.5 / 64)


def measured(model: str, out: Path) -> Any:
    """All that is found about a model's two engines."""
    from runtime import CompiledEngine

    from pipeline.engines.torch import plugged  # noqa: F401  before an engine brings its own part of it

    engines = {plugins: CompiledEngine.load(out / plugins) for plugins in PLUGINS}
    chosen = engines["auto"].info["plugins"]
    yield {"taken": chosen["taken"], "left": chosen["left"], "experts": chosen["experts"]}
    for plugins in PLUGINS:
        size = sum(file.stat().st_size for file in (out / plugins).rglob("*") if file.is_file())
        yield {"plugins": plugins, "bytes": size}
        if model == "tiny":
            yield from ({"plugins": plugins, **row} for row in check_text(engines[plugins]))
        yield from ({"plugins": plugins, **row} for row in check_graphs(engines[plugins]))
    rounding = list(compare(engines["off"], Eager(out / "off", []), "off, not compiled"))
    yield from rounding
    others = {"auto": engines["auto"]}
    if set(chosen["taken"]) - {"moe_grouped_gemm"}:
        others["auto, experts in BF16, not compiled"] = Eager(out / "off", chosen["taken"])
    for name, other in others.items():
        for row, least in zip(compare(engines["off"], other, name), rounding, strict=True):
            yield row | {"good": row["error_against_off"] < MAX_ERROR + least["error_against_off"]}
    for rows in (1, 8, 64, 128):
        if rows <= engines["off"].info["max_batch_size"]:
            yield timed(engines, rows)
    yield prefill_timed(engines)
    carried, compiled = (len(list(folder.glob("kernels/*"))) for folder in (out / "auto" / "ops", Path(os.environ[CACHE])))
    yield {"kernels_carried": carried, "kernels_compiled_while_serving": compiled, "good": not compiled}


class Eager:
    """The graph with these plugins on the weights of an engine without: BF16 experts, as plain products."""

    def __init__(self, folder: Path, plugins: list[str]) -> None:
        import torch
        from safetensors.torch import load_file

        from pipeline.engines.torch.export import new_caches
        from pipeline.engines.torch.graph import Decoder
        from pipeline.engines.torch.plugged import ops
        from pipeline.models.arch import Arch

        self.info = json.loads((folder / "engine.json").read_text(encoding="utf-8"))
        table = ops({"taken": [name for name in plugins if name != "moe_grouped_gemm"], "experts": None})
        weights = load_file(folder / "weights.safetensors", device="cuda")
        kinds = {name: table.router_dtype if name.endswith("router.weight") else value.dtype for name, value in weights.items()}
        weights = {name: value.to(kinds[name]) for name, value in weights.items()}
        self.decoders, self.caches = {}, new_caches(self.info)
        for form in self.info["forms"]:
            with torch.device("meta"):
                module = Decoder(Arch(**self.info["arch"]), form, self.info["page_size"], torch.bfloat16, table)
            module.load_state_dict(weights, strict=True, assign=True)
            self.decoders[form] = module

    def step(self, tokens: Any, positions: Any, pages: Any) -> Any:
        """As the runtime's."""
        form = "expanded" if tokens.shape[1] >= self.info["expanded_from"] else "absorbed"
        return self.decoders[form](*(value.cuda() for value in (tokens, positions, pages)), self.caches)


def check_text(engine: Any) -> Any:
    """Greedy text against the float32 reference, which is asked for its choice after the engine's own words."""
    import torch

    from pipeline.checkpoint import dequantized
    from pipeline.models.arch import Arch
    from pipeline.models.deepseek_v3 import build

    reference = build(Arch.from_dir(TINY_R1), {name: torch.from_numpy(value) for name, value in dequantized(TINY_R1)}).cuda()
    for length in (1, 255, 256, 257, 700):
        prompt = torch.randint(3, engine.info["vocab_size"], (length,), generator=torch.Generator().manual_seed(length))
        text, logits = write(engine, prompt)
        expected = reference(torch.cat([prompt, torch.tensor(text[:-1])])[None].cuda())[0, -TOKENS:].cpu()
        top1 = (expected.argmax(-1) == torch.tensor(text)).float().mean().item()
        error = relative(logits, expected)
        good = top1 >= MIN_TOP1 and error <= MAX_ERROR
        yield {"prompt": length, "top1": round(top1, 4), "relative_error": round(error, 4), "good": good}


def compare(plain: Any, other: Any, name: str) -> Any:
    """Greedy text of plugins=off, what the other would have said at each of its words, and how sure off was where they differ."""
    import torch

    for length in (1, 70, 300, 700):
        prompt = torch.randint(3, 1024, (length,), generator=torch.Generator().manual_seed(length))
        text, off = write(plain, prompt)
        found = write(other, prompt, text)[1]
        differ, best = off.argmax(-1) != found.argmax(-1), off.topk(2).values
        margin = float(((best[:, 0] - best[:, 1]) / off.std(-1))[differ].max()) if differ.any() else 0.0
        error = relative(found, off)
        row = {"prompt": length, "equal_tokens": TOKENS - int(differ.sum()), "of": TOKENS, "margin_of_others": round(margin, 4)}
        yield {"plugins": name, **row, "error_against_off": round(error, 5)}


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
    for rows in (1, 5, 64):
        inputs = decode_inputs(engine, rows, 128)
        plain = engine.forms["absorbed"]([*(value.cuda() for value in inputs), *engine.caches])
        error = relative(engine.step(*inputs), plain)
        yield {"rows": rows, "graph_against_plain": round(error, 6), "good": error < MAX_ERROR}


def decode_inputs(engine: Any, rows: int, context: int) -> list[Any]:
    """One token of each row, the last of `context`; pages of their own as far as there are any."""
    import torch

    random, pages = torch.Generator().manual_seed(rows), -(-context // engine.info["page_size"])
    tokens = torch.randint(3, engine.info["vocab_size"], (rows, 1), generator=random)
    table = 1 + torch.arange(rows * pages).view(rows, pages) % (engine.info["num_pages"] - 1)
    return [tokens, torch.full((rows, 1), context - 1), table]


def timed(engines: dict[str, Any], rows: int) -> dict[str, Any]:
    """Microseconds of a decode step over the longest context: its CUDA graph alone, `step` with it, and the package uncaptured."""
    row: dict[str, Any] = {"rows": rows, "context": engines["off"].info["max_seq_len"]}
    for plugins, engine in engines.items():
        inputs = decode_inputs(engine, rows, row["context"])
        there = [value.cuda() for value in inputs]
        row[f"{plugins}_step_us"] = median(lambda engine=engine, inputs=inputs: engine.step(*inputs))
        row[f"{plugins}_graph_us"] = median(engine._graphs[rows].graph.replay)
        call = engine.forms["absorbed"]
        row[f"{plugins}_package_us"] = median(lambda call=call, there=there, engine=engine: call([*there, *engine.caches]), 20)
    return row | {"gain": round(row["off_graph_us"] / row["auto_graph_us"], 3)}


def prefill_timed(engines: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of a chunk of prompt after as many tokens: the expanded form."""
    import torch

    row: dict[str, Any] = {}
    for plugins, engine in engines.items():
        chunk, size = engine.info["prefill_chunk"], engine.info["page_size"]
        pages = torch.arange(1, 1 + -(-2 * chunk // size))[None]
        inputs = torch.arange(3, 3 + chunk)[None] % engine.info["vocab_size"], torch.arange(chunk, 2 * chunk)[None], pages
        row[f"{plugins}_prefill_ms"] = round(median(lambda engine=engine, inputs=inputs: engine.step(*inputs), 20) / 1e3, 3)
    return {"chunk": chunk, **row, "gain": round(row["off_prefill_ms"] / row["auto_prefill_ms"], 3)}


def relative(found: Any, wanted: Any) -> float:
    """Norm of the difference over the norm."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


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
    parser.add_argument("--only", choices=SETTINGS, help="one of the two models")
    parser.add_argument("--out", type=Path, help="keep the engines here")
    parser.add_argument("--json", type=result_file, help="write the lines here")
    parser.add_argument("--build", nargs=2, metavar=("MODEL", "PLUGINS"), help="one engine, which a run starts by itself")
    options = parser.parse_args()
    if options.build:
        sys.exit(build_one(*options.build, options.out))
    models = [options.only] if options.only else list(SETTINGS)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ[CACHE] = str(Path(scratch) / "cache")
        sys.exit(main(models, options.out or Path(scratch), options.json))
