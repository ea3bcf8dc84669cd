"""Native TensorRT engines as a user gets them: planned, refused in sentences, built in processes of their own, alike each time."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.checkpoint import Checkpoint
from pipeline.config.load import load
from pipeline.core.errors import ConfigError, MissingToolError, StageError
from pipeline.core.stage import StageContext
from pipeline.engines import tensorrt
from pipeline.engines.tensorrt import library, networks
from pipeline.engines.tensorrt.builder import describe
from pipeline.engines.tensorrt.plan_file import check_header, launches, read_header
from pipeline.engines.tensorrt.process import fixed_addresses, run_task, short_name
from pipeline.engines.tensorrt.worker import network
from pipeline.models.arch import Arch
from pipeline.planner.plan import Plan, make_plan
from tests._utils import random_checkpoint
from tests._utils.run_stage import Notes, convert, recipe

ROOT = Path(__file__).parents[2]
TINY_R1 = ROOT / "pipeline" / "data" / "tiny_r1"
ARCH = Arch.from_dir(TINY_R1)
HF = json.loads((TINY_R1 / "config.json").read_text())
RTX = ("+hw=rtx_pro_6000", "engine=tensorrt")
SMALL = (
    "engine.tensorrt.max_seq_len=64", "engine.tensorrt.prefill_chunk=32", "engine.tensorrt.max_batch_size=2",
    "engine.tensorrt.check_tokens=12",
)  # fmt: skip
needs_rtx = pytest.mark.skipif(
    library.installed_version("tensorrt_rtx") is None,
    reason="engines are built with TensorRT-RTX: pip install 'r1-pipeline[rtx]'",
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One dense and one MoE layer, and the MTP layer, of tiny_r1's widths."""
    folder = random_checkpoint.write(tmp_path_factory.mktemp("two_layers"), {"num_hidden_layers": 2})
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def asked(out: Path, checkpoint: Path, *words: str, earlier: tuple[Path, ...] = ()) -> StageContext:
    config, inputs = load([*RTX, *SMALL, *words]), {"convert": checkpoint}
    return StageContext(config=config, inputs=inputs, checkpoint=checkpoint, out=out, progress=Notes(), earlier=earlier)


def build(out: Path, checkpoint: Path, *words: str, earlier: tuple[Path, ...] = ()) -> tuple[dict[str, Any], list[str]]:
    """engine.json and the notes of a build."""
    from pipeline.engines.tensorrt.build import build as run

    out.mkdir(parents=True)
    ctx = asked(out, checkpoint, *words, earlier=earlier)
    run(ctx)
    assert ctx.progress.done == ctx.progress.total  # every step of every engine was told
    return json.loads((out / "engine.json").read_text()), ctx.progress.notes


# Planning and refusals


