#!/usr/bin/env python3
"""Decode speed of the compiled torch engine beside its peers and the memory limit, in one run.

    python scripts/bench_engine.py [--engine DIR] [--beside DIR] [--quick] [--json FILE]

For each batch size, one decode step at a context of 128 tokens, median of many, in microseconds:
  ours          the engine folder (default .pipeline/latest/engine, made by `python -m pipeline engine +hw=cpu`)
  beside        another engine of the same model, such as one with engine.torch.plugins=off
  eager         the same graph, not compiled
  transformers  DeepseekV3ForCausalLM with its own KV cache on the same dequantised weights
  limit         bytes of the weights that the step must read / read bandwidth measured here
Before timing, the first greedy tokens of all three are compared: in float32, the cache included, they must be equal; in
bfloat16, where sums are rounded in another order, and over an FP8 cache the share that agrees is reported.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "triton_repo" / "torch" / "1")]

from runtime import CompiledEngine  # noqa: E402

from pipeline.checkpoint import dequantized  # noqa: E402
from pipeline.engines.torch.export import load_decoder, new_caches  # noqa: E402
from pipeline.models.arch import Arch  # noqa: E402
from scripts._options import result_file  # noqa: E402

CHECKPOINT = ROOT / "pipeline" / "data" / "tiny_r1"
CONTEXT = 128
CHECKED = 16


def main() -> int:
    """Check, time, print a table."""
    warnings.simplefilter("ignore", FutureWarning)  # transformers renames arguments between releases
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, default=Path(".pipeline/latest/engine"))
    parser.add_argument("--beside", type=Path, help="another engine of the same model")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: under 50 s on 2 cores")
    parser.add_argument("--json", type=result_file, help="write the rows and the environment here")
    options = parser.parse_args()
    for folder in filter(None, (options.engine, options.beside)):
        if not (folder / "engine.json").is_file():
            sys.exit(f"{folder} holds no engine: build one with `python -m pipeline engine +hw=cpu`, or give --engine DIR.")
    result = measure(options.engine, options.beside, seconds=0.5 if options.quick else 4.0)
    print("\n".join(table(result)))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


@torch.inference_mode()
def measure(folder: Path, beside: Path | None, seconds: float) -> dict[str, Any]:
    """All rows; `seconds` is the time spent on each number."""
    engine = CompiledEngine.load(folder)
    torch.set_num_threads(engine.threads)
    arch = Arch.from_dir(CHECKPOINT)
    prompt = torch.randint(3, arch.vocab_size, (1, CONTEXT), generator=torch.Generator().manual_seed(0))
    engines = {"ours": engine} | ({"beside": CompiledEngine.load(beside)} if beside else {})
    decoders = {name: each.step for name, each in engines.items()} | {"eager": step_eager(folder, engine.info)}
    size = engine.info["page_size"]
    peer = load_transformers(engine.device, getattr(torch, engine.info["dtype"]))
    texts = {name: greedy(step, prompt, size) for name, step in decoders.items()}
    texts["transformers"] = greedy_transformers(peer, prompt)
    agreement = statistics.mean(len(set(tokens)) == 1 for tokens in zip(*texts.values(), strict=True))
    if agreement < 1 and all({each.info["dtype"], each.info["kv_dtype"]} == {"float32"} for each in engines.values()):
        sys.exit(f"the greedy tokens differ, so no speed is reported: {texts}")
    bandwidth = read_bandwidth(engine.device)
    rows = []
    for batch in sorted({1, 8, engine.info["max_batch_size"]}):
        calls = {name: decode_of(step, prompt, batch, size) for name, step in decoders.items()}
        timed = {f"{name}_us": time_step(call, engine.device, seconds) for name, call in calls.items()}
        timed["transformers_us"] = time_step(decode_transformers(peer, prompt, batch), engine.device, seconds)
        rows.append({"batch": batch, **timed, "limit_us": 1e6 * step_bytes(arch, engine.info, batch) / bandwidth})
    built = {name: described(each) for name, each in engines.items()}
    about = {"read_bandwidth": bandwidth, "context": CONTEXT, "greedy_agreement": agreement, "engines": built}
    return {"rows": rows, **about, **environment(engine)}


Step = Callable[[Tensor, Tensor, Tensor], Tensor]


def step_eager(folder: Path, info: dict[str, Any]) -> Step:
    """The graph that was compiled, run by torch's interpreter."""
    decoder, caches = load_decoder(folder, "absorbed"), new_caches(info)

    def step(tokens: Tensor, positions: Tensor, pages: Tensor) -> Tensor:
        return decoder(*(value.to(info["device"]) for value in (tokens, positions, pages)), caches)

    return step


