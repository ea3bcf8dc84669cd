"""What ranks of a TensorRT deployment exchange, interpreted over all of them: payloads, ways, and groups that cannot meet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorrt_rtx_bindings", reason="it defines the networks: pip install 'r1-pipeline[rtx]'")
torch = pytest.importorskip("torch", reason="the reference is in torch")

from pipeline.checkpoint import Checkpoint  # noqa: E402
from pipeline.config.load import load as load_config  # noqa: E402
from pipeline.core.errors import ConfigError, StageError  # noqa: E402
from pipeline.engines.tensorrt.agreement import compare  # noqa: E402
from pipeline.engines.tensorrt.builder import build, describe  # noqa: E402
from pipeline.engines.tensorrt.graph import Graph  # noqa: E402
from pipeline.engines.tensorrt.interpreter import Exchange, Interpreter, exchanged, run_ranks  # noqa: E402
from pipeline.engines.tensorrt.network.collectives import Collective, checked_group, refuse_unlike  # noqa: E402
from pipeline.engines.tensorrt.network.decoder import define  # noqa: E402
from pipeline.engines.tensorrt.network.payload import pack, unpack  # noqa: E402
from pipeline.engines.tensorrt.network.spec import Spec  # noqa: E402
from pipeline.engines.tensorrt.networks import networks  # noqa: E402
from pipeline.engines.tensorrt.reference import reference  # noqa: E402
from pipeline.engines.tensorrt.session import Session  # noqa: E402
from pipeline.engines.tensorrt.show import lines  # noqa: E402
from pipeline.engines.tensorrt.weights import Weights  # noqa: E402
from plugins.fp4_allgather import op as plugin  # noqa: E402
from tests._utils import random_checkpoint  # noqa: E402
from tests._utils.run_stage import convert, recipe  # noqa: E402
from tests.unit.test_tensorrt_network import ARCH, CHECKPOINT, EXACT, TRT, spec  # noqa: E402

WITHIN_FP4 = 0.1
"""Nats a token between tokens that travel in FP4 and in BF16, experts in BF16, on random prompts: 0.04 measured."""
COUNT = 16


def specs_of(ranks: int, checkpoint: Checkpoint, form: Any = "expanded", **values: Any) -> list[Spec]:
    layers = checkpoint.arch.num_hidden_layers
    return [
        replace(spec(form, **{"last_layer": layers, "rank": rank, "ranks": ranks} | values), arch=checkpoint.arch)
        for rank in range(ranks)
    ]


def nets(scratch: Path, ranks: int, checkpoint: Checkpoint = CHECKPOINT, form: Any = "expanded", **values: Any) -> list[Graph]:
    made = []
    for what in specs_of(ranks, checkpoint, form, **values):
        made.append(Graph(TRT))
        define(made[-1], what, Weights(checkpoint, scratch, what.dtype))
    return made


def logits_of(scratch: Path, ids: Any, checkpoint: Checkpoint = CHECKPOINT, **values: Any) -> Any:
    """Of a prompt for each rank, [R, S] -> [R, S, V]."""
    graphs = nets(scratch, len(ids), checkpoint, **values)
    interpreters = {str(rank): Interpreter(graph) for rank, graph in enumerate(graphs)}
    specs = {str(rank): what for rank, what in enumerate(specs_of(len(ids), checkpoint, **values))}
    run = Session(specs, lambda names, feeds: run_ranks([interpreters[name] for name in names], feeds), 1)
    logits, _ = run.step("expanded", ids[:, None], np.zeros((len(graphs), 1), np.int64))
    return logits[:, 0]


@pytest.fixture(scope="module")
def ids() -> Any:
    return np.random.default_rng(5).integers(3, ARCH.vocab_size, (4, COUNT))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A dense and a MoE layer."""
    return Checkpoint.open(random_checkpoint.write(tmp_path_factory.mktemp("two_layers"), {"num_hidden_layers": 2}))


def expected(ids: Any, checkpoint: Checkpoint = CHECKPOINT, **options: Any) -> Any:
    torch.set_num_threads(1)
    with torch.inference_mode():
        return reference(checkpoint, **options)(torch.from_numpy(ids)).numpy()


@pytest.mark.parametrize(("ranks", "values"), [
    (2, {"exchange": "all_to_all", "moe": "layer"}),
    (4, {"exchange": "all_to_all", "exchange_share": 0.999, "moe": "dispatch"}),  # places are given away, and suffice
])  # fmt: skip
def test_every_way_to_the_experts_and_back_is_exact(tmp_path, small, ids, ranks, values) -> None:
    found = logits_of(tmp_path, ids[:ranks], small, **values)
    assert np.abs(found - expected(ids[:ranks], small)).max() < EXACT / 10  # logits reach 1.6


