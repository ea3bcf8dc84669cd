"""Who computes what: ranks of tensor, expert, pipeline and context parallelism, and attention data parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.lint.args.subject import LLM_ARGS, Args
from pipeline.lint.base import ERROR, NOTE, WARNING, Fault, Rule

__all__ = ["RULES"]

MAPPING = "TensorRT-LLM tensorrt_llm/mapping.py"
EP, MOE_TP, CLUSTER = "moe_expert_parallel_size", "moe_tensor_parallel_size", "moe_cluster_parallel_size"


def _product(args: Args) -> Iterator[Fault]:
    """What is left out follows: expert TP from EP, EP from expert TP, and without both experts are split by columns."""
    cluster, ep = args.count(CLUSTER), args.ep
    moe_tp = args.count(MOE_TP, args.tp // (ep * cluster))
    if moe_tp * ep * cluster != args.tp and not args.tp_elsewhere:
        factors = f"{moe_tp} x {ep}" + (f" x {cluster}" if cluster > 1 else "")
        reason = f"expert TP x EP = {factors} is not tensor_parallel_size {args.tp}"
        fitting = ", ".join(str(size) for size in range(1, args.tp + 1) if args.tp % size == 0)
        yield Fault(args.at(EP), reason, f"set {EP} to one of {fitting}" if args.tp < 1000 else "")


def _cluster(args: Args) -> Iterator[Fault]:
    if args.count(CLUSTER) > 1 and args.ep > 1:
        yield Fault(args.at(CLUSTER), f"{CLUSTER} {args.count(CLUSTER)} with {EP} {args.ep}: a cluster of experts has EP 1")


def _context(args: Args) -> Iterator[Fault]:
    if args.cp > 1 and args.ep > 1 and args.get("cp_config.cp_type") != "HELIX":
        yield Fault(args.at("context_parallel_size"), f"context_parallel_size {args.cp} with EP {args.ep} is not implemented")


def _helix(args: Args) -> Iterator[Fault]:
    theirs, ours = args.get("cp_config.tokens_per_block"), args.get("kv_cache_config.tokens_per_block")
    if args.get("cp_config.cp_type") == "HELIX" and theirs is not None and theirs != ours:
        yield Fault(args.at("cp_config.tokens_per_block"), f"cp_config has {theirs} tokens a block, kv_cache_config {ours}")


def _partition(args: Args) -> Iterator[Fault]:
    parts = args.get("pp_partition")
    if isinstance(parts, list) and len(parts) != args.pp:
        yield Fault(args.at("pp_partition"), f"pp_partition has {len(parts)} parts for pipeline_parallel_size {args.pp}")


def _nodes(args: Args) -> Iterator[Fault]:
    world, node = args.tp * args.pp * args.cp, args.count("gpus_per_node", 0)
    if node and world > node and world % node:
        yield Fault(args.at("gpus_per_node"), f"{world} ranks are no whole number of nodes of {node} GPUs")


def _balance(args: Args) -> Iterator[Fault]:
    if not args.adp and args.get("attention_dp_config.enable_balance"):
        yield Fault(args.at("attention_dp_config.enable_balance"), "attention_dp_config has no effect without enable_attention_dp")


def _iterations(args: Args) -> Iterator[Fault]:
    for key in ("timeout_iters", "batching_wait_iters"):
        value = args.get(f"attention_dp_config.{key}")
        if args.get("attention_dp_config.enable_balance") and isinstance(value, int) and value < 0:
            yield Fault(args.at(f"attention_dp_config.{key}"), f"{key} {value} is below 0 with enable_balance")


def _lm_head(args: Args) -> Iterator[Fault]:
    if args.get("enable_lm_head_tp_in_adp") and not args.adp:
        yield Fault(args.at("enable_lm_head_tp_in_adp"), "enable_lm_head_tp_in_adp has no effect without enable_attention_dp")


def _one_rank(args: Args) -> Iterator[Fault]:
    if args.adp and args.tp == 1 and not args.tp_elsewhere:
        yield Fault(args.at("enable_attention_dp"), "enable_attention_dp over one rank has no effect")


def _split_experts(args: Args) -> Iterator[Fault]:
    if args.adp and args.tp > 1 and not args.given(EP) and not args.given(MOE_TP):
        reason = f"without {EP} each expert is split over the {args.tp} ranks by columns, though attention is not"
        yield Fault(args.at("enable_attention_dp"), reason)


def _gpus(args: Args) -> Iterator[Fault]:
    if args.target.config is None:
        return
    hw, world = args.target.config.hw, args.tp * args.pp * args.cp
    limit = max(hw.num_devices * (hw.num_nodes or world), hw.nvlink_domain)
    if args.cp > 1 and world > limit:
        yield Fault(args.at("context_parallel_size"), f"TP x PP x CP = {world} ranks, but hw={hw.name} has {limit} GPUs")


RULES: tuple[Rule[Args], ...] = (
    Rule("args/expert-ranks", ERROR, _product, "let expert TP x EP x cluster be tensor_parallel_size",
         f"{MAPPING}: tp_size must equal moe_tp_size * moe_ep_size * moe_cluster_size"),
    Rule("args/expert-cluster", ERROR, _cluster, f"leave {CLUSTER} out", MAPPING),
    Rule("args/experts-and-cp", WARNING, _context, f"set {EP}: 1", MAPPING),
    Rule("args/helix-block", ERROR, _helix, "set both to the same number", "TensorRT-LLM py_executor_creator.py"),
    Rule("args/pp-partition", ERROR, _partition, "give one number of layers for each stage", f"{MAPPING}: pp_layers"),
    Rule("args/whole-nodes", WARNING, _nodes, "correct gpus_per_node, or the ranks", MAPPING),
    Rule("args/balance-without-adp", WARNING, _balance, "set enable_attention_dp: true", LLM_ARGS),
    Rule("args/balance-iterations", ERROR, _iterations, "set 0 or more", f"{LLM_ARGS}: AttentionDpConfig"),
    Rule("args/lm-head-without-adp", WARNING, _lm_head, "set enable_attention_dp: true, or remove it",
         f"{LLM_ARGS}; tech_blog/blog14"),
    Rule("args/adp-one-rank", NOTE, _one_rank, "remove it", MAPPING),
    Rule("args/adp-split-experts", NOTE, _split_experts, f"set {EP} to tensor_parallel_size", f"{MAPPING}; tech_blog/blog3"),
    Rule("args/world-size", ERROR, _gpus, "lower one of them", f"{MAPPING}: world_size"),
)  # fmt: skip
