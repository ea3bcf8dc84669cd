"""GPUs that the models of one repository share: device lists, instances, and the memory that they claim together."""

from __future__ import annotations

from collections.abc import Iterator

from tritonclient.grpc import model_config_pb2 as pb

from pipeline.lint.base import ERROR, WARNING, Fault, Place, Rule
from pipeline.lint.repository.subject import Model, Repository

__all__ = ["MODEL_RULES", "ROOT_RULES", "device_lists"]

ISSUES = "NVIDIA/TensorRT-LLM issues 486, 1400, 2773"
FRACTION = "kv_cache_free_gpu_mem_fraction"


def device_lists(text: str) -> list[list[int]]:
    """ "0,1;2,3" -> [[0, 1], [2, 3]]; [] where it is no such text."""
    try:
        return [[int(device) for device in part.split(",")] for part in text.split(";")] if text.strip() else []
    except ValueError:
        return []


def _malformed(model: Model) -> Iterator[Fault]:
    for key in ("gpu_device_ids", "GPU_DEVICE_IDS"):
        text = model.parameters.get(key, "")
        lists = device_lists(text)
        flat = [device for devices in lists for device in devices]
        if text and (not lists or min(flat) < 0 or len(set(flat)) < len(flat)):
            yield Fault(model.at_parameter(key), f"{key} is {text!r}, not lists of different GPUs")


def _kind(model: Model) -> Iterator[Fault]:
    for group in model.config.instance_group:
        own = model.config.backend == "tensorrtllm" or model.settings is not None
        if own and group.kind == pb.ModelInstanceGroup.KIND_GPU:
            reason = f"model {model.name} has instances of KIND_GPU, but places itself: their number and GPUs mean nothing"
            yield Fault(model.at(r"\bKIND_GPU\b", "instance_group.kind"), reason)


def _several(model: Model) -> Iterator[Fault]:
    if model.config.backend == "tensorrtllm" and model.count > 1:
        reason = f"model {model.name} has {model.count} instances, but the engine backend serves one: they share its GPUs and crash"
        yield Fault(model.at(r"\bcount\b", "instance_group.count"), reason)


def _world_size(model: Model) -> Iterator[Fault]:
    for key in (key for key in model.config.parameters if key in ("world_size", "tp_size", "pp_size", "tensor_para_size")):
        reason = f"parameter {key} is read by nobody: tritonserver starts one rank, and the engine asserts mpiSize == tp * pp"
        yield Fault(model.at_parameter(key), reason)


def _claimed(repository: Repository) -> Iterator[Fault]:
    """GPUs that are named; models that name none are taken to want the same ones."""
    claims: dict[int | None, list[tuple[Model, float]]] = {}
    for model in repository.models.values():
        share = _share(model)
        for devices in _devices(model) if share else ():
            for device in devices:
                claims.setdefault(device, []).append((model, share))
    for device, parts in claims.items():
        total = sum(share for _, share in parts)
        if len(parts) > 1 and total > 1.0:
            names = " + ".join(f"{share:g} of {model.name}" for model, share in parts)
            where = "GPU memory" if device is None else f"GPU {device}"
            yield Fault(Place(repository.folder), f"{where} is claimed {total:g} times: {names}")
            return


def _devices(model: Model) -> list[list[int | None]]:
    text = model.parameters.get("gpu_device_ids") or model.parameters.get("GPU_DEVICE_IDS", "")
    lists: list[list[int | None]] = [list(devices) for devices in device_lists(text)]
    return lists or [[None]] * (1 if model.settings is None else model.count)


def _share(model: Model) -> float:
    """Of the memory of its GPUs that a model takes; 0 where it holds none of its own."""
    if model.settings is not None:
        value = model.settings.get("kv_cache_config.free_gpu_memory_fraction", 0.9)
    elif model.engine_args is not None:
        value = model.engine_args.get("gpu_memory_utilization", 0.9)
    elif model.config.backend == "tensorrtllm":
        value = model.parameters.get(FRACTION, "0.9")
    else:
        return 0.0
    try:
        return float(value)
    except (TypeError, ValueError):
        return 0.0


ROOT_RULES: tuple[Rule[Repository], ...] = (
    Rule("triton/memory-shared", WARNING, _claimed, "give them different GPUs, or shares that add up to at most 1", ISSUES),
)
MODEL_RULES: tuple[Rule[Model], ...] = (
    Rule("triton/gpu-device-ids", ERROR, _malformed, 'write lists, such as "0,1;2,3"',
         "TensorRT-LLM triton_backend llmapi model.py; vllm_backend src/model.py"),
    Rule("triton/kind-gpu", WARNING, _kind, "use one instance of KIND_CPU",
         "tensorrtllm_backend issues 166, 105, 351"),
    Rule("triton/world-size", WARNING, _world_size,
         "remove it; start ranks with mpirun, or serve the llmapi model, which starts its own (across nodes: trtllm-llmapi-launch)",
         "tensorrtllm_backend issue 398, pull request 772"),
    Rule("engine/instances", ERROR, _several, "set count 1, and start one server for each copy",
         "tensorrtllm_backend issues 166, 105, 351"),
)  # fmt: skip
