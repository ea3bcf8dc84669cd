"""The KV cache, and its way from prefill to decode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeline.lint.args.subject import LLM_ARGS, Args
from pipeline.lint.base import ERROR, NOTE, WARNING, Fault, Rule
from pipeline.planner.rules.base import ISSUE, PULL

__all__ = ["RULES"]

CREATOR = "TensorRT-LLM py_executor_creator.py"
KV, TRANSFER = "kv_cache_config", "cache_transceiver_config"
FRACTION = f"{KV}.free_gpu_memory_fraction"
TIGHT = 0.97
"""Published recipes go up to 0.93."""


def _fraction(args: Args) -> Iterator[Fault]:
    value = args.get(FRACTION)
    if isinstance(value, (int, float)) and (value == 0 or value > TIGHT):
        what = "leaves nothing for CUDA graphs and activations" if value else "leaves no cache"
        yield Fault(args.at(FRACTION), f"free_gpu_memory_fraction {value:g} {what}")


def _sparse(args: Args) -> Iterator[Fault]:
    if args.get(f"{KV}.dtype") == "fp8_ds_mla" and not args.get("sparse_attention_config"):
        yield Fault(args.at(f"{KV}.dtype"), "fp8_ds_mla is for sparse MLA, and there is no sparse_attention_config")


def _sparse_sm(args: Args) -> Iterator[Fault]:
    if args.get(f"{KV}.dtype") == "fp8_ds_mla" and args.target.sm not in (None, 90, 120, 121):
        yield Fault(args.at(f"{KV}.dtype"), f"fp8_ds_mla has kernels for SM90, SM120 and SM121, hw= is SM{args.target.sm}")


def _cap(args: Args) -> Iterator[Fault]:
    if args.get(f"{KV}.fp8_context_mla_kv_len_cap") and args.get(f"{KV}.dtype") != "fp8":
        place = args.at(f"{KV}.fp8_context_mla_kv_len_cap")
        yield Fault(place, f"fp8_context_mla_kv_len_cap has no effect with kv_cache_config.dtype {args.get(f'{KV}.dtype')}")


def _disk(args: Args) -> Iterator[Fault]:
    size, path = args.count(f"{KV}.disk_cache_size", 0), args.get(f"{KV}.disk_cache_path")
    if size and not path:
        yield Fault(args.at(f"{KV}.disk_cache_size"), f"disk_cache_size {size} without disk_cache_path")


def _flashinfer(args: Args) -> Iterator[Fault]:
    if args.get("attn_backend") == "FLASHINFER" and args.given(f"{KV}.enable_block_reuse") and args.get(f"{KV}.enable_block_reuse"):
        yield Fault(args.at(f"{KV}.enable_block_reuse"), "attn_backend FLASHINFER turns block reuse off")


def _deterministic(args: Args) -> Iterator[Fault]:
    variables = args.get("env_overrides")
    forced = isinstance(variables, dict) and str(variables.get("FORCE_DETERMINISTIC")) == "1"
    if forced and args.given(f"{KV}.enable_block_reuse") and args.get(f"{KV}.enable_block_reuse"):
        yield Fault(args.at(f"{KV}.enable_block_reuse"), "FORCE_DETERMINISTIC=1 turns block reuse off")


def _skip_correction(args: Args) -> Iterator[Fault]:
    if args.get("enable_mla_skip_correction") and args.get("attn_backend") not in (None, "TRTLLM"):
        place = args.at("enable_mla_skip_correction")
        yield Fault(place, f"enable_mla_skip_correction needs attn_backend TRTLLM, not {args.get('attn_backend')}")


def _pipelined(args: Args) -> Iterator[Fault]:
    """What TensorRT-LLM asks for, and what each is."""
    if not args.get(f"{TRANSFER}.enable_pipelined_transfer"):
        return
    wanted = {
        "cache_transceiver_config.backend NIXL": args.get(f"{TRANSFER}.backend") in ("NIXL", "DEFAULT"),
        "transceiver_runtime PYTHON": args.get(f"{TRANSFER}.transceiver_runtime") in ("PYTHON", "auto"),
        "enable_chunked_prefill": bool(args.get("enable_chunked_prefill")),
        "pipeline_parallel_size 1": args.pp == 1,
        "context_parallel_size 1": args.cp == 1,
        "max_beam_width 1": args.count("max_beam_width") == 1,
    }
    if missing := [name for name, holds in wanted.items() if not holds]:
        yield Fault(args.at(f"{TRANSFER}.enable_pipelined_transfer"), f"enable_pipelined_transfer needs {', '.join(missing)}")


def _backend(args: Args) -> str:
    return str(args.get(f"{TRANSFER}.backend") or "").upper()


def _nixl(args: Args) -> Iterator[Fault]:
    if _backend(args) == "NIXL" and args.numbers < (1, 2):
        reason = f"NIXL 0.6 and later does not load in containers of TensorRT-LLM {args.line.line} (undefined symbol nixlDescList)"
        yield Fault(args.at(f"{TRANSFER}.backend"), reason)


def _timeout(args: Args) -> Iterator[Fault]:
    if _backend(args) in ("NIXL", "DEFAULT") and not args.get(f"{TRANSFER}.kv_transfer_timeout_ms"):
        yield Fault(
            args.at(f"{TRANSFER}.backend"),
            "a lost completion notice of NIXL leaves a request hanging for good: there is no timeout",
        )


def _ucx(args: Args) -> Iterator[Fault]:
    if _backend(args) == "UCX" and args.target.sm in (100, 103):
        yield Fault(args.at(f"{TRANSFER}.backend"), f"UCX before 1.19 does not use NVLink on SM{args.target.sm}")


def _buffer(args: Args) -> Iterator[Fault]:
    size, config = args.count(f"{TRANSFER}.max_tokens_in_buffer", 0), args.target.config
    isl = config.workload.isl if config and args.target.load else None
    if size and isl and isl > size:
        yield Fault(args.at(f"{TRANSFER}.max_tokens_in_buffer"), f"max_tokens_in_buffer {size} is below workload.isl={isl}")


def _path(args: Args) -> Iterator[Fault]:
    """A path in a file that was made for another machine cannot be looked up here."""
    path = args.get(f"{KV}.disk_cache_path")
    if isinstance(path, str) and args.count(f"{KV}.disk_cache_size", 0) and Path(path).is_file():
        yield Fault(args.at(f"{KV}.disk_cache_path"), f"disk_cache_path {path} is a file, not a folder")


RULES: tuple[Rule[Args], ...] = (
    Rule("args/cache-share", WARNING, _fraction, "set 0.8 to 0.9", f"{LLM_ARGS}: KvCacheConfig"),
    Rule("args/sparse-cache", ERROR, _sparse, "set dtype: fp8", f"{LLM_ARGS}: KvCacheConfig.dtype"),
    Rule("args/sparse-cache-sm", ERROR, _sparse_sm, "set dtype: fp8", f"{LLM_ARGS}: KvCacheConfig.dtype"),
    Rule("args/mla-cap", NOTE, _cap, "set kv_cache_config.dtype: fp8, or remove it", f"{LLM_ARGS}: KvCacheConfig"),
    Rule("args/disk-cache", ERROR, _disk, "name an existing folder as disk_cache_path", f"{LLM_ARGS}: KvCacheConfig"),
    Rule("args/disk-cache-path", ERROR, _path, "name an existing folder", f"{LLM_ARGS}: KvCacheConfig"),
    Rule("args/reuse-flashinfer", WARNING, _flashinfer, "leave attn_backend at TRTLLM", CREATOR),
    Rule("args/reuse-deterministic", WARNING, _deterministic, "remove one of them", CREATOR),
    Rule("args/mla-skip-correction", ERROR, _skip_correction, "leave attn_backend at TRTLLM", LLM_ARGS),
    Rule("args/pipelined-transfer", ERROR, _pipelined, "set them, or leave it out", f"{LLM_ARGS}: CacheTransceiverConfig"),
    Rule("args/nixl-release", WARNING, _nixl, "serve with 1.2 or later, or use UCX", f"{ISSUE} 9752"),
    Rule("args/transfer-timeout", NOTE, _timeout, "set kv_transfer_timeout_ms: 60000, and watch it", f"{ISSUE} 17665"),
    Rule("args/ucx-nvlink", NOTE, _ucx, "use UCX 1.19 or later, or set UCX_RNDV_FRAG_MEM_TYPE=cuda", f"{PULL} 6024"),
    Rule("args/transfer-buffer", WARNING, _buffer, "set it to the longest prompt or more", "TensorRT-LLM features/disagg-serving"),
)  # fmt: skip
