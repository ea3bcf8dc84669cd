"""Attention over keys and values of each head against float64: the ops on the CPU, the kernel where there is an H200."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import ConfigError
from tests._utils.cuda_on_cpu import CudaOnCpu

torch = pytest.importorskip("torch", reason="the op is torch's")

from plugins.mla_prefill import crossover, op, reference, tactics  # noqa: E402
from tests._utils.peers import WHERE, load_peers, poison  # noqa: E402

HAS_WGMMA = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_WGMMA, reason="no GPU of sm_90 here"))]
SCALE, D, R, V = 0.07, 192, 64, 128


def case(device: str, queries: list[int], keys: list[int], heads: int) -> list[torch.Tensor]:
    """q, kv, k_rope, cu_q and cu_k."""
    ends = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (queries, keys)]
    shapes = (sum(queries), heads, D), (sum(keys), heads, D - R + V), (sum(keys), R)
    return [tensor.to(device) for tensor in (*(torch.randn(shape, device=device).bfloat16() for shape in shapes), *ends)]


def check(found: tuple[torch.Tensor, torch.Tensor], inputs: list[torch.Tensor], largest: float = 1.0) -> None:
    """`largest`: what values are times at most; their weights are BF16."""
    q, kv, k_rope, *ends = inputs
    wanted, lse = reference.mla_prefill(q, *reference.joined(q, kv, k_rope), *ends, SCALE)
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32
    assert all(each.is_contiguous() for each in found)  # as export is told, whoever computed it
    torch.testing.assert_close(found[0].double(), wanted, rtol=2e-2, atol=8e-3 * largest)
    torch.testing.assert_close(found[1].double(), lse, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_ops_vs_reference(device: str) -> None:
    cases: list[tuple[list[int], list[int], int]] = [([1], [1], 1), ([7, 0, 13], [7, 3, 31], 2), ([5], [3], 3), ([], [], 2)]
    if device == "cuda":
        odd = [1, 63, 64, 65, 127, 128, 129, 0, 300, 777]
        cases += [(odd, odd, 3), (odd, [n + 130 for n in odd], 16), ([200], [70], 2), ([1024], [4096], 128), ([2], [5000], 1)]
    for queries, keys, heads in cases:
        inputs = case(device, queries, keys, heads)
        q, kv, k_rope, *ends = inputs
        check(torch.ops.r1_pipeline.mla_prefill_kv(*inputs, SCALE), inputs)
        check(torch.ops.r1_pipeline.mla_prefill(q, *reference.joined(q, kv, k_rope), *ends, SCALE), inputs)


@pytest.mark.skipif(not HAS_WGMMA, reason="no GPU of sm_90 here")
@pytest.mark.parametrize("name", tactics.THEIRS)
def test_other_libraries_in_the_op_vs_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load_peers()
    if name not in tactics.present(alone=True):
        pytest.skip(f"{name}: {WHERE}")
    ran: list[int] = []
    call = tactics.THEIRS[name]
    monkeypatch.setitem(tactics.THEIRS, name, lambda *inputs: (ran.append(1), call(*inputs))[1])
    monkeypatch.setattr(tactics.TABLE, "choose", lambda same, sizes, names: name if name in names else "ours")
    odd = [1, 63, 64, 65, 127, 128, 129, 0, 300, 777]
    some = [([256], [256], 16), ([1024], [1024], 5)]
    some += [(odd, odd, 3), (odd, [n + 130 for n in odd], 16), ([200], [70], 2), ([512], [4096], 8)] if name == "fa3" else []
    for queries, keys, heads in some:
        q, kv, k_rope, *ends = inputs = case("cuda", queries, keys, heads)
        k, v = reference.joined(q, kv, k_rope)
        poison()
        check(torch.ops.r1_pipeline.mla_prefill(q, k, v, *ends, SCALE), inputs)
    assert len(ran) == len(some) and not tactics.TABLE.failed


def test_other_libraries_are_given_rows_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []
    monkeypatch.setattr(op, "has_kernel", lambda *_: True)
    monkeypatch.setattr(op, "_fastest", lambda *_: "fa3")
    monkeypatch.setitem(tactics.THEIRS, "fa3", lambda *inputs: given.extend(inputs))
    q, k = (torch.zeros(op.NOPE + op.ROPE, 3, 2).bfloat16().permute(2, 1, 0) for _ in range(2))
    v, ends = torch.zeros(2, 3, 2 * op.VALUES).bfloat16()[..., : op.VALUES], torch.tensor([0, 9, 2, 9], dtype=torch.int32)[::2]
    op.mla_prefill._init_fn(q, k, v, ends, ends, SCALE)
    assert [x.stride(-1) for x in given[:5]] == [1] * 5 and given[2] is v
    assert all(torch.equal(x, wanted) for x, wanted in zip(given, (q, k, v, ends, ends), strict=False))


@pytest.mark.skipif(not HAS_WGMMA, reason="no GPU of sm_90 here")
def test_scores_that_grow_and_fall_vs_reference() -> None:
    """The largest score so far is kept or replaced."""
    low, high = 0.05, 3.0
    for begin, end in ((low, high), (high, low)):
        q, kv, k_rope, *ends = inputs = case("cuda", [512], [2048], 8)
        ramp = torch.linspace(begin, end, 2048, device="cuda").bfloat16()
        kv *= ramp.view(-1, 1, 1)
        k_rope *= ramp.view(-1, 1)
        out, lse = op._outputs(q, V)
        op.launch(q, kv[..., :V], k_rope.unsqueeze(1), kv[..., V:], *ends, out.fill_(torch.nan), lse, SCALE)
        check((out, lse), inputs, high)


PIECES = """
#include "{root}/numerics.cuh"
#include "{root}/mla_prefill/work.cuh"
extern "C" __global__ void pieces(const int* cu_q, const int* cu_k, int sequences, int heads, int first, int step, int* found) {{
  const Problem p{{cu_q, cu_k, nullptr, nullptr, nullptr, sequences, heads, 0, 1.f}};
  Piece piece;
  Walk walk;
  for (int index = first; walk.find(p, index, piece); index += step) {{
    const int fields[] = {{piece.head, piece.q_row, piece.rows, piece.k_row, piece.seen, piece.blocks, piece.offset}};
    for (int i = 0; i < 7; ++i) found[index * 7 + i] = fields[i];
  }}
}}
"""


@pytest.mark.parametrize("l2_bytes", [1, 100_000, 250_000, 32 << 20])
def test_pieces_are_all_queries_of_all_heads_once(tmp_path: Path, l2_bytes: int) -> None:
    source = tmp_path / "pieces.cu"
    source.write_text(PIECES.format(root=Path(op.__file__).parents[1]))
    types = {"pieces": "const int*, const int*, int, int, int, int, int*"}
    kernel = CudaOnCpu(source, types, {"L2_BYTES": l2_bytes}, tmp_path)
    queries, keys, heads, ctas = [1, 128, 0, 129, 300, 200], [1, 128, 5, 129, 1000, 70], 5, 3
    cu_q, cu_k = (np.cumsum([0, *lengths]).astype(np.int32) for lengths in (queries, keys))
    found = np.full((sum(-(-many // 128) for many in queries) * heads + 1, 7), -1, np.int32)
    for first in range(ctas):
        kernel.launch("pieces", (7, 1, 1), 1, cu_q, cu_k, len(queries), heads, first, ctas, found)
    assert (found[-1] == -1).all() and (found[:-1, 0] >= 0).all()
    done: list[tuple[int, int]] = []
    for head, q_row, rows, k_row, seen, blocks, offset in found[:-1].tolist():
        sequence = int(np.searchsorted(cu_q, q_row, "right")) - 1
        begin = q_row - cu_q[sequence]
        assert 0 < rows <= 128 and begin + rows <= queries[sequence] and k_row == cu_k[sequence]
        assert offset == keys[sequence] - queries[sequence] + begin
        assert seen == max(0, offset + rows) <= keys[sequence] and blocks == -(-seen // 128)
        done += [(head, q_row + row) for row in range(rows)]
    assert sorted(done) == [(head, row) for head in range(heads) for row in range(sum(queries))]


def test_a_chunk_gives_what_all_at_once_gives() -> None:
    q, kv, k_rope, ends, _ = case("cpu", [29], [29], 2)
    whole, _ = op.mla_prefill_kv(q, kv, k_rope, ends, ends, SCALE)
    chunk, _ = op.mla_prefill_kv(q[17:], kv, k_rope, torch.tensor([0, 12], dtype=torch.int32), ends, SCALE)
    torch.testing.assert_close(chunk, whole[17:])


def test_reference_is_torch_s_attention() -> None:
    q, kv, k_rope, *ends = case("cpu", [19], [19], 3)
    k, v = reference.joined(q, kv, k_rope)
    found, _ = reference.mla_prefill(q, k, v, *ends, SCALE)
    inputs = (x.transpose(0, 1).double() for x in (q, k, v))
    wanted = torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=True, scale=SCALE)
    torch.testing.assert_close(found, wanted.transpose(0, 1))


def test_what_a_key_holds_spoils_no_other_sequence() -> None:
    inputs = case("cpu", [3, 4], [3, 4], 2)
    clean = op.mla_prefill_kv(*inputs, SCALE)[0]
    inputs[1][5] = torch.nan  # the second sequence's last but one key and value
    found = op.mla_prefill_kv(*inputs, SCALE)[0]
    torch.testing.assert_close(found[:3], clean[:3])
    assert found[5:].isnan().all()


def test_ops_are_known_to_export() -> None:
    inputs = case("cpu", [2, 5], [2, 9], 2)
    q, kv, k_rope, *ends = inputs
    torch.library.opcheck(op.mla_prefill_kv, (*inputs, SCALE))
    torch.library.opcheck(op.mla_prefill, (q, *reference.joined(q, kv, k_rope), *ends, SCALE))


def test_what_does_not_fit_is_refused() -> None:
    q, kv, k_rope, *ends = case("cpu", [3], [3], 2)
    k, v = reference.joined(q, kv, k_rope)
    with pytest.raises(ConfigError, match="must be bfloat16"):
        op.mla_prefill(q.float(), k, v, *ends, SCALE)
    with pytest.raises(ConfigError, match=r"int32 \[B \+ 1\]"):
        op.mla_prefill(q, k, v, ends[0].long(), ends[1], SCALE)
    with pytest.raises(ConfigError, match="above 0"):
        op.mla_prefill(q, k, v, *ends, -1.0)
    with pytest.raises(ConfigError, match=r"\[Tk, R\]"):
        op.mla_prefill_kv(q, kv, k_rope[1:], *ends, SCALE)
    with pytest.raises(ConfigError, match=r"kv is torch\.float32"):
        op.mla_prefill_kv(q, kv.float(), k_rope, *ends, SCALE)


def test_cudnn_is_for_one_whole_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(tactics.TABLE, "choose", lambda *args: asked.append(args[2]) or "ours")
    for queries, keys in (([128], [128]), ([128], [256]), ([100], [100]), ([128, 128], [128, 128])):
        q, kv, _, cu_q, _ = case("cpu", queries, keys, 1)
        op._fastest(q, kv, cu_q)
    assert ["cudnn" in names for names in asked] == [True, False, False, False]


def forms(times: dict[int, tuple[float, float]]) -> list[dict[str, float]]:
    return [{"tokens": tokens, "absorbed_us": one, "expanded_us": other} for tokens, (one, other) in times.items()]


def test_forms_cross_where_the_times_are_equal() -> None:
    assert crossover.crossing(forms({64: (10, 30), 128: (20, 30), 192: (40, 30), 256: (50, 30)})) == 160
    assert crossover.crossing(forms({64: (10, 5), 128: (20, 30), 256: (60, 20)})) == 154  # not where it was better once
    assert crossover.crossing(forms({16: (10, 5), 32: (20, 6)})) == 16
    assert crossover.crossing(forms({16: (1, 5), 32: (2, 6)})) == 33


def test_contexts_between_measured_ones_are_interpolated(monkeypatch: pytest.MonkeyPatch) -> None:
    crossover.expanded_from.cache_clear()
    monkeypatch.setattr(crossover, "_crossings", lambda cache: {256: 16, 4096: 256})
    assert [crossover.expanded_from(context) for context in (1, 256, 1024, 4096, 100_000)] == [16, 16, 64, 256, 256]
    assert crossover.form(63, 1024) == "absorbed" and crossover.form(64, 1024) == "expanded"
    crossover.expanded_from.cache_clear()


@pytest.mark.parametrize("cache", ["bf16", "fp8"])
def test_the_measured_crossings_are_read(cache: crossover.Cache) -> None:
    contexts = crossover._crossings(cache)
    assert len(contexts) > 1 and all(0 < tokens <= context + 1 for context, tokens in contexts.items())
    assert crossover.form(1, 4096, cache) == "absorbed" and crossover.form(4096, 4096, cache) == "expanded"
