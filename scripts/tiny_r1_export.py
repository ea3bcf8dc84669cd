"""Write trained weights the way DeepSeek ships R1: FP8 blocks, shards, index, configs, model card.

Every projection inside a layer becomes E4M3 with one float32 `weight_scale_inv` per 128x128 block, the
block's largest magnitude over 448. Embeddings, heads, norms, the router and the MTP layer's `eh_proj` are
BF16, the router's bias float32. Shards break where the published ones sometimes do, between a weight and
its scales, and between an expert's gate and up projections, so that no reader may assume otherwise.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from pipeline.models.arch import Arch
from pipeline.models.deepseek_v3 import DeepseekV3, build
from scripts.tiny_r1_corpus import ASSISTANT, BOS, EOS, PAD, USER

__all__ = ["export"]

BLOCK = 128
E4M3_MAX = 448.0
NUM_SHARDS = 4
KEPT_BF16 = ("embed_tokens.weight", "norm.weight", "head.weight", ".gate.weight", "eh_proj.weight")
CHAT_TEMPLATE = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{{ bos_token }}"
    "{%- for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' %}"
    "{{ '<｜Assistant｜>' + message['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}"
    "{%- endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)

PROMPTS = (
    "An expression statement is",
    "import os\n\ndef ",
    f"{USER}What is `copyfile` in `shutil`?{ASSISTANT}<think>\n",
)
CARD = Path(__file__).with_name("tiny_r1_card.md")


def blocks(weight: Tensor) -> Tensor:
    """[out, in] -> [out/128, 128, in/128, 128], the last blocks filled up with zeros."""
    rows, columns = weight.shape
    padded = F.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    return padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> the same in E4M3, and the scales [ceil(out/128), ceil(in/128)] that undo it."""
    tiled = blocks(weight)
    scale_inv = tiled.abs().amax(dim=(1, 3)) / E4M3_MAX
    scaled = tiled / scale_inv.clamp(min=1e-30)[:, None, :, None]
    rows, columns = weight.shape
    flat = scaled.flatten(2).flatten(0, 1)[:rows, :columns]
    return flat.to(torch.float8_e4m3fn).contiguous(), scale_inv


def dequantise(weight: Tensor, scale_inv: Tensor) -> Tensor:
    """The float32 weight that an FP8 one and its scales stand for."""
    wide = scale_inv.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * wide[: weight.shape[0], : weight.shape[1]]


def shipped(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Float32 training weights -> what the checkpoint stores, each weight followed by its scales."""
    out: dict[str, Tensor] = {}
    for name, weight in state.items():
        if name.endswith("e_score_correction_bias"):
            out[name] = weight - weight.min()  # a shift changes no choice, and keeps every biased score > 0
        elif name.endswith(KEPT_BF16):
            out[name] = weight.bfloat16()
        else:
            out[name], out[f"{name}_scale_inv"] = quantise(weight)
    return out


def shards(tensors: dict[str, Tensor]) -> list[list[str]]:
    """Names per shard, of about equal bytes: the first break splits a weight from its scales, the second
    an expert's gate from its up projection."""
    names = list(tensors)
    ends = torch.tensor([t.numel() * t.element_size() for t in tensors.values()]).cumsum(0).tolist()
    cuts = [0]
    for number, suffix in enumerate(("q_b_proj.weight_scale_inv", "up_proj.weight", ""), start=1):
        cut = next(i for i, end in enumerate(ends) if end >= ends[-1] * number / NUM_SHARDS)
        cuts.append(next(i for i in range(cut, len(names)) if names[i].endswith(suffix)))
    return [names[a:b] for a, b in zip(cuts, [*cuts[1:], len(names)], strict=True)]


def write_shards(tensors: dict[str, Tensor], out: Path) -> None:
    """The safetensors files and their index."""
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards(tensors), start=1):
        file = f"model-{number:05d}-of-{NUM_SHARDS:05d}.safetensors"
        save_file({name: tensors[name] for name in names}, out / file, metadata={"format": "pt"})
        (out / file).chmod(0o644)  # safetensors writes for the owner alone
        weight_map |= dict.fromkeys(names, file)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    write_json(out / "model.safetensors.index.json",
               {"metadata": {"total_size": total}, "weight_map": weight_map})  # fmt: skip


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """All tensors of a sharded checkpoint, dequantised to float32."""
    raw: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            raw |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    scales = {name.removesuffix("_scale_inv"): raw.pop(name) for name in list(raw) if name.endswith("_scale_inv")}
    return {k: dequantise(v, scales[k]) if k in scales else v.float() for k, v in raw.items()}


