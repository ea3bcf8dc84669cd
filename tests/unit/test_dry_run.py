"""The plan of a conversion: that it is what conversion does, that it names every fault, and that it is fast at R1's size."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.checkpoint import Checkpoint
from pipeline.checkpoint.conversion import ConversionPlan, plan_conversion
from pipeline.checkpoint.dry_run import dry_run
from pipeline.checkpoint.reader import read_header, read_tensor
from pipeline.checkpoint.recipe import Recipe
from pipeline.cli import main
from pipeline.core.errors import ConfigError
from scripts import make_r1_headers
from tests._utils import random_checkpoint
from tests._utils.run_stage import convert, recipe
from tests.unit.test_checkpoint import edit_index, replace_tensors

ROOT = Path(__file__).parents[2]
NVIDIA = {"attention": "bf16", "o_proj": "bf16", "mtp": "bf16"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint.write(tmp_path_factory.mktemp("source"))


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copy"))


@pytest.fixture(scope="module")
def r1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = make_r1_headers.write(tmp_path_factory.mktemp("r1"), make_r1_headers.r1_config())
    yield folder
    shutil.rmtree(folder)


def planned(folder: Path, table: dict[str, Any]) -> ConversionPlan:
    return plan_conversion(Checkpoint.open(folder), Recipe.from_table(table))


def edit_header(file: Path, change: Any) -> None:
    """Rewrite the JSON of a shard's header in its own length; the tensors' bytes stay where they are."""
    raw = file.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    assert len(text) <= length
    file.write_bytes(raw[:8] + text.ljust(length) + raw[8 + length :])


class TestOnePlan:
    @pytest.mark.parametrize(
        "table", [recipe("nvfp4", **NVIDIA), recipe("fp8"), recipe("fp8_block", o_proj="nvfp4"), recipe("bf16")]
    )
    def test_conversion_writes_what_was_planned(self, source: Path, tmp_path: Path, table: dict[str, Any]) -> None:
        plan, out = planned(source, table), convert(source, tmp_path, table)
        assert {shard.name for shard in plan.shards} == {file.name for file in out.glob("*.safetensors")}
        for shard in plan.shards:
            infos = read_header(out / shard.name)
            assert sorted(shard.plan) == sorted((info.name, info.dtype, info.shape) for info in infos.values())
            assert shard.num_bytes == sum(info.num_bytes for info in infos.values())

    def test_actions(self, copy: Path) -> None:
        bias = "model.layers.2.mlp.gate.e_score_correction_bias"
        import ml_dtypes

        replace_tensors(copy, {bias: ("BF16", np.zeros(16, ml_dtypes.bfloat16))})
        steps = {step.entry.name: step for step in planned(copy, recipe("nvfp4", o_proj="fp8_block", mtp="bf16")).steps}
        actions = {
            "model.embed_tokens.weight": "copy",
            "model.layers.0.self_attn.o_proj.weight": "copy",
            "model.layers.0.mlp.up_proj.weight": "requantise to nvfp4",
            "model.layers.3.self_attn.kv_b_proj.weight": "dequantise to BF16",
            "model.layers.5.mlp.experts.0.up_proj.weight": "dequantise to BF16",
            "model.layers.1.mlp.gate.e_score_correction_bias": "copy",
            bias: "cast to F32",
        }
        assert {name: steps[name].action for name in actions} == actions

    def test_partners_are_named_across_shards(self, source: Path) -> None:
        steps = {step.entry.name: step for step in planned(source, recipe("nvfp4")).steps}
        up = steps[random_checkpoint.STRADDLING_UP]
        assert up.fused == up.entry.name.replace("up_proj", "gate_proj")
        assert steps[up.fused].fused == up.entry.name
        assert steps[up.fused].entry.main.file != up.entry.main.file
        assert not any(step.fused for step in planned(source, recipe("fp8_block")).steps)

    def test_no_weight_exceeds_its_limit(self, source: Path) -> None:
        limits = [(s.amax_limit, s.entry.amax()) for s in planned(source, recipe("nvfp4")).steps if s.amax_limit is not None]
        assert len(limits) == 288
        assert all(0 < amax <= limit * 1.004 for limit, amax in limits)  # amax is rounded to BF16
        assert all(amax > 0.9 * limit for limit, amax in limits)

    def test_a_plan_cannot_be_altered(self, source: Path) -> None:
        plan = planned(source, recipe("bf16"))
        for item in (plan, plan.shards[0], plan.steps[0]):
            with pytest.raises(AttributeError):
                setattr(item, fields(item)[0].name, None)


class TestTable:
    def test_it_adds_up(self, source: Path, tmp_path: Path) -> None:
        report = dry_run(source, Recipe.from_table(recipe("nvfp4", **NVIDIA)), tmp_path / "not" / "there").plain()
        for name in ("parameters", "tensors_in", "tensors_out", "bytes_in", "bytes_out"):
            assert sum(row[name] for row in report["rows"]) == report["total"][name], name
        stored = [info for file in source.glob("*.safetensors") for info in read_header(file).values()]
        assert report["total"]["tensors_in"] == len(stored)
        assert report["total"]["bytes_in"] == sum(info.num_bytes for info in stored)
        weight_map = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
        ups = [name for name in weight_map if name.endswith("up_proj.weight") and "layers.5." not in name]
        parted = sum(weight_map[name] != weight_map[name.replace("up_proj", "gate_proj")] for name in ups)
        assert report["fused"] == {"pairs": len(ups), "across_shards": parted} and parted and len(ups) == 69
        assert not report["problems"]
        assert not list(tmp_path.iterdir())

    def test_source_ranges_are_those_of_the_files(self, source: Path, tmp_path: Path) -> None:
        steps = dry_run(source, Recipe.from_table(recipe("fp8_block")), tmp_path).plain()["steps"]
        for name, file, start, stop in steps[7]["sources"]:
            info = read_header(source / file)[name]
            assert (source / file).read_bytes()[start:stop] == read_tensor(info).tobytes()

    def test_the_command_prints_it_and_leaves_nothing(
        self, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ["+hw=cpu", "quant=nvfp4", f"checkpoint={source}", f"store.root={tmp_path / 'store'}", "--dry-run"]
        assert main(["convert", *words]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split()[0] == "class" and any(
            line.split()[:5] == ["routed_experts", "fp8_block", "requantise", "to", "nvfp4"] for line in lines
        )
        assert any(line.startswith("69 pairs share a tensor-wide scale, ") for line in lines)
        entries = Checkpoint.open(source).entries.values()
        parted = sum(len({info.file for info in entry.tensors.values()}) > 1 for entry in entries)
        assert parted and f"{parted} weights lie in another file than their scales" in lines
        assert not list(tmp_path.iterdir())
        assert main(["convert", *words, "--json"]) == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert result["dry_run"] and len(result["steps"]) == 331 and result["total"]["parameters"] == 331

    def test_only_convert_has_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["build", "+hw=cpu", "--dry-run"]) == 2
        assert "build has no --dry-run" in capsys.readouterr().err
        assert main(["convert", "--help"]) == 0
        assert "--dry-run plans from the headers" in capsys.readouterr().out


class TestProblems:
    def damage(self, copy: Path) -> None:
        """One fault of each kind, in different tensors."""
        replace_tensors(
            copy,
            {
                "model.layers.0.mlp.up_proj.weight_scale_inv": None,
                "model.layers.4.mlp.experts.3.up_proj.weight": None,
                "lm_head.weight": ("I8", np.ones((1024, 256), np.int8)),
                "model.layers.2.self_attn.q_a_proj.weight_scale_inv": ("F32", np.full((1, 2), np.nan, np.float32)),
                "model.layers.1.self_attn.q_b_proj.weight_scale_inv": ("F32", np.ones((1, 1), np.float32)),
            },
        )
        weight_map = json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"]

        def overlap(header: dict[str, Any]) -> None:
            norms = sorted(n for n in header if n.endswith("norm.weight") and header[n]["shape"] == [256])
            header[norms[1]]["data_offsets"] = header[norms[0]]["data_offsets"]

        edit_header(copy / weight_map["model.layers.3.input_layernorm.weight"], overlap)
        first, last = (copy / f"model-0000{n}-of-00004.safetensors" for n in (1, 4))
        assert weight_map["model.norm.weight"] == last.name

        def rename(header: dict[str, Any]) -> None:
            name = "model.layers.0.post_attention_layernorm.weight"
            header["model.norm.weight"] = header.pop(name)

        edit_header(first, rename)
        edit_index(copy, lambda table: table.update({"ghost.weight": first.name}))

    def test_all_are_told_together(self, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.damage(copy)
        words = ["+hw=cpu", "quant=nvfp4", f"checkpoint={copy}", f"store.root={tmp_path / 'store'}", "--dry-run"]
        assert main(["convert", *words, "--json"]) == 2
        found = json.loads(capsys.readouterr().out.splitlines()[-1])["problems"]
        kinds = {(item["kind"], item["tensor"]) for item in found}
        assert kinds >= {
            ("missing scale", "model.layers.0.mlp.up_proj.weight"),
            ("unknown layout", "lm_head.weight"),
            ("name in two shards", "model.norm.weight"),
            ("index without tensor", "ghost.weight"),
            ("orphan scale", "model.layers.4.mlp.experts.3.up_proj.weight_scale_inv"),
            ("shape of a scale", "model.layers.1.self_attn.q_b_proj.weight"),
            ("not finite", "model.layers.2.self_attn.q_a_proj.weight"),
        }
        assert any(item["kind"] == "byte ranges" and "shares bytes" in item["text"] for item in found)
        assert all(item["text"].endswith(".") for item in found)

    def test_conversion_refuses_with_the_same_sentences(self, copy: Path, tmp_path: Path) -> None:
        self.damage(copy)
        _, problems = Checkpoint.survey(copy)
        with pytest.raises(ConfigError) as error:
            convert(copy, tmp_path / "w", recipe("nvfp4"))
        assert all(problem.text in str(error.value) for problem in problems)
        assert not list((tmp_path / "w" / "out").iterdir())

    def test_an_unreadable_shard_is_one_problem(self, copy: Path) -> None:
        (copy / "model-00002-of-00004.safetensors").write_bytes(b"cut")
        _, problems = Checkpoint.survey(copy)
        assert [problem.kind for problem in problems] == ["unreadable file"]

    def test_a_shard_without_its_end_is_one_problem(self, copy: Path, tmp_path: Path) -> None:
        file = copy / "model-00002-of-00004.safetensors"
        header = 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]
        file.write_bytes(file.read_bytes()[: header + 64])
        found = dry_run(copy, Recipe.from_table(recipe("nvfp4")), tmp_path)
        assert [problem.kind for problem in found.problems] == ["file size"] and "was cut off" in found.problems[0].text

    def test_many_of_a_kind_are_counted(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = random_checkpoint.write(tmp_path / "s", {"moe_intermediate_size": 120})
        assert main(["convert", "+hw=cpu", "quant=nvfp4", f"checkpoint={folder}", f"store.root={tmp_path}", "--dry-run"]) == 2
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("!")]
        assert len(lines) == 6 and "last dimension is a multiple of 16" in lines[0]
        assert lines[-1].startswith("! ... and 63 more like it (nvfp4 cannot hold it)")


class TestAtFullSize:
    def test_the_layout_is_deepseeks(self, r1: Path) -> None:
        weight_map = json.loads((r1 / "model.safetensors.index.json").read_text())["weight_map"]
        assert len(weight_map) == 91_991 and len(set(weight_map.values())) == 163
        assert sum(name.endswith("_scale_inv") for name in weight_map) == 45_808
        files = list(r1.glob("*.safetensors"))
        assert 685e9 < sum(file.stat().st_size for file in files) < 692e9
        assert sum(file.stat().st_blocks * 512 for file in files) < 50e6

    def test_it_takes_seconds_and_little_memory(self, r1: Path, tmp_path: Path) -> None:
        words = ["convert", "+hw=b200", "model=deepseek_r1", f"checkpoint={r1}", f"store.root={tmp_path}", "--dry-run"]
        code = (
            "import json, resource, sys; from pipeline.cli import main; code = main(sys.argv[1:]);"
            "usage = resource.getrusage(resource.RUSAGE_SELF);"  # its ru_maxrss starts at the parent's; VmHWM is its own
            "peak = next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM'));"
            "print('\\n' + json.dumps([code, usage.ru_utime + usage.ru_stime, peak, 'torch' in sys.modules]))"
        )
        done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=True)
        *lines, last = done.stdout.splitlines()
        status, seconds, rss_kib, torch = json.loads(last)
        assert status == 0 and not torch
        assert next(line for line in lines if line.startswith("total")).split()[1:4] == ["46,183", "91,991", "180,364"]
        assert seconds < 40 and rss_kib < 300 * 1024  # 4 s and 180 MiB on a core of 2.4 GHz, 8 s on one that is shared

    def test_time_grows_with_the_number_of_tensors(self, tmp_path: Path) -> None:
        config = make_r1_headers.r1_config()
        small, large = (
            make_r1_headers.write(tmp_path / str(layers), config | {"num_hidden_layers": layers}, 2 * layers)
            for layers in (5, 14)
        )
        table = Recipe.from_table(recipe("nvfp4", **NVIDIA))

        def seconds(folder: Path) -> tuple[float, int]:
            start = time.process_time()
            plan = dry_run(folder, table, tmp_path).plan
            return time.process_time() - start, len(plan.steps)

        def growth() -> float:
            return seconds(large)[0] / seconds(small)[0]

        few, many = seconds(small)[1], seconds(large)[1]
        assert many > 3.9 * few
        assert any(growth() < 2 * many / few for _ in range(6))  # 4 of 8 when linear, 16 when quadratic
