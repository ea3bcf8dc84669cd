#!/usr/bin/env python3
"""Converting DeepSeek-R1 to NVFP4: ours, nvidia-modelopt, vectorised torch, and what the disk and the memory allow, in one run.

    python scripts/bench_convert.py [--quick] [--json FILE] [--folder DIR] [--modelopt-python PYTHON] [--repeats 3]

A checkpoint with R1's config, 163 headers and 91,991 tensors is planned whole; weights lie in a few of its shards (the others
are holes), and these are converted, straight from and to the disk. The time for all of R1 is extrapolated by bytes. Limits are
measured on the same files: reading them, writing as much as comes out, and both at once with nothing computed between. `per
core` is one thread on data in the page cache, measuring and converting, in CPU seconds. Peers convert one expert in processes
of their own (one thread, CPU seconds), and their bytes must be ours. `--quick` takes smaller shards, under 50 s on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline import native  # noqa: E402
from pipeline.checkpoint import blocks  # noqa: E402
from pipeline.checkpoint.arithmetic import Amaxes, Arithmetic  # noqa: E402
from pipeline.checkpoint.blocks import BlockPool, ShardFile  # noqa: E402
from pipeline.checkpoint.conversion import ConversionPlan, OutputShard, plan_conversion  # noqa: E402
from pipeline.checkpoint.directio import allocate, open_direct, read_into, write_all  # noqa: E402
from pipeline.checkpoint.flow import Flow  # noqa: E402
from pipeline.checkpoint.recipe import Recipe  # noqa: E402
from pipeline.checkpoint.source import Checkpoint  # noqa: E402
from pipeline.checkpoint.source_files import SourceFiles  # noqa: E402
from pipeline.checkpoint.stream import Options, convert_shards, num_cores  # noqa: E402
from pipeline.checkpoint.tasks import TaskCutter  # noqa: E402
from pipeline.formats import FORMATS, Format, fast  # noqa: E402
from scripts._options import result_file  # noqa: E402
from scripts.r1_shards import make  # noqa: E402

CLASSES = {"attention": "bf16", "o_proj": "bf16", "mtp": "bf16"}
NVIDIA = CLASSES | dict.fromkeys(("dense_mlp", "shared_experts", "routed_experts"), "nvfp4")
"""As nvidia/DeepSeek-R1-FP4."""
IO_BYTES = 8 << 20
SPARK = "▁▂▃▄▅▆▇█"


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=result_file)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk that is to be measured")
    parser.add_argument("--modelopt-python", default=sys.executable, help="an interpreter that has nvidia-modelopt")
    parser.add_argument("--repeats", type=int, help="runs of ours; the fastest counts, all are reported")
    parser.add_argument("--shards", type=int, help="of R1's 163 that get weights")
    parser.add_argument("--ours", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ours:
        print(json.dumps(convert_once(*options.ours)))
        return 0
    with tempfile.TemporaryDirectory(prefix="bench-convert-", dir=options.folder) as folder:
        table = measure(Path(folder), options)
    print("\n".join(lines(table)))
    if options.json:
        options.json.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0 if table["bytes_equal_to_peers"] else 1


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Everything, as one table."""
    num_shards, filled = (1304, options.shards or 2) if options.quick else (163, options.shards or 4)
    repeats = options.repeats or (1 if options.quick else 3)
    load_before = os.getloadavg()
    files = make(folder / "r1", num_shards, filled)
    plan = planned(folder / "r1")
    chosen = chosen_shards(plan)
    read, written = sum(file.stat().st_size for file in files), sum(shard.num_bytes for shard in chosen)
    settle()
    cores = [per_core(plan, chosen[0], folder / "core")]
    limits = [disk_limits(files, folder / "limit", written)]
    runs = []
    for _ in range(repeats):
        runs.append(run_ours(folder))
        limits.append(disk_limits(files, folder / "limit", written))
    limit = {name: min(limit[name] for limit in limits) for name in limits[0]}
    best = min(runs, key=lambda run: run["seconds"])
    peers = run_peers(folder, plan, chosen[0], options)
    ours = peers.pop("ours")
    cores.append(per_core(plan, chosen[0], folder / "core"))  # long after the last write
    core = max(cores, key=lambda core: core["gb_per_s"])
    whole = {"bytes_in": sum(s.num_source_bytes for s in plan.shards), "bytes_out": sum(s.num_bytes for s in plan.shards)}
    modelopt = peers["modelopt"]
    return {
        "speedup_vs_modelopt": modelopt and round(ours["gb_per_s"] / modelopt["gb_per_s"], 1),
        "speedup_vs_modelopt_from_page_cache": modelopt and round(core["gb_per_s"] / modelopt["gb_per_s"], 1),
        "gb_per_s_per_core": core["gb_per_s"],
        "fraction_of_limit": round(limit["both"] / best["seconds"], 3),
        "fraction_of_slower_of_read_and_write": round(max(limit["read"], limit["write"]) / best["seconds"], 3),
        "peak_rss_bytes": max(run["peak_rss_bytes"] for run in runs),
        "memory_curve_mib": best["memory_curve_mib"],
        "bytes_equal_to_peers": all(peer["equal"] for peer in peers.values() if peer),
        "ours": {"bytes_in": best["bytes_in"], "bytes_out": written, "runs": [_without_curve(run) for run in runs]},
        "per_core": core, "per_core_all": cores,
        "in_memory": ours,
        "peers": peers,
        "disk_seconds": limit, "disk_seconds_all": limits, "disk_bytes_read": read, "memory_copy_gb_per_s": copy_limit(),
        "r1": whole | {"tensors": len(plan.source.tensors), "shards": num_shards}
        | {"minutes": round(whole["bytes_in"] / best["bytes_in"] * best["seconds"] / 60, 1)},
        "quick": options.quick, "load_before": load_before, "load_after": os.getloadavg(), "machine": machine(),
    }  # fmt: skip


