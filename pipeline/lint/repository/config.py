"""One config.pbtxt by itself: what the server refuses, and what it loads though it means something else."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

from tritonclient.grpc import model_config_pb2 as pb

from pipeline.lint.base import ERROR, NOTE, WARNING, Fault, Place, Rule
from pipeline.lint.repository.subject import RUN, Model, tensors

__all__ = ["RULES"]

MUST_FILL = ("triton_backend", "tokenizer_dir", "batching_strategy")
"""Quoted variables of NVIDIA's templates without which nothing works; others count as unset when they are not filled."""
BACKENDS = (
    "python", "tensorrtllm", "vllm", "tensorrt", "onnxruntime", "pytorch", "openvino", "dali", "identity", "repeat", "square",
    "fil", "tensorflow",
)  # fmt: skip
"""Those of NVIDIA's images."""
STREAMING = ("stream", "streaming")
PARAMETER = re.compile(r'\bparameters\s*:?\s*\{\s*key\s*:?\s*"([^"]*)"|\bparameters\s*:?\s*\[')


def _placeholder(model: Model) -> Iterator[Fault]:
    for item in model.placeholders:
        if not item.quoted:
            reason = f"{item.text} is a placeholder that nobody filled: the server cannot parse the file"
            yield Fault(model.at(re.escape(item.text), item.text), reason)


def _must_fill(model: Model) -> tuple[str, ...]:
    """Other models name the engine's folder as well, for images only."""
    return (*MUST_FILL, "engine_dir") if model.name == "tensorrt_llm" or model.config.backend == "tensorrtllm" else MUST_FILL


def _required(model: Model) -> Iterator[Fault]:
    for item in model.placeholders:
        if item.quoted and item.text.strip("${}") in _must_fill(model):
            reason = f"{item.text} is a placeholder that nobody filled: the file parses, and the model fails or does nothing useful"
            yield Fault(model.at(re.escape(item.text), item.text), reason)


def _unset(model: Model) -> Iterator[Fault]:
    for item in model.placeholders:
        if item.quoted and item.text.strip("${}") not in _must_fill(model):
            reason = f"{item.text} is a placeholder that nobody filled: the server loads it as text, NVIDIA's backend as unset"
            yield Fault(model.at(re.escape(item.text), item.text), reason)


def _parse(model: Model) -> Iterator[Fault]:
    if model.broken and not any(not item.quoted for item in model.placeholders):
        found = re.match(r"(\d+):(\d+)\s*:\s*(.*)", model.broken, re.DOTALL)
        text = found[3] if found else model.broken
        yield Fault(Place(model.at().file, int(found[1]) if found else None), f"it cannot be parsed: {' '.join(text.split())}")


def _twice(model: Model) -> Iterator[Fault]:
    counts = Counter(key for key in PARAMETER.findall(model.text) if key)
    for key in (key for key, count in counts.items() if count > 1):
        yield Fault(model.at_parameter(key), f"parameter {key} is given twice, and the last one wins")


def _no_backend(model: Model) -> Iterator[Fault]:
    if model.understood and not (model.config.backend or model.config.platform):
        yield Fault(model.at(), f"model {model.name}: no backend is set")


def _backend(model: Model) -> Iterator[Fault]:
    backend = model.config.backend
    if backend and backend not in BACKENDS and "${" not in backend and not (model.folder / f"libtriton_{backend}.so").is_file():
        yield Fault(model.at(r"\bbackend\b"), f"backend '{backend}' is in none of NVIDIA's images")


def _field(model: Model) -> Iterator[Fault]:
    if model.target.triton and model.understood:
        from pipeline.triton.releases import field_release, refused_fields, release

        held = release(model.target.triton)
        for path in refused_fields(model.config, held.tag):
            reason = f"{path} came with Triton {field_release(path)}: {held.tag} ({held.server}) refuses the whole file"
            yield Fault(model.at(rf"\b{path.rpartition('.')[2]}\b", path), reason)


def _policy(model: Model) -> Iterator[Fault]:
    """An ensemble takes its steps' policy."""
    config = model.config
    streams = [tensor.name for tensor in config.input if tensor.name in STREAMING]
    own = config.backend == "python" and model.settings is None
    if streams and own and not config.HasField("model_transaction_policy"):
        reason = f"model {model.name}: model_transaction_policy is missing, so {streams[0]} gets one response, whatever it asks"
        yield Fault(model.at(), reason)


def _instances(model: Model) -> Iterator[Fault]:
    for group in model.config.instance_group:
        if group.count < 1:
            reason = f"model {model.name}: instance_group count {group.count} is loaded as if it were not there"
            yield Fault(model.at(r"\bcount\b", "instance_group.count"), reason)


def _batch(model: Model) -> Iterator[Fault]:
    if model.config.max_batch_size < 0:
        yield Fault(model.at(r"\bmax_batch_size\b"), f"max_batch_size {model.config.max_batch_size} is below 0")


def _preferred(model: Model) -> Iterator[Fault]:
    most = model.config.max_batch_size
    for size in model.config.dynamic_batching.preferred_batch_size:
        if size > most:
            place = model.at(r"\bpreferred_batch_size\b", "dynamic_batching.preferred_batch_size")
            yield Fault(place, f"preferred_batch_size {size} exceeds max_batch_size {most}")


