"""Builds the compiled torch engine: describe, write weights, compile both forms side by side, check, publish.

Files: engine.json (all that the runtime has to know), weights.safetensors (in the engine's type), absorbed.pt2 and
expanded.pt2, ops/ (the plugins that the graph calls, if any), and the tokenizer's and generation's files of the checkpoint.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipeline.core.errors import ConfigError, MissingToolError, StageError
from pipeline.core.jsonio import write_json
from pipeline.core.memory import available_memory
from pipeline.core.process import die_with_parent
from pipeline.core.stage import StageContext
from pipeline.engines.companions import copy_companions, eos_token_ids
from pipeline.engines.torch.carry import OPS, carry, sources
from pipeline.engines.torch.choose import choose
from pipeline.engines.torch.export import write_compiler_wrapper
from pipeline.engines.torch.graph import FORMS, Decoder
from pipeline.engines.torch.plugged import ops
from pipeline.engines.torch.toolchain import INSTALL_CXX, cpu_features, cxx, resolve_compiler
from pipeline.engines.torch.weights import parameters, write_weights
from pipeline.models.arch import Arch
from pipeline.share import code_root, share
from plugins.mla_prefill import crossover

if TYPE_CHECKING:
    from pipeline.config.schema import TorchEngineConfig

__all__ = ["build", "describe", "stored_as"]

EXPANDED_FROM = 256
"""Of kernels that were not measured, as in the literature."""
KV_DTYPES = {"fp8": "float8_e4m3fn"}
SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8"}


def build(ctx: StageContext) -> None:
    """Fill `ctx.out` from convert's checkpoint and `engine.torch`."""
    settings = ctx.config.engine.torch
    assert settings is not None
    source = ctx.inputs["convert"]
    arch = Arch.from_dir(source)
    if settings.device == "cuda":
        refuse_gpu(settings)
    info = describe(arch, settings, source)
    refuse_impossible(arch, settings, info)
    if settings.compiler == "auto" and info["compiler"] == "export":
        why = cxx()[1]
        ctx.progress.note(
            f"no C++ compiler ({why}): the engine is the exported graph, 2 to 4 times slower. To compile: {INSTALL_CXX}"
        )
    write_json(ctx.out / "engine.json", info)
    carry(info["plugins"]["taken"], ctx.out)
    ctx.progress.start(weight_bytes(info), "B")
    found, path = parameters(source, info["plugins"]["experts"]), ctx.out / "weights.safetensors"
    write_weights(found, arch, stored_as(info["weights"]), path, ctx.progress.advance)
    if settings.device == "cuda" and settings.plugins == "auto":
        tell_plugins(ctx, info["plugins"])
    ctx.progress.note(f"compiling {' and '.join(info['forms'])} with {info['compiler']}")
    compile_forms(ctx.out, info)
    ctx.progress.note(check(ctx.out))
    copy_companions(source, ctx.out)


def tell_plugins(ctx: StageContext, plugins: dict[str, Any]) -> None:
    """Which are taken, and why the others are not: some of it can be changed."""
    ctx.progress.note(f"plugins: {', '.join(plugins['taken']) or 'none'}")
    for name, why in plugins["left"].items():
        ctx.progress.note(f"without {name}: {why}")


