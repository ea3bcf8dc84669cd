"""Compiled kernels against the numpy reference, byte for byte, at every level that this processor runs."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pipeline import native
from pipeline.config.schema import VerifyConfig
from pipeline.core.errors import ConfigError
from pipeline.formats import Format, get_format
from pipeline.formats.fast import NotFiniteError, amax, errors, requantize, sees_nan
from pipeline.formats.numerics import BF16, E4M3
from pipeline.formats.nvfp4 import Nvfp4
from pipeline.formats.nvfp4_search import SEARCHES
from pipeline.formats.row_errors import row_errors
from pipeline.verify.foreign import verify_folder
from tests._utils import random_checkpoint
from tests._utils.run_stage import Notes, convert, recipe, verify

COMPILER = any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name)
LEVELS = native.levels()
PLAIN = ("bf16", "fp8", "fp8_channel", "mxfp8", "mxfp4", "int4_awq", "w4a8_awq")
CONVERTED = ("bf16", "fp8", "fp8_channel", "fp8_block", "mxfp8", "nvfp4", "mxfp4", "int4_awq")
BLOCK_KINDS = ("normal", "t", "grid", "subnormal", "zero_tile", "tiny_scales", "wild_scales")
SHAPES = ((128, 256), (64, 160), (200, 272), (130, 384), (6, 32))
FLOAT_KINDS = (BF16, np.dtype(np.float16), np.dtype(np.float32))

needs_kernels = pytest.mark.skipif(not LEVELS and not COMPILER, reason="there is no C++ compiler, so no kernels were built")


def fp8_block(kind: str, shape: tuple[int, int], seed: int = 0) -> dict[str, np.ndarray]:
    """An FP8-block source; the last block of a dimension may be partial."""
    rng = np.random.default_rng([seed, *shape, BLOCK_KINDS.index(kind)])
    if kind in ("normal", "t"):
        drawn = rng.standard_normal(shape) if kind == "normal" else rng.standard_t(3, shape)
        return get_format("fp8_block").quantize((drawn * 0.02).astype(np.float32), amax=0, input_scale=1)
    codes = rng.integers(0, 256, shape, np.uint8)  # has -0 and +-448
    codes[codes & 0x7F == 0x7F] = 0x7E
    spread = {"wild_scales": 20, "tiny_scales": 3}.get(kind, 1)
    scales = np.exp(spread * rng.standard_normal((-(-shape[0] // 128), -(-shape[1] // 128)))) * 1e-3
    if kind == "subnormal":
        codes &= 0x8F
    if kind == "zero_tile":
        codes[:, : shape[1] // 2] &= 0x80
    if kind == "tiny_scales":
        scales *= 1e-36
    return {"weight": codes.view(E4M3), "weight_scale_inv": np.clip(scales, 1e-44, 1e30).astype(np.float32)}


def floats(dtype: np.dtype, shape: tuple[int, int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(shape)
    weight = (rng.standard_t(4, shape) * 0.02).astype(np.float32)
    weight[0, :16], weight[1, 3], weight[2] = 0, -0.0, 0
    return {"weight": weight.astype(dtype)}


def targets(shape: tuple[int, int]) -> list[Format]:
    searched = [replace(get_format(name), search=search) for name in ("nvfp4", "w4a8_nvfp4_fp8") for search in SEARCHES]
    fits = [get_format(name) for name in PLAIN] + searched
    return [item for item in fits if shape[1] % (item.group_size or 1) == 0]


def label(item: Format) -> str:
    return f"{item.name} {getattr(item, 'search', '')}"


def assert_same(wanted: dict[str, np.ndarray], got: dict[str, np.ndarray], what: str) -> None:
    assert wanted.keys() == got.keys(), what
    for suffix, array in wanted.items():
        assert (array.dtype, array.shape) == (got[suffix].dtype, got[suffix].shape), f"{what}: {suffix}"
        assert array.tobytes() == got[suffix].tobytes(), f"{what}: {suffix} differs"


def compare(monkeypatch: pytest.MonkeyPatch, source: Format, stored: dict[str, np.ndarray], target: Format, exact: bool) -> None:
    """The reference's result and amax against those of every level; amax also too small and too large for the weight."""
    monkeypatch.setenv(native.VARIABLE, "off")
    top = amax(source, stored, exact=exact)
    for factor in (1, 0.5, 3):
        options = {"amax": top * factor, "input_scale": 0.5, "exact": exact}
        monkeypatch.setenv(native.VARIABLE, "off")
        wanted = requantize(source, stored, target, **options)
        for level in LEVELS:
            monkeypatch.setenv(native.VARIABLE, level)
            assert amax(source, stored, exact=exact) == top
            assert_same(wanted, requantize(source, stored, target, **options), f"{label(target)} at {level}, amax x {factor}")
        if not isinstance(target, Nvfp4):
            break


