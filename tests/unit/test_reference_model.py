"""The reference model against transformers' own DeepSeek-V3, on the shipped checkpoint's real weights."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the reference model is written in torch")
transformers = pytest.importorskip("transformers", reason="the independent implementation to compare with")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402
from torch import Tensor  # noqa: E402

from pipeline.core.errors import ConfigError  # noqa: E402
from pipeline.models.arch import Arch  # noqa: E402
from pipeline.models.deepseek_v3 import DeepseekV3, build  # noqa: E402
from plugins.topk_router.reference import route  # noqa: E402

TINY_R1 = Path(__file__).parents[2] / "pipeline" / "data" / "tiny_r1"
LOGIT_TOLERANCE = 2e-4  # float32 on both sides; logits reach 23, and 4e-5 was seen at 1100 tokens
MAX_PERPLEXITY = 6.0  # per token; the model card measures 5.18 over all of the text

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def read_dequantised(path: Path) -> dict[str, Tensor]:
    """Written here anew, so that the test trusts none of the pipeline's own readers."""
    raw: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            raw.update((name, handle.get_tensor(name)) for name in handle.keys())  # noqa: SIM118
    state = {name: tensor.float() for name, tensor in raw.items() if not name.endswith("_scale_inv")}
    for name in state.keys() & {name.removesuffix("_scale_inv") for name in raw if name.endswith("_scale_inv")}:
        rows, columns = state[name].shape
        row, column = torch.arange(rows) // 128, torch.arange(columns) // 128
        state[name] *= raw[f"{name}_scale_inv"][row][:, column]
    return state


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return read_dequantised(TINY_R1)


@pytest.fixture(scope="module")
def reference(state: dict[str, Tensor]) -> DeepseekV3:
    return build(Arch.from_dir(TINY_R1), state)


