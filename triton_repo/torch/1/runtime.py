"""Runs a compiled engine: the packages of both forms, their shared weights, and the paged latent KV cache.

It needs torch, safetensors and the engine's folder, and nothing of the pipeline that built it: plugins that the engine
calls lie in its `ops/`, kernels included, and are loaded before the packages, which look them up. The weights are mapped
from their file, so several servers of one machine share its pages. A package called before it has weights, or with
weights of another type, would end the process without a word (torch 2.13); so names, types and shapes are checked here.

On CUDA a step of decoding, or of one prompt's chunk, is captured in a CUDA graph the second time that its size occurs, and replayed
from then on. Sizes are rounded up, so that there are few: a power of two rows of one token, or at most a quarter more tokens
and pages of a chunk (`_rounded`). Chunks of more than GRAPH_TOKENS keep a GPU busy while the host launches them. An engine launches
and captures on one stream: after a few switches between two every kernel begins later (`plugins/timing.py`; forks inside a graph
do not count).

Shape legend: B rows, T tokens a row, P pages a row, V vocabulary.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

__all__ = ["CompiledEngine"]

Form = Callable[[list[Tensor]], Tensor]
Size = tuple[int, int, int]
"""Rows, tokens a row, pages a row."""
GRAPH_TOKENS, MOST_GRAPHS = 1024, 128


class CompiledEngine:
    """The compiled decoder and its paged latent KV cache. Page 0 is scratch: give it to no sequence."""

    def __init__(self, info: dict[str, Any], forms: dict[str, Form]) -> None:
        self.info, self.forms = info, forms
        self.device = torch.device(info["device"])
        shape, dtype = (info["num_pages"], info["page_size"], info["latent_dim"]), getattr(torch, info["kv_dtype"])
        self.caches = [torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(info["num_layers"])]
        self.threads = info["threads"] or min(len(os.sched_getaffinity(0)), 8)
        cuda = self.device.type == "cuda"
        self._stream, self._pool = (torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()) if cuda else (None, None)
        self._graphs: dict[Size, StepGraph] = {}
        self._local = threading.local()

    @classmethod
    def load(cls, folder: Path, weights: dict[str, Tensor] | None = None) -> CompiledEngine:
        """Open an engine folder on the machine that serves it; `weights`: those of its file, if they are loaded."""
        folder = Path(folder)
        info = json.loads((folder / "engine.json").read_text(encoding="utf-8"))
        if "kv_dtype" not in info:
            raise RuntimeError(f"{folder / 'engine.json'} has no kv_dtype: the engine is of an older version, so build it again.")
        _check_machine(info)
        _load_ops(folder / "ops", info["plugins"])
        weights = weights or load_file(folder / "weights.safetensors", device=info["device"])
        _check_weights(info["weights"], weights)
        open_form = _open_package if info["compiler"] == "aoti" else _open_graph
        return cls(info, {form: open_form(folder / f"{form}.pt2", weights) for form in info["forms"]})

    @torch.inference_mode()
    def step(self, tokens: Tensor, positions: Tensor, pages: Tensor) -> Tensor:
        """Write the tokens [B, T] at their positions through the page table [B, P]; logits [B, V] of each row's last token.

        Rows may be padded on the left with position -1: ignored. Else a row's positions rise by one. One thread at a time; on CUDA
        the engine's stream becomes its current one, unless it has one that is not the default.
        """
        self._check(tokens, positions, pages)
        self._settle()
        # Guard: the compiled code takes any memory for contiguous int64, and says nothing when it is not.
        inputs = [value.to(torch.int64).contiguous() for value in (tokens.masked_fill(positions < 0, 0), positions, pages)]
        size = self._captured_size(*tokens.shape, pages.shape[1])
        if size is None:
            return self._form(*tokens.shape, pages.shape[1])([*(value.to(self.device) for value in inputs), *self.caches])
        if size not in self._graphs:
            self._graphs[size] = StepGraph(self._form(*size), size, self.caches, self._pool)
        return self._graphs[size](inputs)[: len(tokens)]

    @property
    def most_pages(self) -> int:
        """Of a row."""
        return -(-self.info["max_seq_len"] // self.info["page_size"])

    def form_of(self, rows: int, length: int, pages: int) -> str:
        """Which form of the graph computes a step: absorbed or expanded."""
        long = rows == 1 and 1 < length >= self.info["expanded_from"][pages - 1]
        return "expanded" if long and "expanded" in self.forms else "absorbed"

    def _form(self, rows: int, length: int, pages: int) -> Form:
        return self.forms[self.form_of(rows, length, pages)]

    def _captured_size(self, rows: int, length: int, pages: int) -> Size | None:
        """That of the graph for a step; None if it is to run plainly."""
        info = self.info
        if self.device.type != "cuda" or min(rows, length) > 1 or length > GRAPH_TOKENS:
            return None
        if length == 1:
            return min(1 << (rows - 1).bit_length(), info["max_batch_size"]), 1, self.most_pages
        size = 1, _rounded(length, info["prefill_chunk"]), _rounded(pages, self.most_pages)
        return size if size in self._graphs or len(self._graphs) < MOST_GRAPHS else None

    def _settle(self) -> None:
        """The calling thread's number of OpenMP threads, and its stream: nothing on the default one can be captured."""
        if not getattr(self._local, "settled", False):
            torch.set_num_threads(self.threads)
            if self._stream is not None:
                torch.cuda.synchronize(self.device)  # weights and caches are there
            self._local.settled = True
        if self._stream is not None and (now := torch.cuda.current_stream(self.device)) == torch.cuda.default_stream(self.device):
            self._stream.wait_stream(now)
            torch.cuda.set_stream(self._stream)

    def _check(self, tokens: Tensor, positions: Tensor, pages: Tensor) -> None:
        """Refuse what the compiled code would read or write out of bounds."""
        info, (rows, length) = self.info, tokens.shape
        if positions.shape != tokens.shape or pages.shape[0] != rows:
            shapes = [list(value.shape) for value in (tokens, positions, pages)]
            raise ValueError(f"tokens, positions and pages have the shapes {shapes}; they must be [B,T], [B,T] and [B,P].")
        for name, value, most in (
            ("rows", rows, info["max_batch_size"]),
            ("tokens a row", length, info["prefill_chunk"]),
            ("pages a row", pages.shape[1], self.most_pages),
        ):
            if not 1 <= value <= most:
                raise ValueError(f"A step has {value} {name}; this engine was built for 1 to {most}: build one with other limits.")
        _check_range("Token", tokens.masked_fill(positions < 0, 0), 0, info["vocab_size"])
        _check_range("Position", positions, -1, min(info["max_seq_len"], pages.shape[1] * info["page_size"]))
        _check_range("Last position", positions[:, -1], 0, info["max_seq_len"])
        _check_range("Page", pages, 0, info["num_pages"])


