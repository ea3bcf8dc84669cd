"""Ways to break a checkpoint: for each invariant of `pipeline.verify.invariants` one that breaks it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint import ShardWriter
from pipeline.checkpoint.reader import read_header, read_tensor
from pipeline.checkpoint.source import INDEX
from pipeline.formats.numerics import BF16, E4M3
from pipeline.inspect.contents import Contents

__all__ = ["CASES", "LAYER", "UP", "codes", "in_modelopt", "put", "scalar"]

Damage = Callable[[Path], None]
Value = tuple[str, np.ndarray] | None
LAYER, HEAD = "model.layers.1.", "lm_head.weight"
UP = f"{LAYER}mlp.experts.2.up_proj"
DOWN = f"{LAYER}mlp.experts.2.down_proj"
ROUTER = f"{LAYER}mlp.gate"
NVFP4_SCALES = ("weight_scale", "weight_scale_2", "input_scale")
Q_A, KV_B = f"{LAYER}self_attn.q_a_proj", f"{LAYER}self_attn.kv_b_proj"
K_SCALE, V_SCALE = f"{LAYER}self_attn.k_scale", f"{LAYER}self_attn.v_scale"


def scalar(value: float) -> Value:
    return "F32", np.array(value, np.float32)


def fp8(shape: tuple[int, ...]) -> Value:
    return "F8_E4M3", np.ones(shape, E4M3)


def put(changes: dict[str, Value]) -> Damage:
    """Replace, add (to the first shard) or, with None, remove tensors; the index follows."""

    def damage(folder: Path) -> None:
        table = json.loads((folder / INDEX).read_text())
        files = table["weight_map"]
        homes = {name: files.get(name, min(files.values())) for name in changes}
        for file in set(homes.values()):
            rewrite(folder / file, {name: changes[name] for name, home in homes.items() if home == file})
        for name, value in changes.items():
            files.pop(name, None)
            if value is not None:
                files[name] = homes[name]
        (folder / INDEX).write_text(json.dumps(table))

    return damage


def rewrite(file: Path, changes: dict[str, Value]) -> None:
    tensors: dict[str, Value] = {name: (info.dtype, read_tensor(info).copy()) for name, info in read_header(file).items()}
    kept = {name: value for name, value in (tensors | changes).items() if value is not None}
    with ShardWriter(file, [(name, dtype, array.shape) for name, (dtype, array) in kept.items()]) as writer:
        for name, (_, array) in kept.items():
            writer.write(name, array)


def scaled(leaf: str, change: Callable[[np.ndarray], np.ndarray], dtype: str = "F32", module: str = UP) -> Damage:
    """Change one scale's values."""

    def damage(folder: Path) -> None:
        array = read_tensor(Contents.open(folder).tensors[f"{module}.{leaf}"]).copy()
        put({f"{module}.{leaf}": (dtype, change(array))})(folder)

    return damage


def codes(value: int, count: int = 3) -> Damage:
    """Set the first block scales of an expert to one E4M3 code."""

    def change(array: np.ndarray) -> np.ndarray:
        array.view(np.uint8).reshape(-1)[:count] = value
        return array

    return scaled("weight_scale", change, "F8_E4M3")


def all_of(leaf: str, change: Callable[[int, float], Value]) -> Damage:
    """Change a scalar of every module that has it."""

    def damage(folder: Path) -> None:
        scalars = Contents.open(folder).scalars
        names = [name for name in scalars if name.endswith(f".{leaf}")]
        put({name: change(number, scalars[name]) for number, name in enumerate(names)})(folder)

    return damage


def edit(file: str, change: Callable[[Any], object]) -> Damage:
    def damage(folder: Path) -> None:
        table = json.loads((folder / file).read_text())
        change(table)
        (folder / file).write_text(json.dumps(table))

    return damage


def in_config(**values: Any) -> Damage:
    return edit("config.json", lambda table: table.update(values))


def in_modelopt(change: Callable[[dict[str, Any]], object]) -> Damage:
    return edit("hf_quant_config.json", lambda table: change(table["quantization"]))


def write(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content) and None


def remove(pattern: str) -> Damage:
    return lambda folder: [file.unlink() for file in folder.glob(pattern)] and None


def first_shard(change: Callable[[Path], object]) -> Damage:
    return lambda folder: change(min(folder.glob("*.safetensors"))) and None


