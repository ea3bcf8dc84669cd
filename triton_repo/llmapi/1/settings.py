"""What model.yaml and config.pbtxt say, held against each other before the engine takes any GPU."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CANCEL_PERIOD_MS = 100
JOB_VARIABLES = ("OMPI_", "PMIX_", "PMI_")
"""Left by a launcher such as mpirun; LLM would take this process for one rank of that job."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one instance of the model."""

    engine: dict[str, Any]
    """Arguments of `tensorrt_llm.LLM`."""
    cancel_period: float
    """Seconds between two looks at whether the client is gone."""
    max_requests: int
    """Requests that may run or wait."""
    ensemble: bool
    """Whether clients use the names of TensorRT-LLM's ensemble, with a batch dimension of one."""

    @property
    def guides(self) -> bool:
        """Whether the engine can guide its text by a grammar or a schema."""
        return bool(self.engine.get("guided_decoding_backend"))


def read_settings(args: dict[str, str]) -> Settings:
    """The settings of the instance that Triton describes in `args`; also sets the environment that the engine starts in.

    Raises:
        RuntimeError: with a sentence, where the two files contradict each other or do not fit this model.
    """
    folder = Path(args["model_repository"]) / args["model_version"]
    file = Path(os.environ.get("LLM_CONFIG_PATH", folder / "model.yaml"))
    engine, config = yaml.safe_load(file.read_text(encoding="utf-8")), json.loads(args["model_config"])
    policy = engine.pop("triton_config", {})
    _require_same_policy(policy, config)
    engine["model"] = str(folder / engine["model"])  # an absolute path stays what it is
    for name in [name for name in os.environ if name.startswith(JOB_VARIABLES)]:
        del os.environ[name]
    if devices := _devices(config, args["model_instance_name"]):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        engine["gpus_per_node"] = len(devices)
    period = policy.get("cancellation_check_period_ms", CANCEL_PERIOD_MS)
    most = int(config["parameters"]["max_requests"]["string_value"])
    return Settings(engine, period / 1000, most, _has_ensemble_names(config))


def _require_same_policy(wanted: dict[str, Any], config: dict[str, Any]) -> None:
    """Refuse a config.pbtxt that contradicts model.yaml: Triton obeys the first, this code would obey the second."""
    decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled", False))
    batch = int(config.get("max_batch_size", 0))
    if (decoupled, batch) != (wanted.get("decoupled"), wanted.get("max_batch_size")):
        raise RuntimeError(
            f"config.pbtxt says decoupled {decoupled} and max_batch_size {batch}, triton_config of model.yaml says "
            f"{wanted.get('decoupled')} and {wanted.get('max_batch_size')}; make them equal"
        )
    if not decoupled or batch != _has_ensemble_names(config):
        raise RuntimeError(
            "this model streams, one prompt a request: decoupled must be true, max_batch_size 0, or 1 with the ensemble's names"
        )


def _has_ensemble_names(config: dict[str, Any]) -> bool:
    return any(tensor["name"] == "max_tokens" for tensor in config.get("input", []))


def _devices(config: dict[str, Any], instance: str) -> list[str]:
    """GPUs of the instance from `gpu_device_ids` ("0,1;2,3": two instances of two GPUs); none: all that are visible."""
    count = sum(group.get("count", 1) for group in config.get("instance_group", [{}]))
    text = config["parameters"].get("gpu_device_ids", {}).get("string_value", "")
    lists = [part.split(",") for part in text.split(";")] if text else []
    if not lists and count == 1:
        return []
    if len(lists) != count:
        raise RuntimeError(
            f"{count} instances need as many lists of GPUs in the parameter gpu_device_ids, such as 0,1;2,3; it has {len(lists)}"
        )
    return lists[int(instance.rpartition("_")[2])]
