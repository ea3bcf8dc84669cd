"""Runs native TensorRT engines of one rank behind the interface of the compiled torch engine, so that the scheduler is the same.

It needs torch (for memory and streams), safetensors, the engines' folder and the library that built them. A sequence has a fixed
row of every layer's cache, which the engines update in place: the scheduler's "page" is such a row, as long as a sequence may be.
A decode step always runs all rows, so that it is one CUDA graph; rows that do not decode write where their next token will be
written anyway. A prefill step runs one row, bound at its place in the cache.

Not run on a GPU yet: written against the API of TensorRT 11.4 and TensorRT-RTX 1.7.1. `CompiledEngine` runs in the tests over a
runner that interprets the same networks.

Shape legend: B rows, S tokens a row, L rows of logits asked for, M rows of the cache, D latent, V vocabulary.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["CompiledEngine", "Runner", "TensorrtRunner"]

DTYPES = {
    "FLOAT": torch.float32, "BF16": torch.bfloat16, "HALF": torch.float16, "INT32": torch.int32, "INT64": torch.int64,
}  # fmt: skip
LIBRARIES = {"tensorrt": ("tensorrt",), "tensorrt_rtx": ("tensorrt_rtx", "tensorrt_rtx_bindings")}


class Runner(Protocol):
    """Computes one step of some rows."""

    def run(self, form: str, rows: slice, tokens: Tensor, starts: Tensor, wanted: Tensor) -> Tensor:
        """INT32 tokens [B, S] of the cache's `rows`, at positions from starts [B] on -> logits [L, V] of tokens `wanted` [L]."""


