"""Makes the checkpoints of other tools in tests/data/foreign, each by the tool itself, from one tiny source.

    python scripts/make_foreign_checkpoints.py source DIR                # numpy only; tests make it anew
    python scripts/make_foreign_checkpoints.py modelopt DIR              # in an environment with nvidia-modelopt
    python scripts/make_foreign_checkpoints.py llmcompressor DIR         # in one with llmcompressor

DIR/source must be there for the last two. `modelopt` writes nvidia-modelopt's own exports, and one more whose index lists
no scales, as that of NVIDIA's script for DeepSeek (quantize_to_nvfp4.py) does. `llmcompressor` writes model_free_ptq's
NVFP4A16, which gives most gate and up projections different global scales. MADE.json says which versions wrote a folder.
"""

from __future__ import annotations

import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "vocab_size": 64, "hidden_size": 128,
    "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 64,
    "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "use_cache": True,
}  # fmt: skip
SCALES = ("_scale", "_scale_2", "input_scale")
MODELOPT = {"modelopt_nvfp4": "NVFP4_DEFAULT_CFG", "modelopt_fp8_pb_wo": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"}


def write_source(folder: Path, config: dict[str, Any] = CONFIG) -> Path:
    """A random checkpoint in BF16; equal bytes every time."""
    import numpy as np

    from pipeline.checkpoint.layout import parameters
    from pipeline.checkpoint.writer import ShardWriter
    from pipeline.formats.numerics import BF16
    from pipeline.models.arch import Arch

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    rng = np.random.default_rng(0)
    shapes = dict(parameters(Arch.from_hf(config)))
    with ShardWriter(folder / "model.safetensors", [(n, _dtype(n), s) for n, s in shapes.items()]) as writer:
        for name, shape in shapes.items():
            values = rng.standard_t(5, shape) * shape[-1] ** -0.5 if len(shape) == 2 else 1 + rng.normal(0, 0.05, shape)
            writer.write(name, values.astype(np.float32) if _dtype(name) == "F32" else values.astype(np.float32).astype(BF16))
    return folder


def _dtype(name: str) -> str:
    return "F32" if name.endswith("e_score_correction_bias") else "BF16"


def modelopt(source: Path, name: str, out: Path) -> None:
    """Calibrate on every token once, quantise, and export."""
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokens = torch.arange(CONFIG["vocab_size"]).reshape(2, -1)
    mtq.quantize(model, getattr(mtq, MODELOPT[name]), forward_loop=lambda calibrated: calibrated(tokens))
    export_hf_checkpoint(model, export_dir=out)
    _finish(out, "nvidia-modelopt", "transformers", "torch")


def without_scale_keys(exported: Path, out: Path) -> None:
    """Two shards and an index as quantize_to_nvfp4.py writes it: only what was there before, and no metadata."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    out.mkdir(parents=True)
    with safe_open(exported / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    weight_map = {}
    for number, layer in enumerate(("model.layers.0.", "")):
        mine = {name: tensors.pop(name) for name in list(tensors) if name.startswith(layer)}
        shard = f"model-{number + 1:05d}-of-00002.safetensors"
        save_file(mine, out / shard, metadata={"format": "pt"})
        weight_map |= {name: shard for name in mine if not name.endswith(SCALES)}
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))
    for file in ("config.json", "hf_quant_config.json", "MADE.json"):
        shutil.copyfile(exported / file, out / file)


def llmcompressor(source: Path, out: Path) -> None:
    """model_free_ptq, as its documentation calls it."""
    from llmcompressor import model_free_ptq

    model_free_ptq(
        model_stub=str(source), save_directory=str(out), scheme="NVFP4A16", ignore=["re:.*gate$", "lm_head", "model.embed_tokens"],
        max_workers=1, device="cpu",
    )  # fmt: skip
    _finish(out, "llmcompressor", "compressed-tensors", "torch")


def _finish(out: Path, *packages: str) -> None:
    """Keep what a test needs, and say who made it."""
    kept = {".safetensors", ".json"}
    for file in list(out.iterdir()):
        if file.suffix not in kept or file.name in ("generation_config.json", "recipe.yaml"):
            file.unlink()
    made = {"by": {name: version(name) for name in packages}, "script": "scripts/make_foreign_checkpoints.py"}
    (out / "MADE.json").write_text(json.dumps(made, indent=1) + "\n")


def main(tool: str, folder: Path) -> None:
    """One subcommand; what is there already is made anew."""
    source = folder / "source"
    if tool == "source":
        write_source(source)
    elif tool == "llmcompressor":
        shutil.rmtree(folder / "llmcompressor_nvfp4a16", ignore_errors=True)
        llmcompressor(source, folder / "llmcompressor_nvfp4a16")
    elif tool == "modelopt":
        for name in (*MODELOPT, "deepseek_script_index"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in MODELOPT:
            modelopt(source, name, folder / name)
        without_scale_keys(folder / "modelopt_nvfp4", folder / "deepseek_script_index")
    else:
        raise SystemExit(f"{tool} is not known here: source, modelopt or llmcompressor.")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]))
