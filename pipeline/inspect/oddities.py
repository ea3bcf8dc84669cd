"""What is odd about the tensors of a checkpoint. Each check yields sentences: which tensor, and what comes of it.

All look at headers only, but for the tensor-wide scales, which are four bytes each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from math import isfinite

from pipeline.checkpoint.layout import classify, parameters
from pipeline.checkpoint.problems import Problem
from pipeline.core.errors import ConfigError
from pipeline.inspect.contents import SCALARS, Contents, Module
from pipeline.inspect.recognise import SCALE_LEAVES, UNKNOWN
from pipeline.models.arch import Arch

__all__ = ["tensor_oddities"]

BIAS = "e_score_correction_bias"
BLOCKS = {"fp8_block": (128, "weight_scale_inv"), "nvfp4": (16, "weight_scale"), "nvfp4_weight_only": (16, "weight_scale")}


def tensor_oddities(contents: Contents) -> Iterator[Problem]:
    """Of all checks, in order; the faults of the files come first."""
    yield from contents.problems
    for check in _CHECKS:
        yield from check(contents)


def _files(contents: Contents) -> Iterator[Problem]:
    for file in sorted(set(contents.folder.glob("*.safetensors")) - set(contents.shards)):
        text = f"{file} lies beside the index, which does not name it: loaders that take every file read it as well."
        yield Problem("file without index", "", text)


def _formats(contents: Contents) -> Iterator[Problem]:
    """Weights that cannot be read, for want of a scale or of a known format; scales without a weight."""
    for module in contents.modules.values():
        if module.format != UNKNOWN:
            continue
        scales = sorted(SCALE_LEAVES & module.tensors.keys())
        if scales == sorted(module.tensors):
            if not _lost(contents, module):
                text = f"{module.name}.{scales[0]} has no weight beside it: the layer is lost, or was renamed without its scale."
                yield Problem("orphan scale", f"{module.name}.{scales[0]}", text)
            continue
        main = next(info for leaf, info in module.tensors.items() if leaf not in SCALE_LEAVES)
        if not scales and not _lost(contents, module):
            text = f"{main.name} is {main.dtype} without a scale: loaders take its codes for weights, hundreds of times too large."
            yield Problem("missing scale", main.name, text)
        elif scales:
            text = f"{main.name} is {main.dtype} beside {', '.join(scales)}, a format that is not known here."
            yield Problem("unknown format", main.name, text)


def _block_scales(contents: Contents) -> Iterator[Problem]:
    """Block scales must have the shape that the weight's implies."""
    for module in contents.modules.values():
        if module.format not in BLOCKS or not module.matrix:
            continue
        block, leaf = BLOCKS[module.format]
        rows, columns = module.shape
        wanted = (-(-rows // block) if block == 128 else rows, -(-columns // block))
        if (found := module.tensors[leaf].shape) != wanted:
            text = f"{module.name}.{leaf} is {list(found)}, its weight of {list(module.shape)} needs {list(wanted)}: loaders stop."
            yield Problem("shape of a scale", f"{module.name}.{leaf}", text)


def _pairs(contents: Contents) -> Iterator[Problem]:
    """Layers that runtimes run as one matrix: same format, same tensor-wide scales."""
    values = contents.scalars
    for module in contents.modules.values():
        partner = contents.modules.get(module.place.partner or "")
        if partner is None or module.name > partner.name or UNKNOWN in (module.format, partner.format):
            continue
        if module.format != partner.format:
            text = (
                f"{module.name} is {module.format}, its partner {partner.name} {partner.format}: runtimes run the two as one "
                f"matrix and refuse, or read one of them wrongly."
            )
            yield Problem("formats of a pair", module.name, text)
            continue
        for leaf in sorted(SCALARS):
            one, two = (values.get(f"{item.name}.{leaf}") for item in (module, partner))
            if one is not None and two is not None and one != two:
                factor = max(one, two) / min(one, two) if min(one, two) > 0 else float("inf")
                text = (
                    f"{module.name} and {partner.name} have {leaf} {one:.6g} and {two:.6g}: runtimes keep one for both, "
                    f"which puts the other off by a factor of {factor:.3g}."
                )
                yield Problem("scales of a pair", f"{module.name}.{leaf}", text)


def _bad_scalars(contents: Contents) -> Iterator[Problem]:
    for name, value in contents.scalars.items():
        if not isfinite(value) or value <= 0:
            text = f"{name} is {value}: it divides or multiplies a layer, whose outputs become NaN or 0."
            yield Problem("unusable scale", name, text)


def _input_scales(contents: Contents) -> Iterator[Problem]:
    """Loaders fill a missing activation scale with 0, which divides."""
    counts = Counter((module.place.kind, module.format) for module in contents.modules.values())
    for module in contents.modules.values():
        if module.format == "nvfp4_weight_only" and counts[module.place.kind, "nvfp4"]:
            text = (
                f"{module.name} has no input_scale, other {module.place.kind} have: loaders fill in 0, and prompts that reach "
                f"it give NaN."
            )
            yield Problem("missing input_scale", f"{module.name}.input_scale", text)


def _bias(contents: Contents) -> Iterator[Problem]:
    for module in contents.modules.values():
        info = module.tensors.get(BIAS)
        if info is not None and info.dtype != "F32":
            text = f"{info.name} is {info.dtype}, not F32: rounded, it changes which experts are chosen."
            yield Problem("type of a router's bias", info.name, text)


def _shapes(contents: Contents) -> Iterator[Problem]:
    """Widths that formats cannot hold, and blocks that are cut off."""
    for module in contents.modules.values():
        if not module.place.linear or not module.matrix:
            continue
        rows, columns = module.shape
        name = f"{module.name}.weight"
        if columns % 16:
            text = f"{name} is {rows} x {columns}: {columns} is no multiple of 16, so it cannot become NVFP4."
            yield Problem("width", name, text)
        elif rows % 128 or columns % 128:
            odd = rows if rows % 128 else columns
            text = f"{name} is {rows} x {columns}: the last block of {odd} covers {odd % 128}, where some tools expect 128."
            yield Problem("partial block", name, text, note=True)


def _mtp(contents: Contents) -> Iterator[Problem]:
    """Multi-token-prediction layers that config.json announces, against those stored."""
    if not contents.config or any(_is_mtp(contents, name) for name in contents.lost):
        return
    first = int(contents.config.get("num_hidden_layers") or 0)
    wanted = int(contents.config.get("num_nextn_predict_layers") or 0)
    for layer in range(first, first + wanted):
        if layer not in contents.mtp_layers:
            text = (
                f"model.layers.{layer} is not stored, though config.json announces {wanted} MTP layers: no speculative decoding, "
                f"and strict loaders want num_nextn_predict_layers=0."
            )
            yield Problem("MTP dropped", f"model.layers.{layer}", text)
    for layer in contents.mtp_layers:
        if layer >= first + wanted:
            text = f"model.layers.{layer} lies after the {first} + {wanted} layers of config.json: no loader reads it."
            yield Problem("MTP not announced", f"model.layers.{layer}", text)


def _complete(contents: Contents) -> Iterator[Problem]:
    """Against the architecture, where it is one that this pipeline knows."""
    try:
        arch = Arch.from_hf(contents.config)
    except (ConfigError, TypeError, ValueError) as error:
        if contents.config:
            yield Problem("architecture", "", f"Not checked for completeness: {error}", note=True)
        return
    for name, shape in parameters(arch):
        module, _, leaf = name.rpartition(".")
        found = contents.modules.get(module)
        if found is None or not (leaf in found.tensors or (leaf == "weight" and found.shape)):
            if name not in contents.lost and not _in_dropped_layer(contents, module):
                text = f"{name} is not stored, but config.json implies it: loaders stop, or start it at random."
                yield Problem("missing parameter", name, text)
        elif leaf == "weight" and found.format != UNKNOWN and found.shape != shape:
            text = f"{name} is {list(found.shape)}, config.json means {list(shape)}: loaders stop at it."
            yield Problem("shape", name, text)


def _tied(contents: Contents) -> Iterator[Problem]:
    tied, head = contents.config.get("tie_word_embeddings"), contents.modules.get("lm_head")
    if tied and head is not None:
        text = "lm_head.weight is stored, but config.json ties it to the embedding: loaders drop it, or the tie."
        yield Problem("tied head", "lm_head.weight", text)


def _lost(contents: Contents, module: Module) -> bool:
    """Whether a part of the module may lie in a file that cannot be read."""
    leaves = ("weight", "weight_packed", "qweight", *SCALE_LEAVES)
    return bool(contents.lost) and any(f"{module.name}.{leaf}" in contents.lost for leaf in leaves)


def _is_mtp(contents: Contents, name: str) -> bool:
    """Whether a tensor belongs to a layer after the last."""
    last = int(contents.config.get("num_hidden_layers") or 0)
    return classify(name.rpartition(".")[0], last).kind == "mtp"


def _in_dropped_layer(contents: Contents, module: str) -> bool:
    """Whether the module's whole layer is an MTP layer that is not there."""
    place = classify(module, int(contents.config["num_hidden_layers"]))
    return place.kind == "mtp" and place.layer not in contents.mtp_layers


_CHECKS: tuple[Callable[[Contents], Iterator[Problem]], ...] = (
    _files, _formats, _block_scales, _pairs, _bad_scalars, _input_scales, _bias, _shapes, _mtp, _complete, _tied,
)  # fmt: skip