class CompiledEngine:
    """The engines, and how far each row of the cache is filled. Page p of the scheduler is row p - 1; page 0 is no row."""

    def __init__(self, info: dict[str, Any], runner: Runner) -> None:
        self.info = info | {"page_size": info["max_seq_len"], "num_pages": info["max_batch_size"] + 1}
        self._runner = runner
        self._filled = torch.zeros(info["max_batch_size"], dtype=torch.int32)

    @classmethod
    def load(cls, folder: Path) -> CompiledEngine:
        """Open an engine folder on the machine that serves it.

        Raises:
            RuntimeError: it lacks the GPU or the library, or the engines are of several ranks.
        """
        info = json.loads((Path(folder) / "engine.json").read_text(encoding="utf-8"))
        return cls(info, TensorrtRunner(info, Path(folder)))

    def step(self, tokens: Tensor, positions: Tensor, pages: Tensor) -> Tensor:
        """Write the tokens [B, T] at their positions in the rows [B, 1]; logits [B, V] of each row's last token.

        Rows may be padded on the left with position -1: ignored.
        """
        self._check(tokens, positions, pages)
        rows = pages[:, 0].to(torch.int64) - 1
        if tokens.shape[1] == 1:
            return self._decode(tokens[:, 0], positions[:, 0], rows)
        return torch.cat([self._prefill(*each) for each in zip(tokens, positions, rows.tolist(), strict=True)])

    def _decode(self, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """One token of some rows; the others compute what nobody reads."""
        count = self.info["max_batch_size"]
        fed = torch.zeros(count, 1, dtype=torch.int32)
        starts = self._filled.clamp(max=self.info["max_seq_len"] - 1)
        fed[rows, 0], starts[rows] = tokens.to(torch.int32), positions.to(torch.int32)
        logits = self._runner.run("absorbed", slice(0, count), fed, starts, torch.arange(count, dtype=torch.int32))
        self._filled[rows] = positions.to(torch.int32) + 1
        return logits[rows.to(logits.device)]

    def _prefill(self, tokens: Tensor, positions: Tensor, row: int) -> Tensor:
        """A chunk of one row."""
        real = positions >= 0
        tokens, start = tokens[real].to(torch.int32)[None], positions[real][:1].to(torch.int32)
        count = tokens.shape[1]
        form = "expanded" if count >= self.info["expanded_from"] else "absorbed"
        logits = self._runner.run(form, slice(row, row + 1), tokens, start, torch.tensor([count - 1], dtype=torch.int32))
        self._filled[row] = start[0] + count
        return logits

    def _check(self, tokens: Tensor, positions: Tensor, pages: Tensor) -> None:
        """Refuse what the engines would read or write out of bounds."""
        info, (rows, length) = self.info, tokens.shape
        if positions.shape != tokens.shape or pages.shape != (rows, 1):
            shapes = [list(value.shape) for value in (tokens, positions, pages)]
            raise ValueError(f"tokens, positions and pages have the shapes {shapes}; they must be [B,T], [B,T] and [B,1].")
        for name, value, most in (("rows", rows, info["max_batch_size"]), ("tokens a row", length, info["prefill_chunk"])):
            if not 1 <= value <= most:
                raise ValueError(
                    f"A step has {value} {name}; these engines were built for 1 to {most}: build some with other limits."
                )
        _check_range("Token", tokens.masked_fill(positions < 0, 0), 0, info["vocab_size"])
        _check_range("Position", positions, -1, info["max_seq_len"])
        _check_range("Last position", positions[:, -1], 0, info["max_seq_len"])
        _check_range("Page", pages, 1, info["num_pages"])
        if len(set(pages[:, 0].tolist())) < rows:
            raise ValueError("Two rows of a step have the same page: every sequence needs its own.")


def _check_range(name: str, values: Tensor, least: int, end: int) -> None:
    low, high = (int(value) for value in values.aminmax())
    if low < least or high >= end:
        raise ValueError(f"{name} {low if low < least else high} is out of range: it must be at least {least} and below {end}.")


class TensorrtRunner:
    """The engines of rank 0 on one GPU."""

    def __init__(self, info: dict[str, Any], folder: Path) -> None:
        if info["ranks"] > 1:
            raise RuntimeError(f"These engines are of {info['ranks']} ranks, and this runtime runs one: build with parallel.tp=1.")
        _check_gpu(info)
        self._trt, self._info = _library(info), info
        self._logger = self._trt.Logger(self._trt.Logger.WARNING)
        self._runtime = self._trt.Runtime(self._logger)
        self._stream = torch.cuda.Stream()
        shape, dtype = (info["max_batch_size"], 1, info["max_seq_len"], info["latent_dim"]), getattr(torch, info["dtype"])
        self._caches = {f"cache.{i}": torch.zeros(shape, dtype=dtype, device="cuda") for i in range(info["num_layers"])}
        self._weights = _load_weights(info, folder)
        self._networks = {
            form: [_Network(self, folder, each) for each in _segments(info, form)] for form in ("absorbed", "expanded")
        }
        self._graph: _DecodeGraph | None = None

    def run(self, form: str, rows: slice, tokens: Tensor, starts: Tensor, wanted: Tensor) -> Tensor:
        """See `Runner`."""
        with torch.cuda.stream(self._stream):
            if form == "absorbed" and tokens.shape == (self._info["max_batch_size"], 1):
                self._graph = self._graph or _DecodeGraph(self, tokens, starts, wanted)
                logits = self._graph(tokens, starts)
            else:
                logits = self.enqueue(form, rows, *(value.to("cuda") for value in (tokens, starts, wanted)))
        self._stream.synchronize()
        return logits

    def enqueue(self, form: str, rows: slice, tokens: Tensor, starts: Tensor, wanted: Tensor) -> Tensor:
        """All segments in order, on this runner's stream; tensors are on the GPU."""
        count = tokens.shape[1]
        feeds = {name: cache[rows] for name, cache in self._caches.items()} | self._weights
        positions = (starts[:, None] + torch.arange(count, device="cuda", dtype=torch.int32)).contiguous()
        feeds |= {"tokens": tokens, "starts": starts, "positions": positions, "logit_rows": wanted}
        if form == "expanded":
            feeds["keys"] = torch.tensor([int(starts.max()) + count], dtype=torch.int64)  # read on the host
        for network in self._networks[form]:
            outputs = network.enqueue(feeds, self._stream)
            feeds["hidden"] = outputs.get("states", feeds.get("hidden"))
        return outputs["logits"]


class _Network:
    """One engine and its execution context."""

    def __init__(self, runner: TensorrtRunner, folder: Path, facts: dict[str, Any]) -> None:
        self._facts = facts
        plan = (folder / facts["file"]).read_bytes()
        self._engine = runner._runtime.deserialize_cuda_engine(plan)
        if self._engine is None:
            raise RuntimeError(
                f"{facts['file']} cannot be opened by this {runner._info['library']}: build it again with this version."
            )
        self._context = self._engine.create_execution_context()

    def enqueue(self, feeds: dict[str, Tensor], stream: Any) -> dict[str, Tensor]:
        """Bind and start; outputs are new tensors, but caches are the inputs themselves."""
        for name, facts in self._facts["inputs"].items():
            value = feeds[facts.get("binds", name)]
            if value.device.type == "cuda" and -1 in facts["shape"]:
                self._must(self._context.set_input_shape(name, tuple(value.shape)), f"takes {name} of shape {list(value.shape)}")
            self._must(self._context.set_tensor_address(name, value.data_ptr()), f"binds {name}")
        outputs = {}
        for name, facts in self._facts["outputs"].items():
            if name.startswith("present."):
                outputs[name] = feeds[facts.get("binds", name).replace("present", "cache")]
            else:
                outputs[name] = torch.empty(
                    tuple(self._context.get_tensor_shape(name)), dtype=DTYPES[facts["dtype"]], device="cuda"
                )
            self._must(self._context.set_tensor_address(name, outputs[name].data_ptr()), f"binds {name}")
        self._must(self._context.execute_async_v3(stream.cuda_stream), "runs")
        return outputs

    def _must(self, done: bool, what: str) -> None:
        if not done:
            raise RuntimeError(f"{self._facts['file']} no longer {what}: TensorRT's reason is in the server's log.")


class _DecodeGraph:
    """A decode step of all rows, captured."""

    def __init__(self, runner: TensorrtRunner, tokens: Tensor, starts: Tensor, wanted: Tensor) -> None:
        self._inputs = [value.to("cuda") for value in (tokens, starts, wanted)]
        rows = slice(0, len(tokens))
        for _ in range(2):
            runner.enqueue("absorbed", rows, *self._inputs)
        runner._stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=runner._stream):
            self._logits = runner.enqueue("absorbed", rows, *self._inputs)

    def __call__(self, tokens: Tensor, starts: Tensor) -> Tensor:
        """Copy the inputs in, replay, and copy the logits out."""
        self._inputs[0].copy_(tokens)
        self._inputs[1].copy_(starts)
        self._graph.replay()
        return self._logits.clone()


def _segments(info: dict[str, Any], form: str) -> list[dict[str, Any]]:
    """The engines of the model in one form, in the order of layers; not the MTP layer's."""
    chosen = [each for each in info["engines"].values() if each["form"] == form and each["first_layer"] < info["num_layers"]]
    return sorted(chosen, key=lambda each: each["first_layer"])


def _load_weights(info: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    """Weights that are inputs; empty where engines carry theirs."""
    from safetensors.torch import load_file

    return {name: value for file in info["weight_files"] for name, value in load_file(folder / file, device="cuda").items()}


def _check_gpu(info: dict[str, Any]) -> None:
    """Refuse a machine without a GPU that the engines cover."""
    built = " or ".join(info["targets"])
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"These engines were built for {built}, but torch sees no GPU here: check nvidia-smi, and torch's build."
        )
    major, minor = torch.cuda.get_device_capability()
    if f"SM{major}{minor}" not in info["targets"]:
        name = torch.cuda.get_device_name()
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
