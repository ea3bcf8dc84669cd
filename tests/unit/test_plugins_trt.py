"""Plugins of TensorRT without TensorRT: launches are the ops', kernels compile, its own Python takes the declarations."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="plugins are torch ops")

from pipeline.core.errors import MissingToolError, StageError  # noqa: E402
from plugins import nvrtc, trt  # noqa: E402
from plugins.trt_class import DTYPES, _on, _view, compute  # noqa: E402
from tests._utils.cuda_on_cpu import CudaOnCpu  # noqa: E402
from tests._utils.plugin_inputs import filled, signature  # noqa: E402
from tests._utils.tensorrt_bindings import stand_ins  # noqa: E402

ROOT = Path(__file__).parents[2]
DRIVER = ROOT / "tests" / "_utils" / "tensorrt_plugins.py"
ROUTING = {"n_group": 8, "topk_group": 4, "top_k": 8, "scale": 2.5, "norm_topk_prob": True}
TAIL = [[7, 2112], [1536], [512], [4096, 64], [7], [7], [640, 576]]
CASES: dict[str, tuple[str, list[list[int]], dict[str, Any]]] = {
    "topk_router": ("topk_router", [[33, 256], [1, 256]], ROUTING),
    "router_gemm": ("router_gemm", [[7, 7168], [256, 7168]], {"max_tokens": 8}),
    "qkv_a": ("router_gemm", [[7, 7168], [2112, 7168]], {"max_tokens": 8}),
    "norm_rope_cache": ("fused_qkv_a", TAIL, {"kv_scale": 1.0, "eps": 1e-6}),
    "norm_rope_cache_fp8": ("fused_qkv_a", TAIL, {"kv_scale": 0.5, "eps": 1e-6}),
    "fp8_quantize": ("quantize", [[7, 7168]], {}),
    "nvfp4_pack": ("quantize", [[7, 7168], [1, 1, 1]], {}),
    "nvfp4_unpack": ("quantize", [[7, 4032], [1, 1, 1]], {}),
}
"""Plugin -> its folder, shapes of its inputs and attributes, as in DeepSeek-R1."""
DECODE = {"scale": 0.1, "latent": 512, "kv_scale": 1.0}
HOST: dict[str, tuple[str, list[list[int]], dict[str, Any], dict[str, list[int]]]] = {
    "mla_decode": ("mla_decode", [[2, 1, 4, 576], [2, 1, 128, 576], [2]], DECODE, {"lengths": [70, 5]}),
    "mla_decode_fp8": ("mla_decode", [[2, 1, 4, 576], [2, 1, 64, 576], [2]], DECODE | {"kv_scale": 0.5}, {"lengths": [64, 5]}),
    "absorb_query": ("mla_absorb", [[5, 2, 192], [2, 128, 512]], {}, {}),
    "absorb_output": ("mla_absorb", [[5, 2, 512], [2, 128, 512]], {}, {}),
    "mla_prefill": (
        "mla_prefill", [[5, 2, 192], [7, 2, 192], [7, 2, 128], [3], [3]], {"scale": 0.1}, {"cu_q": [0, 2, 5], "cu_k": [0, 4, 7]},
    ),
    "kv_quantize": ("kv_quantize", [[70, 576]], {"chunk": 64, "quantile": 0.999}, {}),
    "kv_quantize_int8": ("kv_quantize", [[70, 576]], {"chunk": 64, "quantile": 0.999}, {}),
    "moe_fp8_block": (
        "moe_grouped_gemm", [[3, 256], [3, 2], [3, 2], [4, 512, 256], [4, 4, 2], [4, 256, 256], [4, 2, 2]], {"first_expert": 2},
        {"indices": [2, 5, 3, 0, 4, 2]},
    ),
    "moe_w4a16_nvfp4": (
        "moe_grouped_gemm", [[3, 256], [3, 2], [3, 2], [4, 512, 128], [4, 512, 16], [4], [4, 256, 128], [4, 256, 16], [4]],
        {"first_expert": 2}, {"indices": [2, 5, 3, 0, 4, 2]},
    ),
}  # fmt: skip
"""The same of those that are launched from the host, small, and the whole numbers that they are given."""
DYNAMIC = {"logits", "x", "qkv", "positions", "slots", "cache", "codes"}
"""Inputs whose first dimension is the step's."""
NUMBERS = {"positions": [4, 0, 9, 5, 1, 3, 2], "slots": [639, -1, 0, 5, 77, 3, 12]}
"""Whole numbers that a case with such inputs is given."""
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use here")


