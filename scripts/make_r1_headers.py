"""Writes DeepSeek-R1's checkpoint as sparse files: every header is real, the weights are holes.

    python scripts/make_r1_headers.py FOLDER [--hf conf/model/deepseek_r1.yaml] [--scale 0.0002]

163 files and 91,991 tensors that claim 689 GB and take a few dozen MB of disk (200 MB with `--scale`, which fills
the block scales in; they are zeros otherwise). It is what planning at full size is tested and measured on: a layer's
tensors lie as DeepSeek's shards have them, layer by layer, cut where a file is full, so weights are parted from
their scales and gates from their up projections.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.checkpoint.layout import parameters, place_of  # noqa: E402
from pipeline.checkpoint.reader import DTYPES  # noqa: E402
from pipeline.checkpoint.writer import TensorPlan, lay_out  # noqa: E402
from pipeline.formats import FORMATS  # noqa: E402
from pipeline.models.arch import Arch  # noqa: E402

__all__ = ["R1_SHARDS", "r1_config", "write"]

R1_SHARDS = 163


def r1_config(file: Path = ROOT / "conf" / "model" / "deepseek_r1.yaml") -> dict[str, Any]:
    """The fields of a model's config.json that conf/model has, and DeepSeek's quantization_config."""
    import yaml

    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return {**yaml.safe_load(file.read_text())["hf"], "quantization_config": quantization}


def write(folder: Path, config: dict[str, Any], num_shards: int = R1_SHARDS, scale: float | None = None) -> Path:
    """Fill `folder` with a checkpoint of `config`'s architecture without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = list(_cut(list(tensors(Arch.from_hf(config))), num_shards))
    weight_map: dict[str, str] = {}
    for number, plan in enumerate(shards, 1):
        file = folder / f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        _write_shard(file, plan, scale)
        weight_map |= dict.fromkeys((name for name, _, _ in plan), file.name)
    total = sum(_size(tensor) for plan in shards for tensor in plan)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def tensors(arch: Arch) -> Iterator[TensorPlan]:
    """Every tensor, layer by layer, as DeepSeek stores it."""
    for name, shape in parameters(arch):
        module, _, leaf = name.rpartition(".")
        if place_of(module, arch).linear:
            outputs = FORMATS["fp8_block"].outputs(module, shape)
            yield from ((f"{module}.{output.suffix}", output.dtype, output.shape) for output in outputs)
        else:
            yield name, "F32" if leaf == "e_score_correction_bias" else "BF16", shape


def _cut(plan: list[TensorPlan], num_shards: int) -> Iterator[list[TensorPlan]]:
    """Consecutive runs of about equal bytes."""
    total, done, shard = sum(map(_size, plan)), 0, 0
    runs: list[list[TensorPlan]] = [[] for _ in range(num_shards)]
    for tensor in plan:
        shard = max(shard, min(num_shards - 1, done * num_shards // total))
        runs[shard].append(tensor)
        done += _size(tensor)
    return (run for run in runs if run)


def _write_shard(file: Path, plan: Iterable[TensorPlan], scale: float | None) -> None:
    header, infos = lay_out(file, plan)
    with file.open("wb") as stream:
        stream.write(header)
        os.truncate(stream.fileno(), max(info.stop for info in infos.values()))
        for info in infos.values():
            if scale is not None and info.name.endswith("weight_scale_inv"):
                stream.seek(info.start)
                stream.write(np.full(info.shape, scale, np.float32).tobytes())


def _size(tensor: TensorPlan) -> int:
    return prod(tensor[2]) * DTYPES[tensor[1]].itemsize


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hf", type=Path, default=ROOT / "conf" / "model" / "deepseek_r1.yaml", help="a file of conf/model")
    parser.add_argument("--shards", type=int, default=R1_SHARDS)
    parser.add_argument("--scale", type=float, help="value of every block scale; without it they are holes, too")
    arguments = parser.parse_args()
    write(arguments.folder, r1_config(arguments.hf), arguments.shards, arguments.scale)
    files = list(arguments.folder.glob("*.safetensors"))
    claimed, used = sum(f.stat().st_size for f in files), sum(f.stat().st_blocks * 512 for f in files)
    print(f"{arguments.folder}: {len(files)} files, {claimed / 1e9:.1f} GB claimed, {used / 1e6:.0f} MB of disk")


if __name__ == "__main__":
    main()
