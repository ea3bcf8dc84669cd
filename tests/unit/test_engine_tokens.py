"""When an engine's words are right: the rule's arithmetic, and the float32 graph that it asks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the engine is compiled by torch")

from torch import Tensor  # noqa: E402

from pipeline.checkpoint import dequantized as parameters_of  # noqa: E402
from pipeline.config.schema import TorchEngineConfig  # noqa: E402
from pipeline.engines.torch import build  # noqa: E402
from pipeline.engines.torch.weights import parameters, write_weights  # noqa: E402
from pipeline.models import deepseek_v3  # noqa: E402
from pipeline.models.arch import Arch  # noqa: E402
from scripts import _eager  # noqa: E402
from scripts._tokens import RARE, judge, others  # noqa: E402
from tests._utils import random_checkpoint  # noqa: E402

EXACT = torch.tensor([[4.0, 1.0, 0.0], [2.0, 1.9, 0.0], [0.0, 3.0, 2.0]])
REFERENCE = EXACT + torch.tensor([[0.0, 0.0, 0.1], [-0.1, 0.1, 0.0], [0.0, 0.1, 0.0]])
"""Off by 0.1; its second word is another one than float32's."""


def changed(position: int, word: int, by: float) -> Tensor:
    found = REFERENCE.clone()
    found[position, word] += by
    return found


def test_a_word_is_wrong_where_float32_is_surer_than_the_reference_errs() -> None:
    row = judge(EXACT, [REFERENCE], REFERENCE)
    assert row["good"] and (row["sure"], row["wrong"], row["equal_tokens"], row["float32_tokens"]) == (2, 0, 3, 2)
    tie = judge(EXACT, [REFERENCE], EXACT)  # another word than the reference's at a tie, and no error
    assert tie["good"] and (tie["equal_tokens"], tie["wrong"], tie["error"]) == (2, 0, 0.0)
    other = judge(EXACT, [REFERENCE], changed(2, 2, 1.2))
    assert not other["good"] and (other["wrong"], other["float32_tokens"]) == (1, 1)
    assert not judge(EXACT, [REFERENCE], changed(0, 2, torch.nan))["good"]


def test_what_is_allowed_is_that_of_the_position() -> None:
    """Where the reference errs by 0.6, a word that is 1 behind is not wrong; by 0.4 it is."""
    for error, wrong in ((0.6, 0), (0.4, 1)):
        reference, found = REFERENCE.clone(), changed(2, 2, 1.2)
        reference[2, 0] += error
        assert judge(EXACT, [reference], found)["wrong"] == wrong


def test_what_is_allowed_is_what_any_reference_errs() -> None:
    """The words that are counted as equal are the first's."""
    rerouted = REFERENCE.clone()
    rerouted[2, 2] += 1.2
    row = judge(EXACT, [REFERENCE, rerouted], changed(2, 2, 1.2))
    assert row["good"] and (row["wrong"], row["equal_tokens"]) == (0, 2)


def test_few_words_may_be_wrong() -> None:
    """Of 400 with logits as near as the reference's 2, the other 3."""
    exact = torch.tensor([[2.0, 1.0, 0.0]]).repeat(400, 1)
    reference = exact - 0.1
    for count, good in ((2, True), (3, False)):
        found = exact.clone()
        found[:count] = torch.tensor([0.9, 1.0, 0.0])
        row = judge(exact, [reference], found)
        assert row["wrong"] == count and row["good"] == good == (count <= RARE * 400)


def test_logits_may_be_as_far_as_the_references_or_as_fp8_makes_them() -> None:
    assert judge(EXACT, [REFERENCE], changed(0, 2, 0.05))["good"] and not judge(EXACT, [REFERENCE], changed(0, 2, 0.25))["good"]
    many = EXACT[:1].expand(40, 3)
    assert judge(many, [many], many + 0.1, fp8=True)["good"] and not judge(many, [many], many + 0.1)["good"]
    assert not judge(many, [many], many + 0.2, fp8=True)["good"]
    spoiled = many + 0.01
    spoiled[0] = torch.tensor([2.4, 2.5, 0.0])
    assert judge(many, [many], spoiled, fp8=True)["wrong"] == 1 and not judge(many, [many], spoiled, fp8=True)["good"]


def test_each_other_word_comes_with_its_proof() -> None:
    assert others(EXACT, REFERENCE, EXACT) == [
        {"position": 1, "behind_reference": 0.1, "error_reference": 0.1, "behind": 0.0, "error": 0.0}
    ]


@pytest.mark.parametrize("experts", [None, "fp8_block"])
def test_the_float32_graph_vs_reference(tmp_path: Path, experts: str | None) -> None:
    """Whatever the engine keeps its experts in; whose other weights are in float32 here."""
    checkpoint = random_checkpoint.write(tmp_path / "model", {"num_hidden_layers": 2, "num_nextn_predict_layers": 0})
    arch, settings = Arch.from_dir(checkpoint), TorchEngineConfig(max_batch_size=2, max_seq_len=64)
    plugins = {"taken": ["moe_grouped_gemm"] if experts else [], "left": {}, "experts": experts, "products": []}
    weights = build.weight_table(arch, settings, plugins)
    info = build.describe(arch, settings, checkpoint) | {"plugins": plugins, "weights": weights}
    (tmp_path / "engine.json").write_text(json.dumps(info))
    write_weights(parameters(checkpoint, experts), arch, build.stored_as(weights), tmp_path / "weights.safetensors")
    tokens = torch.randint(3, arch.vocab_size, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = _eager.exact(tmp_path).step(tokens, torch.arange(20)[None], torch.tensor([[1]]))
        exact = deepseek_v3.build(arch, {name: torch.from_numpy(value) for name, value in parameters_of(checkpoint)})
        torch.testing.assert_close(logits, exact(tokens)[:, -1], rtol=1e-3, atol=1e-3)
