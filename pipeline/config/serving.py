"""Configuration of the server: how tritonserver is started and probed."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from pipeline.core.errors import ConfigError
from pipeline.core.limits import MOST_TOKENS, limited

__all__ = ["LAYOUTS", "ServeConfig"]

LAYOUTS = ("auto", "torch", "llmapi", "bls", "vllm")


@dataclass(slots=True, kw_only=True)
class ServeConfig:
    """How tritonserver is started and probed."""

    name: str = MISSING
    triton: str | None = limited(None, plain=True, hint="25.12 is a release")
    """Release of Triton that will serve; null: the newest whose container holds the engine's version."""
    layout: str = limited("auto", one_of=LAYOUTS)
    """The model of the repository: llmapi (TensorRT-LLM's own names), bls (the names of its ensemble and BLS models, for old
    clients and Triton's OpenAI frontend), vllm, torch; auto: llmapi, vllm or torch, by the engine."""
    model_name: str | None = limited(None, plain=True)
    """Name of the model in Triton; null: the name of the model config."""
    registry: str = limited("nvcr.io/nvidia", empty=False, hint="nvcr.io/nvidia is NVIDIA's")
    """Where the launchers take the container of that release from."""
    container: str | None = limited(None, empty=False, hint="name an image with its tag")
    """Image that the launchers start instead; refused where its tag says that it holds another version of the engine."""
    claim: str | None = limited(None, plain=True)
    """Kubernetes: PersistentVolumeClaim that holds the package; null: the model's name and `-package`."""
    rdma: str | None = limited(None, empty=False, hint="rdma/NAME, as the cluster's device plugin calls it")
    """Kubernetes: resource that gives a pod its RDMA cards, where servers span nodes; null: none, traffic goes over TCP."""
    host: str = limited("127.0.0.1", empty=False, hint="127.0.0.1 is this machine alone, 0.0.0.0 every network of it")
    http_port: int = limited(8000, least=0, most=65535)
    grpc_port: int = limited(8001, least=0, most=65535)
    metrics_port: int = limited(8002, least=0, most=65535)
    """Ports; 0 takes a free one."""
    server: str | None = None
    """Path of tritonserver; null: the one on PATH, else the one in the nvidia-pytriton wheel."""
    url: str | None = None
    """HTTP host:port of a server that already runs (gRPC on grpc_port of that host): `smoke` probes it, `serve` starts the
    OpenAI gateway in front of it."""
    openai_port: int | None = limited(None, least=0, most=65535)
    """Port of OpenAI's API beside the server; 0 takes a free one, null leaves it out."""
    openai_workers: int = limited(1, least=1, most=256)
    """Processes of it that share the port: one carries some 5,000 tokens/s."""
    openai_api_key_env: str | None = limited(None, plain=True)
    """Environment variable that holds the key which clients must send; null: nobody is asked."""
    tokenizer: str | None = limited(None, empty=False)
    """Folder of the tokenizer and chat template for OpenAI's API; null: the packaged model's, else the checkpoint's."""
    max_model_len: int | None = limited(None, least=1, most=MOST_TOKENS)
    """Tokens of prompt and output for OpenAI's API; null: what the model's configuration in Triton says."""
    ready_timeout: float = limited(120.0, above=0)
    """Seconds to wait for readiness before the server is stopped and its log quoted."""
    max_queue: int = limited(256, least=0, most=2**20)
    """Requests that may wait before new ones are refused."""
    smoke_prompt: str = limited("The Python language", empty=False)
    smoke_tokens: int = limited(48, least=1, most=2**20)
    smoke_requests: int = limited(8, least=1, most=1024)
    """Concurrent requests of the smoke run."""

    def __post_init__(self) -> None:
        """Ports of one machine differ (with `url` the server's may be another's)."""
        taken: dict[int, str] = {}
        for name in ("http_port", "grpc_port", "metrics_port", "openai_port") if self.url is None else ():
            port = getattr(self, name)
            if port and port in taken:
                raise ConfigError(f"serve.{taken[port]} and serve.{name} are both {port}: give each its own, or 0 for a free one.")
            taken[port] = name
