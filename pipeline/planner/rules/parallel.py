"""Who holds what: GPUs, heads, experts, scale blocks, nodes."""

from __future__ import annotations

import math

from pipeline.planner.params import block_of
from pipeline.planner.rules.base import ISSUE, REFUSE, WARN, Rule
from pipeline.planner.setup import Setup, attention_divides

__all__ = ["RULES"]


def _gpus(setup: Setup) -> str | None:
    world, hw = setup.layout.world_size, setup.hw
    limit = max(hw.num_devices * (hw.num_nodes or world), hw.nvlink_domain)
    if world <= limit:
        return None
    asked = setup.told("parallel.tp", setup.layout.tp, f"an instance of {setup.layout}")
    asked += f" x parallel.pp={setup.layout.pp}" if setup.layout.pp > 1 else ""
    return (
        f"{asked} is {world} GPUs, more than the {limit} GPUs that hw={hw.name} has: set parallel.tp={limit} or less, or "
        f"hw.num_nodes={math.ceil(world / hw.num_devices)} for an instance across the network."
    )


def _experts(setup: Setup) -> str | None:
    """Experts over EP ranks."""
    ep, experts = setup.layout.ep, setup.expert_slots or setup.arch.n_routed_experts
    if experts % ep == 0:
        return None
    if "parallel.ep" not in setup.given and "parallel.tp" in setup.given:
        fewer = 2 ** (setup.layout.tp.bit_length() - 1)
        asked = f"parallel.tp={setup.layout.tp}"
        return f"{asked} does not divide the {experts} routed experts: set parallel.tp={fewer}, or leave it open."
    fitting = max(d for d in range(1, ep) if experts % d == 0)
    slots = f", or {math.ceil(experts / ep) * ep} slots with a load balancer (moe_config.load_balancer.num_slots)"
    asked = setup.told("parallel.ep", ep, f"EP{ep}")
    return f"{asked} does not divide the {experts} routed experts: set parallel.ep to a divisor such as {fitting}{slots}."


def _expert_tp(setup: Setup) -> str | None:
    tp, ep = setup.layout.tp, setup.layout.ep
    if tp % ep == 0:
        return None
    return f"parallel.ep={ep} does not divide parallel.tp={tp} (expert TP x EP = TP): choose a divisor."


def _expert_blocks(setup: Setup) -> str | None:
    layout, width, block = setup.layout, setup.arch.moe_intermediate_size, block_of(setup.expert_format)
    if layout.tp % layout.ep or width % (layout.moe_tp * block) == 0:
        return None
    return (
        f"{layout} splits each expert's {width} columns over {layout.moe_tp} ranks, which "
        f"parts the {block}-wide blocks of {setup.expert_format}: raise parallel.ep."
    )


def _heads(setup: Setup) -> str | None:
    tp, heads = setup.layout.tp, setup.arch.num_attention_heads
    if setup.layout.attention_dp or heads % tp == 0:
        return None
    asked = setup.told("parallel.tp", tp, f"TP{tp}")
    return f"{asked} does not divide the {heads} heads: set parallel.attention_dp=true or parallel.tp={math.gcd(heads, tp)}."


def _attention_blocks(setup: Setup) -> str | None:
    tp, arch = setup.layout.tp, setup.arch
    if setup.layout.attention_dp or arch.num_attention_heads % tp or attention_divides(arch, setup.formats, tp):
        return None
    return (
        f"{setup.layout} does not divide {setup.model}: {arch.num_attention_heads} heads over {tp} ranks part scale blocks "
        f"of attention. Leave parallel=auto, or set parallel.attention_dp=true."
    )


def _stages(setup: Setup) -> str | None:
    pp, layers = setup.layout.pp, setup.arch.num_hidden_layers
    return f"parallel.pp={pp} is more than the {layers} layers: set parallel.pp={layers} or less." if pp > layers else None


def _prefill_stages(setup: Setup) -> str | None:
    if not (setup.role == "prefill" and setup.layout.pp > 1 and setup.line == (1, 2)):
        return None
    return f"Prefill workers with parallel.pp={setup.layout.pp} hang before TP decode workers in 1.2: set parallel.pp=1."


def _nodes(setup: Setup) -> str | None:
    world, hw = setup.layout.world_size, setup.hw
    nodes = math.ceil(world / hw.num_devices)
    if nodes <= 1:
        return None
    network = "" if world <= hw.nvlink_domain else f"; {world} GPUs exceed the NVLink domain of {hw.nvlink_domain}, so its"
    network += " collectives cross the network" if network else ""
    return f"The instance spans {nodes} nodes: start its ranks under trtllm-llmapi-launch, as launch/ of the package does{network}."


def _idle(setup: Setup) -> str | None:
    ranks, requests = setup.layout.cache_ranks, setup.concurrency
    if not requests or requests >= ranks:
        return None
    return f"{requests} requests over {ranks} attention-DP ranks leave ranks idle: parallel.attention_dp=false."


def _uneven(setup: Setup) -> str | None:
    ranks, requests = setup.layout.cache_ranks, setup.concurrency or 0
    if requests <= ranks or requests % ranks == 0 or requests > 8 * ranks:
        return None
    return (
        f"{requests} requests over {ranks} attention-DP ranks: some ranks get {math.ceil(requests / ranks)}, others "
        f"{requests // ranks}, and all wait for the fullest: use a multiple of {ranks}."
    )


def _shared_experts(setup: Setup) -> str | None:
    tp, width = setup.layout.tp, setup.arch.moe_intermediate_size * setup.arch.n_shared_experts
    ranks = math.gcd(width // block_of(setup.formats.get("shared_experts", "bf16")), tp)
    if setup.layout.attention_dp or ranks == tp:
        return None
    return f"The shared expert is split over {ranks} of the {tp} ranks only, which keep its scale blocks whole."


def _balance(setup: Setup) -> str | None:
    if not setup.layout.attention_dp or setup.layout.tp == 1 or setup.balanced:
        return None
    return (
        "Attention-DP ranks get prompts unbalanced; balance gave 33 % on GB200: "
        "set attention_dp_config.enable_balance: true, which 1.1 and later have."
    )


MAPPING = "TensorRT-LLM mapping.py: tp_size must equal moe_tp_size * moe_ep_size"
RULES = (
    Rule("gpus", REFUSE, _gpus, "conf/hw"),
    Rule("expert_ep", REFUSE, _experts, "TensorRT-LLM mapping.py; MoeLoadBalancerConfig: num_slots % ep_size == 0"),
    Rule("expert_tp", REFUSE, _expert_tp, MAPPING),
    Rule("expert_blocks", REFUSE, _expert_blocks, "whole scale blocks"),
    Rule("heads", REFUSE, _heads, "TensorRT-LLM attention: heads % tp"),
    Rule("attention_blocks", REFUSE, _attention_blocks, "whole scale blocks"),
    Rule("stages", REFUSE, _stages, "at least one layer a stage"),
    Rule("prefill_stages", REFUSE, _prefill_stages, "TensorRT-LLM 1.2 release notes, known issues"),
    Rule("nodes", WARN, _nodes, "triton-inference-server/tensorrtllm_backend pull request 772"),
    Rule("idle", WARN, _idle, f"{ISSUE} 3486: concurrency spreads over the ranks"),
    Rule("uneven", WARN, _uneven, f"{ISSUE} 3486"),
    Rule("shared_experts", WARN, _shared_experts, "TensorRT-LLM modeling_deepseekv3.py"),
    Rule("balance", WARN, _balance, "NVIDIA/TensorRT-LLM tech_blog/blog10"),
)
