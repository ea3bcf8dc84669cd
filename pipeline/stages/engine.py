"""Engine: from the converted checkpoint to what the server loads. Each engine kind builds its own, in `pipeline/engines/<kind>`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.core.stage import Determinism, Need, Stage, StageContext

if TYPE_CHECKING:
    from pipeline.config.schema import Config

__all__ = ["STAGE", "run"]

PLUGIN = ("kernel.cu", "op.py", "reference.py", "trt.py")
"""Files of a plugin that TensorRT networks use."""
CODE = {
    "tensorrt": (
        "pipeline/models/deepseek_v3.py", "plugins/fused_qkv_a/reference.py", "plugins/nvrtc.py",
        "plugins/cluster.cuh", "plugins/numerics.cuh", "plugins/wgmma.cuh", "plugins/trt.py", "plugins/trt_class.py",
        *(f"plugins/{name}/{file}" for name in ("quantize", "router_gemm", "topk_router") for file in PLUGIN),
        "plugins/topk_router/common.cuh", "plugins/topk_router/ranked.cu",
    ),
    "torch": ("plugins/mla_prefill/crossover.py", "plugins/topk_router/reference.py", "triton_repo/torch/1/runtime.py"),
    "vllm": ("pipeline/engines/trtllm/build.py",),
}
"""What a kind of engine uses beside its own folder and what all of them use."""


def code_of(config: Config) -> tuple[str, ...]:
    """That of the chosen engine: an edit of one kind leaves engines of the others as they are."""
    kind = config.engine.kind
    more = getattr(_engine(config), "code", None)
    return (f"pipeline/engines/{kind}", *CODE.get(kind, ()), *(more(config) if more else ()))


def toolchain(config: Config) -> dict[str, str]:
    """That of the chosen engine."""
    return dict(_engine(config).toolchain(config))


def requires(config: Config, checkpoint: Path | None) -> None:
    """What the chosen engine needs of this machine."""
    _engine(config).requires(config)


def determinism(config: Config) -> Determinism:
    """That of the chosen engine."""
    return _engine(config).determinism(config)


def _engine(config: Config) -> Any:
    return import_module(f"pipeline.engines.{config.engine.kind}")


STAGE = Stage(
    name="engine",
    version=1,
    needs=(Need(stage="convert"), Need(stage="plan", path="deploy.json")),
    after=("verify",),
    config=("engine",),
    code=(
        "pipeline/stages/engine.py", "pipeline/engines/companions.py", "pipeline/checkpoint", "pipeline/formats",
        "pipeline/layouts", "pipeline/models/arch.py",
    ),
    code_of=code_of,
    toolchain=toolchain,
    reuses=True,
    requires=requires,
    determinism=determinism,
    run="pipeline.stages.engine:run",
)  # fmt: skip


def run(ctx: StageContext) -> None:
    """Let the engine kind fill `ctx.out`."""
    import_module(f"pipeline.engines.{ctx.config.engine.kind}.build").build(ctx)
