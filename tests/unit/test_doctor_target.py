"""`doctor --target`: outputs of tools are read, a healthy node passes, each fault is named alone, no GPU is said once."""

from __future__ import annotations

import json
import os
import socket
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cli import main
from pipeline.config.load import load
from pipeline.core.errors import ConfigError
from pipeline.doctor import system
from pipeline.doctor.gpus import parse_gpus
from pipeline.doctor.links import parse_fabric, parse_imex, parse_links, parse_ports
from pipeline.doctor.probe import BAD, OK, UNKNOWN, WARN, Wanted, run_tool
from pipeline.doctor.software import judge_slurm_mpi
from pipeline.doctor.system import parse_limits, parse_sizes
from pipeline.doctor.target import examine_target, verdict, wanted_of
from pipeline.planner.plan import make_plan

DATA = Path(__file__).parents[1] / "data"
TOOLS = {
    "nvidia-smi --query-gpu=index,name": "target/gpus_b200.csv",
    "nvidia-smi --query-gpu=index,clocks": "target/clocks.csv",
    "nvidia-smi nvlink": "target/nvlink_b200.txt",
    "nvidia-smi topo": "topology/h100_nvswitch.txt",
    "nvidia-smi -q": "target/fabric_hgx.txt",
    "nvidia-smi": "target/nvidia_smi.txt",
    "nvidia-imex-ctl -N": "target/imex.txt",
    "cat /proc/self/limits": "target/limits.txt",
    "cat /proc/meminfo": "target/meminfo.txt",
    "df": "target/shm.txt",
    "sh -c for port": "target/rdma.txt",
    "mpirun": "target/mpirun.txt",
    "srun --mpi=list": "target/srun_mpi.txt",
    "srun --help": "target/srun_help.txt",
    "docker info": "target/docker_info.txt",
}
"""Start of a command -> its output; the first that fits."""
GONE = None


def node(**changes: tuple[str, str] | None):
    """A healthy node, some of whose outputs are changed ((old, new)) or missing (None); keys are files without their ending."""

    def run(command: tuple[str, ...]) -> str | None:
        words = " ".join(command)
        if words.startswith(("ls /dev/nvidia-caps-imex", "docker image")):
            answer = {"ls": "channel0\n", "docker": "sha256:0\n"}[command[0]]
            return answer if changes.get(f"{command[0]}_answer", ("", "")) is not GONE else None
        if words.startswith("cat /proc/sys/kernel/numa_balancing"):
            return "0\n"
        file = next((file for start, file in TOOLS.items() if words.startswith(start)), None)
        if file is None or changes.get(Path(file).stem, ("", "")) is GONE:
            return None
        text, (old, new) = (DATA / file).read_text(), changes.get(Path(file).stem, ("", ""))
        assert old in text
        return text.replace(old, new, 1)

    return run


@pytest.fixture
def wanted(tmp_path) -> Wanted:
    """Of eight B200, without what this machine's disk and ports would say."""
    return Wanted(
        title="B200", sm=100, gpus=8, memory_bytes=191501854310, nvlink_bandwidth=9e11, nvlink_domain=8, nodes=1, needs_imex=False,
        image="nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3", driver="590.44.01", cuda="13.1.0", checkpoint_bytes=10**6,
        converted_bytes=0, source_bytes=10**6, store=tmp_path, hf_home=tmp_path / "hf", checkpoint=None, shm_bytes=4 << 30,
        ports=(),
    )  # fmt: skip


@pytest.fixture
def rack(wanted) -> Wanted:
    """Of four trays of a rack."""
    return replace(wanted, gpus=4, nvlink_domain=72, nodes=4, needs_imex=True)


RACK = {"fabric_hgx": ("00000000-0000-0000-0000-000000000000", "4d3c7e7a-96b1-4b55-8d53-1f6f35e4b4f5")}


def statuses(wanted: Wanted, **changes) -> dict[str, str]:
    return {check.name: check.status for check in examine_target(wanted, node(**changes))}


def test_a_healthy_node_passes(wanted):
    assert set(statuses(wanted).values()) == {OK}
    assert verdict(examine_target(wanted, node()), wanted) == "This node can run the plan for 8 GPUs of B200."


def test_a_healthy_rack_passes(rack, monkeypatch):
    monkeypatch.setitem(TOOLS, "nvidia-smi -q", "target/fabric_rack.txt")
    found = statuses(rack)
    assert {name for name, status in found.items() if status != OK} == set()
    assert {"imex", "imex channel", "clique", "rdma", "slurm pmix", "slurm pyxis", "mpi", "numa balancing"} <= found.keys()


