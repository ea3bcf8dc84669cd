"""The gateway as the companion of a server: of one that `serve` has started, or of one that runs at serve.url."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.schema import ServeConfig
from pipeline.core.errors import ConfigError, StageError
from pipeline.core.process import die_with_parent
from pipeline.openai.process import run
from pipeline.openai.service import Settings
from pipeline.triton.http import Endpoint
from pipeline.triton.smoke import entry, running

__all__ = ["Companion", "api_key", "beside", "command", "gateway_command", "require", "tokenizer_folder"]

STOP_SECONDS = 10.0
"""After which a gateway that was told to stop is killed."""


def api_key(variable: str | None) -> str:
    """The key in this environment variable; empty if none is wanted."""
    if not variable:
        return ""
    if not (key := os.environ.get(variable, "").strip()):
        raise ConfigError(f"The environment variable {variable}, which should hold the API key, is not set or empty: export it.")
    return key


def require(serve: ServeConfig) -> None:
    """What the gateway beside a server needs, asked before hours of building for it; ConfigError where it is missing."""
    if serve.openai_port is None:
        return
    api_key(serve.openai_api_key_env)
    if serve.tokenizer and not (Path(serve.tokenizer) / "tokenizer.json").is_file():
        raise ConfigError(f"serve.tokenizer={serve.tokenizer} has no tokenizer.json: name the model's folder, or leave it out.")


def command(serve: ServeConfig, endpoint: Endpoint, model: str, tokenizer: Path) -> list[str]:
    """The command that starts the gateway beside a server; the key stays in the environment."""
    words = [sys.executable, "-m", "pipeline.openai", "--grpc", endpoint.grpc, "--model", model]
    words += ["--tokenizer", str(tokenizer), "--host", serve.host, "--port", str(serve.openai_port)]
    words += ["--metrics-url", endpoint.metrics_url]
    words += ["--api-key-env", serve.openai_api_key_env] if serve.openai_api_key_env else []
    words += ["--workers", str(serve.openai_workers)]
    return [*words, "--max-model-len", str(serve.max_model_len)] if serve.max_model_len else words


def gateway_command(serve: ServeConfig, source: Path | None, emit: Callable[[str], None]) -> int:
    """The gateway alone, in front of the server at serve.url; 0 after a clean stop. `source`: the checkpoint, if known."""
    endpoint, models = running(serve)
    folder = Path(serve.tokenizer) if serve.tokenizer else source
    if folder is None:
        raise ConfigError("The gateway needs the model's tokenizer: name its folder as serve.tokenizer=DIR.")
    settings = Settings(
        grpc=endpoint.grpc,
        model=entry(list(models)),
        tokenizer=folder,
        metrics_url=endpoint.metrics_url,
        api_key=api_key(serve.openai_api_key_env),
        max_model_len=serve.max_model_len,
        workers=serve.openai_workers,
    )
    run(settings, serve.host, serve.openai_port or 0, emit)
    return 0


def tokenizer_folder(repository: Path, model: str) -> Path:
    """Where a packaged model keeps its tokenizer."""
    found = sorted(repository.glob(f"{model}/**/tokenizer.json")) or sorted(repository.glob("*/**/tokenizer.json"))
    if not found:
        raise ConfigError(f"No model of {repository} has a tokenizer.json: name its folder as serve.tokenizer=DIR.")
    return found[0].parent


@dataclass(frozen=True, slots=True)
class Companion:
    """A gateway that runs beside its server."""

    process: subprocess.Popen[str]
    line: str
    """Its URL, for people."""

    def require_alive(self) -> None:
        """StageError once it has ended."""
        if (code := self.process.poll()) is not None:
            raise StageError(f"The OpenAI gateway ended by itself with code {code}; its words are above.")


@contextlib.contextmanager
def beside(serve: ServeConfig, endpoint: Endpoint, models: Iterable[str], repository: Path) -> Iterator[Companion | None]:
    """The gateway of serve.openai_port, in front of the server's entry model, while the block runs; None: not wanted."""
    if serve.openai_port is None:
        yield None
        return
    api_key(serve.openai_api_key_env)
    model = serve.model_name or entry(list(models))
    tokenizer = Path(serve.tokenizer) if serve.tokenizer else tokenizer_folder(repository, model)
    words = command(serve, endpoint, model, tokenizer)
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=die_with_parent
    )
    try:
        assert process.stdout
        if not (line := process.stdout.readline().rstrip()):
            raise StageError(f"The OpenAI gateway did not start (code {process.wait()}); its words are above.")
        yield Companion(process, line)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        process.kill()
        process.wait()
