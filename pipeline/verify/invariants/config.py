"""One truth: the two configs agree with each other and with what the tensors show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from pipeline.inspect.contents import Contents, Module, table_of
from pipeline.inspect.declared import MIXED, Declaration
from pipeline.inspect.recognise import ALGORITHMS, PLAIN
from pipeline.verify.invariants.base import ERROR, WARNING, Fault, Rule, Subject

__all__ = ["RULES"]

BY_GROUP = "compressed-tensors"
BITS = {"nvfp4": 4, "nvfp4_weight_only": 4, "mxfp4": 4, "int4": 4, "awq": 4, "gptq": 4}
FP8_BLOCK = [128, 128]
Check = Callable[[Subject], Iterable[Fault]]


def _each(check: Callable[[Subject, Declaration], Iterable[Fault]]) -> Check:
    """For every file that declares something."""
    return lambda subject: (fault for declared in subject.declared for fault in check(subject, declared))


def _disagree(what: str, of: Callable[[Declaration], object]) -> Check:
    def check(subject: Subject) -> Iterator[Fault]:
        if len(subject.declared) == 2:
            one, two = subject.declared
            if of(one) != of(two):
                yield Fault("", f"{one.file} says {what} {of(one)}, {two.file} {of(two)}")

    return check


def _disagree_on_excludes(subject: Subject) -> Iterator[Fault]:
    if len(subject.declared) == 2:
        for one, two in (subject.declared, subject.declared[::-1]):
            for pattern in sorted(set(one.excludes) - set(two.excludes)):
                yield Fault(pattern, f"{one.file} excludes {pattern}, {two.file} does not")


def _undeclared(subject: Subject) -> Iterator[Fault]:
    if not subject.declared:
        for module in subject.contents.modules.values():
            if module.quantised:
                yield Fault(module.name, f"{module.name} is {module.format}, but neither config says so")


def _otherwise(subject: Subject, declared: Declaration) -> Iterator[Fault]:
    formats = Counter(module.format for module in subject.contents.modules.values() if module.quantised)
    shown = {ALGORITHMS.get(name, name) for name in formats}
    really = ", ".join(f"{count:,} in {name}" for name, count in formats.items()) or "nothing quantised"
    if declared.algorithm == BY_GROUP:
        bits = _group_bits(subject.contents)
        if bits and formats and not bits & {BITS.get(name.removeprefix("compressed-tensors "), 8) for name in formats}:
            yield Fault("", f"{declared.file} says {', '.join(map(str, sorted(bits)))} bits, the tensors show {really}")
    elif declared.algorithm not in (MIXED, *shown) and subject.contents.modules:
        yield Fault("", f"{declared.file} says {declared.algorithm}, the tensors show {really}")
    size = table_of(subject.contents.config.get("quantization_config")).get("weight_block_size")
    if declared.file == "config.json" and "fp8_block" in formats and size not in (None, FP8_BLOCK):
        yield Fault("", f"{declared.file} says weight_block_size {size}, the tensors show {FP8_BLOCK}")


def _beside(subject: Subject, declared: Declaration) -> Iterator[Fault]:
    modules = [module for module in subject.contents.modules.values() if module.quantised]
    algorithms = {module.name: ALGORITHMS.get(module.format, module.format) for module in modules}
    if declared.algorithm in algorithms.values() and declared.algorithm != BY_GROUP:
        for module in modules:
            if algorithms[module.name] != declared.algorithm:
                fact = f"{module.name} is {module.format}, but {declared.file} says {declared.algorithm} and not {MIXED}"
                yield Fault(module.name, fact)


def _pattern(subject: Subject, declared: Declaration) -> Iterator[Fault]:
    for pattern, found in subject.excluded[declared.file].items():
        if not found:
            yield Fault(pattern, f"{declared.file} excludes {pattern}, which matches no module")


def _excluded(subject: Subject, declared: Declaration) -> Iterator[Fault]:
    excluded = _all_matched(subject, declared)
    for module in subject.contents.modules.values():
        if module.quantised and module.name in excluded:
            yield Fault(module.name, f"{module.name} is {module.format}, but {declared.file} excludes it")


def _not_excluded(subject: Subject, declared: Declaration) -> Iterator[Fault]:
    """Of a layer-by-layer declaration nothing more needs to be excluded than it does not name."""
    excluded = _all_matched(subject, declared)
    for module in _plain(subject, declared):
        if (module.place.linear or _is_listed_head(module, declared)) and module.name not in excluded:
            yield Fault(module.name, f"{module.name} is {module.format} and no pattern of {declared.file} excludes it")


def _router(subject: Subject, declared: Declaration) -> Iterator[Fault]:
    excluded = _all_matched(subject, declared) if declared.lists_excludes else set()
    for module in _plain(subject, declared) if declared.lists_excludes else ():
        if module.name.endswith(".mlp.gate") and module.name not in excluded:
            yield Fault(module.name, f"{module.name}, a router, is {module.format} and no pattern of {declared.file} excludes it")


def _not_stored(subject: Subject, declared: Declaration) -> Iterator[Fault]:
    for name, algorithm in declared.layers.items():
        if name not in subject.contents.modules:
            yield Fault(name, f"{declared.file} declares {name} as {algorithm}, but no tensor of it is stored")


def _stored_otherwise(subject: Subject, declared: Declaration) -> Iterator[Fault]:
    for name, algorithm in declared.layers.items():
        module = subject.contents.modules.get(name)
        if module is not None and ALGORITHMS.get(module.format) != algorithm:
            yield Fault(name, f"{declared.file} declares {name} as {algorithm}, but it is {module.format}")


def _not_declared(subject: Subject, declared: Declaration) -> Iterator[Fault]:
    if declared.algorithm == MIXED:
        for module in subject.contents.modules.values():
            if module.quantised and module.name not in declared.layers:
                fact = f"{module.name} is {module.format}, but is not among the layers that {declared.file} declares"
                yield Fault(module.name, fact)


def _all_matched(subject: Subject, declared: Declaration) -> set[str]:
    return {name for found in subject.excluded[declared.file].values() for name in found}


def _plain(subject: Subject, declared: Declaration) -> Iterator[Module]:
    if declared.algorithm != MIXED:
        yield from (module for module in subject.contents.modules.values() if module.format in PLAIN)


def _is_listed_head(module: Module, declared: Declaration) -> bool:
    return module.place.kind == "lm_head" and declared.lists_excludes


def _group_bits(contents: Contents) -> set[int]:
    """Weight bits of compressed-tensors' config groups."""
    groups = table_of(table_of(contents.config.get("quantization_config")).get("config_groups")).values()
    bits = {table_of(table_of(group).get("weights")).get("num_bits") for group in groups}
    return {value for value in bits if isinstance(value, int)}