def page_table(batch: int, length: int, page_size: int) -> Tensor:
    """[B, P] of pages of their own; page 0 is scratch."""
    each = -(-length // page_size)
    return 1 + torch.arange(batch * each).view(batch, each)


def greedy(step: Step, prompt: Tensor, size: int) -> list[int]:
    """The first tokens after the prompt."""
    pages, tokens = page_table(1, CONTEXT + CHECKED, size), []
    logits = step(prompt, torch.arange(CONTEXT)[None], pages)
    for position in range(CONTEXT, CONTEXT + CHECKED):
        tokens.append(int(logits.argmax()))
        logits = step(torch.tensor([tokens[-1:]]), torch.tensor([[position]]), pages)
    return tokens


def decode_of(step: Step, prompt: Tensor, batch: int, size: int) -> Callable[[], object]:
    """One decode step of `batch` rows after the prompt."""
    pages = page_table(batch, CONTEXT + 1, size)
    for row in range(batch):
        step(prompt, torch.arange(CONTEXT)[None], pages[row : row + 1])
    tokens, positions = prompt[:, :1].expand(batch, 1).clone(), torch.full((batch, 1), CONTEXT)
    return lambda: step(tokens, positions, pages)


def load_transformers(device: torch.device, dtype: torch.dtype) -> Any:
    """The peer, on the same dequantised weights (its own loader does not read FP8 blocks on a CPU)."""
    from safetensors.torch import save_file
    from transformers import DeepseekV3ForCausalLM

    config = json.loads((CHECKPOINT / "config.json").read_text(encoding="utf-8"))
    layers = config["num_hidden_layers"]
    state = {name: torch.from_numpy(value) for name, value in dequantized(CHECKPOINT)}
    with tempfile.TemporaryDirectory() as folder:
        save_file(
            {name: value for name, value in state.items() if not name.startswith(f"model.layers.{layers}.")},
            f"{folder}/model.safetensors",
            {"format": "pt"},
        )
        Path(folder, "config.json").write_text(
            json.dumps(config | {"quantization_config": None, "num_nextn_predict_layers": 0}), encoding="utf-8"
        )
        return DeepseekV3ForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()


def greedy_transformers(model: Any, prompt: Tensor) -> list[int]:
    """The peer's first tokens."""
    out = model.generate(
        prompt.to(model.device), max_new_tokens=CHECKED, min_new_tokens=CHECKED, do_sample=False, eos_token_id=None, pad_token_id=2
    )
    return out[0, CONTEXT:].tolist()


def decode_transformers(model: Any, prompt: Tensor, batch: int) -> Callable[[], object]:
    """One decode step of `batch` rows; the cache is cut back after each."""
    out = model(prompt.expand(batch, -1).to(model.device), use_cache=True)
    tokens = prompt[:, :1].expand(batch, 1).to(model.device)

    def step() -> None:
        model(tokens, past_key_values=out.past_key_values, use_cache=True)
        out.past_key_values.crop(-1)

    return step


def time_step(step: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median microseconds of one call."""
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for _ in range(3):
        step()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        sync()
        started = time.perf_counter()
        step()
        sync()
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second of summing a buffer far larger than the caches."""
    buffer = torch.ones((1 << 30 if device.type == "cuda" else 1 << 28) // 4, device=device)
    return buffer.numel() * 4e6 / time_step(lambda: buffer.sum(), device, 0.5)


def step_bytes(arch: Arch, info: dict[str, Any], batch: int) -> int:
    """Bytes of the weights that one step reads; of the experts, as many as `batch` tokens hit on average."""
    hit = 1 - (1 - arch.num_experts_per_tok / arch.n_routed_experts) ** batch
    total = 0.0
    for name, (dtype, shape) in info["weights"].items():
        size = torch.Size(shape).numel() * torch.empty((), dtype=getattr(torch, dtype)).element_size()
        routed = len(shape) == 3 and shape[0] == arch.n_routed_experts
        total += 0 if name.startswith("embed") else size * hit if routed else size
    return round(total)


def described(engine: CompiledEngine) -> dict[str, Any]:
    """What an engine was built with."""
    return {name: engine.info[name] for name in ("dtype", "kv_dtype", "compiler")} | {"plugins": engine.info["plugins"]["taken"]}


def environment(engine: CompiledEngine) -> dict[str, Any]:
    """What was measured with what."""
    import transformers

    cpu = next(
        (line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")),
        platform.machine(),
    )
    device = torch.cuda.get_device_name() if engine.device.type == "cuda" else cpu
    return {
        "device": device, "threads": engine.threads, "dtype": engine.info["dtype"],
        "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
    }  # fmt: skip


def table(result: dict[str, Any]) -> list[str]:
    """The rows, for people."""
    versions = f"torch {result['torch']}, transformers {result['transformers']}"
    lines = [
        f"{result['device']}, {result['threads']} threads, {result['dtype']}, {versions}",
        f"greedy tokens equal: {100 * result['greedy_agreement']:.0f} %; read bandwidth {result['read_bandwidth'] / 1e9:.1f} GB/s",
        f"microseconds a decode step at {result['context']} tokens of context",
        "",
        f"{'batch':>5} {'ours':>9} {'beside':>9} {'eager':>9} {'transformers':>13} {'limit':>9} {'ours tok/s':>11}",
    ]
    for row in result["rows"]:
        beside = f"{row['beside_us']:>9.0f}" if "beside_us" in row else f"{'-':>9}"
        times = f"{row['ours_us']:>9.0f} {beside} {row['eager_us']:>9.0f} {row['transformers_us']:>13.0f} {row['limit_us']:>9.0f}"
        lines.append(f"{row['batch']:>5} {times} {1e6 * row['batch'] / row['ours_us']:>11.0f}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
