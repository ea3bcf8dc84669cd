"""What is drawn of a network: a block a product, cache update, Top-K or the like, with the small layers that feed it, in clusters.

A decoder layer of R1 has some 230 TensorRT layers, most of them casts and elementwise steps. A small layer goes into the block that
alone reads it, so that a product shows with its norm and its dequantisation; one that several blocks read is a block of its own.
Clusters are our names up to the kind of sub-layer (`layers.3.attn`); one that is closed is a single block. Inputs of the network,
and what every layer reads (positions, masks), are named in the block that reads them instead of being joined by lines.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pipeline.engines.tensorrt.listing import Layer

__all__ = ["Block", "Picture", "picture"]

MAJOR = {
    "MATRIX_MULTIPLY": "matmul", "EINSUM": "einsum", "CONVOLUTION": "convolution", "KV_CACHE_UPDATE": "cache update",
    "ATTENTION_INPUT": "attention", "ATTENTION_OUTPUT": "attention", "ROTARY_EMBEDDING": "rope", "TOPK": "top-k", "MOE": "moe",
    "DIST_COLLECTIVE": "collective", "PLUGIN_V3": "plugin", "PLUGIN": "plugin", "PLUGIN_V2": "plugin", "SCATTER": "scatter",
    "DYNAMIC_QUANTIZE": "quantise", "QUANTIZE": "quantise", "CUMULATIVE": "running sum", "SOFTMAX": "softmax",
    "NORMALIZATION": "norm",
}  # fmt: skip
"""Layer type -> the word for it. These begin a block; all other types are small."""
EVERYWHERE = 4
"""A tensor that so many clusters read is named where it is read."""
FEW = 64
"""Constants of up to so many elements are no weights."""
SHARED = "where"
"""The cluster of what all layers read."""


@dataclass(slots=True)
class Block:
    """One box."""

    name: str
    cluster: str
    layers: list[Layer] = field(default_factory=list)
    reads: dict[str, str] = field(default_factory=dict)
    """Name of another block -> type and shape of what comes from there."""
    named: list[str] = field(default_factory=list)
    """What is read and not joined by a line."""

    @property
    def part(self) -> str:
        """The scope inside the cluster: router, experts, shared."""
        return self.name.removeprefix(self.cluster).rpartition(".")[0].lstrip(".")

    @property
    def majors(self) -> Counter[str]:
        """Words of what it is made of, in order."""
        found = Counter(MAJOR[layer.kind] for layer in self.layers if layer.kind in MAJOR and layer.kind != "ATTENTION_INPUT")
        return found or Counter({_small(self.layers): 1})

    @property
    def minors(self) -> Counter[str]:
        """Types of the small layers, constants left out."""
        return Counter(layer.kind.lower() for layer in self.layers if layer.kind not in MAJOR and layer.kind != "CONSTANT")

    @property
    def weights(self) -> list[str]:
        """Types and shapes of its constants, the largest first."""
        held = [layer.gives[0] for layer in self.layers if layer.kind == "CONSTANT"]
        return sorted((text for text in held if _count(text) > FEW), key=_count, reverse=True)

    @property
    def outputs(self) -> list[str]:
        """Outputs of the network that it gives."""
        return [name for layer in self.layers for name in layer.outputs]

    @property
    def gives(self) -> str:
        """Type and shape of what it hands on."""
        return next((layer.gives[0] for layer in reversed(self.layers) if layer.kind != "CONSTANT"), self.layers[-1].gives[0])


@dataclass(frozen=True, slots=True)
class Picture:
    """Blocks in an order in which each stands after those that it reads."""

    blocks: list[Block]
    clusters: list[str]


def _small(layers: Sequence[Layer]) -> str:
    """The word for a block without a major layer."""
    kinds = [layer.kind for layer in layers]
    if "REDUCE" in kinds and "UNARY" in kinds:
        return "rms norm"
    return next((kind for kind in reversed(kinds) if kind not in ("SHUFFLE", "CONSTANT", "CAST")), kinds[-1]).lower()


def _count(text: str) -> int:
    """Elements of `BF16[-1, 16]`, open dimensions as one."""
    total = 1
    for size in text.partition("[")[2].rstrip("]").split(","):
        total *= abs(int(size)) if size.strip() else 1
    return total


def cluster_of(name: str) -> str:
    """`layers.3.mlp` of layers.3.mlp.router.topk_7; the first word elsewhere; modules of ONNX may stand before `layers`."""
    words = name.split(".")[:-1]
    if "layers" in words:
        at = words.index("layers")
        return ".".join(words[: at + 3])
    return ".".join(words[:1]) or "network"


def picture(layers: Sequence[Layer], opened: Iterable[str] = ()) -> Picture:
    """Blocks of the clusters that begin with one of `opened`; every other cluster is a block."""
    place, cluster = {layer.name: layer for layer in layers}, _clusters(layers)
    prefixes = tuple(f"{prefix.rstrip('.')}." for prefix in opened)
    open_ones = {name for name in set(cluster.values()) if f"{name}.".startswith(prefixes)}
    owner = _owners(layers, cluster, open_ones)
    blocks: dict[str, Block] = {}
    for layer in layers:
        key = owner[layer.name]
        blocks.setdefault(key, Block(key, cluster[layer.name])).layers.append(layer)
    _join(blocks, owner, place)
    ordered = _ordered(blocks, layers)
    return Picture(ordered, list(dict.fromkeys(block.cluster for block in ordered)))


def _clusters(layers: Sequence[Layer]) -> dict[str, str]:
    """Layer -> cluster; what a parser made without a name goes with the first that reads it."""
    found: dict[str, str] = {}
    readers = _readers(layers)
    for layer in reversed(layers):
        known = [found[name] for name in readers[layer.name] if name in found]
        ours = "." in layer.name and not layer.name.startswith(("ONNXTRT", "("))
        found[layer.name] = cluster_of(layer.name) if ours or not known else known[-1]
    return found


def _readers(layers: Sequence[Layer]) -> defaultdict[str, list[str]]:
    """Layer -> those that read it."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for layer in layers:
        for name in dict.fromkeys(_maker(name) for name in layer.reads):
            found[name].append(layer.name)
    return found


