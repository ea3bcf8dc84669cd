"""On which stream an engine launches and captures, with torch.cuda's calls replaced: nothing here needs a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="the engine's runtime is written in torch")

from pipeline.engines.torch.selfcheck import import_runtime  # noqa: E402

RUNTIME = Path(__file__).parents[2] / "triton_repo" / "torch" / "1" / "runtime.py"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """torch.cuda's streams and graphs by name: `current` of each thread, and a `log` of what was done."""
    local, log, names = threading.local(), [], iter("XYZ")

    class Named(str):
        def wait_stream(self, other: str) -> None:
            log.append(("wait", self, other))

    def current(*_: object) -> str:
        return getattr(local, "current", "default")

    def use(stream: str) -> None:
        local.current = stream

    @contextmanager
    def capture(graph: object, pool: object, stream: str) -> Iterator[None]:
        assert stream != "default", "nothing on the default stream can be captured"
        log.append(("capture", stream, pool))
        yield

    fakes = {
        "current_stream": current, "default_stream": lambda *_: "default", "set_stream": use, "graph": capture,
        "Stream": lambda *_: Named(next(names)), "synchronize": lambda *_: log.append(("synchronize", current())),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: log.append(("replay", current()))), "graph_pool_handle": lambda: "pool",
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return SimpleNamespace(use=use, current=current, log=log)


def on_cuda(module: ModuleType) -> SimpleNamespace:
    """An engine without a form that says it is on CUDA, and a step of it that was run once."""
    info = {"device": "cuda", "num_pages": 1, "page_size": 1, "latent_dim": 1, "kv_dtype": "float32", "num_layers": 0, "threads": 1}
    engine = module.CompiledEngine(info, {})
    step = module.StepGraph(lambda _: torch.zeros(1, 3), (1, 1, 1), [torch.zeros(1)], engine._pool)
    step._ran = True
    return SimpleNamespace(settle=engine._settle, step=lambda: step([torch.zeros(1, 1, dtype=torch.int64)] * 3))


def test_an_engine_captures_on_the_stream_that_it_launches_on(streams) -> None:
    engine = on_cuda(import_runtime(RUNTIME))
    for _ in range(2):
        engine.settle()
    engine.step()
    first = [("synchronize", "default"), ("wait", "X", "default")]
    assert streams.log == [*first, ("capture", "X", "pool"), ("replay", "X")] and streams.current() == "X"
    streams.use("default")  # another part of the program went back to it
    engine.settle()
    assert streams.log[4:] == [("wait", "X", "default")] and streams.current() == "X"


def test_threads_of_an_engine_share_its_stream_and_callers_keep_theirs(streams) -> None:
    engine = on_cuda(import_runtime(RUNTIME))
    streams.use("mine")
    engine.settle()
    engine.step()
    assert streams.log == [("synchronize", "mine"), ("capture", "mine", "pool"), ("replay", "mine")]
    streams.log.clear()
    for _ in range(2):
        thread = threading.Thread(target=engine.settle)
        thread.start()
        thread.join()
    assert streams.log == [("synchronize", "default"), ("wait", "X", "default")] * 2
