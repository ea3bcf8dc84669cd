"""Each weight with the scales that its format needs, of the right type and shape."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from pipeline.inspect.contents import Contents, Module
from pipeline.inspect.recognise import SCALE_LEAVES, UNKNOWN
from pipeline.verify.invariants.base import ERROR, NOTE, WARNING, Fault, Rule, Subject

__all__ = ["RULES"]

BLOCKS = {
    "fp8_block": (128, "weight_scale_inv"), "nvfp4": (16, "weight_scale"), "nvfp4_weight_only": (16, "weight_scale"),
    "compressed-tensors nvfp4": (16, "weight_scale"), "mxfp8": (32, "weight_scale"), "mxfp4": (32, "weight_scale"),
}  # fmt: skip
MULTIPLE = {"nvfp4": 16, "nvfp4_weight_only": 16, "mxfp8": 32, "mxfp4": 32}
CODES = ("F8_E4M3", "F8_E5M2", "U8", "I8", "I32")
BLOCK = 128


def _orphan_scale(subject: Subject) -> Iterator[Fault]:
    for module in _unknown(subject.contents):
        scales = sorted(SCALE_LEAVES & module.tensors.keys())
        if scales == sorted(module.tensors):
            yield Fault(f"{module.name}.{scales[0]}", f"{module.name}.{scales[0]} has no weight beside it")


def _missing_scale(subject: Subject) -> Iterator[Fault]:
    for module in _unknown(subject.contents):
        if not SCALE_LEAVES & module.tensors.keys():
            main = next(iter(module.tensors.values()))
            yield Fault(main.name, f"{main.name} is {main.dtype} without a scale")


def _unknown_format(subject: Subject) -> Iterator[Fault]:
    for module in _unknown(subject.contents):
        scales = sorted(SCALE_LEAVES & module.tensors.keys())
        main = next((info for leaf, info in module.tensors.items() if leaf not in SCALE_LEAVES), None)
        if scales and main is not None:
            yield Fault(main.name, f"{main.name} is {main.dtype} beside {', '.join(scales)}, a format that is not known here")


def _shape_of_a_scale(subject: Subject) -> Iterator[Fault]:
    for module in subject.contents.modules.values():
        block, leaf = BLOCKS.get(module.format, (0, ""))
        if leaf not in module.tensors or not module.matrix:
            continue
        rows, columns = module.shape
        wanted = (-(-rows // block) if block == BLOCK else rows, -(-columns // block))
        found = module.tensors[leaf].shape
        if found not in (wanted, _grouped_by_32(module)) and len(found) == 2:
            name = f"{module.name}.{leaf}"
            yield Fault(name, f"{name} is {list(found)}, its weight of {list(module.shape)} needs {list(wanted)}")


def _rank_of_a_scale(subject: Subject) -> Iterator[Fault]:
    """ModelOpt's 2-D blocks are stored as [out/128, 1, in/128, 1]."""
    for module in subject.contents.modules.values():
        for leaf in sorted({"weight_scale", "weight_scale_inv"} & module.tensors.keys()):
            if len(shape := module.tensors[leaf].shape) > 2:
                yield Fault(f"{module.name}.{leaf}", f"{module.name}.{leaf} has {len(shape)} dimensions, {list(shape)}")


def _rounded_scale(subject: Subject) -> Iterator[Fault]:
    """BF16 scales of FP8 weights; INT4 scales are 16 bits wide by design."""
    for module in subject.contents.modules.values():
        for leaf in sorted({"weight_scale", "weight_scale_inv"} & module.tensors.keys()):
            info, main = module.tensors[leaf], module.tensors.get("weight")
            if info.dtype in ("BF16", "F16") and main is not None and main.dtype == "F8_E4M3":
                yield Fault(info.name, f"{info.name} is {info.dtype} beside FP8 codes")


def _width(subject: Subject) -> Iterator[Fault]:
    yield from (fault for module, fault in _narrow(subject.contents) if module.quantised)


def _plain_width(subject: Subject) -> Iterator[Fault]:
    yield from (fault for module, fault in _narrow(subject.contents) if not module.quantised)


def _partial_block(subject: Subject) -> Iterator[Fault]:
    for module in subject.contents.modules.values():
        if module.format == "fp8_block" and module.matrix and (left := module.shape[0] % BLOCK):
            rows, columns = module.shape
            name = f"{module.name}.weight"
            yield Fault(name, f"{name} is {rows} x {columns}: the last block of {rows} covers {left}")


def _narrow(contents: Contents) -> Iterator[tuple[Module, Fault]]:
    """Linear layers whose width is no whole number of blocks; FP8 in blocks of 128 may cut the last."""
    for module in contents.modules.values():
        multiple = MULTIPLE.get(module.format, 16)
        if module.place.linear and module.matrix and module.shape[1] % multiple:
            name = f"{module.name}.weight"
            yield module, Fault(name, f"{name} is {list(module.shape)}, and {module.shape[1]} is no multiple of {multiple}")


def _unknown(contents: Contents) -> Iterator[Module]:
    """Modules whose format cannot be told, unless a part of them lies in a file that cannot be read."""
    leaves = ("weight", "weight_packed", "qweight", *SCALE_LEAVES)
    for module in contents.modules.values():
        lost = contents.lost and any(f"{module.name}.{leaf}" in contents.lost for leaf in leaves)
        if module.format == UNKNOWN and not lost:
            yield module


def _grouped_by_32(module: Module) -> tuple[int, ...]:
    """W4A8_NVFP4_FP8 has the tensors of NVFP4, with groups of 32."""
    return (module.shape[0], module.shape[1] // 32) if module.format == "nvfp4" and prod(module.shape) else ()


RULES = (
    Rule(
        "orphan-scale", ERROR, _orphan_scale, "the layer is lost, or was renamed or widened without its scale",
        "quantise the layer again from the source, weight and scale together, also where they lie in different shards",
    ),
    Rule(
        "missing-scale", ERROR, _missing_scale, "loaders take its codes for weights, hundreds of times too large",
        "look for the scale in the other shards, and put it into the index; else quantise the layer again",
    ),
    Rule("unknown-format", ERROR, _unknown_format, "no loader known here reads it", "write the layer in a known layout"),
    Rule(
        "shape-of-a-scale", ERROR, _shape_of_a_scale, "loaders stop, or give blocks the scales of others",
        "quantise the layer again; a last block that is cut off has a scale of its own",
    ),
    Rule(
        "rank-of-a-scale", ERROR, _rank_of_a_scale, "loaders of FP8 blocks want [out/128, in/128] and stop",
        "reshape it to two dimensions and name it weight_scale_inv",
    ),
    Rule(
        "rounded-scale", WARNING, _rounded_scale, "rounding a scale to 8 bits moves all weights of its block by up to 0.4 %",
        "store scales of FP8 weights in F32; from an FP8 source copy codes and scales as they are",
    ),
    Rule("width", ERROR, _width, "its format cannot hold it, and readers stop at the last block", "keep the layer in BF16"),
    Rule(
        "plain-width", NOTE, _plain_width, "formats with blocks cannot hold it",
        "keep the layer in BF16 when you quantise the others",
    ),
    Rule(
        "partial-block", NOTE, _partial_block, "tools that reshape into whole blocks break on it",
        "nothing, if your tools pad or slice the last block",
    ),
)  # fmt: skip
