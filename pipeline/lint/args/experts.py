"""The MoE backend, and the load balancer that repeats experts (EPLB)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.core.errors import ConfigError
from pipeline.lint.args.subject import LLM_ARGS, Args
from pipeline.lint.base import ERROR, NOTE, WARNING, Fault, Rule
from pipeline.lint.document import read_document
from pipeline.planner.rules.moe import LOAD_BALANCED

__all__ = ["RULES"]

BACKEND, BALANCER = "moe_config.backend", "moe_config.load_balancer"


def _backend(args: Args) -> str:
    return str(args.get(BACKEND) or "AUTO")


def _balancer(args: Args) -> Mapping[str, Any] | None:
    """The table; of a file that can be read here, its own."""
    value = args.get(BALANCER)
    if isinstance(value, str):
        file = _file(args, value)
        return read_document(file).values if file else None
    return value if isinstance(value, Mapping) else None


def _file(args: Args, named: str) -> Path | None:
    """The balancer's file, where it is at hand."""
    path = Path(named)
    found = path if path.is_absolute() else args.document.file.parent / path
    return found if found.is_file() else None


def _wideep(args: Args) -> Iterator[Fault]:
    if _backend(args) == "WIDEEP" and not args.adp:
        yield Fault(args.at(BACKEND), "backend WIDEEP asserts attention DP, which is off")


def _balanced(args: Args) -> Iterator[Fault]:
    backend = _backend(args)
    if args.get(BALANCER) and backend not in (*LOAD_BALANCED, "AUTO") and not backend.startswith("MEGAMOE"):
        yield Fault(args.at(BALANCER), f"backend {backend} has no load balancer: {', '.join(LOAD_BALANCED)} have")


def _slots(args: Args) -> Iterator[Fault]:
    table = _balancer(args)
    slots = table.get("num_slots") if table is not None else None
    if isinstance(slots, int) and slots % args.ep:
        reason = f"num_slots {slots} is not a multiple of EP {args.ep}"
        yield Fault(args.at(f"{BALANCER}.num_slots"), reason, f"set {-(-slots // args.ep) * args.ep}")


def _no_slots(args: Args) -> Iterator[Fault]:
    table = _balancer(args)
    if table is not None and not table.get("num_slots"):
        yield Fault(args.at(BALANCER), "the load balancer has no num_slots")


def _assignments(args: Args) -> Iterator[Fault]:
    table = _balancer(args) or {}
    slots, layers = table.get("num_slots"), table.get("initial_global_assignments")
    for layer, placed in layers.items() if isinstance(layers, Mapping) and isinstance(slots, int) else ():
        if not isinstance(placed, list) or len(placed) != slots:
            count = len(placed) if isinstance(placed, list) else "no list"
            yield Fault(args.at(BALANCER), f"layer {layer} of initial_global_assignments has {count} entries, num_slots is {slots}")
            return


def _no_file(args: Args) -> Iterator[Fault]:
    value = args.get(BALANCER)
    if isinstance(value, str) and _file(args, value) is None:
        yield Fault(args.at(BALANCER), f"the load balancer's file {value} is not here: where it is served, it must be")


def _bad_file(args: Args) -> Iterator[Fault]:
    value = args.get(BALANCER)
    file = _file(args, value) if isinstance(value, str) else None
    try:
        if file is not None:
            read_document(file)
    except ConfigError as error:
        yield Fault(args.at(BALANCER), f"the load balancer's file cannot be read: {error}")


def _gms(args: Args) -> Iterator[Fault]:
    if str(args.get("load_format")).upper() == "GMS" and args.get(BALANCER):
        yield Fault(args.at("load_format"), "load_format GMS does not go with a load balancer")


def _low_precision(args: Args) -> Iterator[Fault]:
    config = args.target.config
    if args.get("moe_config.use_low_precision_moe_combine") and config is not None and config.quant.routed_experts != "nvfp4":
        place = args.at("moe_config.use_low_precision_moe_combine")
        yield Fault(place, f"use_low_precision_moe_combine is for NVFP4 experts, and these are {config.quant.routed_experts}")


def _dwdp(args: Args) -> Iterator[Fault]:
    if args.count("dwdp_config.dwdp_size") > 1 and _backend(args) != "CUTEDSL":
        yield Fault(
            args.at("dwdp_config"), f"dwdp_config works with the MoE backend CUTEDSL on NVFP4 and MNNVL, not with {_backend(args)}"
        )


def _wideep_later(args: Args) -> Iterator[Fault]:
    if _backend(args) == "WIDEEP" and args.numbers == (1, 2):
        yield Fault(args.at(BACKEND), "backend WIDEEP is gone in 1.3")


def _deepep(args: Args) -> Iterator[Fault]:
    variables = args.get("env_overrides")
    off = isinstance(variables, Mapping) and str(variables.get("TRTLLM_MOE_POST_QUANT_ALLTOALLV")) == "0"
    config = args.target.config
    nvfp4 = config is None or config.quant.routed_experts == "nvfp4"
    if _backend(args) == "WIDEEP" and args.numbers <= (1, 1) and nvfp4 and not off:
        yield Fault(args.at(BACKEND), "DeepEPLowLatency cannot send FP4 activations in this line")


RULES: tuple[Rule[Args], ...] = (
    Rule("args/wideep-adp", ERROR, _wideep, "set enable_attention_dp: true", "TensorRT-LLM fused_moe_wide_ep.py"),
    Rule("args/balancer-backend", ERROR, _balanced, "choose one of them", "TensorRT-LLM create_moe.py"),
    Rule("args/balancer-slots", ERROR, _slots, "set a multiple of EP", f"{LLM_ARGS}: MoeLoadBalancerConfig"),
    Rule("args/balancer-no-slots", ERROR, _no_slots, "set num_slots, such as 288", f"{LLM_ARGS}: MoeLoadBalancerConfig.setup"),
    Rule("args/balancer-assignments", ERROR, _assignments, "give every slot of a layer its expert",
         f"{LLM_ARGS}: MoeLoadBalancerConfig.initial_global_assignments"),
    Rule("args/balancer-missing", WARNING, _no_file, "put it there, or write the table itself", f"{LLM_ARGS}: FileNotFoundError"),
    Rule("args/balancer-file", ERROR, _bad_file, "correct the file", f"{LLM_ARGS}: MoeConfig"),
    Rule("args/balancer-gms", ERROR, _gms, "leave one of them out", LLM_ARGS),
    Rule("args/low-precision-combine", WARNING, _low_precision, "remove it", f"{LLM_ARGS}: MoeConfig; tech_blog/blog14"),
    Rule("args/dwdp", ERROR, _dwdp, "set moe_config.backend: CUTEDSL, or remove dwdp_config", f"{LLM_ARGS}: DwdpConfig"),
    Rule("args/wideep-later", NOTE, _wideep_later, "with 1.3 write AUTO, CUTLASS or TRTLLM and keep the load balancer",
         "TensorRT-LLM API reference of 1.3.0rc27"),
    Rule("args/deepep-fp4", WARNING, _deepep, "set env_overrides: {TRTLLM_MOE_POST_QUANT_ALLTOALLV: '0'}",
         "NVIDIA/TensorRT-LLM pull request 4792"),
)  # fmt: skip
