"""What starts the servers: containers, Slurm, MPI. One way is enough."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeline.doctor.probe import BAD, OK, WARN, Check, Probe, Run, Wanted

__all__ = ["PROBES", "containers"]

RUNTIMES = (
    ("docker", ("docker", "info", "--format", "{{.ServerVersion}} {{json .Runtimes}}")),
    ("podman", ("podman", "--version")),
    ("enroot", ("enroot", "version")),
    ("apptainer", ("apptainer", "--version")),
)
IMAGE_BYTES = 15e9
"""About what Triton's TensorRT-LLM image takes to pull."""


def containers(wanted: Wanted, run: Run) -> Iterator[Check]:
    """Which runtimes there are, whether docker knows NVIDIA's, and whether the image is here."""
    found = {name: output.strip() for name, command in RUNTIMES if (output := run(command)) is not None}
    inside = run(("tritonserver", "--version")) is not None or run(("sh", "-c", "command -v tritonserver")) is not None
    shown = ", ".join(f"{name} {_version(text)}" for name, text in found.items())
    if inside:
        shown = f"{shown}, inside a container with tritonserver" if shown else "inside a container with tritonserver"
    fix = "install docker with nvidia-container-toolkit, or enroot and pyxis on Slurm"
    yield Check("software", "containers", OK if shown else BAD, shown or "no container runtime", "one", fix)
    if "docker" in found:
        knows = "nvidia" in found["docker"]
        fix = "nvidia-ctk runtime configure --runtime=docker, and restart docker (a CDI setup needs no runtime)"
        said = "nvidia" if knows else "docker has no runtime nvidia"
        yield Check("software", "gpu runtime", OK if knows else WARN, said, "nvidia", fix)
        if wanted.image:
            yield _image(wanted.image, run)


def _image(image: str, run: Run) -> Check:
    digest = run(("docker", "image", "inspect", "--format", "{{.Id}}", image))
    fix = f"docker pull {image} (about {IMAGE_BYTES / 1e9:.0f} GB)"
    return Check("software", "image", OK if digest else WARN, image if digest else "not pulled", image, fix)


def _version(text: str) -> str:
    match = re.search(r"\d+(\.\d+)+", text)
    return match[0] if match else "of unknown version"


def judge_mpirun(text: str, wanted: Wanted) -> Iterator[Check]:
    """TensorRT-LLM is built against Open MPI."""
    match = re.search(r"Open MPI\)? (\d+)\.(\d+\.\d+)", text)
    found = f"Open MPI {match[1]}.{match[2]}" if match else text.splitlines()[0]
    yield Check("software", "mpi", OK if match else WARN, found, "Open MPI", "use the container's mpirun on every node")


def judge_slurm_mpi(text: str, wanted: Wanted) -> Iterator[Check]:
    """`srun --mpi=list` names the plugins, on one line or one a line."""
    plugins = re.findall(r"\b(pmix\w*|pmi2|cray_shasta|none)\b", text)
    there = any(plugin.startswith("pmix") for plugin in plugins)
    fix = "install Slurm's pmix plugin (slurm built --with-pmix): ranks find one another through it"
    yield Check("software", "slurm pmix", OK if there else BAD, ", ".join(dict.fromkeys(plugins)) or "none", "pmix", fix)


def judge_pyxis(text: str, wanted: Wanted) -> Iterator[Check]:
    """pyxis adds --container-image to srun."""
    there = "--container-image" in text
    fix = "install pyxis (SPANK plugin) and enroot, or start the servers with mpi/run.sh inside a container"
    yield Check("software", "slurm pyxis", OK if there else BAD, "there" if there else "not there", "there", fix)


def _several(wanted: Wanted) -> bool:
    return wanted.nodes > 1


PROBES = (
    Probe(
        area="software", name="mpi", command=("mpirun", "--version"), judge=judge_mpirun, when=_several,
        fix="mpi/run.sh and the pods of a LeaderWorkerSet need it, Slurm does not",
    ),
    Probe(
        area="software", name="slurm pmix", command=("srun", "--mpi=list"), judge=judge_slurm_mpi, when=_several,
        fix="start the servers with Kubernetes or mpi/run.sh",
    ),
    Probe(area="software", name="slurm pyxis", command=("srun", "--help"), judge=judge_pyxis, when=_several),
)  # fmt: skip