class StepGraph:
    """A step of a size: run once, which loads its kernels, then captured. Unused rows, tokens and pages are padding.

    `pool`: memory that graphs of one stream use one after the other.
    """

    def __init__(self, form: Form, size: Size, caches: list[Tensor], pool: Any = None) -> None:
        rows, length, pages = size
        widths, self.blanks = (length, length, pages), (0, -1, 0)
        self.inputs = [
            torch.full((rows, width), blank, device=caches[0].device) for width, blank in zip(widths, self.blanks, strict=True)
        ]
        self._call = lambda: form([*self.inputs, *caches])
        self._ran, self._pool, self.graph = False, pool, None

    def __call__(self, inputs: list[Tensor]) -> Tensor:
        """Copy the inputs in, replay, and copy the logits out."""
        (rows, length), pages = inputs[0].shape, inputs[2].shape[1]
        for static, blank in zip(self.inputs, self.blanks, strict=True):
            static.fill_(blank)
        for static, value in zip(self.inputs[:2], inputs[:2], strict=True):
            static[:rows, -length:].copy_(value)
        self.inputs[2][:rows, :pages].copy_(inputs[2])
        if not self._ran:
            self._ran = True
            return self._call()
        if self.graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
                self.logits = self._call()
            self.graph = graph  # only of a capture that succeeded
        self.graph.replay()
        return self.logits.clone()


