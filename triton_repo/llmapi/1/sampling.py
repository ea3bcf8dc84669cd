"""From a request's tensors to a call of `LLM.generate_async`, under the names of upstream's llmapi model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

SAMPLING = {
    "best_of": int,
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "frequency_penalty": float,
    "presence_penalty": float,
    "max_tokens": int,
    "min_tokens": int,
    "length_penalty": float,
    "repetition_penalty": float,
    "end_id": int,
    "pad_id": int,
    "ignore_eos": bool,
    "seed": int,
}
"""`sampling_param_<name>` -> its type; each is a field of SamplingParams under the same name."""
WORDS = ("stop", "bad")
"""`sampling_param_<name>`: lists of words, also fields of SamplingParams."""
GUIDES = {"json": "json_object", "json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}
"""`guided_decoding_guide_type` -> field of GuidedDecodingParams."""
REFUSED = ("image_url", "lora_id", "lora_name", "lora_path", "lora_ckpt_source", "sampling_param_return_perf_metrics")
"""Inputs of upstream's model that this one does not serve: refused with a sentence, never ignored."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request, read and checked."""

    prompt: str
    sampling: dict[str, Any] = field(default_factory=dict)
    streaming: bool = False
    exclude_input: bool = True
    finish_reason: bool = False
    stop_reason: bool = False
    cumulative_logprob: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    guide: dict[str, Any] = field(default_factory=dict)
    """Arguments of GuidedDecodingParams; empty: the text is free."""


def read_call(tensors: dict[str, np.ndarray]) -> Call:
    """The call that a request's input tensors (by name) describe.

    Raises:
        ValueError: with a sentence for the client.
    """
    if wrong := [name for name in REFUSED if name in tensors and _truthy(tensors[name])]:
        raise ValueError(f"{', '.join(wrong)}: not served by this model; leave it out")
    sampling = {name: kind(_one(tensors, f"sampling_param_{name}")) for name, kind in SAMPLING.items()
                if f"sampling_param_{name}" in tensors}  # fmt: skip
    sampling |= {name: [_text(word) for word in tensors[f"sampling_param_{name}"].reshape(-1)] for name in WORDS
                 if f"sampling_param_{name}" in tensors}  # fmt: skip
    return Call(
        prompt=_prompt(tensors),
        sampling=_checked(sampling),
        streaming=_flag(tensors, "streaming", False),
        exclude_input=_flag(tensors, "sampling_param_exclude_input_from_output", True),
        finish_reason=_flag(tensors, "return_finish_reason", False),
        stop_reason=_flag(tensors, "return_stop_reason", False),
        cumulative_logprob=_flag(tensors, "return_cumulative_logprob", False),
        num_input_tokens=_flag(tensors, "return_num_input_tokens", False),
        num_output_tokens=_flag(tensors, "return_num_output_tokens", False),
        guide=_guide(tensors),
    )


def wants_stop(tensors: dict[str, np.ndarray]) -> bool:
    """Whether the request only asks to cancel the running one with its id."""
    return _flag(tensors, "stop", False)


def _prompt(tensors: dict[str, np.ndarray]) -> str:
    value = tensors["text_input"]
    if value.ndim != 1 or value.size != 1:
        raise ValueError(f"text_input has shape {list(value.shape)}; send one prompt a request, as shape [1]")
    if not (prompt := _text(value[0])):
        raise ValueError("text_input is empty; send at least one character")
    return prompt


def _guide(tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    if "guided_decoding_guide_type" not in tensors:
        return {}
    kind = _text(_one(tensors, "guided_decoding_guide_type"))
    if kind not in GUIDES:
        raise ValueError(f"guided_decoding_guide_type={kind} is not one of {', '.join(GUIDES)}")
    if kind == "json":
        return {"json_object": True}
    if "guided_decoding_guide" not in tensors:
        raise ValueError(f"guided_decoding_guide_type={kind} needs a guided_decoding_guide")
    return {GUIDES[kind]: _text(_one(tensors, "guided_decoding_guide"))}


def _checked(sampling: dict[str, Any]) -> dict[str, Any]:
    """Ranges that the engine would report late or in its own words."""
    if sampling.get("max_tokens", 1) < 1:
        raise ValueError(f"sampling_param_max_tokens={sampling['max_tokens']} must be at least 1")
    if sampling.get("temperature", 1.0) < 0:
        raise ValueError(f"sampling_param_temperature={sampling['temperature']:g} must be 0 or above")
    if not 0 < sampling.get("top_p", 1.0) <= 1:
        raise ValueError(f"sampling_param_top_p={sampling['top_p']:g} must lie above 0 and be at most 1")
    if sampling.get("top_k", 0) < 0:
        raise ValueError(f"sampling_param_top_k={sampling['top_k']} must be 0 or above")
    if sampling.get("best_of", 1) != 1:
        raise ValueError(f"sampling_param_best_of={sampling['best_of']}: there is one completion; leave it out")
    return sampling


def _flag(tensors: dict[str, np.ndarray], name: str, default: bool) -> bool:
    return bool(_one(tensors, name)) if name in tensors else default


def _one(tensors: dict[str, np.ndarray], name: str) -> Any:
    value = tensors[name].reshape(-1)
    if value.size != 1:
        raise ValueError(f"{name} has {value.size} values; send one")
    return value[0]


def _truthy(value: np.ndarray) -> bool:
    return bool(value.size) and any(bool(item) for item in value.reshape(-1).tolist())


def _text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
