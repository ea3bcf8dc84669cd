#!/usr/bin/env python3
"""What building TensorRT engines costs at DeepSeek-R1's real size: time, file and memory of one decoder layer of one rank.

    python scripts/bench_tensorrt_build.py [--quick] [--json FILE] [--format NAME ...] [--experts N] [--ranks 8] [--inputs]
    python scripts/bench_tensorrt_build.py --rank [--format nvfp4] [--form absorbed] [--json FILE]
    python scripts/bench_tensorrt_build.py --whole CHECKPOINT [--json FILE]

Weights are random bytes in R1's shapes and in the format's own layout: 256 experts over the ranks, MLA, the shared expert. Each
engine (absorbed for decode, expanded for prefill) is built in a process of its own, for SM120, as `engine=tensorrt` does. The limit
beside it is the file itself: weights, which TensorRT has to hold once. `--quick`: 8 of the rank's experts. `--inputs`: weights are
inputs of the engine (engine.tensorrt.weights=inputs), so that it holds none. `--rank`: every layer of rank 0, one after the other,
with its weights inside; each engine is deleted when it has been measured, so that 5 GB of disk do. `--whole`: every layer of one
rank of a checkpoint, as of `scripts/make_r1_headers.py`, a network each, with weights as inputs; alike networks share an engine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.checkpoint import Checkpoint, ShardWriter  # noqa: E402
from pipeline.checkpoint.layout import parameters, place_of  # noqa: E402
from pipeline.checkpoint.reader import DTYPES  # noqa: E402
from pipeline.config.load import load as load_config  # noqa: E402
from pipeline.engines.tensorrt.builder import build, describe, fingerprint  # noqa: E402
from pipeline.engines.tensorrt.graph import Graph  # noqa: E402
from pipeline.engines.tensorrt.library import installed_version, load  # noqa: E402
from pipeline.engines.tensorrt.network.decoder import define  # noqa: E402
from pipeline.engines.tensorrt.network.spec import Spec  # noqa: E402
from pipeline.engines.tensorrt.networks import name_of, networks  # noqa: E402
from pipeline.engines.tensorrt.plan_file import kernels  # noqa: E402
from pipeline.engines.tensorrt.weights import Weights  # noqa: E402
from pipeline.engines.tensorrt.worker import network, peak_bytes  # noqa: E402
from pipeline.formats import FORMATS, Output  # noqa: E402
from pipeline.models.arch import Arch  # noqa: E402
from scripts._options import result_file  # noqa: E402

LAYER = 3
SHAPES = {"absorbed": (32, 1, 8192), "expanded": (1, 2048, 8192)}
"""Form -> rows, tokens a row, rows of the cache."""


def main() -> None:
    """Build each format's two engines, print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 experts of the rank instead of all")
    parser.add_argument("--json", type=result_file, help="write the figures there, too")
    parser.add_argument("--format", action="append", choices=sorted(FORMATS), help="weights; may be given twice")
    parser.add_argument("--experts", type=int, help="experts of the rank, of R1's width")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--form", choices=SHAPES, help="absorbed (decode) or expanded (prefill) alone")
    parser.add_argument("--inputs", action="store_true", help="weights as inputs")
    parser.add_argument("--rank", action="store_true", help="all layers of rank 0, weights inside")
    parser.add_argument("--whole", type=Path, metavar="CHECKPOINT", help="all layers of rank 0 of 8, weights as inputs")
    options = parser.parse_args()
    hf = dict(load_config(["+hw=b200", "model=deepseek_r1"]).model.hf)
    if experts := 8 if options.quick else options.experts:
        hf |= {"n_routed_experts": experts * options.ranks}
    print(f"tensorrt_rtx {installed_version('tensorrt_rtx')}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    rows = []
    for row in rows_of(options, hf, Arch.from_hf(hf)):
        rows.append(row)
        if options.json:
            options.json.write_text(json.dumps({"tensorrt_rtx": installed_version("tensorrt_rtx"), "rows": rows}, indent=1) + "\n")


def rows_of(options: argparse.Namespace, hf: dict[str, Any], arch: Arch) -> Iterator[dict[str, Any]]:
    """What was asked for, as it is measured."""
    forms = [options.form] if options.form else list(SHAPES)
    if options.whole:
        yield whole_rank(options.whole, options.ranks)
    elif options.rank:
        specs = [spec for spec in rank_specs(arch, options.ranks, "embedded") if spec.form in forms]
        yield from real_rank(hf, arch, (options.format or ["nvfp4"])[0], specs)
    else:
        for name in options.format or ["fp8_block", *([] if options.quick else ["nvfp4"])]:
            specs = [one_layer(arch, form, options.ranks) for form in forms]
            yield from measured(hf, arch, name, specs, options.inputs)


def one_layer(arch: Arch, form: Any, ranks: int) -> Spec:
    """The first MoE layer."""
    batch, tokens, cache = SHAPES[form]
    shapes = {"max_batch": batch, "max_tokens": tokens, "max_seq_len": cache}
    return Spec(arch=arch, form=form, first_layer=LAYER, last_layer=LAYER + 1, ranks=ranks, **shapes)


def rank_specs(arch: Arch, ranks: int, weights: str) -> list[Spec]:
    """All networks of rank 0, one a layer and form."""
    batch, _, cache = SHAPES["absorbed"]
    words = (
        f"parallel.tp={ranks}", f"engine.tensorrt.weights={weights}", "engine.tensorrt.layers_per_engine=1",
        f"engine.tensorrt.max_seq_len={cache}", f"engine.tensorrt.max_batch_size={batch}", "engine.tensorrt.prefill_chunk=2048",
    )  # fmt: skip
    config = load_config(["+hw=rtx_pro_6000", "model=deepseek_r1", "engine=tensorrt", *words])
    return [spec for spec in networks(config, arch) if spec.rank == 0]


def real_rank(hf: dict[str, Any], arch: Arch, name: str, specs: list[Spec]) -> Iterator[dict[str, Any]]:
    """Every layer's engines, then their sums."""
    started, rows = time.monotonic(), []
    for layer in sorted({spec.first_layer for spec in specs}):
        for row in measured(hf, arch, name, [spec for spec in specs if spec.first_layer == layer], inputs=False):
            rows.append(row)
            yield row
    total = {"rank": name, "engines": len(rows), "seconds": time.monotonic() - started, "peak": max(row["peak"] for row in rows)}
    total |= {key: sum(row[key] for row in rows) for key in ("weights", "engine", "cpu_seconds")}
    told = f"{total['engines']} engines of {total['engine'] / 1e9:.1f} GB in {total['cpu_seconds']:.0f} CPU seconds"
    print(f"rank 0 of {specs[0].ranks}: {told} ({total['seconds']:.0f} s), peak {total['peak'] / 1e9:.2f} GB")
    yield total


def whole_rank(folder: Path, ranks: int) -> dict[str, Any]:
    """All networks of rank 0 with weights as inputs, built where they are not alike."""
    started, cpu, checkpoint = time.monotonic(), time.process_time(), Checkpoint.open(folder)
    specs, sizes = rank_specs(checkpoint.arch, ranks, "inputs"), {}
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
        f"{row['format']:10} layer {row['layer']:2} {row['form']:9} {row['weights'] / 1e9:5.2f} GB of weights -> engine "
        f"{row['engine'] / 1e9:5.2f} GB in {row['seconds']:5.1f} s ({row['cpu_seconds']:5.1f} CPU), peak "
        f"{row['peak'] / 1e9:5.2f} GB ({row['anonymous'] / 1e9:.2f} without pages of files), {row['layers']} layers, fused "
        f"attention: {row['fused_attention']}"
    )


