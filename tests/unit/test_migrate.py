"""Files of LLM arguments on other version lines: old guides, vLLM, SGLang, forth and back."""

from __future__ import annotations

import json

import pytest
import yaml

from pipeline.cli import main
from pipeline.engines.trtllm.arguments import problems
from pipeline.engines.trtllm.dialects import dialect_of
from pipeline.engines.trtllm.llm_args import to_yaml
from pipeline.engines.trtllm.migrate import Migration, migrate
from pipeline.engines.trtllm.versions import known_lines, version_line
from tests._utils.trtllm import RECIPES

OLD = {
    "pytorch_backend_config": {
        "use_cuda_graph": True, "cuda_graph_padding_enabled": True, "cuda_graph_batch_sizes": [1, 2, 4],
        "enable_overlap_scheduler": True, "kv_cache_dtype": "fp8", "moe_backend": "WIDEEP", "moe_max_num_tokens": 4096,
    },
    "enable_attention_dp": True, "tensor_parallel_size": 8, "ep_size": 8,
    "speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layers": 3},
}  # fmt: skip
VLLM = {
    "model": "deepseek-ai/DeepSeek-R1", "max_model_len": 8192, "data_parallel_size": 8, "enable_expert_parallel": True,
    "gpu_memory_utilization": 0.9, "kv_cache_dtype": "fp8_e4m3", "enable_prefix_caching": False, "max_num_seqs": 256,
    "speculative_config": {"method": "deepseek_mtp", "num_speculative_tokens": 2}, "swap_space": 4,
    "reasoning_parser": "deepseek_r1",
}  # fmt: skip
NEW = {
    "sleep_config": {}, "model_kwargs": {"num_hidden_layers": 4}, "cache_transceiver_config": {"backend": "NIXL"},
    "moe_config": {"backend": "AUTO", "load_balancer": {"num_slots": 288}},
    "speculative_config": {"decoding_type": "MTP", "max_draft_len": 3},
}  # fmt: skip
SGLANG = {
    "model_path": "x", "tp_size": 8, "enable_dp_attention": True, "dp_size": 8, "mem_fraction_static": 0.85,
    "moe_runner_backend": "flashinfer_trtllm", "cuda_graph_max_bs": 256, "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3, "disable_radix_cache": True, "context_length": 10000, "disable_overlap_schedule": True,
}  # fmt: skip


def to(args: dict, line: str) -> Migration:
    done = migrate(args, version_line(line))
    assert problems(done.args, version_line(line)) == []
    return done


class TestOldGuides:
    def test_their_names_get_the_places_of_today(self):
        assert to(OLD, "1.2").args == {
            "cuda_graph_config": {"enable_padding": True, "batch_sizes": [1, 2, 4]}, "disable_overlap_scheduler": False,
            "kv_cache_config": {"dtype": "fp8"}, "moe_config": {"backend": "WIDEEP", "max_num_tokens": 4096},
            "enable_attention_dp": True, "tensor_parallel_size": 8, "moe_expert_parallel_size": 8,
            "speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layers": 3},
        }  # fmt: skip

    def test_later_lines_replace_what_is_gone(self):
        done = to(OLD, "1.3")
        assert done.args["moe_config"]["backend"] == "AUTO" and done.args["speculative_config"]["max_draft_len"] == 3
        assert "WIDEEP is now moe_config.backend: AUTO" in " ".join(map(str, done.changes)) and done.lost == []

    @pytest.mark.parametrize("graphs", [False, True])
    def test_graphs_that_are_off_stay_off(self, graphs):
        done = to({"cuda_graph_padding_enabled": True, "use_cuda_graph": graphs}, "1.2")
        assert done.args["cuda_graph_config"] == ({"enable_padding": True} if graphs else None)
        assert len(done.lost) == (0 if graphs else 1)

    def test_the_tensorrt_backend_leaves_its_limits(self):
        build = {"max_batch_size": 4, "plugin_config": {"a": 1}}
        args = {"build_config": build, "calib_config": {"device": "cuda"}, "fast_build": True}
        done = to(args, "1.2")
        assert done.args == {"max_batch_size": 4}
        assert [(item.path, item.kind) for item in done.lost] == [
            ("build_config.plugin_config.a", "removed"), ("calib_config.device", "removed"), ("fast_build", "removed"),
        ]  # fmt: skip


