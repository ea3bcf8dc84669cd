"""Scales of an FP8 KV cache, which in MLA is one latent row that is read as key and as value."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.verify.invariants.base import ERROR, NOTE, WARNING, Fault, Rule, Subject

__all__ = ["RULES"]

LEAVES = ("k_scale", "v_scale")


def _differ(subject: Subject) -> Iterator[Fault]:
    for layer, scales in _by_layer(subject).items():
        if len(scales) == 2 and scales["k_scale"][1] != scales["v_scale"][1]:
            (name, key), (_, value) = scales["k_scale"], scales["v_scale"]
            yield Fault(name, f"layer {layer} has k_scale {key:.6g} and v_scale {value:.6g}")


def _half(subject: Subject) -> Iterator[Fault]:
    for layer, scales in _by_layer(subject).items():
        if len(scales) == 1:
            leaf, (name, _) = next(iter(scales.items()))
            yield Fault(name, f"layer {layer} has {leaf} alone")


def _names(subject: Subject) -> Iterator[Fault]:
    """Only a model with MLA has kv_a_proj_with_mqa, and then neither k_proj nor v_proj."""
    modules = subject.contents.modules
    for name in _scales(subject):
        attention, _, leaf = name.rpartition(".")[0].rpartition(".")
        if leaf in ("k_proj", "v_proj") and f"{attention}.kv_a_proj_with_mqa" in modules:
            yield Fault(name, f"{name} belongs to a {leaf} that MLA does not have")


def _undeclared(subject: Subject) -> Iterator[Fault]:
    scales = _scales(subject)
    if scales and not any(declared.kv_cache for declared in subject.declared):
        name = next(iter(scales))
        yield Fault(name, f"{len(scales):,} KV scales are stored, {name} first, but no config declares an FP8 KV cache")


def _declared_only(subject: Subject) -> Iterator[Fault]:
    caches = [declared for declared in subject.declared if declared.kv_cache]
    if caches and not _scales(subject):
        yield Fault("", f"{caches[0].file} declares a KV cache in {caches[0].kv_cache}, and no k_scale or v_scale is stored")


def _scales(subject: Subject) -> dict[str, float]:
    return {name: value for name, value in subject.contents.scalars.items() if name.endswith(LEAVES)}


def _by_layer(subject: Subject) -> dict[int, dict[str, tuple[str, float]]]:
    """Layer -> leaf -> tensor and value."""
    found: dict[int, dict[str, tuple[str, float]]] = {}
    for name, value in _scales(subject).items():
        layer = subject.contents.modules[name.rpartition(".")[0]].place.layer
        if layer is not None:
            found.setdefault(layer, {})[name.rpartition(".")[2]] = (name, value)
    return found


RULES = (
    Rule(
        "kv-scales-differ", ERROR, _differ, "MLA caches one row for both, so one of them is read with the wrong scale",
        "store the larger of the two as both",
    ),
    Rule("kv-scale-alone", WARNING, _half, "loaders take 1.0 for the other one", "store k_scale and v_scale, equal"),
    Rule(
        "kv-scale-names", WARNING, _names,
        "loaders that go by MLA's names skip it and take 1.0, and it was measured on expanded keys, not on the cached latent",
        "measure the latent and store the scale as the runtime names it, or leave it out (1.0 is the recommended cast)",
    ),
    Rule(
        "kv-scale-undeclared", WARNING, _undeclared, "a runtime that applies them to a BF16 cache gives garbage",
        "declare the FP8 cache in both configs, or drop the scales",
    ),
    Rule(
        "kv-declared-without-scale", NOTE, _declared_only, "runtimes take 1.0", "nothing, if 1.0 is meant (the recommended cast)"
    ),
)  # fmt: skip
