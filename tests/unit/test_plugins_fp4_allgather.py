"""Gathers and exchanges in BF16, FP8 and NVFP4 against their reference, on gloo ranks; bytes of a row; what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError

torch = pytest.importorskip("torch", reason="the collectives are torch's")
dist = pytest.importorskip("torch.distributed")

from plugins.fp4_allgather import op, reference  # noqa: E402
from plugins.quantize import reference as quantized  # noqa: E402

COLUMNS = 256
SCALE = torch.tensor([5.0 / 2688])


def part(rank: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, COLUMNS, generator=torch.Generator().manual_seed(rank)).bfloat16()


def check() -> None:
    """On every rank: even, uneven and empty parts."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for precision in op.PRECISIONS:
        for sizes in ([7] * world, [3 + 5 * other for other in range(world)], [0] + [1] * (world - 1)):
            parts = [part(other, size) for other, size in enumerate(sizes)]
            gathered = op.all_gather(parts[rank], precision, input_scale=SCALE, sizes=sizes)
            assert torch.equal(gathered, reference.gathered(parts, precision, SCALE)), (precision, sizes)
            exchange(rank, world, precision)
    shares_out(rank, world)
    everything = torch.cat([part(other, 4) for other in range(world)])
    scale = everything.abs().max().float().view(1) / 2688
    assert torch.equal(op.all_gather(part(rank, 4)), reference.rounded(everything, "nvfp4", scale))
    packed = op.gather_packed(part(rank, 4), input_scale=scale)
    codes, scales = op.views(packed, COLUMNS, "nvfp4")
    wanted = quantized.nvfp4_quantize(everything, scale)
    assert torch.equal(codes, wanted[0]) and torch.equal(scales.float(), wanted[1].float())
    with pytest.raises(ConfigError, match="rows of each"):
        op.all_gather(part(rank, 4), "fp8", sizes=[9] * world)
    exported(rank, world)
    benchmark(world)


def exported(rank: int, world: int) -> None:
    """The op in a graph, for any number of rows, and with parts that differ."""
    name, call = dist.group.WORLD.group_name, torch.ops.r1_pipeline.fp4_allgather

    class Gather(torch.nn.Module):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return call(x * 2, scale, name).relu()

    shapes = {"x": {0: torch.export.Dim("rows", min=2, max=64)}, "scale": None}
    graph = torch.export.export(Gather(), (part(rank, 4), SCALE), dynamic_shapes=shapes).module()
    for rows in (4, 9):
        wanted = op.all_gather(part(rank, rows) * 2, input_scale=SCALE).relu()
        assert torch.equal(graph(part(rank, rows), SCALE), wanted) and len(wanted) == world * rows
    sizes = [3 + 5 * other for other in range(world)]
    torch.library.opcheck(call, (part(rank, sizes[rank]), SCALE, name, sizes), test_utils=("test_schema", "test_faketensor"))


def benchmark(world: int) -> None:
    """The very script that runs over NCCL: its bytes and errors."""
    from scripts import bench_collectives

    rows = {(row["collective"], row["precision"]): row for row in bench_collectives.measured((2,), torch.device("cpu"))}
    assert [rows["all_gather", name]["received_bytes"] for name in op.PRECISIONS] == [
        (world - 1) * 2 * size for size in (14336, 7392, 4032)
    ]
    assert rows["reduce_scatter", "bf16"]["error"] < 1e-2 and rows["combine", "bf16"]["error"] < 4e-3
    assert rows["dispatch", "bf16"]["error"] == 0 < rows["dispatch", "fp8"]["error"] < rows["dispatch", "nvfp4"]["error"] < 0.12
    assert rows["all_gather", "fp8"]["error"] < 0.04 < rows["all_gather", "nvfp4"]["error"] < 0.12


def shares_out(rank: int, world: int) -> None:
    """Sums of all ranks' rows, of which each rank keeps its own."""
    for sizes in (None, [3 + 5 * other for other in range(world)], [0] + [1] * (world - 1)):
        own = sizes or [4] * world
        rows = [part(200 + other, sum(own)) for other in range(world)]
        wanted = torch.stack(rows).float().sum(0).split(own)[rank]
        found = op.reduce_scatter(rows[rank], sizes)
        assert found.shape == wanted.shape and torch.allclose(found.float(), wanted, rtol=2e-2, atol=4e-2)
    with pytest.raises(ConfigError, match="cannot be shared out"):
        op.reduce_scatter(part(0, 3), [5] * world)


def exchange(rank: int, world: int, precision: op.Precision) -> None:
    """Rank r sends r + s + 1 rows to rank s."""
    counts = [[sender + receiver + 1 for receiver in range(world)] for sender in range(world)]
    rows = [part(100 + sender, sum(counts[sender])) for sender in range(world)]
    found = op.all_to_all(rows[rank], counts[rank], [counts[sender][rank] for sender in range(world)], precision, input_scale=SCALE)
    wanted = [rows[sender].split(counts[sender])[rank] for sender in range(world)]
    assert torch.equal(found, reference.gathered(wanted, precision, SCALE))


def test_ranks_vs_reference() -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "tests._utils.ranks", "3", "tests.unit.test_plugins_fp4_allgather:check"]
    done = subprocess.run(command, cwd=root, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_rows_on_the_wire() -> None:
    assert [op.row_bytes(7168, precision) for precision in op.PRECISIONS] == [14336, 7392, 4032]
    for precision in op.PRECISIONS:
        for rows, columns in ((0, 128), (1, 384), (5, 7168)):
            x = torch.randn(rows, columns).bfloat16()
            packed = op.pack(x, precision, SCALE)
            assert packed.shape == (rows, op.row_bytes(columns, precision))
            assert torch.equal(op.unpack(packed, columns, precision, SCALE), reference.rounded(x, precision, SCALE))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use here")
def test_gpu_packs_the_same_bytes() -> None:
    for precision in op.PRECISIONS:
        x = torch.randn(61, 7168).bfloat16()
        packed = op.pack(x.cuda(), precision, SCALE.cuda())
        assert torch.equal(packed.cpu(), op.pack(x, precision, SCALE))
        assert torch.equal(op.unpack(packed, 7168, precision, SCALE.cuda()).cpu(), reference.rounded(x, precision, SCALE))


def test_nvfp4_without_a_scale_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs an input_scale"):
        op.pack(part(0, 2), "nvfp4")


def test_rows_that_have_no_whole_scales_are_refused() -> None:
    with pytest.raises(ConfigError, match="K a multiple of 128"):
        op.pack(torch.randn(2, 100).bfloat16(), "fp8")