def plugin_of(name: str) -> trt.Plugin:
    folder = (CASES.get(name) or HOST[name])[0]
    return next(each for each in import_module(f"plugins.{folder}.trt").PLUGINS if each.name == name)


def kernel_of(name: str, **more: Any) -> trt.Kernel:
    plugin, (_, shapes, attributes) = plugin_of(name), CASES[name]
    assert plugin.kernel is not None
    return plugin.kernel(trt.sizes(plugin, shapes), **attributes, **more)


def parameters(source: bytes, name: str) -> list[str]:
    """Their names."""
    return [part.split()[-1].lstrip("*") for part in signature(source, name)]


def test_every_declared_plugin_is_tested() -> None:
    folders = (file.parent.name for file in sorted((ROOT / "plugins").glob("*/trt.py")))
    declared = {each.name: each.kernel is None for folder in folders for each in import_module(f"plugins.{folder}.trt").PLUGINS}
    assert declared == dict.fromkeys(CASES, False) | dict.fromkeys(HOST, True), "each of trt.py's needs a case in CASES or HOST"


@pytest.mark.parametrize("name", [*CASES, *HOST])
def test_sizes_of_the_case_have_a_kernel_and_odd_ones_have_not(name: str) -> None:
    plugin, (_, shapes, attributes) = plugin_of(name), (CASES.get(name) or HOST[name])[:3]
    assert plugin.refusal(trt.sizes(plugin, shapes), **attributes) == ""
    odd = [[size + 3 for size in shape] for shape in shapes]
    assert "not" in plugin.refusal(trt.sizes(plugin, odd), **attributes)


def test_more_experts_a_token_than_the_kernel_holds_are_refused() -> None:
    plugin, (_, [x, _, _, *matrices], attributes, _) = plugin_of("moe_fp8_block"), HOST["moe_fp8_block"]
    shapes = [x, [3, 33], [3, 33], *matrices]
    assert "not 4 of 256 x 256, 33 a token" in plugin.refusal(trt.sizes(plugin, shapes), **attributes)


@pytest.mark.parametrize(("name", "sm", "why"), [
    ("topk_router", 80, ""), ("topk_router", 75, "the kernel needs SM80 or newer, not SM75"), ("router_gemm", 120, ""),
    ("mla_decode", 90, ""), ("mla_decode", 100, "the kernel is for SM90 alone, not SM100"),
])  # fmt: skip
def test_which_chips_have_a_kernel(name: str, sm: int, why: str) -> None:
    assert trt.uncovered(plugin_of(name), sm) == why


def test_tensorrt_gets_inputs_then_numbers_then_outputs() -> None:
    kernel = kernel_of("topk_router")
    source = trt.arranged(plugin_of("topk_router"), kernel)
    assert parameters(source, "topk_router") == ["logits", "bias", "tokens", "weights", "indices"]
    assert b"\n  const float scale = (float)0x1.4000000000000p+1;\n" in source


def test_an_output_in_place_is_one_more_parameter() -> None:
    source = trt.arranged(plugin_of("norm_rope_cache"), kernel_of("norm_rope_cache"))
    assert parameters(source, "norm_rope_cache")[-3:] == ["cache", "q_a", "written"]


def test_a_parameter_that_nothing_gives_a_value_is_refused() -> None:
    kernel = kernel_of("topk_router")
    with pytest.raises(StageError, match=r"parameters that its trt\.py gives no value: scale"):
        trt.arranged(plugin_of("topk_router"), replace(kernel, constants={}))
    with pytest.raises(StageError, match=r"has no kernel top_k\("):
        trt.arranged(plugin_of("topk_router"), replace(kernel, name="top_k"))


class Recorded(Exception):  # noqa: N818
    """A launch."""

    def __init__(self, source: Path, macros: dict[str, int], name: str, grid: Any, threads: int, *arguments: Any, **_: Any) -> None:
        self.launch, self.arguments = (source, name, macros, tuple(grid), threads), arguments


def recorder(source: nvrtc.Source, **macros: int) -> Any:
    """In place of a source's module: a launch is raised."""

    def launch(*arguments: Any, **options: Any) -> None:
        raise Recorded(source.path, macros, *arguments, **options)

    return SimpleNamespace(launch=launch)


