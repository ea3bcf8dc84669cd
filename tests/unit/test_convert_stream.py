"""The streaming conversion: equal bytes however it is cut and spread, bounded memory, kills, faults of the disk in mid-run."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.checkpoint import Checkpoint, blocks, directio
from pipeline.checkpoint.conversion import plan_conversion
from pipeline.checkpoint.recipe import Recipe
from pipeline.checkpoint.stream import Finished, Options, convert_shards
from pipeline.checkpoint.tasks import ROWS, TaskCutter
from pipeline.core import filehash
from pipeline.core.errors import ConfigError, StageError
from pipeline.core.store import describe_tree
from pipeline.formats import on_gpu
from pipeline.formats.numerics import BF16, E4M3
from tests._utils import random_checkpoint
from tests._utils.killing import small_steps
from tests._utils.run_stage import Notes, convert, recipe
from tests.unit.test_checkpoint import replace_tensors

ROOT = Path(__file__).parents[2]
ODD = {"num_hidden_layers": 2, "n_routed_experts": 8, "intermediate_size": 1184, "moe_intermediate_size": 224}
"""Widths and heights that are no multiple of 128."""
EVEN = {"num_hidden_layers": 1, "n_routed_experts": 4, "n_group": 2, "moe_intermediate_size": 384}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint.write(tmp_path_factory.mktemp("source"), ODD)


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copy"))


def shards_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


def stream(source: Path, out: Path, table: dict[str, Any], options: Options) -> dict[str, bytes]:
    """The shards alone."""
    plan = plan_conversion(Checkpoint.open(source), Recipe.from_table(table))
    (out / "state").mkdir(parents=True)
    with closing(convert_shards(plan, plan.shards, out, out / "state", options)) as events:
        finished = [event for event in events if isinstance(event, Finished)]
    assert {event.shard.name: event.facts for event in finished} == describe_tree(out)
    return shards_of(out)


def noted(ran: set[str], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which adds to `ran` its name and those of the formats it is called with."""

    def call(*args: Any, **options: Any) -> Any:
        ran.add(f"{function.__name__} {' '.join(item.name for item in args[::2] if not isinstance(item, dict))}")
        return function(*args, **options)

    return call


