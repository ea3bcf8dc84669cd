"""The TensorRT network, interpreted: what it computes, in both forms, in every weight format, over ranks, segments and chunks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorrt_rtx_bindings", reason="it defines the networks: pip install 'r1-pipeline[rtx]'")
torch = pytest.importorskip("torch", reason="the reference is in torch")

from pipeline.checkpoint import Checkpoint  # noqa: E402
from pipeline.core.errors import StageError  # noqa: E402
from pipeline.engines.tensorrt.agreement import compare  # noqa: E402
from pipeline.engines.tensorrt.builder import build  # noqa: E402
from pipeline.engines.tensorrt.graph import Graph  # noqa: E402
from pipeline.engines.tensorrt.interpreter import Interpreter, run_ranks  # noqa: E402
from pipeline.engines.tensorrt.library import load  # noqa: E402
from pipeline.engines.tensorrt.network.decoder import define  # noqa: E402
from pipeline.engines.tensorrt.network.linear import NATIVE  # noqa: E402
from pipeline.engines.tensorrt.network.spec import Spec  # noqa: E402
from pipeline.engines.tensorrt.reference import reference  # noqa: E402
from pipeline.engines.tensorrt.session import Session  # noqa: E402
from pipeline.engines.tensorrt.weights import Weights, cut  # noqa: E402
from pipeline.formats import FORMATS  # noqa: E402
from tests._utils import random_checkpoint  # noqa: E402
from tests._utils.run_stage import convert, recipe  # noqa: E402

TINY_R1 = Path(__file__).parents[2] / "pipeline" / "data" / "tiny_r1"
CHECKPOINT = Checkpoint.open(TINY_R1)
ARCH = CHECKPOINT.arch
LAYERS = ARCH.num_hidden_layers
EXACT = 1e-4  # float32 on both sides; logits reach 17
TRT = load("tensorrt_rtx")
COUNT = 24


def spec(form: Any, **values: Any) -> Spec:
    standard = {"dtype": "float32", "max_batch": 4, "max_tokens": 32, "max_seq_len": 48, "last_layer": LAYERS}
    return Spec(arch=ARCH, form=form, **standard | values)


def network(what: Spec, scratch: Path, checkpoint: Checkpoint = CHECKPOINT, **options: Any) -> Graph:
    net = Graph(TRT, **options)
    define(net, what, Weights(checkpoint, scratch, what.dtype))
    return net


def session(scratch: Path, *specs: Spec, rows: int = 2) -> Session:
    interpreters = {str(number): Interpreter(network(what, scratch)) for number, what in enumerate(specs)}
    named = {str(number): what for number, what in enumerate(specs)}
    return Session(named, lambda names, feeds: run_ranks([interpreters[name] for name in names], feeds), rows)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return reference(CHECKPOINT)


@pytest.fixture(scope="module")
def ids() -> Any:
    return np.random.default_rng(5).integers(3, ARCH.vocab_size, (2, COUNT))


@pytest.fixture(scope="module")
def expected(model: Any, ids: Any) -> Any:
    with torch.inference_mode():
        return model(torch.from_numpy(ids)).numpy()


def start(at: int, ranks: int = 1, rows: int = 2) -> Any:
    return np.full((ranks, rows), at)


def test_both_forms_chunks_and_steps_equal_the_reference(tmp_path, ids, expected) -> None:
    """A prompt in two chunks, a short chunk, then single tokens, each reading what the others cached."""
    one = session(tmp_path, spec("expanded"), spec("absorbed"))
    steps = [("expanded", 0, 9), ("expanded", 9, 15), ("absorbed", 15, 20), *(("absorbed", at, at + 1) for at in range(20, COUNT))]
    for form, first, last in steps:
        logits, _ = one.step(form, ids[None, :, first:last], start(first))
        assert np.abs(logits[0] - expected[:, first:last]).max() < EXACT, (form, first)


def test_decode_of_one_token_reads_lengths_instead_of_a_mask(tmp_path, ids, expected) -> None:
    one = session(tmp_path, spec("expanded"), spec("absorbed", max_tokens=1))
    one.step("expanded", ids[None, :, :12], start(0))
    logits, _ = one.step("absorbed", ids[None, :, 12:13], start(12))
    assert np.abs(logits[0] - expected[:, 12:13]).max() < EXACT


def test_rows_of_different_lengths_decode_together(tmp_path, ids, expected) -> None:
    """The shorter row's prompt is padded on the right; what padding wrote is overwritten before it can be seen."""
    one = session(tmp_path, spec("expanded"), spec("absorbed", max_tokens=1))
    one.step("expanded", ids[None, :, :16], start(0))
    logits, _ = one.step("absorbed", np.stack([ids[0, 16:17], ids[1, 10:11]])[None], np.array([[16, 10]]))
    assert np.abs(logits[0, 0, 0] - expected[0, 16]).max() < EXACT
    assert np.abs(logits[0, 1, 0] - expected[1, 10]).max() < EXACT


