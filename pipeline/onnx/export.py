"""From a factory to model.onnx and what torch computes: `python -m pipeline.onnx.export REQUEST`, run by `command.py`.

Nodes get the names that layers have in native engines, path of the module and kind: `layers.0.attn.q_b.MatMul_17`. Weights lie in
model.onnx.data, written one by one. What the exporter notes about source lines is left out: it names folders of this machine.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from pipeline.core.errors import ConfigError, StageError
from pipeline.core.events import EventWriter
from pipeline.engines.tensorrt.worker import serve
from pipeline.engines.torch.export import accept_float32_groups
from pipeline.onnx import CASES, MODEL, few
from pipeline.onnx.operators import TRANSLATIONS

__all__ = ["Asked", "export"]

LARGEST = 2**40
"""Sizes beyond this are no bound; torch has an infinity of its own."""
SCOPES = "pkg.torch.onnx.name_scopes"


class Asked:
    """What a factory returned."""

    def __init__(self, made: Any) -> None:
        parts = made if isinstance(made, tuple) else ()
        if len(parts) not in (2, 3) or not isinstance(parts[0], torch.nn.Module) or not isinstance(parts[1], tuple):
            raise ConfigError(
                "The factory must return (module, args) or (module, args, dynamic_shapes), as torch.export.export takes them: a "
                f"torch.nn.Module, a tuple, and what is open; it returned {_kinds(made)}."
            )
        self.module, self.args = parts[0].eval(), parts[1]
        self.shapes = parts[2] if len(parts) == 3 else None

    def outputs(self, args: tuple[Any, ...]) -> dict[str, torch.Tensor]:
        """What the module computes, by name: keys and places joined by _."""
        with torch.no_grad():
            found = self.module(*pytree.tree_map(lambda leaf: leaf.clone() if torch.is_tensor(leaf) else leaf, args))
        leaves, _ = pytree.tree_flatten_with_path(found)
        if others := [_name(path) for path, leaf in leaves if leaf is not None and not torch.is_tensor(leaf)]:
            raise ConfigError(f"The module returns {', '.join(others)} beside tensors, and ONNX has nothing else: leave it out.")
        return {_name(path): leaf for path, leaf in leaves if leaf is not None}


def _kinds(made: Any) -> str:
    return f"({', '.join(type(part).__name__ for part in made)})" if isinstance(made, tuple) else type(made).__name__


def _name(path: Sequence[Any]) -> str:
    """logits, present_0; a lone tensor is `output`."""
    words = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path]
    name = re.sub(r"\W", "_", "_".join(words))
    return name if re.match(r"[A-Za-z]", name) else f"output_{name}".rstrip("_")


def _factory(words: str, paths: Sequence[str]) -> Callable[..., Any]:
    """MODULE:FACTORY, found from the folder of the command, too."""
    sys.path[:0] = paths
    module, _, name = words.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{words} cannot be imported: {error}. Write MODULE:FACTORY, as python finds it from here.") from error


def _asked(request: dict[str, Any]) -> Asked:
    make = _factory(request["factory"], request["paths"])
    try:
        return Asked(make(**request["arguments"]))
    except ConfigError:
        raise
    except Exception as error:
        raise StageError(f"{request['factory']} failed: {_told(error)}") from error


def _told(error: BaseException) -> str:
    """Kind, first paragraph and place of an error of somebody else's."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split("\n\n")[0].split())[:1000]
    return f"{type(error).__name__}: {text or 'no message'} ({Path(frame.filename).name}:{frame.lineno})"


def _program(asked: Asked) -> torch.export.ExportedProgram:
    """The graph, with what `dynamic_shapes` names left open.

    Raises:
        StageError: torch cannot record the module, or the module writes what it was given.
    """
    accept_float32_groups()
    try:
        with torch.no_grad():
            program = torch.export.export(asked.module, asked.args, dynamic_shapes=asked.shapes, strict=False)
            program = program.run_decompositions({})
    except Exception as error:
        raise StageError(f"torch.export does not record the module: {_told(error)}") from error
    signature = program.graph_signature
    if written := [*signature.user_inputs_to_mutate.values(), *signature.buffers_to_mutate.values()]:
        raise StageError(
            f"The module writes {', '.join(sorted(written))} in place, which ONNX cannot say: let it return the new values instead "
            "(the runtime may bind input and output to the same memory)."
        )
    return program


def _inputs(program: torch.export.ExportedProgram, asked: Asked) -> dict[str, tuple[torch.Tensor, list[list[int | None]]]]:
    """Name -> the example and [least, usual, largest] shapes; None where a dimension has no upper bound."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    leaves = pytree.tree_leaves(asked.args)
    named = zip(program.graph_signature.user_inputs, leaves, strict=True)
    return {
        str(name): (leaf, [[_bound(program, dim, place) for dim in values[name].shape] for place in (min, None, max)])
        for name, leaf in named
        if torch.is_tensor(leaf)
    }  # fmt: skip


def _bound(program: torch.export.ExportedProgram, dim: Any, place: Callable[..., int] | None) -> int | None:
    """Least or largest size of a dimension, which may be an expression like 2 * B; the example's where `place` is None."""
    if isinstance(dim, int):
        return dim
    if place is None:
        return int(dim.node.hint)
    ends = []
    for end in ("lower", "upper"):
        known = {symbol: getattr(program.range_constraints[symbol], end) for symbol in dim.node.expr.free_symbols}
        if any(value > LARGEST for value in known.values()):
            return None if place is max else ends[0]
        ends.append(int(dim.node.expr.subs(known)))
    return place(ends)