def share_bytes(file: Path) -> None:
    """Two tensors of one size get the same bytes."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    size = {name: header[name]["data_offsets"][1] - header[name]["data_offsets"][0] for name in names}
    one, two = next((a, b) for a in names for b in names if a < b and size[a] == size[b])
    header[two]["data_offsets"] = header[one]["data_offsets"]
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def add_copy(folder: Path) -> None:
    """The final norm also in the first shard."""
    norm = Contents.open(folder).tensors["model.norm.weight"]
    rewrite(min(folder.glob("*.safetensors")), {norm.name: (norm.dtype, read_tensor(norm).copy())})


def drop_layer(folder: Path) -> None:
    names = [name for name in Contents.open(folder).tensors if name.startswith("model.layers.2.")]
    put(dict.fromkeys(names))(folder)


def both(change: Callable[[dict[str, Any]], object]) -> Damage:
    """The same mistake in both configs."""

    def damage(folder: Path) -> None:
        edit("config.json", lambda table: change(table["quantization_config"]))(folder)
        in_modelopt(change)(folder)

    return damage


def excludes(table: dict[str, Any]) -> list[str]:
    """The list of either config."""
    return table["ignore"] if "ignore" in table else table["exclude_modules"]


def floats(*shape: int, dtype: str = "F32") -> Value:
    return dtype, np.ones(shape, BF16 if dtype == "BF16" else np.float32)


CASES: dict[str, tuple[str, Damage | None, str, str]] = {
    # rule: base, damage (None: the base is so from the start), tensor, words of the fact
    "no-weights": ("blocks", remove("*.safetensors*"), "", "has neither"),
    "unreadable-file": ("blocks", first_shard(lambda file: file.write_bytes(b"cut")), "", "was cut off"),
    "file-size": ("blocks", first_shard(lambda file: file.write_bytes(file.read_bytes() + b"spare")), "", "belong to no tensor"),
    "byte-ranges": ("blocks", first_shard(share_bytes), "model.", "shares bytes"),
    "unreadable-index": ("blocks", write(INDEX, b"{"), "", "cannot be read as JSON"),
    "no-index": ("blocks", remove(INDEX), "", "has neither"),
    "name-in-two-shards": ("blocks", add_copy, "model.norm.weight", "in both"),
    "tensor-without-index": (
        "fours",
        edit(INDEX, lambda table: table["weight_map"].pop(f"{UP}.weight_scale")),
        f"{UP}.weight_scale",
        "places nowhere",
    ),
    "index-without-tensor": (
        "blocks",
        edit(INDEX, lambda table: table["weight_map"].update(ghost="model-00001-of-00004.safetensors")),
        "ghost",
        "does not hold it",
    ),
    "no-config": ("blocks", remove("config.json"), "", "has no config.json"),
    "unreadable-config": ("blocks", write("config.json", b"["), "", "cannot be read as JSON"),
    "file-without-index": (
        "blocks",
        lambda folder: shutil.copy(min(folder.glob("*.safetensors")), folder / "old.safetensors") and None,
        "",
        "old.safetensors lies beside",
    ),
    "pickle": ("blocks", write("pytorch_model.bin", b"cos\nabort\n(tR."), "", "pytorch_model.bin is a pickle"),
    "leftover": ("blocks", write("model-00005.safetensors.incomplete", b"1"), "", "left by a download"),
    "index-size": ("blocks", edit(INDEX, lambda table: table["metadata"].update(total_size=1)), "", "gives total_size 1"),
    "orphan-scale": ("blocks", put({f"{UP}.weight": None}), f"{UP}.weight_scale_inv", "no weight beside it"),
    "missing-scale": ("blocks", put({f"{UP}.weight_scale_inv": None}), f"{UP}.weight", "F8_E4M3 without a scale"),
    "unknown-format": (
        "blocks",
        put({f"{UP}.weight": ("U8", np.ones((128, 128), np.uint8))}),
        f"{UP}.weight",
        "a format that is not known",
    ),
    "shape-of-a-scale": ("blocks", put({f"{UP}.weight_scale_inv": floats(2, 2)}), f"{UP}.weight_scale_inv", "needs [1, 1]"),
    "rank-of-a-scale": (
        "blocks",
        put({f"{UP}.weight_scale_inv": None, f"{UP}.weight_scale": floats(1, 1, 1, 1)}),
        f"{UP}.weight_scale",
        "has 4 dimensions",
    ),
    "rounded-scale": (
        "blocks",
        put({f"{UP}.weight_scale_inv": None, f"{UP}.weight_scale": floats(1, 1, dtype="BF16")}),
        f"{UP}.weight_scale",
        "is BF16 beside FP8 codes",
    ),
    "width": (
        "fours",
        put({f"{UP}.weight": ("U8", np.ones((128, 60), np.uint8))}),
        f"{UP}.weight",
        "[128, 120], and 120 is no multiple of 16",
    ),
    "plain-width": (
        "fours",
        put({f"{UP}.weight": floats(128, 120, dtype="BF16"), **dict.fromkeys(f"{UP}.{leaf}" for leaf in NVFP4_SCALES)}),
        f"{UP}.weight",
        "120 is no multiple of 16",
    ),
    "partial-block": ("blocks", None, f"{Q_A}.weight", "the last block of 64 covers 64"),
    "unusable-scale": ("fours", put({f"{UP}.weight_scale_2": scalar(0)}), f"{UP}.weight_scale_2", "is 0"),
    "nan-block-scale": ("fours", codes(0xFF), f"{UP}.weight_scale", "has 3 of 1,024 values that are NaN"),
    "negative-block-scale": ("fours", codes(0xB8), f"{UP}.weight_scale", "has 3 of 1,024 values below 0"),
    "zero-block-scale": ("fours", codes(0), f"{UP}.weight_scale", "has 3 of 1,024 values that are 0"),
    "saturated-block-scale": ("fours", codes(0x7E, 40), f"{UP}.weight_scale", "of 1,024 block scales at 448"),
    "missing-input-scale": (
        "fours",
        put({f"{UP}.input_scale": None}),
        f"{UP}.input_scale",
        "has no input_scale, other routed_experts",
    ),
    "w4a4-without-input-scale": (
        "fours",
        all_of("input_scale", lambda number, value: None),
        f"{UP}.input_scale",
        "NVFP4 (W4A4) is declared",
    ),
    "rounded-global-scale": (
        "fours",
        all_of("weight_scale_2", lambda number, value: scalar(2.0 ** (-10 - number % 3))),
        "model.",
        "are BF16 numbers",
    ),
    "formats-of-a-pair": (
        "blocks",
        put({f"{Q_A}.weight": floats(64, 128, dtype="BF16"), f"{Q_A}.weight_scale_inv": None}),
        f"{LAYER}self_attn.kv_a_proj_with_mqa",
        f"its partner {Q_A} bf16",
    ),
    "scales-of-a-pair": (
        "fours",
        scaled("weight_scale_2", lambda array: array * np.float32(1.19)),
        f"{LAYER}mlp.experts.2.gate_proj.weight_scale_2",
        "off by a factor of 1.19",
    ),
    "formats-of-experts": (
        "blocks",
        put({f"{DOWN}.weight": floats(128, 128, dtype="BF16"), f"{DOWN}.weight_scale_inv": None}),
        DOWN,
        "3 in fp8_block, 1 in bf16",
    ),
    "kv-scales-differ": ("fours", put({K_SCALE: scalar(0.5), V_SCALE: scalar(1)}), K_SCALE, "k_scale 0.5 and v_scale 1"),
    "kv-scale-alone": ("fours", put({K_SCALE: scalar(0.5)}), K_SCALE, "has k_scale alone"),
    "kv-scale-names": ("fours", put({f"{LAYER}self_attn.k_proj.k_scale": scalar(0.5)}), f"{LAYER}self_attn.k_proj.k_scale", "MLA"),
    "kv-scale-undeclared": (
        "blocks",
        put({K_SCALE: scalar(0.5), V_SCALE: scalar(0.5)}),
        K_SCALE,
        "no config declares an FP8 KV cache",
    ),
    "kv-declared-without-scale": ("fours", None, "", "no k_scale or v_scale is stored"),
    "configs-disagree-on-algorithm": (
        "fours",
        in_config(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]}),
        "",
        "config.json says algorithm FP8_BLOCK_SCALES, hf_quant_config.json NVFP4",
    ),
    "configs-disagree-on-kv-cache": (
        "fours",
        in_modelopt(lambda table: table.update(kv_cache_quant_algo=None)),
        "",
        "says KV cache FP8",
    ),
    "configs-disagree-on-excludes": (
        "fours",
        in_modelopt(lambda table: table["exclude_modules"].append("lm_head*")),
        "lm_head*",
        "hf_quant_config.json excludes lm_head*, config.json does not",
    ),
    "not-declared": ("blocks", in_config(quantization_config=None), UP, "but neither config says so"),
    "declared-otherwise": ("fours", in_modelopt(lambda table: table.update(quant_algo="FP8")), "", "says FP8, the tensors show"),
    "beside-the-algorithm": (
        "fours",
        put({f"{Q_A}.weight": fp8((64, 128)), f"{Q_A}.weight_scale_inv": floats(1, 1)}),
        Q_A,
        "is fp8_block, but config.json says NVFP4",
    ),
    "pattern-without-a-module": (
        "fours",
        both(lambda table: excludes(table).append("model.layers.61*")),
        "model.layers.61*",
        "matches no module",
    ),
    "excluded-but-quantised": (
        "fours",
        both(lambda table: excludes(table).append(UP)),
        UP,
        "is nvfp4, but config.json excludes it",
    ),
    "plain-but-not-excluded": (
        "fours",
        both(lambda table: excludes(table).remove("lm_head")),
        "lm_head",
        "no pattern of config.json excludes it",
    ),
    "router-not-excluded": (
        "fours",
        in_modelopt(lambda table: table.update(exclude_modules=["lm_head"])),
        ROUTER,
        "a router, is bf16",
    ),
    "declared-layer-not-stored": (
        "mixed",
        both(lambda table: table["quantized_layers"].update(ghost={"quant_algo": "FP8"})),
        "ghost",
        "no tensor of it is stored",
    ),
    "declared-layer-otherwise": (
        "mixed",
        both(lambda table: table["quantized_layers"].update({UP: {"quant_algo": "FP8"}})),
        UP,
        "as FP8, but it is nvfp4",
    ),
    "layer-not-declared": ("mixed", both(lambda table: table["quantized_layers"].pop(UP)), UP, "is not among the layers"),
    "mtp-dropped": ("blocks", drop_layer, "model.layers.2", "announces 1 MTP layers"),
    "mtp-not-announced": ("blocks", in_config(num_nextn_predict_layers=0), "model.layers.2", "after the 2 + 0 layers"),
    "missing-parameter": ("blocks", put({HEAD: None}), HEAD, "config.json implies it"),
    "shape": ("blocks", put({HEAD: floats(8, 128, dtype="BF16")}), HEAD, "is [8, 128], config.json means [64, 128]"),
    "router-quantised": (
        "blocks",
        put({f"{ROUTER}.weight": fp8((4, 128)), f"{ROUTER}.weight_scale_inv": floats(1, 1)}),
        ROUTER,
        "a router, is fp8_block",
    ),
    "router-bias-type": (
        "blocks",
        put({f"{ROUTER}.e_score_correction_bias": floats(4, dtype="BF16")}),
        f"{ROUTER}.e_score_correction_bias",
        "is BF16, not F32",
    ),
    "kv-b-format": (
        "fours",
        put({f"{KV_B}.weight": fp8((128, 64)), f"{KV_B}.weight_scale": scalar(1), f"{KV_B}.input_scale": scalar(1)}),
        KV_B,
        "is fp8",
    ),
    "kv-b-in-mixed": ("mixed", None, KV_B, "with heads of 64 rows"),
    "tied-head": ("blocks", in_config(tie_word_embeddings=True), HEAD, "ties it"),
    "architecture": ("blocks", in_config(model_type="qwen3"), "", "model_type is 'qwen3'"),
    "lost-parameter": ("fours", put({"model.norm.weight": None}), "model.norm", "is in the source, but not here"),
    "invented-parameter": ("fours", put({"model.extra.weight": floats(4, dtype="BF16")}), "model.extra", "but not in the source"),
    "raw-codes": ("fours", scaled("weight_scale_2", lambda array: array * np.float32(5500)), f"{UP}.weight", "times its own norm"),
    "not-finite": ("fours", codes(0x7F), f"{UP}.weight", "decodes to NaN"),
    "clipped-weights": (
        "fours",
        scaled("weight_scale_2", lambda array: array * np.float32(0.5)),
        f"{UP}.weight",
        "beyond the largest number",
    ),
    "low-sqnr": ("fours", scaled("weight_scale_2", lambda array: array * np.float32(1.25)), f"{UP}.weight", "has an SQNR of 11."),
    "unusual-sqnr": (
        "fours",
        scaled("weight_scale_2", lambda array: array * np.float32(1.05)),
        f"{UP}.weight",
        "nvfp4 should have 20",
    ),
    "changed-parameter": (
        "fours",
        put({"model.norm.weight": ("BF16", np.full(128, 2, BF16))}),
        "model.norm.weight",
        "differs from the source",
    ),
    "not-compared": ("fours", in_config(model_type="qwen3"), "", "a config.json is not understood"),
}
