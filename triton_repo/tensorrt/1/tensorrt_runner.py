"""Engines of one rank on its GPU. It needs torch (for memory, streams and NCCL's communicator), safetensors, and the library that
built the engines.

Not run on a GPU yet: written against the API of TensorRT 11.4 and TensorRT-RTX 1.7.1. In the tests a runner that interprets the
same networks stands in its place.

Shape legend: B rows, S tokens a row, L rows of logits asked for, M rows of the cache, D latent, V vocabulary.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from runner import Runner
from torch import Tensor

__all__ = ["TensorrtRunner", "check_machine", "register_plugins"]

DTYPES = {
    "FLOAT": torch.float32, "BF16": torch.bfloat16, "HALF": torch.float16, "INT32": torch.int32, "INT64": torch.int64,
}  # fmt: skip
DEVICE = "cuda:{}"
LIBRARIES = {"tensorrt": ("tensorrt",), "tensorrt_rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings")}


class TensorrtRunner(Runner):
    """The engines of one rank. Decode steps are captured as CUDA graphs, the drafted one with the MTP layer and the choice."""

    def __init__(self, info: dict[str, Any], folder: Path, rank: int) -> None:
        check_machine(info)
        self._trt, self._rank = _library(info), rank
        torch.cuda.set_device(rank)
        super().__init__(info, DEVICE.format(rank))
        self._logger = self._trt.Logger(self._trt.Logger.WARNING)
        register_plugins(self._trt, info)
        self.runtime = self._trt.Runtime(self._logger)
        self.stream = torch.cuda.Stream()
        shape, dtype = (self.cache_rows, 1, info["max_seq_len"], info["latent_dim"]), getattr(torch, info["dtype"])
        layers = range(info["num_layers"] + self.drafts)
        self._caches = {f"cache.{number}": torch.zeros(shape, dtype=dtype, device=self.device) for number in layers}
        self._weights = _load_weights(info, folder, rank, self.device)
        self._networks = {
            (form, draft): [_Network(self, folder, each) for each in _segments(info, form, rank, draft=draft)]
            for form in ("absorbed", "expanded") for draft in (False, True)
        }  # fmt: skip
        self._graphs: dict[str, _Graph] = {}

    def join(self, meeting: Path) -> None:
        """Meet the other ranks in an empty folder, and give NCCL's communicator to every engine, in the same order on all ranks:
        each call waits for theirs. TensorRT opens libnccl.so.2, which is the one that torch has loaded by then."""
        import torch.distributed as dist

        world, device = self.info["ranks"], torch.device(self.device)
        dist.init_process_group(
            "nccl", init_method=f"file://{meeting / 'store'}", rank=self._rank, world_size=world, device_id=device
        )
        dist.barrier(device_ids=[self._rank])  # NCCL makes its communicator with the first collective
        group = dist.distributed_c10d._get_default_group()
        communicator = _capsule(group._get_backend(device)._comm_ptr())
        for networks in self._networks.values():
            for network in networks:
                network.join(communicator)

    def run(self, step: Any) -> tuple[Tensor, ...]:
        """See `Runner`."""
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            results = super().run(step)
        self.stream.synchronize()
        return results

    def _decoded(self, tokens: Tensor, starts: Tensor) -> Tensor:
        body = super()._decoded
        return self._captured("decode", lambda *inputs: (body(*inputs),), tokens, starts)[0]

    def _drafted(self, accepted: Tensor, counts: Tensor, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, drafts, states = self._captured("drafted", super()._drafted, accepted, counts, starts)
        return logits, drafts, states

    def _captured(self, name: str, body: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        if name not in self._graphs:
            self._graphs[name] = _Graph(self, body, inputs)
        return self._graphs[name](inputs)

    def compute(self, form: str, rows: slice, tokens: Tensor, starts: Tensor, wanted: Tensor, hidden: Tensor | None = None
                ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """See `Runner`: all segments in order, on this runner's stream."""
        count = tokens.shape[1]
        feeds = {name: cache[rows] for name, cache in self._caches.items()} | self._weights
        positions = (starts[:, None] + torch.arange(count, device=self.device, dtype=torch.int32)).contiguous()
        feeds |= {"tokens": tokens.contiguous(), "starts": starts, "positions": positions, "logit_rows": wanted}
        if hidden is not None:
            feeds["hidden"] = hidden.contiguous()
        if form == "expanded":
            feeds["keys"] = torch.tensor([int(starts.max()) + count], dtype=torch.int64)  # read on the host
        for network in self._networks[form, hidden is not None]:
            outputs = network.enqueue(feeds, self.stream)
            feeds["hidden"] = outputs.get("states", feeds.get("hidden"))
            if "dropped" in outputs:
                self.dropped += outputs["dropped"]
        return outputs["logits"], outputs.get("states")


