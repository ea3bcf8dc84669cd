"""The engine's graph, eager and in float32, against the reference model's whole-sequence forward pass."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the engine's graph is written in torch")

from torch import Tensor  # noqa: E402

from pipeline.checkpoint import dequantized  # noqa: E402
from pipeline.engines.torch.graph import FORMS, Decoder, Form, Moe  # noqa: E402
from pipeline.engines.torch.weights import write_weights  # noqa: E402
from pipeline.models import deepseek_v3  # noqa: E402
from pipeline.models.arch import Arch  # noqa: E402

TINY_R1 = Path(__file__).parents[2] / "pipeline" / "data" / "tiny_r1"
ARCH = Arch.from_dir(TINY_R1)
TOLERANCE = 3e-4
"""Largest difference of a logit in float32; logits reach 23, and sums are taken in another order."""
PAGE, PAGES = 32, 40
LENGTHS = (1, 255, 256, 257, 700)

Step = Callable[..., Tensor]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    with torch.device("meta"):
        state = Decoder(ARCH, "absorbed", PAGE, torch.float32).state_dict()
    path = tmp_path_factory.mktemp("weights") / "weights.safetensors"
    write_weights(dequantized(TINY_R1), ARCH, {name: ("F32", tuple(value.shape)) for name, value in state.items()}, path)
    return load_file(path)


@pytest.fixture(scope="module")
def decoders(weights: dict[str, Tensor]) -> dict[Form, Decoder]:
    found = {}
    for form in FORMS:
        with torch.device("meta"):
            found[form] = Decoder(ARCH, form, PAGE, torch.float32)
        found[form].load_state_dict(weights, strict=True, assign=True)
    return found


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(3, ARCH.vocab_size, (1, max(LENGTHS)), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def expected(ids: Tensor) -> Tensor:
    """Reference logits [T, V] of every position."""
    state = {name: torch.from_numpy(value) for name, value in dequantized(TINY_R1)}
    with torch.inference_mode():
        return deepseek_v3.build(ARCH, state)(ids)[0]


def caches() -> list[Tensor]:
    return [torch.zeros(PAGES, PAGE, ARCH.latent_dim) for _ in range(ARCH.num_hidden_layers)]


def table(length: int, first: int = 1) -> Tensor:
    """Pages in falling order, so that a graph that ignores the table fails."""
    return torch.arange(first, first + -(-length // PAGE)).flip(0)[None]


@torch.inference_mode()
def run(decoder: Decoder, ids: Tensor, start: int, end: int, cache: list[Tensor]) -> Tensor:
    pages = table(ids.shape[1])
    return decoder(ids[:, start:end], torch.arange(start, end)[None], pages, cache)[0]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("form", FORMS)
def test_one_shot_equals_the_reference(decoders, ids, expected, form: Form, length: int) -> None:
    found = run(decoders[form], ids[:, :length], 0, length, caches())
    assert (found - expected[length - 1]).abs().max() < TOLERANCE


def test_decode_step_by_step_equals_the_reference(decoders, ids, expected) -> None:
    cache = caches()
    found = torch.stack([run(decoders["absorbed"], ids, i, i + 1, cache) for i in range(70)])
    assert (found - expected[:70]).abs().max() < TOLERANCE


@pytest.mark.parametrize("cuts", [(0, 256, 512, 700), (0, 300, 301, 700), (0, 1, 699, 700)], ids=str)
@pytest.mark.parametrize("first, then", [("absorbed", "expanded"), ("expanded", "absorbed"), ("expanded", "expanded")])
def test_chunks_in_either_form_equal_one_shot(decoders, ids, expected, first: Form, then: Form, cuts) -> None:
    cache = caches()
    for number, (start, end) in enumerate(pairwise(cuts)):
        found = run(decoders[first if number == 0 else then], ids, start, end, cache)
        assert (found - expected[end - 1]).abs().max() < TOLERANCE


@torch.inference_mode()
def test_rows_padded_on_the_left_equal_rows_alone(decoders, ids, expected) -> None:
    lengths, width = (1, 37, 64, 90), 90
    tokens, positions = torch.zeros(4, width, dtype=torch.long), torch.full((4, width), -1)
    pages = torch.zeros(4, 3, dtype=torch.long)
    for row, length in enumerate(lengths):
        tokens[row, width - length :], positions[row, width - length :] = ids[0, :length], torch.arange(length)
        needed = table(length, 1 + 3 * row)
        pages[row, : needed.shape[1]] = needed
    cache = caches()
    found = decoders["absorbed"](tokens, positions, pages, cache)
    assert (found - expected[[length - 1 for length in lengths]]).abs().max() < TOLERANCE
    used = set(pages.flatten().tolist())
    untouched = [page for page in range(PAGES) if page not in used]
    assert all((layer[untouched] == 0).all() for layer in cache)
    assert (cache[0][int(pages[0, 0]), 1:] == 0).all(), "padding was written into a sequence's page"


@torch.inference_mode()
def test_padding_reaches_the_expanded_form_too(decoders, ids, expected) -> None:
    tokens = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids[:, :60]], 1)
    positions = torch.cat([torch.full((1, 5), -1), torch.arange(60)[None]], 1)
    found = decoders["expanded"](tokens, positions, table(60), caches())[0]
    assert (found - expected[59]).abs().max() < TOLERANCE


@torch.inference_mode()
def test_what_other_sequences_left_in_a_page_does_not_show(decoders, ids) -> None:
    clean, dirty = caches(), [layer.normal_(generator=torch.Generator().manual_seed(2)) * 100 for layer in caches()]
    for form in FORMS:
        outputs = [run(decoders[form], ids[:, :40], 0, 40, cache) for cache in (clean, dirty)]
        assert torch.equal(*outputs)


@torch.inference_mode()
def test_experts_on_ties_equal_the_reference() -> None:
    """All experts score alike, so only the rule for ties decides."""
    reference = deepseek_v3.Moe(ARCH)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(parameter.numel()))
    for expert, module in enumerate(reference.experts):
        module.down_proj.weight += expert * 0.01
    reference.gate.weight.zero_()
    moe = Moe(ARCH, torch.float32)
    moe.router.weight.zero_()
    moe.router.bias.zero_()
    moe.gate_up.weight.copy_(torch.stack([torch.cat([e.gate_proj.weight, e.up_proj.weight]) for e in reference.experts]))
    moe.down.weight.copy_(torch.stack([e.down_proj.weight for e in reference.experts]))
    shared = reference.shared_experts
    moe.shared.gate_up.weight.copy_(torch.cat([shared.gate_proj.weight, shared.up_proj.weight]))
    moe.shared.down.weight.copy_(shared.down_proj.weight)
    x = torch.randn(5, ARCH.hidden_size, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(moe(x), reference(x[None])[0], rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_experts_equal_the_plain_sum_at_many_tokens(weights) -> None:
    """512 tokens over 16 experts, by the definition instead of by grouped products."""
    moe = Moe(ARCH, torch.float32)
    prefix = "layers.2.mlp."
    moe.load_state_dict({name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)})
    x = torch.randn(512, ARCH.hidden_size, generator=torch.Generator().manual_seed(4))
    share, chosen = moe.router(x)
    total = moe.shared(x)
    for expert in range(ARCH.n_routed_experts):
        gate, up = (x @ moe.gate_up.weight[expert].T).chunk(2, -1)
        mine = torch.where(chosen == expert, share, 0).sum(1, keepdim=True)
        total = total + mine * ((torch.nn.functional.silu(gate) * up) @ moe.down.weight[expert].T)
    torch.testing.assert_close(moe(x), total, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_bfloat16_stays_near_float32(decoders, weights, ids, expected) -> None:
    with torch.device("meta"):
        decoder = Decoder(ARCH, "expanded", PAGE, torch.bfloat16)
    kinds = {name: value.dtype for name, value in decoder.state_dict().items()}
    decoder.load_state_dict({name: value.to(kinds[name]) for name, value in weights.items()}, assign=True)
    cache = [layer.bfloat16() for layer in caches()]
    found = decoder(ids[:, :300], torch.arange(300)[None], table(300), cache)[0]
    assert found.dtype == torch.float32
    assert (found - expected[299]).norm() / expected[299].norm() < 0.1
    assert kinds["layers.1.mlp.router.weight"] == kinds["layers.1.mlp.router.bias"] == torch.float32
