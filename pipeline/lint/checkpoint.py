"""A checkpoint folder: the invariants of `verify` that headers show, and what TensorRT-LLM's reader and routing kernel ask for.

Values of block scales and weights are not read here, which keeps a checkpoint of 400 GB within seconds: `verify DIR` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline.checkpoint.reader import uncollected
from pipeline.core.errors import ConfigError
from pipeline.core.jsonio import read_json
from pipeline.engines.trtllm.versions import last_with_tensorrt
from pipeline.inspect.contents import Contents, table_of, whole
from pipeline.lint.base import ERROR, NOTE, WARNING, Fault, Finding, Place, Rule, apply
from pipeline.lint.target import Target
from pipeline.verify import invariants
from pipeline.verify.invariants import Subject, check

__all__ = ["INVARIANTS", "RULES", "findings", "is_tensorrt_engine", "open_contents", "tensorrt_findings"]

READER = "TensorRT-LLM tensorrt_llm/_torch/model_config.py"
KERNEL = "TensorRT-LLM cpp/tensorrt_llm/kernels/noAuxTcKernels.cu"
ALGORITHMS = (
    "NVFP4", "FP8", "FP8_BLOCK_SCALES", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "fp8_pb_wo", "W4A16_NVFP4", "NVFP4_AWQ",
    "W4A8_NVFP4_FP8", "W4A16_AWQ", "W4A8_AWQ", "W4A16_GPTQ", "W8A16_GPTQ", "W4A16", "W8A16", "W4A16_MXFP4", "W4A8_MXFP4_FP8",
    "W4A8_MXFP4_MXFP8", "MXFP8", "MXFP4", "W8A8_SQ_PER_CHANNEL", "INT8", "MIXED_PRECISION", "NO_QUANT",
)  # fmt: skip
GROUPS = {"NVFP4": 16, "NVFP4_AWQ": 16, "W4A16_NVFP4": 16, "W4A8_NVFP4_FP8": 32, "FP8_BLOCK_SCALES": 128}
"""Algorithm -> the group size that its kernels take."""
MOST_JSON = 10_000_000
"""Bytes of a file of settings."""
CACHES = ("FP8", "NVFP4", "INT8")
DEEPSEEK = "DeepseekV3ForCausalLM"
BY_VALUE = ("nan-block-scale", "negative-block-scale", "zero-block-scale", "saturated-block-scale")
"""Invariants that only the values of block scales show."""
INVARIANTS = tuple(
    rule for family, rules in invariants.FAMILIES.items() if family != "source" for rule in rules if rule.id not in BY_VALUE
)
"""Those of `verify` that headers, configs and tensor-wide scales show."""


def findings(folder: Path, target: Target) -> Iterator[Finding]:
    """Every breach by a checkpoint.

    Raises:
        ConfigError: if there are no weights and no settings in the folder.
    """
    contents = open_contents(folder)
    for found in check(Subject(contents)):
        first, more = found.faults[0], len(found.faults) - 1
        reason = found.rule.sentence(first).rstrip(".") + (f" ({more:,} more)" if more else "")
        place = Place(folder, None, first.tensor)
        yield Finding(f"checkpoint/{found.rule.id}", found.rule.level, place, reason, found.rule.fix, "pipeline/verify/invariants")
    yield from apply(RULES, contents, folder)
    if target.config is not None:
        from pipeline.lint.planned import findings_of_checkpoint

        yield from findings_of_checkpoint(contents, target)


@uncollected()
def open_contents(folder: Path) -> Contents:
    """Headers and configs; also of a folder without weights."""
    try:
        return Contents.open(folder)
    except ConfigError as error:
        return Contents.without_weights(folder, str(error))


def _declared(contents: Contents) -> dict[str, Any]:
    """The table `quantization` of hf_quant_config.json."""
    return table_of(table_of(contents.quantisation).get("quantization"))


def _inline(contents: Contents) -> dict[str, Any]:
    return table_of(contents.config.get("quantization_config"))


def _small_table(file: Path) -> dict[str, Any]:
    """Of a JSON file; empty where there is none, or it is too large to be settings."""
    return table_of(read_json(file)) if file.is_file() and file.stat().st_size < MOST_JSON else {}


def _hf(contents: Contents, key: str = "") -> Place:
    return Place(contents.folder / "hf_quant_config.json", None, key)


def _config(contents: Contents, key: str = "") -> Place:
    return Place(contents.folder / "config.json", None, key)


def _algorithm(contents: Contents) -> Iterator[Fault]:
    algorithm = _declared(contents).get("quant_algo")
    if algorithm is not None and str(algorithm) not in ALGORITHMS:
        yield Fault(_hf(contents, "quantization.quant_algo"), f"quant_algo {algorithm} is not known to TensorRT-LLM")


def _group(contents: Contents) -> Iterator[Fault]:
    declared = _declared(contents)
    wanted, size = GROUPS.get(str(declared.get("quant_algo"))), declared.get("group_size")
    if wanted and size not in (None, wanted):
        yield Fault(
            _hf(contents, "quantization.group_size"), f"group_size {size} for {declared['quant_algo']}, whose kernels take {wanted}"
        )
    inline = _inline(contents)
    if inline.get("quant_method") == "nvfp4" and inline.get("group_size") not in (None, 16):
        yield Fault(
            _config(contents, "quantization_config.group_size"),
            f"group_size {inline['group_size']} for nvfp4: the reader asserts 16",
        )


def _block(contents: Contents) -> Iterator[Fault]:
    size = _inline(contents).get("weight_block_size")
    if _inline(contents).get("quant_method") == "fp8" and size is not None and list(size) != [128, 128]:
        place = _config(contents, "quantization_config.weight_block_size")
        yield Fault(place, f"weight_block_size {size}: the reader asserts [128, 128]")


def _cache(contents: Contents) -> Iterator[Fault]:
    value = _declared(contents).get("kv_cache_quant_algo")
    if value is not None and str(value) not in CACHES:
        yield Fault(
            _hf(contents, "quantization.kv_cache_quant_algo"), f"kv_cache_quant_algo {value} is none of {', '.join(CACHES)}"
        )


def _mla_cache(contents: Contents) -> Iterator[Fault]:
    if _declared(contents).get("kv_cache_quant_algo") == "NVFP4" and contents.config.get("kv_lora_rank"):
        place = _hf(contents, "quantization.kv_cache_quant_algo")
        yield Fault(
            place,
            "kv_cache_quant_algo NVFP4 with MLA: block reuse and chunked prefill are turned off, where there are kernels at all",
        )


def _two_caches(contents: Contents) -> Iterator[Fault]:
    """MIXED_PRECISION is read from quant_cfg.json where there is one."""
    file = contents.folder / "quant_cfg.json"
    try:
        other = _small_table(file)
    except (OSError, ValueError, RecursionError) as error:
        yield Fault(Place(file), f"quant_cfg.json cannot be read: {str(error)[:200]}")
        return
    ours, theirs = _declared(contents).get("kv_cache_quant_algo"), other.get("kv_cache_quant_algo")
    if theirs is not None and ours is not None and ours != theirs:
        yield Fault(
            Place(file, None, "kv_cache_quant_algo"), f"kv_cache_quant_algo is {theirs} here, {ours} in hf_quant_config.json"
        )


def _is_deepseek(contents: Contents) -> bool:
    return DEEPSEEK in (contents.config.get("architectures") or ()) or contents.config.get("model_type") == "deepseek_v3"


def _routing(contents: Contents) -> Iterator[Fault]:
    """Limits of the fused kernel; beyond them PyTorch routes, 17 times slower."""
    config = contents.config
    experts, groups, top_k = whole(config, "n_routed_experts"), whole(config, "n_group") or 1, whole(config, "num_experts_per_tok")
    chosen = whole(config, "topk_group") or 1
    if not _is_deepseek(contents) or not experts:
        return
    each = experts // groups
    if groups == 1:
        beyond = {"experts": (experts, 1024), "experts a token": (top_k, 32)}
    else:
        beyond = {
            "experts": (experts, 256), "experts a group": (each, 32), "experts a token": (top_k, 8),
            "experts in the chosen groups": (each * chosen, 256),
        }  # fmt: skip
    for name, (value, limit) in beyond.items():
        if value > limit:
            yield Fault(
                _config(contents), f"{value} {name} exceed the {limit} of the fused routing kernel: PyTorch routes, much slower"
            )


def _groups(contents: Contents) -> Iterator[Fault]:
    config = contents.config
    groups, chosen = whole(config, "n_group"), whole(config, "topk_group")
    if _is_deepseek(contents) and groups > 1 and chosen and chosen != min(4, groups):
        yield Fault(
            _config(contents, "topk_group"), f"topk_group {chosen}: the fused kernel of earlier releases always takes 4 groups"
        )


def _normalised(contents: Contents) -> Iterator[Fault]:
    if _is_deepseek(contents) and contents.config.get("norm_topk_prob") is False:
        yield Fault(_config(contents, "norm_topk_prob"), "norm_topk_prob is false, but the routing kernel always normalises")


def _scoring(contents: Contents) -> Iterator[Fault]:
    for key, wanted in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        value = contents.config.get(key)
        if _is_deepseek(contents) and value is not None and value != wanted:
            yield Fault(_config(contents, key), f"{key} is {value}, but TensorRT-LLM routes DeepSeek-V3 by {wanted}")


RULES: tuple[Rule[Contents], ...] = (
    Rule("checkpoint/algorithm", ERROR, _algorithm, "name one that it knows, such as NVFP4 or FP8_BLOCK_SCALES", READER),
    Rule("checkpoint/group-size", ERROR, _group, "quantise in groups of that size", READER),
    Rule("checkpoint/block-size", ERROR, _block, "quantise in blocks of 128 x 128", READER),
    Rule("checkpoint/cache-algorithm", ERROR, _cache, "set FP8, or null", READER),
    Rule("checkpoint/cache-of-mla", WARNING, _mla_cache, "set FP8", "TensorRT-LLM pull requests 6244, 18723"),
    Rule("checkpoint/two-caches", ERROR, _two_caches, "write one value into both", f"{READER}: RuntimeError"),
    Rule("checkpoint/routing-limits", WARNING, _routing, "nothing to mend in the checkpoint: expect slow routing", KERNEL),
    Rule("checkpoint/routing-groups", NOTE, _groups, "compare routed experts with a reference", KERNEL),
    Rule("checkpoint/routing-norm", ERROR, _normalised, "serve it with another runtime", KERNEL),
    Rule("checkpoint/routing-score", ERROR, _scoring, "serve it with another runtime", "TensorRT-LLM modeling_deepseekv3.py"),
)  # fmt: skip


def is_tensorrt_engine(folder: Path) -> bool:
    """Whether a folder holds a TensorRT engine, or the checkpoint that trtllm-build makes one from."""
    if any(folder.glob("rank*.engine")):
        return True
    try:
        config = _small_table(folder / "config.json")
    except (OSError, ValueError, RecursionError):
        return False
    return bool({"pretrained_config", "build_config"} & config.keys()) or (folder / "rank0.safetensors").is_file()


def tensorrt_findings(folder: Path, target: Target) -> Iterator[Finding]:
    """That it is one, and what follows."""
    gone = (
        f"TensorRT-LLM {target.version} cannot load it"
        if target.without_tensorrt
        else f"{last_with_tensorrt()} is the last release that loads it"
    )
    reason = f"this is a TensorRT engine, or the checkpoint for one: {gone}, and DeepSeek's experts have no way there"
    level = ERROR if target.without_tensorrt else WARNING
    source = "TensorRT-LLM docs/source/legacy/tensorrt-backend-removal.md; NVIDIA/TensorRT-LLM issue 9981"
    yield Finding(TENSORRT, level, Place(folder), reason, "serve the Hugging Face checkpoint with the PyTorch backend", source)


TENSORRT = "checkpoint/tensorrt-engine"
