"""The root of a repository and the folders of its models: what Triton takes for a model, for a version, and what it waits for."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.lint.base import ERROR, NOTE, WARNING, Fault, Place, Rule
from pipeline.lint.names import CONFIG, ENGINE_ARGS, LOADED, SETTINGS
from pipeline.lint.repository.subject import RUN, Model, Repository

__all__ = ["MODEL_RULES", "ROOT_RULES"]



def _empty(repository: Repository) -> Iterator[Fault]:
    if not repository.models:
        reason = "there is no model in it, and a server would still report itself ready"
        yield Fault(Place(repository.folder), reason)


def _stray_file(repository: Repository) -> Iterator[Fault]:
    for path in repository.others:
        yield Fault(Place(path), f"{path.name} is not a model, and lies where only models belong")


def _stray_folder(model: Model) -> Iterator[Fault]:
    if not model.text and not _loadable(model):
        hidden = " (an editor's or version control's)" if model.name.startswith((".", "__")) else ""
        reason = f"the folder {model.name}{hidden} has no {CONFIG} and no version with a model: Triton takes it for one and fails"
        yield Fault(Place(model.folder), reason)


def _loadable(model: Model) -> bool:
    """Whether auto-completion could make a model of the folder."""
    return any((version / name).exists() for version in model.versions for name in LOADED)


def _no_config(model: Model) -> Iterator[Fault]:
    if not model.text and _loadable(model):
        reason = f"model {model.name} has no {CONFIG}: it loads only where auto-completion is on and the backend can complete it"
        yield Fault(Place(model.folder), reason)


def _no_version(model: Model) -> Iterator[Fault]:
    if model.text and not model.versions:
        others = sorted(path.name for path in model.folder.iterdir() if path.is_dir())
        seen = f"; {', '.join(others[:3])} is no version" if others else ""
        yield Fault(Place(model.folder), f"model {model.name}: it has no version folder such as 1/{seen}")


def _no_code(model: Model) -> Iterator[Fault]:
    if model.config.backend == "python" and model.understood:
        for version in model.versions:
            if not (version / model.entry).is_file():
                reason = f"model {model.name}: {version.name}/{model.entry} is missing, and the server would wait for it forever"
                yield Fault(Place(version), reason)


def _no_engine_args(model: Model) -> Iterator[Fault]:
    if model.config.backend == "vllm":
        for version in model.versions:
            if not (version / ENGINE_ARGS).is_file():
                yield Fault(Place(version), f"model {model.name}: {version.name}/{ENGINE_ARGS} with engine arguments is missing")


def _unreadable(model: Model) -> Iterator[Fault]:
    _ = model.settings, model.engine_args
    yield from (Fault(Place(file), reason) for file, reason in model.notes.items())


def _empty_version(model: Model) -> Iterator[Fault]:
    if model.config.HasField("ensemble_scheduling"):
        for version in model.versions:
            if not any(version.iterdir()):
                yield Fault(Place(version), f"model {model.name}: {version.name}/ is empty, and git does not keep empty folders")


def _name(model: Model) -> Iterator[Fault]:
    if model.understood and model.config.name not in ("", model.name):
        reason = f"model {model.name}: its {CONFIG} says name '{model.config.name}', but folder and name must be equal"
        yield Fault(model.at(r"\bname\b"), reason)


def _two_settings(model: Model) -> Iterator[Fault]:
    if model.settings is not None and model.engine_args is not None:
        yield Fault(Place(model.versions[-1]), f"model {model.name} has {SETTINGS} (TensorRT-LLM) and {ENGINE_ARGS} (vLLM)")


ROOT_RULES: tuple[Rule[Repository], ...] = (
    Rule("triton/empty", ERROR, _empty, "name the folder that holds the models", RUN),
    Rule("triton/stray-file", NOTE, _stray_file, "keep only model folders in the repository's root", RUN),
)
MODEL_RULES: tuple[Rule[Model], ...] = (
    Rule("triton/stray-folder", ERROR, _stray_folder, "move it out of the repository",
         f"{RUN}; triton-inference-server/server issue 6195"),
    Rule("triton/no-config", NOTE, _no_config, f"write a {CONFIG}: NVIDIA's launcher turns auto-completion off",
         "TensorRT-LLM triton_backend/scripts/launch_triton_server.py"),
    Rule("triton/name", ERROR, _name, "rename one of them", RUN),
    Rule("triton/no-version", ERROR, _no_version, "name it 1; names that are no number, or begin with 0, are not seen", RUN),
    Rule("triton/no-code", ERROR, _no_code, "add it, or set default_model_filename", RUN),
    Rule("triton/no-engine-args", ERROR, _no_engine_args, "add it, with at least model",
         "triton-inference-server/vllm_backend src/model.py"),
    Rule("triton/unreadable-settings", ERROR, _unreadable, "correct the file", "pipeline/lint/document.py"),
    Rule("triton/empty-version", NOTE, _empty_version, "put a file such as .gitkeep into it", RUN),
    Rule("triton/two-settings", WARNING, _two_settings, "keep the one that its backend reads",
         "TensorRT-LLM triton_backend/all_models/llmapi; triton-inference-server/vllm_backend"),
)  # fmt: skip