def settle(seconds: float = 15) -> None:
    """Wait for the disk: while it writes back what was just made, the processor of a virtual machine is slower."""
    os.sync()
    time.sleep(seconds)


def planned(folder: Path) -> ConversionPlan:
    """All of R1."""
    table = {"formats": NVIDIA, "kv_cache": "fp8", "input_scale": 1.0}
    return plan_conversion(Checkpoint.open(folder), Recipe.from_table(table))


def chosen_shards(plan: ConversionPlan) -> list[OutputShard]:
    """Those whose files have weights: holes take no blocks."""
    files = {file for file in plan.source.shards if file.stat().st_blocks * 512 > file.stat().st_size // 2}
    return [shard for shard in plan.shards if shard.steps[0].entry.main.file in files]


def run_ours(folder: Path) -> dict[str, Any]:
    """One conversion, in a process of its own, whose memory is measured."""
    command = [sys.executable, __file__, "--ours", str(folder / "r1"), str(folder / "out")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    shutil.rmtree(folder / "out")
    return json.loads(done.stdout.splitlines()[-1])


def convert_once(source: Path, out: Path) -> dict[str, Any]:
    """Plan all, convert the chosen shards; memory is that of the whole process, planning included."""
    curve, stop = [], threading.Event()
    threading.Thread(target=_watch, args=(curve, stop), daemon=True).start()
    begun = time.perf_counter()
    plan = planned(source)
    chosen = chosen_shards(plan)
    (out / "state").mkdir(parents=True)
    started, cpu, done = time.perf_counter(), time.process_time(), 0
    with closing(convert_shards(plan, chosen, out, out / "state", Options())) as events:
        for event in events:
            done += event if isinstance(event, int) else 0
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    stop.set()
    return {
        "bytes_in": done, "seconds": round(seconds, 3), "cpu_seconds": round(cpu, 3), "plan_seconds": round(started - begun, 3),
        "peak_rss_bytes": _peak_rss(), "memory_curve_mib": _thinned(curve), "load": os.getloadavg()[0],
    }  # fmt: skip


def per_core(plan: ConversionPlan, shard: OutputShard, file: Path, limit: int = 512 << 20) -> dict[str, float]:
    """One thread, data in the page cache: read, measure, convert into blocks, unhashed; CPU seconds, best of five."""
    sources, flow = SourceFiles(direct=False), Flow()
    buffer, pool = allocate(64 << 20), BlockPool()
    tasks, size = [], 0
    for task in TaskCutter(plan).cut(0, shard):
        tasks.append(task)
        size += task.num_bytes
        if size > limit:
            break
    times, scratch = [], {}
    hashed, blocks.sha256 = blocks.sha256, Unhashed
    for _ in range(6):  # the first fills the page cache
        arithmetic = Arithmetic(plan.recipe, Amaxes(flow, plan.steps))  # for all of R1, so its making is not counted
        out = ShardFile(file, shard.plan, file.parent, pool, lambda block: pool.give(block.memory))
        out.begin()
        started = time.process_time()
        for task in tasks:
            arrays, _ = sources.read([item for part in task.parts for item in part.sources], buffer)
            left = iter(arrays)
            stored = [{name: next(left) for name in part.names} for part in task.parts]
            for part, tensors in zip(task.parts, stored, strict=True):
                arithmetic.measure(part, tensors)
            for part, tensors in zip(task.parts, stored, strict=True):
                arithmetic.convert(part, tensors, out, scratch)
        times.append(time.process_time() - started)
        out.discard()
    blocks.sha256 = hashed
    sources.close()
    data = bytes(IO_BYTES)
    started = time.process_time()
    sha256(data)
    return {
        "bytes": size, "gb_per_s": round(size / min(times[1:]) / 1e9, 3), "cpu_seconds": times[1:],
        "sha256_gb_per_s": round(len(data) / (time.process_time() - started) / 1e9, 3),
    }  # fmt: skip


class Unhashed:
    """Stands for SHA-256 where the rest is measured."""

    def __init__(self, data: memoryview) -> None: ...

    def digest(self) -> bytes:
        return b""


def disk_limits(files: list[Path], scratch: Path, to_write: int) -> dict[str, float]:
    """Seconds to read the files, to write as much as comes out, and to do both at once; all past the page cache."""

    def timed(*work: Any) -> float:
        threads = [threading.Thread(target=job) for job in work]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return round(time.perf_counter() - started, 3)

    def read() -> None:
        for file in files:
            _read_all(file)

    def write() -> None:
        _write_much(scratch, to_write)
        scratch.unlink()

    return {"read": timed(read), "write": timed(write), "both": timed(read, write)}


def _read_all(file: Path) -> None:
    descriptor, _ = open_direct(file, os.O_RDONLY)
    buffer, size = allocate(IO_BYTES), file.stat().st_size
    for start in range(0, size, IO_BYTES):
        read_into(descriptor, buffer, start, min(IO_BYTES, size - start))
    os.close(descriptor)


def _write_much(file: Path, size: int) -> None:
    descriptor, _ = open_direct(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    buffer = allocate(IO_BYTES)
    buffer[:] = np.random.default_rng(0).bytes(IO_BYTES)
    for start in range(0, size, IO_BYTES):
        write_all(descriptor, buffer, start)
    os.fsync(descriptor)
    os.close(descriptor)


def copy_limit() -> float:
    """One core, memory to memory, GB/s of bytes copied; best of five."""
    one, other = np.ones(256 << 20, np.uint8), np.empty(256 << 20, np.uint8)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        np.copyto(other, one)
        times.append(time.perf_counter() - started)
    return round(one.size / min(times) / 1e9, 1)


def run_peers(folder: Path, plan: ConversionPlan, shard: OutputShard, options: argparse.Namespace) -> dict[str, Any]:
    """Their rates on one expert, and whether their bytes are ours; None for a peer that is not installed."""
    step = next(step for step in shard.steps if step.entry.place.kind == "routed_experts")
    stored, item = {name: array.copy() for name, array in step.entry.load().items()}, FORMATS["nvfp4"]
    amax = fast.amax(step.entry.format, stored)
    ours = fast.requantize(step.entry.format, stored, item, amax=amax, input_scale=1.0)
    wanted = [sha256(ours[name].tobytes()).hexdigest() for name in ("weight", "weight_scale")]
    codes, scales = stored["weight"].view(np.uint8), stored["weight_scale_inv"]
    np.savez(folder / "expert.npz", codes=codes, scales=scales, amax=np.float32(amax))
    peers: dict[str, Any] = {"ours": ours_in_memory(step.entry.format, stored, item)}
    for name, python in (("torch", sys.executable), ("modelopt", options.modelopt_python)):
        peers[name] = run_peer(folder / "expert.npz", name, python, 2 if options.quick else 10)
        if peers[name]:
            peers[name]["gb_per_s"] = round(codes.size / min(peers[name]["cpu_seconds"]) / 1e9, 5)
            peers[name]["equal"] = peers[name].pop("digests") == wanted
    return peers


def ours_in_memory(source: Format, stored: dict[str, Any], target: Format) -> dict[str, Any]:
    """The peers' work on the peers' tensor, one thread; finding the amax, which they are given, is counted."""
    times = []
    for _ in range(20):
        started = time.process_time()
        amax = fast.amax(source, stored)
        fast.requantize(source, stored, target, amax=amax, input_scale=1.0)
        times.append(time.process_time() - started)
    return {"cpu_seconds": times, "gb_per_s": round(stored["weight"].size / min(times) / 1e9, 3)}


def run_peer(file: Path, name: str, python: str, seconds: float) -> dict[str, Any] | None:
    """What the peer's process says; None with a sentence where it cannot be imported."""
    script = Path(__file__).with_name("bench_convert_peer.py")
    done = subprocess.run([python, str(script), str(file), name, str(seconds)], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        print(f"{name} was not measured: {python} says {last}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def lines(table: dict[str, Any]) -> list[str]:
    """The table for people."""
    ours, core, limit, r1 = table["ours"], table["per_core"], table["disk_seconds"], table["r1"]
    best = min(ours["runs"], key=lambda run: run["seconds"])
    speed, written = ours["bytes_in"] / best["seconds"], ours["bytes_out"]
    rows = [
        ("ours, one core, in memory", f"{table['in_memory']['gb_per_s']:.2f} GB/s of FP8 a CPU second"),
        ("ours, one core, page cache", f"{core['gb_per_s']:.2f} GB/s of FP8 a CPU second"),
        *((f"{name}, one core", _rate(peer)) for name, peer in table["peers"].items()),
        ("memory copy, one core", f"{table['memory_copy_gb_per_s']} GB/s"),
        ("SHA-256, one core", f"{core['sha256_gb_per_s']} GB/s (of what is written)"),
        ("ours, from and to the disk", f"{speed / 1e9:.2f} GB/s in, {written / best['seconds'] / 1e9:.2f} out"),
        ("", f"{best['seconds']:.2f} s, {best['cpu_seconds']:.2f} CPU s, for {ours['bytes_in'] / 1e9:.2f} GB in"),
        ("disk, reading alone", f"{ours['bytes_in'] / limit['read'] / 1e9:.2f} GB/s"),
        ("disk, writing alone", f"{written / limit['write'] / 1e9:.2f} GB/s"),
        ("disk, both at once", f"{ours['bytes_in'] / limit['both'] / 1e9:.2f} GB/s in, {written / limit['both'] / 1e9:.2f} out"),
    ]
    sentence = (
        f"R1: {r1['bytes_in'] / 1e9:.1f} GB / {ours['bytes_in'] / 1e9:.2f} GB x {best['seconds']:.2f} s = {r1['minutes']} minutes "
        f"on this disk; {r1['tensors']:,} tensors planned in {best['plan_seconds']:.1f} s"
    )
    return [
        *(f"{name:28s} {value}" for name, value in rows),
        f"{table['fraction_of_limit']:.0%} of the disk's own speed for these reads and writes at once; "
        f"{table['speedup_vs_modelopt']} times modelopt, core for core, in memory",
        sentence,
        f"peak {table['peak_rss_bytes'] / 2**20:.0f} MiB  {spark(table['memory_curve_mib'])}",
        f"load {table['load_before'][0]:.1f} before, {table['load_after'][0]:.1f} after; {json.dumps(table['machine'])}",
    ]


def spark(curve: list[float]) -> str:
    """Memory over time, from nothing to the peak."""
    top = max(curve)
    return "".join(SPARK[min(len(SPARK) - 1, int(value / top * len(SPARK)))] for value in curve)


def machine() -> dict[str, Any]:
    """Where this was measured."""
    names = [line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor(), "cores": num_cores(), "kernels": (native.levels() or ("numpy",))[0],
        "python": platform.python_version(), "numpy": metadata.version("numpy"), "system": platform.platform(),
    }  # fmt: skip


def _rate(peer: dict[str, Any] | None) -> str:
    if not peer:
        return "not installed here"
    versions = ", ".join(f"{name} {version}" for name, version in peer["versions"].items())
    return f"{peer['gb_per_s']:.4f} GB/s of FP8 a CPU second, bytes {'equal' if peer['equal'] else 'DIFFER'} ({versions})"


def _watch(curve: list[float], stop: threading.Event) -> None:
    while not stop.wait(0.05):
        curve.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20)


def _thinned(curve: list[float], points: int = 60) -> list[float]:
    """The largest of each of so many stretches."""
    size = max(1, -(-len(curve) // points))
    return [round(max(curve[i : i + size]), 1) for i in range(0, len(curve), size)]


def _peak_rss() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _without_curve(run: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run.items() if name != "memory_curve_mib"}


if __name__ == "__main__":
    sys.exit(main())