FAULTS = [
    ({"gpus_b200": ("7, NVIDIA B200", "")}, None),  # a row that is no row
    ({"gpus_b200": ("NVIDIA B200, 10.0", "NVIDIA H200, 9.0")}, ("compute", BAD)),
    ({"gpus_b200": ("183359, 4,", "143771, 4,")}, ("memory", BAD)),
    ({"gpus_b200": ("183359, 4,", "183359, 40960,")}, ("memory in use", BAD)),
    ({"gpus_b200": ("590.48.01", "580.95.05")}, ("driver", WARN)),
    ({"gpus_b200": ("590.48.01", "525.60.13")}, ("driver", BAD)),
    ({"gpus_b200": ("Disabled", "Enabled")}, ("MIG", BAD)),
    ({"gpus_b200": ("Disabled, 0,", "Disabled, 3,")}, ("ECC errors", BAD)),
    ({"gpus_b200": ("Enabled, Disabled", "Disabled, Disabled")}, ("persistence", WARN)),
    ({"gpus_b200": ("1000.00, 1000.00, 1000.00", "700.00, 1000.00, 1000.00")}, ("power", WARN)),
    ({"clocks": ("Not Active", "Active")}, ("clocks", WARN)),
    ({"nvidia_smi": ("CUDA Version: 13.1", "CUDA Version: 12.8")}, ("cuda", WARN)),
    ({"nvidia_smi": ("CUDA Version", "something else")}, ("cuda", UNKNOWN)),
    ({"nvlink_b200": ("Link 17: 53.125 GB/s", "Link 17: <inactive>")}, ("links", BAD)),
    ({"h100_nvswitch": ("NV18", "SYS")}, ("topology", UNKNOWN)),  # the two directions disagree
    ({"fabric_hgx": (": Completed", ": In Progress")}, ("fabric", BAD)),
    ({"fabric_hgx": GONE}, ("fabric", UNKNOWN)),
    ({"shm": ("1082111483904\n", "67108864\n")}, ("/dev/shm", BAD)),
    ({"limits": ("Max locked memory         unlimited", "Max locked memory         8388608  ")}, ("memlock", WARN)),
    ({"limits": ("Max open files            1048576", "Max open files            1024   ")}, ("nofile", WARN)),
    ({"meminfo": ("2064100412", "64")}, ("host", WARN)),
    ({"docker_info": ('"nvidia":{"path":"nvidia-container-runtime"},', "")}, ("gpu runtime", WARN)),
    ({"docker_info": GONE}, ("containers", BAD)),
    ({"docker_answer": GONE}, ("image", WARN)),
]


@pytest.mark.parametrize(("changes", "said"), FAULTS)
def test_each_fault_is_named_alone(wanted, changes, said):
    found = {name: status for name, status in statuses(wanted, **changes).items() if status != OK}
    if said is None:
        assert found["count"] == UNKNOWN
    else:
        assert found == dict([said])


RACK_FAULTS = [
    ({"imex": ("Domain State: UP", "Domain State: DEGRADED")}, ("imex", BAD)),
    ({"imex": ("READY ", "UNAVAILABLE ")}, ("imex", BAD)),
    ({"imex": GONE}, ("imex", UNKNOWN)),
    ({"ls_answer": GONE}, ("imex channel", BAD)),
    ({"fabric_rack": ("CliqueId                          : 0", "CliqueId                          : 1")}, ("clique", BAD)),
    ({"srun_mpi": ("\tpmix\nspecific pmix plugin versions available: pmix_v4,pmix_v5\n", "")}, ("slurm pmix", BAD)),
    ({"srun_help": ("--container-image", "--no")}, ("slurm pyxis", BAD)),
    ({"mpirun": GONE}, ("mpi", UNKNOWN)),
    ({"rdma": GONE}, ("rdma", WARN)),
    ({"limits": ("Max locked memory         unlimited", "Max locked memory         8388608  ")}, ("memlock", BAD)),
]


@pytest.mark.parametrize(("changes", "said"), RACK_FAULTS)
def test_each_fault_of_a_rack_is_named_alone(rack, monkeypatch, changes, said):
    monkeypatch.setitem(TOOLS, "nvidia-smi -q", "target/fabric_rack.txt")
    found = {name: status for name, status in statuses(rack, **changes).items() if status != OK}
    assert found == dict([said])


def test_gpus_without_nvlink_between_them_are_named(wanted, monkeypatch):
    monkeypatch.setitem(TOOLS, "nvidia-smi topo", "topology/pcie_interleaved.txt")
    assert statuses(wanted)["topology"] == BAD
    monkeypatch.setitem(TOOLS, "nvidia-smi topo", "topology/gb200_tray.txt")
    assert statuses(replace(wanted, gpus=4))["topology"] == OK


def test_fewer_gpus_than_the_plan_takes(wanted):
    checks = examine_target(replace(wanted, gpus=16), node())
    count = next(check for check in checks if check.name == "count")
    assert count.text() == "bad  gpu      count           8 (NVIDIA B200), wanted 16 -> take a node with more GPUs"
    assert verdict(checks, replace(wanted, gpus=16)).startswith("This node cannot run the plan for 16 GPUs of B200: count")