def describe(arch: Arch, settings: TorchEngineConfig, source: Path) -> dict[str, Any]:
    """engine.json: what the runtime, the scheduler and the compile processes need."""
    chunk = min(settings.prefill_chunk, settings.max_seq_len)
    pages = -(-settings.max_seq_len // settings.page_size)
    plugins = choose(arch, settings, source)
    expanded = expanded_from(settings, plugins["taken"])
    compiler = resolve_compiler(settings.compiler)
    return {
        "arch": asdict(arch),
        "bos_token_id": arch.bos_token_id,
        "compiler": compiler,
        "cpu_features": list(cpu_features()) if compiler == "aoti" else [],
        "device": settings.device,
        "dtype": settings.dtype,
        "eos_token_ids": eos_token_ids(arch, source),
        "expanded_from": expanded,
        "forms": [form for form in FORMS if form == "absorbed" or chunk >= min(expanded)],
        "inputs": ["tokens", "positions", "pages", *(f"cache.{i}" for i in range(arch.num_hidden_layers))],
        "kv_dtype": KV_DTYPES.get(settings.kv_dtype, settings.dtype),
        "latent_dim": arch.latent_dim,
        "max_batch_size": settings.max_batch_size,
        "max_seq_len": settings.max_seq_len,
        "mtp": "not used: the MTP layers of the checkpoint are left out",
        "num_layers": arch.num_hidden_layers,
        "num_pages": settings.max_batch_size * pages + 1,
        "page_size": settings.page_size,
        "plugins": plugins | {"sources": sources(plugins["taken"])},
        "prefill_chunk": chunk,
        "threads": settings.threads,
        "torch": torch.__version__.partition("+")[0],
        "vocab_size": arch.vocab_size,
        "weights": weight_table(arch, settings, plugins),
    }


def expanded_from(settings: TorchEngineConfig, taken: list[str]) -> list[int]:
    """Tokens of a prompt's chunk from which the expanded form is taken, in a context of one page, of two, and so on."""
    contexts = range(settings.page_size, settings.max_seq_len + settings.page_size, settings.page_size)
    if settings.expanded_from or not {"mla_decode", "mla_prefill"} <= set(taken):
        return [settings.expanded_from or EXPANDED_FROM] * len(contexts)
    return [crossover.expanded_from(context, "fp8" if settings.kv_dtype == "fp8" else "bf16") for context in contexts]


def weight_table(arch: Arch, settings: TorchEngineConfig, plugins: dict[str, Any]) -> dict[str, list[Any]]:
    """Name -> type and shape of every weight of the graph."""
    with torch.device("meta"):
        decoder = Decoder(arch, "absorbed", settings.page_size, getattr(torch, settings.dtype), ops(plugins))
    state = decoder.state_dict().items()
    return {name: [str(value.dtype).removeprefix("torch."), list(value.shape)] for name, value in state}


def stored_as(weights: dict[str, list[Any]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The same with safetensors' names of the types, as `write_weights` takes it."""
    return {name: (SAFETENSORS_DTYPES[getattr(torch, dtype)], tuple(shape)) for name, (dtype, shape) in weights.items()}


def weight_bytes(info: dict[str, Any]) -> int:
    """Size of all weights."""
    return sum(prod(shape) * getattr(torch, dtype).itemsize for dtype, shape in info["weights"].values())


def refuse_impossible(arch: Arch, settings: TorchEngineConfig, info: dict[str, Any]) -> None:
    """Stop before hours of work that cannot end well."""
    if settings.max_seq_len > arch.max_position_embeddings:
        raise ConfigError(
            f"engine.torch.max_seq_len={settings.max_seq_len} exceeds the {arch.max_position_embeddings} positions that the model "
            f"was made for: set it to {arch.max_position_embeddings} or less."
        )
    places, kv = info["num_pages"] * info["page_size"], info["kv_dtype"]
    cache = info["num_layers"] * places * info["latent_dim"] * getattr(torch, kv).itemsize
    needed, free = weight_bytes(info) + cache, free_memory(settings.device)
    if needed > free:
        smaller = "" if settings.kv_dtype == "fp8" else " or engine.torch.kv_dtype=fp8"
        raise ConfigError(
            f"The engine needs {needed / 1e9:.1f} GB in {info['dtype']} ({cache / 1e9:.1f} GB of it KV cache in {kv}), "
            f"but {settings.device} has {free / 1e9:.1f} GB free: lower engine.torch.max_batch_size or max_seq_len, set "
            f"engine.torch.dtype=bfloat16{smaller}, or use engine=trtllm."
        )


def refuse_gpu(settings: TorchEngineConfig) -> None:
    """An engine is compiled on the kind of GPU that runs it; its grouped products need Hopper or newer, in bfloat16."""
    if not torch.cuda.is_available():
        raise MissingToolError(
            "engine.torch.device=cuda needs a GPU that torch sees, because an engine is compiled on the kind of GPU that "
            "runs it: build it there, or set engine.torch.device=cpu."
        )
    if settings.dtype != "bfloat16":
        raise ConfigError(f"engine.torch.dtype={settings.dtype} is not for device=cuda: set engine.torch.dtype=bfloat16.")
    major, minor = torch.cuda.get_device_capability()
    if major < 9:
        name = torch.cuda.get_device_name()
        raise ConfigError(f"{name} is sm_{major}{minor}, below sm_90 of the engine's kernels: set engine.torch.device=cpu.")


def free_memory(device: str) -> int:
    """Bytes that can be allocated now."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else available_memory()


def compile_forms(out: Path, info: dict[str, Any]) -> None:
    """One process a form, side by side; what they leave lies inside `out`, so a killed build leaves nothing elsewhere.

    They share Inductor's cache: which vector instructions the compiler knows is tried out once (small libraries).
    """
    with tempfile.TemporaryDirectory(prefix=".compile-", dir=out.absolute()) as scratch:
        running: list[tuple[str, subprocess.Popen[bytes]]] = []
        env = compile_env(Path(scratch), info["compiler"])
        try:
            for form in info["forms"]:
                running.append((form, start_compile(form, out.absolute(), Path(scratch), env)))
            for form, process in running:
                if process.wait():
                    log = (Path(scratch) / f"{form}.log").read_text(encoding="utf-8", errors="replace")
                    raise StageError(f"Compiling the {form} form ended with code {process.returncode}:\n{log[-4000:]}")
        finally:
            for _, process in running:
                process.kill()
                process.wait()


def compile_env(scratch: Path, compiler: str) -> dict[str, str]:
    """An environment with the cache, temporary files and the compiler inside `scratch`."""
    env = python_env() | {"PYTHONHASHSEED": "0", "TORCHINDUCTOR_CACHE_DIR": str(scratch / "cache"), "TMPDIR": str(scratch)}
    if compiler == "aoti":
        write_compiler_wrapper(cxx()[0], scratch / "cxx")
        env["CXX"] = str(scratch / "cxx")
    return env


def start_compile(form: str, out: Path, folder: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start `export.py` in `folder`; what it says goes to FORM.log there."""
    command = [sys.executable, "-m", "pipeline.engines.torch.export", form, str(out)]
    with open(folder / f"{form}.log", "wb") as log:
        return subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT, preexec_fn=die_with_parent)


def check(out: Path) -> str:
    """Compare the engine, in a process of its own, with the graph it was made from; a sentence about it.

    Kernels of plugins are compiled on the way, into the folder that the engine carries.
    """
    runtime = share("triton_repo") / "torch" / "1" / "runtime.py"
    command = [sys.executable, "-m", "pipeline.engines.torch.selfcheck", str(out), str(runtime)]
    env = python_env() | {"R1_PIPELINE_CACHE": str(out.absolute() / OPS)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise StageError(f"The compiled engine failed its check, so it is not published: {reason(done.returncode, done.stderr)}")
    return str(json.loads(done.stdout.splitlines()[-1]))


def reason(code: int, stderr: str) -> str:
    """Why the check failed, as far as it is known."""
    if code == -11:
        return (
            "the process died of a segmentation fault. Where torch carries an older C++ library than the compiler, this helps: "
            "LD_PRELOAD=$(g++ -print-file-name=libstdc++.so.6)"
        )
    return "\n".join(line for line in stderr.splitlines()[-12:] if line.strip())


def python_env() -> dict[str, str]:
    """This environment, with the pipeline importable."""
    paths = [str(code_root()), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
