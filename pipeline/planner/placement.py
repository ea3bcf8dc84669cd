"""Which GPU of which node each rank of a plan gets, and what the wiring of a node makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipeline.config.schema import HwConfig
from pipeline.planner.setup import Setup
from pipeline.planner.topology import Topology, all_reduce, all_to_all, place, read

__all__ = ["placement_notes", "placement_report", "rank_places", "wired"]

ACTIVATION_BYTES = 2
"""BF16, as collectives carry it unless told otherwise."""


def wired(hw: HwConfig) -> HwConfig:
    """The machine as `hw.topology` shows it: where its GPUs are several NVLink domains, the way between those is the slowest
    link that the file shows. A domain that is larger than the node is not in the file and is believed."""
    if hw.topology is None:
        return hw
    topology = read(hw.topology, hw.nvlink_bandwidth)
    domain = max(map(len, topology.domains()))
    if domain == topology.num_gpus:
        return hw
    slowest = min(topology.bandwidth(a, b) for a in range(topology.num_gpus) for b in range(a))
    return replace(hw, nvlink_domain=domain, network_bandwidth=min(hw.network_bandwidth, slowest))


def rank_places(hw: HwConfig, ranks: int, instances: int) -> list[dict[str, int]]:
    """{instance, rank, node, gpu} of every rank of `instances` instances of `ranks` GPUs each.

    Instances fill one node after the other and never straddle two that one could hold; an instance of more GPUs than a node
    has takes whole nodes. `gpu` is its number on the node, in ring order where `hw.topology` shows one.
    """
    here = min(ranks, hw.num_devices)
    groups = _groups(hw, here)
    nodes = -(-ranks // hw.num_devices)
    return [
        {
            "instance": instance,
            "rank": rank,
            "node": instance // len(groups) * nodes + rank // hw.num_devices,
            "gpu": groups[instance % len(groups)][rank % hw.num_devices],
        }
        for instance in range(instances)
        for rank in range(ranks)
    ]


def _groups(hw: HwConfig, ranks: int) -> list[tuple[int, ...]]:
    """The GPUs of one node in groups of `ranks`: by their wiring where it is known, else by their numbers."""
    if hw.topology is not None:
        topology = read(hw.topology, hw.nvlink_bandwidth)
        if topology.num_gpus >= ranks:
            return list(place(topology, ranks).groups)
    return [tuple(range(first, first + ranks)) for first in range(0, hw.num_devices - ranks + 1, ranks)]


def placement_report(setup: Setup) -> dict[str, Any] | None:
    """Domains, rank -> GPU mapping and times before and after; None where `hw.topology` names no file.

    Before is the order of the GPU numbers; times are those of one collective of a full decode and a full prefill step.
    """
    if setup.hw.topology is None:
        return None
    topology = read(setup.hw.topology, setup.hw.nvlink_bandwidth)
    placement = place(topology, min(setup.layout.world_size, topology.num_gpus))
    after = placement.groups[0]
    before = tuple(range(len(after)))
    decode = setup.max_batch_size * (1 + setup.mtp)
    return {
        "nvlink_domains": topology.domains(),
        "visible_devices": placement.visible_devices,
        "gpu_device_ids": ";".join(placement.visible_devices),
        "nics": {f"GPU{gpu}": list(nics) for gpu, nics in topology.nearest_nics().items() if nics},
        "decode_step": _times(topology, setup, decode, before, after),
        "prefill_step": _times(topology, setup, setup.max_num_tokens, before, after),
    }


def placement_notes(placement: dict[str, Any] | None, setup: Setup) -> list[str]:
    """What `placement_report` shows of the node that the predicted speed does not know."""
    if placement is None:
        return []
    gpus = {int(gpu) for gpu in placement["visible_devices"][0].split(",")}
    wanted = min(setup.layout.world_size, setup.hw.num_devices)
    if len(gpus) < wanted:
        return [f"hw.topology shows {len(gpus)} of the {wanted} GPUs that the instance takes on a node: save it on such a node."]
    largest = max(placement["nvlink_domains"], key=len)
    if any(gpus <= set(domain) for domain in placement["nvlink_domains"]):
        return []
    return [
        f"The instance's {wanted} GPUs are not in one NVLink domain of hw.topology: its collectives are predicted at "
        f"{setup.hw.network_bandwidth / 1e9:g} GB/s a GPU, where parallel.tp={len(largest)} or less stays inside one."
    ]


def _times(topology: Topology, setup: Setup, tokens: int, before: Sequence[int], after: Sequence[int]) -> dict[str, Any]:
    """Microseconds of an all-reduce of the hidden states, and of sending each token to its experts."""
    size = tokens * setup.arch.hidden_size * ACTIVATION_BYTES
    ranks = min(setup.arch.num_experts_per_tok, setup.layout.ep)
    orders = {"before": before, "after": after}
    return {
        "tokens": tokens,
        "all_reduce_us": {name: round(all_reduce(topology, order, size) * 1e6, 1) for name, order in orders.items()},
        "all_to_all_us": {name: round(all_to_all(topology, order, size * ranks) * 1e6, 1) for name, order in orders.items()},
    }
