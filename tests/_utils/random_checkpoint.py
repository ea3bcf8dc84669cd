"""A random checkpoint in R1's layout: FP8 in 128x128 blocks, several shards, awkward on purpose.

It has the shape of `tiny_r1` unless told otherwise. A weight and its scale, and a gate and its up projection, lie in
different shards, as they do in DeepSeek's own. It needs neither torch nor a trained model; its tokenizer has one
token a byte.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint.layout import parameters, place_of
from pipeline.checkpoint.writer import ShardWriter
from pipeline.formats import FORMATS
from pipeline.formats.numerics import BF16, Array
from pipeline.models.arch import Arch

__all__ = ["ARCH", "STRADDLING_SCALE", "STRADDLING_UP", "write"]

ARCH: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "initializer_range": 0.02,
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
    "num_hidden_layers": 5, "num_nextn_predict_layers": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 128,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048,
    "rope_scaling": {
        "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
    "bos_token_id": 0, "eos_token_id": 1, "use_cache": True,
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    },
}
STRADDLING_SCALE = "model.layers.0.self_attn.o_proj.weight"
"""Its scale lies in the next shard."""
STRADDLING_UP = "model.layers.1.mlp.experts.0.up_proj.weight"
"""It lies in the last shard, its gate projection in an earlier one."""
NUM_SHARDS = 4
TEXT = "The Python language reads like plain text. A loop visits each item; a function returns a value.\n"


def write(folder: Path, arch_overrides: dict[str, Any] | None = None, seed: int = 0) -> Path:
    """Fill `folder` and return it. Equal arguments give equal bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = ARCH | (arch_overrides or {})
    tensors = _tensors(Arch.from_hf(config), np.random.default_rng(seed))
    weight_map = _write_shards(folder, tensors)
    total = sum(array.nbytes for array in tensors.values())
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "do_sample": False})
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / "tokenizer.json", _tokenizer())
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048})
    (folder / "heldout.txt").write_text(TEXT * 40, encoding="utf-8")
    return folder


def _tensors(arch: Arch, rng: np.random.Generator) -> dict[str, Array]:
    """Every parameter with its scale, in the order of the layers."""
    tensors: dict[str, Array] = {}
    for name, shape in parameters(arch):
        module, _, leaf = name.rpartition(".")
        place = place_of(module, arch)
        if leaf == "e_score_correction_bias":
            tensors[name] = rng.normal(0, 0.02, shape).astype(np.float32)
        elif len(shape) == 1:
            tensors[name] = (1 + rng.normal(0, 0.05, shape)).astype(BF16)
        elif not place.linear:
            tensors[name] = rng.normal(0, 0.02, shape).astype(BF16)
        else:
            weight = rng.normal(0, shape[1] ** -0.5, shape).astype(np.float32)
            stored = FORMATS["fp8_block"].quantize(weight, amax=0.0, input_scale=1.0)
            tensors |= {f"{module}.{suffix}": array for suffix, array in stored.items()}
    return tensors


def _write_shards(folder: Path, tensors: dict[str, Array]) -> dict[str, str]:
    """Split evenly, move the two awkward tensors, and return the weight map."""
    names = list(tensors)
    shard_of = {name: i * NUM_SHARDS // len(names) for i, name in enumerate(names)}
    scale = STRADDLING_SCALE + "_scale_inv"
    for moved in (scale, STRADDLING_UP, STRADDLING_UP + "_scale_inv"):
        if moved in shard_of:
            shard_of[moved] = shard_of[scale] + 1 if moved == scale else NUM_SHARDS - 1
    files = [f"model-{i + 1:05d}-of-{NUM_SHARDS:05d}.safetensors" for i in range(NUM_SHARDS)]
    for number, file in enumerate(files):
        mine = [name for name in names if shard_of[name] == number]
        plan = [(name, _dtype(tensors[name]), tensors[name].shape) for name in mine]
        with ShardWriter(folder / file, plan) as writer:
            for name in mine:
                writer.write(name, tensors[name])
    return {name: files[number] for name, number in shard_of.items()}


def _dtype(array: Array) -> str:
    return {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}[array.dtype.name]


def _tokenizer() -> dict[str, Any]:
    """A byte-level BPE without merges: two special tokens, then one token a byte."""
    special = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]
    vocab = {token: i for i, token in enumerate([*special, *_byte_characters()])}
    added = [
        {"id": i, "content": token, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for i, token in enumerate(special)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": vocab, "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + i) for i in range(len(others))]


def _write_json(file: Path, table: dict[str, Any]) -> None:
    file.write_text(json.dumps(table, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
