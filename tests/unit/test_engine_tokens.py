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
from scripts._tokens import judge, ties  # noqa: E402
from tests._utils import random_checkpoint  # noqa: E402

EXACT = torch.tensor([[4.0, 1.0, 0.0], [2.0, 1.9, 0.0], [0.0, 3.0, 2.0]])
REFERENCE = EXACT + torch.tensor([[0.0, 0.0, 0.1], [-0.1, 0.1, 0.0], [0.0, 0.1, 0.0]])
"""Off by 0.1; its second word is another one than float32's."""


def changed(position: int, word: int, by: float) -> Tensor:
    found = REFERENCE.clone()
    found[position, word] += by
    return found


def test_words_count_where_float32_is_surer_than_the_reference_errs() -> None:
    row = judge(EXACT, REFERENCE, REFERENCE)
    assert row["good"] and (row["decided"], row["decided_others"], row["allowed"]) == (2, 0, 0.1)
    assert (row["of"], row["equal_tokens"], row["float32_tokens"]) == (3, 3, 2)
    tie = judge(EXACT, REFERENCE, EXACT)  # other than the reference's at a tie, and no worse
    assert tie["good"] and (tie["equal_tokens"], tie["error"]) == (2, 0.0)
    assert not judge(EXACT, REFERENCE, changed(2, 2, 1.2))["good"]  # another word at a decided position
    assert judge(EXACT, REFERENCE, changed(2, 2, 1.2))["decided_others"] == 1
    assert not judge(EXACT, REFERENCE, changed(0, 2, torch.nan))["good"]


def test_logits_may_be_as_far_as_the_references() -> None:
    near, far = changed(0, 2, 0.05), changed(0, 2, 0.25)
    assert judge(EXACT, REFERENCE, near)["error"] <= 1.25 * judge(EXACT, REFERENCE, near)["error_of_reference"]
    assert judge(EXACT, REFERENCE, near)["good"] and not judge(EXACT, REFERENCE, far)["good"]
    many = EXACT[:1].expand(40, 3)
    rounded, spoiled = many + 0.1, many.clone()
    spoiled[:3] = torch.tensor([0.0, 0.0, 9.0])
    assert judge(many, many, rounded, fp8=True)["good"] and not judge(many, many, rounded)["good"]
    assert not judge(many, many + 9.0, spoiled, fp8=True)["good"]


def test_each_other_word_comes_with_its_proof() -> None:
    assert ties(EXACT, REFERENCE, EXACT) == [
        {"position": 1, "behind_reference": 0.1, "behind": 0.0, "error_of_reference": 0.1, "error": 0.0}
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
