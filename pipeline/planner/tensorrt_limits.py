"""Limits of native TensorRT engines: weights and cache of one rank, and the memory that building takes."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from typing import Any

from pipeline.config.schema import TensorrtEngineConfig
from pipeline.core.errors import ConfigError
from pipeline.engines.tensorrt.library import listed
from pipeline.engines.tensorrt.memory import FOLDED, held_as, peak
from pipeline.engines.tensorrt.network.spec import Spec
from pipeline.engines.tensorrt.networks import layout_of, name_of, networks, refuse_impossible
from pipeline.engines.tensorrt.targets import resolve, unsupported
from pipeline.planner.case import Case
from pipeline.planner.choose import Decision
from pipeline.planner.memory import GIB, kv_bytes_per_token
from pipeline.planner.params import CLASSES, embedding_parts, layer_parts, main_parts, mtp_layer
from pipeline.planner.placement import rank_places

__all__ = ["build_peaks", "stored_bytes_of", "tensorrt_deploy", "tensorrt_memory", "tensorrt_report", "tensorrt_rules"]

KV_NAME = {"float32": "float32", "bfloat16": "bf16"}


def tensorrt_deploy(case: Case) -> dict[str, Any]:
    """deploy.json: what `engine.tensorrt` and `parallel` say."""
    engine = _engine(case)
    ranks, parallel = layout_of(case.config)
    library, targets = resolve(case.config)
    return {
        "engine": "tensorrt", "library": library, "targets": list(targets), "tp": ranks, "ep": ranks, "pp": 1,
        "attention_dp": ranks > 1 and parallel == "adp", "num_devices": ranks, "instances": 1,
        "gpus_per_node": case.hw.num_devices, "nodes": -(-ranks // case.hw.num_devices),
        "max_batch_size": engine.max_batch_size, "max_num_tokens": engine.prefill_chunk * engine.prefill_batch,
        "max_seq_len": engine.max_seq_len, "kv_cache_dtype": KV_NAME[engine.dtype], "tokens_per_block": engine.max_seq_len,
        "free_gpu_memory_fraction": None, "cuda_graph_max_batch_size": None, "mtp": int(_drafts(case)), "moe_backend": engine.moe,
        "placement": rank_places(case.hw, ranks, 1) if case.hw.sm else [],
    }  # fmt: skip


def tensorrt_memory(case: Case) -> dict[str, int]:
    """Bytes on one rank's device by component. Each of the two forms has weights of its own, unless weights are inputs."""
    engine, sizes = _engine(case), dict.fromkeys(CLASSES, 0)
    copies = 1 if engine.weights == "inputs" else 2
    for part in main_parts(case.arch):
        sizes[part.cls] += copies * _rank_bytes(case, part)
    if _drafts(case):
        sizes["mtp"] += copies * sum(_rank_bytes(case, part, "mtp") for part in mtp_layer(case.arch, stored=True))
    rows = engine.max_batch_size + int(layout_of(case.config)[0] > 1)  # with several ranks one is for other ranks' chunks
    tokens = rows * engine.max_seq_len
    return {**sizes, "kv_cache": tokens * kv_bytes_per_token(case.arch, KV_NAME[engine.dtype], int(_drafts(case)))}


def tensorrt_report(case: Case) -> dict[str, Any]:
    """What `plan` says about it."""
    ranks, parallel = layout_of(case.config)
    memory = tensorrt_memory(case)
    rows = [{"component": name, "format": case.formats.get(name, "bf16"), "bytes": size} for name, size in memory.items() if size]
    return {
        "layout": f"{parallel.upper()}{ranks}+EP{ranks}" if ranks > 1 else "no parallelism",
        "memory": {"rows": rows, "total": sum(memory.values()), "visible": int(case.hw.memory_bytes)},
        "limits": [],
        "decisions": [asdict(decision) for decision in _decisions(case)],
        "warnings": _warnings(case),
        "build_memory": build_peaks(case),
        "not_checked": ["Nothing here ran on a GPU; activations and TensorRT's scratch memory are not counted."],
    }


def build_peaks(case: Case, weights: str | None = None, *, alone: bool = False) -> dict[str, int]:
    """Resident memory that building each engine takes, in bytes, by the engine's name; `alone`: an engine a layer."""
    engine = _engine(case)
    config = case.config
    if alone:
        config = replace(config, engine=replace(config.engine, tensorrt=replace(engine, layers_per_engine=1)))
    specs = [spec for spec in networks(config, case.arch) if spec.rank == 0]
    return {name_of(spec): peak(stored_bytes_of(case, spec), len(spec.layers), weights or engine.weights) for spec in specs}