class TestForeign:
    def test_vllm(self):
        done = to(VLLM, "1.2")
        assert done.args == {
            "model": "deepseek-ai/DeepSeek-R1", "max_seq_len": 8192, "enable_attention_dp": True, "max_batch_size": 256,
            "moe_expert_parallel_size": 8, "reasoning_parser": "deepseek-r1", "tensor_parallel_size": 8,
            "kv_cache_config": {"free_gpu_memory_fraction": 0.9, "dtype": "fp8", "enable_block_reuse": False},
            "speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layers": 2},
        }  # fmt: skip
        assert (done.source, [item.path for item in done.lost]) == ("vLLM", ["swap_space"])
        assert any("holds the weights too" in change.note for change in done.changes)

    def test_sglang(self):
        done = to(SGLANG, "1.3")
        assert done.args == {
            "model": "x", "tensor_parallel_size": 8, "enable_attention_dp": True, "max_seq_len": 10000,
            "kv_cache_config": {"free_gpu_memory_fraction": 0.85, "enable_block_reuse": False},
            "moe_config": {"backend": "TRTLLM"}, "cuda_graph_config": {"max_batch_size": 256},
            "speculative_config": {"decoding_type": "MTP", "max_draft_len": 3}, "disable_overlap_scheduler": True,
        }  # fmt: skip
        assert (done.source, [item.path for item in done.lost]) == ("SGLang", ["dp_size"])

    @pytest.mark.parametrize("args", [VLLM, SGLANG, {"max_batch_size": 4, "max_seq_len": 9, "tp_size": 8}])
    def test_files_for_command_lines_have_hyphens_and_json(self, args):
        words = {key.replace("_", "-"): json.dumps(value) if isinstance(value, dict) else value for key, value in args.items()}
        spelled, done = to(args, "1.2"), to(words, "1.2")
        assert (done.source, done.args) == (spelled.source, spelled.args)
        assert {item.path.split(".")[0] for item in (*done.changes, *done.lost)} <= words.keys()
        changed = {item.path.split(".")[0].replace("-", "_") for item in done.changes}
        assert changed == {key for key in args if key not in {item.path for item in spelled.lost} and (
            "_" in key or key in {item.path.split(".")[0] for item in spelled.changes})}  # fmt: skip
        assert to({"tp-size": 1, "no-such": 1}, "1.2").lost[0].message.startswith("no-such is not")

    def test_a_value_without_equivalent_is_left_out(self):
        done = to({**SGLANG, "moe_runner_backend": "unheard_of"}, "1.2")
        assert "moe_config" not in done.args and "unheard_of has no equivalent" in str(done.lost[-1] if done.lost else "")

    def test_nothing_is_left_that_the_line_refuses(self):
        done = to(
            {"cp_config": {"model": "x", "cp_type": "HELIX"}, "speculative_config": {}, "moe_config": {"max_num_tokens": "x"}},
            "1.3",
        )
        assert done.args == {"cp_config": {"cp_type": "HELIX"}, "moe_config": {}}
        assert {item.path for item in done.lost} == {
            "cp_config.model",
            "moe_config.max_num_tokens",
            "speculative_config.decoding_type",
        }

    def test_whose_names_they_are(self):
        assert (dialect_of(VLLM), dialect_of(SGLANG), dialect_of(OLD)) == ("vllm", "sglang", None)
        assert all(dialect_of(recipe) is None for recipe in RECIPES.values())
        assert migrate({"block_size": 64}, version_line("1.2"), "vllm").args == {"kv_cache_config": {"tokens_per_block": 64}}


