"""Helpers of the gateway's tests: its configuration, a tokenizer whose template makes the chat its own prompt, health."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai

from pipeline.config.schema import Config
from tests._utils import serving

MAX_QUEUE, ROOM = 3, 512
BOS = "<｜begin▁of▁sentence｜>"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ '\\n' }}"


def config(**serve: Any) -> Config:
    """Free ports, also for the gateway."""
    return serving.serve_config(max_queue=MAX_QUEUE, openai_port=0, **serve)


def write_tokenizer(folder: Path) -> Path:
    """The byte tokenizer and that template."""
    folder.mkdir(parents=True, exist_ok=True)
    serving.write_byte_tokenizer(folder / "tokenizer.json")
    settings = {"bos_token": BOS, "add_bos_token": True, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def healthy(client: openai.OpenAI) -> bool:
    """What /health says."""
    root = client.with_options(base_url=str(client.base_url).removesuffix("v1/"))
    try:
        root.get("/health", cast_to=object)
    except openai.InternalServerError:
        return False
    return True
