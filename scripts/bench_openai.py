"""What the OpenAI gateway costs: time to the first token and for each further one, through it and straight to Triton.

    python scripts/bench_openai.py [--quick] [--json FILE] [--streams 1 16] [--tokens 64] [--engine double|REPOSITORY]

One tritonserver, one gateway; the same prompt, streamed, by the same kind of client process: gRPC (tritonclient's protocol)
against HTTP (server-sent events, read from the socket). By default the engine is a double that paces itself (a token every
8 ms, 16 slots), so that what is added can be told from what a model's speed does; --engine REPOSITORY measures a packaged
model. Runs alternate; medians over runs. CPU seconds are those of the gateway's process alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1]))

from pipeline.core.jsonio import write_json
from pipeline.openai.backend import Backend
from pipeline.openai.companion import Companion, beside
from pipeline.triton import server
from scripts._options import result_file
from tests._utils import serving

STEP, SLOTS = 0.008, 16
PROMPT = "The Python language\n"
Stream = Callable[[], Awaitable[list[float]]]
"""One stream; the times of its pieces after it was asked for, in seconds."""


def main() -> None:
    """Measure and print."""
    given = _arguments()
    with tempfile.TemporaryDirectory(prefix="bench_openai_") as work, _served(Path(work), given.engine) as (running, gateway):
        rows = [asyncio.run(_measure(running, gateway, streams, given)) for streams in given.streams]
    report = {"engine": given.engine, "machine": _machine(), "rows": rows, "tokens": given.tokens}
    for line in _table(report):
        print(line)
    if given.json:
        write_json(given.json, report)


@contextmanager
def _served(work: Path, engine: str) -> Iterator[tuple[server.Server, Companion]]:
    config = serving.serve_config(openai_port=0, max_queue=64)
    repository = Path(engine)
    if engine == "double":
        folder = serving.write_fake_engine(work / "engine", step_seconds=STEP, max_batch_size=SLOTS, num_pages=SLOTS * 32 + 1)
        repository = serving.package_engine(folder, work / "package", config, serving.FAKE_RUNTIME)
    with (
        server.start(config.serve, repository) as running,
        beside(config.serve, running.endpoint, running.models, repository) as gateway,
    ):
        assert gateway
        yield running, gateway


async def _measure(running: server.Server, gateway: Companion, streams: int, given: argparse.Namespace) -> dict[str, Any]:
    """Both ways at this many streams at once, one after the other, `runs` times."""
    [model] = running.models
    backend = Backend(running.endpoint.grpc, model, 60)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(gateway.line.split()[-1] + "/", connector=connector) as session:
        ways = {
            "grpc": lambda: _direct(backend, given.tokens),
            "openai": lambda: _through(session, model, given.tokens),
        }
        found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        for run in range(given.runs + 1):
            for way, stream in ways.items():
                seen = await _together(stream, streams, gateway.process.pid)
                if run:  # the first one warms up
                    found[way].append(seen)
    await backend.close()
    row: dict[str, Any] = {"streams": streams, "runs": given.runs}
    for way, runs in found.items():
        row[way] = {name: round(statistics.median(run[name] for run in runs), 3) for name in runs[0]}
    row["added_ttft_ms"] = round(row["openai"]["ttft_ms"] - row["grpc"]["ttft_ms"], 3)
    row["added_tpot_ms"] = round(row["openai"]["tpot_ms"] - row["grpc"]["tpot_ms"], 3)
    return row


async def _together(stream: Stream, count: int, pid: int) -> dict[str, float]:
    before = _cpu_seconds(pid)
    all_times = await asyncio.gather(*(stream() for _ in range(count)))
    tokens = sum(len(times) for times in all_times)
    return {
        "ttft_ms": 1e3 * statistics.median(times[0] for times in all_times),
        "tpot_ms": 1e3 * statistics.median((times[-1] - times[0]) / (len(times) - 1) for times in all_times),
        "gateway_cpu_us_per_token": 1e6 * (_cpu_seconds(pid) - before) / tokens,
    }


async def _direct(backend: Backend, tokens: int) -> list[float]:
    begin = time.perf_counter()
    options = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    pieces = backend.generate(PROMPT, options, stream=True, request_id="")
    return [time.perf_counter() - begin async for piece in pieces if piece.text]


async def _through(session: aiohttp.ClientSession, model: str, tokens: int) -> list[float]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    begin, times = time.perf_counter(), []
    async with session.post("completions", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.content:
            if line.startswith(b"data: {") and b'"text":""' not in line:
                times.append(time.perf_counter() - begin)
    return times


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _machine() -> dict[str, Any]:
    versions = {name: metadata.version(name) for name in ("aiohttp", "grpcio", "tritonclient")}
    return {"cores": os.cpu_count(), "python": platform.python_version(), "load": round(os.getloadavg()[0], 2)} | versions


def _table(report: dict[str, Any]) -> Iterator[str]:
    yield f"engine {report['engine']}, {report['tokens']} tokens a stream, {report['machine']}"
    yield "streams   TTFT ms: gRPC  OpenAI   added   TPOT ms: gRPC  OpenAI   added   gateway CPU us/token"
    for row in report["rows"]:
        grpc, openai = row["grpc"], row["openai"]
        yield (
            f"{row['streams']:7}   {grpc['ttft_ms']:13.2f} {openai['ttft_ms']:7.2f} {row['added_ttft_ms']:7.2f}"
            f"   {grpc['tpot_ms']:13.3f} {openai['tpot_ms']:7.3f} {row['added_tpot_ms']:7.3f}"
            f"   {openai['gateway_cpu_us_per_token']:20.0f}"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer runs, under 50 s on two cores")
    parser.add_argument("--json", type=result_file, metavar="FILE")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--engine", default="double")
    given = parser.parse_args()
    given.runs = given.runs or (5 if given.quick else 15)
    return given


if __name__ == "__main__":
    main()
