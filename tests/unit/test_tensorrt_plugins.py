"""Plugins in the TensorRT network, interpreted over a stand-in that takes them: where they are, and the same results without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorrt_rtx_bindings", reason="it defines the networks: pip install 'r1-pipeline[rtx]'")
torch = pytest.importorskip("torch", reason="plugins are torch ops")

from pipeline.checkpoint import Checkpoint  # noqa: E402
from pipeline.config.load import load as config  # noqa: E402
from pipeline.core.errors import ConfigError  # noqa: E402
from pipeline.core.key import key_of, key_parts  # noqa: E402
from pipeline.engines import tensorrt  # noqa: E402
from pipeline.engines.tensorrt import plugins, toolchain  # noqa: E402
from pipeline.engines.tensorrt.builder import describe, fingerprint  # noqa: E402
from pipeline.engines.tensorrt.graph import Graph  # noqa: E402
from pipeline.engines.tensorrt.interpreter import Interpreter, run_ranks  # noqa: E402
from pipeline.engines.tensorrt.library import load  # noqa: E402
from pipeline.engines.tensorrt.network.decoder import define  # noqa: E402
from pipeline.engines.tensorrt.network.spec import Spec  # noqa: E402
from pipeline.engines.tensorrt.networks import networks  # noqa: E402
from pipeline.engines.tensorrt.session import Session  # noqa: E402
from pipeline.engines.tensorrt.show import _plugins  # noqa: E402
from pipeline.engines.tensorrt.weights import Weights  # noqa: E402
from pipeline.stages.engine import STAGE  # noqa: E402
from tests._utils import random_checkpoint  # noqa: E402
from tests._utils.plugin_network import with_plugins  # noqa: E402

TINY_R1 = Checkpoint.open(Path(__file__).parents[2] / "pipeline" / "data" / "tiny_r1")
TRT = load("tensorrt_rtx")
WIDE = {
    "n_routed_experts": 64, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "num_hidden_layers": 2,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
"""Enough experts for the kernels."""


@pytest.fixture(autouse=True)
def seam(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only TensorRT and NVRTC do."""
    monkeypatch.setattr(plugins, "_arguments", lambda trt, plugin, sm, *rest: ((plugin, *rest), *[True] * bool(plugin.kernel)))
    monkeypatch.setattr(plugins, "_built", lambda plugin, kernel, sm, attributes: f"digest of {plugin.name} for SM{sm}")
    monkeypatch.setattr(plugins, "compiler", lambda: "NVRTC 13.0")


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """With R1's latent of 512 + 64, and no experts."""
    arch = WIDE | {"kv_lora_rank": 512, "first_k_dense_replace": 2}
    return Checkpoint.open(random_checkpoint.write(tmp_path_factory.mktemp("latent"), arch))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(random_checkpoint.write(tmp_path_factory.mktemp("wide"), WIDE))


