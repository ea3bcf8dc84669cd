"""The decoder layer on gloo ranks against one rank's, by the script that runs over NCCL; the ladder against plain torch; shares."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the layer is torch's")
dist = pytest.importorskip("torch.distributed")
pytest.importorskip("torch._dynamo", reason="the first op of torch.library imports it: here, once, not on every rank")

from scripts import _layer  # noqa: E402
from scripts._layer import FASTEST, Layer, Share, State  # noqa: E402

CPU = torch.device("cpu")


def check() -> None:
    """On every rank: the benchmark's rows, then uneven numbers of tokens."""
    from scripts import bench_block

    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    blocks = {name: bench_block.Block(bench_block.SMALL, CPU, share) for name, share in bench_block.shares().items()}
    whole = Layer(bench_block.SMALL, CPU)
    rows = list(bench_block.measured(blocks, whole, (3,), 20))
    assert [row["gather"] for row in rows] == ["bf16", "fp8", "nvfp4", None, None]
    for row in rows:
        assert bench_block.within(row), row
    assert rows[1]["error"] < 0.012 < rows[2]["error"] and not bench_block.within(rows[1] | {"error": 0.04})
    capacity = [bench_block.capacity_of(name, block) for name, block in blocks.items()]
    assert [row["ranks_that_hold_a_token"] for row in capacity] == [1, ranks, ranks]
    uneven(blocks[f"ADP{ranks}+EP{ranks}"], whole, rank, ranks)


def uneven(block: Layer, whole: Layer, rank: int, ranks: int) -> None:
    """Rank r decodes 2 r + 1 sequences."""
    sizes = [2 * other + 1 for other in range(ranks)]
    lengths = [1 + 7 * sequence % 30 for sequence in range(sum(sizes))]
    x = torch.randn(sum(sizes), whole.shape.hidden, generator=torch.Generator().manual_seed(5)).bfloat16()
    state = State.random(whole.shape, lengths, CPU)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    block.sizes, block.precision = sizes, "bf16"
    found, wanted = block(x[own], state.part(own), FASTEST) - x[own], whole(x, state, FASTEST)[own] - x[own]
    assert _layer.deviation(found, block.chosen, wanted, whole.chosen[own])["error"] < 0.012


@pytest.mark.parametrize("ranks", (2, 3))
def test_ranks_vs_reference(ranks: int) -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "tests._utils.ranks", str(ranks), "tests.unit.test_bench_block:check"]
    done = subprocess.run(command, cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_ladder_vs_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark of the steps with the plugins' CPU forms: plain torch first, all steps last, then all but one.

    What is not captured comes after all batches.
    """
    from scripts import bench_layer

    shape = _layer.Shape(128, 128, 128, 32, 2, 96, 128, experts=4, top_k=2, n_group=2, topk_group=1, width=128, page=16)
    monkeypatch.setattr(bench_layer, "LENGTH", 17)
    monkeypatch.setattr(bench_layer, "clocked", lambda call: 1e-6 * call().shape[0])
    rows, once = list(bench_layer.measured(Layer(shape, CPU), (17, 5))), ["eager", *_layer.STEPS, *list(_layer.STEPS)[1:]]
    uncaptured = ["graph", "graph streams"]
    assert [(row["batch"], row["step"]) for row in rows] == [
        *((batch, step) for batch in (17, 5) for step in once), *((batch, step) for batch in (17, 5) for step in uncaptured)
    ]  # fmt: skip
    assert all((row["us"], row["gain"]) == (row["batch"], 1.0) for row in rows) and rows[0]["error"] == 0
    quantised = list(_layer.STEPS).index("moe_grouped_gemm") + 1
    for place, row in enumerate(rows):
        plain = place < 2 * len(once) and place % len(once) < quantised
        assert row["error"] < (0.012 if plain else 0.08) and row["rerouted"] < 0.5, row


def test_blocks_are_not_cut() -> None:
    weight = _layer.Fp8(torch.zeros(256, 256).to(torch.float8_e4m3fn), torch.ones(2, 2))
    assert weight.rows(slice(128, 256)).scale.shape == (1, 2)
    with pytest.raises(ValueError, match="whole blocks of 128"):
        weight.columns(Share(0, 3).of(256))