class _Network:
    """One engine and its execution context."""

    def __init__(self, runner: TensorrtRunner, folder: Path, facts: dict[str, Any]) -> None:
        self._facts, self._device = facts, runner.device
        plan = (folder / facts["file"]).read_bytes()
        self._engine = runner.runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise RuntimeError(
                f"{facts['file']} cannot be opened by this {runner.info['library']}: build it again with this version."
            )
        self._context = self._engine.create_execution_context()

    def join(self, communicator: Any) -> None:
        """Exchange through it."""
        self._must(self._context.set_communicator(communicator), "takes NCCL's communicator")

    def enqueue(self, feeds: dict[str, Tensor], stream: Any) -> dict[str, Tensor]:
        """Bind and start; outputs are new tensors, but caches are the inputs themselves."""
        for name, facts in self._facts["inputs"].items():
            value = feeds[facts.get("binds", name)]
            if -1 in facts["shape"]:
                self._must(self._context.set_input_shape(name, tuple(value.shape)), f"takes {name} of shape {list(value.shape)}")
            self._must(self._context.set_tensor_address(name, value.data_ptr()), f"binds {name}")
        outputs = {}
        for name, facts in self._facts["outputs"].items():
            if name.startswith("present."):
                outputs[name] = feeds[facts.get("binds", name).replace("present", "cache")]
            else:
                shape = tuple(self._context.get_tensor_shape(name))
                outputs[name] = torch.empty(shape, dtype=DTYPES[facts["dtype"]], device=self._device)
            self._must(self._context.set_tensor_address(name, outputs[name].data_ptr()), f"binds {name}")
        self._must(self._context.execute_async_v3(stream.cuda_stream), "runs")
        return outputs

    def _must(self, done: bool, what: str) -> None:
        if not done:
            raise RuntimeError(f"{self._facts['file']} no longer {what}: TensorRT's reason is in the server's log.")


class _Graph:
    """A step of fixed shapes, captured; all ranks capture theirs in the same step."""

    def __init__(self, runner: TensorrtRunner, body: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...]) -> None:
        self._inputs, dropped = [value.clone() for value in inputs], runner.dropped.clone()
        for _ in range(2):
            body(*self._inputs)
        runner.dropped.copy_(dropped)
        runner.stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=runner.stream):
            self._outputs = body(*self._inputs)

    def __call__(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Copy the inputs in, replay, and copy the outputs out."""
        for place, value in zip(self._inputs, inputs, strict=True):
            place.copy_(value)
        self._graph.replay()
        return tuple(value.clone() for value in self._outputs)


def _segments(info: dict[str, Any], form: str, rank: int, *, draft: bool) -> list[dict[str, Any]]:
    """The rank's engines of the model, or of the MTP layer, in one form, in the order of layers."""
    chosen = [
        each for each in info["engines"].values()
        if each["form"] == form and each["rank"] == rank and (each["first_layer"] >= info["num_layers"]) == draft
    ]  # fmt: skip
    return sorted(chosen, key=lambda each: each["first_layer"])


def _load_weights(info: dict[str, Any], folder: Path, rank: int, device: str) -> dict[str, Tensor]:
    """Weights that are inputs; empty where engines carry theirs."""
    from safetensors.torch import load_file

    file = f"weights/rank{rank}.safetensors"
    return load_file(folder / file, device=device) if file in info["weight_files"] else {}


def _capsule(pointer: int) -> Any:
    """A pointer as TensorRT's Python API takes it."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(pointer, None, None)


def register_plugins(trt: Any, info: dict[str, Any]) -> None:
    """Make known to TensorRT what its engines launch from Python; kernels that lie in the engines need nothing.

    Raises:
        RuntimeError: the package that has it is not here, or is an older one.
    """
    modules: dict[str, str] = {}
    for engine in info["engines"].values():
        modules |= (engine.get("plugins") or {}).get("host", {})
    for name, module in sorted(modules.items()):
        try:
            classes, declared = importlib.import_module("plugins.trt_class"), importlib.import_module(module).PLUGINS
            plugin = {plugin.name: plugin for plugin in declared}[name]
        except (ImportError, KeyError) as error:
            raise RuntimeError(
                f"These engines launch {name} from Python, but {module} has it not here ({error!r}): install the version of "
                "r1-pipeline that built them, or build with engine.tensorrt.plugins=auto."
            ) from error
        classes.register_creator(trt, plugin)


def check_machine(info: dict[str, Any]) -> None:
    """Refuse a machine without a GPU for each rank that the engines cover.

    Raises:
        RuntimeError: with what is missing.
    """
    built, ranks = " or ".join(info["targets"]), info["ranks"]
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"These engines were built for {built}, but torch sees no GPU here: check nvidia-smi, and torch's build."
        )
    if torch.cuda.device_count() < ranks:
        raise RuntimeError(
            f"These engines are of {ranks} ranks, one a GPU, but torch sees {torch.cuda.device_count()} here: serve them on a "
            f"machine with {ranks}, check CUDA_VISIBLE_DEVICES, or build with a lower parallel.tp."
        )
    for device in range(ranks):
        major, minor = torch.cuda.get_device_capability(device)
        if f"SM{major}{minor}" not in info["targets"]:
            name = torch.cuda.get_device_name(device)
            raise RuntimeError(
                f"These engines were built for {built}; {name} is SM{major}{minor}: build them for +hw= of this machine."
            )


def _library(info: dict[str, Any]) -> Any:
    """The library that built the engines, in the same version: engines of one are not another's."""
    for name in LIBRARIES[info["library"]]:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if module.__version__ != info["version"]:
            raise RuntimeError(
                f"These engines were built by {info['library']} {info['version']}; {module.__version__} is here: install the same."
            )
        return module
    raise RuntimeError(f"These engines need {info['library']} {info['version']}, which is not installed here.")