def test_tokens_that_find_no_place_are_counted(tmp_path, small, ids) -> None:
    values = {"exchange": "all_to_all", "exchange_share": 0.5}
    interpreters = [Interpreter(graph) for graph in nets(tmp_path, 2, small, **values)]
    caches = {f"cache.{number}": np.zeros((1, 1, 48, ARCH.latent_dim), np.float32) for number in range(2)}
    feeds = [
        {"tokens": ids[rank : rank + 1].astype(np.int32), "positions": np.arange(COUNT, dtype=np.int32)[None],
         "starts": np.zeros(1, np.int32), "keys": np.array([COUNT]),
         "logit_rows": np.zeros(1, np.int32), **caches} for rank in range(2)
    ]  # fmt: skip
    outputs = run_ranks(interpreters, feeds)
    for interpreter, output in zip(interpreters, outputs, strict=True):
        tops = [value for name, value in interpreter.values.items() if ".router.topk" in name and value.dtype == np.int32]
        goes = np.stack([(tops[-1] // 8 == rank).any(1) for rank in range(2)], 1)
        assert output["dropped"].tolist() == [np.maximum(goes.sum(0) - COUNT // 2, 0).sum()]
        assert output["dropped"][0] > 0


def test_fp4_payload_has_the_bytes_of_the_plugin() -> None:
    """Every magnitude, zeros, ties of codes and of scales, saturation; K as the network has it and R1's."""
    random = np.random.default_rng(7)
    for size in (256, 7168):
        x = random.standard_normal((24, size)).astype(np.float32)
        x *= np.exp2(random.integers(-24, 12, (24, size // 16)).repeat(16, 1))
        x[0], x[1, :16], x[2] = 0, 1e9, np.tile([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -5, 6, 4, 3, 2, 1, 0.5], size // 16)
        bf16 = torch.from_numpy(x).bfloat16()
        x, scale = bf16.float().numpy(), np.array([0.37 / 448], np.float32)
        net = Graph(TRT)
        given, static = net.input("x", TRT.DataType.FLOAT, (-1, size)), net.input("scale", TRT.DataType.FLOAT, (1, 1, 1))
        packed = pack(net, given, static)
        net.output(packed, "packed")
        net.output(unpack(net, packed, static, size, TRT.DataType.BF16), "back")
        got = Interpreter(net).run({"x": x, "scale": scale.reshape(1, 1, 1)})
        theirs = plugin.pack(bf16, "nvfp4", torch.from_numpy(scale))
        assert np.array_equal((got["packed"].astype(np.int32) + 128).astype(np.uint8), theirs.numpy()[:, : size * 9 // 16])
        back = plugin.unpack(theirs, size, "nvfp4", torch.from_numpy(scale)).float().numpy()
        assert np.array_equal(got["back"].astype(np.float32), back)


def test_hidden_states_in_fp4_are_near_those_in_bf16(tmp_path, ids) -> None:
    """The definition is exact against a reference that rounds tokens in the same way; how far FP4 is from BF16 is stated."""
    found = logits_of(tmp_path, ids[:2], gather="fp4")
    assert compare("", "float32", found, expected(ids[:2], travel="fp4")).mean_kl < 1e-3
    away = compare("", "float32", found, expected(ids[:2])).mean_kl
    assert 1e-4 < away < WITHIN_FP4


def test_experts_in_nvfp4_compute_the_same_of_hidden_states_in_fp4(tmp_path, small, ids) -> None:
    """They would round tokens to the very values that travelled."""
    formats = {"attention": "bf16", "dense_mlp": "bf16", "shared_experts": "bf16"}
    checkpoint = Checkpoint.open(convert(small.folder, tmp_path / "nvfp4", recipe("nvfp4", **formats)))
    (tmp_path / "scratch").mkdir()
    ways = ({"gather": "fp4"}, {"gather": "fp4", "exchange": "all_to_all"}, {})
    fp4, sent, bf16 = (logits_of(tmp_path / "scratch", ids[:2], checkpoint, **way) for way in ways)
    assert np.array_equal(fp4, sent) and np.abs(fp4 - bf16).max() < EXACT


def test_a_whole_network_of_packed_tokens_sent_to_chosen_ranks_builds(tmp_path, small) -> None:
    values = {"gather": "fp4", "exchange": "all_to_all", "exchange_share": 0.75, "dtype": "bfloat16"}
    net = nets(tmp_path, 2, small, form="absorbed", max_tokens=1, **values)[1]
    build(net, "tensorrt_rtx", [89, 120], tmp_path / "x.engine", refit=False, advance=lambda n: None, stopped=lambda: False)
    assert (tmp_path / "x.engine").stat().st_size > 1e6


@pytest.mark.parametrize(("ranks", "values"), [
    (4, {"gather": "fp4"}), (2, {"exchange": "all_to_all", "exchange_share": 0.5}), (2, {"parallel": "tp", "dtype": "float32"}),
])  # fmt: skip
def test_the_bytes_that_are_told_are_those_of_the_network(tmp_path, small, ranks, values) -> None:
    values = {"dtype": "bfloat16"} | values
    what = specs_of(ranks, small, **values)[0]
    told = describe(nets(tmp_path, ranks, small, **values)[0])["collectives"]
    rows = {"ALL_REDUCE": 2 * (ranks - 1) / ranks, "ALL_TO_ALL": (ranks - 1) * what.exchange_share}
    sent = sum(each["row_bytes"] * rows.get(each["collective"].split()[0], ranks - 1) for each in told)
    assert what.sent_per_token == sent > 0


def test_fp4_saves_the_bytes_that_codes_and_scales_do_not_take() -> None:
    def there(payload: str) -> int:
        config = load_config(["+hw=b200", "engine=tensorrt", "quant=nvfp4", "parallel.tp=8", f"engine.tensorrt.gather={payload}"])
        return networks(config, ARCH)[0].sent_per_token

    assert there("bf16") - there("fp4") == 7 * 4 * (2 * 256 - 9 * 16)  # others, MoE layers, bytes of a row


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        ((0, 1, 1), "has a rank twice"),
        ((0, 1, 4), "has rank 4, but there are 4, from 0 to 3"),
        ((0, 2), "must have that rank and another"),
        ((1,), "must have that rank and another"),
    ],
)
def test_groups_that_cannot_meet_are_refused(group, sentence) -> None:
    with pytest.raises(StageError, match=sentence):
        checked_group(group, 1, 4)


def bring(group: tuple[int, ...], shape: tuple[int, ...], operation: str = "ALL_GATHER") -> Exchange:
    return Exchange(Collective(operation, group), np.zeros(shape, np.float32))


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ([bring((0, 1), (4, 2)), bring((0, 1), (3, 2))], r"rank 0 waits in .*\[4, 2\], others in .*\[3, 2\]"),
        ([bring((0, 1), (4, 2)), bring((1, 2), (4, 2)), bring((1, 2), (4, 2))], "others in ALL_GATHER 1,2"),
        ([bring((0, 2), (4, 2)), bring((0, 2), (4, 2))], "do not agree"),
    ],
)
def test_ranks_that_bring_something_else_would_hang(asked, sentence) -> None:
    with pytest.raises(StageError, match=sentence):
        exchanged(asked, 0)


def test_two_groups_exchange_apart() -> None:
    asked = [Exchange(Collective("ALL_TO_ALL", group), np.arange(4) + 10 * rank) for rank, group in enumerate([(0, 2), (1, 3)] * 2)]
    taken = [exchanged(asked, rank).tolist() for rank in range(4)]
    assert taken == [[0, 1, 20, 21], [10, 11, 30, 31], [2, 3, 22, 23], [12, 13, 32, 33]]


def test_networks_of_ranks_that_differ_are_refused_before_they_run(tmp_path, small) -> None:
    told = {
        "rank0_expanded": describe(nets(tmp_path, 2, small)[0])["collectives"],
        "rank1_expanded": describe(nets(tmp_path, 2, small, exchange="all_to_all")[1])["collectives"],
    }
    with pytest.raises(StageError, match=r"collective 0 of rank0_expanded is ALL_GATHER 0,1 of FLOAT\[-1, 256\], of .* ALL_TO_ALL"):
        refuse_unlike(told)
    told["rank1_expanded"] = told["rank0_expanded"][:-1]
    with pytest.raises(StageError, match=r"collective 2 of .* is REDUCE_SCATTER .*, of .* missing"):
        refuse_unlike(told)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("parallel.attention_dp=false", "engine.tensorrt.gather=fp4"), "are for tokens that ranks have apart"),
        (("parallel.attention_dp=false", "engine.tensorrt.exchange=all_to_all"), "are for tokens that ranks have apart"),
        (("engine.tensorrt.exchange=all_to_all", "engine.tensorrt.exchange_share=4e-4"), "0.0004 is too small: it must be at"),
    ],
)
def test_ways_that_there_are_not_are_refused(words, sentence) -> None:
    with pytest.raises(ConfigError, match=sentence):
        networks(load_config(["+hw=rtx_pro_6000", "engine=tensorrt", "parallel.tp=2", *words]), ARCH)


@pytest.mark.parametrize(("values", "told"), [
    ({"gather": "fp4", "exchange": "all_to_all"}, "  exchange all_to_all, tokens in fp4: 688 bytes a token to other ranks"),
    ({"parallel": "tp"}, "  all-reduce: 1,536 bytes a token to other ranks"),
])  # fmt: skip
def test_inspect_tells_what_ranks_send(small, values, told) -> None:
    what = specs_of(2, small, dtype="bfloat16", **values)[0]
    built = {"layers": 1, "bytes": 1, "network": "0", "inputs": {}, "outputs": {}}
    engine = what.plain() | built | {"sent_bytes_per_token": what.sent_per_token}
    info = {
        "library": "tensorrt_rtx", "version": "1", "targets": ["SM120"], "dtype": "bfloat16", "ranks": 2, "parallel": what.parallel,
        "weights": "embedded", "computed_as": {}, "engines": {"rank0_expanded": engine}, "agreement": [], "not_compared": "",
        "not_run": "",
    }  # fmt: skip
    assert told in list(lines(info))
