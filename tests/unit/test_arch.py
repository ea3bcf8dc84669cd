"""Whatever stands in a config.json: a model's shape, or a sentence that names the field, the value and the limit."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import ConfigError
from pipeline.core.limits import limited, mistakes
from pipeline.models.arch import HF_FIELDS, Arch, read_hf_config
from tests._utils.random_checkpoint import ARCH


@dataclass(kw_only=True)
class Inner:
    sizes: list[int] = limited(default_factory=list, least=1)
    shares: dict[str, float] = limited(default_factory=dict, most=1, keys=("a", "b"))


@dataclass(kw_only=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    name: str | None = limited(None, empty=False, hint="call it something")


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("n_group", 0, r"n_group=0 is too small: it must be at least 1"),
        ("num_hidden_layers", -3, r"num_hidden_layers=-3 is too small"),
        ("num_hidden_layers", 10**9, r"num_hidden_layers=1000000000 is too large: it must be at most 1,024"),
        ("num_hidden_layers", None, r"num_hidden_layers=null is nothing, but must be a whole number"),
        ("num_nextn_predict_layers", 10**30, r"num_nextn_predict_layers=10+ is too large"),
        ("hidden_size", "x", r"hidden_size='x' is text, but must be a whole number"),
        ("hidden_size", [1], r"hidden_size=\[1\] is a list"),
        ("vocab_size", True, r"vocab_size=True is true or false"),
        ("vocab_size", 12.0, r"vocab_size=12\.0 is a number, but must be a whole number"),
        ("norm_topk_prob", 1, r"norm_topk_prob=1 is a whole number, but must be true or false"),
        ("rope_theta", "x", r"rope_theta='x' is text"),
        ("rope_theta", float("nan"), r"rope_theta=nan is not a finite number"),
        ("rope_scaling", [1], r"rope_scaling is \[1\], but must be a table or null"),
        ("rope_scaling", {"type": "yarn"}, r"rope_scaling\.factor is None, but must be a number above 0"),
        ("rope_scaling", {"type": ["x"]}, r"rope_scaling is of type \['x'\]"),
        ("rope_parameters", 3, r"rope_parameters is 3, but must be a table or null"),
        ("eos_token_id", ["a"], r"eos_token_id\[0\]='a' is text"),
        ("model_type", ["x"], r"model_type is \['x'\]"),
    ],
)
def test_what_cannot_be_is_named(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Arch.from_hf(ARCH | {name: value})


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        Arch.from_hf(ARCH | {"n_group": 0, "hidden_size": "x", "vocab_size": -1})
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("text", ["[1]", "null", '"x"', "3", "{", "", "\ufeff{}"])
def test_a_file_that_is_no_config_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json .*fetch it again"):
        read_hf_config(tmp_path)


def test_every_field_of_the_shipped_models_is_known() -> None:
    assert Arch.from_hf(json.loads(json.dumps(ARCH))).vocab_size == ARCH["vocab_size"]
    assert {"hidden_size", "scoring_func", "rope_scaling"} <= set(HF_FIELDS)


def test_limits_reach_into_lists_tables_and_records() -> None:
    good = Outer(inner=Inner(sizes=[1, 2], shares={"a": 1}), name="x")
    bad = Outer(inner=Inner(sizes=[1, 0], shares={"a": 2.0, "c": 1.0, "b": float("inf")}), name=" ")
    assert list(mistakes(good)) == []
    assert list(mistakes(bad)) == [
        "inner.sizes[1]=0 is too small: it must be at least 1.",
        "inner.shares.a=2.0 is too large: it must be at most 1.",
        "There is no key inner.shares.c: known are a, b.",
        "inner.shares.b=inf is not a finite number: give one.",
        "name is empty: call it something.",
    ]
