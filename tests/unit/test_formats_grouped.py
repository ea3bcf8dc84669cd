"""Formats with scales a row or a group, and the search for NVFP4's scales, against references that share no code."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.core.errors import ConfigError
from pipeline.formats import get_format
from pipeline.formats.numerics import BF16, decode_e8m0, encode_e8m0
from pipeline.formats.nvfp4_search import SEARCHES
from tests.unit.test_formats import E2M1, KINDS, amax, as_torch, codes_of, quantized, weight

torch = pytest.importorskip("torch", reason="the reference casts are torch's")

POWERS = 2.0 ** np.arange(-127, 128)
SHAPE = (192, 256)


def least_power(tops: np.ndarray, largest: float) -> np.ndarray:
    """Index into POWERS of the least one with top / power <= largest, by comparing with all of them."""
    ratio = (tops.astype(np.float32) / np.float32(largest)).astype(np.float64)
    return np.searchsorted(POWERS, ratio, side="left").clip(0, 254)


def blocks_of(array: np.ndarray, group: int) -> np.ndarray:
    return array.astype(np.float32).reshape(array.shape[0], -1, group)


def nearest(values: np.ndarray) -> np.ndarray:
    """Magnitudes in E2M1, ties to even, in float64 by distance."""
    levels = np.array([0.0, 1.0, 2.0, 4.0, 0.5, 1.5, 3.0, 6.0])  # even codes first, so that argmin takes them at a tie
    return levels[np.abs(np.abs(values)[..., None] - levels).argmin(-1)]


def sqnr(array: np.ndarray, back: np.ndarray) -> float:
    wanted = array.astype(np.float64)
    return float(10 * np.log10(np.square(wanted).sum() / np.square(back - wanted).sum()))


class TestE8m0:
    def test_codes_decode_as_in_torch(self) -> None:
        codes = np.arange(256, dtype=np.uint8)
        wanted = torch.from_numpy(codes).view(torch.float8_e8m0fnu).float().numpy()
        np.testing.assert_array_equal(decode_e8m0(codes), wanted)

    def test_rounds_up_to_a_power_of_two(self) -> None:
        rng = np.random.default_rng(1)
        powers = POWERS[1:-1].astype(np.float32)
        samples = np.concatenate([powers, np.nextafter(powers, np.float32(np.inf)), rng.uniform(0, 9, 999), [0, 1e-45]])
        samples = samples.astype(np.float32)
        np.testing.assert_array_equal(encode_e8m0(samples), np.searchsorted(POWERS, samples.astype(np.float64)))


class TestGroups:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shape", [SHAPE, (5, 37)])
    def test_fp8_channel_is_torchs_row_by_row(self, kind: str, shape: tuple[int, int]) -> None:
        array = weight(kind, SHAPE if kind == "tiles" else shape)
        stored, dense = quantized("fp8_channel", array), as_torch(array)
        scale = dense.abs().amax(1) / 448
        scale[scale == 0] = 1
        np.testing.assert_array_equal(stored["weight_scale"], scale.numpy())
        wanted = codes_of((dense / scale[:, None]).clamp(-448, 448))
        np.testing.assert_array_equal(stored["weight"].view(np.uint8), wanted)

    @pytest.mark.parametrize("kind", KINDS)
    def test_mxfp8_is_the_definition_written_plainly(self, kind: str) -> None:
        array = weight(kind)
        stored, blocks = quantized("mxfp8", array), blocks_of(array, 32)
        index = least_power(np.abs(blocks).max(-1), 448)
        np.testing.assert_array_equal(stored["weight_scale"], index)
        scaled = (blocks.astype(np.float64) / POWERS[index][..., None]).astype(np.float32).reshape(array.shape)
        np.testing.assert_array_equal(stored["weight"].view(np.uint8), codes_of(torch.from_numpy(scaled)))
        back = get_format("mxfp8").dequantize(stored)
        exact = torch.from_numpy(stored["weight"].view(np.uint8)).view(torch.float8_e4m3fn).double().numpy()
        np.testing.assert_array_equal(back, exact * np.repeat(POWERS[index], 32, axis=1))

    @pytest.mark.parametrize(("top", "byte"), [(448, 127), (449, 128), (224, 126), (896, 128), (0, 0)])
    def test_mxfp8_scales_at_the_edges(self, top: float, byte: int) -> None:
        array = np.zeros((2, 32), np.float32)
        array[1, 5] = -top
        assert quantized("mxfp8", array)["weight_scale"].tolist() == [[0], [byte]]

    @pytest.mark.parametrize("kind", KINDS)
    def test_mxfp4_takes_the_smaller_of_two_equally_near(self, kind: str) -> None:
        array = weight(kind)
        stored, blocks = quantized("mxfp4", array), blocks_of(array, 32)
        index = least_power(np.abs(blocks).max(-1), 6)
        np.testing.assert_array_equal(stored["weight_scale"], index)
        scaled = blocks.astype(np.float64) / POWERS[index][..., None]
        code = np.abs(np.abs(scaled)[..., None] - np.array(E2M1)).argmin(-1) + 8 * (scaled <= 0)
        code = code.reshape(array.shape)
        np.testing.assert_array_equal(stored["weight"], code[:, 0::2] + 16 * code[:, 1::2])

    @pytest.mark.parametrize("name", ["int4_awq", "w4a8_awq"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_int4_is_packed_along_the_rows(self, name: str, kind: str) -> None:
        array = weight(kind)
        stored, groups = quantized(name, array), as_torch(array).reshape(192, 2, 128)
        scale = groups.abs().amax(-1) / 7
        scale[scale == 0] = 1
        np.testing.assert_array_equal(stored["weight_scale"], scale.numpy())
        code = (groups / scale[..., None]).round().clamp(-8, 7).to(torch.int32).reshape(192, 256).numpy()
        for row, col in [(0, 0), (1, 0), (0, 1), (7, 200), (190, 255), (191, 255)]:
            nibble = stored["weight"][row // 2, col] >> (4 * (row % 2)) & 15
            assert (int(nibble) ^ 8) - 8 == code[row, col]
        assert (stored["pre_quant_scale"] == 1).all() and stored["pre_quant_scale"].dtype == BF16
        back = get_format(name).dequantize(stored)
        np.testing.assert_array_equal(back, code.astype(np.float32) * np.repeat(scale.numpy(), 128, axis=1))

    def test_int4_applies_what_awq_found(self) -> None:
        stored = quantized("int4_awq", weight("normal"))
        plain = get_format("int4_awq").dequantize(stored)
        factors = np.where(np.arange(256) % 2, 2.0, 0.5).astype(BF16)
        scaled = get_format("int4_awq").dequantize(stored | {"pre_quant_scale": factors})
        np.testing.assert_array_equal(scaled, plain * factors.astype(np.float32))

    def test_w4a8_awq_lets_the_largest_weight_reach_448(self) -> None:
        array = weight("normal")
        stored = get_format("w4a8_awq").quantize(array, amax=2 * amax(array), input_scale=0.5)
        assert stored["weight_scale_2"] == np.float32(2 * amax(array)) / np.float32(448) and stored["input_scale"] == 0.5
        assert quantized("w4a8_awq", weight("zero"))["weight_scale_2"] == 1

    @pytest.mark.parametrize(("name", "group", "divisor"), [("w4a16_nvfp4", 16, 2688), ("w4a8_nvfp4_fp8", 32, 448)])
    @pytest.mark.parametrize("kind", KINDS)
    def test_relatives_of_nvfp4(self, name: str, group: int, divisor: int, kind: str) -> None:
        array = weight(kind)
        stored, blocks = quantized(name, array), as_torch(array).reshape(192, -1, group)
        scale_2 = blocks.abs().max() / divisor if blocks.any() else torch.tensor(1.0)
        wanted = blocks.abs().amax(-1) / (6 * scale_2)
        wanted = torch.where(wanted == 0, 1.0, wanted).clamp(2**-9, 448).to(torch.float8_e4m3fn)
        assert stored["weight_scale_2"] == scale_2.numpy() and ("input_scale" in stored) == (name == "w4a8_nvfp4_fp8")
        np.testing.assert_array_equal(stored["weight_scale"].view(np.uint8), wanted.view(torch.uint8).numpy())
        step = wanted.float() * scale_2
        size = nearest((blocks / step[..., None]).double().numpy())
        back = np.abs(get_format(name).dequantize(stored))
        np.testing.assert_array_equal(back, (size.astype(np.float32) * step[..., None].numpy()).reshape(array.shape))
        if name == "w4a8_nvfp4_fp8":
            assert (6 * wanted.float() <= 448).all(), "kernels turn e2m1 * weight_scale into FP8"

    @pytest.mark.parametrize(
        ("name", "shape", "fault"),
        [
            ("mxfp8", (4, 48), "multiple of 32"), ("mxfp4", (4, 16), "multiple of 32"),
            ("int4_awq", (4, 64), "multiple of 128"), ("w4a8_awq", (5, 128), "has 5 rows"),
            ("w4a8_nvfp4_fp8", (4, 48), "multiple of 32"), ("w4a16_nvfp4", (4, 24), "multiple of 16"),
            ("fp8_channel", (16,), "needs a matrix"),
        ],
    )  # fmt: skip
    def test_shapes_that_do_not_fit_are_refused(self, name: str, shape: tuple[int, ...], fault: str) -> None:
        with pytest.raises(ConfigError, match=f"model.x.weight .*{fault}.*keep this module class in another format"):
            get_format(name).outputs("model.x", shape)

    @pytest.mark.parametrize(
        ("name", "low", "high"),
        [("fp8_channel", 31, 32.5), ("mxfp8", 31, 32), ("mxfp4", 18, 19), ("int4_awq", 18, 19), ("w4a8_awq", 18, 19),
         ("w4a16_nvfp4", 20, 21), ("w4a8_nvfp4_fp8", 19.5, 20.5)],
    )  # fmt: skip
    def test_sqnr_of_normal_weights(self, name: str, low: float, high: float) -> None:
        array = weight("normal", (256, 1024))
        assert low < sqnr(array, get_format(name).dequantize(quantized(name, array))) < high


def searched(search: str, array: np.ndarray, name: str = "nvfp4") -> dict[str, np.ndarray]:
    return replace(get_format(name), search=search).quantize(array, amax=amax(array), input_scale=1.0)


def errors_by_code(array: np.ndarray, scale_2: float) -> np.ndarray:
    """[blocks, 127]: squared error of each block under each E4M3 code, in float64."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
    blocks, errors = blocks_of(array, 16).reshape(-1, 16).astype(np.float64), []
    for value in values[1:]:
        step = np.float64(np.float32(value) * np.float32(scale_2))
        errors.append(np.square(np.abs(blocks) - nearest(blocks / step) * step).sum(-1))
    return np.stack([np.full(len(blocks), np.inf), *errors], axis=1)


