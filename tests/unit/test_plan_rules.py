"""What cannot work is refused with every reason at once; what works otherwise than asked is said."""

from __future__ import annotations

import pytest

from tests.unit.test_plan import plan, refusal

R1_B200 = ("+hw=b200", "model=deepseek_r1")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("+hw=h200", "model=deepseek_r1", "quant=nvfp4"), ("nvfp4", "SM90", "quant=fp8_block")),
        (("+hw=rtx_pro_6000", "model=deepseek_r1", "engine=trtllm"), ("SM120", "engine=torch")),
        (("+hw=cpu", "engine=trtllm"), ("a CPU", "engine=torch")),
        ((*R1_B200, "workload.isl=163000", "workload.osl=2000"), ("165,000", "163,840", "1,160")),
        ((*R1_B200, "parallel.tp=16"), ("parallel.tp=16", "8 GPUs")),
        ((*R1_B200, "parallel.tp=8", "parallel.ep=3"), ("parallel.ep=3", "256 routed experts")),
        ((*R1_B200, "parallel.tp=4", "parallel.ep=8"), ("parallel.ep=8", "parallel.tp=4")),
        (("+hw=b200", "parallel.tp=8", "parallel.attention_dp=false"), ("4 heads", "attention_dp=true")),
        (("+hw=h200", "parallel.tp=4", "parallel.ep=2"), ("128 columns", "fp8_block", "raise parallel.ep")),
        ((*R1_B200, "parallel.pp=2"), ("parallel.pp=2",)),
        (("+hw=b200", "model=kimi_k2", "engine.trtllm.mtp=2"), ("no MTP layer", "mtp=0")),
        ((*R1_B200, "engine.trtllm.moe_backend=DEEPGEMM"), ("DEEPGEMM", "nvfp4", "TRTLLM")),
        ((*R1_B200, "engine.trtllm.version=0.21"), ("0.21", "1.2")),
        ((*R1_B200, "engine.trtllm.version=1.3", "engine.trtllm.moe_backend=WIDEEP"), ("1.3", "WIDEEP")),
        ((*R1_B200, "workload.concurrency=20000"), ("holds", "concurrency=20000", "queue")),
        (("+hw=h20", "model=deepseek_r1", "parallel=adp8_ep8"), ("does not fit", "95.0 GiB")),
        (("+hw=h200", "model=deepseek_r1", "quant=bf16"), ("does not fit", "139.8 GiB")),
        (("+hw=cpu", "model=deepseek_r1"), ("2,685,292,992,512", "8,589,934,592", "engine=trtllm")),
        (("+hw=cpu", "engine.torch.max_seq_len=4096"), ("4096", "2048")),
    ],
)
def test_refusal_names_the_value_the_limit_and_the_way_out(overrides, words):
    text = refusal(*overrides)
    for word in words:
        assert word in text, text


def test_all_reasons_come_together():
    text = refusal(
        "+hw=h200", "model=deepseek_r1", "quant=nvfp4", "parallel.tp=16", "parallel.ep=3", "workload.isl=200000",
        "engine.trtllm.moe_backend=DEEPGEMM",
    )  # fmt: skip
    assert len(text.splitlines()) == 5


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (("+hw=b200",), "2048 positions"),
        (("+hw=gb200", "model=deepseek_r1", "parallel.tp=8"), "2 nodes"),
        ((*R1_B200, "parallel=adp8_ep8", "workload.concurrency=4"), "ranks idle"),
        ((*R1_B200, "slo.ttft_ms=100"), "not predicted"),
        (("+hw=h200", "model=deepseek_r1"), "SM90"),
        ((*R1_B200, "workload=latency"), "CUTLASS"),
        ((*R1_B200, "quant=fp8_block", "workload.concurrency=256"), "DEEPGEMM with MTP"),
        ((*R1_B200, "engine.trtllm.version=1.0"), "balance"),
        (("+hw=gb300", "model=deepseek_r1", "engine.trtllm.version=1.3", "workload.concurrency=256"), "1.3.0rc21"),
        ((*R1_B200, "engine.trtllm.moe_backend=WIDEEP"), "unchecked"),
        (("+hw=cpu",), "the engine holds 1,024"),
    ],
)
def test_warning(overrides, word):
    warnings = plan(*overrides).report["warnings"]
    assert any(word in text for text in warnings), warnings


def test_nothing_is_said_where_nothing_is_odd():
    assert plan(*R1_B200).report["warnings"] == []