def test_without_a_gpu_it_says_so_once(wanted):
    checks = examine_target(wanted, lambda command: None)
    assert [check.name for check in checks if check.area == "gpu"] == ["count", "the rest"]
    assert not any(check.area in ("nvlink", "driver") for check in checks)
    assert verdict(checks, wanted).startswith("This machine has no NVIDIA GPU, and the plan is for 8 GPUs of B200")


def test_outputs_are_read(tmp_path):
    read = {Path(file).stem: (DATA / file).read_text() for file in TOOLS.values()}
    gpu = parse_gpus(read["gpus_b200"])[7]
    assert (gpu.index, gpu.sm, gpu.memory, gpu.persistent, gpu.mig, gpu.power) == (7, 100, 183359 << 20, True, False, 1000.0)
    assert parse_gpus("0, NVIDIA T4, 7.5, 15360, 0, 535.1, Disabled, [N/A], [N/A], [N/A], 70.00, 70.00\n")[0].power is None
    assert {gpu: len(rates) for gpu, rates in parse_links(read["nvlink_b200"]).items()} == dict.fromkeys(range(8), 18)
    assert sum(parse_links(read["nvlink_b200"])[0]) == pytest.approx(956.25)
    assert [item.state for item in parse_fabric(read["fabric_hgx"])] == ["Completed"] * 8
    assert parse_imex(read["imex"]) == ("UP", {f"10.0.0.{node}": "READY" for node in (1, 2, 3, 4)})
    assert parse_ports(read["rdma"])[0] == ("ACTIVE", "400 Gb/sec (4X NDR)")
    assert parse_limits(read["limits"])["Max locked memory"] == float("inf")
    assert parse_limits(read["limits"])["Max open files"] == 1048576
    assert parse_sizes(read["shm"]) == (1082111483904, 1082111483904)
    older = "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: pmix_v3\nsrun: pmix\n"
    assert [check.status for check in judge_slurm_mpi(older, None)] == [OK]


def test_tools_of_this_machine_are_understood():
    limits = parse_limits(run_tool(("cat", "/proc/self/limits")))
    assert {"Max locked memory", "Max open files", "Max stack size"} <= limits.keys()
    size, available = parse_sizes(run_tool(("df", "--block-size=1", "--output=size,avail", "/dev/shm")))
    assert size >= available >= 0
    assert run_tool(("no-such-tool-here",)) is None and run_tool(("sh", "-c", "exit 3")) is None


def test_a_tool_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr("pipeline.doctor.probe.TIMEOUT", 0.2)
    assert run_tool(("sleep", "600")) is None


def test_a_port_that_is_taken_is_named(wanted):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check = next(system.ports(replace(wanted, ports=(port,))))
    assert (check.status, check.found) == (BAD, f"taken: {port}")


def test_disk_and_hard_links(wanted, monkeypatch):
    assert [check.status for check in system.disk(wanted)] == [OK, OK]
    short = list(system.disk(replace(wanted, checkpoint_bytes=10**18)))
    assert [check.status for check in short] == [BAD, BAD] and "with the other on the same file system" in short[1].wanted
    done = list(system.disk(replace(wanted, checkpoint_bytes=10**18, converted_bytes=10**18)))
    assert [check.status for check in done] == [OK, OK]
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(95, "Operation not supported")))
    check = next(system.hard_links(wanted))
    assert check.status == BAD and "Operation not supported" in check.found


def test_the_plan_says_what_is_wanted():
    config = load(["+hw=gb200", "model=deepseek_r1", "parallel=adp16_ep16", "hw.num_nodes=4"])
    plan = make_plan(config, config.model.hf)
    wanted = wanted_of(config, config.model.hf, plan.deploy, plan.report)
    assert (wanted.gpus, wanted.nodes, wanted.needs_imex, wanted.driver, wanted.cuda) == (4, 4, True, "590.44.01", "13.1.0")
    assert wanted.source_bytes == pytest.approx(688.6e9, rel=1e-3) and wanted.checkpoint_bytes == pytest.approx(423.6e9, rel=1e-3)
    with pytest.raises(ConfigError, match="hw=cpu has no GPU"):
        wanted_of(load(["+hw=cpu"]), {}, {}, {})


def test_the_command_exits_with_5_where_something_is_missing(tmp_path, monkeypatch, capsys):
    """On a PATH that has no nvidia-smi, whatever this machine has."""
    empty = tmp_path / "bin"
    empty.mkdir()
    for name in ("cat", "df", "sh"):
        (empty / name).symlink_to(f"/bin/{name}")
    (empty / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (empty / "nvidia-smi").chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(empty))
    words = ["doctor", "--target", "--json", "+hw=b200", "model=deepseek_r1", "executor=inline", f"store.root={tmp_path / 'store'}"]
    assert main(words) == 5
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["exit_code"] == 5
    assert next(check for check in result["checks"] if check["name"] == "count")["status"] == "bad"
    assert main(["plan", "--target"]) == 2