def _tensor_twice(model: Model) -> Iterator[Fault]:
    for kind in ("input", "output"):
        counts = Counter(tensor.name for which, tensor in tensors(model.config) if which == kind)
        for name in (name for name, count in counts.items() if count > 1):
            yield Fault(model.at_tensor(name, 1), f"model {model.name}: {kind} tensor {name} is declared twice")


def _untyped(model: Model) -> Iterator[Fault]:
    for kind, tensor in tensors(model.config):
        if tensor.data_type == pb.TYPE_INVALID:
            yield Fault(model.at_tensor(tensor.name), f"{kind} {tensor.name} has no data_type")


def _dims(model: Model) -> Iterator[Fault]:
    for kind, tensor in tensors(model.config):
        wrong = [size for size in tensor.dims if size < 1 and size != -1]
        if wrong:
            yield Fault(model.at_tensor(tensor.name), f"{kind} {tensor.name} has dims {list(tensor.dims)}: {wrong[0]} is no size")
        elif not tensor.dims:
            yield Fault(model.at_tensor(tensor.name), f"{kind} {tensor.name} has no dims")


def _syntax(model: Model) -> Iterator[Fault]:
    for file, tree in model.code.items():
        if isinstance(tree, SyntaxError):
            yield Fault(Place(file, tree.lineno), f"{file.name} is no Python: {tree.msg}")


def _no_class(model: Model) -> Iterator[Fault]:
    for file, tree in model.code.items():
        if model.config.backend == "python" and file.name == model.entry and isinstance(tree, ast.Module):
            nodes = list(ast.walk(tree))
            names = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
            names |= {item.asname or item.name for node in nodes if isinstance(node, ast.ImportFrom) for item in node.names}
            if "TritonPythonModel" not in names:
                yield Fault(Place(file), f"{file.name} has no class TritonPythonModel")


def _logger(model: Model) -> Iterator[Fault]:
    from pipeline.triton.releases import python_backend

    known = python_backend()["logger"]
    for file, tree in model.code.items():
        for node in ast.walk(tree) if isinstance(tree, ast.Module) else ():
            called = node.attr if isinstance(node, ast.Attribute) and _is_logger(node.value) else ""
            if called.startswith("log") and called not in known:
                yield Fault(Place(file, node.lineno), f"pb_utils.Logger has no {called}: AttributeError when the line is reached")


def _is_logger(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "Logger"


def _responses(model: Model) -> Iterator[Fault]:
    """Over all files of the version: the sender may be asked for in another one."""
    trees = [tree for tree in model.code.values() if isinstance(tree, ast.Module)]
    if model.config.backend != "python" or not trees or not model.config.model_transaction_policy.decoupled:
        return
    names = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    if "get_response_sender" not in names:
        reason = f"model {model.name} is decoupled, but its code never takes a response sender: execute must return None there"
        yield Fault(model.at(r"\bdecoupled\b"), reason)


FILL = "write its value; fill_template.py leaves what it does not know"
PBTXT = "triton-inference-server/common protobuf/model_config.proto"
RULES: tuple[Rule[Model], ...] = (
    Rule("triton/placeholder", ERROR, _placeholder, FILL,
         "tensorrtllm_backend issues 210, 501, 250, 393; triton-inference-server/server issues 6813, 8592"),
    Rule("triton/placeholder-required", ERROR, _required, FILL, "NVIDIA/TensorRT-LLM issues 1995, 1803"),
    Rule("triton/placeholder-unset", NOTE, _unset, "write its value, or remove the parameter",
         "tensorrtllm_backend docs/model_config.md"),
    Rule("triton/parse", ERROR, _parse, "correct the file, or package the model again", f"{PBTXT}; {RUN}"),
    Rule("triton/parameter-twice", ERROR, _twice, "keep one", "protobuf text format: the last key of a map wins"),
    Rule("triton/no-backend", ERROR, _no_backend, 'set backend, such as "python"', RUN),
    Rule("triton/backend", WARNING, _backend, "correct the name, or serve from an image that has it", RUN),
    Rule("triton/newer-field", ERROR, _field, "leave it out, or serve with a newer release",
         "triton-inference-server/common pull requests 126, 152"),
    Rule("triton/no-policy", WARNING, _policy, "say decoupled true or false", RUN),
    Rule("triton/instance-count", WARNING, _instances, "must be at least 1", RUN),
    Rule("triton/max-batch-size", ERROR, _batch, "set 0 (no batching) or more", RUN),
    Rule("triton/preferred-batch-size", ERROR, _preferred, "lower it, or raise max_batch_size", RUN),
    Rule("triton/tensor-twice", WARNING, _tensor_twice, "keep one of them", RUN),
    Rule("triton/data-type", ERROR, _untyped, "set data_type, such as TYPE_INT32", RUN),
    Rule("triton/dims", ERROR, _dims, "set each to 1 or more, or -1 for any", RUN),
    Rule("triton/code-syntax", ERROR, _syntax, "correct the line: the model cannot be loaded", RUN),
    Rule("triton/code-class", ERROR, _no_class, "name the model's class TritonPythonModel",
         "triton-inference-server/python_backend README"),
    Rule("triton/code-logger", WARNING, _logger, "use log_warn", f"{RUN}; triton-inference-server/python_backend pb_utils.Logger"),
    Rule("triton/code-responses", WARNING, _responses, "take the model.py of the image's release, or set decoupled false",
         "tensorrtllm_backend issue 488"),
)  # fmt: skip
