"""Formats against nvidia-modelopt itself, to the bit: its quantisers, and a checkpoint that it exported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.checkpoint import Checkpoint
from pipeline.formats import get_format
from pipeline.formats.numerics import BF16
from scripts.make_foreign_checkpoints import write_source
from tests._utils.modelopt_worker import GIVEN, LARGEST
from tests.unit.test_formats import KINDS, amax, quantized, weight

ROOT = Path(__file__).parents[2]
FOREIGN = ROOT / "tests" / "data" / "foreign"
NAMES = ("nvfp4", *LARGEST, "mxfp8", "mxfp4")
APART = {
    "mxfp8": ("subnormal",), "mxfp4": ("subnormal", "zero"), **dict.fromkeys(("nvfp4", *LARGEST), ("zero",)),
}  # fmt: skip
"""Where ModelOpt is not to be matched: ceil(log2()) of a subnormal is inexact, that of 0 is -inf, NVFP4's scales of zeros NaN."""


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What ModelOpt makes of every kind of weight; one process."""
    if importlib.util.find_spec("modelopt") is None:
        pytest.skip("nvidia-modelopt is not installed: pip install nvidia-modelopt requests")
    work = tmp_path_factory.mktemp("modelopt")
    given = {f"weight/{kind}": weight(kind).astype(np.float32) for kind in KINDS}
    given |= {f"scale/{name}/{kind}": quantized(name, weight(kind))["weight_scale"] for name in GIVEN for kind in KINDS}
    np.savez(work / "in.npz", **given)
    command = [sys.executable, "-m", "tests._utils.modelopt_worker", str(work / "in.npz"), str(work / "out.npz")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    with np.load(work / "out.npz") as found:
        return dict(found)


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in NAMES for kind in KINDS if kind not in APART[name]])
def test_codes_and_scales(theirs: dict[str, np.ndarray], name: str, kind: str) -> None:
    stored = quantized(name, weight(kind))
    scales = stored["weight_scale"].view(np.uint8)
    np.testing.assert_array_equal(scales.reshape(-1), theirs[f"{name}/{kind}/scales"].reshape(-1))
    np.testing.assert_array_equal(stored["weight"].view(np.uint8), theirs[f"{name}/{kind}/codes"])
    if name == "nvfp4":
        assert stored["weight_scale_2"] == theirs[f"{name}/{kind}/scale_2"]


@pytest.mark.parametrize("name", GIVEN)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_by_given_scales(theirs: dict[str, np.ndarray], name: str, kind: str) -> None:
    stored = quantized(name, weight(kind))
    np.testing.assert_array_equal(stored["weight"].view(np.uint8), theirs[f"{name}/{kind}/codes"])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(write_source(tmp_path_factory.mktemp("source")))


class TestExported:
    """tests/data/foreign/modelopt_*: written by export_hf_checkpoint, no ModelOpt needed to read them."""

    def test_nvfp4_is_ours_to_the_bit(self, source: Checkpoint) -> None:
        exported = Checkpoint.open(FOREIGN / "modelopt_nvfp4").entries
        quantised = [entry for entry in exported.values() if entry.quantised]
        assert len(quantised) == 28 and {entry.format.name for entry in quantised} == {"nvfp4"}
        for entry in quantised:
            plain, stored = source.entries[entry.name].dequantized().astype(BF16), entry.stored()
            pair = [entry.name, *([f"{entry.place.partner}.weight"] if entry.place.partner else [])]
            top = max(amax(source.entries[name].dequantized()) for name in pair)
            mine = get_format("nvfp4").quantize(plain, amax=top, input_scale=float(stored["input_scale"]))
            assert {k: v.tobytes() for k, v in mine.items()} == {k: v.tobytes() for k, v in stored.items()}, entry.name

    def test_2d_blocks_of_rank_4_are_read(self, source: Checkpoint) -> None:
        exported = Checkpoint.open(FOREIGN / "modelopt_fp8_pb_wo").entries
        blocks = [entry for entry in exported.values() if entry.format.name == "fp8_block"]
        assert len(blocks) == 11 and all(len(entry.tensors["weight_scale"].shape) == 4 for entry in blocks)
        for entry in exported.values():
            wanted, got = source.entries[entry.name].dequantized(), entry.dequantized()
            error = float(np.square(got - wanted).sum() / np.square(wanted).sum())
            assert error < 10**-3.1 if entry.quantised else error == 0, entry.name