def wanted(arch: Arch, layer: int, ranks: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The parameters of one layer that one rank has; of the first with the embedding, of the last with the head."""
    ends = {0: ["model.embed_tokens."], arch.num_hidden_layers - 1: ["model.norm.", "lm_head."]}
    prefixes = [f"model.layers.{layer}.", *ends.get(layer, [])]
    for name, shape in parameters(arch):
        expert = name.split(".experts.")[1].split(".")[0] if ".experts." in name else None
        if name.startswith(tuple(prefixes)) and (expert is None or int(expert) < arch.n_routed_experts // ranks):
            yield name, shape


def write(folder: Path, hf: dict[str, Any], arch: Arch, name: str, layer: int, ranks: int) -> None:
    """A checkpoint of that layer alone. NVFP4 leaves attention in BF16, as NVIDIA's does."""
    random, plan = np.random.default_rng(0), []
    for parameter, shape in wanted(arch, layer, ranks):
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
    kind = DTYPES[dtype]
    codes = np.frombuffer(random.bytes(kind.itemsize * int(np.prod(shape))), f"u{kind.itemsize}").reshape(shape)
    if dtype == "BF16":
        return (codes & 0x80FF | 0x3C00).view(kind)  # 2^-7 to 2^-5, of either sign
    return codes if dtype == "U8" else (codes & 0xF7 if shape[-1] > 1000 else codes & 0x37).view(kind)


def measured(hf: dict[str, Any], arch: Arch, name: str, specs: list[Spec], inputs: bool) -> Iterator[dict[str, Any]]:
    """Networks of one layer, each built in a process of its own."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        write(Path(folder), hf, arch, name, specs[0].first_layer, specs[0].ranks)
        for spec in specs:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                row = {"format": name} | pool.apply(build_one, (Path(folder), spec.plain(), inputs))
            print(line(row), flush=True)
            yield row


def build_one(folder: Path, table: dict[str, Any], inputs: bool) -> dict[str, Any]:
    """One engine, and what it took."""
    started, cpu = time.monotonic(), time.process_time()
    checkpoint, _ = Checkpoint.survey(folder)  # it holds one layer alone, which `open` would refuse
    spec, path, scratch = Spec(arch=checkpoint.arch, **table), folder / "engine", folder / "scratch"
    scratch.mkdir()
    anonymous = watched("RssAnon")
    net = Graph(load("tensorrt_rtx"), external_weights=inputs)
    define(net, spec, Weights(checkpoint, scratch, spec.dtype, values=not inputs))
    build(net, "tensorrt_rtx", [120], path, refit=False, advance=lambda percent: None, stopped=lambda: False)
    fused, size = any("mha" in kernel for kernel in kernels(path)), path.stat().st_size
    path.unlink()
    shutil.rmtree(scratch)
    return {
        "form": spec.form, "layer": spec.first_layer, "weights_as": "inputs" if inputs else "embedded", "ranks": spec.ranks,
        "experts": len(spec.experts), "layers": describe(net)["layers"],
        "weights": sum(entry.num_bytes for entry in checkpoint.entries.values()), "engine": size,
        "seconds": time.monotonic() - started, "cpu_seconds": time.process_time() - cpu,
        "peak": peak_bytes(), "anonymous": anonymous[0], "fused_attention": fused,
    }  # fmt: skip


def watched(field: str) -> list[int]:
    """The largest value so far of a line of /proc/self/status, in bytes, looked at 20 times a second."""
    most = [0]

    def watch() -> None:
        while True:
            text = Path("/proc/self/status").read_text(encoding="ascii")
            most[0] = max(most[0], 1024 * int(text.split(f"{field}:")[1].split()[0]))
            time.sleep(0.05)

    threading.Thread(target=watch, daemon=True).start()
    return most


if __name__ == "__main__":
    main()
