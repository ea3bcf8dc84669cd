#!/usr/bin/env python3
"""What building TensorRT engines costs at DeepSeek-R1's real size: time, file and memory of one decoder layer of one rank.

    python scripts/bench_tensorrt_build.py [--quick] [--json FILE] [--format fp8_block|nvfp4|bf16 ...] [--ranks 8] [--inputs]
    python scripts/bench_tensorrt_build.py --whole CHECKPOINT [--json FILE]

Weights are random bytes in R1's shapes and in the format's own layout: 256 experts over the ranks, MLA, the shared expert. Each
engine (absorbed for decode, expanded for prefill) is built in a process of its own, for SM120, as `engine=tensorrt` does. The limit
beside it is the file itself: weights, which TensorRT has to hold once. `--quick`: 8 of the rank's experts. `--inputs`: weights are
inputs of the engine (engine.tensorrt.weights=inputs), so that it holds none. `--whole`: every layer of one rank of a checkpoint, as
of `scripts/make_r1_headers.py`, a network each, with weights as inputs; alike networks share an engine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint import Checkpoint, ShardWriter
from pipeline.checkpoint.layout import parameters, place_of
from pipeline.checkpoint.reader import DTYPES
from pipeline.config.load import load as load_config
from pipeline.engines.tensorrt.builder import build, describe, fingerprint
from pipeline.engines.tensorrt.graph import Graph
from pipeline.engines.tensorrt.library import installed_version, load
from pipeline.engines.tensorrt.network.decoder import define
from pipeline.engines.tensorrt.network.spec import Spec
from pipeline.engines.tensorrt.networks import name_of, networks
from pipeline.engines.tensorrt.plan_file import kernels
from pipeline.engines.tensorrt.weights import Weights
from pipeline.engines.tensorrt.worker import network, peak_bytes
from pipeline.formats import FORMATS, Output
from pipeline.models.arch import Arch

LAYER = 3
SHAPES = {"absorbed": (32, 1, 8192), "expanded": (1, 2048, 8192)}
"""Form -> rows, tokens a row, rows of the cache."""


def main() -> None:
    """Build each format's two engines, print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 experts of the rank instead of all")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--format", action="append", choices=("fp8_block", "nvfp4", "bf16"), help="weights; may be given twice")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--inputs", action="store_true", help="weights as inputs")
    parser.add_argument("--whole", type=Path, metavar="CHECKPOINT", help="all layers of rank 0 of 8")
    options = parser.parse_args()
    hf = dict(load_config(["+hw=b200", "model=deepseek_r1"]).model.hf)
    if options.quick:
        hf |= {"n_routed_experts": 8 * options.ranks}
    arch, rows = Arch.from_hf(hf), []
    print(f"tensorrt_rtx {installed_version('tensorrt_rtx')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    if options.whole:
        rows.append(whole_rank(options.whole, options.ranks))
    for name in () if options.whole else options.format or ["fp8_block", *([] if options.quick else ["nvfp4"])]:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            write(Path(folder), hf, arch, name, options.ranks)
            for form in SHAPES:
                rows.append(measured(Path(folder), form, name, options.ranks, options.inputs))
                print(line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"tensorrt_rtx": installed_version("tensorrt_rtx"), "rows": rows}, indent=1) + "\n")


def whole_rank(folder: Path, ranks: int) -> dict[str, Any]:
    """All networks of rank 0, one a layer and form, built where they are not alike."""
    started, cpu, checkpoint = time.monotonic(), time.process_time(), Checkpoint.open(folder)
    batch, _, cache = SHAPES["absorbed"]
    words = (
        f"parallel.tp={ranks}", "engine.tensorrt.weights=inputs", "engine.tensorrt.layers_per_engine=1",
        f"engine.tensorrt.max_seq_len={cache}", f"engine.tensorrt.max_batch_size={batch}", "engine.tensorrt.prefill_chunk=2048",
    )  # fmt: skip
    config = load_config(["+hw=rtx_pro_6000", "model=deepseek_r1", "engine=tensorrt", *words])
    specs, sizes = [spec for spec in networks(config, checkpoint.arch) if spec.rank == 0], {}
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        for spec in specs:
            net, _ = network(checkpoint, "tensorrt_rtx", spec.plain(), Path(scratch), external=True, values=False)
            path = Path(scratch) / "engine"
            if (key := fingerprint(net)) not in sizes:
                build(net, "tensorrt_rtx", [120], path, refit=False, advance=lambda percent: None, stopped=lambda: False)
                sizes[key] = path.stat().st_size
                print(f"{name_of(spec):30} {sizes[key] / 1e6:5.1f} MB", flush=True)
    peak = peak_bytes()
    row = {
        "networks": len(specs), "engines": len(sizes), "bytes": sum(sizes.values()), "seconds": time.monotonic() - started,
        "cpu_seconds": time.process_time() - cpu, "peak": peak,
    }  # fmt: skip
    print(
        f"{row['networks']} networks, {row['engines']} engines of {row['bytes'] / 1e6:.0f} MB in {row['seconds']:.0f} s "
        f"({row['cpu_seconds']:.0f} CPU), peak {peak / 1e9:.2f} GB"
    )
    return row


