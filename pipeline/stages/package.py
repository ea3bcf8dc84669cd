"""Package: the engine as a Triton model repository, checked, with a manifest and launchers beside it.

Nothing but models may lie in `repository/` (Triton takes every folder there for one), so `package.json` and `launch/` are outside.
"""

from __future__ import annotations

import hashlib
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.stage import Need, Stage, StageContext

if TYPE_CHECKING:
    from pipeline.config.schema import Config
    from pipeline.triton.pbtxt import ModelConfig
    from pipeline.triton.releases import Release

__all__ = ["STAGE", "run"]


def toolchain(config: Config) -> dict[str, str]:
    """What prints the text of config.pbtxt, and the release that it is printed for; ConfigError if that cannot serve it."""
    from pipeline.launch.image import image_of
    from pipeline.triton.layouts import chosen
    from pipeline.triton.releases import target

    release = target(config)
    versions = {name: metadata.version(name) for name in ("protobuf", "tritonclient")}
    served = {"layout": chosen(config), "triton": release.tag if release else "none holds the engine"}
    return versions | served | {"container": image_of(config) or "none"}


def requires(config: Config, checkpoint: Path | None) -> None:
    """That layout, release and container go with the engine, before hours are spent on it; ConfigError otherwise."""
    toolchain(config)


STAGE = Stage(
    name="package",
    version=1,
    needs=(Need(stage="engine"), Need(stage="plan", path="deploy.json")),
    config=(
        "engine.kind", "model.name", "hw.nvlink_domain", "serve.model_name", "serve.max_queue", "serve.http_port",
        "serve.grpc_port", "serve.metrics_port", "serve.claim", "serve.rdma",
    ),
    code=(
        "pipeline/stages/package.py",
        "pipeline/triton/pbtxt.py",
        "pipeline/triton/check.py",
        "pipeline/launch",
        "pipeline/lint/repository",
        "pipeline/triton/layouts",
        "pipeline/triton/releases",
        "triton_repo",
    ),
    toolchain=toolchain,
    requires=requires,
    run="pipeline.stages.package:run",
)  # fmt: skip


def run(ctx: StageContext) -> None:
    """Let the layout write the repository for the release, check it, describe it in package.json; write the launchers."""
    from pipeline.core.jsonio import write_json
    from pipeline.launch.image import launchable
    from pipeline.triton.layouts import chosen
    from pipeline.triton.releases import target

    layout, release = chosen(ctx.config), target(ctx.config)
    models = _repository(ctx, layout, release)
    write_json(ctx.out / "package.json", {
        "engine": ctx.config.engine.kind,
        "layout": layout,
        "models": {name: _describe(config) for name, config in models.items()},
        "sources": _source_digests(ctx.out / "repository"),
        "triton": _container(ctx.config, release),
    })  # fmt: skip
    ctx.progress.note(f"repository with {', '.join(models)}" if models else "no repository: trtllm-serve serves the bundle")
    if launchable(ctx.config.engine.kind):
        from pipeline.launch.render import write

        write(ctx, ctx.out / "launch")
    if release is None:
        ctx.progress.note(_without_container(ctx.config))


def _repository(ctx: StageContext, layout: str, release: Release | None) -> dict[str, ModelConfig]:
    """Write and check `repository/`; its models, none where Triton does not serve them."""
    from pipeline.triton.check import check_repository
    from pipeline.triton.layouts import NO_REPOSITORY

    if layout == NO_REPOSITORY:
        return {}
    repository = ctx.out / "repository"
    repository.mkdir()
    import_module(f"pipeline.triton.layouts.{layout}").layout(ctx, release)
    return check_repository(repository, release.tag if release else None)


def _container(config: Config, release: Release | None) -> dict[str, Any]:
    """The release that the repository is written for, and the container to serve it in."""
    image = release.images.get(config.engine.kind) if release else None
    return {
        "release": release.tag if release else None,
        "server": release.server if release else None,
        "container": image.container if image else None,
        "engine_version": image.version if image else None,
    }


def _without_container(config: Config) -> str:
    from pipeline.triton.releases import releases

    kind = config.engine.kind
    newest = [release.images[kind] for release in releases() if kind in release.images][-1]
    return (
        f"no container of Triton holds {kind} {getattr(config.engine, kind).version} (the newest is {newest.container} with "
        f"{newest.version}): serve it with an image of your own"
    )


def _describe(config: ModelConfig) -> dict[str, Any]:
    from tritonclient.grpc import model_config_pb2 as pb

    def tensors(fields: Any) -> dict[str, Any]:
        return {
            field.name: {"type": pb.DataType.Name(field.data_type).removeprefix("TYPE_"), "dims": list(field.dims)}
            for field in fields
        }

    return {
        "backend": config.backend,
        "decoupled": config.model_transaction_policy.decoupled,
        "inputs": tensors(config.input),
        "max_batch_size": config.max_batch_size,
        "outputs": tensors(config.output),
    }


def _source_digests(repository: Path) -> dict[str, str]:
    """SHA-256 of the files that were written here; the engine's own files are covered by the engine's digest."""
    kinds = (".py", ".pbtxt", ".yaml")
    files = sorted(path for path in repository.rglob("*") if path.suffix in kinds or path.name == "model.json")
    return {file.relative_to(repository).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
