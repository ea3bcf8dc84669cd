"""Kernels of ours in the network, in place of native layers: where TensorRT takes plugins (`tensorrt`, not `tensorrt_rtx`).

    topk_router     the choice of experts: one kernel for some twenty layers
    router_gemm     the router's product in BF16 without casts to float32, in networks of up to 64 tokens a step
    nvfp4_pack      and nvfp4_unpack: rows on their way to other ranks' experts (engine.tensorrt.gather=fp4), two kernels for
                    forty layers
    mla_decode      latent attention of decoding, which TensorRT takes apart: of heads of 576 it has no fused kernel (SM90)
    moe_fp8_block   routed experts in FP8 blocks as they are, which TensorRT would widen, each on every token (SM90)

`engine.tensorrt.plugins=auto` takes all but the last two: they lie in the engine itself, so nothing has to be installed where it
runs, and save launches in every layer with experts. `all` takes those, too; they are launched from Python, by this package,
wherever the engine is built or runs. Of what else `plugins/*/trt.py` declare, no network takes the latent write (its output in
place is a preview feature of TensorRT), the other quantisers (no product of TensorRT takes FP8 in groups, its cache no FP8), the
absorbed products (two of TensorRT's own) or packed prefill. Where a plugin does not cover the chip or the sizes, native layers do
its work, and `engine.json` says why.

Not run: an engine with plugins was neither built nor run; the interpreter computes them by their reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.core.errors import MissingToolError
from pipeline.formats.numerics import BF16, E4M3, Array
from pipeline.share import code_root

if TYPE_CHECKING:
    from pipeline.engines.tensorrt.definition import Definition, Tensor
    from plugins.trt import Kernel, Plugin

__all__ = ["LAYER", "Plugins", "compiler", "declared", "interpreted", "offered"]

LAYER = "PLUGIN_V3"
"""LayerType of a plugin."""
HOST = {"mla_decode": "mla_decode", "moe_fp8_block": "moe_grouped_gemm"}
"""Those that are launched from the host, and their folders."""


@cache
def declared() -> dict[str, Plugin]:
    """The plugins that lie in engines, by name; needs torch."""
    from plugins.quantize.trt import PLUGINS as QUANTISERS
    from plugins.router_gemm.trt import PLUGINS as PRODUCTS
    from plugins.topk_router.trt import PLUGINS as ROUTERS

    return {plugin.name: plugin for plugin in (*ROUTERS, *PRODUCTS, *QUANTISERS)}


def _plugin(name: str) -> Plugin:
    """One of those, or one that is launched from the host."""
    if name not in HOST:
        return declared()[name]
    return next(plugin for plugin in import_module(f"plugins.{HOST[name]}.trt").PLUGINS if plugin.name == name)


def compiler() -> str:
    """What compiles kernels, `NVRTC 13.0`; empty where that is missing."""
    from plugins.nvrtc import compiler_version

    try:
        return "NVRTC {}.{}".format(*compiler_version())
    except MissingToolError:
        return ""


class Plugins:
    """Those of one network, for one compute capability."""

    def __init__(self, sm: int, *, host: bool = False) -> None:
        """`host`: also those that are launched from there."""
        self.sm, self._host = sm, host
        self.used: dict[str, list[str]] = {}
        """Plugin -> the digest of each of its layers' kernels."""
        self.native: dict[str, str] = {}
        """Plugin -> why native layers do its work, where they do."""
        self._kept: list[Any] = []
        """What TensorRT only points at."""

    def offer(self, net: Definition, name: str, shapes: Sequence[Sequence[int]], attributes: Mapping[str, Any]) -> Any:
        """See `offered`."""
        if name in HOST and not self._host:
            return None
        why = self._lacks() or self._refusal(name, shapes, attributes)
        if why:
            self.native[name] = why
            return None
        from plugins.trt import sizes

        plugin = _plugin(name)
        kernel = plugin.kernel(sizes(plugin, shapes), **attributes) if plugin.kernel else None
        digest = _built(plugin, kernel, self.sm, attributes)
        return partial(self._layer, net, plugin, attributes, digest)

    def _lacks(self) -> str:
        if not find_spec("torch"):
            return "plugins are compiled with torch's help, which is not installed"
        return "" if compiler() else "NVRTC, which compiles plugins, was not found: install nvidia-cuda-nvrtc"

    def _refusal(self, name: str, shapes: Sequence[Sequence[int]], attributes: Mapping[str, Any]) -> str:
        from plugins.trt import sizes, uncovered

        plugin = _plugin(name)
        return uncovered(plugin, self.sm) or plugin.refusal(sizes(plugin, shapes), **attributes)

    def _layer(self, net: Definition, plugin: Plugin, attributes: Mapping[str, Any], digest: str, *inputs: Tensor) -> list[Tensor]:
        from plugins.trt import call

        arguments = _arguments(net.trt, plugin, self.sm, inputs, attributes)
        self._kept.append(arguments)
        layer = net.layer("add_plugin", *arguments)
        layer.metadata = call(plugin, attributes, digest)
        self.used.setdefault(plugin.name, []).append(digest)
        return [net.checked(layer, index) for index in range(len(plugin.outputs))]

    def plain(self) -> dict[str, Any]:
        """For a report."""
        used = {name: {"layers": len(known), "digests": sorted(set(known))} for name, known in sorted(self.used.items())}
        host = {name: f"plugins.{HOST[name]}.trt" for name in used if name in HOST}
        return {"sm": self.sm, "compiler": compiler(), "used": used, "host": host, "native": dict(sorted(self.native.items()))}


