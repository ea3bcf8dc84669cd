"""What building an engine takes: predicted from the plan's arithmetic and from a checkpoint, held to the measured builds."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import Checkpoint
from pipeline.config.load import load
from pipeline.core.errors import ConfigError
from pipeline.engines.tensorrt import memory
from pipeline.engines.tensorrt.memory import FOLDED, held_as, peak, refuse_small, stored_in, too_large_to_compare
from pipeline.engines.tensorrt.networks import name_of, networks
from pipeline.models.arch import Arch
from pipeline.planner.case import case_of
from pipeline.planner.params import embedding_parts, layer_parts, mtp_layer
from pipeline.planner.plan import make_plan
from pipeline.planner.tensorrt_limits import build_peaks, stored_bytes_of

ROOT = Path(__file__).parents[2]
TINY_R1 = ROOT / "pipeline" / "data" / "tiny_r1"
MEASURED = json.loads((ROOT / "benchmarks" / "tensorrt_build_2026-11-30.json").read_text(encoding="utf-8"))
R1 = dict(load(["+hw=b200", "model=deepseek_r1"]).model.hf)


def stored(row: dict[str, Any]) -> Counter[str]:
    """Bytes of one measured layer: everything linear in the row's format, attention beside NVFP4 in BF16."""
    arch, layer = Arch.from_hf(R1 | {"n_routed_experts": row["experts"] * row["ranks"]}), row["layer"]
    ends = {0: "embed", arch.num_hidden_layers - 1: "lm_head"}
    parts = mtp_layer(arch, stored=True) if layer == arch.num_hidden_layers else layer_parts(arch, layer)
    parts = [*parts, *(part for part in embedding_parts(arch) if part.cls == ends.get(layer))]
    found: Counter[str] = Counter()
    for part in parts:
        fmt = "bf16" if row["format"] == "nvfp4" and part.cls in ("attention", "o_proj") else row["format"]
        routed = part.cls == "routed_experts"
        found[held_as(part.stored_as(fmt), routed)] += int(part.bytes(fmt) // (row["ranks"] if routed else 1))
        found[FOLDED] += 2 * part.params if part.name == "kv_b_proj" else 0
    return found


def test_every_measured_build_is_predicted() -> None:
    """Seven formats, dense, MoE and MTP layers, with embedding and head, 4 to 32 experts, weights inside and as inputs."""
    errors = {
        (row["format"], row["layer"], row["experts"], row["weights_as"]): peak(stored(row), 1, row["weights_as"]) / row["peak"] - 1
        for row in MEASURED["rows"]
    }
    assert len(errors) > 60 and len({key[0] for key in errors}) == 7
    assert max(map(abs, errors.values())) < 0.08
    assert max(abs(error) for key, error in errors.items() if key[2:] == (32, "embedded")) < 0.01
    largest = max(MEASURED["rows"], key=lambda row: row["peak"])
    assert largest["layer"] == 61 and largest["peak"] > 10e9  # the MTP layer, with an embedding and a head of its own


def test_more_layers_in_one_network_take_more_even_without_weights() -> None:
    folded = 2 * 128 * (128 + 128) * 512  # R1's kv_b_proj
    for segment in MEASURED["segments"]:
        predicted = peak({FOLDED: folded * segment["layers"]}, segment["layers"], "inputs")
        assert predicted == pytest.approx(segment["peak"], rel=0.1)


def test_plan_and_checkpoint_count_the_same() -> None:
    """The planner from config.json, the build from the files."""
    words = ("parallel.tp=2", "engine.tensorrt.layers_per_engine=2", "quant=fp8_block")
    config, arch = load(["+hw=rtx_pro_6000", "engine=tensorrt", *words]), Arch.from_dir(TINY_R1)
    specs = {name_of(spec): spec for spec in networks(config, arch)}
    held = stored_in(Checkpoint.open(TINY_R1).entries.values(), specs)
    case = case_of(config, arch)
    for name, spec in specs.items():
        planned = {kind: size for kind, size in stored_bytes_of(case, spec).items() if size}
        assert {kind: size for kind, size in held[name].items() if size} == planned, name
    report = make_plan(config, json.loads((TINY_R1 / "config.json").read_text())).report
    assert report["build_memory"] == build_peaks(case)
    assert sorted(build_peaks(case)) == sorted(name for name, spec in specs.items() if spec.rank == 0)


def test_a_machine_with_less_is_refused_and_a_busy_one_warned(monkeypatch) -> None:
    specs = {"rank0_absorbed": networks(load(["+hw=rtx_pro_6000", "engine=tensorrt"]), Arch.from_dir(TINY_R1))[0]}
    sizes = {"rank0_absorbed": {"fp8_block": 4e9, FOLDED: 1e9}}
    monkeypatch.setattr(memory, "available_memory", lambda: 20e9)
    monkeypatch.setattr(memory, "whole_memory", lambda: 24e9)
    assert refuse_small(sizes, specs, "embedded") is None
    monkeypatch.setattr(memory, "available_memory", lambda: 10e9)
    assert "takes 12.4 GB of memory and 10.0 are free" in str(refuse_small(sizes, specs, "embedded"))
    monkeypatch.setattr(memory, "whole_memory", lambda: 8e9)
    with pytest.raises(ConfigError, match=r"Building rank0_absorbed takes 8.4 GB of memory, and this machine has 8.0: lower"):
        refuse_small(sizes, specs, "embedded")
    assert refuse_small(sizes, specs, "inputs") is None


def test_a_model_is_compared_where_its_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 20 * 10**9)
    assert not too_large_to_compare(1_200_000_000)
    assert too_large_to_compare(2_000_000_000) == (
        "the model's 2,000,000,000 parameters would take 32.0 GB to interpret, and 20.0 are free"
    )