class TestScaleSearch:
    @pytest.mark.parametrize(("search", "reach"), [("mse", 4), ("mse_full", 126)])
    @pytest.mark.parametrize("kind", ["normal", "heavy", "grid", "wide"])
    def test_no_candidate_is_better(self, search: str, reach: int, kind: str) -> None:
        array = weight(kind, (16, 256))
        stored, start = searched(search, array), quantized("nvfp4", array)["weight_scale"].view(np.uint8).reshape(-1)
        errors = errors_by_code(array, float(stored["weight_scale_2"]))
        near = np.abs(np.arange(127)[None] - start[:, None].astype(int)) <= reach
        best = np.where(near, errors, np.inf).min(-1)
        codes = stored["weight_scale"].view(np.uint8).reshape(-1)
        chosen = errors[np.arange(len(codes)), codes]
        np.testing.assert_allclose(chosen, best, rtol=1e-4, atol=1e-4 * best.max() * 1e-6)
        assert (near[np.arange(len(codes)), codes]).all() and (codes != start).mean() > 0.2

    def test_four_over_six_takes_the_better_of_two(self) -> None:
        array = weight("normal", (64, 256))
        stored = searched("four_over_six", array)
        assert stored["weight_scale_2"] == np.float32(amax(array)) / np.float32(1536)
        tops = torch.from_numpy(np.abs(blocks_of(array, 16)).max(-1).reshape(-1))
        unit = torch.tensor(amax(array)) / 6
        both = [(tops * m / 6 * 256 / unit).clamp(2**-9, 448).to(torch.float8_e4m3fn) for m in (1.0, 1.5)]
        six, four = (codes.view(torch.uint8).numpy() for codes in both)
        errors, rows = errors_by_code(array, float(stored["weight_scale_2"])), np.arange(len(six))
        wanted = np.where(errors[rows, four] < errors[rows, six], four, six)
        np.testing.assert_array_equal(stored["weight_scale"].view(np.uint8).reshape(-1), wanted)
        assert 0.35 < (wanted == four).mean() < 0.55

    @pytest.mark.parametrize(("search", "gain"), [("four_over_six", 0.76), ("mse", 1.12), ("mse_full", 1.36)])
    def test_gain_on_normal_weights(self, search: str, gain: float) -> None:
        array = weight("normal", (256, 1024))
        plain, better = (get_format("nvfp4").dequantize(searched(s, array)) for s in ("amax", search))
        assert sqnr(array, better) - sqnr(array, plain) == pytest.approx(gain, abs=0.1)

    @pytest.mark.parametrize("search", SEARCHES[1:])
    @pytest.mark.parametrize("name", ["nvfp4", "w4a8_nvfp4_fp8"])
    @pytest.mark.parametrize("kind", ["tiles", "subnormal", "zero", "extremes"])
    def test_awkward_weights_stay_finite_and_keep_the_layout(self, search: str, name: str, kind: str) -> None:
        array = weight(kind)
        stored, plain = searched(search, array, name), quantized(name, array)
        assert {s: (t.dtype, t.shape) for s, t in stored.items()} == {s: (t.dtype, t.shape) for s, t in plain.items()}
        assert all(np.isfinite(t.astype(np.float32)).all() for t in stored.values())
        top = get_format(name).largest / 6
        assert (stored["weight_scale"].astype(np.float32) <= top).all()
        group = get_format(name).group_size
        zeros = ~blocks_of(array, group).any(-1)
        assert (stored["weight_scale"].view(np.uint8)[zeros] == 0x38).all()
        assert not np.isnan(get_format(name).dequantize(stored)).any()
