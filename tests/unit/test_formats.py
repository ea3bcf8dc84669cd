"""Formats against references that share no code with them: torch's casts and bit tables."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.core.errors import ConfigError
from pipeline.formats import FORMATS, get_format
from pipeline.formats.numerics import BF16, E4M3, decode_e2m1, decode_e4m3, encode_e2m1, encode_e4m3, row_strips

torch = pytest.importorskip("torch", reason="the reference casts are torch's")

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def weight(kind: str, shape: tuple[int, int] = (192, 256)) -> np.ndarray:
    """Weights that formats stumble over, in BF16 as they arrive."""
    rng = np.random.default_rng(len(kind))
    grid = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    values = {
        "normal": lambda: rng.normal(0, 0.02, shape),
        "heavy": lambda: rng.standard_t(3, shape) * 0.01,
        "grid": lambda: rng.choice(grid[np.isfinite(grid)], shape) * np.float32(0.0013),
        "subnormal": lambda: rng.normal(0, 1e-39, shape),
        "wide": lambda: rng.normal(0, 1, shape) * 10.0 ** rng.uniform(-12, 3, shape),
        "extremes": lambda: rng.choice([448.0, -448.0, 0.0, -0.0, 1.0, -0.25], shape),
        "zero": lambda: np.zeros(shape),
    }
    if kind == "tiles":
        array = values["normal"]()
        array[:, 16:48], array[4], array[130:, 128:] = 0, -0.0, 0
        return array.astype(np.float32).astype(BF16)
    return values[kind]().astype(np.float32).astype(BF16)


KINDS = ("normal", "heavy", "grid", "subnormal", "wide", "extremes", "tiles", "zero")


def amax(array: np.ndarray) -> float:
    return float(np.abs(array.astype(np.float32)).max())


def quantized(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    return get_format(name).quantize(array, amax=amax(array), input_scale=1.0)


def as_torch(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float32))


def codes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


class TestNumerics:
    def test_all_e4m3_codes_decode_as_in_torch(self) -> None:
        codes = np.arange(256, dtype=np.uint8)
        wanted = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
        np.testing.assert_array_equal(decode_e4m3(codes), wanted)
        np.testing.assert_array_equal(np.signbit(decode_e4m3(codes)), np.signbit(wanted))

    def test_e4m3_codes_survive_a_round_trip(self) -> None:
        codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)
        np.testing.assert_array_equal(encode_e4m3(decode_e4m3(codes)).view(np.uint8), codes)

    def test_e4m3_ties_go_to_even_and_the_rest_to_the_nearest(self) -> None:
        values = np.sort(decode_e4m3(np.arange(0x7F, dtype=np.uint8)))
        ties = (values[:-1] + values[1:]) / 2
        samples = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(500))])
        samples = np.concatenate([samples, -samples]).astype(np.float32)
        np.testing.assert_array_equal(encode_e4m3(samples).view(np.uint8), codes_of(torch.from_numpy(samples)))
        assert (encode_e4m3(ties.astype(np.float32)).view(np.uint8) & 1 == 0).all()

    def test_e4m3_saturates(self) -> None:
        values = np.array([448, 449, 463, 464, 465, 1e9, np.inf, -448, -500, -np.inf], np.float32)
        np.testing.assert_array_equal(decode_e4m3(encode_e4m3(values)), [448] * 7 + [-448] * 3)

    @pytest.mark.parametrize(
        ("value", "code"),
        [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6), (0.0, 0), (-0.0, 0), (6.0, 7),
         (7.0, 7), (np.inf, 7), (-0.25, 8), (-0.75, 10), (-5.0, 14), (-6.1, 15), (-1e-9, 8)],
    )  # fmt: skip
    def test_e2m1_ties_and_ends(self, value: float, code: int) -> None:
        assert encode_e2m1(np.array([value], np.float32))[0] == code

    def test_e2m1_rounds_to_the_nearest(self) -> None:
        values = np.random.default_rng(0).uniform(-7, 7, 20000).astype(np.float32)
        distance = np.abs(np.abs(values)[:, None] - np.array(E2M1, np.float32))
        np.testing.assert_array_equal(encode_e2m1(values) & 7, distance.argmin(axis=1))
        np.testing.assert_array_equal(encode_e2m1(values) >> 3, values < 0)

    def test_e2m1_unpacks_the_low_nibble_first(self) -> None:
        np.testing.assert_array_equal(decode_e2m1(np.array([[0xF1, 0x2A]], np.uint8)), [[0.5, -6, -1, 1]])

    def test_strips_cover_all_rows_in_multiples(self) -> None:
        strips = list(row_strips((1000, 4096), 128))
        assert [s.start for s in strips] == [0] + [s.stop for s in strips[:-1]] and strips[-1].stop == 1000
        assert all((s.stop - s.start) % 128 == 0 for s in strips[:-1]) and len(strips) > 2


class TestFormats:
    @pytest.mark.parametrize("name", FORMATS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_writes_what_it_announces_and_reads_it_back_finite(self, name: str, kind: str) -> None:
        from pipeline.checkpoint.reader import DTYPES

        array, item = weight(kind), get_format(name)
        stored = quantized(name, array)
        announced = {o.suffix: (DTYPES[o.dtype], o.shape) for o in item.outputs("x", array.shape)}
        assert announced == {suffix: (t.dtype, t.shape) for suffix, t in stored.items()}
        assert all(np.isfinite(t.astype(np.float32)).all() for t in stored.values())
        back = item.dequantize(stored)
        assert back.dtype == np.float32 and back.shape == array.shape and np.isfinite(back).all()
        if kind == "zero":
            assert not back.any()
        bits = 8 * sum(t.nbytes for s, t in stored.items() if t.ndim == 2 or s == "weight") / array.size
        assert bits == pytest.approx(item.bits_per_weight, rel=1e-3)

    @pytest.mark.parametrize("name", FORMATS)
    @pytest.mark.parametrize("kind", KINDS)
    def test_amax_is_that_of_the_dequantised_weight(self, name: str, kind: str) -> None:
        stored = quantized(name, weight(kind))
        assert get_format(name).amax(stored) == amax(get_format(name).dequantize(stored).astype(BF16))

    @pytest.mark.parametrize("kind", KINDS)
    def test_fp8_is_torchs_float32_division(self, kind: str) -> None:
        array = weight(kind)
        stored = quantized("fp8", array)
        scale = torch.tensor(amax(array)) / 448 if array.astype(np.float32).any() else torch.tensor(1.0)
        assert stored["weight_scale"] == scale.numpy()
        np.testing.assert_array_equal(
            stored["weight"].view(np.uint8), codes_of((as_torch(array) / scale).clamp(-448, 448))
        )

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shape", [(192, 256), (128, 128), (130, 260), (5, 16)])
    def test_fp8_block_is_torchs_block_by_block(self, kind: str, shape: tuple[int, int]) -> None:
        array = weight(kind, shape)
        stored = quantized("fp8_block", array)
        dense, back = as_torch(array), get_format("fp8_block").dequantize(stored)
        for row in range(0, shape[0], 128):
            for col in range(0, shape[1], 128):
                block = dense[row : row + 128, col : col + 128]
                scale = block.abs().max() / 448 if block.any() else torch.tensor(1.0)
                tile = np.s_[row : row + 128, col : col + 128]
                assert stored["weight_scale_inv"][row // 128, col // 128] == scale.numpy()
                wanted = (block / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
                np.testing.assert_array_equal(stored["weight"][tile].view(np.uint8), wanted.view(torch.uint8).numpy())
                np.testing.assert_array_equal(back[tile], (wanted.float() * scale).numpy())

    def test_fp8_block_scales_cover_a_partial_last_block(self) -> None:
        shapes = [output.shape for output in get_format("fp8_block").outputs("kv_a", (192, 256))]
        assert shapes == [(192, 256), (2, 2)]

    @pytest.mark.parametrize("kind", KINDS)
    def test_nvfp4_is_the_definition_written_plainly(self, kind: str) -> None:
        array = weight(kind)
        stored = quantized("nvfp4", array)
        blocks = as_torch(array).reshape(192, 16, 16)
        scale_2 = blocks.abs().max() / 2688 if blocks.any() else torch.tensor(1.0)
        wanted = blocks.abs().amax(-1) / (6 * scale_2)
        wanted = torch.where(wanted == 0, 1.0, wanted).clamp(2**-9, 448).to(torch.float8_e4m3fn)
        scaled = (blocks / (wanted.float() * scale_2)[..., None]).double()
        # Ties to even: among equally near values the one with the even code wins.
        levels = torch.tensor(E2M1, dtype=torch.float64)
        distance = (scaled.abs()[..., None] - levels).abs()
        nearest = distance == distance.min(-1, keepdim=True).values
        code = torch.where(nearest, torch.arange(8) + 100 * (torch.arange(8) % 2), 1000).argmin(-1)
        code = (code + 8 * (scaled < 0)).reshape(192, 256)
        assert stored["weight_scale_2"] == scale_2.numpy()
        np.testing.assert_array_equal(stored["weight_scale"].view(np.uint8), wanted.view(torch.uint8).numpy())
        np.testing.assert_array_equal(stored["weight"], (code[:, 0::2] + 16 * code[:, 1::2]).numpy())

    def test_nvfp4_of_zeros_has_finite_scales_and_zero_codes(self) -> None:
        stored = quantized("nvfp4", weight("zero"))
        assert stored["weight_scale_2"] > 0 and (stored["weight_scale"].view(np.uint8) == 0x38).all()
        assert not stored["weight"].any()

    @pytest.mark.parametrize(
        ("name", "low", "high"), [("nvfp4", 19.5, 21.5), ("fp8", 31, 32.5), ("fp8_block", 31, 32.5), ("bf16", 300, 400)]
    )
    def test_sqnr_of_normal_weights(self, name: str, low: float, high: float) -> None:
        array = weight("normal", (512, 1024))
        error = get_format(name).dequantize(quantized(name, array)).astype(np.float64) - array.astype(np.float64)
        sqnr = 10 * np.log10(np.square(array.astype(np.float64)).sum() / max(np.square(error).sum(), 1e-30))
        assert low < sqnr < high

    def test_limit_is_the_largest_value_the_scales_express(self) -> None:
        array = weight("normal")
        assert get_format("nvfp4").limit(quantized("nvfp4", array)) == pytest.approx(amax(array), rel=1e-6)
        assert get_format("fp8").limit(quantized("fp8", array)) == pytest.approx(amax(array), rel=1e-6)
        assert get_format("bf16").limit(quantized("bf16", array)) == float("inf")

    @pytest.mark.parametrize("shape", [(4, 24), (16,), (0, 16)])
    def test_nvfp4_refuses_shapes_it_cannot_hold(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ConfigError, match=r"model\.x\.weight has shape .* multiple of 16"):
            get_format("nvfp4").outputs("model.x", shape)

    def test_an_unknown_format_names_the_known_ones(self) -> None:
        with pytest.raises(
            ConfigError, match="'int3' is not a weight format: choose one of bf16, fp8, fp8_block, nvfp4"
        ):
            get_format("int3")

    @pytest.mark.parametrize("name", FORMATS)
    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    def test_amax_shows_nan_and_infinity(self, name: str, bad: float) -> None:
        array = weight("normal")
        if name == "bf16":
            array[3, 7] = bad
            assert not np.isfinite(get_format(name).amax({"weight": array}))
        elif name.startswith("fp8"):
            stored = quantized(name, array)
            stored["weight"].view(np.uint8)[3, 7] = 0xFF
            assert np.isnan(get_format(name).amax(stored))
        else:
            stored = quantized(name, array)
            scales = stored["weight_scale"]
            scales[3, 1] = 0xFF if scales.dtype == np.uint8 else np.nan
            assert np.isnan(get_format(name).amax(stored))
