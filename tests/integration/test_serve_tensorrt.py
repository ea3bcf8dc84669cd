"""Native TensorRT engines of two ranks behind the real tritonserver: a process a rank, MTP drafts, against the reference model.

STAND-IN for GPUs: each process interprets its rank's networks (`tests/_utils/interpreted_runner.py`) and they meet through gloo.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("tensorrt_rtx_bindings", reason="it defines the networks: pip install 'r1-pipeline[rtx]'")
torch = pytest.importorskip("torch", reason="the reference is in torch")

from tokenizers import Tokenizer  # noqa: E402

from pipeline.checkpoint import dequantized  # noqa: E402
from pipeline.config.load import load  # noqa: E402
from pipeline.core.errors import MissingToolError  # noqa: E402
from pipeline.core.jsonio import write_json  # noqa: E402
from pipeline.engines.companions import copy_companions  # noqa: E402
from pipeline.models.deepseek_v3 import build  # noqa: E402
from pipeline.triton import server  # noqa: E402
from pipeline.triton.client import Client, TritonError  # noqa: E402
from tests._utils import serving  # noqa: E402
from tests._utils.interpreted_runner import write_runner  # noqa: E402
from tests.unit.test_tensorrt_runtime import ARCH, TINY_R1, WORDS, engine_json  # noqa: E402

try:
    server.find_server(serving.serve_config().serve)
except MissingToolError as missing:
    pytest.skip(str(missing), allow_module_level=True)

PROMPTS = ("The Python language", "What does len() do?", "A list")
TOKENS = 6


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.Server]:
    folder = tmp_path_factory.mktemp("ranks")
    words = ("parallel.tp=2", "engine.tensorrt.mtp=true")
    (folder / "engine").mkdir()
    write_json(folder / "engine" / "engine.json", engine_json(*words) | {"bos_token_id": ARCH.bos_token_id})
    copy_companions(TINY_R1, folder / "engine")
    repository = serving.package_engine(folder / "engine", folder / "package", load([*WORDS, *words]))
    write_runner(repository / "tiny_r1" / "1", TINY_R1)
    with server.start(serving.serve_config(ready_timeout=300.0).serve, repository) as started:
        yield started


@pytest.fixture(scope="module")
def client(running: server.Server) -> Iterator[Client]:
    with Client(running.endpoint, "tiny_r1", timeout=300) as client:
        yield client


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """What the reference says to each prompt, one whole forward pass a token."""
    torch.set_num_threads(1)
    reference = build(ARCH, {name: torch.from_numpy(array) for name, array in dequantized(TINY_R1)})
    tokenizer, texts = Tokenizer.from_file(str(TINY_R1 / "tokenizer.json")), []
    for prompt in PROMPTS:
        ids = [ARCH.bos_token_id, *tokenizer.encode(prompt, add_special_tokens=False).ids]
        length = len(ids)
        with torch.inference_mode():
            while len(ids) < length + TOKENS:
                ids.append(int(reference(torch.tensor([ids]))[0, -1].argmax()))
        texts.append(tokenizer.decode(ids[length:], skip_special_tokens=True).rstrip("\ufffd"))
    return texts


def test_two_ranks_say_what_the_reference_says(client: Client, running: server.Server, expected: list[str]) -> None:
    """All prompts at once, so that both ranks have rows of their own."""
    options = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(lambda prompt: client.generate(prompt, **options), PROMPTS)) == expected
    assert "".join(chunk.text for chunk in client.stream(PROMPTS[0], **options)) == expected[0]
    metrics = running.endpoint.metrics("tiny_r1")
    assert metrics["llm_generated_tokens"] == 4 * TOKENS
    assert 0 < metrics["llm_draft_tokens_accepted"] < metrics["llm_draft_tokens"]


def test_a_rank_that_dies_is_told_and_its_requests_end(client: Client, running: server.Server) -> None:
    """The last test of this server."""
    [rank] = [pid for pid in children(running.process.pid) if b"/ranks.py\0" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(TritonError, match=r"the engine failed .RuntimeError: rank 1: its process ended with code -9"):
        client.generate("again", max_tokens=4)


def children(pid: int) -> Iterator[int]:
    """Of a process, and theirs."""
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended meanwhile
            for child in map(int, listed.read_text().split()):
                yield child
                yield from children(child)