@pytest.fixture(scope="module")
def of_wide(wide: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Its logits, each way computed once."""
    return cache(partial(logits, wide, tmp_path_factory.mktemp("scratch")))


def spec(checkpoint: Checkpoint, form: Any, **values: Any) -> Spec:
    standard = {"dtype": "bfloat16", "max_batch": 4, "max_tokens": 24, "max_seq_len": 32}
    return Spec(arch=checkpoint.arch, form=form, last_layer=checkpoint.arch.num_hidden_layers, **standard | values)


def network(checkpoint: Checkpoint, what: Spec, scratch: Path, sm: int = 0, **options: Any) -> Graph:
    net = Graph(TRT, **options)
    define(with_plugins(net, sm, host=what.host_plugins) if sm else net, what, Weights(checkpoint, scratch, what.dtype))
    return net


def logits(checkpoint: Checkpoint, scratch: Path, sm: int, ranks: int = 1, **values: Any) -> Any:
    """[R, B, S, V] of a prompt, then a step of two tokens; all ranks have the same ones."""
    specs: dict[str, Spec] = {
        f"{form}{rank}": spec(checkpoint, form, max_tokens=count, rank=rank, ranks=ranks, **values)
        for rank in range(ranks) for form, count in (("expanded", 24), ("absorbed", 2))
    }  # fmt: skip
    run = {name: Interpreter(network(checkpoint, what, scratch, sm)) for name, what in specs.items()}
    session = Session(specs, lambda names, feeds: run_ranks([run[name] for name in names], feeds), 2)
    ids = np.broadcast_to(np.random.default_rng(3).integers(3, checkpoint.arch.vocab_size, (2, 8)), (ranks, 2, 8))
    found = [session.step("expanded", ids[..., :6], np.zeros((ranks, 2), np.int64))[0]]
    return np.concatenate([*found, session.step("absorbed", ids[..., 6:], np.full((ranks, 2), 6))[0]], axis=2)


def kinds(net: Graph) -> list[str]:
    return [net.definition.get_layer(index).type.name for index in range(net.definition.num_layers)]


def test_the_model_computes_the_same_with_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tiny_r1; its 16 experts are fewer than the kernel takes, so that limit is lifted: what runs here is the reference."""
    lifted = {name: replace(plugin, refusal=lambda *_, **__: "") for name, plugin in plugins.declared().items()}
    native = logits(TINY_R1, tmp_path, 0, dtype="float32")
    monkeypatch.setattr(plugins, "declared", lambda: lifted)
    assert np.abs(logits(TINY_R1, tmp_path, 90, dtype="float32") - native).max() < 1e-4


def test_products_and_choices_are_the_same_in_bfloat16(of_wide: Callable[..., Any]) -> None:
    """Another order of sums may move a choice between two experts that are as good; here none is."""
    native, ours = of_wide(0), of_wide(90)
    assert np.abs(ours - native).max() < 0.02 * np.abs(native).max()


def test_each_network_uses_what_takes_its_sizes(tmp_path: Path, wide: Checkpoint) -> None:
    decode = describe(network(wide, spec(wide, "absorbed", max_tokens=2), tmp_path, 90))["plugins"]
    assert {name: facts["layers"] for name, facts in decode["used"].items()} == {"router_gemm": 1, "topk_router": 1}
    assert decode["used"]["topk_router"]["digests"] == ["digest of topk_router for SM90"]
    assert (decode["sm"], decode["compiler"], decode["native"]) == (90, "NVRTC 13.0", {})
    prefill = describe(network(wide, spec(wide, "expanded"), tmp_path, 90))["plugins"]
    assert list(prefill["used"]) == ["topk_router"]
    assert prefill["native"] == {"router_gemm": "the kernel takes 64 tokens and multiples of 256 x 32 at most, not 96 and 256 x 64"}


def test_one_kernel_stands_for_the_routing_layers(tmp_path: Path, wide: Checkpoint) -> None:
    native, ours = (kinds(network(wide, spec(wide, "absorbed", max_tokens=2), tmp_path, sm)) for sm in (0, 90))
    assert native.count("TOPK") == 3 and ours.count("TOPK") == 0 and ours.count("PLUGIN_V3") == 2
    assert len(native) - len(ours) > 20


def test_the_host_s_attention_reads_the_cache_as_tensorrt_s_does(tmp_path: Path, latent: Checkpoint) -> None:
    """Of layers without experts, so that no rounding moves a choice."""
    asked = {"max_seq_len": 64, "host_plugins": True}
    decode = network(latent, spec(latent, "absorbed", max_tokens=2, **asked), tmp_path, 90)
    assert decode.plugins is not None and [*map(len, decode.plugins.used.values())] == [2] and decode.plugins.native == {}
    assert "ATTENTION_OUTPUT" not in kinds(decode)
    native, ours = (logits(latent, tmp_path, sm, **asked) for sm in (0, 90))
    assert np.array_equal(ours[:, :, :-2], native[:, :, :-2])  # of the expanded form
    assert 0 < np.abs(ours[:, :, -2:] - native[:, :, -2:]).max() < 0.02 * np.abs(native).max()


def test_the_host_s_experts_take_fp8_blocks_as_they_are_stored(
    tmp_path: Path, wide: Checkpoint, of_wide: Callable[..., Any]
) -> None:
    """Their activations are rounded to FP8, too, as DeepSeek's are, which TensorRT's layers do not."""
    decode = network(wide, spec(wide, "absorbed", max_tokens=2, host_plugins=True), tmp_path, 90)
    assert decode.plugins is not None and "moe_fp8_block" in decode.plugins.used and "ONE_HOT" not in kinds(decode)
    assert decode.plugins.plain()["host"] == {"moe_fp8_block": "plugins.moe_grouped_gemm.trt"}
    sizes = "the kernel takes rows of 576 with 512 values, 64 at a time, not 32 of 192 with 128"
    assert decode.plugins.native == {"mla_decode": sizes}
    native, ours = of_wide(0), of_wide(90, host_plugins=True)
    assert 0 < np.abs(ours - native).max() < 0.05 * np.abs(native).max()


def test_ranks_add_what_their_own_experts_give(of_wide: Callable[..., Any]) -> None:
    one, two = of_wide(90, host_plugins=True), of_wide(90, 2, host_plugins=True)
    assert np.abs(two - one).max() < 0.02 * np.abs(one).max()


def test_tokens_travel_in_fp4_by_two_kernels(tmp_path: Path, wide: Checkpoint, of_wide: Callable[..., Any]) -> None:
    """The same bytes but for 128 less: the model computes the same, but that BLAS may add in another order at another address."""
    what = spec(wide, "absorbed", max_tokens=2, ranks=2, gather="fp4")
    native, ours = (network(wide, what, tmp_path, sm) for sm in (0, 90))
    assert ours.plugins is not None and {"nvfp4_pack", "nvfp4_unpack"} <= set(ours.plugins.used)
    assert len(kinds(native)) - len(kinds(ours)) > 70
    native, ours = (of_wide(sm, 2, gather="fp4") for sm in (0, 90))
    assert (ours == native).mean() > 0.95 and np.abs(ours - native).max() < 0.01 * np.abs(native).max()


def test_the_host_s_ops_are_for_hopper_alone(tmp_path: Path, latent: Checkpoint, wide: Checkpoint) -> None:
    for checkpoint, name in ((latent, "mla_decode"), (wide, "moe_fp8_block")):
        what = spec(checkpoint, "absorbed", max_tokens=2, max_seq_len=64, host_plugins=True)
        found = network(checkpoint, what, tmp_path, 100).plugins
        assert found is not None and found.native[name] == "the kernel is for SM90 alone, not SM100"


def test_native_layers_do_the_work_on_a_chip_that_a_plugin_does_not_cover(tmp_path: Path, wide: Checkpoint) -> None:
    net = network(wide, spec(wide, "absorbed", max_tokens=2), tmp_path, 80)
    assert net.plugins is not None and list(net.plugins.used) == ["topk_router"]
    assert net.plugins.native == {"router_gemm": "the kernel needs SM90 or newer, not SM80"}


@pytest.mark.parametrize(("lacking", "why"), [
    ("compiler", "NVRTC, which compiles plugins, was not found: install nvidia-cuda-nvrtc"),
    ("find_spec", "plugins are compiled with torch's help, which is not installed"),
])  # fmt: skip
def test_native_layers_do_the_work_where_nothing_compiles(
    tmp_path: Path, wide: Checkpoint, monkeypatch: pytest.MonkeyPatch, lacking: str, why: str
) -> None:
    monkeypatch.setattr(plugins, lacking, lambda *_: "")
    net = network(wide, spec(wide, "absorbed", max_tokens=2), tmp_path, 90)
    assert net.plugins is not None and net.plugins.native == dict.fromkeys(("router_gemm", "topk_router"), why)
    assert "PLUGIN_V3" not in kinds(net)


def test_a_kernel_that_changes_changes_the_network(tmp_path: Path, wide: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    what = spec(wide, "absorbed", max_tokens=2)
    known = fingerprint(network(wide, what, tmp_path, 90))
    assert fingerprint(network(wide, what, tmp_path, 90)) == known
    monkeypatch.setattr(plugins, "_built", lambda *_: "another digest")
    assert fingerprint(network(wide, what, tmp_path, 90)) != known


def test_weights_that_are_inputs_have_one_type_each(tmp_path: Path, wide: Checkpoint) -> None:
    """The gate is read in float32 by one form and in BF16 by the other; a rank's file of weights is their union."""
    forms = [network(wide, spec(wide, form, max_tokens=count), tmp_path, 90, external_weights=True)
             for form, count in (("expanded", 24), ("absorbed", 2))]  # fmt: skip
    first, second = (net.external for net in forms)
    assert first is not None and second is not None
    assert "model.layers.1.mlp.gate.weight" in first and "model.layers.1.mlp.gate.weight.bf16" in second
    assert all(first[name].dtype == second[name].dtype for name in first.keys() & second.keys())


@pytest.mark.parametrize(("arguments", "sm"), [
    (["+hw=h200"], 90), (["+hw=b200", "engine.tensorrt.plugins=all"], 100), (["+hw=h200", "engine.tensorrt.plugins=off"], 0),
    (["+hw=rtx_pro_6000"], 0),
])  # fmt: skip
def test_tensorrt_has_plugins_and_tensorrt_rtx_has_none(arguments: list[str], sm: int) -> None:
    asked = config([*arguments, "engine=tensorrt"])
    assert {each.plugins_for for each in networks(asked, TINY_R1.arch)} == {sm}
    assert ("plugins" in toolchain(asked)) == bool(sm)


def test_plugins_that_are_asked_for_where_there_can_be_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="plugins=all needs tensorrt: tensorrt_rtx, which is for SM120, takes no plugins"):
        networks(config(["+hw=rtx_pro_6000", "engine=tensorrt", "engine.tensorrt.plugins=all"]), TINY_R1.arch)


@pytest.mark.parametrize(("choice", "files"), [
    ("auto", {"plugins/topk_router/ranked.cu", "plugins/router_gemm/kernel.cu", "plugins/numerics.cuh", "plugins/trt.py"}),
    ("all", {"plugins/mla_decode/sm90_kernel.cu", "plugins/moe_grouped_gemm/op.py", "plugins/nvrtc.py", "plugins/trt_class.py"}),
])  # fmt: skip
def test_an_engine_s_key_has_the_kernels_and_their_compiler(monkeypatch: pytest.MonkeyPatch, choice: str, files: set[str]) -> None:
    asked = config(["+hw=h200", "engine=tensorrt", f"engine.tensorrt.plugins={choice}"])
    monkeypatch.setattr(tensorrt, "compiler", lambda: "NVRTC 13.0")
    parts = key_parts(STAGE, asked, {})
    assert files <= parts["code"].keys() and parts["toolchain"]["plugins"] == "NVRTC 13.0"
    monkeypatch.setattr(tensorrt, "compiler", lambda: "NVRTC 13.1")
    assert key_of(key_parts(STAGE, asked, {})) != key_of(parts)


def test_inspect_says_which_plugins_there_are_and_why_not_others(tmp_path: Path, wide: Checkpoint) -> None:
    found = network(wide, spec(wide, "expanded", host_plugins=True), tmp_path, 90).plugins
    assert found is not None
    assert list(_plugins(found.plain())) == [
        "  plugins for SM90: moe_fp8_block x1 (by the host), topk_router x1",
        "  native instead of router_gemm: the kernel takes 64 tokens and multiples of 256 x 32 at most, not 96 and 256 x 64",
    ]
    assert list(_plugins(None)) == []


def test_types_that_numpy_lacks_go_to_torch_and_back() -> None:
    for dtype in plugins._codes():
        value = np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4).astype(dtype)
        tensor = plugins._tensor(value)
        assert np.array_equal(tensor.float().numpy(), value.astype(np.float32))
        assert plugins._array(tensor).dtype == dtype and np.array_equal(plugins._array(tensor), value)
