"""The router kernel against its reference: its own source run on the CPU, the op everywhere, and the op on a GPU if any."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import ConfigError
from tests._utils.cuda_on_cpu import CudaOnCpu

torch = pytest.importorskip("torch", reason="routers are torch ops")

from plugins.topk_router import op  # noqa: E402
from plugins.topk_router.reference import mask_groups, route  # noqa: E402
from tests._utils.peers import poison  # noqa: E402

SIGNATURES = {"topk_router": "const float*, const float*, float*, int*, int, float"}
CONFIGS = {
    "deepseek_r1": (256, 8, 4, 8, 2.5, True),
    "kimi_k2": (384, 1, 1, 8, 2.827, True),
    "glm_4.5": (160, 1, 1, 8, 2.5, True),
    "small": (64, 4, 2, 6, 1.0, False),
}
TOKENS = 13


def inputs(kind: str, experts: int, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and bias that tell ties, masks and extremes apart."""
    logits, bias = torch.randn(tokens, experts) * 2, torch.randn(experts) * 0.1
    if kind == "ties":  # to the bit or far apart, sums of two as well: those of x and -x would be 1, but for rounding
        return logits.round().abs(), (bias > 0).float()
    if kind in EQUAL:
        return EQUAL[kind](logits), torch.zeros(experts)
    if kind in SHARED_RANK:
        return SHARED_RANK[kind](logits, bias)
    if kind == "extreme":
        bias = (bias * 2**16).round() / 2**16  # exact when added to 0 or 1, and far enough apart: it ranks all tokens' groups
        logits[:, ::3], logits[:, 1::3], bias[::7] = -torch.inf, 200.0, -5.0
        logits[:, 5], logits[0] = torch.inf, -torch.inf
    if kind == "nan":
        logits[1::2, 37] = torch.nan
    return logits, bias


def twins(logits: torch.Tensor) -> torch.Tensor:
    """Of a token's experts, each equals the one that is 1, 2, 4, ... 128 further: in a lane, in other lanes, in other groups."""
    experts = torch.arange(logits.shape[1])
    return torch.stack([row[experts & ~(1 << token % 8)] for token, row in enumerate(logits)])


def one_pair(logits: torch.Tensor) -> torch.Tensor:
    """A token's second best equals its best, the next one's third its second, and so on, beyond those that are chosen."""
    order = logits.argsort(dim=1, descending=True)
    for token, row in enumerate(order):
        rank = token % 13
        logits[token, row[rank + 1]] = logits[token, row[rank]]
    return logits


EQUAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "equal": torch.zeros_like,
    "twins": twins,
    "one_pair": one_pair,
    "tiny": lambda logits: -60 - 0.1 * logits.argsort(dim=1),  # scores of 2^-86 to 2^-123, which are a tenth apart
}
"""Logits where there is no bias."""


def tiny_pair(logits: torch.Tensor, chosen_before: int) -> tuple[torch.Tensor, torch.Tensor]:
    """After some chosen experts come two that are 2^-122 apart, the larger one last."""
    bias = torch.full(logits.shape[1:], -1.0)
    bias[[14, 15, 27, 28, 41, 42, 55][:chosen_before]] = 1.0
    bias[[3, 10]], logits[:, 10], logits[:, 3] = 0.0, -84.0, -84.5
    return logits, bias


