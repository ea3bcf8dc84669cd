"""`python -m pipeline.openai`: the gateway in front of a Triton server that runs, or will.

    python -m pipeline.openai --grpc HOST:PORT --model NAME --tokenizer DIR [--port 9000] [--api-key-env NAME]

It prints its URL once it listens, answers /health with 503 until the model is ready, and stops on SIGINT or SIGTERM.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pipeline.core.errors import PipelineError
from pipeline.openai.companion import api_key
from pipeline.openai.process import run
from pipeline.openai.service import Settings


def main(words: list[str] | None = None) -> int:
    """Serve until stopped; the exit code."""
    given = _parser().parse_args(words)
    try:
        settings = Settings(
            grpc=given.grpc,
            model=given.model,
            tokenizer=given.tokenizer,
            served_name=given.served_name,
            metrics_url=given.metrics_url,
            api_key=api_key(given.api_key_env),
            max_model_len=given.max_model_len,
            timeout=given.timeout,
            grace=given.grace,
            workers=max(1, given.workers),
        )
        run(settings, given.host, given.port, lambda line: print(line, flush=True))
    except PipelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pipeline.openai", description="OpenAI's API in front of a Triton server.")
    parser.add_argument("--grpc", required=True, metavar="HOST:PORT", help="Triton's gRPC service")
    parser.add_argument("--model", required=True, help="the model's name in Triton")
    parser.add_argument("--tokenizer", required=True, type=Path, metavar="DIR", help="the model's tokenizer and chat template")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine alone)")
    parser.add_argument("--port", default=9000, type=_port, help="port to listen on; 0: a free one (9000)")
    parser.add_argument("--served-name", default="", metavar="NAME", help="what clients call the model; else --model")
    parser.add_argument("--metrics-url", default="", metavar="URL", help="Triton's metrics page, passed through at /metrics")
    parser.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the key which clients must send")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="tokens of prompt and output; else what Triton says")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="seconds that a generation may take (3600)")
    parser.add_argument("--grace", type=float, default=5.0, metavar="S", help="seconds for running answers at the end (5)")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes that share the port (1)")
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port: give 0 to 65535")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