@pytest.mark.parametrize("moe", ["dispatch", "layer"])
def test_every_lowering_of_the_experts_is_exact(tmp_path, ids, expected, moe) -> None:
    logits, _ = session(tmp_path, spec("expanded", moe=moe)).step("expanded", ids[None], start(0))
    assert np.abs(logits[0] - expected).max() < EXACT


def test_tensorrt_s_own_layer_takes_experts_in_fp8_as_they_are_stored(tmp_path, ids) -> None:
    """It computes what the products apart do; TensorRT-RTX, which has no kernel for it, names it and its types when it refuses."""
    small = random_checkpoint.write(tmp_path / "checkpoint", {"num_hidden_layers": 2})
    checkpoint = Checkpoint.open(convert(small, tmp_path / "fp8", recipe("fp8")))
    shapes = {"max_tokens": 32, "max_seq_len": 48, "max_batch": 4, "last_layer": 2, "arch": checkpoint.arch}
    found = []
    for moe in ("layer", "dense"):
        what = Spec(form="expanded", moe=moe, dtype="float32", **shapes)
        run = Interpreter(network(what, tmp_path, checkpoint))
        one = Session({"0": what}, lambda names, feeds, run=run: run_ranks([run], feeds), 2)
        found.append(one.step("expanded", ids[None], start(0))[0])
    assert compare("", "float32", *found).mean_kl < 1e-3
    net = network(Spec(form="expanded", moe="layer", **shapes), tmp_path, checkpoint)
    with pytest.raises(StageError, match=r"moe_fc1: \S+-\(f8\[1,.*experts\.quantize_\d+_output\S+\(f8\[1,.*constantFP8"):
        build(net, "tensorrt_rtx", [120], tmp_path / "x", refit=False, advance=lambda n: None, stopped=lambda: False)


def test_dispatch_counts_what_an_expert_has_no_room_for(tmp_path, ids, expected) -> None:
    what = spec("expanded", moe="dispatch", moe_capacity=8)
    interpreter = Interpreter(network(what, tmp_path))
    caches = {f"cache.{number}": np.zeros((2, 1, 48, ARCH.latent_dim), np.float32) for number in range(LAYERS)}
    feeds = {
        "tokens": ids.astype(np.int32), "positions": np.tile(np.arange(COUNT, dtype=np.int32), (2, 1)),
        "starts": np.zeros(2, np.int32), "keys": np.array([COUNT]), "logit_rows": np.arange(2 * COUNT, dtype=np.int32), **caches,
    }  # fmt: skip
    outputs = interpreter.run(feeds)
    chosen = [interpreter.values[f"layers.{n}.mlp.router.{name}"] for n, name in _router_indices(interpreter)]
    wanted = sum(np.maximum(np.bincount(indices.ravel(), minlength=16) - 8, 0).sum() for indices in chosen)
    assert outputs["dropped"].tolist() == [wanted] and wanted > 0
    assert np.abs(outputs["logits"].reshape(expected.shape) - expected).max() > 1  # and it is not right