def offered(net: Definition, name: str, shapes: Sequence[Sequence[int]], **attributes: Any) -> Callable[..., list[Tensor]] | None:
    """What makes the plugin's layer of tensors with these shapes (-1: dynamic) and gives its outputs; None: use native layers."""
    return net.plugins.offer(net, name, shapes, attributes) if net.plugins else None


def _built(plugin: Plugin, kernel: Kernel | None, sm: int, attributes: Mapping[str, Any]) -> str:
    """Its digest; an embedded kernel is compiled here first, as TensorRT asks for it where an error could not be told."""
    from plugins.trt import digest, ptx

    if kernel is None:
        from plugins.trt_class import folder_digest

        return folder_digest(code_root() / "plugins" / HOST[plugin.name], attributes)
    ptx(plugin, kernel, sm)
    return digest(plugin, kernel, sm, attributes)


def _arguments(trt: Any, plugin: Plugin, sm: int, inputs: Sequence[Tensor], attributes: Mapping[str, Any]) -> tuple[Any, ...]:
    """What `INetworkDefinition.add_plugin` takes."""
    if plugin.kernel is None:
        from plugins.trt_class import instance

        return (instance(trt, plugin, attributes)(*inputs),)
    from plugins.trt import register

    return register(plugin, sm)(*inputs, **attributes), True


def interpreted(metadata: str, inputs: Sequence[Array]) -> tuple[Array, ...]:
    """A plugin layer's outputs, by its reference; `metadata` says which it is."""
    asked = json.loads(metadata)
    outputs = _plugin(asked["plugin"]).reference(*(_tensor(value) for value in inputs), **asked["attributes"])
    return tuple(_array(value) for value in outputs)


def _codes() -> dict[Any, tuple[Any, Any]]:
    """Type that numpy has from ml_dtypes -> the whole numbers of its size, and torch's type."""
    import torch

    return {BF16: (np.dtype(np.int16), torch.bfloat16), np.dtype(E4M3): (np.dtype(np.uint8), torch.float8_e4m3fn)}


def _tensor(value: Array) -> Any:
    import torch

    whole, dtype = _codes().get(value.dtype, (value.dtype, None))
    given = torch.from_numpy(np.array(value, order="C").view(whole))
    return given if dtype is None else given.view(dtype)


def _array(given: Any) -> Array:
    import torch

    for dtype, (whole, torch_dtype) in _codes().items():
        if given.dtype == torch_dtype:
            return given.view(torch.int16 if whole.itemsize == 2 else torch.uint8).numpy().view(dtype)
    return given.numpy()
