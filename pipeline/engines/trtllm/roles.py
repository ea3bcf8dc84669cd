"""The instances of a plan, and how disaggregated ones are served together.

Aggregated instances are all alike. Disaggregated ones have two roles: `context` instances compute prompts and send their cache
to `generation` instances, which decode; `trtllm-serve disaggregated` stands before them and routes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ROLES", "arguments_file", "described", "roles_of", "server_config"]

Deploy = Mapping[str, Any]
ROLES = {"context": "context_servers", "generation": "generation_servers"}
"""Role -> its section in the server's file."""
REPEATED = (
    "tensor_parallel_size", "pipeline_parallel_size", "max_batch_size", "max_num_tokens", "cache_transceiver_config",
    "disable_overlap_scheduler",
)  # fmt: skip
"""What the server's file says of each side: what routers and world sizes are computed from, and what hands its cache over."""


def roles_of(deploy: Deploy) -> list[dict[str, Any]]:
    """deploy.json once for each role, with `role` and `count`."""
    rows = deploy.get("roles") or [{"role": "aggregated", "count": deploy["instances"]}]
    return [{**{key: value for key, value in deploy.items() if key != "roles"}, **row} for row in rows]


def arguments_file(role: str) -> str:
    """Where the bundle has the LLM arguments of a role."""
    return "llm_args.yaml" if role == "aggregated" else f"instances/{role}/llm_args.yaml"


def described(role: Deploy) -> dict[str, Any]:
    """A role's row in engine.json."""
    return {
        "role": role["role"],
        "count": role["count"],
        "tp": role["tp"],
        "pp": role["pp"],
        "gpus_per_instance": role["tp"] * role["pp"],
        "llm_args": arguments_file(role["role"]),
    }


def server_config(roles: list[dict[str, Any]], arguments: Mapping[str, Deploy]) -> dict[str, Any]:
    """The file of `trtllm-serve disaggregated`, but for host names and ports, which launchers fill in (`urls`).

    It repeats REPEATED of each side (extract_disagg_cfg in TensorRT-LLM's disagg_utils.py); each instance reads all its
    arguments from its own file.
    """
    config: dict[str, Any] = {"hostname": "localhost", "port": 8000, "backend": "pytorch"}
    for role in roles:
        args = arguments[role["role"]]
        repeated = {name: args[name] for name in REPEATED if name in args}
        config[ROLES[role["role"]]] = {"num_instances": role["count"], **repeated}
    return config