class TestBytes:
    @pytest.mark.parametrize("workers", [1, 3])
    @pytest.mark.parametrize("task", [1, 64 << 10, 1 << 20])
    def test_they_depend_neither_on_workers_nor_on_cuts(self, source: Path, tmp_path: Path, workers: int, task: int) -> None:
        table = recipe("nvfp4", mtp="bf16", o_proj="fp8", attention="fp8_block", shared_experts="mxfp8")
        wanted = shards_of(convert(source, tmp_path / "w", table))
        with small_steps(block=32 << 10, task=task, unit=task):
            assert stream(source, tmp_path / "s", table, Options(workers)) == wanted

    @pytest.mark.parametrize("name", ["w4a8_awq", "fp8_channel", "mxfp4", "fp8_block"])
    def test_every_kind_of_scale_survives_the_cuts(self, tmp_path: Path, name: str) -> None:
        source = random_checkpoint.write(tmp_path / "s", EVEN)
        wanted = shards_of(convert(source, tmp_path / "w", recipe(name)))
        with small_steps(block=32 << 10, task=1, unit=1):
            assert stream(source, tmp_path / "c", recipe(name), Options(2)) == wanted

    @pytest.mark.parametrize("layout", ["compressed_tensors", "gptq"])
    def test_layouts_that_pack_along_rows_are_not_cut(self, tmp_path: Path, layout: str) -> None:
        source = random_checkpoint.write(tmp_path / "s", EVEN)
        table = recipe("int4_awq", mtp="bf16") | {"layout": layout}
        wanted = shards_of(convert(source, tmp_path / "w", table))
        with small_steps(block=32 << 10, task=1, unit=1):
            assert stream(source, tmp_path / "c", table, Options(2)) == wanted

    def test_a_file_system_without_direct_io_is_served(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wanted = shards_of(convert(source, tmp_path / "w", recipe("fp8")))
        real = os.open

        def refuse(path: Any, flags: int, *rest: Any) -> int:
            if flags & getattr(os, "O_DIRECT", 0):
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(path, flags, *rest)

        monkeypatch.setattr(directio.os, "open", refuse)
        with small_steps():
            assert stream(source, tmp_path / "c", recipe("fp8"), Options(1)) == wanted

    @pytest.mark.parametrize("mode", ["modelopt", "exact"])
    @pytest.mark.parametrize("search", ["amax", "mse"])
    def test_they_do_not_depend_on_the_device(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, search: str, mode: str
    ) -> None:
        pytest.importorskip("torch", reason="the GPU's ops are torch's")
        # No GPU is needed for what is tested here, the way to the ops and back: on the CPU they are the numpy reference.
        # That their kernels give its bytes is tested in test_plugins_nvfp4_convert.py.
        monkeypatch.setattr(on_gpu, "DEVICE", "cpu")
        ran: set[str] = set()
        for name in ("amax", "requantize"):
            monkeypatch.setattr(on_gpu, name, noted(ran, getattr(on_gpu, name)))
        formats = {"attention": "fp8_block", "o_proj": "w4a8_nvfp4_fp8", "mtp": "bf16", "shared_experts": "w4a16_nvfp4"}
        table = recipe("nvfp4", **formats) | {"nvfp4_scale_search": search, "nvfp4_mode": mode}
        wanted = shards_of(convert(source, tmp_path / "cpu", table))
        assert not ran
        with small_steps(task=64 << 10, unit=64 << 10):
            assert shards_of(convert(source, tmp_path / "cuda", table, device="cuda")) == wanted
        here = {"amax fp8_block", "requantize fp8_block nvfp4", "requantize fp8_block w4a16_nvfp4"}
        assert ran == (here if search == "amax" else set())

    @pytest.mark.parametrize("unit", [1, 1 << 20])
    def test_the_true_amax_decides_although_the_bound_is_larger(self, copy: Path, tmp_path: Path, unit: int) -> None:
        """Codes that stop at 256 in blocks whose scale allows 448."""
        name = "model.layers.1.mlp.experts.0.down_proj.weight"
        replace_tensors(copy, {name: ("F8_E4M3", np.full((256, 224), 0x78, np.uint8).view(E4M3))})  # 256
        before = Checkpoint.open(copy).entries[name]
        with small_steps(task=1, unit=unit):
            after = Checkpoint.open(convert(copy, tmp_path / "w", recipe("nvfp4"))).entries[name].load()
        amax = np.float32(before.dequantized().max().astype(BF16))
        assert after["weight_scale_2"] == amax / np.float32(2688) < before.format.limit(before.load()) / 2688


class TestTasks:
    def test_every_byte_is_taken_once(self, source: Path) -> None:
        plan = plan_conversion(Checkpoint.open(source), Recipe.from_table(recipe("nvfp4")))
        with small_steps(task=1, unit=1):
            cutter = TaskCutter(plan)
            for number, shard in enumerate(plan.shards):
                tasks = list(cutter.cut(number, shard))
                assert sum(task.num_bytes for task in tasks) == shard.num_source_bytes
                assert all(part.rows.start % ROWS == 0 for task in tasks for part in task.parts if part.rows)

    def test_a_task_needs_nothing_of_a_later_one(self, source: Path) -> None:
        """Otherwise one worker alone would wait for ever."""
        plan = plan_conversion(Checkpoint.open(source), Recipe.from_table(recipe("nvfp4")))
        for unit in (1, 100_000, 1 << 30):
            with small_steps(task=unit, unit=unit):
                cutter, left = TaskCutter(plan), {s.entry.name: s.entry.shape[0] for s in plan.steps if s.needs_amax}
                for number, shard in enumerate(plan.shards):
                    for task in cutter.cut(number, shard):
                        for part in task.parts:
                            if part.measures and part.step.needs_amax:
                                left[part.step.entry.name] -= part.num_rows
                        steps = [part.step for part in task.parts if part.converts and part.step.needs_amax]
                        assert all(left[name] <= 0 for step in steps for name in (step.entry.name, step.fused) if name)


class TestFaults:
    def failing(self, monkeypatch: pytest.MonkeyPatch, name: str, code: int, out: Path) -> None:
        """An `os` function for data fails once a shard is finished."""
        real = getattr(os, name)

        def call(*arguments: Any) -> Any:
            if any(out.glob("*.safetensors")):
                raise OSError(code, os.strerror(code))
            return real(*arguments)

        monkeypatch.setattr(directio.os, name, call)

    @pytest.mark.parametrize(
        ("name", "code", "words"),
        [
            ("pwrite", errno.ENOSPC, "cannot be written .the disk is full.: make room"),
            ("pwrite", errno.EIO, "cannot be written .Input/output error."),
            ("preadv", errno.EIO, "cannot be read at byte .* .Input/output error.: mend the disk"),
        ],
    )
    def test_a_failing_disk_is_a_sentence_and_loses_nothing(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, words: str
    ) -> None:
        wanted = shards_of(convert(source, tmp_path / "clean", recipe("nvfp4")))
        with small_steps(), monkeypatch.context() as patched:
            self.failing(patched, name, code, tmp_path / "w" / "out")
            with pytest.raises(StageError, match=words + ".*what is finished is kept"):
                convert(source, tmp_path / "w", recipe("nvfp4"))
        kept = shards_of(tmp_path / "w" / "out")
        assert kept and kept.items() < wanted.items() and not list(tmp_path.rglob("*.part"))
        notes = Notes()
        assert shards_of(convert(source, tmp_path / "w", recipe("nvfp4"), notes)) == wanted
        assert notes.notes[0] == f"{len(kept)} of 4 shards are finished from an earlier run"

    def test_a_shard_that_vanishes_is_a_sentence(self, copy: Path, tmp_path: Path) -> None:
        class Vandal(Notes):
            def advance(self, amount: int = 1) -> None:
                super().advance(amount)
                (copy / "model-00003-of-00004.safetensors").unlink(missing_ok=True)

        with small_steps(), pytest.raises(StageError, match=r"model-00003-of-00004\.safetensors cannot be read .*No such file"):
            convert(copy, tmp_path / "w", recipe("nvfp4"), Vandal())
        assert shards_of(tmp_path / "w" / "out")

    def test_a_source_that_changes_meanwhile_is_a_sentence(self, copy: Path, tmp_path: Path) -> None:
        class Vandal(Notes):
            def start(self, total: int, unit: str) -> None:
                super().start(total, unit)
                os.utime(copy / "model-00001-of-00004.safetensors", (1, 1))

        with pytest.raises(StageError, match=r"changed or vanished while model-00001-of-00004\.safetensors was made"):
            convert(copy, tmp_path / "w", recipe("bf16"), Vandal())

    def test_nan_in_a_later_piece_is_refused_by_name(self, copy: Path, tmp_path: Path) -> None:
        entry = Checkpoint.open(copy).entries["model.layers.0.mlp.up_proj.weight"]
        codes = entry.load()["weight"].copy()
        codes.view(np.uint8)[1100, 3] = 0xFF
        replace_tensors(copy, {entry.name: ("F8_E4M3", codes)})
        for name in ("nvfp4", "bf16", "fp8_block"):
            with small_steps(task=1, unit=1), pytest.raises(ConfigError, match=f"holds NaN or infinity in {entry.name}"):
                convert(copy, tmp_path / name, recipe(name))


class TestDigests:
    def test_those_of_the_stage_are_those_of_the_files(self, source: Path, tmp_path: Path) -> None:
        out = convert(source, tmp_path, recipe("nvfp4"))
        handed = filehash.load_digests(tmp_path / "state" / "digests.json")
        assert handed.keys() == shards_of(out).keys()
        assert describe_tree(out, handed) == describe_tree(out)

    def test_a_file_that_was_touched_is_read_again(self, source: Path, tmp_path: Path) -> None:
        out = convert(source, tmp_path, recipe("fp8"))
        handed = filehash.load_digests(tmp_path / "state" / "digests.json")
        victim = out / "model-00002-of-00004.safetensors"
        before = victim.stat()
        with victim.open("r+b") as file:
            file.seek(-3, os.SEEK_END)
            file.write(b"\x55")
        os.utime(victim, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert describe_tree(out, handed) == describe_tree(out)

    @pytest.mark.parametrize("size", [0, 10, filehash.PIECE_BYTES, filehash.PIECE_BYTES + 1, 3 * filehash.PIECE_BYTES])
    def test_pieces_are_hashed_as_said(self, tmp_path: Path, size: int) -> None:
        from hashlib import sha256

        data = np.random.default_rng(size).bytes(size)
        (tmp_path / "f").write_bytes(data)
        pieces = [sha256(data[i : i + filehash.PIECE_BYTES]).digest() for i in range(0, max(1, size), filehash.PIECE_BYTES)]
        wanted = {"sha256": pieces[0].hex()} if len(pieces) == 1 else {"pieces_sha256": sha256(b"".join(pieces)).hexdigest()}
        assert filehash.describe_file(tmp_path / "f") == wanted | {"size": size}


def test_kills_at_random_moments_lose_nothing(tmp_path: Path) -> None:
    script = str(ROOT / "scripts" / "kill_convert.py")
    command = [sys.executable, script, "--kills", "12", "--seed", "1", "--json", str(tmp_path / "t")]
    done = subprocess.run(command, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads((tmp_path / "t").read_text())
    assert table["kills"] == 12 and table["lost"] == 0 and len(table["by_call"]) > 2


def test_memory_is_bounded_for_a_tensor_of_any_size(tmp_path: Path) -> None:
    """An embedding of 512 MiB and an lm_head as large: two workers take 225 MiB, each further one holds 40 more."""
    from scripts.make_r1_headers import write

    arch = random_checkpoint.ARCH | EVEN | {"vocab_size": 1 << 20, "hidden_size": 256}
    source = write(tmp_path / "s", arch, 2, scale=1e-4)
    code = (
        "import sys; from pathlib import Path; from tests._utils.run_stage import *\n"
        "convert(Path(sys.argv[1]), Path(sys.argv[2]), recipe('nvfp4', mtp='bf16'))\n"
        "print(peak_rss())"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "w")]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    assert int(done.stdout) < (300 + 50 * Options().workers) << 20
    assert sum(file.stat().st_size for file in (tmp_path / "w" / "out").glob("*.safetensors")) > 1 << 30
    shutil.rmtree(tmp_path / "w")


def test_the_pool_gives_aligned_memory() -> None:
    memory = blocks.BlockPool().take()
    assert np.frombuffer(memory, np.uint8).ctypes.data % directio.ALIGNMENT == 0 and len(memory) == filehash.PIECE_BYTES