def line(row: dict[str, Any]) -> str:
    """One engine."""
    return (
        f"{row['format']:10} {row['form']:9} {row['weights'] / 1e9:5.2f} GB of weights -> engine {row['engine'] / 1e9:5.2f} GB in "
        f"{row['seconds']:5.1f} s ({row['cpu_seconds']:5.1f} CPU), peak {row['peak'] / 1e9:5.2f} GB "
        f"(x{row['peak'] / row['weights']:.2f}), {row['layers']} layers, fused attention: {row['fused_attention']}"
    )


def wanted(arch: Arch, ranks: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The parameters of one layer that one rank has."""
    prefix = f"model.layers.{LAYER}."
    for name, shape in parameters(arch):
        expert = name.split(".experts.")[1].split(".")[0] if ".experts." in name else None
        if name.startswith(prefix) and (expert is None or int(expert) < arch.n_routed_experts // ranks):
            yield name, shape


def write(folder: Path, hf: dict[str, Any], arch: Arch, name: str, ranks: int) -> None:
    """A checkpoint of that layer alone. NVFP4 leaves attention in BF16, as NVIDIA's does."""
    random, plan = np.random.default_rng(0), []
    for parameter, shape in wanted(arch, ranks):
        module, _, leaf = parameter.rpartition(".")
        quantised = place_of(module, arch).linear and (name != "nvfp4" or ".mlp." in parameter)
        outputs = FORMATS[name].outputs(module, shape) if quantised and len(shape) == 2 else (Output(leaf, "BF16", shape),)
        plan += [(f"{module}.{item.suffix}", item.dtype, item.shape) for item in outputs]
    (folder / "config.json").write_text(json.dumps(hf))
    with ShardWriter(folder / "model.safetensors", plan) as writer:
        for tensor, dtype, shape in plan:
            writer.write(tensor, values(random, dtype, shape))


def values(random: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Any:
    """Random bytes that are finite numbers; scales are small."""
    if dtype == "F32":
        return random.uniform(1e-4, 2e-4, shape).astype(np.float32)
    if dtype == "BF16":
        return (random.standard_normal(shape, np.float32) * 0.02).astype(DTYPES["BF16"])
    codes = np.frombuffer(random.bytes(int(np.prod(shape))), np.uint8).reshape(shape)
    return codes if dtype == "U8" else (codes & 0xF7 if shape[-1] > 1000 else codes & 0x37).view(DTYPES[dtype])


def measured(folder: Path, form: str, name: str, ranks: int, inputs: bool) -> dict[str, Any]:
    """Build in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(build_one, (folder, form, name, ranks, inputs))


def build_one(folder: Path, form: Any, name: str, ranks: int, inputs: bool) -> dict[str, Any]:
    """One engine, and what it took."""
    started, cpu = time.monotonic(), time.process_time()
    checkpoint, _ = Checkpoint.survey(folder)  # it holds one layer alone, which `open` would refuse
    batch, tokens, cache = SHAPES[form]
    spec = Spec(arch=checkpoint.arch, form=form, max_batch=batch, max_tokens=tokens, max_seq_len=cache, first_layer=LAYER,
                last_layer=LAYER + 1, ranks=ranks)  # fmt: skip
    net, path = Graph(load("tensorrt_rtx"), external_weights=inputs), folder / f"{form}.engine"
    define(net, spec, Weights(checkpoint, folder, spec.dtype, values=not inputs))
    build(net, "tensorrt_rtx", [120], path, refit=False, advance=lambda percent: None, stopped=lambda: False)
    fused = any("mha" in kernel for kernel in kernels(path))
    return {
        "format": name, "form": form, "weights_as": "inputs" if inputs else "embedded",
        "ranks": ranks, "experts": len(spec.experts), "layers": describe(net)["layers"],
        "weights": sum(entry.num_bytes for entry in checkpoint.entries.values()), "engine": path.stat().st_size,
        "seconds": time.monotonic() - started, "cpu_seconds": time.process_time() - cpu,
        "peak": peak_bytes(), "fused_attention": fused,
    }  # fmt: skip


if __name__ == "__main__":
    main()