def _rounded(size: int, most: int) -> int:
    """Up to a quarter of a power of two."""
    unit = max(1, (1 << (size - 1).bit_length()) // 8)
    return min(-(-size // unit) * unit, most)


def _load_ops(folder: Path, plugins: dict[str, Any]) -> None:
    """Register the ops of the plugins, and let them find the kernels that were compiled with the engine."""
    if not plugins["taken"]:
        return
    sys.path.insert(0, str(folder))
    try:
        for name in plugins["taken"]:
            importlib.import_module(f"plugins.{name}.op")
        nvrtc = importlib.import_module("plugins.nvrtc")
    finally:
        sys.path.remove(str(folder))
    for name, digest in plugins["sources"].items():
        if name.startswith("plugins/"):
            _check_source(Path(str(nvrtc.__file__)).parents[1] / name, digest)
    nvrtc.carried(folder / "kernels")


def _check_source(file: Path, digest: str) -> None:
    """A process can have one version of an op, of its kernels, and of what it imports."""
    if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
        raise RuntimeError(
            f"{file} is not the version that this engine was built with: serve it in a process without that, or build it again."
        )


def _open_package(path: Path, weights: dict[str, Tensor]) -> Form:
    """An AOTInductor package. This loader is the one of torch's C++ API; `aoti_load_package` around it starts compilers."""
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, -1)
    _check_names(path.name, set(loader.get_constant_fqns()), set(weights))
    loader.load_constants(weights, False, True, True)

    def call(inputs: list[Tensor]) -> Tensor:
        return loader.run(inputs)[0]

    return call


def _open_graph(path: Path, weights: dict[str, Tensor]) -> Form:
    """An exported graph, interpreted."""
    module = torch.export.load(path).module()
    _check_names(path.name, set(module.state_dict()), set(weights))
    module.load_state_dict(weights, assign=True)

    def call(inputs: list[Tensor]) -> Tensor:
        return module(*inputs[:3], inputs[3:])

    return call


def _check_machine(info: dict[str, Any]) -> None:
    """Refuse another torch than the engine was compiled with, or a processor that lacks its instructions."""
    built, have = info["torch"], torch.__version__.partition("+")[0]
    if built.split(".")[:2] != have.split(".")[:2]:
        raise RuntimeError(
            f"This engine was compiled with torch {built}, but torch {have} is installed: install {built}, or build it again."
        )
    if missing := sorted(set(info["cpu_features"]) - _cpu_features()):
        names = ", ".join(missing)
        raise RuntimeError(
            f"This engine was compiled for a processor with {names}, which this one lacks: build it on this machine."
        )
    if info["device"] == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            "This engine was compiled for a CUDA GPU, but torch sees none here: check nvidia-smi, and torch's build."
        )


def _cpu_features() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return set(next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), []))


def _check_weights(expected: dict[str, list[Any]], weights: dict[str, Tensor]) -> None:
    _check_names("engine.json", set(expected), set(weights))
    for name, (dtype, shape) in expected.items():
        found = [str(weights[name].dtype).removeprefix("torch."), list(weights[name].shape)]
        if found != [dtype, shape]:
            raise RuntimeError(
                f"{name} in weights.safetensors is {found}, but the engine needs {[dtype, shape]}: copy the engine again, whole."
            )


def _check_names(file: str, needed: set[str], have: set[str]) -> None:
    if needed != have:
        odd = sorted(needed ^ have)
        raise RuntimeError(
            f"{file} and weights.safetensors differ in {len(odd)} weights, {odd[0]} among them: copy the engine again, whole."
        )


def _check_range(name: str, values: Tensor, least: int, end: int) -> None:
    low, high = (int(value) for value in values.aminmax())
    if low < least or high >= end:
        raise ValueError(f"{name} {low if low < least else high} is out of range: it must be at least {least} and below {end}.")