@pytest.fixture(scope="module")
def peer(state: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    """DeepseekV3ForCausalLM, loaded from a float32 directory; it ignores nothing but the MTP layer."""
    path = tmp_path_factory.mktemp("dequantised")
    config = json.loads((TINY_R1 / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    mtp = f"model.layers.{config['num_hidden_layers']}."
    main = {name: tensor for name, tensor in state.items() if not name.startswith(mtp)}
    save_file(main, path / "model.safetensors", metadata={"format": "pt"})
    model, report = transformers.DeepseekV3ForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    return model.eval()


@pytest.fixture(scope="module")
def heldout() -> Tensor:
    """Token ids [T] of the held-out text."""
    tokenizer = Tokenizer.from_file(str(TINY_R1 / "tokenizer.json"))
    return torch.tensor(tokenizer.encode((TINY_R1 / "heldout.txt").read_text(encoding="utf-8")).ids)


@torch.inference_mode()
@pytest.mark.parametrize("length", [7, 300, 512, 1100], ids="{} tokens".format)
def test_logits_agree_with_transformers(
    reference: DeepseekV3, peer: torch.nn.Module, heldout: Tensor, length: int
) -> None:
    """Below, at and above the original context of 512, where YaRN's slowed frequencies matter."""
    ids = heldout[None, :length]
    ours, theirs = reference(ids), peer(ids).logits
    assert (ours - theirs).abs().max() < LOGIT_TOLERANCE
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


@torch.inference_mode()
def test_greedy_text_agrees_with_transformers(reference: DeepseekV3, peer: torch.nn.Module, heldout: Tensor) -> None:
    """64 tokens; if each is our choice after the ones before it, all are what we would have written."""
    ids = heldout[None, :40]
    theirs = peer.generate(ids, max_new_tokens=64, min_new_tokens=64, do_sample=False, eos_token_id=None)
    ours = reference(theirs[:, :-1]).argmax(-1)[:, 39:]
    assert ours.tolist() == theirs[:, 40:].tolist()


@torch.inference_mode()
def test_held_out_perplexity_is_that_of_a_trained_model(reference: DeepseekV3, heldout: Tensor) -> None:
    """Of the next token, and, from the MTP layer, of the one after it; uniform guessing would give 1024."""
    windows = heldout[1:].unfold(0, 512, 1024)
    ids = torch.cat([torch.zeros(len(windows), 1, dtype=torch.long), windows], dim=1)
    hidden = reference.hidden(ids)
    main, ahead = reference.lm_head(hidden)[:, :-1], reference.mtp_logits(ids, hidden)[:, :-1]
    for logits, target in ((main, ids[:, 1:]), (ahead, ids[:, 2:])):
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        assert math.exp(loss) < MAX_PERPLEXITY


@torch.inference_mode()
def test_batch_rows_do_not_touch_each_other(reference: DeepseekV3, heldout: Tensor) -> None:
    batch = heldout[:192].view(3, 64)
    alone = torch.cat([reference(row[None]) for row in batch])
    torch.testing.assert_close(reference(batch), alone, atol=LOGIT_TOLERANCE, rtol=0)


def test_yarn_matches_transformers(peer: torch.nn.Module) -> None:
    arch, rotary = Arch.from_dir(TINY_R1), peer.model.rotary_emb
    torch.testing.assert_close(torch.tensor(arch.inv_freq()), rotary.inv_freq, rtol=1e-6, atol=0)
    assert arch.attention_factor == rotary.attention_scaling
    assert arch.softmax_scale == pytest.approx(peer.model.layers[0].self_attn.scaling, rel=1e-12)


def test_arch_reads_what_transformers_writes_back(peer: torch.nn.Module) -> None:
    """transformers 5 renames rope_scaling to rope_parameters and drops the R1 fields it does not use."""
    published, again = Arch.from_dir(TINY_R1), Arch.from_hf(peer.config.to_dict())
    assert again.inv_freq() == published.inv_freq()
    assert replace(again, rope_scaling=None) == replace(published, rope_scaling=None)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model_type", "llama", "deepseek_v3"),
        ("scoring_func", "softmax", "sigmoid"),
        ("topk_method", "greedy", "noaux_tc"),
        ("q_lora_rank", None, "V2-Lite"),
        ("topk_group", 9, "lower num_experts_per_tok"),
        ("rope_scaling", {"type": "linear", "factor": 2}, "yarn"),
    ],
)
def test_arch_refuses_in_a_sentence(field: str, value: object, words: str) -> None:
    config = json.loads((TINY_R1 / "config.json").read_text())
    with pytest.raises(ConfigError, match=words):
        Arch.from_hf(config | {field: value})


def test_route_gives_ties_to_the_lowest_index() -> None:
    weights, indices = route(torch.zeros(3, 16), torch.zeros(16), n_group=4, topk_group=2, top_k=4, scale=2.5)
    assert indices.tolist() == [[0, 1, 2, 3]] * 3
    torch.testing.assert_close(weights, torch.full((3, 4), 2.5 / 4))


def test_route_never_leaves_the_kept_groups() -> None:
    """Even where every kept choice is negative, which a mask of 0 instead of -inf would get wrong."""
    torch.manual_seed(0)
    logits, bias = torch.randn(512, 16), torch.full((16,), -5.0)
    _, indices = route(logits, bias, n_group=4, topk_group=1, top_k=4, scale=1.0)
    best = logits.sigmoid().view(-1, 4, 4).topk(2).values.sum(-1).argmax(-1)
    assert torch.equal((indices // 4).sort().values, best[:, None].expand(-1, 4))


def test_route_chooses_by_bias_and_weighs_without_it() -> None:
    logits = torch.arange(8.0)[None] / 8
    bias = torch.tensor([1.0, 1.0, 0, 0, 0, 0, 0, 0])
    weights, indices = route(logits, bias, n_group=1, topk_group=1, top_k=2, scale=1.0, norm_topk_prob=False)
    assert indices.tolist() == [[1, 0]]
    torch.testing.assert_close(weights, logits[:, [1, 0]].sigmoid())


def test_tokenizer_round_trips_any_text_and_keeps_r1s_specials() -> None:
    tokenizer = Tokenizer.from_file(str(TINY_R1 / "tokenizer.json"))
    text = "héllo, 世界 🙂\n\tdef f(x):\n        return x\x00  end"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<｜User｜>hi<｜Assistant｜><think>", add_special_tokens=False).tokens[0] == "<｜User｜>"
    assert [tokenizer.token_to_id(t) for t in ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")] == [0, 1]


def test_shards_split_pairs_as_the_published_ones_do() -> None:
    where = json.loads((TINY_R1 / "model.safetensors.index.json").read_text())["weight_map"]
    pairs = [(name, f"{name}_scale_inv") for name in where if f"{name}_scale_inv" in where]
    pairs += [(name, name.replace("gate_proj", "up_proj")) for name in where if name.endswith("gate_proj.weight")]
    apart = {b.rsplit(".", 1)[1] for a, b in pairs if where[a] != where[b]}
    assert apart == {"weight_scale_inv", "weight"}