def stored_bytes_of(case: Case, spec: Spec) -> dict[str, int]:
    """Bytes of the weights of one engine, by what they are held as."""
    if spec.is_draft:
        parts = mtp_layer(case.arch, stored=True)
    else:
        ends = [*(["embed"] if spec.embeds else []), *(["lm_head", "norm"] if spec.has_head else [])]
        parts = [part for part in embedding_parts(case.arch) if part.cls in ends]
        parts += [part for layer in spec.layers for part in layer_parts(case.arch, layer)]
    found: Counter[str] = Counter()
    for part in parts:
        cls = "mtp" if spec.is_draft else part.cls
        fmt = part.stored_as(case.formats.get(cls, "bf16"))
        found[held_as(fmt, part.cls == "routed_experts")] += _rank_bytes(case, part, cls)
        found[FOLDED] += 2 * part.params if part.name == "kv_b_proj" else 0
    return dict(found)


def tensorrt_rules(case: Case) -> list[str]:
    """What cannot work."""
    try:
        _, targets = resolve(case.config)
    except ConfigError as error:
        return [str(error)]
    problems = [*refuse_impossible(case.config, case.arch), *unsupported(targets, case.formats.values(), _engine(case).dtype)]
    total, visible = sum(tensorrt_memory(case).values()), int(case.hw.memory_bytes)
    if not problems and total > visible:
        ranks = layout_of(case.config)[0]
        problems.append(
            f"{case.config.model.name} takes {total:,} bytes ({total / GIB:.1f} GiB) on each of {ranks} ranks, and "
            f"hw={case.hw.name} has {visible:,} ({visible / GIB:.1f} GiB): raise parallel.tp, lower engine.tensorrt.max_seq_len or "
            "max_batch_size, or share weights between the two forms with engine.tensorrt.weights=inputs."
        )
    return problems


def _warnings(case: Case) -> list[str]:
    """What works, but not as the workload says."""
    engine, warnings = _engine(case), []
    tokens = case.config.workload.isl + case.config.workload.osl
    if tokens > engine.max_seq_len:
        warnings.append(
            f"Workload {case.config.workload.name} asks for {tokens:,} tokens a request; the engine holds {engine.max_seq_len:,}."
        )
    ranks = layout_of(case.config)[0]
    if ranks > case.hw.num_devices:
        warnings.append(
            f"The ranks of a TensorRT engine are served on one host, a GPU each: {ranks} are planned, and a node of {case.hw.name} "
            f"has {case.hw.num_devices}. They can be built, not served: lower parallel.tp to serve them."
        )
    if "fp8_block" in case.formats.values():
        warnings.append(
            "TensorRT has no product for FP8 blocks of 128x128: they are dequantised to BF16 at run time, at BF16's speed."
        )
    warnings.append(_building(case))
    return warnings


def _building(case: Case) -> str:
    """Memory of the largest build, and what less would take."""
    peaks = build_peaks(case)
    name = max(peaks, key=peaks.__getitem__)
    others = {
        "engine.tensorrt.layers_per_engine=1": max(build_peaks(case, alone=True).values()),
        "engine.tensorrt.weights=inputs": max(build_peaks(case, "inputs").values()),
    }  # fmt: skip
    less = [f"{size / 1e9:.1f} GB with {setting}" for setting, size in others.items() if size < 0.9 * peaks[name]]
    ways = f"; {' or '.join(less)}" if less else ""
    ways += " (as measured with tensorrt_rtx)" if resolve(case.config)[0] == "tensorrt" else ""
    return f"Building takes {peaks[name] / 1e9:.1f} GB of memory for {name}, the largest of {len(peaks)} engines of a rank{ways}."


def _decisions(case: Case) -> tuple[Decision, ...]:
    """Where the numbers come from."""
    engine, (library, targets) = _engine(case), resolve(case.config)
    spec = networks(case.config, case.arch)[0]
    sent = f"each rank sends {spec.sent_per_token:,} bytes a token through {spec.last_layer - spec.first_layer} layers"
    return (
        Decision("library", library, f"it builds for {listed(targets)}", "engine.tensorrt.library"),
        Decision("moe", spec.moe, "TensorRT's own layer is for SM100, SM103 and SM110, and BF16 experts", "engine.tensorrt.moe"),
        *([Decision("exchange", f"{spec.exchange}, {spec.gather}", sent, "engine.tensorrt.exchange")] if spec.ranks > 1 else []),
        Decision("expanded_from", engine.expanded_from, "as configured", "engine.tensorrt.expanded_from"),
        Decision("max_batch_size", engine.max_batch_size, "as configured", "engine.tensorrt.max_batch_size"),
        Decision("max_seq_len", engine.max_seq_len, "as configured", "engine.tensorrt.max_seq_len"),
    )


def _rank_bytes(case: Case, part: Any, cls: str = "") -> int:
    """Stored bytes of a part on one rank."""
    ranks, parallel = layout_of(case.config)
    spread = ranks if part.cls == "routed_experts" or (parallel == "tp" and part.name in ("q_b_proj", "kv_b_proj", "o_proj")) else 1
    return int(part.bytes(case.formats.get(cls or part.cls, "bf16")) // spread)


def _drafts(case: Case) -> bool:
    return bool(_engine(case).mtp and case.arch.num_nextn_predict_layers)


def _engine(case: Case) -> TensorrtEngineConfig:
    assert case.config.engine.tensorrt is not None
    return case.config.engine.tensorrt
