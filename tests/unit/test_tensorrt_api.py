"""What `engine=tensorrt` calls exists, with the same signature, in TensorRT 11.4 as in TensorRT-RTX.

TensorRT's wheel of Python bindings needs nine C functions of libraries that are gigabytes; with stand-ins for them it is imported
and its API is read. That says that the calls exist there, not that a network builds.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests._utils.tensorrt_bindings import stand_ins

ROOT = Path(__file__).parents[2]
SOURCES = [*(ROOT / "pipeline" / "engines" / "tensorrt").rglob("*.py"), *(ROOT / "triton_repo" / "tensorrt" / "1").glob("*.py")]
PLUGINS = sorted({*(ROOT / "plugins").glob("trt*.py"), *(ROOT / "plugins").glob("*/trt.py")})
SOURCES += PLUGINS
ONLY_RTX = {"ComputeCapability", "IBuilderConfig.num_compute_capabilities", "IBuilderConfig.set_compute_capability"}
"""What only `tensorrt_rtx` has: `builder._set_targets` returns before them for `tensorrt`."""
ONLY_TENSORRT = {"INetworkDefinition.add_plugin"}
"""What only `tensorrt` has: `plugins.offered` gives nothing for `tensorrt_rtx`."""
OBJECTS = {
    "layer": [], "definition": ["INetworkDefinition"], "builder": ["Builder"], "config": ["IBuilderConfig"],
    "profile": ["IOptimizationProfile"], "_engine": ["ICudaEngine"], "_context": ["IExecutionContext"], "runtime": ["Runtime"],
    "settings": ["IAttention"], "tensor": ["ITensor"],
}  # fmt: skip
"""Names of variables in our sources -> the classes that they hold; `layer` is any layer."""
OF_OURS = ("__init__.py", "networks.py", "targets.py", "build.py", "blocks.py", "svg.py")
"""Files where such names hold our own configuration, or layers that were read from a listing."""
DUMP = r"""
import importlib, inspect, json, re, sys
trt = importlib.import_module(sys.argv[1])
def line(item):
    text = (getattr(item, "__doc__", "") or "").strip().splitlines()
    return re.sub(r"tensorrt(_rtx)?_bindings\.tensorrt(_rtx)?\.", "", text[0]) if text and "(" in text[0] else ""
print(json.dumps({name: {member: line(getattr(value, member)) for member in (dir(value) if inspect.isclass(value) else ())}
                  for name, value in vars(trt).items() if callable(value)}))
"""


def api(module: str, **env: str) -> dict[str, dict[str, str]]:
    """Class -> member -> the line of its signature; functions have no members."""
    done = subprocess.run([sys.executable, "-c", DUMP, module], env=os.environ | env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    folder = stand_ins(tmp_path_factory.mktemp("stand_ins"))
    return api("tensorrt_bindings", LD_LIBRARY_PATH=folder)


@pytest.fixture(scope="module")
def rtx() -> dict[str, dict[str, str]]:
    pytest.importorskip("tensorrt_rtx_bindings", reason="pip install 'r1-pipeline[rtx]'")
    return api("tensorrt_rtx_bindings")


def dotted(node: ast.AST) -> list[str]:
    """a.b.c -> its parts; empty where something else is in between."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return [node.id, *parts] if isinstance(node, ast.Name) else []


def used() -> Iterator[tuple[str, ...]]:
    """Class and member, or class alone, of everything that our sources say after `trt`."""
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            parts = dotted(node)
            for root in ("trt", "_trt"):
                if root in parts[:2] and parts[parts.index(root) + 1 :]:
                    yield tuple(parts[parts.index(root) + 1 :][:2])
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"add_[a-z0-9_]+", node.value):
                yield "INetworkDefinition", node.value


def members() -> Iterator[tuple[str, str]]:
    """Variable of `OBJECTS` and what is read from or written to it."""
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            parts = dotted(node)
            for first, second in pairwise(parts):
                if first in OBJECTS and parts[0] in (first, "self", "net") and source.name not in OF_OURS:
                    yield first, second


