"""launch/README.md: what lies there and how to start it."""

from __future__ import annotations

from pipeline.launch.fleet import LOAD_SECONDS, Fleet, Instance
from pipeline.launch.script import Files

__all__ = ["guide"]

USES = {
    "single/container.sh": ("one node, docker", "bash launch/single/container.sh"),
    "single/bare.sh": ("one node, as it is", "bash launch/single/bare.sh"),
    "compose/compose.yaml": ("one node, docker compose", "docker compose -f launch/compose/compose.yaml up"),
    "slurm/serve.sbatch": ("Slurm with pyxis and enroot", "sbatch launch/slurm/serve.sbatch"),
    "mpi/run.sh": ("mpirun over a hostfile", "bash launch/mpi/run.sh HOSTFILE"),
    "kubernetes/serve.yaml": ("Kubernetes", "kubectl apply -f launch/kubernetes/serve.yaml"),
}


def guide(fleet: Fleet, files: Files) -> str:
    """As Markdown; only what this deployment has."""
    lines = [
        f"# Starting {fleet.name}",
        "",
        f"{_servers(fleet)} on {fleet.num_nodes} node{'s' if fleet.num_nodes > 1 else ''} of {fleet.gpus_per_node} GPUs, image",
        f"`{fleet.image or 'of your own'}`. Run the commands in the package's folder.",
        "",
        "| where | command |",
        "|---|---|",
        *(f"| {title} | `{command}` |" for name, (title, command) in USES.items() if name in files),
        "",
        *_clients(fleet),
        f"A first load can take an hour; every launcher waits {LOAD_SECONDS} s. All of them end in `instance.sh`, which has the",
        "GPUs, ports, environment and command of each server:",
        "",
        "| server | nodes | GPUs of each | ranks | HTTP port |",
        "|---|---|---|---|---|",
        *(_row(item) for item in fleet.instances),
        *(_kubernetes(fleet, files) if "kubernetes/serve.yaml" in files else ()),
        *(_imex(fleet) if fleet.needs_imex else ()),
    ]
    return "\n".join([*lines, ""])


def _servers(fleet: Fleet) -> str:
    def one(role: str) -> str:
        items = fleet.of_role(role)
        servers = f"{len(items)} {role} server{'s' if len(items) > 1 else ''} of {items[0].ranks} GPUs"
        nodes = len(items[0].nodes)
        return f"{servers} over {nodes} nodes" if nodes > 1 else servers

    return ", ".join(map(one, fleet.roles))


def _clients(fleet: Fleet) -> list[str]:
    if fleet.disaggregated:
        return [f"Clients ask the router in OpenAI's way: port {fleet.http_port} of the first node."]
    if len(fleet.instances) > 1:
        where = "any server: Kubernetes' Service spreads them, elsewhere put a balancer before the ports below"
    else:
        where = f"Triton: port {fleet.http_port} of the first node"
    return [
        f"Clients ask {where}. For OpenAI's API run, wherever the package and this project are (no GPU, no torch),", "",
        "```bash",
        f"python -m pipeline.openai --grpc NODE:{fleet.instances[0].grpc_port} --model MODEL --tokenizer $(dirname $(ls "
        "repository/*/1/checkpoint/tokenizer.json)) --port 9000",
        "```", "",
    ]  # fmt: skip


def _row(item: Instance) -> str:
    nodes = f"{item.nodes[0]}" if len(item.nodes) == 1 else f"{item.nodes[0]} to {item.nodes[-1]}"
    return f"| {item.name} | {nodes} | {item.visible_devices} | {item.ranks} | {item.http_port} |"


def _kubernetes(fleet: Fleet, files: Files) -> list[str]:
    lines = [
        "", "## Kubernetes", "",
        f"The package lies in the PersistentVolumeClaim `{fleet.claim}` (serve.claim), readable from every node.",
        "Nodes are chosen by the labels of NVIDIA's GPU feature discovery. Locked memory is the node's to allow: set no limit in",
        "its container runtime.",
    ]  # fmt: skip
    if fleet.crosses_nodes and not fleet.rdma:
        lines += ["Pods get no RDMA cards: traffic between nodes goes over TCP unless serve.rdma names your device plugin's."]
    if "kubernetes/leader.sh" in files or fleet.disaggregated:
        lines += ["LeaderWorkerSet (`leaderworkerset.x-k8s.io`) must be installed."]
    if "kubernetes/leader.sh" in files:
        lines += [
            "Ranks are started over ssh, with a key of this deployment's own; the image needs openssh-server:", "",
            "```bash",
            "ssh-keygen -q -t ed25519 -N '' -f key",
            f"kubectl create secret generic {fleet.name}-ssh --from-file=private=key --from-file=public=key.pub",
            "```",
        ]  # fmt: skip
    return lines


def _imex(fleet: Fleet) -> list[str]:
    return [
        "", "## NVLink between nodes", "",
        f"The {fleet.nvlink_domain} GPUs of the NVLink domain share memory across nodes through IMEX. Every node runs",
        "`nvidia-imex` in one domain (`nvidia-imex-ctl -N` shows all as READY), and every container has the device",
        "`/dev/nvidia-caps-imex-channels/channel0`:",
        "",
        "- Slurm: its `switch/nvidia_imex` plugin makes a channel for each job; `--segment` keeps the nodes in one domain.",
        "- Kubernetes: NVIDIA's DRA driver makes the domain from the ComputeDomain and gives each pod its channel; the service",
        "  `nvidia-imex` of the nodes must be off then.",
        "- docker: pass `--device /dev/nvidia-caps-imex-channels/channel0`.",
        "",
        "`python -m pipeline doctor --target` checks it before hours are spent.",
    ]  # fmt: skip
