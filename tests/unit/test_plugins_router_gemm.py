"""The router's product against float64: the op on the CPU everywhere, its kernel where there is a GPU with clusters."""

from __future__ import annotations

import pytest

from pipeline.core.errors import ConfigError

torch = pytest.importorskip("torch", reason="plugins are torch ops")

from plugins.router_gemm import op  # noqa: E402
from tests._utils.peers import poison  # noqa: E402

HAS_CLUSTERS = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_CLUSTERS, reason="no GPU of sm_90 or later here"))]
SHAPES = {"deepseek_r1": (7168, 256), "kimi_k2": (7168, 384), "glm_4.5": (5120, 160), "no kernel": (96, 24)}
TOKENS = (0, 1, 2, 3, 7, 13, 31, 61)
"""None, one, and primes, which fill no tile."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_op_vs_reference(device: str, shape: tuple[int, int]) -> None:
    hidden, experts = shape
    weight = torch.randn(experts, hidden, device=device, dtype=torch.bfloat16) / hidden**0.5
    for tokens in TOKENS + ((4, 5, 8, 9, 16, 17, 24, 33, 48, 50, 64, 65, 200) if device == "cuda" else ()):
        x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
        wanted = x.double() @ weight.double().t()
        poison(device)
        logits = torch.ops.r1_pipeline.router_gemm(x, weight)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.double(), wanted, rtol=0, atol=3e-5)
        assert torch.equal(logits, torch.ops.r1_pipeline.router_gemm(x, weight)), "sums go in one order"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_nan_and_infinity_stay_in_their_token(device: str, bad: float, shape: tuple[int, int]) -> None:
    """Also where it is the last one, with which a kernel fills its tile."""
    hidden, experts = shape
    weight = torch.randn(experts, hidden, device=device, dtype=torch.bfloat16) / hidden**0.5
    for tokens in (1, 2, 13, 16, 17, 31, 33, 61, 64, 65) if device == "cuda" else (2, 13):
        for token in (0, tokens - 1):
            x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
            x[token, torch.randint(hidden, ())] = bad
            wanted = x.double() @ weight.double().t()
            poison(device)
            logits = torch.ops.r1_pipeline.router_gemm(x, weight)
            torch.testing.assert_close(logits.double(), wanted, rtol=0, atol=3e-5, equal_nan=True)
            assert logits.isfinite().sum() == (tokens - 1) * experts


@pytest.mark.skipif(not HAS_CLUSTERS, reason="no GPU of sm_90 or later here")
def test_graphs_replay_with_overlap() -> None:
    weight = torch.randn(256, 7168, device="cuda", dtype=torch.bfloat16) / 85
    x, logits = torch.zeros(13, 7168, device="cuda", dtype=torch.bfloat16), torch.empty(13, 256, device="cuda")
    op.launch(x, weight, logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            op.launch(x, weight, logits, overlap=True)
    x.copy_(torch.randn(13, 7168))
    logits.fill_(torch.nan)
    graph.replay()
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().t(), rtol=0, atol=3e-5)


def test_op_is_known_to_export() -> None:
    torch.library.opcheck(op.router_gemm, (torch.randn(3, 64).bfloat16(), torch.randn(8, 64).bfloat16()))


@pytest.mark.parametrize(("x", "weight"), [((2, 8), (4, 9)), ((8,), (4, 8))])
def test_shapes_that_do_not_match_are_refused(x: tuple[int, ...], weight: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="must be bfloat16"):
        op.router_gemm(torch.zeros(x).bfloat16(), torch.zeros(weight).bfloat16())
