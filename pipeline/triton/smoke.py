"""Smoke: the contract checks against a server, then latency and throughput of concurrent streams, as smoke.json."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

from pipeline.config.schema import Config, ServeConfig
from pipeline.core.errors import ConfigError, StageError
from pipeline.core.jsonio import write_json
from pipeline.triton.check import check_repository
from pipeline.triton.checks import CHECKS, Probe, Skipped
from pipeline.triton.client import Client
from pipeline.triton.http import Endpoint, TritonError
from pipeline.triton.server import start

__all__ = ["entry", "running", "smoke", "smoke_command"]

Emit = Callable[[str], None]
USUAL_LENGTH = 2048
BEHIND = ("preprocessing", "tensorrt_llm", "postprocessing")
"""Models that others call, in TensorRT-LLM's repositories and in ours."""
MARKS = {True: "ok", False: "FAILED", None: "skipped"}


def smoke_command(config: Config, repository: Path | None, out: Path, emit: Emit, live: TextIO | None = sys.stdout) -> int:
    """Check the server at serve.url, or one of our own on `repository`; 0 if every check holds. `out`: a file or a folder."""
    with _endpoint(config.serve, repository) as endpoint:
        models = list(check_repository(repository)) if repository else _served(endpoint, config.serve)
        report = smoke(endpoint, entry(models), config, emit, live)
    path = out / "smoke.json" if out.is_dir() else out
    write_json(path, report)
    emit(f"{'passed' if report['passed'] else 'FAILED'}: {path}")
    return 0 if report["passed"] else StageError.exit_code


def smoke(endpoint: Endpoint, model: str, config: Config, emit: Emit, live: TextIO | None = None) -> dict[str, Any]:
    """The report. Performance is measured only if every check holds."""
    with Client(endpoint, model) as client:
        probe = Probe(
            client=client,
            serve=config.serve,
            room=room_of(client.config),
            exact=exact(config),
            live=live,
            called=tuple(sorted(calls(client.config))),
        )
        checks = _run_all(probe, emit)
        passed = all(check["passed"] is not False for check in checks)
        report: dict[str, Any] = {"model": model, "checks": checks, "passed": passed}
        if passed:
            report["performance"] = measure(probe)
            emit(summary(report["performance"]))
    return report


def exact(config: Config) -> bool:
    """Whether texts must be the same in every batch: sums in another order change none in float32, but a code of an FP8 cache."""
    torch = config.engine.torch if config.engine.kind == "torch" else None
    return torch is not None and (torch.dtype, torch.kv_dtype) == ("float32", "auto")


def entry(models: list[str]) -> str:
    """The model that clients talk to: the ensemble if there is one, else BLS, else the only one that is not behind another."""
    for name in ("ensemble", "tensorrt_llm_bls"):
        if name in models:
            return name
    outer = [name for name in models if name not in BEHIND] or models
    if len(outer) > 1:
        raise ConfigError(f"The repository holds {', '.join(models)}: set serve.model_name to one of them.")
    return outer[0]


def room_of(config: dict[str, Any]) -> int:
    """Tokens that fit after a short prompt: half of what the model says a sequence holds, or of what every R1 does."""
    said = config.get("parameters", {}).get("max_seq_len", {}).get("string_value", "")
    return (int(said) if said.isdigit() else USUAL_LENGTH) // 2


def calls(config: dict[str, Any]) -> set[str]:
    """Models that a model calls: the steps of an ensemble, and the engine of TensorRT-LLM's BLS model or of our adapter."""
    steps = {step["model_name"] for step in config.get("ensemble_scheduling", {}).get("step", [])}
    engine = config.get("parameters", {}).get("tensorrt_llm_model_name", {}).get("string_value", "")
    return steps | ({engine} if engine else set())


@contextlib.contextmanager
def _endpoint(serve: ServeConfig, repository: Path | None) -> Iterator[Endpoint]:
    if not serve.url:
        assert repository is not None
        with start(serve, repository) as server:
            yield server.endpoint
        return
    yield _at(serve.url, serve)


