"""Version lines of TensorRT-LLM as data, and what is said of a file of LLM arguments from them."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest
import yaml

from pipeline.engines.trtllm.arguments import Problem, notes, problems
from pipeline.engines.trtllm.dialects import dialect, dialects
from pipeline.engines.trtllm.fields import Field, field_of
from pipeline.engines.trtllm.migrate import migrate
from pipeline.engines.trtllm.versions import known_lines, release_order, version_line
from tests._utils.trtllm import RECIPES

PUBLISHED = yaml.safe_load((files("tests") / "data" / "published_arguments.yaml").read_text())
LINES = [version_line(name) for name in known_lines()]


def kinds(args: dict, line: str) -> dict[str, str]:
    return {problem.path: problem.kind for problem in problems(args, version_line(line))}


def only(args: dict, line: str) -> Problem:
    (problem,) = problems(args, version_line(line))
    return problem


def lines_of(recipe: dict) -> list[str]:
    """The lines that a recipe is written for, by the name of its draft length."""
    draft = recipe.get("speculative_config", {})
    return ["1.3", "1.4"] if "max_draft_len" in draft else ["1.1", "1.2"] if draft else ["1.2", "1.3", "1.4"]


class TestData:
    def test_each_line_names_all_its_arguments(self):
        counts = [(len(line.fields), len(line.known)) for line in LINES]
        assert counts == sorted(counts) and counts[0][0] >= 60 and counts[-1][1] >= 400

    @pytest.mark.parametrize("line", LINES, ids=lambda line: line.line)
    def test_every_default_is_a_value_that_its_field_takes(self, line):
        odd = {path: item.default for path, item in line.known.items() if item.default is not None and item.refusal(item.default)}
        assert odd == {}
        assert {item.status for item in line.known.values()} <= {"stable", "beta", "prototype", "deprecated"}

    @pytest.mark.parametrize("line", LINES[1:], ids=lambda line: line.line)
    def test_what_left_a_line_is_explained(self, line):
        before = LINES[LINES.index(line) - 1]
        left = {path for path in before.known if path not in line.known}
        explained = {*line.moved, *line.gone, *line.aliases, *before.aliases}
        assert {path for path in left if not any(path == one or path.startswith(f"{one}.") for one in explained)} == set()

    @pytest.mark.parametrize("line", LINES, ids=lambda line: line.line)
    def test_tables_of_changes_name_arguments(self, line):
        assert set(line.moved.values()) | set(line.aliases.values()) <= line.known.keys()
        assert set(line.values) | set(line.replaced) <= line.known.keys()
        assert {path.partition("@")[0] for path in line.ignored} <= line.known.keys()
        for path, renamed in (*line.values.items(), *line.replaced.items()):
            assert set(renamed.values()) <= set(line.known[path].words)

    def test_every_dialect_leads_to_arguments_of_the_newest_line(self):
        newest = LINES[-1]
        for name in dialects():
            targets = {spelling.to for spelling in dialect(name).names.values() if spelling.to}
            assert targets <= newest.known.keys(), name
            assert all(spelling.to or spelling.note for spelling in dialect(name).names.values())

    def test_releases_sort_as_they_were_published(self):
        published = ["1.0.0rc4", "1.0.0", "1.2.0rc6.post3", "1.2.0", "1.2.1", "1.3.0rc9", "1.3.0rc20", "1.3.0rc22", "1.4.0rc0"]
        assert sorted(published, key=release_order) == published

    def test_the_backend_of_tensorrt_is_known_by_release(self):
        assert [line.tensorrt_backend for line in LINES] == ["always", "always", "always", "1.3.0rc20", "never"]


class TestRows:
    @pytest.mark.parametrize(
        ("row", "good", "bad"),
        [
            ("int>=1 | null = 2048", [1, 2048, None, "8", 8.0], [0, -1, 1.5, "many", True, []]),
            ("float>0<=1 | null", [0.5, 1, None], [0, 1.01, "all"]),
            ("bool = false", [True, False, "yes", 0], ["maybe", 2, None]),
            ("auto | fp8 = auto", ["auto", "fp8"], ["FP8", None, 8]),
            ("bool | auto = auto", [True, "auto"], ["automatic"]),
            ("list(cutlass, marlin)", [["cutlass"]], [[], ["cublas"], "cutlass"]),
            ("dict | str | null", [{}, "path", None], [3]),
            ("'null' | zmq | null", ["null", "zmq", None], ["tcp"]),
        ],
    )
    def test_values_are_judged_as_the_engine_does(self, row, good, bad):
        item = field_of(row, {})
        assert [value for value in good if item.refusal(value)] == []
        assert [value for value in bad if not item.refusal(value)] == []

    def test_a_row_says_default_and_status(self):
        item = field_of("int>=1 | null = 2048 !beta", {})
        assert (item.default, item.status, item.wanted()) == (2048, "beta", "a whole number or null (at least 1)")
        with pytest.raises(ValueError, match="is no type"):
            field_of("int | what is this", {})

    def test_a_section_is_no_word(self):
        assert field_of("MoeConfig | null", {"MoeConfig": {}}) == Field(("null",), section="MoeConfig")


class TestProblems:
    @pytest.mark.parametrize("name", RECIPES)
    def test_published_recipes_have_none_on_their_line(self, name):
        found = {line: [str(item) for item in problems(RECIPES[name], version_line(line))] for line in lines_of(RECIPES[name])}
        if name == "curated__deepseek-r1-throughput":  # it has a key that no line takes
            assert all(len(said) == 1 and "kv_cache_config.free_gpu_memory_fraction" in said[0] for said in found.values())
        else:
            assert set(map(tuple, found.values())) == {()}

    @pytest.mark.parametrize("name", PUBLISHED)
    def test_what_starts_servers_in_public_is_taken_and_comes_back(self, name):
        row = PUBLISHED[name]
        for line in map(version_line, row["lines"]):
            assert (problems(row["args"], line), migrate(row["args"], line).lost) == ([], []), row["from"]
            assert all("backend" in note.path or "num_nextn" in note.path for note in notes(row["args"], line))

    def test_each_kind(self):
        args = {
            "max_num_token": 8192, "max_batch_size": "many", "moe_config": {"backend": "NOPE"}, "moe_backend": "TRTLLM",
            "calib_config": {}, "enable_sleep": True,
        }  # fmt: skip
        assert kinds(args, "1.3") == {
            "max_num_token": "unknown", "max_batch_size": "type", "moe_config.backend": "value", "moe_backend": "renamed",
            "calib_config": "removed", "enable_sleep": "removed",
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("args", "line", "said"),
        [
            ({"max_num_token": 1}, "1.2", "did you mean max_num_tokens?"),
            ({"moe_config": {"max_tokens": 1}}, "1.2", r"\(moe_config\): did you mean max_num_tokens"),
            ({"tokens_per_block": 64}, "1.2", "did you mean kv_cache_config.tokens_per_block"),
            ({"sleep_config": {}}, "1.2", "not an argument of 1.2, but of 1.3"),
            ({"connector_config": {}}, "1.1", "called kv_connector_config since 1.1"),
            ({"kv_connector_config": {}}, "1.0", "called connector_config on 1.0"),
            ({"moe_config": {"backend": "WIDEEP"}}, "1.3", "did you mean AUTO"),
            ({"moe_config": {"backend": "WIDEEP"}}, "1.4", "did you mean AUTO"),
            ({"cache_transceiver_config": {"backend": "UCX"}}, "1.0", "did you mean ucx"),
            ({"cache_transceiver_config": {"backend": "ucx"}}, "1.2", "did you mean UCX"),
            ({"pytorch_backend_config": {"use_cuda_graph": True}}, "1.2", "stand at the top since 1.0"),
            ({"use_cuda_graph": True}, "1.2", "TensorRT-LLM before 1.0 spells cuda_graph_config"),
            ({"cuda_graph_config": {"padding_enabled": False}}, "1.2", "before 1.0 spells cuda_graph_config.enable_padding"),
            ({"moe_config": {"backend": "WIFEEP"}}, "1.2", "did you mean WIDEEP"),  # it stood in a guide
            ({"tp_size": 8}, "1.2", "command line of trtllm-serve spells tensor_parallel_size"),
            ({"gpu_memory_utilization": 0.9}, "1.2", "vLLM spells kv_cache_config.free_gpu_memory_fraction"),
            ({"quant_config": {"quant_algo": "FP8"}}, "1.2", "hf_quant_config.json"),
            ({"backend": "tensorrt"}, "1.2", "TrtLlmArgs"),
            ({"backend": "tensorrt"}, "1.3", "gone after 1.3.0rc20"),
            ({"backend": "tensorrt"}, "1.4", "is gone: leave backend out"),
            ({"speculative_config": {"max_draft_len": 3}}, "1.3", "does not say its decoding_type: one of MTP"),
            ({"moe_config": "CUTLASS"}, "1.2", "moe_config=CUTLASS must be a table"),
            ({"kv_cache_config": None}, "1.2", "kv_cache_config=null must be a table"),
            ({"cp_config": {"multimodal_config": {}}}, "1.3", r"\(cp_config\): did you mean multimodal_config at the top"),
            ({"nobody_knows": 1}, "1.4", "as far as it is known"),
        ],
    )
    def test_an_unknown_name_is_explained_as_far_as_can_be(self, args, line, said):
        assert re.search(said, str(only(args, line)))

    def test_a_draft_length_without_effect_is_a_problem_only_alone(self):
        """1.2 takes max_draft_len for MTP and drafts one token all the same (MTPDecodingConfig.set_max_total_draft_tokens)."""
        alone = {"speculative_config": {"decoding_type": "MTP", "max_draft_len": 3}}
        assert "num_nextn_predict_layers alone counts" in only(alone, "1.2").message
        both = {"speculative_config": {"decoding_type": "MTP", "max_draft_len": 3, "num_nextn_predict_layers": 3}}
        assert problems(both, version_line("1.2")) == [] and len(notes(both, version_line("1.2"))) == 1
        other = {"speculative_config": {"decoding_type": "Eagle", "max_draft_len": 3, "speculative_model_dir": "x"}}
        assert problems(other, version_line("1.2")) == []

    def test_keys_of_one_kind_are_none_of_another(self):
        args = {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 3, "relaxed_topk": 2}}
        assert kinds(args, "1.3") == {"speculative_config.relaxed_topk": "unknown"}

    def test_graphs_are_of_decode_steps_unless_they_say_otherwise(self):
        assert problems({"cuda_graph_config": {"max_batch_size": 8}}, version_line("1.3")) == []
        encode = {"cuda_graph_config": {"mode": "encode", "max_batch_size": 8, "num_tokens": [1]}}
        assert problems(encode, version_line("1.3")) == []
        decode = {"cuda_graph_config": {"max_batch_size": 8, "num_tokens": [1]}}
        assert kinds(decode, "1.3") == {"cuda_graph_config.num_tokens": "unknown"}


class TestNotes:
    def test_old_names_that_are_still_taken(self):
        args = {"speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layers": 1}, "backend": "pytorch"}
        assert problems(args, version_line("1.3")) == []
        said = [str(item) for item in notes(args, version_line("1.3"))]
        assert "called speculative_config.max_draft_len since 1.3" in said[0] and "backend is deprecated on 1.3" in said[1]

    def test_what_is_taken_without_effect(self):
        args = {"kv_cache_config": {"sink_token_length": 4}, "sampler_type": "TorchSampler"}
        assert [item.fix for item in notes(args, version_line("1.3"))] == [
            "the PyTorch backend has no attention sinks", "TorchSampler is the only sampler",
        ]  # fmt: skip
