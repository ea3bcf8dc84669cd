"""Model repositories as people write them, small: TensorRT-LLM's llmapi model, an ensemble over an engine, vLLM's model."""

from __future__ import annotations

from pathlib import Path

__all__ = ["BASES", "write"]

CODE = "class TritonPythonModel:\n    def execute(self, requests):\n        requests[0].get_response_sender()\n"


def _tensors(kind: str, *names: str) -> str:
    """`a:STRING:-1?` is an optional tensor a of strings of any length."""
    rows = []
    for name in names:
        title, data_type, dims = name.rstrip("?").split(":")
        optional = " optional: true" if name.endswith("?") else ""
        rows.append(f'  {{ name: "{title}" data_type: TYPE_{data_type} dims: [{dims}]{optional} }}')
    return f"{kind} [\n" + ",\n".join(rows) + "\n]\n"


def _model(name: str, rest: str, backend: str = "python", batch: int = 0) -> str:
    return f'name: "{name}"\nbackend: "{backend}"\nmax_batch_size: {batch}\n{rest}'


def _parameters(**values: str) -> str:
    return "".join(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in values.items())


CPU = "instance_group [{ count: 1 kind: KIND_CPU }]\n"
STREAMS = "model_transaction_policy { decoupled: true }\n"
LLMAPI = {
    "llm/config.pbtxt": _model(
        "llm",
        _tensors("input", "text_input:STRING:-1", "streaming:BOOL:1?", "sampling_param_max_tokens:INT32:1?")
        + _tensors("output", "text_output:STRING:-1")
        + CPU
        + STREAMS,
    ),
    "llm/1/model.py": CODE,
    "llm/1/model.yaml": (
        "model: deepseek-ai/checkpoint\ntensor_parallel_size: 8\nmoe_expert_parallel_size: 8\n"
        "kv_cache_config: {free_gpu_memory_fraction: 0.7}\ntriton_config: {decoupled: true, max_batch_size: 0}\n"
    ),
}
VLLM = {
    "r1/config.pbtxt": _model(
        "r1",
        _tensors("input", "text_input:STRING:1", "stream:BOOL:1?")
        + _tensors("output", "text_output:STRING:-1")
        + "instance_group [{ count: 1 kind: KIND_MODEL }]\n"
        + STREAMS
        + _parameters(GPU_DEVICE_IDS="0,1,2,3,4,5,6,7"),
        "vllm",
    ),
    "r1/1/model.json": (
        '{"model": "deepseek-ai/DeepSeek-R1", "tensor_parallel_size": 8, "max_model_len": 16384, "block_size": 64,\n'
        ' "gpu_memory_utilization": 0.9, "kv_cache_dtype": "fp8", "enable_prefix_caching": true,\n'
        ' "max_num_seqs": 256, "max_num_batched_tokens": 8192}\n'
    ),
}
STEPS = (
    'ensemble_scheduling { step [\n'
    '  { model_name: "preprocessing" model_version: -1\n'
    '    input_map { key: "QUERY" value: "text_input" } input_map { key: "REQUEST_OUTPUT_LEN" value: "max_tokens" }\n'
    '    input_map { key: "STOP_WORDS_DICT" value: "stop_words" }\n'
    '    output_map { key: "INPUT_ID" value: "_IDS" } output_map { key: "STOP_WORDS_IDS" value: "_STOPS" }\n'
    '    output_map { key: "OUT_END_ID" value: "_END" } },\n'
    '  { model_name: "tensorrt_llm" model_version: -1\n'
    '    input_map { key: "input_ids" value: "_IDS" } input_map { key: "stop_words_list" value: "_STOPS" }\n'
    '    input_map { key: "end_id" value: "_END" }\n'
    '    output_map { key: "output_ids" value: "_TOKENS" } },\n'
    '  { model_name: "postprocessing" model_version: -1\n'
    '    input_map { key: "TOKENS_BATCH" value: "_TOKENS" } output_map { key: "OUTPUT" value: "text_output" } }\n'
    "] }\n"
)  # fmt: skip
ENSEMBLE = {
    "preprocessing/config.pbtxt": _model(
        "preprocessing",
        _tensors("input", "QUERY:STRING:1", "REQUEST_OUTPUT_LEN:INT32:1", "STOP_WORDS_DICT:STRING:-1?")
        + _tensors("output", "INPUT_ID:INT32:-1", "STOP_WORDS_IDS:INT32:2, -1", "OUT_END_ID:INT32:1")
        + CPU
        + _parameters(tokenizer_dir="/tokenizer"),
        batch=8,
    ),
    "preprocessing/1/model.py": CODE,
    "tensorrt_llm/config.pbtxt": _model(
        "tensorrt_llm",
        _tensors("input", "input_ids:INT32:-1", "stop_words_list:INT32:2, -1?", "end_id:INT32:1?")
        + _tensors("output", "output_ids:INT32:-1, -1")
        + CPU
        + STREAMS
        + _parameters(
            gpt_model_path="/engine", batching_strategy="inflight_fused_batching", kv_cache_free_gpu_mem_fraction="0.8"
        ),
        "tensorrtllm",
        8,
    ),
    "tensorrt_llm/1/.gitkeep": "",
    "postprocessing/config.pbtxt": _model(
        "postprocessing",
        _tensors("input", "TOKENS_BATCH:INT32:-1, -1") + _tensors("output", "OUTPUT:STRING:-1") + CPU
        + _parameters(tokenizer_dir="/tokenizer"),
        batch=8,
    ),
    "postprocessing/1/model.py": CODE,
    "ensemble/config.pbtxt": (
        'name: "ensemble"\nplatform: "ensemble"\nmax_batch_size: 8\n'
        + _tensors("input", "text_input:STRING:1", "max_tokens:INT32:1", "stop_words:STRING:-1?")
        + _tensors("output", "text_output:STRING:-1")
        + STEPS
    ),
    "ensemble/1/.gitkeep": "",
    "tensorrt_llm_bls/config.pbtxt": _model(
        "tensorrt_llm_bls",
        _tensors("input", "text_input:STRING:1", "max_tokens:INT32:1", "stream:BOOL:1?")
        + _tensors("output", "text_output:STRING:-1")
        + CPU.replace("1", "64")
        + STREAMS
        + _parameters(accumulate_tokens="true", tensorrt_llm_model_name="tensorrt_llm"),
        batch=8,
    ),
    "tensorrt_llm_bls/1/model.py": CODE,
}  # fmt: skip
BASES = {"llmapi": LLMAPI, "vllm": VLLM, "ensemble": ENSEMBLE}


def write(folder: Path, files: dict[str, str]) -> Path:
    """The files below `folder`."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder
