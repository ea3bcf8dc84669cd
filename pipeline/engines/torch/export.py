"""From `graph.Decoder` to a package that runs without this project: one process a form.

`torch.export` records the graph once for all sizes of B, T and P. Then, by `compiler` in engine.json,

  aoti    AOTInductor writes C++ (CPU) or Triton (CUDA) kernels and one library. A decode step of the embedded model takes
          a third of eager time, no Python runs in it, it needs no compiler where it is served, and on CUDA it can be
          captured in a CUDA graph. `torch.compile` gives the same kernels, but compiles in the server, at its start.
  export  The recorded graph itself, interpreted: the way out where there is no C++ compiler.

Weights stay outside of both packages, so the two forms share one file and its pages in memory.

Equal inputs give equal bytes. AOTInductor alone does not: the library contains paths of its temporary folder and of
torch (through __FILE__), file names are hashes of texts that hold such paths, thread counts of this machine are
compiled in, and the archive has a random id. So file names are fixed, a wrapper of the compiler maps the paths, and
the archive is written again without sources and id. On CUDA Triton's autotuner may choose otherwise from run to run.

Run as `python -m pipeline.engines.torch.export FORM FOLDER`; FOLDER has engine.json and weights.safetensors.
"""

from __future__ import annotations

import json
import shlex
import sys
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.export import Dim, ExportedProgram

from pipeline.engines.torch.graph import Decoder, Form
from pipeline.engines.torch.plugged import ops
from pipeline.models.arch import Arch

__all__ = ["accept_float32_groups", "compile_form", "export_form", "load_decoder", "new_caches", "write_compiler_wrapper"]

OPTIONS: dict[str, Any] = {
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,
    "aot_inductor.precompile_headers": False,  # a second process would wait for the first one's, and they outlive the build
    "aot_inductor.enable_line_tables": False,
    "compile_threads": 1,
    "cpp.vec_isa_ok": True,  # each compiler of C++17 knows AVX2 and AVX-512: to try them out took ten seconds
    "cpp.march": "",  # the picked vector instructions, not everything this processor has
    "cpp.threads": 8,
    "cpp.dynamic_threads": True,  # plan loops for 8 threads, run with as many as the server sets
}


