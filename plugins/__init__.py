"""R1's kernels as torch ops, `torch.ops.r1_pipeline.NAME`: a plugin is a folder, and a new one begins as a copy of `kv_quantize`.

    reference.py   what is right, in plain torch: everything else is compared with it
    kernel.cu      compiled by NVRTC at first use (`nvrtc.Source`); it may include the .cuh files of this folder. sm90_kernel.cu, if
                   it has instructions of that chip alone
    op.py          the op: what it refuses, shapes for export, the kernel for CUDA, the reference for CPU and what the kernel lacks
    tactics.py     where other libraries may do the work: which is fastest, as measured (`tactics.Table`)
    bench.py       `rows(bench)`, beside peers and the limit (`bench.Bench.row`); scripts/bench_plugins.py finds it
    trt.py         `PLUGINS` for TensorRT (`trt.Plugin`), each with a case in tests/unit/test_plugins_trt.py

The first three are needed. In the copy, and in one of tests/unit/test_plugins_kv_quantize.py, which needs no GPU, give the op and
its kernel names of their own: a name can be registered once. bench.py wants a GPU's rows in benchmarks/plugins_h200_DATE.json
before tests pass, so leave it out until then. The torch engine takes a plugin that stands in PLUGINS of
pipeline/engines/torch/carry.py, has a rule in choose.py, which says why not, and a place in plugged.py.
"""