def _router_indices(interpreter: Interpreter) -> list[tuple[int, str]]:
    """Layer and tensor of each router's choice: of its last topk."""
    names = [name for name, value in interpreter.values.items() if ".router.topk" in name and value.shape[-1:] == (4,)]
    names = [name for name in names if interpreter.values[name].dtype == np.int32]
    return [(int(name.split(".")[1]), name.split(".router.")[1]) for name in names]


@pytest.mark.parametrize(("parallel", "ranks", "moe"), [("adp", 2, "dense"), ("adp", 2, "dispatch"), ("tp", 4, "dense")])
def test_ranks_together_equal_one(tmp_path, ids, expected, parallel, ranks, moe) -> None:
    """Attention data parallelism: a sequence of its own on each rank. Tensor parallelism: the same ones on all."""
    specs = [
        spec(form, rank=rank, ranks=ranks, parallel=parallel, moe=moe)
        for form in ("expanded", "absorbed") for rank in range(ranks)
    ]  # fmt: skip
    own = ids[:, None] if parallel == "adp" else np.broadcast_to(ids, (ranks, *ids.shape))
    wanted = expected[:, None] if parallel == "adp" else np.broadcast_to(expected, (ranks, *expected.shape))
    group = session(tmp_path, *specs, rows=own.shape[1])
    logits, _ = group.step("expanded", own[..., :20], start(0, *own.shape[:2]))
    assert np.abs(logits - wanted[:, :, :20]).max() < EXACT
    logits, _ = group.step("absorbed", own[..., 20:21], start(20, *own.shape[:2]))
    assert np.abs(logits - wanted[:, :, 20:21]).max() < EXACT


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_part_of_a_quantised_weight_is_that_part_of_its_values(name, axis) -> None:
    """As tensor parallelism splits heads; where a block would be split there is no part."""
    what, values = FORMATS[name], np.random.default_rng(2).standard_normal((512, 256)).astype(np.float32)
    stored = what.quantize(values, amax=5.0, input_scale=1.0)
    half = cut(stored, values.shape, axis, values.shape[axis] // 2, values.shape[axis])
    assert half is not None
    wanted = np.split(what.dequantize(stored), 2, axis)[1]
    assert np.array_equal(what.dequantize(half), wanted)
    splits = {"fp8_block": 64, "nvfp4": 8, "w4a16_nvfp4": 8, "int4_awq": 64 if axis else 1}
    if name in splits and (axis == 1 or name in ("fp8_block", "int4_awq")):
        assert cut(stored, values.shape, axis, splits[name], 2 * splits[name]) is None


def test_heads_in_nvfp4_stay_so_on_every_rank(tmp_path) -> None:
    """Whose ranks together give the logits of one."""
    small = random_checkpoint.write(tmp_path / "checkpoint", {"num_hidden_layers": 2})
    checkpoint = Checkpoint.open(convert(small, tmp_path / "nvfp4", recipe("nvfp4")))
    (tmp_path / "scratch").mkdir()
    shapes = {"max_batch": 1, "max_tokens": 8, "max_seq_len": 16, "dtype": "float32", "last_layer": 2, "arch": checkpoint.arch}
    whole = Spec(form="expanded", **shapes)
    parts = [Spec(form="expanded", rank=rank, ranks=2, parallel="tp", **shapes) for rank in range(2)]
    tokens = np.random.default_rng(5).integers(3, 1024, (1, 8))

    def logits(specs: list[Spec]) -> Any:
        nets = [Graph(TRT) for _ in specs]
        for net, what in zip(nets, specs, strict=True):
            weights = Weights(checkpoint, tmp_path / "scratch", what.dtype)
            define(net, what, weights)
            assert not weights.dequantized
        run = {str(number): Interpreter(net) for number, net in enumerate(nets)}
        one = Session(dict(zip(run, specs, strict=True)), lambda names, feeds: run_ranks([run[name] for name in names], feeds), 1)
        return one.step("expanded", np.stack([tokens] * len(specs)), start(0, len(specs), 1))[0]

    assert np.abs(logits(parts) - logits([whole])).max() < 1e-5


def test_ranks_that_come_to_different_collectives_are_told_apart(tmp_path) -> None:
    """On GPUs they would wait for one another for ever."""
    many = [spec("expanded", rank=0, ranks=2), spec("expanded", rank=1, ranks=2, parallel="tp")]
    group = session(tmp_path, *many, rows=1)
    with pytest.raises(StageError, match=r"do not agree: rank 0 waits in ALL_GATHER 0,1 of float32\[4, .*, others in ALL_REDUCE"):
        group.step("expanded", np.full((2, 1, 4), 7), start(0, 2, 1))


ODD = {
    "one group of experts": {"n_group": 1, "topk_group": 1},
    "no YaRN, shares not normalised": {"rope_scaling": None, "norm_topk_prob": False, "n_shared_experts": 2},
    "no width is a multiple of a block": {
        "hidden_size": 320, "moe_intermediate_size": 96, "intermediate_size": 200, "kv_lora_rank": 80, "q_lora_rank": 72,
        "qk_rope_head_dim": 32, "qk_nope_head_dim": 48, "v_head_dim": 56,
    },
    "values as wide as keys": {"v_head_dim": 192, "moe_layer_freq": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_other_shapes_of_the_architecture(tmp_path, name) -> None:
    checkpoint = Checkpoint.open(random_checkpoint.write(tmp_path / "checkpoint", {"num_hidden_layers": 3} | ODD[name]))
    shapes = {"max_batch": 2, "max_seq_len": 16, "last_layer": 3, "dtype": "float32", "arch": checkpoint.arch}
    specs = {form: Spec(form=form, max_tokens=count, **shapes) for form, count in (("expanded", 12), ("absorbed", 1))}
    nets = {form: Interpreter(network(what, tmp_path, checkpoint)) for form, what in specs.items()}
    one = Session(specs, lambda names, feeds: run_ranks([nets[names[0]]], feeds), 2)
    tokens = np.random.default_rng(5).integers(3, checkpoint.arch.vocab_size, (2, 12))
    with torch.inference_mode():
        wanted = reference(checkpoint)(torch.from_numpy(tokens)).numpy()
    prefill, _ = one.step("expanded", tokens[None, :, :11], start(0))
    decode, _ = one.step("absorbed", tokens[None, :, 11:], start(11))
    assert np.abs(np.concatenate([prefill, decode], 2)[0] - wanted).max() < 1e-5  # logits reach 1.6


def test_segments_of_layers_equal_the_whole(tmp_path, ids, expected) -> None:
    parts = [spec("expanded", first_layer=first, last_layer=last) for first, last in ((0, 1), (1, 3), (3, LAYERS))]
    logits, _ = session(tmp_path, *parts).step("expanded", ids[None], start(0))
    assert np.abs(logits[0] - expected).max() < EXACT


def test_the_mtp_layer_drafts_as_the_reference(tmp_path, model, ids) -> None:
    draft = {"first_layer": LAYERS, "last_layer": LAYERS + 1, "mtp": True}
    both = session(tmp_path, spec("expanded", mtp=True), spec("expanded", **draft), spec("absorbed", max_tokens=1, **draft))
    _, hidden = both.step("expanded", ids[None], start(0))
    with torch.inference_mode():
        tokens = torch.from_numpy(ids)
        wanted = model.mtp_logits(tokens, model.hidden(tokens)).numpy()
    logits = both.draft("expanded", ids[None, :, 1:-1], hidden[:, :, :-2], start(0))
    assert np.abs(logits[0] - wanted[:, :-1]).max() < EXACT
    logits = both.draft("absorbed", ids[None, :, -1:], hidden[:, :, -2:-1], start(COUNT - 2))
    assert np.abs(logits[0] - wanted[:, -1:]).max() < EXACT


WITHIN = dict.fromkeys(("bf16", "fp8_block", "w4a16_nvfp4", "int4_awq", "mxfp8", "mxfp4", "w4a8_awq", "w4a8_nvfp4_fp8"), 1e-8)
WITHIN |= dict.fromkeys(("fp8", "fp8_channel", "nvfp4"), 1e-2)  # activations fall on the other side of a step: the reference, its
# embedding changed by 1e-6, is as far from itself (3e-3)


@pytest.mark.parametrize("name", WITHIN)
def test_quantised_weights_mean_what_the_format_says(tmp_path, ids, name) -> None:
    """Against the reference on dequantised weights, its activations rounded by `pipeline.formats` where the engine's are."""
    checkpoint = Checkpoint.open(convert(TINY_R1, tmp_path / name, recipe(name)))
    (tmp_path / "scratch").mkdir()
    interpreter = Interpreter(network(spec("expanded"), tmp_path / "scratch", checkpoint))
    one = Session({"0": spec("expanded")}, lambda names, feeds: run_ranks([interpreter], feeds), 2)
    logits, _ = one.step("expanded", ids[None], start(0))
    with torch.inference_mode():
        wanted = reference(checkpoint)(torch.from_numpy(ids)).numpy()
    assert compare(name, "float32", logits, wanted).mean_kl < WITHIN[name]


def test_greedy_tokens_are_those_of_transformers(tmp_path, model) -> None:
    """An implementation that is not ours, on the dequantised weights."""
    transformers = pytest.importorskip("transformers", reason="the independent implementation to compare with")
    from safetensors.torch import save_file

    table = json.loads((TINY_R1 / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in table.items() if k != "quantization_config"}))
    state = {k: v.contiguous() for k, v in model.state_dict().items() if not k.startswith(f"model.layers.{LAYERS}.")}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    peer = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompt = np.random.default_rng(6).integers(3, ARCH.vocab_size, (1, 20))
    theirs = peer.generate(torch.from_numpy(prompt), max_new_tokens=16, min_new_tokens=16, do_sample=False, eos_token_id=None)
    one = session(tmp_path, spec("expanded"), spec("absorbed", max_tokens=1), rows=1)
    logits, _ = one.step("expanded", prompt[None], start(0, 1, 1))
    ours = [int(logits[0, 0, -1].argmax())]
    while len(ours) < 16:
        logits, _ = one.step("absorbed", np.array([[ours[-1:]]]), start(19 + len(ours), 1, 1))
        ours.append(int(logits[0, 0, 0].argmax()))
    assert ours == theirs[0, 20:].tolist()


def test_a_wrong_layer_is_named_at_once(tmp_path) -> None:
    net = Graph(TRT)
    a, b = (net.constant(np.zeros(shape, np.float32)) for shape in ((2, 8), (9, 4)))
    refused = pytest.raises(StageError, match=r"TensorRT refused layers\.3\.attn\.matrix_multiply_2: INVALID_CONFIG.*last dim")
    with refused, net.scope("layers.3"), net.scope("attn"):
        net.matmul(a, b)


def test_types_are_not_mixed_in_silence() -> None:
    net = Graph(TRT)
    a, b = net.constant(np.zeros((2, 2), np.float32)), net.constant(np.zeros((2, 2), np.float16))
    with pytest.raises(StageError, match=r"elementwise_2.*must have same input types"):
        net.add(a, b)


def test_experts_of_one_layer_in_two_formats_are_refused(tmp_path) -> None:
    entries = dict(CHECKPOINT.entries)
    name = "model.layers.1.mlp.experts.3.gate_proj.weight"
    plain = Checkpoint.open(convert(TINY_R1, tmp_path / "bf16", recipe("bf16")))
    entries[name] = plain.entries[name]
    with pytest.raises(StageError, match=r"experts of model\.layers\.1.mlp.experts.gate_proj are stored as bf16, fp8_block"):
        network(spec("expanded"), tmp_path, replace(CHECKPOINT, entries=entries))