def has(library: dict[str, dict[str, str]], path: tuple[str, ...]) -> bool:
    return path[0] in library and all(member in library[path[0]] for member in path[1:])


def classes(library: dict[str, dict[str, str]], variable: str) -> list[str]:
    return OBJECTS[variable] or [name for name in library if re.fullmatch(r"I\w+Layer|ILayer|IAttention", name)]


def test_every_class_and_enum_value_exists_in_both(real, rtx) -> None:
    paths = set(used())
    assert len(paths) > 60 and ("INetworkDefinition", "add_kv_cache_update") in paths
    assert [path for path in sorted(paths) if not has(rtx, path) and ".".join(path) not in ONLY_TENSORRT] == []
    assert [path for path in sorted(paths) if not has(real, path) and path[0] not in ONLY_RTX] == []


def test_every_method_has_the_same_signature_in_both(real, rtx) -> None:
    methods = sorted({path[1] for path in used() if path[0] == "INetworkDefinition" and ".".join(path) not in ONLY_TENSORRT})
    ours, theirs = ({name: library["INetworkDefinition"][name] for name in methods} for library in (rtx, real))
    assert ours == theirs


def test_every_setting_of_layers_builders_and_engines_exists_in_both(real, rtx) -> None:
    wanted = set(members())
    assert len(wanted) > 40 and ("layer", "decomposable") in wanted and ("_context", "set_tensor_address") in wanted
    for library, name in ((real, "real"), (rtx, "rtx")):
        absent = [
            f"{variable}.{member}" for variable, member in sorted(wanted)
            if not any(member in library[cls] for cls in classes(library, variable))
            and f"{classes(library, variable)[0]}.{member}" not in ONLY_RTX
        ]  # fmt: skip
        assert absent == [], name


def test_the_interpreter_knows_the_classes_of_both(real, rtx) -> None:
    from pipeline.engines.tensorrt.interpreter.run import CLASSES, PLUGIN

    for library in (real, rtx):
        assert [cls for cls in CLASSES.values() if cls not in library] == []
        assert [kind for kind in (*CLASSES, PLUGIN) if kind not in library["LayerType"]] == []


def test_a_network_does_not_know_its_library() -> None:
    """Import, targets, lowering of experts and plugins are settled outside of what defines, interprets and lists networks."""
    folder = ROOT / "pipeline" / "engines" / "tensorrt"
    asking = {
        file.relative_to(folder).as_posix() for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in ("tensorrt", "tensorrt_rtx")
    }  # fmt: skip
    assert asking == {"__init__.py", "build.py", "builder.py", "library.py", "show.py", "targets.py"}


def test_plugins_are_where_tensorrt_has_them_and_rtx_has_not(real: Any, rtx: Any) -> None:
    for path in ONLY_TENSORRT:
        assert has(real, tuple(path.split("."))) and not has(rtx, tuple(path.split(".")))


def test_what_plugins_call_of_tensorrt_plugin_exists_there() -> None:
    """Its Python lies in the wheel; `public_api` marks what it offers."""
    found = find_spec("tensorrt_bindings")
    if found is None or found.origin is None:
        pytest.skip("the bindings of TensorRT 11.4 are not installed")
    text = "".join(file.read_text(encoding="utf-8") for file in (Path(found.origin).parent / "plugin").glob("_*.py"))
    offered = set(re.findall(r"@public_api\(\)\s+(?:def|class) (\w+)|public_api\(symbol=\"(\w+)\"", text))
    called = {
        parts[1] for source in PLUGINS for node in ast.walk(ast.parse(source.read_text(encoding="utf-8")))
        if len(parts := dotted(node)) > 1 and parts[0] == "trtp"
    }  # fmt: skip
    assert {"register", "aot_impl", "autotune", "KernelLaunchParams", "op"} <= called
    assert called <= {name for pair in offered for name in pair}