def test_kernels_are_built_where_a_compiler_is() -> None:
    assert native.problem() is None or not COMPILER, f"native kernels: {native.problem()}"
    assert not LEVELS or (LEVELS[-1] == "scalar" and native.available())


@needs_kernels
@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8_blocks_give_the_bytes_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, kind: str, shape: tuple[int, int]
) -> None:
    source, stored = get_format("fp8_block"), fp8_block(kind, shape)
    for target in targets(shape):
        for exact in (False, True) if isinstance(target, Nvfp4) else (False,):
            compare(monkeypatch, source, stored, target, exact)


@needs_kernels
@pytest.mark.parametrize("dtype", FLOAT_KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plain_weights_give_the_bytes_of_the_reference(
    monkeypatch: pytest.MonkeyPatch, dtype: np.dtype, shape: tuple[int, int]
) -> None:
    for target in targets(shape):
        compare(monkeypatch, get_format("bf16"), floats(dtype, shape), target, exact=False)


@needs_kernels
@pytest.mark.parametrize("name", ["fp8", "fp8_channel", "mxfp8", "nvfp4", "mxfp4", "int4_awq"])
def test_every_format_is_a_source(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    stored = get_format(name).quantize(floats(BF16, (130, 384))["weight"], amax=0.3, input_scale=1)
    for target in targets((130, 384)):
        if getattr(target, "search", "amax") == "amax":
            compare(monkeypatch, get_format(name), stored, target, exact=False)


@needs_kernels
@pytest.mark.parametrize("level", LEVELS)
def test_the_kernels_really_run(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    """Otherwise the comparisons above would hold the reference to itself."""
    monkeypatch.setenv(native.VARIABLE, level)
    kernels = native.kernels()
    assert kernels is not None and kernels.name == level

    def fail(self: Format, tensors: object) -> None:
        raise AssertionError(f"{self.name} was dequantised in numpy")

    for item in (get_format("fp8_block"), get_format("bf16")):
        monkeypatch.setattr(type(item), "dequantize", fail)
    for target in targets((128, 256)):
        requantize(get_format("fp8_block"), fp8_block("t", (128, 256)), target, amax=1.0, input_scale=1.0)
        requantize(get_format("bf16"), floats(BF16, (128, 256)), target, amax=1.0, input_scale=1.0)


@needs_kernels
@pytest.mark.parametrize("level", LEVELS)
def test_strips_threads_and_given_buffers_change_nothing(monkeypatch: pytest.MonkeyPatch, level: str) -> None:
    monkeypatch.setenv(native.VARIABLE, level)
    source, stored = get_format("fp8_block"), fp8_block("t", (576, 416))
    scales = stored["weight_scale_inv"]

    def strip(start: int, out: dict[str, np.ndarray], target: Format) -> None:
        rows = slice(start, min(start + 128, 576))
        part = {"weight": stored["weight"][rows], "weight_scale_inv": scales[start // 128 : start // 128 + 1]}
        where = {suffix: array[rows] for suffix, array in out.items() if array.ndim}
        made = requantize(source, part, target, amax=0.4, input_scale=1.0, out=where)
        assert all(made[suffix] is array for suffix, array in where.items())

    for target in targets((576, 416)):
        if target.packing[0] == 1:
            whole = requantize(source, stored, target, amax=0.4, input_scale=1.0)
            out = {suffix: np.zeros_like(array) if array.ndim else array for suffix, array in whole.items()}
            with ThreadPoolExecutor(3) as pool:
                list(pool.map(lambda start, out=out, target=target: strip(start, out, target), range(0, 576, 128)))
            assert_same(whole, out, label(target))


@needs_kernels
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("poison", ["nan codes", "nan scale", "infinite scale", "negative scale", "no groups"])
def test_what_other_checks_refuse_does_no_harm(monkeypatch: pytest.MonkeyPatch, level: str, poison: str) -> None:
    """NaN and infinity are refused here or before they are converted; they must end in NaN at the worst, never in a crash."""
    monkeypatch.setenv(native.VARIABLE, level)
    source, stored = get_format("fp8_block"), fp8_block("grid", (130, 256))
    if poison == "nan codes":
        stored["weight"].view(np.uint8)[3, 5] = 0xFF
    if poison == "no groups":
        stored = fp8_block("grid", (130, 200))
        with pytest.raises(ValueError):
            requantize(source, stored, get_format("nvfp4"), amax=1.0, input_scale=1.0)
        return
    bad = {"nan scale": np.nan, "infinite scale": np.inf, "negative scale": -1}.get(poison, 1)
    stored["weight_scale_inv"][0, 0] *= np.float32(bad)
    harmless = poison == "negative scale"
    with np.errstate(all="ignore"):
        assert np.isfinite(amax(source, stored)) == harmless
        for target in targets((130, 256)):
            refused = sees_nan(source, target) and not harmless
            with pytest.raises(NotFiniteError) if refused else nullcontext():
                requantize(source, stored, target, amax=1.0, input_scale=1.0)


@needs_kernels
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_a_quick_amax_is_the_amax(monkeypatch: pytest.MonkeyPatch, level: str, kind: str) -> None:
    monkeypatch.setenv(native.VARIABLE, level)
    source = get_format("fp8_block")
    for seed, shape in enumerate([(576, 416), (1, 1), (130, 384), (640, 640), (128, 1024)]):
        stored = fp8_block(kind, shape, seed)
        if seed % 2:  # the largest scale's block may then not hold the largest magnitude
            stored["weight"].view(np.uint8)[:128, :128] &= 0x8F
        for exact in (False, True):
            assert amax(source, stored, exact=exact, quick=True) == amax(source, stored, exact=exact)


@needs_kernels
@pytest.mark.parametrize("level", ["off", *LEVELS])
@pytest.mark.parametrize("place", [(0, 0), (129, 255), (300, 17)])
def test_nan_is_refused_in_blocks_that_a_quick_amax_passes_over(
    monkeypatch: pytest.MonkeyPatch, level: str, place: tuple[int, int]
) -> None:
    monkeypatch.setenv(native.VARIABLE, level)
    source, stored = get_format("fp8_block"), fp8_block("normal", (384, 512))
    stored["weight_scale_inv"][2, 3] *= 100
    stored["weight"].view(np.uint8)[place] = 0x7F
    if level != "off":
        assert np.isfinite(amax(source, stored, quick=True))
    for target in filter(partial(sees_nan, source), targets((384, 512))):
        with pytest.raises(NotFiniteError):
            requantize(source, stored, target, amax=1.0, input_scale=1.0)


@needs_kernels
@pytest.mark.parametrize(
    ("name", "shape"),
    [*((name, (130, 384)) for name in CONVERTED), *((name, (64, 160)) for name in CONVERTED if name != "int4_awq")],
)
def test_errors_are_those_of_the_reference_to_the_last_bit(
    monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, int]
) -> None:
    target = get_format(name)
    for source, stored in ((get_format("fp8_block"), fp8_block("t", shape)), (get_format("bf16"), floats(BF16, shape))):
        weight = source.dequantize(stored)
        made = target.quantize(weight.astype(BF16), amax=0.1, input_scale=1.0)
        wanted = row_errors(weight, target.dequantize(made), 0.05)
        error = target.dequantize(made).astype(np.float64) - weight
        assert wanted.totals()[1] == pytest.approx(np.square(error).sum(), rel=1e-12)
        assert wanted.totals()[2:] == (np.abs(error).max(), (np.abs(weight) > 0.05).sum())
        for level in LEVELS:
            monkeypatch.setenv(native.VARIABLE, level)
            got = errors(source, stored, target, made, 0.05)
            for field in ("signal", "noise", "max_abs", "clipped"):
                assert getattr(got, field).tobytes() == getattr(wanted, field).tobytes(), f"{field} at {level}"


@needs_kernels
def test_a_nan_in_the_result_shows_in_the_errors() -> None:
    source, stored = get_format("fp8_block"), fp8_block("t", (128, 256))
    made = requantize(source, stored, get_format("nvfp4"), amax=1.0, input_scale=1.0)
    made["weight_scale"].view(np.uint8)[5, 3] = 0x7F
    found = errors(source, stored, get_format("nvfp4"), made, 1.0)
    assert np.flatnonzero(np.isnan(found.noise)).tolist() == [5] == np.flatnonzero(np.isnan(found.max_abs)).tolist()
    assert np.isnan(found.totals()[1])


@needs_kernels
def test_wrong_buffers_are_refused() -> None:
    source, stored = get_format("bf16"), floats(BF16, (16, 32))
    options = {"amax": 1.0, "input_scale": 1.0}
    for weight in (np.empty((16, 15), np.uint8), np.empty((16, 16), np.int8), np.empty((16, 32), np.uint8)[:, ::2]):
        with pytest.raises(ValueError, match="weight"):
            requantize(source, stored, get_format("nvfp4"), out={"weight": weight}, **options)
    with pytest.raises(ValueError, match="weight_scale has 3 elements, not 4"):
        native.module().Tensor("fp8_block", 256, 256, np.empty((256, 256), np.uint8), np.empty(3, np.float32))


@needs_kernels
def test_a_level_can_be_forced_or_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, "off")
    assert not native.available()
    monkeypatch.setenv(native.VARIABLE, "mmx")
    with pytest.raises(ConfigError, match=r"R1_NATIVE=mmx: this processor runs .*scalar; choose one of them, or off"):
        native.kernels()


@pytest.mark.parametrize("why", ["not built: install it again", "built from other sources than those beside it: build"])
def test_missing_or_stale_kernels_are_said_once_by_each_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    source = random_checkpoint.write(tmp_path / "source", {"num_hidden_layers": 1, "n_routed_experts": 4, "n_group": 2})
    (source / "heldout.txt").unlink()
    monkeypatch.setattr(native, "problem", lambda: why)
    told = {name: Notes() for name in ("convert", "again", "verify", "verify DIR")}
    converted = convert(source, tmp_path / "c", recipe("nvfp4"), told["convert"])
    convert(source, tmp_path / "c", recipe("nvfp4"), told["again"])
    verify(source, converted, tmp_path / "v", told["verify"])
    verify_folder(converted, source, VerifyConfig(), told["verify DIR"])
    told["quick"] = Notes()
    monkeypatch.setattr(native, "problem", lambda: None)
    verify(source, converted, tmp_path / "q", told["quick"])
    wanted = f"numpy gives the same bytes as the compiled kernels, about 65 times slower; they are {why}."
    counts = {name: progress.notes.count(wanted) for name, progress in told.items()}
    assert counts == {"convert": 1, "again": 0, "verify": 1, "verify DIR": 1, "quick": 0}