def test_the_library_follows_from_the_gpu() -> None:
    assert {sm: library.library_for(sm) for sm in (75, 89, 90, 100, 103, 120)} == {
        75: "tensorrt_rtx", 89: "tensorrt_rtx", 90: "tensorrt", 100: "tensorrt", 103: "tensorrt", 120: "tensorrt_rtx",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("+hw=cpu", "engine=tensorrt"), "engine=tensorrt builds for GPUs, and hw=cpu has none"),
        (("+hw=h200", "engine=tensorrt", "quant=nvfp4"), "nvfp4 weights need FP4 products, which SM90 lacks"),
        ((*RTX, "engine.tensorrt.targets=[86,120]"), "fp8_block weights need the FP8 type, which SM86 lacks"),
        ((*RTX, "engine.tensorrt.targets=[75]", "quant=bf16"), "SM75 has neither BF16 nor float32 products"),
        ((*RTX, "engine.tensorrt.targets=[90,120]"), "tensorrt_rtx does not build for SM90|tensorrt builds for the one GPU"),
        ((*RTX, "engine.tensorrt.targets=[37]"), "No TensorRT library builds for SM37"),
        ((*RTX, "engine.tensorrt.library=tensorrt_rtx", "engine.tensorrt.targets=[100]"), "tensorrt_rtx does not build for SM100"),
        ((*RTX, "engine.tensorrt.moe=layer"), "moe=layer builds with tensorrt for SM100, SM103 and SM110, not with tensorrt_rtx"),
        (("+hw=b200", "engine=tensorrt", "quant=nvfp4", "engine.tensorrt.moe=layer"), "moe=layer gets experts in BF16 or FP8 here"),
        ((*RTX, "engine.tensorrt.weights=refit"), "weights=refit needs tensorrt"),
        ((*RTX, "parallel.tp=3"), "16 experts do not spread over parallel.tp=3"),
        ((*RTX, "parallel.tp=8", "parallel.attention_dp=false"), "4 heads do not spread over parallel.tp=8"),
        ((*RTX, "engine.tensorrt.max_seq_len=4096"), "exceeds the model's 2048 positions"),
        ((*RTX, "engine.tensorrt.expanded_from=600"), "expanded_from=600 exceeds prefill_chunk=512"),
    ],
)
def test_plan_refuses_what_cannot_be_built(words, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make_plan(load(words), HF)


def planned(*words: str) -> tuple[Plan, dict[str, int]]:
    plan = make_plan(load([*RTX, "quant=bf16", "engine.tensorrt.mtp=false", *words]), HF)
    return plan, {row["component"]: row["bytes"] for row in plan.report["memory"]["rows"]}


def test_plan_counts_weights_of_both_forms_and_the_memory_of_the_build() -> None:
    plan, rows = planned()
    assert rows["routed_experts"] == 2 * 2 * 4 * 16 * 3 * 256 * 128  # forms, bytes, layers, experts, matrices
    assert rows["kv_cache"] == 8 * 1024 * 5 * 192 * 2
    assert any(re.search(r"Building takes 0.\d GB of memory for rank0_absorbed", text) for text in plan.report["warnings"])
    _, shared = planned("engine.tensorrt.weights=inputs")
    assert shared["routed_experts"] * 2 == rows["routed_experts"]
    four, spread = planned("parallel.tp=4")
    assert spread["routed_experts"] * 4 == rows["routed_experts"]
    assert spread["kv_cache"] * 8 == rows["kv_cache"] * 9  # a row more
    assert not any("served on one host" in text for text in four.report["warnings"])
    assert any("16 are planned, and a node" in text for text in planned("parallel.tp=16")[0].report["warnings"])
    assert (four.deploy["attention_dp"], four.deploy["ep"], four.report["layout"]) == (True, 4, "ADP4+EP4")


def test_a_data_centre_gpu_needs_tensorrt_and_itself(monkeypatch) -> None:
    config = load(["+hw=b200", "engine=tensorrt"])
    if library.installed_version("tensorrt") is None:
        with pytest.raises(MissingToolError, match="SM100 is built by tensorrt, which is not installed here: pip install"):
            tensorrt.requires(config)
    monkeypatch.setattr(tensorrt, "installed_version", lambda name: "11.4.0.106")
    monkeypatch.setattr(tensorrt, "compute_capabilities", lambda: ((9, 0),))
    with pytest.raises(MissingToolError, match="SM100 is wanted and SM90 is here"):
        tensorrt.requires(config)
    assert tensorrt.determinism(config) == "numeric"


@pytest.mark.parametrize(
    ("hw", "quant", "moe"), [("b200", "bf16", "layer"), ("b200", "nvfp4", "dense"), ("rtx_pro_6000", "bf16", "dense")]
)
def test_tensorrt_s_own_moe_layer_is_taken_where_it_builds_and_would_not_widen_the_experts(hw, quant, moe) -> None:
    config = load([f"+hw={hw}", "engine=tensorrt", f"quant={quant}"])
    assert {spec.moe for spec in networks.networks(config, ARCH)} == {moe}


def test_networks_are_named_after_rank_form_and_layers() -> None:
    config = load([*RTX, "parallel.tp=2", "engine.tensorrt.layers_per_engine=3"])
    names = [networks.name_of(spec) for spec in networks.networks(config, ARCH)]
    assert names[:3] == ["rank0_absorbed_layers0-2", "rank0_absorbed_layers3-4", "rank0_absorbed_mtp"]
    assert len(names) == len(set(names)) == 2 * 2 * 3


# Building


def elements_without_experts(arch: Arch) -> int:
    """In FP8 blocks, on every rank: attention but kv_b_proj, the dense layer's MLP, the shared expert."""
    attention = arch.hidden_size * (arch.q_lora_rank + arch.latent_dim) + 4 * (arch.qk_head_dim * arch.q_lora_rank + 128 * 256)
    return 2 * attention + 3 * 256 * (512 + 128)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    pytest.importorskip("torch", reason="the networks are compared with the reference, which is in torch")
    out = tmp_path_factory.mktemp("tensorrt") / "engine"
    build(out, checkpoint)
    return out


@needs_rtx
def test_a_build_ends_with_engines_and_the_agreement_table(built) -> None:
    info = json.loads((built / "engine.json").read_text())
    assert sorted(info["engines"]) == ["rank0_absorbed", "rank0_absorbed_mtp", "rank0_expanded", "rank0_expanded_mtp"]
    for engine in info["engines"].values():
        header = read_header(built / engine["file"])
        assert (header.targets, header.size, header.version) == ((120,), engine["bytes"], info["version"])
    assert info["engines"]["rank0_absorbed"]["inputs"]["cache.0"]["range"] == [[1, 1, 64, 192], [1, 1, 64, 192], [2, 1, 64, 192]]
    assert info["computed_as"]["fp8_block"].startswith("emulated")
    rows = {(row["what"].split(",")[0], row["activations"]): row for row in info["agreement"]}
    assert len(rows) == 6
    assert all(row["mean_kl"] < 1e-9 and row["top1"] == 1 for (_, kind), row in rows.items() if kind == "float32")
    assert all(row["mean_kl"] < 0.05 for row in rows.values())
    assert (built / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (built / "tokenizer.json").is_file() and not list(built.glob(".build-*"))


@needs_rtx
def test_inspect_shows_engines_their_kernels_and_the_agreement_and_draws_the_network(built, tmp_path) -> None:
    words = [str(built), "network=rank0_expanded", "--draw", "network.svg"]
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "inspect", *words], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 of them fused attention" in done.stdout  # of rank0_expanded: one a layer
    assert re.search(r"^decode, absorbed form, token by token  float32 +12 +\d\.\de-\d\d  100\.0%", done.stdout, re.M)
    assert re.search(r"^  _gemm_mha_v2 .*layers\.1\.attn: .*attention_v2_\d+", done.stdout, re.M)
    assert re.search(r"^  gemm +layers\.0\.attn: matrix_multiply_\d+", done.stdout, re.M)
    assert re.search(r"^network\.svg: rank0_expanded, \d+ layers in \d+ boxes", done.stdout, re.M)
    assert ">cache update</text>" in (tmp_path / "network.svg").read_text()
    text = (built / "engines" / "rank0_expanded.layers.txt").read_text()
    assert re.search(r"^layers\.1\.attn\.attention_v2_\d+_AttentionOutput  ATTENTION_OUTPUT  BF16\[-1, 4, -1, 192\]", text, re.M)


@needs_rtx
def test_the_same_build_gives_the_same_engine_up_to_the_order_of_some_tables(built, checkpoint, tmp_path) -> None:
    """Its threads race for addresses, by which TensorRT orders them; on an idle machine every byte is the same."""
    if not fixed_addresses(probe=True):
        pytest.skip("this system does not let a process fix its addresses")
    from pipeline.engines.tensorrt.build import _Work

    (tmp_path / "checkpoint").symlink_to(checkpoint)
    with short_name(tmp_path) as scratch:  # as a build has it: names shift addresses, too
        work = _Work.of(asked(tmp_path, checkpoint), scratch)
        name = "rank0_expanded"
        work.run("worker", name, task="build", specs={name: work.specs[name].plain()}, earlier={})
    for suffix, most in ((".engine", 1000), (".layers.txt", 0)):
        first, second = (folder / f"rank0_expanded{suffix}" for folder in (built / "engines", tmp_path))
        one, other = (np.frombuffer(file.read_bytes(), np.uint8) for file in (first, second))
        assert len(one) == len(other) and (one != other).sum() <= most
    assert launches(tmp_path / "rank0_expanded.engine") == launches(built / "engines" / "rank0_expanded.engine")


@needs_rtx
def test_weights_as_inputs_lie_beside_engines_that_do_not_depend_on_them(checkpoint, tmp_path) -> None:
    """NVFP4 experts and BF16 attention; another checkpoint of the same shape needs no other engine, another GPU does."""
    from safetensors import safe_open

    from pipeline.engines.tensorrt.build import _Work

    words = ("quant=nvfp4", "engine.tensorrt.weights=inputs", "engine.tensorrt.mtp=false", "engine.tensorrt.check_tokens=0")
    formats = {"attention": "bf16", "o_proj": "bf16"}
    first = convert(checkpoint, tmp_path / "amax", recipe("nvfp4", **formats))
    other = convert(checkpoint, tmp_path / "mse", recipe("nvfp4", **formats) | {"nvfp4_scale_search": "mse"})
    info, notes = build(tmp_path / "a", first, *words)
    stored = safe_open(tmp_path / "a" / "weights" / "rank0.safetensors", "numpy")
    inputs = {name for engine in info["engines"].values() for name in engine["inputs"]}
    assert {name for name in inputs if name.startswith(("model.", "lm_head."))} == set(stored.keys())
    assert stored.get_slice("model.layers.1.mlp.experts.gate_proj.weight").get_shape() == [16, 128, 128]
    assert any("not compared" in note for note in notes)
    again, notes = build(tmp_path / "b", other, *words, earlier=(tmp_path / "a",))
    assert sum("as built before" in note for note in notes) == 2
    for name, engine in again["engines"].items():
        assert engine["network"] == info["engines"][name]["network"]
        assert (tmp_path / "b" / engine["file"]).samefile(tmp_path / "a" / engine["file"])
    weights = [(tmp_path / part / "weights" / "rank0.safetensors").read_bytes() for part in "ab"]
    assert weights[0] != weights[1]
    for target, count in ((120, 2), (121, 0)):
        ctx = asked(tmp_path / "c", other, *words, f"engine.tensorrt.targets=[{target}]", earlier=(tmp_path / "a",))
        assert len(_Work.of(ctx, tmp_path)._earlier()) == count


def specs(checkpoint: Path, *words: str) -> dict[str, Any]:
    return {networks.name_of(spec): spec for spec in networks.networks(load([*RTX, *SMALL, *words]), Arch.from_dir(checkpoint))}


def task_of(checkpoint: Path, weights: str = "embedded", **tables: dict[str, Any]) -> dict[str, Any]:
    """What the process that builds gets."""
    return {
        "task": "build", "name": next(iter(tables)), "specs": tables, "checkpoint": str(checkpoint), "library": "tensorrt_rtx",
        "targets": [120], "weights": weights,
    }  # fmt: skip


def external(checkpoint: Path, spec: Any, scratch: Path) -> Any:
    return network(Checkpoint.open(checkpoint), "tensorrt_rtx", spec.plain(), scratch, external=True, values=False)[0]


@needs_rtx
def test_alike_layers_share_an_engine_when_weights_are_inputs(tmp_path) -> None:
    """Of three MoE layers two are neither first nor last: one engine serves both, with caches and weights of their own."""
    four = random_checkpoint.write(tmp_path / "checkpoint", {"num_hidden_layers": 4})
    parts = specs(four, "engine.tensorrt.mtp=false", "engine.tensorrt.layers_per_engine=1")
    told = {name: describe(external(four, spec, tmp_path)) for name, spec in parts.items() if spec.form == "absorbed"}
    alike = [facts["network"] for facts in told.values()]
    assert alike[1] == alike[2] and len(set(alike)) == 3
    bound = told["rank0_absorbed_layers2-2"]["inputs"]
    assert bound["cache.+0"]["binds"] == "cache.2"
    assert bound["model.layers.+0.mlp.experts.up_proj.weight"]["binds"] == "model.layers.2.mlp.experts.up_proj.weight"
    twins = {name: parts[name].plain() for name in ("rank0_absorbed_layers1-1", "rank0_absorbed_layers2-2")}
    made = run_task("worker", task_of(four, "inputs", **twins), tmp_path, Notes())["built"]
    assert {name: facts["engine"] for name, facts in made.items()} == dict.fromkeys(twins, "rank0_absorbed_layers1-1")
    assert [file.name for file in tmp_path.glob("*.engine")] == ["rank0_absorbed_layers1-1.engine"]


@needs_rtx
def test_a_rank_has_its_own_experts_alone(checkpoint, tmp_path) -> None:
    opened, ranks = Checkpoint.open(checkpoint), specs(checkpoint, "parallel.tp=2", "engine.tensorrt.mtp=false")
    assert sorted(ranks) == ["rank0_absorbed", "rank0_expanded", "rank1_absorbed", "rank1_expanded"]
    _, weights = network(opened, "tensorrt_rtx", ranks["rank1_absorbed"].plain(), tmp_path)
    assert weights.used["fp8_block"] - elements_without_experts(opened.arch) == 8 * 3 * 256 * 128


@needs_rtx
def test_what_tensorrt_refuses_is_a_sentence_with_our_layer(tmp_path) -> None:
    """A cache without rows, asked for by hand."""
    spec = networks.networks(load([*RTX, *SMALL]), ARCH)[0].plain() | {"max_seq_len": 0}
    with pytest.raises(StageError, match=r"wrong: TensorRT refused .*: [A-Z_]+: "):
        run_task("worker", task_of(TINY_R1, wrong=spec), tmp_path, Notes())


def test_a_crash_is_a_sentence(tmp_path, monkeypatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif '-m' in sys.orig_argv:\n    print('terminate called', file=sys.stderr, flush=True)\n    os.abort()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(StageError, match=r"rank0: its process was killed by SIGABRT: .*terminate called"):
        run_task("worker", {"task": "build", "name": "rank0"}, tmp_path, Notes())


@needs_rtx
def test_a_signal_cancels_the_build_and_leaves_no_process(tmp_path) -> None:
    """Of a hundred engines: however late the signal comes, it finds one in the making."""
    spec = networks.networks(load([*RTX, *SMALL]), ARCH)[0].plain()
    task = task_of(TINY_R1, **{f"engine{number}": spec for number in range(100)})
    (tmp_path / "request.json").write_text(json.dumps(task))
    command = [sys.executable, "-m", "pipeline.engines.tensorrt.worker", str(tmp_path / "request.json")]
    process = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
    assert process.stdout is not None and b"advance" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"onnx" + bytes(100), "is not an engine of TensorRT-RTX"),
        (b"vtrt", "is not an engine of TensorRT-RTX"),
        (b"vtrt" + bytes(12) + (999).to_bytes(8, "little") + bytes(76), "was cut off: its header says 999 bytes"),
        (
            b"vtrt" + bytes(12) + (64).to_bytes(8, "little") + bytes([1, 7, 1, 116, 0, 0, 0, 0, 0x7E]) + bytes(31),
            "was asked for SM120, but is for SM80, SM86",
        ),
    ],
)
def test_headers_are_read_with_care(tmp_path, content, sentence) -> None:
    file = tmp_path / "x.engine"
    file.write_bytes(content)
    with pytest.raises(StageError, match=sentence):
        check_header(file, [120])
