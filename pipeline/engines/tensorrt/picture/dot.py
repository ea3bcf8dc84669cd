"""The picture as Graphviz text, for those who lay it out themselves: `dot -Tsvg FILE.dot`."""

from __future__ import annotations

import json
from collections.abc import Iterator

from pipeline.engines.tensorrt.picture.blocks import Picture
from pipeline.engines.tensorrt.picture.svg import text_of

__all__ = ["dot"]


def dot(drawn: Picture, title: str) -> str:
    """A digraph with a cluster for each of ours."""
    return "\n".join([f"digraph {json.dumps(title)} {{", '  node [shape=box fontname="Helvetica"]', *_lines(drawn), "}", ""])


def _lines(drawn: Picture) -> Iterator[str]:
    for number, cluster in enumerate(drawn.clusters):
        yield f"  subgraph cluster_{number} {{ label={json.dumps(cluster)}"
        for block in drawn.blocks:
            if block.cluster == cluster:
                yield f"    {json.dumps(block.name)} [label={json.dumps(chr(10).join(text_of(block)))}]"
        yield "  }"
    for block in drawn.blocks:
        for source, tensor in block.reads.items():
            yield f"  {json.dumps(source)} -> {json.dumps(block.name)} [label={json.dumps(tensor)}]"
