"""The matrix of `nvidia-smi topo -m`: domains, rings, placements and times that can be reckoned by hand."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from pipeline.config.load import load
from pipeline.core.errors import ConfigError
from pipeline.planner import topology
from pipeline.planner.placement import rank_places, wired
from pipeline.planner.topology import CLASSES, LATENCY, PCIE, all_reduce, all_to_all, parse, place, read, ring
from pipeline.stages.plan import toolchain
from tests.unit.test_plan import config_of, plan

DATA = Path(__file__).parents[1] / "data" / "topology"
H100 = read(DATA / "h100_nvswitch.txt", 450e9)
PCIE_BOX = read(DATA / "pcie_interleaved.txt")
BRIDGED = read(DATA / "a100_bridged.txt", 300e9)
GB200 = read(DATA / "gb200_tray.txt", 900e9)
SIZE = 64 * 7168 * 2


def natural(topology, size=SIZE):
    return all_reduce(topology, range(topology.num_gpus), size)


def test_a_switched_node_is_one_domain_and_any_order_is_as_good():
    assert H100.domains() == [list(range(8))]
    assert H100.bandwidth(0, 7) == 450e9
    assert ring(H100, range(8)) == list(range(8))
    assert place(H100, 8).visible_devices == ["0,1,2,3,4,5,6,7"]
    assert place(H100, 4).visible_devices == ["0,1,2,3", "4,5,6,7"]


def test_each_gpu_has_its_own_card():
    assert H100.nearest_nics() == {gpu: (f"NIC{gpu}",) for gpu in range(8)}
    assert GB200.nearest_nics()[3] == ("mlx5_2", "mlx5_3")
    assert H100.numa == (0, 0, 0, 0, 1, 1, 1, 1)


def test_time_of_an_all_reduce_on_a_switch():
    by_hand = 2 * 7 / 8 * SIZE / 450e9 + 14 * LATENCY["NV"]
    assert natural(H100) == pytest.approx(by_hand)
    assert all_to_all(H100, range(8), SIZE) == pytest.approx(7 / 8 * SIZE / 450e9 + LATENCY["NV"])


def test_a_ring_crosses_between_cpus_only_twice():
    order = ring(PCIE_BOX, range(8))
    edges = list(zip(order, [*order[1:], order[0]], strict=True))
    assert sum(PCIE_BOX.links[a][b] == "SYS" for a, b in edges) == 2
    assert sorted(order) == list(range(8)) and PCIE_BOX.domains() == [[gpu] for gpu in range(8)]
    large, latency = 1e9, 14 * LATENCY["SYS"]
    shared = CLASSES["SYS"] / 4  # eight crossings, four each way
    assert natural(PCIE_BOX, large) == pytest.approx(14 / 8 * large / shared + latency)
    assert all_reduce(PCIE_BOX, order, large) == pytest.approx(14 / 8 * large / CLASSES["SYS"] + latency)


def test_no_ring_of_all_orders_is_better():
    best = min(all_reduce(PCIE_BOX, (0, *rest), 1e9) for rest in permutations(range(1, 8)))
    assert all_reduce(PCIE_BOX, ring(PCIE_BOX, range(8)), 1e9) == pytest.approx(best)


def test_instances_stay_where_the_links_are():
    assert place(PCIE_BOX, 4).visible_devices == ["0,2,4,6", "1,3,5,7"]
    assert BRIDGED.domains() == [[0, 2], [1, 3]]
    assert place(BRIDGED, 2).visible_devices == ["0,2", "1,3"]
    order = ring(BRIDGED, range(4))
    assert all_reduce(BRIDGED, order, 1e9) < natural(BRIDGED, 1e9)
    assert all_to_all(BRIDGED, (0, 2), 1e9) < all_to_all(BRIDGED, (0, 1), 1e9) / 5


def test_slots_bound_an_all_to_all_without_nvlink():
    assert all_to_all(PCIE_BOX, (0, 2), 1e9) == pytest.approx(0.5e9 / PCIE + LATENCY["PIX"])
    crossing = 2 * 16 * 1e9 / 8 / 2  # 16 pairs of GPUs on either side, both directions
    assert all_to_all(PCIE_BOX, range(8), 1e9) == pytest.approx(crossing / CLASSES["SYS"] + LATENCY["SYS"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "No matrix"),
        ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-3\n", "row of GPU1"),
        ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-3\nGPU1\tBAD\t X \t0-3\n", "GPU1 to GPU0 is BAD"),
        ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-3\nGPU1\tSYS\t X \t0-3\n", "but back it is SYS"),
    ],
)
def test_what_is_no_matrix_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse(text)


def test_an_instance_larger_than_the_node_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="8 ranks does not fit the 4 GPUs"):
        place(GB200, 8)
    with pytest.raises(ConfigError, match=r"hw\.topology=.*cannot be read"):
        read(tmp_path / "none.txt")


def test_one_gpu_needs_no_link():
    one = parse("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-3\t0\n")
    assert (one.num_gpus, one.domains(), natural(one), all_to_all(one, [0], 1e9)) == (1, [[0]], 0.0, 0.0)


def test_a_plan_with_a_topology_maps_its_ranks():
    file = DATA / "pcie_interleaved.txt"
    report = plan("+hw=h200", "model=deepseek_r1", f"hw.topology={file}").report["topology"]
    assert report["gpu_device_ids"] == report["visible_devices"][0] and report["visible_devices"][0].startswith("0,2")
    step = report["prefill_step"]["all_reduce_us"]
    assert step["after"] < step["before"] / 3
    assert plan("+hw=h200", "model=deepseek_r1").report["topology"] is None


def test_the_predicted_speed_is_that_of_the_links_which_are_there():
    asked = ("+hw=h200", "model=deepseek_r1", "workload.concurrency=256", "parallel=adp8_ep8")
    switched, pcie = (plan(*asked, f"hw.topology={DATA / name}.txt").report for name in ("h100_nvswitch", "pcie_interleaved"))
    assert switched["predicted"] == plan(*asked).report["predicted"]
    first, second = (report["predicted"]["terms_us"]["collective_transfer"] for report in (switched, pcie))
    assert second > 1.5 * first and pcie["predicted"]["tokens_per_gpu"] < switched["predicted"]["tokens_per_gpu"]
    tray = load(["+hw=gb200", "model=deepseek_r1", f"hw.topology={DATA / 'gb200_tray.txt'}"]).hw
    assert wired(tray) == tray, "a rack's domain is larger than what a tray shows"


def test_a_node_that_the_predicted_speed_does_not_know_is_warned_of(tmp_path):
    def warnings(file: Path) -> str:
        return "\n".join(plan("+hw=h200", "model=deepseek_r1", f"hw.topology={file}").report["warnings"])

    one = tmp_path / "one.txt"
    one.write_text("\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-3\t0\n")
    assert "shows 1 of the 8 GPUs" in warnings(one)
    assert "8 GPUs are not in one NVLink domain" in warnings(DATA / "pcie_interleaved.txt")
    assert "predicted at 30 GB/s a GPU" in warnings(DATA / "pcie_interleaved.txt")
    assert "hw.topology" not in warnings(DATA / "h100_nvswitch.txt")


@pytest.mark.parametrize(("ranks", "instances"), [(1, 8), (2, 6), (4, 18), (8, 9), (16, 4), (64, 1)])
def test_every_rank_gets_a_gpu_of_its_own_on_as_few_nodes_as_can_be(ranks, instances):
    hw = config_of("+hw=gb200", "hw.num_nodes=18").hw
    places = rank_places(hw, ranks, instances)
    assert len({(row["node"], row["gpu"]) for row in places}) == ranks * instances
    assert all(row["gpu"] < 4 and row["node"] < 18 for row in places)
    for instance in range(instances):
        own = [row for row in places if row["instance"] == instance]
        assert [row["rank"] for row in own] == list(range(ranks))
        assert len({row["node"] for row in own}) == -(-ranks // 4)


def test_what_is_deployed_says_where_its_ranks_are():
    deploy = plan("+hw=h200", "model=deepseek_r1", f"hw.topology={DATA / 'pcie_interleaved.txt'}", "parallel.tp=8").deploy
    ring_order = plan("+hw=h200", "model=deepseek_r1", f"hw.topology={DATA / 'pcie_interleaved.txt'}").report["topology"]
    assert ",".join(str(row["gpu"]) for row in deploy["placement"]) == ring_order["visible_devices"][0]
    assert (deploy["nodes"], deploy["gpus_per_node"], deploy["instances"]) == (1, 8, 1)


def test_the_planning_machine_can_be_asked_itself(tmp_path, monkeypatch):
    """Against a double of nvidia-smi that prints a saved matrix."""
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f'#!/bin/sh\n[ "$*" = "topo -m" ] && cat {DATA / "pcie_interleaved.txt"}\n')
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    topology._asked.cache_clear()
    config = config_of("+hw=h200", "model=deepseek_r1", "hw.topology=here")
    assert read("here") == PCIE_BOX and len(toolchain(config)["hw.topology"]) == 64
    topology._asked.cache_clear()
    fake.write_text("#!/bin/sh\necho 'no driver' >&2; exit 9\n")
    with pytest.raises(ConfigError, match=r"nvidia-smi topo -m` fails \(no driver\): name a file"):
        read("here")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match=r"hw\.topology=here runs .nvidia-smi topo -m., which fails"):
        read("here")


def test_another_topology_is_another_key(tmp_path):
    file = tmp_path / "topology.txt"
    file.write_text((DATA / "gb200_tray.txt").read_text())
    config = load(["+hw=gb200", "model=deepseek_r1", f"hw.topology={file}"])
    first = toolchain(config)
    file.write_text((DATA / "h100_nvswitch.txt").read_text())
    assert toolchain(config) != first