def running(serve: ServeConfig) -> tuple[Endpoint, list[str]]:
    """The server at serve.url and its models that are ready, or the one that serve.model_name names."""
    endpoint = _at(serve.url or "", serve)
    return endpoint, _served(endpoint, serve)


def _at(url: str, serve: ServeConfig) -> Endpoint:
    host, _, port = url.removeprefix("http://").rstrip("/").rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"serve.url={url} must be HOST:PORT of Triton's HTTP service, such as 127.0.0.1:8000.")
    return Endpoint(host, int(port), serve.grpc_port, serve.metrics_port)


def _served(endpoint: Endpoint, serve: ServeConfig) -> list[str]:
    """The models of a running server, or the one that serve.model_name names."""
    try:
        ready = [name for name, state in endpoint.index().items() if state == "READY"]
    except (OSError, TritonError) as error:
        raise ConfigError(
            f"serve.url={serve.url} does not answer as a Triton server ({error}): start it, or leave serve.url out."
        ) from error
    if not ready or (serve.model_name and serve.model_name not in ready):
        wanted = serve.model_name or "one to probe"
        raise ConfigError(f"The server at {serve.url} has {', '.join(ready) or 'no model'} ready, not {wanted}.")
    return [serve.model_name] if serve.model_name else ready


def _run_all(probe: Probe, emit: Emit) -> list[dict[str, Any]]:
    """Every check, or those up to `generate` if that fails: without text the others have nothing to say."""
    checks = []
    for check in CHECKS:
        checks.append(_run(check, probe, emit))
        if check.__name__ == "generate" and checks[-1]["passed"] is False:
            emit("  the model gives no text, so the remaining checks were left out")
            break
    return checks


def _run(check: Callable[[Probe], str], probe: Probe, emit: Emit) -> dict[str, Any]:
    begin, passed = time.perf_counter(), True
    try:
        detail = check(probe)
    except Skipped as reason:
        passed, detail = None, str(reason)
    except Exception as error:
        passed, detail = False, str(error) or type(error).__name__
    emit(f"  {MARKS[passed]:8} {check.__name__:17} {detail}")
    return {
        "name": check.__name__,
        "passed": passed,
        "detail": detail,
        "seconds": round(time.perf_counter() - begin, 3),
    }


def measure(probe: Probe) -> dict[str, Any]:
    """Time to first token, time per output token and tokens a second of serve.smoke_requests streams at once."""
    options = probe.greedy | ({"ignore_eos": True} if probe.has("ignore_eos") else {})
    options |= {"count_tokens": True} if probe.has("count_tokens") else {}

    def one(_: int) -> tuple[list[float], int]:
        with probe.client.stream(probe.serve.smoke_prompt, **options) as stream:
            times = [chunk.seconds for chunk in stream if chunk.text]
        return times, stream.tokens or len(times)

    requests = probe.serve.smoke_requests
    begin = time.perf_counter()
    with ThreadPoolExecutor(requests) as pool:
        streams = list(pool.map(one, range(requests)))
    seconds, tokens = time.perf_counter() - begin, sum(count for _, count in streams)
    return {
        "requests": requests,
        "tokens": tokens,
        "seconds": round(seconds, 4),
        "tokens_per_second": round(tokens / seconds, 2),
        "ttft_ms": _spread([times[0] for times, _ in streams if times]),
        "tpot_ms": _spread([(times[-1] - times[0]) / (count - 1) for times, count in streams if times and count > 1]),
    }


def summary(performance: dict[str, Any]) -> str:
    """One line for the terminal."""
    ttft, tpot = performance["ttft_ms"], performance["tpot_ms"]
    return (
        f"  {performance['requests']} streams at once: {performance['tokens_per_second']:.1f} tokens/s, "
        f"first token {ttft['median']:.0f} ms (p99 {ttft['p99']:.0f}), "
        f"each further {tpot['median']:.1f} ms (p99 {tpot['p99']:.1f})"
    )


def _spread(seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile (the largest, below 100 values), in milliseconds."""
    ordered = sorted(seconds) or [0.0]
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"median": round(statistics.median(ordered) * 1e3, 3), "p99": round(p99 * 1e3, 3)}
