"""Precision where accuracy counts more than speed, and by default."""

from __future__ import annotations

import pytest

from pipeline.config.load import choices
from pipeline.core.errors import GateError
from pipeline.models.arch import Arch
from pipeline.planner.policy import Precision, fallback, precision_of
from tests.unit.test_plan import config_of, plan, refusal

SENSITIVE = "quant.accuracy_sensitive=true"


def precision(*overrides: str) -> Precision:
    config = config_of(*overrides)
    return precision_of(config, Arch.from_hf(config.model.hf))


@pytest.mark.parametrize(
    ("hw", "used"),
    [
        (("+hw=b200",), {"bf16", "fp8_block"}),  # 1,369 GB of BF16 on 1,532 GB leave no room
        (("+hw=b300",), {"bf16"}),
        (("+hw=h200", "hw.num_nodes=2"), {"bf16"}),
        (("+hw=b300", "parallel.tp=4"), {"bf16", "fp8_block"}),
    ],
)
def test_accuracy_first_keeps_what_was_published(hw, used):
    found = precision(*hw, "model=deepseek_r1", SENSITIVE)
    assert set(found.formats.values()) == used
    assert found.kv_format == "bf16" and "accuracy_sensitive" in found.note


def test_a_plan_that_puts_accuracy_first_fits_and_says_so():
    found = plan("+hw=b200", "model=deepseek_r1", SENSITIVE)
    assert (found.precision["kv_cache"], found.deploy["kv_cache_dtype"]) == ("bf16", "bf16")
    assert found.deploy["expert_format"] == found.precision["formats"]["routed_experts"] == "fp8_block"
    assert any("accuracy_sensitive" in text for text in found.report["warnings"])


def test_the_figures_of_the_note_are_those_of_the_machine():
    note = precision("+hw=b200", "model=deepseek_r1", SENSITIVE).note
    assert "1,369 GB" in note and "1,532 GB" in note


@pytest.mark.parametrize("hw", [name for name in choices("hw") if name not in ("cpu", "rtx_pro_6000")])
def test_by_default_the_cache_is_fp8_and_fp4_only_where_the_chip_has_it(hw):
    found = precision(f"+hw={hw}", "model=deepseek_r1")
    assert found.kv_format == "fp8" and not found.note
    assert ("nvfp4" in found.formats.values()) == (config_of(f"+hw={hw}", "model=deepseek_r1").hw.flops_fp4 is not None)


def test_what_verify_refuses_is_built_with_accuracy_first_only_where_the_user_says_so():
    error = GateError("Mean KL is 0.09 nats a token, above verify.max_kl=0.05; keep o_proj in a wider format.")
    stop = config_of("+hw=b200", "model=deepseek_r1")
    willing = config_of("+hw=b200", "model=deepseek_r1", "verify.on_failure=fallback")
    assert fallback(stop, error) is None
    other = fallback(willing, error)
    found = precision_of(other, Arch.from_hf(other.model.hf))
    assert (found.recipe, found.kv_format) == ("fp8_block", "bf16")
    assert found.note.startswith("verify refused quant=nvfp4 (Mean KL is 0.09 nats a token, above verify.max_kl=0.05.): BF16")
    assert fallback(other, error) is None, "there is nothing behind it"
    assert fallback(willing, GateError("a scale is not finite", damage=True)) is None, "no precision mends damage"


def test_fp4_on_hopper_is_refused_and_w4a16_is_the_way_out():
    assert "quant=w4a16_nvfp4" in refusal("+hw=h200", "model=deepseek_r1", "quant=nvfp4")