def _cases(program: torch.export.ExportedProgram, asked: Asked, folder: Path) -> Iterator[str]:
    """Write inputs and outputs of the example, and of one with an element less of each open dimension; a sentence about each that
    could not be."""
    inputs = _inputs(program, asked)
    for number, shrink in enumerate((0, 1)):
        flat, spec = pytree.tree_flatten(asked.args)
        names = [str(name) for name in program.graph_signature.user_inputs]
        cut = [_cut(leaf, inputs[name][1], shrink) if name in inputs else leaf for name, leaf in zip(names, flat, strict=True)]
        if shrink and all(new.shape == old.shape for new, old in zip(cut, flat, strict=True) if torch.is_tensor(old)):
            return
        try:
            found = asked.outputs(pytree.tree_unflatten(cut, spec))
            kept = {f"in.{name}": leaf for name, leaf in zip(names, cut, strict=True) if name in inputs}
            kept |= {f"out.{name}": leaf for name, leaf in found.items()}
            np.savez(folder / CASES.format(number), **{name: leaf.detach().numpy() for name, leaf in kept.items()})
        except ConfigError:
            raise
        except TypeError as error:
            yield f"onnxruntime was not asked: {error}"
            return
        except Exception as error:
            if not shrink:
                raise StageError(f"The module does not run on its example: {_told(error)}") from error
            yield f"not compared at another size: {_told(error)}"


def _cut(leaf: torch.Tensor, ranges: list[list[int | None]], shrink: int) -> torch.Tensor:
    """The tensor with `shrink` elements less of each open dimension that allows it."""
    for axis, (least, usual, most) in enumerate(zip(*ranges, strict=True)):
        if least != most and usual is not None and least is not None and usual - shrink >= least:
            leaf = leaf.narrow(axis, 0, usual - shrink)
    return leaf


def _converted(program: torch.export.ExportedProgram, inputs: Sequence[str], outputs: Sequence[str], opset: int) -> Any:
    """The ONNX program.

    Raises:
        StageError: it has no form of an operator, which is named with its place.
    """
    try:
        return torch.onnx.export(
            program, opset_version=opset, dynamo=True, verbose=False, input_names=list(inputs), output_names=list(outputs),
            custom_translation_table=TRANSLATIONS,
        )  # fmt: skip
    except Exception as error:
        causes: list[BaseException] = [error]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        missing = re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)', overload='(\w+)'", str(causes[-1]))
        if missing is None:
            raise StageError(f"torch.onnx cannot convert the module: {_told(causes[-1])}") from error
        operator = ".".join(missing.groups())
        raise StageError(f"ONNX has no form of {operator}{_users(program, operator)}: compute it otherwise.") from error


def _users(program: torch.export.ExportedProgram, operator: str) -> str:
    """Nodes of that operator, with the paths of their modules; "" where the converter made it of others."""
    found = []
    for node in program.graph.nodes:
        if str(node.target) == operator:
            path, _ = list((node.meta.get("nn_module_stack") or {"": ("", "")}).values())[-1]
            found.append(f"{node.name} in {path or 'the module itself'}")
    return f" ({few(found)})" if found else ""


def _rename(model: Any) -> None:
    """Names by module and kind, and no notes but the classes of modules."""
    path = ""
    for number, node in enumerate(model.graph):
        scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "[]"))
        path = scopes[-2] if len(scopes) > 1 and not scopes[-2].startswith("_") else path
        node.name = f"{path}.{node.op_type}_{number}".lstrip(".")
    for item in [model, model.graph, *model.graph, *(value for node in model.graph for value in node.outputs)]:
        for key in [key for key in item.metadata_props if key != "namespace"]:
            del item.metadata_props[key]


def export(request: dict[str, Any], folder: Path, events: EventWriter, stop: list[int]) -> dict[str, Any]:
    """Write the model and the cases; say what it is."""
    torch.set_num_threads(1)
    asked = _asked(request)
    program = _program(asked)
    notes = list(_cases(program, asked, folder))
    inputs = _inputs(program, asked)
    outputs = [f"{name}_out" if name in inputs else name for name in asked.outputs(asked.args)]
    converted = _converted(program, list(inputs), outputs, request["opset"])
    _rename(converted.model)
    converted.save(folder / MODEL, external_data=True)
    kinds = {name: str(leaf.dtype).removeprefix("torch.") for name, (leaf, _) in inputs.items()}
    return {
        "notes": notes,
        "comparable": (folder / CASES.format(0)).exists(),
        "inputs": {name: {"dtype": kinds[name], "range": shapes} for name, (_, shapes) in inputs.items()},
        "outputs": outputs,
        "operators": dict(sorted(Counter(node.op_type for node in converted.model.graph).items())),
        "parameters": sum(value.numel() for value in program.state_dict.values()),
        "weight_bytes": sum(value.nbytes for value in program.state_dict.values()),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(serve(Path(sys.argv[1]), {"export": export}))
