#!/usr/bin/env python3
"""Every plugin's GPU tests under NVIDIA's compute-sanitizer: accesses out of bounds, races in shared memory, wrong barriers.

    python scripts/sanitize_plugins.py [--only NAME ...] [--tools TOOL ...] [--together] [--jobs N] [--limit S] [--logs FOLDER]

Needs a GPU and compute-sanitizer, which the CUDA toolkit has. For each plugin and tool a process runs those tests of
tests/unit/test_plugins_NAME.py that need a GPU and capture no CUDA graph (the shared expert's second stream is not seen so); every
tensor is an allocation of its own, so that a byte beyond it is seen. Only kernels of `plugins/` are watched, but by `initcheck`,
which must see who writes. Exits with 1 unless all is clean. On an H200 (tools 2025.3 of CUDA 13.0, 2026-12-01, --jobs 12) all took
90 seconds, at commit 635f777, mla_prefill again at c3b0714.

    memcheck     every plugin: 0 errors
    synccheck    every plugin: 0 errors, in what it can follow (UNFOLLOWED)
    racecheck    fused_qkv_a, kv_quantize, nvfp4_convert, quantize and trt: no hazard; of mla_decode it can follow the joining
                 kernels alone, of mla_prefill and topk_router none (UNFOLLOWED); it breaks on all of mla_absorb,
                 moe_grouped_gemm and router_gemm (BREAKING)
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "plugins").glob("*/*.cu"))
PLUGINS = (*sorted({source.parent.name for source in SOURCES}), "trt")
TOOLS = "memcheck", "racecheck", "synccheck", "initcheck"
KERNEL = re.compile(r"^extern \"C\" __global__ .*\n?(\w+)\(", re.MULTILINE)
SUMMARY = re.compile(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", re.MULTILINE)
TESTED = re.compile(r"^\d+ (?:passed|failed).* in [\d.]+s.*$", re.MULTILINE)
SELECTION = "not (captured or replay or other_libraries or flash_mla)"
ONE_LANE = "what a warp read, or cleared, is ordered by one lane's mbarrier.arrive after __syncwarp"
UNFOLLOWED = {
    "racecheck": {
        "mla_decode": "two warpgroups take turns by bar.arrive and bar.sync, and one lane's mbarrier.arrive",
        "mla_decode_fp8": ONE_LANE + "; rows' totals too, by bar.sync of three warpgroups, but queries' scales not",
        "mla_prefill": ONE_LANE,
        "moe_product": ONE_LANE,
        "topk_router": "tied lanes write one place, which is noticed and written again",
    },
    "synccheck": dict.fromkeys(("mla_decode", "mla_decode_fp8"), "warpgroups meet at one barrier from two places of the program"),
}
"""Kernels that a tool reports, and for what. Small right kernels of these forms (but topk_router's) were reported there, too."""
BREAKING = {"racecheck": "router_gemm or test_product or qkv_a-1 or qkv_a-2 or absorb or moe"}
"""Tests in which a tool itself ends ("failed to handle a hardware exception", 2025.3), on kernels that memcheck finds clean."""
FOUND, NO_TESTS = 86, 5
"""Exit statuses: compute-sanitizer found something; pytest had nothing to run."""


class Verdict(NamedTuple):
    """Of a process."""

    clean: bool
    text: str


def main() -> int:
    """Run them all, print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PLUGINS, default=PLUGINS, help="these plugins")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS[:3], help="all but initcheck unless said")
    parser.add_argument("--together", action="store_true", help="a process a tool for all plugins: torch is loaded once")
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time")
    parser.add_argument("--limit", type=int, default=900, help="seconds a process may take")
    parser.add_argument("--logs", type=Path, help="keep what each process prints in this folder")
    options = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        sys.exit("compute-sanitizer is not on the PATH: install the CUDA toolkit, or the wheel nvidia-cuda-sanitizer-api.")
    if options.logs:
        options.logs.mkdir(parents=True, exist_ok=True)
    groups = [options.only] if options.together else [[plugin] for plugin in options.only]
    pairs = [(plugins, tool) for tool in options.tools for plugins in groups]
    with ThreadPoolExecutor(options.jobs) as pool:
        verdicts = list(pool.map(lambda pair: checked(*pair, options.limit, options.logs), pairs))
    unclean = sum(not verdict.clean for verdict in verdicts)
    print(f"{unclean} of {len(verdicts)} are not clean" if unclean else f"all {len(verdicts)} are clean")
    return int(unclean > 0)


def checked(plugins: Sequence[str], tool: str, limit: int, logs: Path | None) -> Verdict:
    """Some plugins under one tool, in a process."""
    selection = f"{SELECTION} and not ({BREAKING[tool]})" if tool in BREAKING else SELECTION
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "tests._utils.only_gpu", "-p", "no:cacheprovider", "-k", selection]
    files = [f"tests/unit/test_plugins_{plugin}.py" for plugin in plugins]
    command = ["compute-sanitizer", *watched(tool), "--error-exitcode", str(FOUND), *pytest, *files]
    code, printed = run(command, limit)
    if logs:
        (logs / f"{'_'.join(plugins)}_{tool}.log").write_text(printed, encoding="utf-8")
    lines = [match[0].removeprefix("========= ") for pattern in (SUMMARY, TESTED) for match in pattern.finditer(printed)]
    if code == NO_TESTS:
        verdict = Verdict(True, f"nothing that {tool} can run")
    else:
        verdict = Verdict(code == 0 and len(lines) > 1, "; ".join(lines) or f"no summary, status {code}: {printed.strip()[-200:]}")
    print(f"{' '.join(plugins):18s} {tool:10s} {'clean' if verdict.clean else 'NOT CLEAN':10s} {verdict.text}", flush=True)
    return verdict


def watched(tool: str) -> list[str]:
    """The tool, and which kernels it looks at."""
    names = sorted({name for source in SOURCES for name in KERNEL.findall(source.read_text(encoding="utf-8"))})
    names = [name for name in names if name not in UNFOLLOWED.get(tool, ())]
    kernels = [] if tool == "initcheck" else [word for name in names for word in ("--kernel-name", f"kne={name}")]
    return ["--tool", tool, "--target-processes", "application-only", "--launch-timeout", "300", *kernels]


def run(command: list[str], limit: int) -> tuple[int, str]:
    """Exit status and output; all of the process's children end with it."""
    environment = {"OMP_NUM_THREADS": "2"} | os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else each takes every core
    merged = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **merged) as process:
        try:
            printed, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return -1, f"not done in {limit} s: {process.communicate()[0]}"
    return process.returncode, printed


if __name__ == "__main__":
    sys.exit(main())