def load_decoder(folder: Path, form: Form, weights: dict[str, Tensor] | None = None) -> Decoder:
    """The eager module of an engine folder, its weights mapped from the file."""
    info = json.loads((folder / "engine.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        decoder = Decoder(Arch(**info["arch"]), form, info["page_size"], getattr(torch, info["dtype"]), ops(info["plugins"]))
    weights = weights or load_file(folder / "weights.safetensors", device=info["device"])
    decoder.load_state_dict(weights, strict=True, assign=True)
    return decoder.eval()


def new_caches(info: dict[str, Any]) -> list[Tensor]:
    """One empty cache a layer."""
    shape = info["num_pages"], info["page_size"], info["latent_dim"]
    dtype = getattr(torch, info["kv_dtype"])
    return [torch.zeros(shape, dtype=dtype, device=info["device"]) for _ in range(info["num_layers"])]


def export_form(decoder: Decoder, form: Form, info: dict[str, Any]) -> ExportedProgram:
    """Record the graph with B, T and P left open, 1 included."""
    if info["dtype"] == "float32":
        accept_float32_groups()
    most_pages = -(-info["max_seq_len"] // info["page_size"])
    most = {"B": info["max_batch_size"] if form == "absorbed" else 1, "T": info["prefill_chunk"], "P": most_pages}
    sizes = {name: min(size, limit) for (name, limit), size in zip(most.items(), (3, 5, 4), strict=True)}
    dims = {name: Dim(name, min=1, max=limit) if limit > 1 else None for name, limit in most.items()}
    device = info["device"]
    tokens = torch.zeros(sizes["B"], sizes["T"], dtype=torch.int64, device=device)
    pages = torch.ones(sizes["B"], sizes["P"], dtype=torch.int64, device=device)
    rows, columns, width = ({axis: dims[name]} for axis, name in ((0, "B"), (1, "T"), (1, "P")))
    shapes = (rows | columns, rows | columns, rows | width, [None] * info["num_layers"])
    # Guard: on CUDA torch 2.11 cannot prove min(32 * P, 128 * P) == 32 * P; as an assertion at run time it holds
    late = {"prefer_deferred_runtime_asserts_over_guards": True} if _before(2, 12) else {}
    inputs = (tokens, tokens.clone(), pages, new_caches(info))
    return torch.export.export(decoder, inputs, dynamic_shapes=shapes, strict=False, **late)


def accept_float32_groups() -> None:
    """Let `grouped_mm` be traced in float32: its CPU kernel takes it, its shape function (torch 2.13) only bfloat16."""

    def shape_of(mat_a: Tensor, mat_b: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Tensor:
        return mat_a.new_empty(mat_a.shape[0], mat_b.shape[-1], dtype=out_dtype)

    torch.library.register_fake("aten::_grouped_mm", shape_of, allow_override=True)


def _call_grouped_mm_by_name() -> None:
    """Before torch 2.12 AOTInductor's lowering of `grouped_mm` wants a C function that is not there; this one does not."""
    from torch._inductor import lowering
    from torch._inductor.kernel import mm_grouped  # noqa: F401  registers the lowering that is replaced

    operator = torch.ops.aten._grouped_mm.default
    lowering.lowerings[operator] = lowering.fallback_handler(operator)


def compile_form(form: Form, folder: Path) -> None:
    """Write FORM.pt2 into the engine folder."""
    info = json.loads((folder / "engine.json").read_text(encoding="utf-8"))
    with torch.no_grad():
        program = export_form(load_decoder(folder, form), form, info)
    raw = Path(f"{form}.raw.pt2").absolute()
    if info["compiler"] == "aoti":
        if _before(2, 12):
            _call_grouped_mm_by_name()
        options = {name: value for name, value in OPTIONS.items() if name in torch._inductor.list_options()}
        options["aot_inductor.model_name_for_generated_files"] = form
        torch._inductor.aoti_compile_and_package(program, package_path=str(raw), inductor_configs=options)
    else:
        save_graph(program, raw)
    repack(raw, folder / f"{form}.pt2")
    raw.unlink()


def _before(*version: int) -> bool:
    return tuple(map(int, torch.__version__.split(".")[:2])) < version


def save_graph(program: ExportedProgram, path: Path) -> None:
    """Save without weights and without the source lines that nodes carry."""
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    program._state_dict = {name: _without_values(value) for name, value in program.state_dict.items()}
    program._example_inputs = None
    torch.export.save(program, path)


def _without_values(weight: Tensor) -> Tensor:
    empty = torch.empty_like(weight, device="meta")
    return torch.nn.Parameter(empty, requires_grad=False) if isinstance(weight, torch.nn.Parameter) else empty


def repack(source: Path, target: Path) -> None:
    """Write the archive again: sorted, without dates, without C++ sources (they name folders) and without the random id.

    Guard: before torch 2.12 the loader finds the library's metadata by the name of the C++ source, so it stays.
    """
    dropped = (".data/serialization_id",) if _before(2, 12) else (".cpp", ".data/serialization_id")
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        for name in sorted(old.namelist()):
            if not name.endswith(dropped):
                entry = zipfile.ZipInfo(f"{target.stem}/{name.partition('/')[2]}", (1980, 1, 1, 0, 0, 0))
                new.writestr(entry, old.read(name))


def write_compiler_wrapper(compiler: str, path: Path) -> None:
    """A compiler that forgets where torch and the working folder lie."""
    roots = (Path(torch.__file__).parents[1], path.parent)
    flags = shlex.join(f"-ffile-prefix-map={root}=." for root in roots)
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(compiler)} {flags} "$@"\n', encoding="utf-8")
    path.chmod(0o755)


if __name__ == "__main__":
    compile_form(sys.argv[1], Path(sys.argv[2]))  # type: ignore[arg-type]
