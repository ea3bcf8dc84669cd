"""The router of disaggregated serving (`trtllm-serve disaggregated`): its file lists every server by address."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pipeline.launch.fleet import LOAD_SECONDS, Fleet, Instance
from pipeline.launch.script import dump

__all__ = ["REQUEST_SECONDS", "router_command", "router_config", "router_yaml"]

REQUEST_SECONDS = 3600
"""A long reasoning answer at the slowest published speed per user (6 tokens/s) takes most of an hour."""
SERVERS = {"context": "context_servers", "generation": "generation_servers"}


def router_config(fleet: Fleet, address: Callable[[Instance], str], base: Mapping[str, Any]) -> dict[str, Any]:
    """`base` is the engine's disaggregated.yaml; `address` gives host:port of an instance."""
    config = {key: value for key, value in base.items() if key not in SERVERS.values()}
    config |= {"hostname": "0.0.0.0", "port": fleet.http_port}
    for role, key in SERVERS.items():
        urls = [address(instance) for instance in fleet.of_role(role)]
        config[key] = {**(base.get(key) or {}), "num_instances": len(urls), "urls": urls}
    return config


def router_yaml(fleet: Fleet, address: Callable[[Instance], str], base: Mapping[str, Any]) -> str:
    """`router_config` as YAML."""
    return dump(router_config(fleet, address, base))


def router_command(file: str) -> list[str]:
    """Start it on `file`; it waits for its servers as long as a first load takes."""
    return [
        "trtllm-serve", "disaggregated", "--config_file", file, "--server_start_timeout", str(LOAD_SECONDS),
        "--request_timeout", str(REQUEST_SECONDS),
    ]  # fmt: skip
