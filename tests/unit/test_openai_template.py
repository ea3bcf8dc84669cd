"""The chat template as transformers renders it, and what of it a request can reach."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pipeline.core.errors import ConfigError
from pipeline.openai.errors import ApiError
from pipeline.openai.template import ChatTemplate
from pipeline.openai.tokens import TokenCounter

TINY = Path(__file__).parents[2] / "pipeline" / "data" / "tiny_r1"
R1_STYLE = """\
{%- if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(system='', turns=0, first=true) %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {%- set ns.system = ns.system + ('' if ns.first else '\\n\\n') + message['content'] %}{% set ns.first = false %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}{{ ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.turns = ns.turns + 1 %}{{ '<｜User｜>' + message['content'] }}
    {%- endif %}
    {%- if message['role'] == 'assistant' and message['content'] is not none %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '<｜Assistant｜>' + content + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{{ '<think>\\n' if thinking | default(true) else '</think>' }}{% endif %}"""
"""The constructs of DeepSeek's templates: namespace, joined system prompts, thoughts of earlier turns dropped."""
EXTRAS = """\
{% for message in messages %}
  {% if message.role == 'system' %}
    {% continue %}
  {% endif %}
  {% generation %}
    {% set inner = message.content %}{{ inner | tojson }}|{{ {'b': 1, 'a': 'é<'} | tojson(indent=1, sort_keys=true) }}
  {% endgeneration %}
  {{ inner | default('gone') }}{{ strftime_now('%Y') }}{{ loop.index0 }}{{ tools is none }}{{ dict(a=1) }}
  {% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}"""
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi \n<b>你好🙂</b>"},
    {"role": "assistant", "content": "<think>\nlong\n</think>\n\nHello"},
    {"role": "system", "content": "Rather: be long."},
    {"role": "user", "content": "  And 'now'?\n\n"},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(TINY)


def ours(template: str | None = None) -> ChatTemplate:
    if template is None:
        found = ChatTemplate.load(TINY)
        assert found
        return found
    return ChatTemplate(template, {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"})


@pytest.mark.parametrize("source", [None, R1_STYLE, EXTRAS], ids=["tiny_r1's own", "R1's constructs", "every extra"])
@pytest.mark.parametrize("count", range(1, len(CHAT) + 1))
def test_the_prompt_is_transformers_s(tokenizer: PreTrainedTokenizerFast, source: str | None, count: int) -> None:
    expected = tokenizer.apply_chat_template(CHAT[:count], chat_template=source, tokenize=False, add_generation_prompt=True)
    assert ours(source).render(CHAT[:count]) == expected


@pytest.mark.parametrize("thinking", [True, False])
def test_variables_of_the_template_reach_it(tokenizer: PreTrainedTokenizerFast, thinking: bool) -> None:
    options = {"tokenize": False, "add_generation_prompt": True, "thinking": thinking}
    theirs = tokenizer.apply_chat_template(CHAT, chat_template=R1_STYLE, **options)
    assert ours(R1_STYLE).render(CHAT, thinking=thinking) == theirs
    assert theirs.endswith("<think>\n" if thinking else "</think>")


def test_the_prompt_has_as_many_tokens_as_transformers_gives_it(tokenizer: PreTrainedTokenizerFast) -> None:
    counter, prompt = TokenCounter(TINY), ours().render(CHAT)
    ids = tokenizer.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert counter.prompt(counter.without_bos(prompt)) == len(ids)
    assert not counter.without_bos(prompt).startswith("<｜begin")
    assert counter.output("It is") == len(tokenizer("It is", add_special_tokens=False).input_ids)


@pytest.mark.parametrize(("source", "says"), [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ messages.append(1) }}", "'append' of .* unsafe"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{% set ns = namespace(_x=1) %}", "_x"),
    ("{{ messages[0].nothing.more }}", "no attribute 'nothing'"),
    ("{{ 1 / 0 }}", "division by zero"),
    ("{{ missing + 'x' }}", "'missing' is undefined"),
])  # fmt: skip
def test_what_a_template_refuses_or_may_not_is_a_bad_request(source: str, says: str) -> None:
    with pytest.raises(ApiError, match=says) as caught:
        ours(source).render(CHAT)
    assert caught.value.status == 400


def write(folder: Path, **config: Any) -> Path:
    shutil.copyfile(TINY / "tokenizer.json", folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_where_the_template_stands(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "{{ bos_token }}D"}]
    bos = {"__type": "AddedToken", "content": "<s>"}
    found = ChatTemplate.load(write(tmp_path, chat_template=named, bos_token=bos))
    assert found and found.render(CHAT) == "<s>D"
    (tmp_path / "chat_template.jinja").write_text("J")
    found = ChatTemplate.load(tmp_path)
    assert found and found.render(CHAT) == "J"
    (tmp_path / "chat_template.jinja").unlink()
    assert ChatTemplate.load(write(tmp_path, bos_token="<s>")) is None
    with pytest.raises(ConfigError, match=r"not valid jinja: .* in line 2"):
        ChatTemplate.load(write(tmp_path, chat_template="a\n{% if %}"))


def test_a_bos_is_only_taken_away_where_the_tokenizer_adds_one(tmp_path: Path) -> None:
    bos = "<｜begin▁of▁sentence｜>"
    spec = json.loads((TINY / "tokenizer.json").read_text()) | {"post_processor": None}
    for adds, left in ((True, "hi"), (False, bos + "hi"), (None, bos + "hi")):
        write(tmp_path, bos_token=bos, **({} if adds is None else {"add_bos_token": adds}))
        (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
        counter = TokenCounter(tmp_path)
        assert counter.without_bos(bos + "hi") == left
        assert counter.prompt(left) == 1 + counter.output("hi")
    with pytest.raises(ConfigError, match=r"There is no tokenizer.json in"):
        TokenCounter(tmp_path / "nowhere")
