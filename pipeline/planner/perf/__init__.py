"""How fast an instance will be: an analytic model of a DeepSeek-V3 class model under TensorRT-LLM, calibrated to measurements.

    case = PerfCase(machine=Machine.of(config.hw), arch=arch, formats=case.formats, tp=8, ep=8, attention_dp=True,
                    concurrency=1024, isl=1000, osl=2000, mtp=1, moe_backend="CUTLASS", max_num_tokens=8192,
                    kv_tokens=rank_memory(...).kv_tokens, max_batch_size=128)
    predict(case)                        -> Prediction: ttft_ms, tpot_ms, tokens_per_user, tokens_per_gpu, active,
                                            interval (80 %, of tpot_ms), terms {name: us of an average step}, prefill
    predict_many(cases)                  -> Predictions: the same as arrays; [i] is a Prediction. Use it for searches.
    sweep(case, [1, 2, 4, ...])          -> Predictions over concurrency
    prefill_rate(case), decode_only(case, batches), disaggregate(prefill, decode, (P, D), concurrency) -> Disaggregated
    ablate(case)                         -> rows (name, title, gain, gain_at_published, published, source)

`concurrency` and `active` count requests over all ranks of one instance, `max_batch_size` and `kv_tokens` are per rank, as
TensorRT-LLM counts them. `isl` and `osl` are mean lengths. Share `machine`, `arch` and `formats` objects between the cases
of a search: what depends on them is counted once an object. Rooms: `work` counts bytes and FLOP, `step` turns them into
time, `serve` into TTFT and TPOT, `calibration` holds the numbers, `fit` finds them, `points` and `recipes` read
measurements. A new GPU needs a file in conf/hw only; a measured one gets effects by scripts/calibrate_planner.py.
"""

from pipeline.planner.perf.ablate import ABLATIONS, BASELINE, AblationRow, ablate
from pipeline.planner.perf.case import Machine, PerfCase, checkpoint_formats
from pipeline.planner.perf.disagg import Disaggregated, PrefillRate, decode_only, disaggregate, prefill_rate
from pipeline.planner.perf.predict import Prediction, Predictions, predict, predict_many, sweep

__all__ = [
    "ABLATIONS", "BASELINE", "AblationRow", "Disaggregated", "Machine", "PerfCase", "Prediction", "Predictions", "PrefillRate",
    "ablate", "checkpoint_formats", "decode_only", "disaggregate", "predict", "predict_many", "prefill_rate", "sweep",
]  # fmt: skip
