"""Reading, writing, naming and hashing checkpoints; every kind of damage must be named."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.checkpoint import Checkpoint, ShardWriter, dequantized
from pipeline.checkpoint import digest as digest_module
from pipeline.checkpoint.digest import companions, digest
from pipeline.checkpoint.layout import parameters, place_of
from pipeline.checkpoint.reader import DTYPES, read_header, read_tensor
from pipeline.checkpoint.source import INDEX
from pipeline.core.errors import ConfigError, StageError
from pipeline.models.arch import Arch
from tests._utils import random_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint.write(tmp_path_factory.mktemp("source"))


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "copy"))


def write_raw(file: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def edit_index(folder: Path, change: Any) -> None:
    table = json.loads((folder / INDEX).read_text())
    change(table["weight_map"])
    (folder / INDEX).write_text(json.dumps(table))


def replace_tensors(folder: Path, changed: dict[str, tuple[str, np.ndarray] | None]) -> None:
    """Rewrite the shards that hold `changed`; None removes a tensor."""
    for name in changed:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        file = folder / weight_map[name]
        tensors = {n: (i.dtype, read_tensor(i).copy()) for n, i in read_header(file).items()}
        value = changed[name]
        if value is None:
            del tensors[name]
            edit_index(folder, lambda table, name=name: table.pop(name))
        else:
            tensors[name] = value
        with ShardWriter(file, [(n, dtype, a.shape) for n, (dtype, a) in tensors.items()]) as writer:
            for n, (_, array) in tensors.items():
                writer.write(n, array)


class TestReader:
    def test_agrees_with_safetensors(self, source: Path) -> None:
        torch = pytest.importorskip("torch")
        from safetensors.torch import load_file

        for file in sorted(source.glob("*.safetensors")):
            theirs = load_file(file)
            ours = read_header(file)
            assert theirs.keys() == ours.keys()
            for name, tensor in theirs.items():
                assert tuple(tensor.shape) == ours[name].shape
                assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == read_tensor(ours[name]).tobytes()

    def test_views_are_read_only(self, source: Path) -> None:
        info = next(iter(read_header(next(source.glob("*.safetensors"))).values()))
        with pytest.raises(ValueError, match="read-only"):
            read_tensor(info)[...] = 0

    @pytest.mark.parametrize("keep", [0, 4, 7, 100, -1, -100_000])
    def test_a_truncated_file_is_named(self, copy: Path, keep: int) -> None:
        file = copy / "model-00002-of-00004.safetensors"
        file.write_bytes(file.read_bytes()[:keep])
        with pytest.raises(ConfigError, match=r"model-00002-of-00004\.safetensors.*cut off"):
            Checkpoint.open(copy)

    @pytest.mark.parametrize(
        ("header", "data", "fault"),
        [
            (b"{not json", b"", "unreadable header"),
            (b"[1, 2]", b"", "not a table"),
            ({"a": {"dtype": "F32", "shape": [1]}}, b"\0" * 4, "describes a wrongly"),
            ({"a": {"dtype": "F4", "shape": [1], "data_offsets": [0, 1]}}, b"\0", "stores a as F4, which is not known"),
            ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"\0" * 4, r"gives a 4 bytes, but F32\[2\] takes 8"),
            ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, b"\0" * 4, "gives a -4 bytes"),
            ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, b"\0" * 6, "belong to no tensor"),
            ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
              "b": {"dtype": "U8", "shape": [2], "data_offsets": [4, 6]}}, b"\0" * 6, "b leaves a hole before it"),
            ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
              "b": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, b"\0" * 4, "b shares bytes with the tensor"),
        ],
    )  # fmt: skip
    def test_a_bad_header_is_named(self, tmp_path: Path, header: Any, data: bytes, fault: str) -> None:
        with pytest.raises(ConfigError, match=fault) as error:
            read_header(write_raw(tmp_path / "bad.safetensors", header, data))
        assert "bad.safetensors" in str(error.value)


class TestWriter:
    PLAN = (("b", "U8", (3,)), ("a", "F32", ()), ("c", "BF16", (2, 2)), ("e", "F32", (0, 4)))

    def arrays(self) -> dict[str, np.ndarray]:
        return {n: np.ones(shape, DTYPES[dtype]) for n, dtype, shape in self.PLAN}

    def write(self, file: Path, order: str = "abce") -> bytes:
        with ShardWriter(file, self.PLAN) as writer:
            for name in order:
                writer.write(name, self.arrays()[name])
        return file.read_bytes()

    def test_bytes_do_not_depend_on_the_order_of_writing(self, tmp_path: Path) -> None:
        assert self.write(tmp_path / "one") == self.write(tmp_path / "two", "ecba")

    def test_tensors_are_aligned_and_marked_for_torch(self, tmp_path: Path) -> None:
        raw = self.write(tmp_path / "x")
        infos = read_header(tmp_path / "x")
        assert all(info.start % DTYPES[info.dtype].itemsize == 0 for info in infos.values())
        assert json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])["__metadata__"] == {"format": "pt"}
        assert min(info.start for info in infos.values()) % 64 == 0
        assert all((read_tensor(info) == 1).all() for info in infos.values())

    def test_an_error_leaves_neither_the_file_nor_a_part(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError), ShardWriter(tmp_path / "x", self.PLAN) as writer:
            writer.write("a", self.arrays()["a"])
            assert not (tmp_path / "x").exists()
            raise RuntimeError
        assert not list(tmp_path.iterdir())

    def test_a_missing_tensor_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(StageError, match="lacks 1 tensors, c among them"):
            self.write(tmp_path / "x", "abe")
        assert not list(tmp_path.iterdir())

    def test_a_tensor_of_another_shape_is_refused(self, tmp_path: Path) -> None:
        with (
            pytest.raises(StageError, match=r"b was planned as U8\[3\], but came as uint8\[4\]"),
            ShardWriter(tmp_path / "x", self.PLAN) as writer,
        ):
            writer.write("b", np.ones(4, np.uint8))


class TestLayout:
    def test_every_parameter_has_a_class(self) -> None:
        arch = Arch.from_hf(random_checkpoint.ARCH)
        places = [place_of(name.rpartition(".")[0], arch) for name, _ in parameters(arch)]
        linear = Counter(place.kind for place in places if place.linear)
        assert linear == {
            "attention": 20,
            "o_proj": 5,
            "dense_mlp": 3,
            "shared_experts": 12,
            "routed_experts": 192,
            "mtp": 56,
        }
        assert not [place for place in places if place.kind == "other" and place.layer != 5]

    def test_parameters_are_those_of_the_reference_model(self) -> None:
        torch = pytest.importorskip("torch")
        from pipeline.models.deepseek_v3 import DeepseekV3

        arch = Arch.from_hf(random_checkpoint.ARCH)
        with torch.device("meta"):
            model = DeepseekV3(arch)
        assert dict(parameters(arch)) == {name: tuple(t.shape) for name, t in model.state_dict().items()}

    @pytest.mark.parametrize(
        ("module", "kind", "linear"),
        [
            ("model.layers.2.mlp.gate", "router", False), ("model.layers.0.mlp.gate_proj", "dense_mlp", True),
            ("model.layers.4.mlp.experts.15.down_proj", "routed_experts", True), ("lm_head", "lm_head", False),
            ("model.layers.5.eh_proj", "mtp", False), ("model.layers.5.mlp.gate", "mtp", False),
            ("model.layers.5.self_attn.o_proj", "mtp", True), ("model.layers.1.self_attn.q_a_layernorm", "norm", False),
            ("model.layers.1.self_attn.rotary_emb", "other", False), ("vision.tower", "other", False),
        ],
    )  # fmt: skip
    def test_places(self, module: str, kind: str, linear: bool) -> None:
        place = place_of(module, Arch.from_hf(random_checkpoint.ARCH))
        assert (place.kind, place.linear) == (kind, linear)

    def test_partners_are_mutual(self) -> None:
        arch = Arch.from_hf(random_checkpoint.ARCH)
        for name, _ in parameters(arch):
            place = place_of(name.rpartition(".")[0], arch)
            if place.partner:
                assert place_of(place.partner, arch).partner == place.module


class TestSource:
    def test_pairs_lie_across_shards(self, source: Path) -> None:
        entries = Checkpoint.open(source).entries
        scale = entries[random_checkpoint.STRADDLING_SCALE]
        assert len({info.file for info in scale.tensors.values()}) == 2 and scale.format.name == "fp8_block"
        up = entries[random_checkpoint.STRADDLING_UP]
        assert up.main.file != entries[up.name.replace("up_proj", "gate_proj")].main.file

    def test_dequantised_weights_are_code_times_scale(self, source: Path) -> None:
        checkpoint, seen = Checkpoint.open(source), 0
        for name, value in dequantized(source):
            entry = checkpoint.entries[name]
            assert value.dtype == np.float32 and value.shape == entry.shape
            if entry.quantised and entry.shape == (192, 256):
                codes, scales = (a.astype(np.float32) for a in entry.load().values())
                assert (
                    value[191, 255] == codes[191, 255] * scales[1, 1] and value[0, 128] == codes[0, 128] * scales[0, 1]
                )
                seen += 1
        assert seen == 6

    def test_a_missing_shard_is_named(self, copy: Path) -> None:
        (copy / "model-00003-of-00004.safetensors").unlink()
        with pytest.raises(ConfigError, match=r"model-00003-of-00004\.safetensors is missing"):
            Checkpoint.open(copy)

    def test_a_folder_in_the_place_of_a_shard(self, copy: Path) -> None:
        (copy / "model-00003-of-00004.safetensors").unlink()
        (copy / "model-00003-of-00004.safetensors").mkdir()
        with pytest.raises(ConfigError, match=r"model-00003-of-00004\.safetensors is not a file"):
            Checkpoint.open(copy)

    def test_an_index_that_places_a_tensor_elsewhere(self, copy: Path) -> None:
        edit_index(copy, lambda table: table.update({"lm_head.weight": "model-00001-of-00004.safetensors"}))
        with pytest.raises(ConfigError, match=r"holds lm_head\.weight, which .* places model-00001"):
            Checkpoint.open(copy)

    def test_an_index_without_a_stored_tensor(self, copy: Path) -> None:
        edit_index(copy, lambda table: table.pop("lm_head.weight"))
        with pytest.raises(ConfigError, match=r"lm_head\.weight, which .* places nowhere"):
            Checkpoint.open(copy)

    def test_an_index_of_a_tensor_that_is_not_stored(self, copy: Path) -> None:
        edit_index(copy, lambda table: table.update({"ghost": "model-00001-of-00004.safetensors"}))
        with pytest.raises(ConfigError, match=r"places ghost in model-00001.*does not hold it"):
            Checkpoint.open(copy)

    def test_a_missing_scale_is_named(self, copy: Path) -> None:
        replace_tensors(copy, {"model.layers.0.mlp.up_proj.weight_scale_inv": None})
        with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.up_proj\.weight as F8_E4M3 without a scale"):
            Checkpoint.open(copy)

    def test_an_orphan_scale_is_named(self, copy: Path) -> None:
        replace_tensors(copy, {"model.layers.0.mlp.up_proj.weight": None})
        with pytest.raises(ConfigError, match=r"holds the scale model\.layers\.0\.mlp\.up_proj\.weight_scale_inv"):
            Checkpoint.open(copy)

    @pytest.mark.parametrize("dtype", ["U8", "I8", "F8_E5M2", "F8_E4M3"])
    def test_one_byte_garbage_is_named(self, copy: Path, dtype: str) -> None:
        garbage = np.ones((1024, 256), DTYPES[dtype])
        replace_tensors(copy, {"lm_head.weight": (dtype, garbage)})
        with pytest.raises(ConfigError, match=f"stores lm_head.weight as {dtype} without a scale, which is no layout"):
            Checkpoint.open(copy)

    def test_a_scale_of_the_wrong_shape_is_named(self, copy: Path) -> None:
        name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
        replace_tensors(copy, {name: ("F32", np.ones((1, 2), np.float32))})
        with pytest.raises(ConfigError, match=r"kv_a_proj_with_mqa.*F32\[1, 2\].*\[192, 256\] need F32\[2, 2\]"):
            Checkpoint.open(copy)

    def test_a_lost_mtp_layer_is_named(self, tmp_path: Path) -> None:
        folder = random_checkpoint.write(tmp_path, {"num_nextn_predict_layers": 0})
        config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match=r"lacks model\.layers\.5\..*1 MTP layers"):
            Checkpoint.open(folder)

    def test_a_shape_that_config_json_does_not_mean(self, copy: Path) -> None:
        config = json.loads((copy / "config.json").read_text()) | {"vocab_size": 2048}
        (copy / "config.json").write_text(json.dumps(config))
        with pytest.raises(
            ConfigError, match=r"embed_tokens\.weight as \[1024, 256\]; config\.json means \[2048, 256\]"
        ):
            Checkpoint.open(copy)

    def test_a_folder_without_weights(self, copy: Path) -> None:
        (copy / INDEX).unlink()
        with pytest.raises(ConfigError, match=r"has neither model\.safetensors\.index\.json nor model\.safetensors"):
            Checkpoint.open(copy)

    def test_a_single_file_needs_no_index(self, source: Path, tmp_path: Path) -> None:
        tensors = Checkpoint.open(source).tensors
        shutil.copy(source / "config.json", tmp_path)
        with ShardWriter(tmp_path / "model.safetensors", [(i.name, i.dtype, i.shape) for i in tensors.values()]) as out:
            for info in tensors.values():
                out.write(info.name, read_tensor(info))
        assert Checkpoint.open(tmp_path).entries.keys() == Checkpoint.open(source).entries.keys()


class TestDigest:
    def test_it_is_fast_on_a_small_checkpoint(self, source: Path) -> None:
        digest(source)
        start = time.process_time()
        digest(source)
        assert time.process_time() - start < 0.25

    def test_it_changes_with_content_and_names_only(self, copy: Path) -> None:
        before = digest(copy)
        (copy / "README.md").write_text("not part of it")
        (copy / "tokenizer.json").touch()
        assert digest(copy) == before
        for change in (
            lambda: (copy / "heldout.txt").write_text("x"),
            lambda: (copy / "tokenizer_config.json").rename(copy / "other.json"),
            lambda: (copy / "vocab.txt").write_text(""),
        ):
            change()
            assert digest(copy) != before
            before = digest(copy)

    def test_the_cache_saves_the_reading(self, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        cache, reads = tmp_path / "cache" / "digests.json", []
        real = digest_module.file_sha256
        monkeypatch.setattr(digest_module, "file_sha256", lambda file: reads.append(file.name) or real(file))
        before = digest(copy, cache)
        first = len(reads)
        assert first > 5 and digest(copy, cache) == before and len(reads) == first
        (copy / "heldout.txt").write_text("changed")
        assert digest(copy, cache) != before and reads[first:] == ["heldout.txt"]
        cache.write_text("{damaged")
        assert digest(copy, cache) == digest(copy)

    def test_the_cache_notices_other_bytes_of_the_same_size_and_time(self, copy: Path, tmp_path: Path) -> None:
        file, cache = copy / "heldout.txt", tmp_path / "digests.json"
        before, times = digest(copy, cache), file.stat()
        file.write_bytes(b"x" * times.st_size)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert digest(copy, cache) != before

    def test_a_cache_that_cannot_be_written_is_done_without(self, copy: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        assert digest(copy, tmp_path / "file" / "digests.json") == digest(copy)

    def test_companions_leave_out_what_conversion_replaces(self, source: Path) -> None:
        names = [file.name for file in companions(source)]
        assert names == ["generation_config.json", "heldout.txt", "tokenizer.json", "tokenizer_config.json"]


def test_neither_package_imports_torch() -> None:
    modules = ("checkpoint", "formats", "checkpoint.recipe", "layouts", "verify.weights", "stages")
    code = f"import sys, {', '.join('pipeline.' + name for name in modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_random_checkpoint_is_reproducible(source: Path, tmp_path: Path) -> None:
    assert digest(random_checkpoint.write(tmp_path)) == digest(source)