def _maker(reference: str) -> str:
    """The layer of a reference to one of its tensors."""
    name, _, place = reference.rpartition(":")
    return name if place.isdecimal() and name else reference


def _owners(layers: Sequence[Layer], cluster: dict[str, str], opened: set[str]) -> dict[str, str]:
    """Layer -> name of its block."""
    readers, owner = _readers(layers), {}
    for layer in reversed(layers):
        mine = cluster[layer.name]
        if mine not in opened:
            owner[layer.name] = mine
            continue
        heads = {owner[name] for name in readers[layer.name] if cluster[name] == mine}
        outside = any(cluster[name] != mine for name in readers[layer.name]) or layer.outputs
        alone = len(heads) == 1 and not outside and layer.kind not in MAJOR
        joins = alone or (heads and (layer.kind == "ATTENTION_INPUT" or _is_scalar(layer)))
        owner[layer.name] = min(heads) if joins else layer.name
    return owner


def _join(blocks: dict[str, Block], owner: dict[str, str], place: dict[str, Layer]) -> None:
    """Lines between blocks, and names in the place of lines that would go everywhere."""
    uses: defaultdict[str, set[str]] = defaultdict(set)
    for block in blocks.values():
        for layer in block.layers:
            for name in layer.reads:
                uses[name].add(block.cluster)
    for block in blocks.values():
        for reference in dict.fromkeys(name for layer in block.layers for name in layer.reads if layer.kind != "SHAPE"):
            maker = _maker(reference)
            source = owner.get(maker)
            if source == block.name or _is_scalar(place.get(maker)):
                continue
            if source is None or blocks[source].cluster == SHARED != block.cluster or len(uses[reference]) >= EVERYWHERE:
                block.named.append(_told(reference, place.get(maker)))
            else:
                block.reads.setdefault(source, _shape(reference, place[maker]))
        block.named = list(dict.fromkeys(block.named))


def _is_scalar(layer: Layer | None) -> bool:
    """A constant that is no weight, or arithmetic on shapes: no line leads to those that read it."""
    if layer is None:
        return False
    about_shapes = all(text.startswith("INT64[") and "-1" not in text for text in layer.gives)
    return (layer.kind == "CONSTANT" or about_shapes) and _count(layer.gives[0]) <= FEW


def _shape(reference: str, layer: Layer) -> str:
    index = int(reference.rpartition(":")[2]) if reference != layer.name else 0
    return layer.gives[index]


def _told(reference: str, layer: Layer | None) -> str:
    """An input by its name; a tensor of `where` by its type and shape, too."""
    return reference if layer is None else f"{reference.rpartition('.')[0]}: {_shape(reference, layer)}"


def _ordered(blocks: dict[str, Block], layers: Sequence[Layer]) -> list[Block]:
    """In the order of their last layers. Closed clusters may read one another in a circle: lines upwards are left out."""
    place = {layer.name: number for number, layer in enumerate(layers)}
    ordered = sorted(blocks.values(), key=lambda block: max(place[layer.name] for layer in block.layers))
    done: set[str] = set()
    for block in ordered:
        block.reads = {source: tensor for source, tensor in block.reads.items() if source in done}
        done.add(block.name)
    return ordered
