"""Routed experts of R1 beside other libraries' grouped products and torch's: each product alone, the whole op, and a shared expert.

Products: every expert has the same number of rows; ours of gate and up includes SwiGLU and the quantisation, the others' do not.
Whole: tokens choose 8 of 256 experts at random, of which this rank has the first 32 (expert parallelism 8) or all; the peers are
DeepGEMM between our kernels and, of NVFP4, vLLM's Marlin; eager torch is `grouped_mm` of BF16 weights, of twice the bytes or more.
Shared: the routed experts and a BF16 one that every token visits, on two streams.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

from plugins.bench import Bench, Call, compiled, micros, relative
from plugins.moe_grouped_gemm import launch, marlin, plain, reference, shared, tactics
from plugins.moe_grouped_gemm.peers import PEERS
from plugins.moe_grouped_gemm.reference import Weights
from plugins.quantize.reference import FP8, fp8_dequantize
from plugins.timing import replayed

__all__ = ["rows"]

HIDDEN, WIDTH, EXPERTS, TOP_K, RANK_EXPERTS = 7168, 2048, 256, 8, 32
NAMES = "moe_gate_up", "moe_down"
ROWS = (8, 32, 64, 128, 256, 512)
TOKENS = {RANK_EXPERTS: (1, 8, 64, 256, 1024, 2048, 4096, 8192, 16384), EXPERTS: (1, 8, 64, 256, 1024, 2048, 4096, 8192)}
MOST_TOKENS = {True: 4096, False: 16384}
"""NVFP4 or not."""
SHARED_TOKENS = (1, 8, 64, 256, 1024, 4096)
FEW = 4
"""Tokens, and rows of a product, that are compared with the reference."""
CALLS, TURNS = 4, 3
LOSES = {
    True: "codes are expanded again for every tile of rows, which BF16 weights, of 3.6 times the bytes, need not be",
    False: "tiles are for reading weights: their rows are weights, not tokens; the op takes DeepGEMM where all of it is faster",
}
"""Why, NVFP4 or FP8."""


def rows(bench: Bench) -> Iterator[dict[str, Any]]:
    """Both forms; last those with the shared expert."""
    for experts in (EXPERTS, RANK_EXPERTS):
        for nvfp4 in (True, False):
            matrices = _weights(experts, 2 * WIDTH, HIDDEN, nvfp4), _weights(experts, HIDDEN, WIDTH, nvfp4)
            wide, packed = [_bf16(weights) for weights in matrices], _later(_packed, matrices)
            if experts == RANK_EXPERTS:
                for count in ROWS:
                    yield from _products(bench, count, matrices, wide, packed)
            for tokens in (each for each in TOKENS[experts] if each <= MOST_TOKENS[nvfp4]):
                yield _whole(bench, tokens, *matrices, *wide, packed=packed)
            if experts == RANK_EXPERTS and not nvfp4:
                for tokens in SHARED_TOKENS:
                    yield _shared(bench, tokens, *matrices, *wide)
            del matrices, wide, packed
            torch.cuda.empty_cache()


def _weights(experts: int, height: int, columns: int, nvfp4: bool) -> Weights:
    """Random codes, and scales that keep outputs near 1."""
    codes = torch.randint(256, (experts, height, columns // (1 + nvfp4)), device="cuda", dtype=torch.uint8)
    if nvfp4:
        scales = (torch.rand(experts, height, columns // 16, device="cuda") * 400).to(FP8)
        return codes, scales, (torch.rand(experts, device="cuda") + 0.1) / 400 / columns**0.5
    codes.masked_fill_((codes & 0x7F) == 0x7F, 0x30)  # no NaN
    scales = torch.rand(experts, height // 128, columns // 128, device="cuda") / columns**0.5 / 100
    return codes.view(FP8), scales


def _bf16(weights: Weights) -> Tensor:
    """[E, columns, height]"""
    each = (reference.weight_of(weights, number) for number in range(len(weights[0])))
    return torch.stack([weight.bfloat16() for weight in each]).transpose(1, 2)


def _size(weights: Weights) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in weights)


def _packed(matrices: tuple[Weights, Weights]) -> list[Weights]:
    return [marlin.packed(weights) for weights in matrices]


def _products(
    bench: Bench, count: int, matrices: tuple[Weights, Weights], wide: list[Tensor], packed: Callable[[], list[Weights]]
) -> Iterator[dict[str, Any]]:
    """Gate and up, then down, for `count` rows of every expert."""
    nvfp4, experts, slots = len(matrices[0]) == 3, len(wide[0]), count * len(wide[0])
    x = torch.randn(slots, HIDDEN, device="cuda", dtype=torch.bfloat16)
    indices = torch.arange(experts, device="cuda", dtype=torch.int32).repeat_interleave(count).view(-1, 1)
    route = launch.permute(indices, experts, 0, launch.most_rows(nvfp4, slots, slots, experts), launch.ALIGN[nvfp4])
    tokens, ends = route.pairs[:slots].long(), torch.arange(count, slots + 1, count, device="cuda", dtype=torch.int32)
    values = launch.gather(x, route, 1, nvfp4)
    inner, outer = launch.rows(x, slots, WIDTH, nvfp4), (x.new_empty(slots, HIDDEN), None)
    shape = {"experts": experts, "rows": count, "dtype": "nvfp4" if nvfp4 else "fp8"}
    for name, weights, plainly, source, out in zip(NAMES, matrices, wide, (values, inner), (inner, outer), strict=True):
        columns, height = source[0].shape[1], weights[0].shape[1]
        plain_rows = torch.randn(slots, columns, device="cuda", dtype=torch.bfloat16)
        product, wanted = _first(x[tokens[:FEW]] if name == NAMES[0] else _decoded(source), weights, name == NAMES[0])
        row = bench.row(
            name,
            shape | {"tokens": slots},
            lambda overlap, w=weights, s=source, o=out: launch.product(w, s, route, o, overlap),
            error=lambda o=out, w=wanted: relative(_decoded(o), w),
            eager=lambda r=plain_rows, w=plainly: grouped_mm(r, w, offs=ends),
            peers=_product_peers(NAMES.index(name), matrices, packed, source, count),
            right=lambda found, w=product: relative(found.flatten(0, -2)[:FEW], w) < 1e-2,
            moved=slots * (columns + out[0].shape[1]) * (2 if nvfp4 else 1),
            read=_size(weights),
            flops=2 * slots * columns * height // (1 if nvfp4 else 2),
            calls=CALLS,
            turns=TURNS,
            why=LOSES[nvfp4],
        )
        yield row | {"weights_gb_per_s": round(_size(weights) / row["ours_us"] / 1e3)}


def _decoded(out: launch.Rows) -> Tensor:
    """The first rows."""
    values, scales = out[0][:FEW], out[1]
    if scales is not None:
        return fp8_dequantize(values, scales[:, :FEW].t())
    return values[:, launch.places(values.shape[1]).to(values.device)] if values.shape[1] == WIDTH else values


def _first(rows_: Tensor, weights: Weights, swiglu: bool) -> tuple[Tensor, Tensor]:
    """The first expert's product with the first rows, and what ours makes of it."""
    nvfp4 = len(weights) == 3
    product = (reference.rounded(rows_, nvfp4) if swiglu else rows_.double()) @ reference.weight_of(weights, 0).t()
    if not swiglu:
        return product, product
    gate, up = product.chunk(2, dim=1)
    return product, reference.rounded(silu(gate) * up, nvfp4)


