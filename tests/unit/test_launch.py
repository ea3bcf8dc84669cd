"""Launchers: rendered from one fleet, linted, run with doubles of srun, mpirun and docker, and caught when they disagree."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import yaml

from pipeline.config.load import load
from pipeline.config.schema import Config
from pipeline.core.errors import ConfigError, StageError
from pipeline.core.jsonio import write_json
from pipeline.core.stage import StageContext
from pipeline.engines.trtllm.llm_args import render as render_args
from pipeline.engines.trtllm.llm_args import to_yaml
from pipeline.engines.trtllm.versions import version_line
from pipeline.launch.crosscheck import bundle_of, problems
from pipeline.launch.fleet import fleet_of, planned_fleet, roles_of
from pipeline.launch.image import contents, image_of
from pipeline.launch.render import render, write
from pipeline.planner.placement import rank_places
from pipeline.planner.plan import make_plan
from scripts.lint_rendered import lint_text

CASES = {
    "one_instance": (("+hw=b200",), ()),
    "two_instances": (("+hw=b200",), (("aggregated", 2, 4),)),
    "two_nodes": (("+hw=h100", "hw.num_nodes=2"), ()),
    "nvlink_rack": (("+hw=gb200", "hw.num_nodes=18"), (("context", 4, 4), ("generation", 1, 32))),
    "apart_on_a_node": (("+hw=b200",), (("context", 1, 4), ("generation", 1, 4))),
}
"""Overrides, and (role, count, ranks) where the engine stage says so."""
VARIABLE = {"name": "TRTLLM_ENABLE_PDL", "value": "1", "reason": "kernels overlap", "source": "a test"}


class Notes(list):
    """A `Progress`."""

    start = advance = note = list.append


@dataclass
class Rendered:
    """One deployment: what the engine stage would have written, and its launchers."""

    config: Config
    deploy: dict
    engine: Path
    files: dict[str, str]

    def problems(self, **changed: str) -> list[str]:
        """Those of the files, some of which may be changed (`__` is a slash, `_` before the suffix a dot)."""
        rows = roles_of(yaml.safe_load((self.engine / "engine.json").read_text()), self.deploy)
        return problems(self.files | changed, bundle_of(self.engine, rows, self.deploy))

    def unpack(self, package: Path) -> Path:
        for name, text in self.files.items():
            file = package / "launch" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return package


@cache
def planned(overrides: tuple[str, ...]) -> tuple[Config, dict]:
    config = load([*overrides, "model=deepseek_r1"])
    return config, make_plan(config, config.model.hf).deploy


def rendered(folder: Path, name: str, *more: str) -> Rendered:
    overrides, instances = CASES[name]
    config, deploy = planned((*overrides, *more))
    line = version_line(config.engine.trtllm.version)
    args = render_args(deploy, line)
    engine = folder / "engine"
    engine.mkdir(parents=True)
    described = {"kind": "trtllm", "line": line.line, "instances": []}
    (engine / "llm_args.yaml").write_text(to_yaml(args))
    for role, count, ranks in instances:
        file = engine / "instances" / role / "llm_args.yaml"
        file.parent.mkdir(parents=True)
        file.write_text(to_yaml({**args, "tensor_parallel_size": ranks, "moe_expert_parallel_size": ranks}))
        row = {"role": role, "count": count, "tp": ranks, "pp": 1, "llm_args": f"instances/{role}/llm_args.yaml"}
        described["instances"].append(row)
    write_json(engine / "engine.json", described)
    write_json(engine / "environment.json", [VARIABLE])
    if instances:
        deploy = {**deploy, "placement": rank_places(config.hw, instances[0][2], instances[0][1])}
    return Rendered(config, deploy, engine, render(fleet_of(config, engine, deploy), {"backend": "pytorch"}))


@pytest.fixture(params=CASES)
def each(request, tmp_path) -> Rendered:
    return rendered(tmp_path, request.param)


def test_every_launcher_agrees_with_the_bundle_and_lints_clean(each):
    assert each.problems() == []
    assert {name: said for name, text in each.files.items() if (said := list(lint_text(Path(name).name, text)))} == {}


def test_what_needs_one_node_is_left_out_where_there_are_more(tmp_path):
    one, rack = rendered(tmp_path / "a", "apart_on_a_node").files, rendered(tmp_path / "b", "nvlink_rack").files
    assert {"single/container.sh", "single/bare.sh", "compose/compose.yaml", "slurm/serve.sbatch", "mpi/run.sh"} <= one.keys()
    assert not any(name.startswith(("single/", "compose/")) for name in rack)
    assert {"kubernetes/leader.sh", "kubernetes/worker.sh"} <= rack.keys()


MUTATIONS = [
    ("one_instance", "instance.sh", "ranks=8", "ranks=64", "64 ranks, and its LLM arguments take 8"),
    ("one_instance", "instance.sh", "gpus=0,1,2,3,4,5,6,7", "gpus=0,1,2,3,4,5,6,6", "one GPU a rank"),
    ("one_instance", "instance.sh", "gpus=0,1,2,3,4,5,6,7", "gpus=0,2,1,3,4,5,6,7", "and the plan (0, 1, 2, 3, 4, 5, 6, 7)"),
    ("two_instances", "instance.sh", "http=8010", "http=8001", "uses the port 8001 twice"),
    ("two_instances", "instance.sh", "prefix=aggregated_1_8010_", "prefix=aggregated_0_8000_", "aggregated_0_8000_ twice"),
    ("one_instance", "instance.sh", "export TRTLLM_ENABLE_PDL=1", "export TRTLLM_ENABLE_PDL=0", "environment.json has"),
    ("one_instance", "slurm/serve.sbatch", "start aggregated-0 0 1 8", "start aggregated-0 0 1 64", "with 64 ranks"),
    ("two_nodes", "slurm/serve.sbatch", "--nodes=2", "--nodes=1", "asks for 1 nodes, and its servers take 2"),
    ("two_nodes", "slurm/serve.sbatch", "--gpus-per-node=8", "--gpus-per-node=4", "4 GPUs a node, fewer"),
    ("nvlink_rack", "slurm/serve.sbatch", "start context-3 3 1 4", "start context-3 2 1 4", "both take GPU 0 of node 2"),
    ("nvlink_rack", "slurm/serve.sbatch", "start context-3 3 1 4\n", "", "the instances are"),
    ("nvlink_rack", "slurm/disaggregated.yaml", "num_instances: 4", "num_instances: 3", "engine.json has 4"),
    ("nvlink_rack", "mpi/disaggregated.yaml", "of-the-job:8050", "of-the-job:8000", "no address of a generation server"),
    ("one_instance", "kubernetes/serve.yaml", "nvidia.com/gpu: 8", "nvidia.com/gpu: 64", "pods of 64 GPUs"),
    ("nvlink_rack", "kubernetes/serve.yaml", "size: 8", "size: 4", "4 pods of 4 GPUs to generation-0, which has 32 ranks"),
    ("nvlink_rack", "kubernetes/serve.yaml", "replicas: 4", "replicas: 2", "its replicas are"),
    ("one_instance", "kubernetes/serve.yaml", "failureThreshold: 540", "failureThreshold: 60", "the start may take 600 s"),
    ("one_instance", "kubernetes/serve.yaml", "containerPort: 8000", "containerPort: 9000", "are not the server's"),
    ("one_instance", "single/container.sh", "26.07-trtllm", "26.02-trtllm", "different images"),
    ("two_instances", "compose/compose.yaml", "8010:8010", "9010:9010", "aggregated-1 publishes"),
    ("apart_on_a_node", "instance.sh", "gpus=4,5,6,7", "gpus=3,4,5,6", "both take GPU 3"),
]


@pytest.mark.parametrize(("case", "file", "old", "new", "said"), MUTATIONS)
def test_a_launcher_that_disagrees_is_named(tmp_path, case, file, old, new, said):
    one = rendered(tmp_path, case)
    assert old in one.files[file]
    found = one.problems(**{file: one.files[file].replace(old, new, 1)})
    assert any(said in problem for problem in found), found


def test_ranks_follow_the_ring_of_the_nodes_wiring(tmp_path):
    wiring = Path(__file__).parents[1] / "data" / "topology" / "pcie_interleaved.txt"
    config, deploy = planned(("+hw=h200", "parallel=tp8", f"hw.topology={wiring}"))
    ring = [place["gpu"] for place in deploy["placement"]]
    assert ring != sorted(ring)
    assert f"gpus={','.join(map(str, ring))} ranks=8" in render(planned_fleet(config, deploy), {})["instance.sh"]


def test_a_container_with_another_engine_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"26\.02-trtllm-python-py3 holds trtllm 1\.1\.0, but the bundle is written for trtllm"):
        rendered(tmp_path, "one_instance", "serve.container=here/tritonserver:26.02-trtllm-python-py3")
    one = rendered(tmp_path / "one", "one_instance")
    swapped = {name: text.replace(":26.07-trtllm", ":26.02-trtllm") for name, text in one.files.items()}
    assert any("holds trtllm 1.1.0, and the bundle is written for trtllm 1.2" in said for said in one.problems(**swapped))


@pytest.mark.parametrize(
    ("image", "enroot"),
    [
        ("localhost:5000/r1:3", "localhost:5000#r1:3"),
        ("nvcr.io/a/b@sha256:0", "nvcr.io#a/b@sha256:0"),
        ("r1.5:3", "r1.5:3"),
        ("here/r1:3", "here/r1:3"),
        ("./r1.sqsh", "./r1.sqsh"),
    ],
)
def test_enroot_parts_a_registry_from_the_rest(tmp_path, image, enroot):
    script = rendered(tmp_path, "two_nodes", f"serve.container='{image}'").files["slurm/serve.sbatch"]
    assert f'image="${{IMAGE:-{enroot}}}"' in script


@pytest.mark.parametrize("image", ["$(touch x):1", "my image:1", '"', "-v"])
def test_what_a_shell_would_take_apart_is_no_image(image):
    with pytest.raises(ConfigError, match="no name of images"):
        image_of(load(["+hw=b200", f"serve.container='{image}'"]))


def test_containers_say_what_they_hold():
    assert contents("nvcr.io/nvidia/tritonserver:26.04-trtllm-python-py3") == ("trtllm", "1.2.1")
    assert contents("nvcr.io/nvidia/tensorrt-llm/release:1.3.0rc20") == ("trtllm", "1.3.0rc20")
    assert contents("here/r1:3") == ("", "")
    assert image_of(load(["+hw=b200", "serve.container=here/r1:3"])) == "here/r1:3"
    assert image_of(load(["+hw=cpu"])) is None


def test_without_a_published_container_only_what_needs_none_is_written(tmp_path):
    files = rendered(tmp_path, "one_instance", "engine.trtllm.version=1.3").files
    assert files.keys() == {"instance.sh", "single/bare.sh", "mpi/run.sh", "mpi/hostfile", "README.md"}
    named = rendered(tmp_path / "named", "one_instance", "engine.trtllm.version=1.3", "serve.container=here/r1:3").files
    assert "image=here/r1:3" in named["single/container.sh"]


def test_dev_shm_grows_with_stubs_and_ranks_and_is_never_small(tmp_path):
    small, two = rendered(tmp_path / "a", "apart_on_a_node"), rendered(tmp_path / "b", "two_instances")
    fleet = fleet_of(two.config, two.engine, two.deploy)
    assert [fleet.shm_of(fleet.instances[:count]) >> 30 for count in (0, 1, 2)] == [2, 2, 4]
    assert "shm_size: 2g" in two.files["compose/compose.yaml"] and "--shm-size 4g" in two.files["single/container.sh"]
    assert "ipc: host" in small.files["compose/compose.yaml"]


def test_the_liveness_probe_does_not_find_its_own_shell(tmp_path):
    served = list(yaml.safe_load_all(rendered(tmp_path, "one_instance").files["kubernetes/serve.yaml"]))
    probe = served[0]["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["exec"]["command"]
    looked_for = probe[-1].split(" && ")[0]
    assert "stub" in looked_for
    name = f"stub_of_{os.getpid()}"  # other runs on this machine have other ones
    alive = [*probe[:-1], f"{looked_for.replace('stub', name)} && true"]
    assert subprocess.run(alive, check=False).returncode == 1
    command = ["bash", "-c", "echo; read -r line", f"triton_python_backend_{name}"]
    stub = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert stub.stdout and stub.stdout.readline() == b"\n", "it has its name from here on"
        assert subprocess.run(alive, check=False).returncode == 0
    finally:
        stub.communicate(b"\n")


# --- the scripts, run ------------------------------------------------------------------------------------------

RECORD = '#!/usr/bin/env bash\nprintf "%s\\n" "${0##*/} gpus=${CUDA_VISIBLE_DEVICES:-} pdl=${TRTLLM_ENABLE_PDL:-} $*" >>"$RECORD"\n'
"""A double: writes down how it was called."""


def run(script: Path, *words: str, doubles: tuple[str, ...], **variables: str) -> tuple[int, str, list[str]]:
    """Exit code, standard error, and the calls of the doubles."""
    folder = script.parent / "doubles"
    folder.mkdir(exist_ok=True)
    for name in doubles:
        (folder / name).write_text(RECORD + {"scontrol": "printf 'host%s\\n' a b c d e f g h i j k l\n"}.get(name, ""))
        (folder / name).chmod(0o755)
    record = folder / "record"
    record.write_text("")
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "HOME": str(folder), "RECORD": str(record)} | variables
    done = subprocess.run(["bash", script, *words], env=environment, capture_output=True, text=True, timeout=300, check=False)
    return done.returncode, done.stderr, record.read_text().splitlines()


def test_a_rank_gets_its_gpus_environment_and_prefix(tmp_path):
    package = rendered(tmp_path, "two_instances").unpack(tmp_path / "package")
    script, doubles = package / "launch" / "instance.sh", ("trtllm-llmapi-launch", "tritonserver")
    code, _, calls = run(script, "aggregated-1", "ranked", doubles=doubles, SLURM_PROCID="3", SLURM_NTASKS="4")
    assert (code, len(calls)) == (0, 1)
    assert calls[0].startswith(f"trtllm-llmapi-launch gpus=4,5,6,7 pdl=1 tritonserver --model-repository={package}/repository")
    assert "--http-port=8010 --grpc-port=8011 --metrics-port=8012" in calls[0]
    assert "shm-region-prefix-name=aggregated_1_8010_3_" in calls[0]
    code, _, calls = run(script, "aggregated-0", doubles=doubles, KEEP_GPUS="1")
    assert code == 0 and calls[0].startswith("tritonserver gpus= pdl=1 --model-repository")
    code, said, calls = run(script, "aggregated-0", "ranked", doubles=doubles, OMPI_COMM_WORLD_SIZE="8")
    assert (code, calls) == (2, []) and "needs 4 ranks, but was started with 8" in said
    code, said, _ = run(script, "aggregated-7", doubles=doubles)
    assert code == 2 and "no instance aggregated-7" in said


def test_without_an_imex_channel_a_rack_does_not_start(tmp_path):
    package = rendered(tmp_path, "nvlink_rack").unpack(tmp_path / "package")
    code, said, calls = run(
        package / "launch" / "instance.sh", "context-0", "ranked", doubles=("trtllm-llmapi-launch",), SLURM_NTASKS="4"
    )
    assert (code, calls) == (5, []) and "no IMEX channel" in said


def test_a_slurm_job_starts_every_server_on_its_nodes_and_the_router_with_their_names(tmp_path):
    package = rendered(tmp_path, "nvlink_rack").unpack(tmp_path / "package")
    code, said, calls = run(
        package / "launch" / "slurm" / "serve.sbatch", doubles=("srun", "scontrol"), SLURM_SUBMIT_DIR=str(package),
        SLURM_JOB_ID="7", SLURM_JOB_NODELIST="host[a-l]",
    )  # fmt: skip
    assert code == 0, said
    servers = [call for call in calls if "instance.sh" in call]
    wide = next(call for call in servers if "generation-0" in call)
    assert "--nodes=8 --ntasks=32 --ntasks-per-node=4 --nodelist=hoste,hostf,hostg,hosth,hosti,hostj,hostk,hostl" in wide
    assert "--container-image=nvcr.io#nvidia/tritonserver:26.07-trtllm-python-py3" in wide
    router = yaml.safe_load((package / "router-7.yaml").read_text())
    assert router["generation_servers"] == {"num_instances": 1, "urls": ["hoste:8050"]}
    assert router["context_servers"]["urls"] == ["hosta:8010", "hostb:8020", "hostc:8030", "hostd:8040"]


def test_mpirun_gets_the_hosts_of_the_file(tmp_path):
    package = rendered(tmp_path, "two_nodes").unpack(tmp_path / "package")
    script = package / "launch" / "mpi" / "run.sh"
    hosts = tmp_path / "hosts"
    hosts.write_text("# two\nfirst\nsecond slots=8\n")
    code, said, calls = run(script, str(hosts), doubles=("mpirun",))
    assert code == 0, said
    assert "-n 16 --host first:8,second:8 --map-by ppr:8:node" in calls[0]
    hosts.write_text("first\n")
    code, said, calls = run(script, str(hosts), doubles=("mpirun",))
    assert (code, calls) == (2, []) and "names 1 hosts, and 2 are needed" in said


def test_docker_starts_a_container_a_server_and_stops_them_all(tmp_path):
    package = rendered(tmp_path, "apart_on_a_node").unpack(tmp_path / "package")
    code, said, calls = run(package / "launch" / "single" / "container.sh", doubles=("docker",))
    assert code == 0, said
    started = [call for call in calls if " run " in call]
    assert len(started) == 3 and any("instance.sh context-0" in call for call in started)
    assert all("--ulimit memlock=-1" in call and f"{package}:/package:ro" in call for call in started)
    assert any("stop --time 90 deepseek-r1-context-0 deepseek-r1-generation-0 deepseek-r1-router" in call for call in calls)


def test_a_leader_refuses_a_group_of_another_size(tmp_path):
    package = rendered(tmp_path, "two_nodes").unpack(tmp_path / "package")
    leader = package / "launch" / "kubernetes" / "leader.sh"
    leader.write_text(leader.read_text().replace("install -m 600 /ssh-key/private", "touch"))
    variables = {"LWS_LEADER_ADDRESS": "r1-0.r1.here", "LWS_GROUP_SIZE": "3"}
    code, said, calls = run(leader, "aggregated-0", "16", "8", doubles=("mpirun",), **variables)
    assert (code, calls) == (2, []) and "3 pods of 8 GPUs are not the 16 ranks" in said


# --- the stage ---------------------------------------------------------------------------------------------------


def test_the_stage_takes_the_checkpoint_along_for_servers_that_are_not_triton(tmp_path):
    one = rendered(tmp_path, "apart_on_a_node")
    (one.engine / "checkpoint").mkdir()
    (one.engine / "checkpoint" / "config.json").write_text("{}")
    write_json(tmp_path / "deploy.json", one.deploy)
    out = tmp_path / "out"
    out.mkdir()
    ctx = StageContext(
        config=one.config, inputs={"engine": one.engine, "plan": tmp_path}, checkpoint=None, out=out, progress=Notes()
    )
    write(ctx, out / "launch")
    assert (out / "checkpoint" / "config.json").samefile(one.engine / "checkpoint" / "config.json")
    assert yaml.safe_load((out / "instances" / "context" / "llm_args.yaml").read_text())["tensor_parallel_size"] == 4
    assert os.access(out / "launch" / "instance.sh", os.X_OK) and not os.access(out / "launch" / "README.md", os.X_OK)


def test_the_stage_fails_where_launchers_disagree_with_the_bundle(tmp_path):
    one = rendered(tmp_path, "one_instance")
    (one.engine / "llm_args.yaml").write_text((one.engine / "llm_args.yaml").read_text().replace("size: 8", "size: 4"))
    write_json(tmp_path / "deploy.json", one.deploy)
    inputs = {"engine": one.engine, "plan": tmp_path}
    ctx = StageContext(config=one.config, inputs=inputs, checkpoint=None, out=tmp_path / "out", progress=Notes())
    with pytest.raises(StageError, match=r"launch/instance\.sh gives aggregated-0 8 ranks, and its LLM arguments take 4"):
        write(ctx, tmp_path / "out" / "launch")
    assert not (tmp_path / "out").exists()


def test_rdma_cards_are_asked_for_where_servers_span_nodes(tmp_path):
    def limits(case: str, *more: str) -> list[dict]:
        documents = yaml.safe_load_all(rendered(tmp_path / case, case, *more).files["kubernetes/serve.yaml"])
        sets = [item["spec"]["leaderWorkerTemplate"] for item in documents if item["kind"] == "LeaderWorkerSet"]
        pods = [template for item in sets for template in (item["leaderTemplate"], item["workerTemplate"])]
        return [pod["spec"]["containers"][0]["resources"]["limits"] for pod in pods]

    assert limits("two_nodes", "serve.rdma=rdma/ib") == [{"nvidia.com/gpu": 8, "rdma/ib": 1}] * 2
    assert limits("apart_on_a_node", "serve.rdma=rdma/ib") == [{"nvidia.com/gpu": 4}] * 4
    two = rendered(tmp_path, "two_nodes").files
    assert "unless serve.rdma names" in two["README.md"] and "MELLANOX_VISIBLE_DEVICES=all" in two["slurm/serve.sbatch"]


def test_liveness_fails_where_no_stub_runs(tmp_path):
    """pgrep -f must not find the probe's own shell."""
    [deployment, _] = yaml.safe_load_all(rendered(tmp_path, "one_instance").files["kubernetes/serve.yaml"])
    command = deployment["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["exec"]["command"]
    assert "riton_python_backend_stub" in command[2] and "http://localhost:8000/v2/health/live" in command[2]
    absent, present = ("riton_no_such_process_anywhere", "ytest")
    asked = command[2].partition("&&")[0].replace("riton_python_backend_stub", absent)
    assert subprocess.run(["bash", "-c", asked], check=False).returncode == 1
    asked = asked.replace(f"[t]{absent}", f"[p]{present}")
    assert subprocess.run(["bash", "-c", asked], check=False).returncode == 0


def test_vllm_is_started_on_one_node_only(tmp_path):
    config, deploy = planned(("+hw=b200", "engine=vllm"))
    fleet = planned_fleet(config, deploy)
    assert "26.08-vllm-python-py3" in fleet.image
    assert {name.split("/")[0] for name in render(fleet, {})} == {"instance.sh", "README.md", "single", "kubernetes", "compose"}
    wide = replace(fleet, instances=(replace(fleet.instances[0], nodes=(0, 1)),))
    assert render(wide, {}).keys() == {"instance.sh", "README.md"}


def test_ranks_that_do_not_divide_over_nodes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(CASES, "odd", (("+hw=b200",), (("context", 1, 9), ("generation", 1, 8))))
    with pytest.raises(StageError, match="9 ranks of a context instance do not divide over 2 nodes of 8 GPUs"):
        rendered(tmp_path, "odd")


# --- the linter --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("instance.sh", "esac", "", "syntax error"),
        ("instance.sh", 'exec "${bind[@]}" "${server[@]}"', "exec $server", "SC2128"),
        ("slurm/serve.sbatch", "#SBATCH --exclusive", "#SBATCH --exclusively", "no option"),
        ("slurm/serve.sbatch", "set -euo pipefail", "set -euo pipefail\n#SBATCH --mem=0", "after the first command"),
        ("slurm/serve.sbatch", "#SBATCH --nodes=12", "#SBATCH --nodes=@NODES@", "not filled in"),
        ("kubernetes/serve.yaml", "readOnly: true", "readonly: true", "'readonly' was unexpected"),
        ("kubernetes/serve.yaml", "name: shm\n            mount", "name: smh\n            mount", "no volume is named smh"),
        ("kubernetes/serve.yaml", "startupPolicy: LeaderCreated", "startPolicy: LeaderCreated", "'startPolicy' was unexpected"),
        ("kubernetes/serve.yaml", "numNodes: 12", "nodes: 12", "'nodes' was unexpected"),
        ("kubernetes/serve.yaml", "claims:\n            - name: imex", "claims:\n            - name: imx", "claim is named imx"),
    ],
)
def test_the_linter_sees_mistakes(tmp_path, file, old, new, said):
    text = rendered(tmp_path, "nvlink_rack").files[file]
    assert old in text
    found = list(lint_text(Path(file).name, text.replace(old, new, 1)))
    assert any(said in problem for problem in found), found


def test_the_linter_sees_a_key_that_compose_does_not_have(tmp_path):
    text = rendered(tmp_path, "one_instance").files["compose/compose.yaml"]
    assert any("shmsize" in said for said in lint_text("compose.yaml", text.replace("shm_size", "shmsize")))
    assert any("start_period" in said for said in lint_text("compose.yaml", text.replace("5400s", "1.5 hours")))
