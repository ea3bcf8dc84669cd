"""R1's kernels as torch ops, `torch.ops.r1_pipeline.NAME`: a plugin is a folder, and a new one begins as a copy of `kv_quantize`.

    reference.py   what is right, in plain torch: everything else is compared with it
    kernel.cu      compiled by NVRTC at first use (`nvrtc.Source`); it may include the .cuh files of this folder. sm90_kernel.cu, if
                   it has instructions of that chip alone
    op.py          the op: what it refuses, shapes for export, the kernel for CUDA, the reference for CPU and what the kernel lacks
    tactics.py     where other libraries may do the work: which is fastest, as measured (`tactics.Table`)
    bench.py       `rows(bench)`, beside peers and the limit (`bench.Bench.row`); scripts/bench_plugins.py finds it
    trt.py         `PLUGINS` for TensorRT (`trt.Plugin`), each with a case in tests/unit/test_plugins_trt.py

The first three are needed, but where others' kernels do the work: fp4_allgather sends what quantize's make, gemm_tactics chooses
among cuBLASLt's algorithms and router_gemm's kernel. Those two and nvfp4_convert have no trt.py, as no network of TensorRT's has
such a layer, gemm_tactics no bench.py, as its tactics.json is one, and nvfp4_convert scripts/bench_convert_gpu.py instead.

Kernels are CUDA C++ and not Triton: they are matrix and copy instructions, clusters and dependent launch placed by hand, compiled
ahead for chips that are not here, and a server needs no compiler for them. In CI those without instructions of one chip run on the
CPU (tests/_utils/cuda_on_cpu.py); of the others (sm90_*.cu and router_gemm) it compiles the source and runs the op's CPU form.

In the copy, and in one of tests/unit/test_plugins_kv_quantize.py, which needs no GPU, give the op and
its kernel names of their own: a name can be registered once. bench.py wants a GPU's rows in benchmarks/plugins_h200_DATE.json
before tests pass, so leave it out until then. The torch engine takes a plugin that stands in PLUGINS of
pipeline/engines/torch/carry.py, has a rule in choose.py, which says why not, and a place in plugged.py.
"""