def launched(name: str, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """What the op launches for the same tensors."""
    plugin, (folder, shapes, attributes) = plugin_of(name), CASES[name]
    op = import_module(f"plugins.{folder}.op")
    inputs = [torch.zeros(shape, dtype=DTYPES[kind]) for shape, kind in zip(shapes, plugin.inputs.values(), strict=True)]
    outputs = [
        torch.zeros(shape, dtype=DTYPES[kind])
        for shape, kind in zip(plugin.shapes(trt.sizes(plugin, shapes), **attributes), plugin.outputs.values(), strict=True)
    ]
    monkeypatch.setattr(nvrtc.Source, "module", recorder)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    halves = (
        [part.view(torch.uint8)[..., : 7168 // 2] for part in (outputs[0], inputs[0])],
        [part.view(torch.uint8)[..., 7168 // 2 :].view(torch.float8_e4m3fn) for part in (outputs[0], inputs[0])],
    )
    run = {
        "topk_router": lambda: op.launch(*inputs, *outputs, **ROUTING), "fp8_quantize": lambda: op.launch_fp8(*inputs, *outputs),
        "nvfp4_pack": lambda: op.launch_nvfp4(*inputs, halves[0][0], halves[1][0]),
        "nvfp4_unpack": lambda: op.nvfp4_dequantize._init_fn(halves[0][1], halves[1][1], inputs[1]),
        **dict.fromkeys(("router_gemm", "qkv_a"), lambda: op.launch(*inputs, *outputs)),
        **dict.fromkeys(("norm_rope_cache", "norm_rope_cache_fp8"), lambda: op.launch(*inputs, outputs[0], **attributes)),
    }  # fmt: skip
    with pytest.raises(Recorded) as caught:
        run[name]()
    return caught.value


@pytest.mark.parametrize("name", CASES)
def test_launches_are_those_of_the_op(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same source, kernel, macros, grid and threads; whole numbers and constants have the values that the op hands over."""
    kernel = kernel_of(name)
    order = parameters(nvrtc.source_text(kernel.source), kernel.name)
    found = launched(name, monkeypatch)
    assert found.launch == (kernel.source, kernel.name, kernel.macros, kernel.grid, kernel.threads)
    given = {key: value for key, value in zip(order, found.arguments, strict=True) if not isinstance(value, torch.Tensor)}
    assert given == {**kernel.numbers, **{key: value for key, value in kernel.constants.items() if not isinstance(value, str)}}


def test_digests_tell_kernels_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt, "compiler_version", lambda: (13, 0))
    plugin, kernel = plugin_of("topk_router"), kernel_of("topk_router")
    scaled = replace(kernel, constants={"scale": 1.0})
    others = [(kernel, 100, ROUTING), (scaled, 90, ROUTING), (kernel, 90, ROUTING | {"top_k": 6})]
    known = trt.digest(plugin, kernel, 90, ROUTING)
    assert known == trt.digest(plugin, kernel_of("topk_router"), 90, dict(reversed(ROUTING.items())))
    assert len({known, *(trt.digest(plugin, *other) for other in others)}) == 4
    monkeypatch.setattr(trt, "compiler_version", lambda: (13, 1))
    assert trt.digest(plugin, kernel, 90, ROUTING) != known


def has_nvrtc() -> bool:
    try:
        nvrtc.compiler_version()
    except MissingToolError:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="no NVRTC here")


@needs_nvrtc
@pytest.mark.parametrize("sm", [90, 100])
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_ahead_of_time(name: str, sm: int) -> None:
    """PTX with the entry and its parameters; each tactic for one chip."""
    plugin = plugin_of(name)
    for tactic in (plugin.tactics or (0,))[: 2 if sm == 90 else 1]:
        kernel = kernel_of(name, **({"tactic": tactic} if plugin.tactics else {}))
        text = trt.ptx(plugin, kernel, sm).decode()
        entry = re.search(rf"\.visible \.entry {kernel.name}\((.*?)\)", text, re.DOTALL)
        assert f".target sm_{sm}" in text and entry
        sizes = re.findall(r"\.param \.u(\d+)", entry[1])
        assert sizes == ["64"] * len(plugin.inputs) + ["32"] * len(kernel.numbers) + ["64"] * len(plugin.outputs)


@needs_nvrtc
@pytest.mark.parametrize("name", CASES)
def test_the_assembler_of_a_chip_takes_them(name: str) -> None:
    kernel = kernel_of(name)
    options = ("--gpu-architecture=sm_90", *nvrtc.FLAGS, *(f"-D{key}={value}" for key, value in kernel.macros.items()))
    cubin = nvrtc.compile_source(trt.arranged(plugin_of(name), kernel), options)
    assert cubin.startswith(b"\x7fELF") and f".text.{kernel.name}\0".encode() in cubin


@pytest.fixture(scope="module")
def taken_through(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every case through `tensorrt.plugin` of 11.4; its libraries, registry and expressions are stand-ins."""
    folder = stand_ins(tmp_path_factory.mktemp("stand_ins"))
    cases = [
        {
            "module": f"plugins.{module}.trt", "plugin": name, "sm": 90, "shapes": shapes, "attributes": attributes,
            "dynamic": [[0] if each in DYNAMIC else [] for each in plugin_of(name).inputs],
            "tactic": max(plugin_of(name).tactics, default=0),
        }
        for name, (module, shapes, attributes) in CASES.items()
    ]  # fmt: skip
    cases += [
        {
            "module": f"plugins.{module}.trt", "plugin": name, "shapes": shapes, "attributes": attributes,
            "values": [values.get(each) for each in plugin_of(name).inputs],
        }
        for name, (module, shapes, attributes, values) in HOST.items()
    ]  # fmt: skip
    command = [sys.executable, "-P", str(DRIVER), json.dumps(cases)]
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"LD_LIBRARY_PATH": folder, "PYTHONPATH": paths}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip([*CASES, *HOST], json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_tensorrt_takes_the_declaration(name: str, taken_through: dict[str, dict[str, Any]]) -> None:
    plugin, found, (_, shapes, attributes) = plugin_of(name), taken_through[name], CASES[name]
    kernel = kernel_of(name, **({"tactic": max(plugin.tactics)} if plugin.tactics else {}))
    assert found["shapes"] == [list(shape) for shape in plugin.shapes(trt.sizes(plugin, shapes), **attributes)]
    assert found["types"] == list(plugin.outputs.values())
    assert found["formats"] == [*plugin.inputs.values(), *plugin.outputs.values()]
    aliases = [plugin.aliases.get(output) for output in plugin.outputs]
    assert found["aliases"] == [-1 if alias is None else list(plugin.inputs).index(alias) for alias in aliases]
    assert found["attributes"] == attributes and found["tactics"] == list(plugin.tactics)
    assert found["kernel"] == kernel.name and found["compiled"].encode() == trt.arranged(plugin, kernel)
    grid = {f"grid_{axis}": size for axis, size in zip("xyz", kernel.grid, strict=True)}
    assert found["launch"] == {**grid, "block_x": kernel.threads, "block_y": 1, "block_z": 1, "shared_mem": kernel.shared}
    assert found["numbers"] == list(kernel.numbers.values())


@pytest.mark.parametrize("name", HOST)
def test_tensorrt_takes_the_class(name: str, taken_through: dict[str, dict[str, Any]]) -> None:
    """Made by its creator, serialised, made again from that, and enqueued on the CPU: the op's results where they belong."""
    plugin, found, (_, shapes, attributes, _) = plugin_of(name), taken_through[name], HOST[name]
    assert found["shapes"] == [list(shape) for shape in plugin.shapes(trt.sizes(plugin, shapes), **attributes)]
    assert found["types"] == list(plugin.outputs.values()) and found["attributes"] == attributes
    assert all(found["supported"]) and found["shape_inputs"] == []
    assert all(found["equal"]) and all(value > 0 for value in found["largest"])


def test_the_digest_of_a_class_is_that_of_its_folder(tmp_path: Path) -> None:
    from plugins.trt_class import folder_digest

    (shared := tmp_path.parent / "shared.cuh").write_text("one")
    (tmp_path / "kernel.cu").write_text('#include "../shared.cuh"\n')
    known = folder_digest(tmp_path, {"scale": 1.0})
    assert folder_digest(tmp_path, {"scale": 1.0}) == known != folder_digest(tmp_path, {"scale": 2.0})
    shared.write_text("another")
    assert folder_digest(tmp_path, {"scale": 1.0}) != known


@pytest.mark.parametrize(("name", "tactic"), [
    ("topk_router", 0), ("norm_rope_cache_fp8", 0), ("nvfp4_pack", 2), ("nvfp4_unpack", 1),
])  # fmt: skip
def test_the_embedded_kernel_on_the_cpu_vs_reference(name: str, tactic: int, tmp_path: Path) -> None:
    """The arranged source, with the arguments and the launch that TensorRT is told; the others have instructions of GPUs alone."""
    plugin, attributes = plugin_of(name), CASES[name][2]
    kernel = kernel_of(name, **({"tactic": tactic} if tactic else {}))
    source = trt.arranged(plugin, kernel)
    (tmp_path / "kernel.cu").write_bytes(source)
    types = ",".join(part.rpartition(" ")[0] for part in signature(source, kernel.name))
    library = CudaOnCpu(tmp_path / "kernel.cu", {kernel.name: types}, kernel.macros, tmp_path)
    given = tensors(name)
    inputs = dict(zip(plugin.inputs, (each.clone() for each in given), strict=True))
    outputs = places(name, inputs, attributes, "cpu")
    arguments = [each.view(torch.uint8).numpy() for each in inputs.values()], [each.view(torch.uint8).numpy() for each in outputs]
    library.launch(kernel.name, kernel.grid, kernel.threads, *arguments[0], *kernel.numbers.values(), *arguments[1])
    near(outputs, plugin.reference(*given, **attributes))


def tensors(name: str) -> list[torch.Tensor]:
    plugin, shapes = plugin_of(name), (CASES.get(name) or HOST[name])[1]
    values = NUMBERS | (HOST[name][3] if name in HOST else {})
    return [filled(values.get(each), shape, kind) for (each, kind), shape in zip(plugin.inputs.items(), shapes, strict=True)]


def places(name: str, inputs: dict[str, torch.Tensor], attributes: dict[str, Any], device: str = "cuda") -> list[torch.Tensor]:
    """Where outputs belong, poisoned; those in place are their inputs."""
    plugin = plugin_of(name)
    shapes = plugin.shapes(trt.sizes(plugin, [tuple(each.shape) for each in inputs.values()]), **attributes)
    kinds = (DTYPES[kind] for kind in plugin.outputs.values())
    poisoned = [torch.full(shape, 99.0, device=device).to(kind) for shape, kind in zip(shapes, kinds, strict=True)]
    return [inputs.get(plugin.aliases.get(output, ""), place) for output, place in zip(plugin.outputs, poisoned, strict=True)]


def near(found: list[torch.Tensor], expected: Any) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        if ours.dtype == torch.int32:
            assert torch.equal(ours.cpu(), theirs)
        torch.testing.assert_close(ours.cpu().float(), theirs.float(), rtol=2e-2, atol=2e-2 * float(theirs.float().abs().max()))


@gpu
@pytest.mark.parametrize(("name", "tactic"), [(name, tactic) for name in CASES for tactic in plugin_of(name).tactics or (0,)])
def test_the_embedded_kernel_vs_reference(name: str, tactic: int) -> None:
    """PTX through the driver with the arguments and the launch that TensorRT is told."""
    plugin, attributes = plugin_of(name), CASES[name][2]
    given = tensors(name)
    inputs = {each: tensor.cuda() for each, tensor in zip(plugin.inputs, given, strict=True)}
    outputs = places(name, inputs, attributes)
    kernel = kernel_of(name, **({"tactic": tactic} if plugin.tactics else {}))
    major, minor = torch.cuda.get_device_capability()
    module = nvrtc.Module(trt.ptx(plugin, kernel, 10 * major + minor) + b"\0")
    arguments = *inputs.values(), *kernel.numbers.values(), *outputs
    module.launch(kernel.name, kernel.grid, kernel.threads, *arguments, shared=kernel.shared)
    near(outputs, plugin.reference(*given, **attributes))


def bare(name: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], list[torch.Tensor], list[list[torch.Tensor]]]:
    """A case's inputs here and on the GPU, places of its outputs, and both there as bare addresses."""
    given = tensors(name)
    inputs = {each: tensor.cuda() for each, tensor in zip(plugin_of(name).inputs, given, strict=True)}
    outputs = places(name, inputs, HOST[name][2])
    views = [[_view(each.data_ptr(), tuple(each.shape), each.dtype) for each in part] for part in (inputs.values(), outputs)]
    return given, inputs, outputs, views


@gpu
@pytest.mark.parametrize("name", HOST)
def test_the_host_s_launches_vs_reference(name: str) -> None:
    """Over bare addresses, on a stream that torch does not know."""
    plugin, attributes = plugin_of(name), HOST[name][2]
    given, _, outputs, views = bare(name)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with _on(stream.cuda_stream):
        compute(plugin, attributes, *views)
    stream.synchronize()
    near(outputs, plugin.reference(*given, **attributes))


@gpu
@pytest.mark.parametrize("name", HOST)
def test_the_host_s_launches_are_captured(name: str) -> None:
    """And replayed over other inputs."""
    plugin, attributes = plugin_of(name), HOST[name][2]
    given, inputs, outputs, views = bare(name)
    compute(plugin, attributes, *views)
    graph, first = torch.cuda.CUDAGraph(), next(iter(inputs.values()))
    with torch.cuda.graph(graph), _on(torch.cuda.current_stream().cuda_stream):
        compute(plugin, attributes, *views)
    first.copy_(first.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    near(outputs, plugin.reference(given[0].flip(0), *given[1:], **attributes))
