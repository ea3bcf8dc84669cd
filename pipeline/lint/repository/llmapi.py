"""TensorRT-LLM's llmapi model: `model.yaml` beside config.pbtxt, which must say the same, and the LLM arguments in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tritonclient.grpc import model_config_pb2 as pb

from pipeline.engines.trtllm.fields import shown
from pipeline.lint.base import ERROR, WARNING, Fault, Rule
from pipeline.lint.repository.gpus import device_lists
from pipeline.lint.repository.subject import RUN, Model

__all__ = ["RULES"]

KNOWN = ("max_batch_size", "decoupled", "cancellation_check_period_ms", "multimodal")
UPSTREAM = "TensorRT-LLM triton_backend/all_models/llmapi/tensorrt_llm/1/model.py"
PROVEN = f"{RUN}; launch_triton_server.py of TensorRT-LLM passes --disable-auto-complete-config"
TYPES = {
    "text_input": "STRING", "streaming": "BOOL", "stop": "BOOL", "image_url": "STRING", "lora_id": "UINT64",
    "sampling_param_best_of": "INT32", "sampling_param_temperature": "FP32", "sampling_param_top_k": "INT32",
    "sampling_param_top_p": "FP32", "sampling_param_frequency_penalty": "FP32", "sampling_param_presence_penalty": "FP32",
    "sampling_param_max_tokens": "INT32", "sampling_param_stop": "STRING", "sampling_param_seed": "UINT64",
    "sampling_param_exclude_input_from_output": "BOOL", "sampling_param_return_perf_metrics": "BOOL",
    "return_finish_reason": "BOOL", "return_stop_reason": "BOOL", "return_cumulative_logprob": "BOOL",
    "text_output": "STRING", "finish_reason": "STRING", "stop_reason": "STRING", "cumulative_logprob": "FP32",
}  # fmt: skip
"""Tensors of the model, by name."""


def _triton(model: Model) -> Mapping[str, object]:
    found = model.settings.values.get("triton_config") if model.settings else None
    return found if isinstance(found, Mapping) else {}


def _missing(model: Model) -> Iterator[Fault]:
    if model.settings is not None:
        for key in ("decoupled", "max_batch_size"):
            if key not in _triton(model):
                yield Fault(model.settings.at(f"triton_config.{key}"), f"triton_config.{key} is missing: KeyError at load")


def _unknown(model: Model) -> Iterator[Fault]:
    for key in _triton(model):
        if key not in KNOWN and model.settings:
            yield Fault(model.settings.at(f"triton_config.{key}"), f"triton_config.{key} is read by nobody")


def _decoupled(model: Model) -> Iterator[Fault]:
    theirs = _triton(model).get("decoupled")
    if model.settings is None or theirs is None or not model.config.HasField("model_transaction_policy"):
        return
    ours = model.config.model_transaction_policy.decoupled
    if bool(theirs) != ours:
        reason = (
            f"decoupled is {shown(ours)} in config.pbtxt, {shown(bool(theirs))} in model.yaml: with auto-completion it does not "
            "load, without it streams end after one token"
        )
        yield Fault(model.settings.at("triton_config.decoupled"), reason)


def _silent(model: Model) -> Iterator[Fault]:
    if model.settings and _triton(model).get("decoupled") is True and not model.config.HasField("model_transaction_policy"):
        reason = (
            "decoupled is true in model.yaml alone: with --disable-auto-complete-config, which NVIDIA's launcher passes, Triton "
            "does not read it, and a stream ends after one token with status 200"
        )
        yield Fault(model.at(key="model_transaction_policy"), reason)


def _batch(model: Model) -> Iterator[Fault]:
    theirs = _triton(model).get("max_batch_size")
    ensemble = any(tensor.name == "max_tokens" for tensor in model.config.input)  # our model, with a batch dimension of one
    if model.settings is not None and theirs not in (None, 0, int(ensemble)):
        yield Fault(model.settings.at("triton_config.max_batch_size"), f"max_batch_size is {theirs}: this model does not batch")


def _batches(model: Model) -> Iterator[Fault]:
    theirs, ours = _triton(model).get("max_batch_size"), model.config.max_batch_size
    if model.settings is not None and theirs is not None and model.understood and ours != theirs:
        reason = (
            f"max_batch_size is {ours} in config.pbtxt, {theirs} in model.yaml: with auto-completion it does not load, without it "
            "the model gets a batch dimension that it refuses"
        )
        yield Fault(model.at(r"\bmax_batch_size\b"), reason)


def _period(model: Model) -> Iterator[Fault]:
    value = _triton(model).get("cancellation_check_period_ms", 100)
    if model.settings is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        yield Fault(model.settings.at("triton_config.cancellation_check_period_ms"), f"cancellation_check_period_ms is {value!r}")


def _tensors(model: Model) -> Iterator[Fault]:
    if model.settings is None or not model.understood:
        return
    for tensor in (*model.config.input, *model.config.output):
        kind, wanted = pb.DataType.Name(tensor.data_type).removeprefix("TYPE_"), TYPES.get(tensor.name)
        if wanted and kind != wanted:
            yield Fault(model.at_tensor(tensor.name), f"{tensor.name} is {kind}, the model takes {wanted}")


def _text_input(model: Model) -> Iterator[Fault]:
    own_inputs = [tensor.name for tensor in model.config.input]
    if model.settings is not None and own_inputs and "text_input" not in own_inputs:
        yield Fault(model.at(r"\binput\b"), "there is no input text_input, which the model requires")


def _instances(model: Model) -> Iterator[Fault]:
    if model.settings is None or model.count == 1:
        return
    lists = device_lists(model.parameters.get("gpu_device_ids", ""))
    if not lists:
        yield Fault(model.at(r"\bcount\b", "parameters.gpu_device_ids"), f"{model.count} instances need gpu_device_ids")
    elif len(lists) != model.count:
        place = model.at_parameter("gpu_device_ids")
        yield Fault(place, f"gpu_device_ids has {len(lists)} lists for {model.count} instances")


def _world(model: Model) -> Iterator[Fault]:
    if model.settings is None:
        return
    sizes = [model.settings.get(key, 1) for key in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")]
    world = sizes[0] * sizes[1] * sizes[2] if all(isinstance(size, int) for size in sizes) else 0
    for devices in device_lists(model.parameters.get("gpu_device_ids", "")):
        if world and len(devices) < world:
            place = model.at_parameter("gpu_device_ids")
            yield Fault(place, f"gpu_device_ids gives {len(devices)} GPUs to an instance of {world} ranks")


RULES: tuple[Rule[Model], ...] = (
    Rule("llmapi/triton-config", ERROR, _missing, "add triton_config: {decoupled: true, max_batch_size: 0}", UPSTREAM),
    Rule("llmapi/unknown-key", WARNING, _unknown, f"remove it; known are {', '.join(KNOWN)}", UPSTREAM),
    Rule("llmapi/decoupled", ERROR, _decoupled, "set both to the same value", PROVEN),
    Rule("llmapi/silent-policy", WARNING, _silent,
         "write model_transaction_policy { decoupled: true } into config.pbtxt, too", PROVEN),
    Rule("llmapi/batching", ERROR, _batch, "set triton_config.max_batch_size to 0", UPSTREAM),
    Rule("llmapi/max-batch-size", ERROR, _batches, "set both to 0", PROVEN),
    Rule("llmapi/cancellation-period", ERROR, _period, "set milliseconds, such as 100", UPSTREAM),
    Rule("llmapi/tensor-type", ERROR, _tensors, "declare the type that the model reads",
         "TensorRT-LLM triton_backend/all_models/llmapi/tensorrt_llm/config.pbtxt"),
    Rule("llmapi/text-input", ERROR, _text_input, "declare text_input, TYPE_STRING, dims [-1]", UPSTREAM),
    Rule("llmapi/instances", ERROR, _instances, 'set gpu_device_ids to as many lists, such as "0,1;2,3"', UPSTREAM),
    Rule("llmapi/gpus", ERROR, _world, "give each instance tensor_parallel_size x pipeline_parallel_size GPUs", UPSTREAM),
)  # fmt: skip
