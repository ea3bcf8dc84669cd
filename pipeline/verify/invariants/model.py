"""What a DeepSeek-V3 class model must have: every parameter, its MTP layer, an untouched router."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.checkpoint.layout import classify, parameters
from pipeline.core.errors import ConfigError
from pipeline.inspect.contents import NO_LAYERS, Contents
from pipeline.inspect.declared import MIXED
from pipeline.inspect.recognise import UNKNOWN
from pipeline.models.arch import Arch
from pipeline.verify.invariants.base import ERROR, NOTE, WARNING, Fault, Rule, Subject

__all__ = ["RULES"]

MOST_EXPERTS = 1_000_000
"""More in all layers together are a typing error (R1 has 15,000)."""
BIAS = "e_score_correction_bias"


def _mtp_dropped(subject: Subject) -> Iterator[Fault]:
    contents, first = subject.contents, subject.contents.num_layers
    if not contents.config or any(_is_mtp(contents, name) for name in contents.lost):
        return
    for layer in range(first, first + min(contents.num_mtp_layers, 16)):
        if layer not in contents.mtp_layers:
            name = f"model.layers.{layer}"
            yield Fault(name, f"{name} is not stored, though config.json announces {contents.num_mtp_layers} MTP layers")


def _mtp_not_announced(subject: Subject) -> Iterator[Fault]:
    contents = subject.contents
    first, wanted = contents.num_layers, contents.num_mtp_layers
    for layer in contents.mtp_layers:
        if layer >= first + wanted:
            yield Fault(f"model.layers.{layer}", f"model.layers.{layer} lies after the {first} + {wanted} layers of config.json")


def _missing(subject: Subject) -> Iterator[Fault]:
    contents = subject.contents
    arch, _ = _arch(contents)
    for name, _ in parameters(arch) if arch else ():
        module, _, leaf = name.rpartition(".")
        found = contents.modules.get(module)
        if found is not None and (leaf in found.tensors or (leaf == "weight" and found.shape)):
            continue
        if name not in contents.lost and not _in_dropped_layer(contents, module):
            yield Fault(name, f"{name} is not stored, but config.json implies it")


def _shape(subject: Subject) -> Iterator[Fault]:
    arch, _ = _arch(subject.contents)
    for name, shape in parameters(arch) if arch else ():
        module, _, leaf = name.rpartition(".")
        found = subject.contents.modules.get(module)
        if found is not None and leaf == "weight" and found.format != UNKNOWN and found.shape not in ((), shape):
            yield Fault(name, f"{name} is {list(found.shape)}, config.json means {list(shape)}")


def _architecture(subject: Subject) -> Iterator[Fault]:
    arch, reason = _arch(subject.contents)
    if arch is None and subject.contents.config:
        yield Fault("", f"Not checked for completeness: {reason.rstrip('.')}")


def _router_quantised(subject: Subject) -> Iterator[Fault]:
    for module in subject.contents.modules.values():
        if module.name.endswith(".mlp.gate") and module.quantised:
            yield Fault(module.name, f"{module.name}, a router, is {module.format}")


def _router_bias(subject: Subject) -> Iterator[Fault]:
    for module in subject.contents.modules.values():
        info = module.tensors.get(BIAS)
        if info is not None and info.dtype != "F32":
            yield Fault(info.name, f"{info.name} is {info.dtype}, not F32")


def _kv_b(subject: Subject) -> Iterator[Fault]:
    for module in subject.contents.modules.values():
        if module.name.endswith(".kv_b_proj") and module.quantised and module.format != "fp8_block":
            yield Fault(module.name, f"{module.name} is {module.format}")


def _kv_b_mixed(subject: Subject) -> Iterator[Fault]:
    """Blocks of 128 rows cross heads unless the heads' own width is a multiple of it."""
    arch, _ = _arch(subject.contents)
    width = arch.qk_nope_head_dim + arch.v_head_dim if arch else 0
    if any(declared.algorithm == MIXED for declared in subject.declared) and width % 128:
        for module in subject.contents.modules.values():
            if module.name.endswith(".kv_b_proj") and module.format == "fp8_block":
                yield Fault(module.name, f"{module.name} is in FP8 blocks in a mixed checkpoint, with heads of {width} rows")


def _tied(subject: Subject) -> Iterator[Fault]:
    if subject.contents.config.get("tie_word_embeddings") and "lm_head" in subject.contents.modules:
        yield Fault("lm_head.weight", "lm_head.weight is stored, but config.json ties it to the embedding")


def _arch(contents: Contents) -> tuple[Arch | None, str]:
    """The architecture, or why there is none that is known here."""
    try:
        arch = Arch.from_hf(contents.config)
        if arch.num_stored_layers * (1 + arch.n_routed_experts) > MOST_EXPERTS:
            return None, f"config.json means {arch.num_stored_layers} layers of {arch.n_routed_experts} experts"
        next(iter(parameters(arch)))
        return arch, ""
    except (ConfigError, TypeError, ValueError, ArithmeticError, AttributeError, KeyError) as error:
        return None, str(error) or type(error).__name__


def _is_mtp(contents: Contents, name: str) -> bool:
    return classify(name.rpartition(".")[0], contents.num_layers or NO_LAYERS).kind == "mtp"


def _in_dropped_layer(contents: Contents, module: str) -> bool:
    """Whether the module's whole layer is an MTP layer that is not there."""
    place = classify(module, contents.num_layers or NO_LAYERS)
    return place.kind == "mtp" and place.layer not in contents.mtp_layers


RULES = (
    Rule(
        "mtp-dropped", ERROR, _mtp_dropped, "no speculative decoding, and strict loaders want num_nextn_predict_layers=0",
        "copy the layer's tensors from the source as they are; libraries that load by class drop it without an error",
    ),
    Rule("mtp-not-announced", WARNING, _mtp_not_announced, "no loader reads it", "set num_nextn_predict_layers in config.json"),
    Rule(
        "missing-parameter", ERROR, _missing, "loaders stop, or start it at random",
        "copy it from the source, or download the missing shard",
    ),
    Rule("shape", ERROR, _shape, "loaders stop at it", "correct config.json, or convert the layer again"),
    Rule(
        "router-quantised", ERROR, _router_quantised, "its rounding changes which experts are chosen, and loaders build it in BF16",
        "copy the router from the source",
    ),
    Rule(
        "router-bias-type", ERROR, _router_bias, "rounded, it changes which experts are chosen", "copy it from the source, in F32"
    ),
    Rule(
        "kv-b-format", WARNING, _kv_b, "runtimes split it by heads to fold it into the attention, and some read bare codes",
        "keep kv_b_proj in BF16, or in the source's FP8 blocks",
    ),
    Rule(
        "kv-b-in-mixed", WARNING, _kv_b_mixed, "block scales cross heads where loaders split it", "exclude kv_b_proj and store BF16"
    ),
    Rule(
        "tied-head", WARNING, _tied, "loaders drop it, or the tie", "set tie_word_embeddings to false, or drop the tensor"
    ),
    Rule(
        "architecture", NOTE, _architecture, "parameters that are lost go unnoticed",
        "check the number of tensors against the source",
    ),
)  # fmt: skip
