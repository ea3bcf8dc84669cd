"""What vLLM loads: the name of its loader for each on-disk layout and weight format, or why it has none."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["loader_of", "refusal"]

LOADERS = {
    ("modelopt", "fp8_block"): "fp8",
    ("modelopt", "fp8"): "modelopt",
    ("modelopt", "nvfp4"): "modelopt_fp4",
    ("autoawq", "int4_awq"): "awq_marlin",
    ("gptq", "int4_awq"): "gptq_marlin",
} | {
    ("compressed_tensors", name): "compressed-tensors"
    for name in ("fp8", "fp8_block", "fp8_channel", "nvfp4", "w4a16_nvfp4", "int4_awq")
}
"""(quant.layout, weight format) -> `quantization` of vLLM's engine arguments.
Source: vllm model_executor/layers/quantization (fp8.py, modelopt.py, awq_marlin.py, gptq_marlin.py, compressed_tensors/)."""
REASONS = {
    ("modelopt", "w4a16_nvfp4"): "vLLM takes it for W4A4 and multiplies by an input_scale that nobody wrote (vllm issue 54189)",
}


def loader_of(layout: str, formats: Iterable[str]) -> str | None:
    """The loader's name; None where nothing is quantised. Only for what `refusal` lets pass."""
    quantised = sorted(set(formats) - {"bf16"})
    return LOADERS[layout, quantised[0]] if quantised else None


def refusal(layout: str, formats: Iterable[str]) -> str | None:
    """Why vLLM cannot load a checkpoint of these weight formats, with the way out; None if it can."""
    quantised = sorted(set(formats) - {"bf16"})
    if _takes(layout, quantised):
        return None
    wrong = [name for name in quantised if (layout, name) not in LOADERS]
    reason = next((REASONS[layout, name] for name in wrong if (layout, name) in REASONS), "")
    if not wrong:
        reason = "vLLM's loader of that layout takes one format for all weights"
    able = [other for other in ("compressed_tensors", "modelopt") if other != layout and _takes(other, quantised)]
    way_out = f"set quant.layout={able[0]}" if able else "choose quant=nvfp4 or quant=fp8_block"
    return (
        f"vLLM has no loader for {' with '.join(wrong or quantised)} in quant.layout={layout}"
        f"{f' ({reason})' if reason else ''}: {way_out}."
    )


def _takes(layout: str, quantised: list[str]) -> bool:
    """Whether there is a loader for all of these formats; only that of compressed tensors takes more than one."""
    known = all((layout, name) in LOADERS for name in quantised)
    return known and (layout == "compressed_tensors" or len(quantised) <= 1)
