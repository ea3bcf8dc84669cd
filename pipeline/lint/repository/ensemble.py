"""Ensembles, and BLS models, which call others by name: everything between models that only shows at load, or at a request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tritonclient.grpc import model_config_pb2 as pb

from pipeline.engines.trtllm.fields import shown
from pipeline.lint.base import ERROR, WARNING, Fault, Place, Rule
from pipeline.lint.repository.subject import RUN, Model

__all__ = ["RULES"]

CALLED = ("tensorrt_llm_model_name", "tensorrt_llm_draft_model_name", "multimodal_encoders_name", "target_model", "model_name")
"""Parameters of BLS models that name a model of the same repository."""
STOPS = {"stop_words": "STOP_WORDS_IDS", "bad_words": "BAD_WORDS_IDS"}
"""Input of the ensemble -> output of preprocessing that must reach the engine."""


def _steps(model: Model) -> Iterator[tuple[Any, Model | None]]:
    """Each step with its model; None where the repository has none, or its config is not understood."""
    for step in model.config.ensemble_scheduling.step:
        found = model.siblings.get(step.model_name)
        yield step, found if found is not None and found.understood else None


def _known(model: Model) -> Iterator[tuple[Any, Model]]:
    """Steps whose model is understood."""
    yield from ((step, found) for step, found in _steps(model) if found is not None)


def _missing(model: Model) -> Iterator[Fault]:
    for step in model.config.ensemble_scheduling.step:
        if step.model_name not in model.siblings:
            reason = f"ensemble {model.name} has a step {step.model_name}, which is no model of this repository"
            yield Fault(_at(model, step), reason)


def _version(model: Model) -> Iterator[Fault]:
    for step, found in _steps(model):
        have = [version.name for version in found.versions] if found else []
        if step.model_version != -1 and (found is None or str(step.model_version) not in have):
            left_out = " (it is left out, which means 0)" if step.model_version == 0 else ""
            reason = f"step {step.model_name} asks for version {step.model_version}{left_out}; there is {', '.join(have) or 'none'}"
            yield Fault(_at(model, step), reason)


def _unknown_tensor(model: Model) -> Iterator[Fault]:
    for step, found in _known(model):
        for kind, mapping in (("input", step.input_map), ("output", step.output_map)):
            names = {tensor.name for tensor in getattr(found.config, kind)}
            for name in sorted(set(mapping) - names):
                yield Fault(_at(model, step), f"step {step.model_name} maps {kind} {name}, which that model does not have")


def _unmapped(model: Model) -> Iterator[Fault]:
    for step, found in _known(model):
        for tensor in found.config.input:
            if not tensor.optional and tensor.name not in step.input_map:
                yield Fault(_at(model, step), f"step {step.model_name} gets no {tensor.name}, an input that it requires")


def _unwritten(model: Model) -> Iterator[Fault]:
    steps = model.config.ensemble_scheduling.step
    if not steps:
        return
    there = {tensor.name for tensor in model.config.input} | {name for step in steps for name in step.output_map.values()}
    for step in steps:
        for name in sorted(set(step.input_map.values()) - there):
            yield Fault(_at(model, step), f"step {step.model_name} reads {name}, which no step writes")
    for tensor in model.config.output:
        if tensor.name not in there:
            yield Fault(model.at_tensor(tensor.name), f"output {tensor.name} is not written by any step")


def _unused(model: Model) -> Iterator[Fault]:
    read = _read(model)
    for tensor in model.config.input if model.config.ensemble_scheduling.step else ():
        if tensor.name not in read:
            yield Fault(model.at_tensor(tensor.name), f"input {tensor.name} is not used by any step")


def _read(model: Model) -> set[str]:
    """Tensors of the ensemble that a step takes."""
    return {name for step in model.config.ensemble_scheduling.step for name in step.input_map.values()}


def _written_twice(model: Model) -> Iterator[Fault]:
    seen: dict[str, str] = {}
    for step in model.config.ensemble_scheduling.step:
        for name in step.output_map.values():
            if name in seen:
                yield Fault(_at(model, step), f"{name} is written by {seen[name]} and by {step.model_name}")
            seen[name] = step.model_name


def _types(model: Model) -> Iterator[Fault]:
    for name, uses in _uses(model).items():
        kinds = {pb.DataType.Name(tensor.data_type): owner for owner, tensor, _ in uses}
        if len(kinds) > 1:
            said = ", ".join(f"{kind.removeprefix('TYPE_')} in {owner}" for kind, owner in kinds.items())
            yield Fault(model.at(rf'"{name}"', name), f"ensemble tensor {name} has two types: {said}")


def _shapes(model: Model) -> Iterator[Fault]:
    """-1 fits everything."""
    for name, uses in _uses(model).items():
        first_owner, first, batched = uses[0]
        shape = _shape(first, batched)
        for owner, tensor, batch in uses[1:]:
            other = _shape(tensor, batch)
            if len(shape) != len(other) or any(a != b for a, b in zip(shape, other, strict=True) if -1 not in (a, b)):
                reason = f"ensemble tensor {name} is {shape} in {first_owner}, but {other} in {owner} (with the batch)"
                yield Fault(model.at(rf'"{name}"', name), reason)
                break


def _uses(model: Model) -> dict[str, list[tuple[str, Any, bool]]]:
    """Ensemble tensor -> (model, its tensor, whether it has a batch) for everything that touches it."""
    uses: dict[str, list[tuple[str, Any, bool]]] = {}
    config = model.config
    if config.ensemble_scheduling.step:
        for tensor in (*config.input, *config.output):
            uses.setdefault(tensor.name, []).append((model.name, tensor, config.max_batch_size > 0))
    for step, found in _known(model):
        for mapping, kind in ((step.input_map, "input"), (step.output_map, "output")):
            by_name = {tensor.name: tensor for tensor in getattr(found.config, kind)}
            for theirs, ours in mapping.items():
                if theirs in by_name:
                    batched = found.config.max_batch_size > 0
                    uses.setdefault(ours, []).append((step.model_name, by_name[theirs], batched))
    return uses


def _shape(tensor: Any, batched: bool) -> list[int]:
    return [*([-1] if batched else []), *tensor.dims]


def _optional(model: Model) -> Iterator[Fault]:
    optional = {tensor.name for tensor in model.config.input if tensor.optional}
    for step, found in _known(model):
        required = {tensor.name for tensor in found.config.input if not tensor.optional}
        for theirs, ours in sorted(step.input_map.items()):
            if ours in optional and theirs in required:
                reason = f"{ours} is optional, but feeds {theirs} of {step.model_name}, which requires it: requests without it fail"
                yield Fault(model.at_tensor(ours), reason)


def _batches(model: Model) -> Iterator[Fault]:
    most = model.config.max_batch_size
    for step, found in _known(model):
        limit = found.config.max_batch_size
        if most > limit:
            yield Fault(
                model.at(r"\bmax_batch_size\b"),
                f"ensemble {model.name} allows batches of {most}, its step {step.model_name} of {limit}",
                f"set max_batch_size to {limit}" if limit else f"set max_batch_size of {step.model_name} to {most}",
            )


def _no_batch(model: Model) -> Iterator[Fault]:
    for step, found in _known(model):
        if model.config.max_batch_size == 0 and found.config.max_batch_size > 0:
            reason = (
                f"ensemble {model.name} has max_batch_size 0 over {step.model_name}, which batches: it loads, and clients must "
                "send the batch dimension themselves"
            )
            yield Fault(model.at(r"\bmax_batch_size\b", "max_batch_size"), reason)
            return


def _group(model: Model) -> Iterator[Fault]:
    if model.config.ensemble_scheduling.step and model.config.instance_group:
        yield Fault(model.at(r"\binstance_group\b"), f"ensemble {model.name} has an instance_group")


def _stops(model: Model) -> Iterator[Fault]:
    inputs = {tensor.name for tensor in model.config.input}
    read = _read(model)
    for name, ids in STOPS.items():
        writers = [step for step, found in _known(model) if ids in {tensor.name for tensor in found.config.output}]
        for step in writers if name in inputs else ():
            if step.output_map.get(ids) not in read:
                yield Fault(_at(model, step), f"{name} is taken, but {ids} of {step.model_name} reaches no step: it is ignored")


def _end_id(model: Model) -> Iterator[Fault]:
    for step, found in _known(model):
        if "end_id" in {tensor.name for tensor in found.config.input} and "end_id" not in step.input_map:
            yield Fault(_at(model, step), f"step {step.model_name} gets no end_id: it may run to max_tokens past the end of text")


def _decoupled(model: Model) -> Iterator[Fault]:
    """A model that calls others streams only what they stream."""
    for name in _called(model):
        other = model.siblings.get(name)
        if other is None or not other.understood or not model.config.HasField("model_transaction_policy"):
            continue
        ours, theirs = (one.config.model_transaction_policy.decoupled for one in (model, other))
        if ours != theirs:
            reason = f"decoupled is {shown(ours)} in {model.name}, {shown(theirs)} in {name}, which it calls: streams are lost"
            yield Fault(model.at(r"\bdecoupled\b"), reason)


def _called(model: Model) -> list[str]:
    named = [model.parameters[key] for key in CALLED if key in model.parameters]
    if model.name == "tensorrt_llm_bls" and not named:
        named = ["tensorrt_llm"]  # older templates have no parameter for it
    steps = [step.model_name for step in model.config.ensemble_scheduling.step if step.model_name == "tensorrt_llm"]
    return [name for name in dict.fromkeys([*named, *steps]) if name != model.name]


def _not_there(model: Model) -> Iterator[Fault]:
    for key in CALLED[:-1]:
        name = model.parameters.get(key)
        if name and name not in model.siblings:
            yield Fault(model.at_parameter(key), f"{model.name} calls {name}, which is no model of this repository")


def _one_at_a_time(model: Model) -> Iterator[Fault]:
    if CALLED[0] in model.parameters and model.count == 1 and "accumulate_tokens" in model.config.parameters:
        reason = f"{model.name} has one instance, and each blocks until its request is done: one request at a time"
        yield Fault(model.at(r"\bcount\b", "instance_group.count"), reason)


def _pieces(model: Model) -> Iterator[Fault]:
    """Of a token alone the space before it is lost."""
    streams = model.config.model_transaction_policy.decoupled
    if streams and model.parameters.get("accumulate_tokens", "").lower() == "false":
        place = model.at_parameter("accumulate_tokens")
        yield Fault(place, f"{model.name} streams, and decodes each token alone: spaces and split characters are lost")


def _tokenizers(model: Model) -> Iterator[Fault]:
    other = model.siblings.get("postprocessing")
    mine, theirs = (one.parameters.get("tokenizer_dir") if one else None for one in (model, other))
    if model.name == "preprocessing" and mine and theirs and mine != theirs:
        yield Fault(model.at_parameter("tokenizer_dir"), f"tokenizer_dir is {mine} here, {theirs} in postprocessing")


def _at(model: Model, step: Any) -> Place:
    return model.at(rf'model_name\s*:\s*"{step.model_name}"', f"ensemble_scheduling.step {step.model_name}")


RULES: tuple[Rule[Model], ...] = (
    Rule("ensemble/model", ERROR, _missing, "add the model, or correct its name", RUN),
    Rule("ensemble/version", ERROR, _version, "set model_version: -1, the newest",
         "triton-inference-server/server issues 5474, 5890"),
    Rule("ensemble/unknown-tensor", ERROR, _unknown_tensor, "correct the name in the map", RUN),
    Rule("ensemble/unmapped", ERROR, _unmapped, "map it, or make it optional in that model",
         f"{RUN}; tensorrtllm_backend issues 188, 227"),
    Rule("ensemble/unwritten", ERROR, _unwritten, "map an output of a step to it", RUN),
    Rule("ensemble/unused", ERROR, _unused, "map it to a step, or remove it", RUN),
    Rule("ensemble/written-twice", ERROR, _written_twice, "give one of them another name", RUN),
    Rule("ensemble/type", ERROR, _types, "declare one type", RUN),
    Rule("ensemble/shape", ERROR, _shapes, "declare one shape", RUN),
    Rule("ensemble/optional", ERROR, _optional, "make both optional, or both required",
         f"{RUN}; tensorrtllm_backend issues 188, 227"),
    Rule("ensemble/batch", ERROR, _batches, "lower it", RUN),
    Rule("ensemble/no-batch", WARNING, _no_batch, "set the steps' max_batch_size", RUN),
    Rule("ensemble/instance-group", ERROR, _group, "remove it: steps have instances, ensembles do not", RUN),
    Rule("ensemble/stop-words", WARNING, _stops, "map it to the engine's step",
         "tensorrtllm_backend issues 57, 128, 47; NVIDIA/TensorRT-LLM issue 90"),
    Rule("ensemble/end-id", WARNING, _end_id, "map end_id from OUT_END_ID of preprocessing",
         "NVIDIA/TensorRT-LLM issues 250, 5670; tensorrtllm_backend issue 82"),
    Rule("ensemble/decoupled", ERROR, _decoupled, "set both to the same value",
         "tensorrtllm_backend issue 626; NVIDIA/TensorRT-LLM issue 6207"),
    Rule("bls/model", ERROR, _not_there, "add the model, or correct its name", "TensorRT-LLM triton_backend tensorrt_llm_bls"),
    Rule("bls/one-at-a-time", WARNING, _one_at_a_time, "set bls_instance_count to the number of concurrent requests",
         "tensorrtllm_backend issues 257, 416"),
    Rule("bls/token-by-token", WARNING, _pieces, "set accumulate_tokens true",
         "tensorrtllm_backend issues 34, 112, 332, pull request 423"),
    Rule("ensemble/tokenizer", WARNING, _tokenizers, "name the same tokenizer in both", "tensorrtllm_backend docs/model_config.md"),
)  # fmt: skip