ONE_TRUTH = "write both files from the same list of layers, generated from the tensors; drop a quantization_config of the source"
RULES = (
    Rule(
        "configs-disagree-on-algorithm", ERROR, _disagree("algorithm", lambda declared: declared.algorithm),
        "loaders read one or the other, so some will not run it", ONE_TRUTH,
    ),
    Rule(
        "configs-disagree-on-kv-cache", ERROR, _disagree("KV cache", lambda declared: declared.kv_cache),
        "loaders read one or the other, so the cache has one type here and another there", ONE_TRUTH,
    ),
    Rule(
        "configs-disagree-on-excludes", ERROR, _disagree_on_excludes,
        "loaders read one or the other, so a layer is built in two ways", ONE_TRUTH,
    ),
    Rule(
        "not-declared", ERROR, _undeclared, "loaders take the checkpoint for BF16 and drop the scales",
        "write quantization_config, and for ModelOpt's layout hf_quant_config.json",
    ),
    Rule(
        "declared-otherwise", ERROR, _each(_otherwise), "loaders build layers that do not fit the tensors",
        "declare the algorithm that the tensors show",
    ),
    Rule(
        "beside-the-algorithm", ERROR, _each(_beside), "loaders build it in the declared format and read its codes wrongly",
        f"declare {MIXED} with each layer's algorithm",
    ),
    Rule(
        "pattern-without-a-module", WARNING, _each(_pattern), "what was meant will be built quantised",
        "correct the pattern; an MTP layer has the number after the last layer",
    ),
    Rule(
        "excluded-but-quantised", ERROR, _each(_excluded), "loaders build it in BF16 and read codes for weights",
        "drop the pattern, or store the layer in BF16",
    ),
    Rule(
        "plain-but-not-excluded", ERROR, _each(_not_excluded), "loaders build it quantised and find no scales",
        "add it to the excluded modules of both configs",
    ),
    Rule(
        "router-not-excluded", WARNING, _each(_router), "loaders that take it for a linear layer build it quantised",
        "add the routers to the excluded modules of both configs",
    ),
    Rule(
        "declared-layer-not-stored", ERROR, _each(_not_stored), "loaders wait for its tensors",
        "drop it from quantized_layers, or store it",
    ),
    Rule(
        "declared-layer-otherwise", ERROR, _each(_stored_otherwise), "loaders stop or misread it",
        "declare the algorithm that its tensors show",
    ),
    Rule(
        "layer-not-declared", ERROR, _each(_not_declared), "loaders build it in BF16 and read codes for weights",
        "add it to quantized_layers",
    ),
)  # fmt: skip
