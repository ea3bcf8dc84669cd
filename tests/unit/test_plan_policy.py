"""Precision where accuracy counts more than speed, and by default."""

from __future__ import annotations

import pytest

from pipeline.config.load import choices, load
from pipeline.models.arch import Arch
from pipeline.planner.policy import precision_of
from tests.unit.test_plan import plan, refusal

SENSITIVE = "quant.accuracy_sensitive=true"


def weights(precision: dict) -> set[str]:
    return set(precision["formats"].values())


@pytest.mark.parametrize(
    ("hw", "used"),
    [
        (("+hw=b200",), {"bf16", "fp8_block"}),  # 1,366 GB of BF16 on 1,532 GB leave no room
        (("+hw=b300",), {"bf16"}),
        (("+hw=h200", "hw.num_nodes=2"), {"bf16"}),
        (("+hw=b300", "parallel.tp=4"), {"bf16", "fp8_block"}),
    ],
)
def test_accuracy_first_keeps_what_was_published(hw, used):
    found = plan(*hw, "model=deepseek_r1", SENSITIVE)
    assert weights(found.precision) == used
    assert (found.precision["kv_cache"], found.deploy["kv_cache_dtype"]) == ("bf16", "bf16")
    assert any("accuracy_sensitive" in text for text in found.report["warnings"])
    assert found.deploy["expert_format"] == found.precision["formats"]["routed_experts"]


def test_the_figures_of_the_note_are_those_of_the_machine():
    config = load(["+hw=b200", "model=deepseek_r1", SENSITIVE])
    note = precision_of(config, Arch.from_hf(config.model.hf)).note
    assert "1,369 GB" in note and "1,532 GB" in note


@pytest.mark.parametrize("hw", [name for name in choices("hw") if name not in ("cpu", "rtx_pro_6000")])
def test_by_default_the_cache_is_fp8_and_fp4_only_where_the_chip_has_it(hw):
    config = load([f"+hw={hw}", "model=deepseek_r1"])
    precision = precision_of(config, Arch.from_hf(config.model.hf))
    assert precision.kv_format == "fp8" and not precision.note
    assert ("nvfp4" in precision.formats.values()) == (config.hw.flops_fp4 is not None)


def test_fp4_on_hopper_is_refused_and_w4a16_is_not():
    assert "quant=w4a16_nvfp4" in refusal("+hw=h200", "model=deepseek_r1", "quant=nvfp4")
    found = plan("+hw=h200", "model=deepseek_r1", "quant=w4a16_nvfp4")
    assert any("weight-only" in text for text in found.report["warnings"])
