"""The real compiled engine behind the real tritonserver, against the torch reference on the same checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from pipeline.checkpoint import dequantized
from pipeline.core.errors import MissingToolError
from pipeline.models.arch import Arch
from pipeline.models.deepseek_v3 import DeepseekV3, build
from pipeline.triton import server
from pipeline.triton.client import Client
from tests._utils import serving
from tests.conftest import Workspace

try:
    server.find_server(serving.serve_config().serve)
except MissingToolError as missing:
    pytest.skip(str(missing), allow_module_level=True)

CHECKPOINT = Path(__file__).parents[2] / "pipeline" / "data" / "tiny_r1"
TEXT = (CHECKPOINT / "heldout.txt").read_text(encoding="utf-8")
PROMPTS = {
    "one step of prefill": "The Python language",
    "a chat": "<｜begin▁of▁sentence｜><｜User｜>What does len() do?<｜Assistant｜><think>\n",
    "two chunks of prefill": TEXT[:2000],
    "bytes without a token": "用中文 🙂 —",
}
TOKENS = 24


@pytest.fixture(scope="module")
def client(cpu_build: Workspace) -> Iterator[Client]:
    with (
        server.start(serving.serve_config().serve, cpu_build.latest("package") / "repository") as running,
        Client(running.endpoint, "tiny_r1", timeout=300) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """What the reference says to each prompt, one whole forward pass a token."""
    arch = Arch.from_dir(CHECKPOINT)
    reference = build(arch, {name: torch.from_numpy(array) for name, array in dequantized(CHECKPOINT)})
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    return {prompt: continuation(reference, tokenizer, arch.bos_token_id, prompt) for prompt in PROMPTS.values()}


@torch.inference_mode()
def continuation(reference: DeepseekV3, tokenizer: Tokenizer, bos: int, prompt: str) -> str:
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    ids = ids if ids[0] == bos else [bos, *ids]
    length = len(ids)
    for _ in range(TOKENS):
        ids.append(int(reference(torch.tensor([ids]))[0, -1].argmax()))
    return tokenizer.decode(ids[length:], skip_special_tokens=True).rstrip("\ufffd")


def options() -> dict[str, object]:
    return {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True}


@pytest.mark.parametrize("name", PROMPTS)
def test_served_text_is_the_reference_s(client: Client, expected: dict[str, str], name: str) -> None:
    prompt = PROMPTS[name]
    assert client.generate(prompt, **options()) == expected[prompt]
    assert "".join(chunk.text for chunk in client.stream(prompt, **options())) == expected[prompt]


def test_all_at_once_each_gets_the_reference_s_text(client: Client, expected: dict[str, str]) -> None:
    prompts = [*PROMPTS.values()] * 4
    with ThreadPoolExecutor(len(prompts)) as pool:
        texts = list(pool.map(lambda prompt: client.generate(prompt, **options()), prompts))
    assert texts == [expected[prompt] for prompt in prompts]


def test_the_long_prompt_takes_more_than_one_chunk(client: Client) -> None:
    body = client.body(PROMPTS["two chunks of prefill"], **options()) | {"return_num_input_tokens": True}
    assert 512 < client.endpoint.generate("tiny_r1", body)["num_input_tokens"] < 1000
