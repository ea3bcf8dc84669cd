"""How a served model spells the options of a request, read off its configuration, and the messages of its gRPC protocol.

Three dialects exist: the names of TensorRT-LLM's ensemble and BLS models ("ensemble", which the torch engine shares),
those of its LLM-API model ("llmapi": `streaming`, `sampling_param_max_tokens`, no batch dimension), and Triton's vLLM
backend, which takes all sampling as one JSON text in `sampling_parameters`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.utils import serialize_byte_tensor, triton_to_np_dtype

from pipeline.core.errors import ConfigError

__all__ = ["Dialect", "is_cumulative", "outputs_of", "text_of"]

ENSEMBLE = {
    "stream": "stream",
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "seed": "seed",
    "stop_words": "stop_words",
    "ignore_eos": "ignore_eos",
    "count_prompt": "return_num_input_tokens",
    "count_tokens": "return_num_output_tokens",
    "finish_reason": "return_finish_reason",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
LLMAPI = {
    "stream": "streaming",
    "max_tokens": "sampling_param_max_tokens",
    "temperature": "sampling_param_temperature",
    "top_k": "sampling_param_top_k",
    "top_p": "sampling_param_top_p",
    "seed": "sampling_param_seed",
    "stop_words": "sampling_param_stop",
    "ignore_eos": "sampling_param_ignore_eos",
    "finish_reason": "return_finish_reason",
    "count_prompt": "return_num_input_tokens",
    "count_tokens": "return_num_output_tokens",
    "presence_penalty": "sampling_param_presence_penalty",
    "frequency_penalty": "sampling_param_frequency_penalty",
}
VLLM_TENSORS = {
    "stream": "stream",
    "finish_reason": "return_finish_reason",
    "count_prompt": "return_num_input_tokens",
    "count_tokens": "return_num_output_tokens",
}
VLLM_PACKED = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "seed": "seed",
    "stop_words": "stop",
    "ignore_eos": "ignore_eos",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Our option names -> keys inside the text of `sampling_parameters`."""
PACKED = "sampling_parameters"
WITHOUT_PROMPT = "exclude_input_in_output"
"""Left out, vLLM's backend and TensorRT-LLM's ensemble put the prompt before an answer that is not streamed."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one model understands. An option that the model lacks is in neither table."""

    model: str
    names: Mapping[str, str]
    """Our option names -> the model's input names."""
    packed: Mapping[str, str]
    """Our option names -> keys of `sampling_parameters`; empty but for vLLM."""
    kinds: Mapping[str, str]
    """Input name -> its type on the wire: BYTES, INT32, ..."""
    required: frozenset[str]
    """Inputs that are not optional."""
    batched: bool
    decoupled: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Dialect:
        """The dialect of the model whose configuration (as JSON) this is."""
        inputs = {tensor["name"]: tensor for tensor in config["input"]}
        known = LLMAPI if "sampling_param_max_tokens" in inputs else VLLM_TENSORS if PACKED in inputs else ENSEMBLE
        return cls(
            model=str(config["name"]),
            names={ours: theirs for ours, theirs in known.items() if theirs in inputs},
            packed=VLLM_PACKED if PACKED in inputs else {},
            kinds={name: _wire(tensor["data_type"]) for name, tensor in inputs.items()},
            required=frozenset(name for name, tensor in inputs.items() if not tensor.get("optional")),
            batched=int(config.get("max_batch_size", 0)) > 0,
            decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
        )

    @property
    def may_repeat(self) -> bool:
        """True if streams of such a model may repeat the text so far: upstream's LLM-API model does, ours does not."""
        return "streaming" in self.names.values()

    @property
    def checks_length(self) -> bool:
        """True if the model refuses what does not fit; vLLM takes any max_tokens, and cuts the answer in silence."""
        return not self.packed

    def has(self, option: str) -> bool:
        """True if the model has a place for `option`."""
        return option in self.names or option in self.packed

    def tensors(self, prompt: str, **options: Any) -> dict[str, Any]:
        """Values by the model's input names; also the JSON body of generate and generate_stream.

        Raises:
            ConfigError: the model has no input for an option.
        """
        packed = {self.packed[option]: value for option, value in options.items() if option in self.packed}
        plain = {self._name(option): value for option, value in options.items() if option not in self.packed}
        more: dict[str, Any] = {PACKED: json.dumps(packed)} if packed else {}
        more |= {WITHOUT_PROMPT: True} if WITHOUT_PROMPT in self.kinds else {}
        return {"text_input": prompt, **plain, **more}

    def request(self, tensors: Mapping[str, Any], request_id: str = "") -> service_pb2.ModelInferRequest:
        """The message that asks for an answer to these inputs; the end of the answer comes as an empty response."""
        request = service_pb2.ModelInferRequest(model_name=self.model, id=request_id)
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        for name, value in tensors.items():
            kind = self.kinds.get(name, "BYTES")
            array = _array(value, kind)
            request.inputs.add(name=name, datatype=kind, shape=[*([1] if self.batched else []), array.size])
            request.raw_input_contents.append(_raw(array, kind))
        return request

    def _name(self, option: str) -> str:
        if option not in self.names:
            known = ", ".join(sorted({*self.names, *self.packed}))
            raise ConfigError(f"Model {self.model} has no input for {option}; it has {known}.")
        return self.names[option]


def outputs_of(response: service_pb2.ModelInferResponse) -> dict[str, bytes]:
    """Raw outputs of one response by name."""
    return {output.name: raw for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)}


def text_of(raw: bytes) -> str:
    """The first string of a raw output: its length stands in the first four bytes."""
    return raw[4 : 4 + int.from_bytes(raw[:4], "little")].decode()


def is_cumulative(pieces: list[str], whole: str) -> bool:
    """True if the chunks of a stream each repeat the text so far, given the whole text of the same request."""
    return len(pieces) > 1 and "".join(pieces) != whole and [piece for piece in pieces if piece][-1] == whole


def _wire(data_type: str) -> str:
    kind = data_type.removeprefix("TYPE_")
    return "BYTES" if kind == "STRING" else kind


def _array(value: Any, kind: str) -> np.ndarray:
    values = value if isinstance(value, list) else [value]
    if kind == "BYTES":
        values = [text.encode() if isinstance(text, str) else text for text in values]
    return np.array(values, dtype=triton_to_np_dtype(kind))


def _raw(array: np.ndarray, kind: str) -> bytes:
    return bytes(serialize_byte_tensor(array).item()) if kind == "BYTES" and array.size else array.tobytes()
