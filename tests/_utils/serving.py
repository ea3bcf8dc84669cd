"""Helpers of the serving tests: the model's modules, a byte tokenizer, and a repository of the test double."""

from __future__ import annotations

import json
import random
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pipeline.config.engines import VllmEngineConfig
from pipeline.config.schema import Config, EngineConfig, ModelConfig, ServeConfig, TorchEngineConfig
from pipeline.core.stage import StageContext
from pipeline.engines.vllm.arguments import render as arguments_of_vllm
from pipeline.stages import package

MODEL_CODE = Path(__file__).resolve().parents[2] / "triton_repo" / "torch" / "1"
FAKE_RUNTIME = Path(__file__).with_name("fake_runtime.py")
FAKE_TENSORRT_LLM = Path(__file__).with_name("fake_tensorrt_llm.py")
FAKE_VLLM_BACKEND = Path(__file__).with_name("fake_vllm_backend.py")
if str(MODEL_CODE) not in sys.path:
    sys.path.append(str(MODEL_CODE))

INFO: dict[str, Any] = {
    "vocab_size": 258, "max_batch_size": 4, "max_seq_len": 256, "page_size": 8, "num_pages": 97, "prefill_chunk": 16,
    "expanded_from": 64, "eos_token_ids": [4], "bos_token_id": 256, "dtype": "float32", "kv_dtype": "float32", "device": "cpu",
}  # fmt: skip


@dataclass
class Quiet:
    """A `Progress` that keeps its notes."""

    notes: list[str] = field(default_factory=list)

    def start(self, total: int, unit: str) -> None: ...

    def advance(self, amount: int = 1) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)


def wait(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Until it is true, for so many seconds, of which a pause of the machine counts as one at most: what would come true by
    itself later must take longer."""
    waited, last = 0.0, time.monotonic()
    while not condition():
        assert waited < seconds, "it did not come true in time"
        time.sleep(0.01)
        waited, last = waited + min(time.monotonic() - last, 1.0), time.monotonic()


def spread_over(stream: Callable[[], Iterable[Any]], seconds: float) -> bool:
    """Whether the chunks of a stream come over more than so long; once in ten, as a busy machine may read the first one late."""

    def spread() -> float:
        times = [chunk.seconds for chunk in stream()]
        return times[-1] - times[0]

    return any(spread() > seconds for _ in range(10))


def processes_of(words: str) -> list[str]:
    """Command lines with these words, of processes that live."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes().decode(errors="replace"))
    return [line for line in found if words in line]


def free_ports(count: int) -> list[int]:
    """Ports below those that the kernel gives to others who ask for any."""
    return list(islice(filter(_is_free, random.SystemRandom().sample(range(20_000, 32_000), 100)), count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def write_byte_tokenizer(path: Path) -> None:
    """One token a byte (id = byte), 256 = BOS, 257 = <think>, which is added but not special."""
    from text import _byte_chars

    tokenizer = Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(_byte_chars())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<｜begin▁of▁sentence｜>")])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.save(str(path))


def write_fake_engine(folder: Path, **info: Any) -> Path:
    """An engine folder of the test double."""
    folder.mkdir(parents=True)
    (folder / "engine.json").write_text(json.dumps(INFO | info))
    write_byte_tokenizer(folder / "tokenizer.json")
    return folder


def serve_config(**serve: Any) -> Config:
    """A config of the torch engine with free ports."""
    settings = {"name": "test", "http_port": 0, "grpc_port": 0, "metrics_port": 0, "ready_timeout": 120.0} | serve
    return Config(
        engine=EngineConfig(kind="torch", torch=TorchEngineConfig(max_seq_len=INFO["max_seq_len"])),
        model=ModelConfig(name="fake_r1"),
        serve=ServeConfig(**settings),
    )


def write_fake_bundle(folder: Path, **arguments: Any) -> Path:
    """What the engine stage of TensorRT-LLM leaves, as far as a layout reads it, over a checkpoint without weights."""
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "checkpoint" / "config.json").write_text("{}")
    settings = {"tensor_parallel_size": 2, "enable_attention_dp": False, "max_batch_size": 4, "max_seq_len": 512} | arguments
    (folder / "llm_args.yaml").write_text(json.dumps(settings))
    return folder


def write_fake_vllm_bundle(folder: Path, **arguments: Any) -> Path:
    """What the engine stage of vLLM leaves, as far as a layout reads it: real arguments over a checkpoint without weights."""
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "checkpoint" / "config.json").write_text("{}")
    deploy = {
        "tp": 2, "pp": 1, "ep": 2, "attention_dp": False, "max_seq_len": 512, "max_batch_size": 4, "max_num_tokens": 8192,
        "gpu_memory_utilization": 0.9, "kv_cache_dtype": "fp8", "tokens_per_block": 64, "mtp": 1,
    }  # fmt: skip
    args = arguments_of_vllm(deploy, VllmEngineConfig(), "modelopt_fp4") | arguments
    (folder / "engine_args.json").write_text(json.dumps(args))
    return folder


def with_vllm_backend(command: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """`server._command` that puts the double of the vLLM backend beside the python backend."""

    def wrapped(installation: Any, endpoint: Any, work: Path, prefix: str) -> list[str]:
        words = command(installation, endpoint, work, prefix)
        library = work / "backends" / "python" / "libtriton_python.so"
        real = library.resolve()
        library.unlink()
        shutil.copyfile(real, library)  # Guard: a backend written in Python may not lead out of the folder
        (work / "backends" / "vllm").mkdir()
        shutil.copyfile(FAKE_VLLM_BACKEND, work / "backends" / "vllm" / "model.py")
        return words

    return wrapped


def add_tensorrt_llm(version: Path) -> None:
    """Put the double of tensorrt_llm where the model in this version folder finds it."""
    (version / "tensorrt_llm").mkdir()
    shutil.copyfile(FAKE_TENSORRT_LLM, version / "tensorrt_llm" / "__init__.py")
    (version / "tensorrt_llm" / "llmapi.py").write_text("from tensorrt_llm import GuidedDecodingParams\n")


def package_engine(engine: Path, out: Path, config: Config, runtime: Path | None = None) -> Path:
    """Run the package stage; `runtime` replaces the repository's runtime.py."""
    out.mkdir(parents=True)
    package.run(StageContext(config=config, inputs={"engine": engine}, checkpoint=engine, out=out, progress=Quiet()))
    if runtime:
        [version] = (out / "repository").glob("*/1")
        (version / "runtime.py").unlink(missing_ok=True)
        shutil.copyfile(runtime, version / "runtime.py")
    return out / "repository"
