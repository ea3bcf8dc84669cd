"""The picture of a network: what is in a box, what is joined, that nothing overlaps, and that the text is whole."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import combinations, pairwise
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError
from pipeline.engines.tensorrt.listing import Layer, read
from pipeline.engines.tensorrt.picture.blocks import picture
from pipeline.engines.tensorrt.picture.dot import dot
from pipeline.engines.tensorrt.picture.layout import rows_of, spread
from pipeline.engines.tensorrt.picture.svg import svg
from pipeline.engines.tensorrt.show import View, draw

TEXT = """\
where.shape_0  SHAPE  INT64[2]  <- positions
where.cast_1  CAST  INT32[2]  <- where.shape_0
embed.constant_2  CONSTANT  BF16[1024, 256]
embed.gather_v2_3  GATHER  BF16[-1, -1, 256]  <- embed.constant_2, tokens
layers.0.attn.cast_4  CAST  FLOAT[-1, -1, 256]  <- embed.gather_v2_3
layers.0.attn.reduce_5  REDUCE  FLOAT[-1, -1, 1]  <- layers.0.attn.cast_4
layers.0.attn.unary_6  UNARY  FLOAT[-1, -1, 1]  <- layers.0.attn.reduce_5
layers.0.attn.constant_7  CONSTANT  FP8[128, 256]
layers.0.attn.constant_8  CONSTANT  FLOAT[1, 1]
layers.0.attn.dequantize_9  DEQUANTIZE  BF16[128, 256]  <- layers.0.attn.constant_7, layers.0.attn.constant_8
layers.0.attn.matrix_multiply_10  MATRIX_MULTIPLY  BF16[-1, -1, 128]  <- layers.0.attn.unary_6, layers.0.attn.dequantize_9
layers.0.attn.matrix_multiply_11  MATRIX_MULTIPLY  BF16[-1, -1, 128]  <- layers.0.attn.unary_6, layers.0.attn.constant_8
layers.0.attn.kv_cache_update_12  KV_CACHE_UPDATE  BF16[-1, 1, 64, 128]  <- cache.0, layers.0.attn.matrix_multiply_11  => present.0
layers.0.attn.topk_13  TOPK  FLOAT[-1, 4], INT32[-1, 4]  <- layers.0.attn.matrix_multiply_10
layers.0.attn.one_hot_14  ONE_HOT  FLOAT[-1, 4, 8]  <- layers.0.attn.topk_13:1, where.cast_1
layers.0.attn.elementwise_15  ELEMENTWISE  BF16[-1, -1, 256]  <- embed.gather_v2_3, layers.0.attn.one_hot_14
head.matrix_multiply_16  MATRIX_MULTIPLY  FLOAT[-1, 1024]  <- layers.0.attn.elementwise_15  => logits
"""
LAYERS = read(TEXT)


def test_a_listing_is_read_as_it_was_written() -> None:
    assert "".join(layer.text() for layer in LAYERS) == TEXT
    assert LAYERS[13].gives == ("FLOAT[-1, 4]", "INT32[-1, 4]") and LAYERS[12].outputs == ("present.0",)


def test_small_layers_go_with_the_product_that_alone_reads_them() -> None:
    drawn = {block.name: block for block in picture(LAYERS, ["layers"]).blocks}
    product = drawn["layers.0.attn.matrix_multiply_10"]
    assert {layer.name.rpartition(".")[2] for layer in product.layers} == {
        "constant_7", "constant_8", "dequantize_9", "matrix_multiply_10",
    }  # fmt: skip
    assert product.weights == ["FP8[128, 256]"] and product.reads == {"layers.0.attn.unary_6": "FLOAT[-1, -1, 1]"}
    norm = drawn["layers.0.attn.unary_6"]
    assert dict(norm.majors) == {"rms norm": 1} and len(norm.layers) == 3  # two products read it, so it stands alone
    other = drawn["layers.0.attn.matrix_multiply_11"]
    assert other.reads == {norm.name: "FLOAT[-1, -1, 1]"}  # the scalar that both products have is no line
    cache = drawn["layers.0.attn.kv_cache_update_12"]
    assert (cache.named, cache.outputs) == (["cache.0"], ["present.0"])
    last = drawn["layers.0.attn.elementwise_15"]
    assert last.reads["layers.0.attn.topk_13"] == "INT32[-1, 4]" and last.named == ["where: INT32[2]"]
    assert drawn["embed"].layers[1].kind == "GATHER"  # not opened


def test_a_closed_cluster_is_one_box_in_the_order_of_the_network() -> None:
    drawn = picture(LAYERS)
    assert [block.name for block in drawn.blocks] == drawn.clusters == ["where", "embed", "layers.0.attn", "head"]
    assert drawn.blocks[2].reads == {"embed": "BF16[-1, -1, 256]"}


def test_modules_of_onnx_are_clusters_too_and_what_the_parser_added_goes_with_its_reader() -> None:
    layers = [
        Layer("ONNXTRT_Shape_1", "SHUFFLE", ("INT64[1]",), ("x",), ()),
        Layer("decoder.layers.3.mlp.down.MatMul_7", "MATRIX_MULTIPLY", ("FLOAT[2]",), ("ONNXTRT_Shape_1",), ("y",)),
    ]  # fmt: skip
    assert picture(layers).clusters == ["decoder.layers.3.mlp"]


def test_rows_go_down_and_boxes_do_not_overlap() -> None:
    """A diamond, a line past it, one source from outside, one reader outside."""
    reads = {"a": ["outside"], "b": ["a"], "c": ["a"], "d": ["b"], "e": ["c", "d", "outside"], "out": ["b"]}
    names, widths = list("abcde"), dict.fromkeys("abcde", 120.0)
    rows = rows_of(names, reads)
    assert rows == {"outside": -1, "a": 0, "b": 1, "c": 1, "d": 2, "e": 3, "out": 4}
    places, passages = spread(names, reads, widths)
    assert [place.row for place in passages["outside", "e"]] == [0, 1, 2] and not passages["a", "b"]
    every = [*places.values(), *(place for line in passages.values() for place in line)]
    for one, other in combinations(every, 2):
        assert one.row != other.row or abs(one.x - other.x) >= (one.width + other.width) / 2


@pytest.mark.parametrize("opened", [[], ["layers", "embed", "where", "head"]])
def test_the_svg_is_whole_and_the_same_each_time(opened) -> None:
    drawn = picture(LAYERS, opened)
    text = svg(drawn, "rank0 <absorbed>")
    root = ElementTree.fromstring(text)
    space = "{http://www.w3.org/2000/svg}"
    boxes = [group.find(f"{space}rect") for group in root.iter(f"{space}g")]
    assert len(boxes) == len(drawn.blocks)
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    for box in boxes:
        x, y, w, h = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert left <= x and x + w <= left + width and top <= y and y + h <= top + height
    lines = [line for line in root.iter(f"{space}path") if "marker-end" in line.attrib]
    assert len(lines) == sum(len(block.reads) for block in drawn.blocks)
    tops = [float(box.attrib["y"]) for box in boxes]
    assert opened or all(upper < lower for upper, lower in pairwise(tops))
    assert svg(picture(LAYERS, opened), "rank0 <absorbed>") == text


def test_graphviz_text_has_every_box_and_line() -> None:
    drawn = picture(LAYERS, ["layers"])
    text = dot(drawn, "x")
    assert text.count("subgraph") == 4 and text.count(" -> ") == sum(len(block.reads) for block in drawn.blocks)
    assert '"embed" -> "layers.0.attn.elementwise_15" [label="BF16[-1, -1, 256]"]' in text


def test_what_to_draw_is_asked_in_words_and_refused_in_sentences(tmp_path: Path) -> None:
    assert View.parse(["network=b", "open=layers.1,head"], ["a", "b"]) == View("b", ("layers.1", "head"))
    with pytest.raises(ConfigError, match="There is no network c here: a, b"):
        View.parse(["network=c"], ["a", "b"])
    with pytest.raises(ConfigError, match="does not know tp: it takes network=NAME and open=PREFIX"):
        View.parse(["tp=8"], ["a"])
    with pytest.raises(ConfigError, match=r"name it FILE\.svg or FILE\.dot"):
        draw(tmp_path, {"a": "a.engine"}, View(None, ()), tmp_path / "x.png")
    with pytest.raises(ConfigError, match=r"a.layers.txt is not there"):
        draw(tmp_path, {"a": "a.engine"}, View(None, ()), tmp_path / "x.svg")
    (tmp_path / "a.layers.txt").write_text(TEXT)
    assert "17 layers in" in draw(tmp_path, {"a": "a.engine"}, View(None, ()), tmp_path / "x.svg")
    assert (tmp_path / "x.svg").read_text().startswith("<svg")
    with pytest.raises(ConfigError, match=r"open=layers\.7 begins no cluster of a: where, embed, layers\.0\.attn, head"):
        draw(tmp_path, {"a": "a.engine"}, View(None, ("layers.7",)), tmp_path / "x.svg")
    with pytest.raises(ConfigError, match=r"none is no folder"):
        draw(tmp_path, {"a": "a.engine"}, View(None, ()), tmp_path / "none" / "x.svg")
    with pytest.raises(ConfigError, match=r"There is no network a here: the result has no engine"):
        View.parse(["network=a"], [])
