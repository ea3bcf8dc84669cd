"""Which container serves, and whether it holds the engine that the bundle was written for.

The map of Triton releases is `pipeline/triton/releases`; `serve.container` overrides the image and is held to the same map
where its tag says what is in it.
"""

from __future__ import annotations

import re

from pipeline.config.schema import Config
from pipeline.core.errors import ConfigError
from pipeline.triton.releases import holding, release, target

__all__ = ["contents", "image_of", "launchable"]

KINDS = ("trtllm", "vllm")

NAME = re.compile(r"[\w./][\w./:@+-]*", re.ASCII)
"""Images of a registry, or of a file, as scripts take them without quotes."""
TRITON = re.compile(r"tritonserver:(\d\d\.\d\d)-(trtllm|vllm)-python-py3")
TENSORRT_LLM = re.compile(r"tensorrt-llm/release:(\d+\.\d+[\w.]*)")


def launchable(kind: str) -> bool:
    """Whether an engine is served from a published container; the others run where they were built."""
    return kind in KINDS


def image_of(config: Config) -> str | None:
    """Name of the container to start; None if no published one holds the engine's version, or the engine needs none.

    Raises:
        ConfigError: `serve.container` holds another version, or is no name of an image.
    """
    asked = config.serve.container
    for key, said in (("registry", config.serve.registry), ("container", asked or "any")):
        if not NAME.fullmatch(said):
            raise ConfigError(f"serve.{key}={said} is no name of images: use letters, digits and any of _ . / : @ + -")
    if asked is None:
        kind, chosen = config.engine.kind, target(config)
        image = chosen.images.get(kind) if chosen else None
        return f"{config.serve.registry}/{image.container}" if image else None
    engine, held = contents(asked)
    kind = config.engine.kind
    wanted = str(getattr(getattr(config.engine, kind), "version", ""))
    if engine and (engine != kind or not f"{held}.".startswith(f"{wanted}.")):
        fitting = ", ".join(f"{item.tag} ({item.images[kind].version})" for item in holding(kind, wanted))
        raise ConfigError(
            f"serve.container={asked} holds {engine} {held}, but the bundle is written for {kind} {wanted}: "
            f"{f'take a release of Triton that holds it: {fitting}' if fitting else 'no release of Triton holds that'}, "
            f"or set engine.{kind}.version to what the container holds."
        )
    return asked


def contents(image: str) -> tuple[str, str]:
    """Engine and version that the name of an image states; empty for a name of your own, which states nothing."""
    if match := TRITON.search(image):
        tag, kind = match.groups()
        held = release(tag).images.get(kind)
        return kind, held.version if held else "of no known version"
    if match := TENSORRT_LLM.search(image):
        return "trtllm", match[1]
    return "", ""