def _product_peers(
    number: int, matrices: tuple[Weights, Weights], packed: Callable[[], list[Weights]], source: launch.Rows, count: int
) -> dict[str, Call]:
    """Of the first or the second matrix."""
    if len(matrices[0]) == 3:
        return {"marlin": _made(lambda: marlin.product(packed()[number], source, count))}
    return {peer: _made(make, matrices[number], source, count) for peer, make in PEERS.items()}


def _later(make: Callable[..., Any], *given: Any) -> Callable[[], Any]:
    """What is made at its first use, where a library that does not load is noted."""
    return functools.cache(lambda: make(*given))


def _made(make: Callable[..., Call], *given: Any) -> Call:
    made = _later(make, *given)
    return lambda: made()()


def _routes(tokens: int) -> tuple[Tensor, Tensor]:
    """Different experts for each token, one of the first token's here on every rank, and weights."""
    order = torch.rand(tokens, EXPERTS, device="cuda")
    order[0, 0] = 2
    indices = order.topk(TOP_K, dim=-1).indices.int()
    return indices, torch.rand(tokens, TOP_K, device="cuda") / TOP_K


def _eager(x: Tensor, indices: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """As an engine without the kernels would, in BF16; other ranks' pairs come last and count nothing."""
    local = indices.flatten().long()
    order = local.argsort(stable=True)
    ends = (local.unsqueeze(1) == torch.arange(len(gate_up), device=x.device)).sum(0).cumsum(0).int()
    gate, up = grouped_mm(x[order // TOP_K], gate_up, offs=ends).chunk(2, dim=1)
    out = grouped_mm(silu(gate) * up, down, offs=ends)[order.argsort()].view(len(x), TOP_K, -1)
    kept = (indices < len(gate_up)).unsqueeze(-1)
    return torch.where(kept, out.float() * weights.unsqueeze(-1), 0).sum(1).bfloat16()


def _whole(
    bench: Bench, tokens: int, gate_up: Weights, down: Weights, *wide: Tensor, packed: Callable[[], list[Weights]]
) -> dict[str, Any]:
    nvfp4, experts = len(gate_up) == 3, len(gate_up[0])
    x, (indices, weights) = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16), _routes(tokens)
    out, other = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan)
    wanted = plain.experts(x[:FEW], indices[:FEW], weights[:FEW], gate_up, down)
    local = indices[indices < experts]

    def deep_gemm() -> Tensor:
        launch.experts(x, indices, weights, gate_up, down, other, products=tactics.DEEP_GEMM)
        return other

    used, marlin_ = _used(local, experts), _made(lambda: marlin.experts(x, indices, weights, *packed(), EXPERTS))
    return bench.row(
        "moe_w4a16_nvfp4" if nvfp4 else "moe_fp8_block",
        {"experts": experts, "tokens": tokens, "dtype": "nvfp4" if nvfp4 else "fp8"},
        lambda overlap: launch.experts(x, indices, weights, gate_up, down, out, 0, overlap),
        error=lambda: relative(out[:FEW], wanted),
        eager=lambda: _eager(x, indices, weights, *wide),
        compiled=lambda: compiled(_eager)(x, indices, weights, *wide),
        peers={"marlin": marlin_} if nvfp4 else {"deep_gemm": deep_gemm},
        right=lambda found: relative(found, out) < 3e-2 if out.any() else True,
        moved=2 * x.numel() * 2,
        read=int(used * (_size(gate_up) + _size(down))),
        flops=2 * len(local) * 3 * HIDDEN * WIDTH // (1 if nvfp4 else 2),
        calls=CALLS,
        turns=TURNS,
        why=LOSES[nvfp4],
    )


def _used(local: Tensor, experts: int) -> float:
    """Share of a rank's experts that some token visits."""
    return len(local.unique()) / experts


def _shared(bench: Bench, tokens: int, gate_up: Weights, down: Weights, *wide: Tensor) -> dict[str, Any]:
    """`serial_us`: on one stream; `routed_us` and `shared_us`: alone."""
    x, (indices, weights) = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16), _routes(tokens)
    first = torch.randn(2 * WIDTH, HIDDEN, device="cuda", dtype=torch.bfloat16) / HIDDEN**0.5
    second = torch.randn(HIDDEN, WIDTH, device="cuda", dtype=torch.bfloat16) / WIDTH**0.5
    out = torch.empty_like(x)

    def alone() -> Tensor:
        return shared.expert(x, first, second)

    def routed() -> Tensor:
        launch.experts(x, indices, weights, gate_up, down, out)
        return out

    def beside() -> Tensor:
        launch.experts(x, indices, weights, gate_up, down, out, added=shared.beside(x, first, second))
        return out

    def serial() -> Tensor:
        return routed() + alone()

    wanted, local = serial().clone(), indices[indices < len(gate_up[0])]
    row = bench.row(
        "moe_with_shared",
        {"experts": len(gate_up[0]), "tokens": tokens, "dtype": "fp8"},
        lambda _: beside(),
        error=lambda: relative(replayed(beside), wanted),
        eager=lambda: _eager(x, indices, weights, *wide) + alone(),
        peers={},
        right=lambda _: True,
        moved=3 * x.numel() * 2,
        read=int(_used(local, len(gate_up[0])) * (_size(gate_up) + _size(down))) + (first.numel() + second.numel()) * 2,
        flops=2 * (len(local) // 2 + tokens) * 3 * HIDDEN * WIDTH,
        calls=CALLS,
        overlaps=False,
    )
    return row | {"serial_us": micros(serial, CALLS), "routed_us": micros(routed, CALLS), "shared_us": micros(alone, CALLS)}