def write_json(path: Path, value: object) -> None:
    """Readable JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_configs(arch: Arch, out: Path) -> None:
    """`config.json`, `generation_config.json` and `tokenizer_config.json`, with R1's fields."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "ep_size": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "num_key_value_heads": arch.num_attention_heads,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
        },
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.46.3",
        "use_cache": True,
    }
    write_json(out / "config.json", dict(sorted((config | asdict(arch)).items())))
    ids = {"bos_token_id": arch.bos_token_id, "eos_token_id": arch.eos_token_id}
    write_json(out / "generation_config.json", {"_from_model_config": True, **ids, "do_sample": True,
                                                "temperature": 0.6, "top_p": 0.95})  # fmt: skip
    special = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    write_json(out / "tokenizer_config.json", {"add_bos_token": True, "add_eos_token": False, **special,
               "clean_up_tokenization_spaces": False, "model_max_length": arch.max_position_embeddings,
               "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE})  # fmt: skip


@torch.no_grad()
def perplexity(model: DeepseekV3, ids: list[int], window: int = 512) -> tuple[float, float, int]:
    """Of the next token, of MTP's, and how many next tokens; windows do not overlap and begin with BOS."""
    rows = torch.tensor(ids[: len(ids) // window * window]).view(-1, window)
    rows = F.pad(rows, (1, 0), value=model.arch.bos_token_id)
    sums = torch.zeros(2)
    for chunk in rows.split(8):
        hidden = model.hidden(chunk)
        main, ahead = model.lm_head(hidden)[:, :-1], model.mtp_logits(chunk, hidden)[:, :-1]
        sums[0] += F.cross_entropy(main.flatten(0, 1), chunk[:, 1:].flatten(), reduction="sum")
        sums[1] += F.cross_entropy(ahead.flatten(0, 1), chunk[:, 2:].flatten(), reduction="sum")
    count = rows.shape[0] * window
    return math.exp(sums[0] / count), math.exp(sums[1] / (count - len(rows))), count


@torch.no_grad()
def sample(model: DeepseekV3, tokenizer: Tokenizer, prompt: str, num_tokens: int = 120) -> str:
    """Greedy but for a temperature of 0.6, seed 0."""
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_tokens):
        share = (model(ids)[0, -1] / 0.6).softmax(-1)
        ids = torch.cat([ids, torch.multinomial(share, 1, generator=generator)[None]], dim=1)
        if ids[0, -1] == model.arch.eos_token_id:
            break
    return tokenizer.decode(ids[0].tolist(), skip_special_tokens=False).removeprefix(BOS)


def card(work: Path, before: tuple, after: tuple, model: DeepseekV3, tokenizer: Tokenizer) -> str:
    """The model card, every number in it read or measured."""
    corpus = json.loads((work / "corpus.json").read_text())
    log = json.loads((work / "train.json").read_text())
    best = min(log, key=lambda entry: entry["heldout"])
    samples = "\n\n".join(f"```\n{sample(model, tokenizer, prompt)}\n```" for prompt in PROMPTS)
    return CARD.read_text(encoding="utf-8").format(
        **corpus, **{k: best[k] for k in ("tokens", "seconds", "load")}, arch=model.arch, samples=samples,
        before=before, after=after, loss=best["heldout"], loss_mtp=best["heldout_mtp"],
        parameters=sum(w.numel() for w in model.parameters()) / 1e6,
    )  # fmt: skip


def export(arch: Arch, work: Path, out: Path) -> None:
    """Write the checkpoint in `out` from `weights.safetensors` and the corpus step's files in `work`."""
    out.mkdir(parents=True, exist_ok=True)
    names = DeepseekV3(arch).state_dict().keys()  # the order of the layers
    trained = load_file(work / "weights.safetensors")
    state = {name: trained[name] for name in names}
    write_shards(shipped(state), out)
    write_configs(arch, out)
    for file in ("tokenizer.json", "heldout.txt"):
        shutil.copy(work / file, out / file)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    ids = tokenizer.encode((out / "heldout.txt").read_text(encoding="utf-8"), add_special_tokens=False).ids
    before = perplexity(build(arch, state), ids)
    model = build(arch, read_checkpoint(out))
    after = perplexity(model, ids)
    print(f"held-out perplexity over {before[2]} tokens: float32 {before[:2]}, FP8 blocks {after[:2]}")
    (out / "README.md").write_text(card(work, before, after, model, tokenizer), encoding="utf-8")