class TestLines:
    def test_newer_to_older(self):
        done = to(NEW, "1.0")
        assert done.args == {
            "moe_config": {"load_balancer": {"num_slots": 288}}, "cache_transceiver_config": {"backend": "nixl"},
            "speculative_config": {"decoding_type": "MTP", "num_nextn_predict_layers": 3},
        }  # fmt: skip
        assert {item.path for item in done.lost} == {"sleep_config", "model_kwargs", "moe_config.backend"}

    def test_other_drafters_keep_their_length(self):
        args = {"speculative_config": {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model_dir": "draft"}}
        assert to(args, "1.2").args["speculative_config"]["max_draft_len"] == 3
        assert to(args, "1.3").args["speculative_config"]["speculative_model"] == "draft"

    @pytest.mark.parametrize("name", RECIPES)
    def test_recipes_go_to_every_line_and_back(self, name):
        """What no line lacks comes back as it was."""
        clean = to(RECIPES[name], "1.3").args
        for line in known_lines():
            there = to(clean, line)
            assert to(there.args, line).args == there.args, "a file on its own line stays as it is"
            assert yaml.safe_load(to_yaml(there.args)) == there.args
            if not there.lost:
                assert to(there.args, "1.3").args == clean
        assert all(item.path.startswith("attention_dp_config") for item in to(clean, "1.0").lost)


class TestCommand:
    def test_what_it_prints_is_the_file(self, tmp_path, capsys):
        file = tmp_path / "old.yaml"
        file.write_text(yaml.safe_dump(OLD))
        assert main(["migrate", str(file), "version=1.3"]) == 0
        text = capsys.readouterr().out
        assert yaml.safe_load(text)["speculative_config"] == {"decoding_type": "MTP", "max_draft_len": 3}
        assert text.startswith("# old.yaml: migrated from TensorRT-LLM before 1.0 to TensorRT-LLM 1.3\n# changed: ")

    def test_it_writes_whole_files_and_says_what_was_left_out(self, tmp_path, capsys):
        file, out = tmp_path / "vllm.json", tmp_path / "new.yaml"
        file.write_text(json.dumps(VLLM))
        assert main(["migrate", str(file), f"out={out}"]) == 4
        assert "left out: swap_space has no equivalent" in capsys.readouterr().out
        assert yaml.safe_load(out.read_text())["max_seq_len"] == 8192 and "# left out: swap_space" in out.read_text()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["new.yaml", "vllm.json"]

    def test_each_side_of_a_disaggregated_file(self, tmp_path, capsys):
        """Its own keys, and those of each section, are no arguments and stay."""
        file = tmp_path / "servers.yaml"
        sides = {
            "context_servers": {"num_instances": 2, "urls": ["a:1", "b:1"], "moe_backend": "TRTLLM", "nonsense": 1},
            "generation_servers": {"num_instances": 1, "router": {"type": "round_robin"}, "tp_size": 8},
        }
        file.write_text(yaml.safe_dump({"hostname": "h", "port": 8000, "backend": "pytorch", "kv_cache_dtype": "fp8", **sides}))
        assert main(["migrate", str(file)]) == 4
        text = capsys.readouterr().out
        assert yaml.safe_load(text) == {
            "hostname": "h", "port": 8000, "backend": "pytorch", "kv_cache_config": {"dtype": "fp8"},
            "context_servers": {"num_instances": 2, "urls": ["a:1", "b:1"], "moe_config": {"backend": "TRTLLM"}},
            "generation_servers": {"num_instances": 1, "router": {"type": "round_robin"}, "tensor_parallel_size": 8},
        }  # fmt: skip
        assert "# left out: context_servers: nonsense is not an argument of TensorRT-LLM 1.2" in text
        assert "from TensorRT-LLM before 1.0 and a command line of trtllm-serve to" in text

    def test_a_model_yaml_keeps_what_is_triton_s_and_a_second_value_is_told(self, tmp_path, capsys):
        file = tmp_path / "model.yaml"
        file.write_text("triton_config: {decoupled: true}\nkv_cache_dtype: fp8\nmax_batch_size: 4\nmax_batch_size: 8\n")
        assert main(["migrate", str(file)]) == 4
        text = capsys.readouterr().out
        wanted = {"triton_config": {"decoupled": True}, "kv_cache_config": {"dtype": "fp8"}, "max_batch_size": 8}
        assert yaml.safe_load(text) == wanted and "max_batch_size is given twice, and the last one counts" in text

    def test_json(self, tmp_path, capsys):
        file = tmp_path / "args.yaml"
        file.write_text("tp_size: 8\nnonsense: 1\n")
        assert main(["migrate", str(file), "--json"]) == 4
        (line,) = capsys.readouterr().out.splitlines()
        told = json.loads(line)
        assert told["arguments"] == {"tensor_parallel_size": 8} and told["to"] == "1.2"
        assert [item["to"] for item in told["changed"]] == ["tensor_parallel_size"]
        assert [item["kind"] for item in told["left_out"]] == ["unknown"]

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ([], "takes one file"),
            (["FILE", "version=9.9"], "choose one of 1.0, 1.1, 1.2, 1.3, 1.4"),
            (["FILE", "from=nobody"], r"sglang (SGLang), vllm (vLLM)"),
            (["FILE", "colour=red"], "does not know colour"),
            (["FILE", "out=/no/such/folder/x"], "no folder that exists"),
            (["/no/such/file"], "No such file"),
        ],
    )
    def test_mistakes_are_sentences(self, words, said, tmp_path, capsys):
        file = tmp_path / "a.yaml"
        file.write_text("tp_size: 8\n")
        assert main(["migrate", *(str(file) if word == "FILE" else word for word in words)]) == 2
        assert said in capsys.readouterr().err