def large_pair(logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two experts with choices that float32 cannot hold times 2^120, the larger one last."""
    bias[[3, 10]] = torch.tensor([300.0, 400.0])
    return logits, bias


SHARED_RANK: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "tiny_pair": lambda logits, _: tiny_pair(logits, 6),
    "tiny_pair_at_the_end": lambda logits, _: tiny_pair(logits, 7),
    "large_pair": large_pair,
}
"""Experts that ranked.cu gives the same rank, though they are not equal."""
KINDS = ("random", "ties", "extreme", "nan", *EQUAL, *SHARED_RANK)


def check(found: tuple[torch.Tensor, ...], logits: torch.Tensor, bias: torch.Tensor, *config: object) -> None:
    """As the reference, except for tokens with choices, or groups, that are `near`."""
    groups, kept, top_k, *_ = config
    choice = logits.double().sigmoid() + bias
    ranked = mask_groups(choice, groups, kept).topk(top_k + 1).values
    ends = choice.unflatten(1, (groups, -1)).topk(2).values.sum(2).sort(descending=True).values[:, kept - 1 : kept + 1]
    near_choices, near_groups = near(ranked), near(ends)
    clear = ~(near_choices | near_groups)
    assert clear.sum() >= len(clear) // 2
    weights, indices = (tensor.cpu() for tensor in found)
    wanted, experts = route(logits, bias, *config)
    assert ((indices >= 0) & (indices < logits.shape[1])).all()
    close = near_choices & ~near_groups  # perhaps others of the same groups, but as good
    chosen = [choice.gather(1, each.long())[close] for each in (indices, experts)]
    torch.testing.assert_close(*chosen, rtol=4e-6, atol=0, equal_nan=True)
    assert torch.equal(indices[clear].long(), experts[clear]), "of what is equal to the bit, the lowest index comes first"
    torch.testing.assert_close(weights[clear], wanted[clear], rtol=2e-6, atol=1e-7, equal_nan=True)


def near(ranked: torch.Tensor) -> torch.Tensor:
    """Rows with neighbours that are not equal and closer than two float32 sigmoids can be."""
    gaps = (ranked.diff() / ranked[:, :-1]).abs()
    return ((gaps > 0) & (gaps < 2e-6)).any(dim=1)


SOURCES = dict.fromkeys(CONFIGS, op.SOURCE) | {"deepseek_r1, ranked": op.RANKED}


@pytest.fixture(scope="module", params=SOURCES)
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple, CudaOnCpu, list[int]]:
    """A configuration, its kernel, and warps that it can be launched with."""
    config, source = CONFIGS[request.param.split(",")[0]], SOURCES[request.param]
    defines = op.macros(*config[:4], config[5])
    made = CudaOnCpu(source.path, SIGNATURES, defines, tmp_path_factory.mktemp("router"))
    return config, made, [op.WARPS] if source is op.RANKED else [1, op.WARPS]


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_vs_reference(kernel: tuple[tuple, CudaOnCpu, list[int]], kind: str) -> None:
    (experts, *config), source, blocks = kernel
    logits, bias = inputs(kind, experts)
    for warps in blocks:
        weights, indices = np.full((TOKENS, config[2]), np.nan, np.float32), np.full((TOKENS, config[2]), -1, np.int32)
        arrays = (logits.numpy(), bias.numpy(), weights, indices)
        source.launch("topk_router", (-(-TOKENS // warps), 1, 1), 32 * warps, *arrays, TOKENS, float(config[3]))
        check((torch.from_numpy(weights), torch.from_numpy(indices)), logits, bias, *config)


LONG_WAY = ("random", 0.0, 0.05), ("one_pair", 0.0, 0.2), ("equal", 1.0, 1.0), ("nan", 0.01, 1.0)


@pytest.mark.parametrize(("kind", "least", "most"), LONG_WAY)
def test_pairs_of_equal_experts_do_not_go_the_long_way(kind: str, least: float, most: float, tmp_path: Path) -> None:
    """That way is right for all tokens, and several times as slow: here it leaves a mark instead."""
    plugins = tmp_path / "plugins"
    shutil.copytree(op.RANKED.path.parent, plugins / "topk_router", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    shutil.copy(op.RANKED.path.parents[1] / "numerics.cuh", plugins)
    source = plugins / "topk_router" / op.RANKED.path.name
    call = "  route_exactly(token, bias, weights + out, indices + out, scale, lane);"
    text = source.read_text(encoding="utf-8")
    assert text.count(call) == 1
    source.write_text(text.replace(call, "  indices[out + lane % TOP_K] = -7;"), encoding="utf-8")
    experts, *config = CONFIGS["deepseek_r1"]
    made = CudaOnCpu(source, SIGNATURES, op.macros(experts, *config[:3], config[4]), tmp_path)
    logits, bias = inputs(kind, experts, tokens := 4 * TOKENS)
    weights, indices = np.empty((tokens, config[2]), np.float32), np.zeros((tokens, config[2]), np.int32)
    arrays = (logits.numpy(), bias.numpy(), weights, indices)
    made.launch("topk_router", (-(-tokens // op.WARPS), 1, 1), 32 * op.WARPS, *arrays, tokens, float(config[3]))
    assert least <= (indices == -7).all(axis=1).mean() <= most


def test_each_form_has_its_source() -> None:
    found = {name: op.source(*config[:4]) for name, config in CONFIGS.items()}
    assert found == dict.fromkeys(CONFIGS, op.SOURCE) | {"deepseek_r1": op.RANKED}


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use here")),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [0, 1, 61, 515])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_op_vs_reference(device: str, tokens: int, config: tuple) -> None:
    for kind in KINDS:
        logits, bias = inputs(kind, config[0], max(tokens, 1))
        logits = logits[:tokens]
        poison(device)
        found = torch.ops.r1_pipeline.topk_router(logits.to(device), bias.to(device), *config[1:])
        assert [tensor.dtype for tensor in found] == [torch.float32, torch.int32]
        assert found[0].shape == found[1].shape == (tokens, config[3])
        if tokens:
            check(found, logits, bias, *config[1:])


@pytest.mark.parametrize("device", DEVICES)
def test_configurations_without_a_kernel_run_the_reference(device: str) -> None:
    assert not op.has_kernel(96, 3, 2, 4)
    logits, bias = inputs("random", 96)
    poison(device)
    check(op.topk_router(logits.to(device), bias.to(device), 3, 2, 4, 1.0), logits, bias, 3, 2, 4, 1.0)


def test_op_is_known_to_export() -> None:
    torch.library.opcheck(op.topk_router, (*inputs("random", 256), 8, 4, 8, 2.5, True))


@pytest.mark.parametrize("config", [(7, 4, 8), (8, 9, 8), (8, 1, 33)])
def test_impossible_configurations_are_refused(config: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="cannot give"):
        op.topk_router(*inputs("random", 256), *config, 1.0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use here")
def test_graphs_replay_with_overlap() -> None:
    logits, bias = (tensor.cuda() for tensor in inputs("random", 256, 300))
    out = torch.empty(300, 8, device="cuda"), torch.empty(300, 8, dtype=torch.int32, device="cuda")
    op.launch(logits, bias, *out, 8, 4, 8, 2.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            op.launch(logits, bias, *out, 8, 4, 8, 2.5, overlap=True)
    fresh = torch.randn(300, 256)
    logits.copy_(fresh)
    out[0].fill_(torch.nan)
    out[1].fill_(-1)
    graph.replay()
    check(out, fresh, bias.cpu(), 8, 4, 8, 2.5)
