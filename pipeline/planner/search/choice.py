"""The recommended point as the planner's `Choice`, with a decision for everything that was searched, and as tables for reports."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pipeline.planner.case import Case
from pipeline.planner.choose import Choice, Decision, fraction_decision, moe_backend, rank_limits
from pipeline.planner.memory import memory_of
from pipeline.planner.perf import Machine, ablate
from pipeline.planner.search import Found, Point, Split
from pipeline.planner.search.chart import Mark, Series, front_svg
from pipeline.planner.search.nodes import why_nodes
from pipeline.planner.search.score import perf_case

__all__ = ["choice_of", "pictured", "speed_report"]

MODEL = "pipeline/planner/perf"
SEARCHED = ("max_batch_size", "max_num_tokens")


def choice_of(case: Case, found: Found) -> Choice:
    """What `plan` decides."""
    best = found.best
    setup = best.setup
    memory = min(memory_of(setup), key=lambda rank: rank.kv_tokens)
    why = {reason.name: reason.text(best) for reason in found.reasons}
    fixed = [
        item for item in rank_limits(case, setup.layout, setup.max_batch_size, setup.max_num_tokens) if item.name not in SEARCHED
    ]
    decisions = (
        Decision("layout", str(setup.layout), why["gpus_per_instance"], MODEL),
        Decision("instances", best.candidate.replicas, _instances(best), MODEL),
        Decision("nodes", best.candidate.nodes, why_nodes(case, found.counts), MODEL),
        Decision("attention_dp", setup.layout.attention_dp, why["attention_dp"], MODEL),
        Decision("ep", setup.layout.ep, why["ep"], MODEL),
        Decision("mtp", setup.mtp, why["mtp"], MODEL),
        moe_backend(case, setup.layout),
        Decision("max_batch_size", setup.max_batch_size, f"per rank: {why['concurrency']}", MODEL),
        Decision("max_num_tokens", setup.max_num_tokens, f"per rank: {why['max_num_tokens']}", MODEL),
        Decision("chunked_prefill", setup.chunked_prefill, why["chunked_prefill"], MODEL),
        fraction_decision(case, setup.fraction, setup.max_batch_size),
        *fixed,
    )
    return Choice(setup=setup, memory=memory, sequences=best.candidate.sequences, decisions=decisions)


def _instances(best: Point) -> str:
    total = best.candidate.paid
    idle = total - best.candidate.gpus
    more = f"; {idle} of {total} GPUs stay idle" if idle else f"; all {total} GPUs in use"
    return f"{best.setup.layout.world_size} GPUs each{more}"


def speed_report(case: Case, found: Found) -> dict[str, Any]:
    """What the plan's report says about speed."""
    return {"predicted": _predicted(found), "search": _tables(case, found), "ablation": _ablation(found.best)}


def pictured(report: dict[str, Any]) -> str:
    """The Pareto front of a report with `speed_report`, as SVG."""
    best, search = report["predicted"], report["search"]
    series = [Series(report["quant"], _marks(search["front"]))]
    series += [Series(name, _marks(rows)) for name, rows in search["other_precisions"].items()]
    series.append(Series("prefill and decode apart", _marks(search["disaggregated"])))
    high, low = (1e3 / value for value in best["tpot_interval_ms"])
    title = f"{report['model']['name']} on {report['hw']['title']}: predicted fronts"
    return front_svg(series, _marks([best])[0], (high, low), title)


def _ablation(best: Point) -> list[dict[str, Any]]:
    rows = ablate(perf_case(best.candidate, Machine.of(best.setup.hw)))
    gains = ("gain", "gain_at_published")
    return [asdict(row) | {name: value and _round(value) for name in gains for value in (getattr(row, name),)} for row in rows]


def _predicted(found: Found) -> dict[str, Any]:
    """The recommended point's speed."""
    best, prediction = found.best, found.best.prediction
    return {
        **_row(best),
        "tokens_per_gpu_interval": [_round(value) for value in prediction.tokens_per_gpu_interval],
        "meets_slo": found.meets_slo,
        "nodes_needed": found.nodes_needed,
        "terms_us": {name: _round(value) for name, value in prediction.terms.items()},
        "tokens_per_step": _round(prediction.accepted),
        "candidates": len(found.counts.scored),
    }


def _tables(case: Case, found: Found) -> dict[str, Any]:
    """Fronts, by precision and for splits, and what each number of nodes would give."""
    return {
        "nodes": _nodes(case, found),
        "front": [_row(point) for point in found.front],
        "other_precisions": {name: [_row(point) for point in points] for name, points in found.others.items()},
        "disaggregated": [_split(split) for split in found.splits],
        "reasons": [asdict(reason) for reason in found.reasons],
    }


def _nodes(case: Case, found: Found) -> list[dict[str, Any]]:
    """The best of every number of nodes that was tried."""
    best = {nodes: found.counts.best(case, nodes) for nodes in found.counts.tried}
    return [_row(item[0]) | {"enough": item[1]} for item in best.values() if item]


def _row(point: Point) -> dict[str, Any]:
    low, high = point.prediction.interval
    return {
        "layout": point.label,
        "nodes": point.candidate.nodes,
        "gpus": point.candidate.paid,
        "concurrency": point.candidate.concurrency,
        "max_batch_size": point.setup.max_batch_size,
        "max_num_tokens": point.setup.max_num_tokens,
        "ttft_ms": _round(point.prediction.ttft_ms),
        "tpot_ms": _round(point.prediction.tpot_ms),
        "tpot_interval_ms": [_round(low), _round(high)],
        "tokens_per_user": _round(point.prediction.tokens_per_user),
        "tokens_per_gpu": _round(point.tokens_per_gpu),
        "tokens_per_second": _round(point.tokens_per_second),
    }


def _split(split: Split) -> dict[str, Any]:
    return {
        "layout": split.label,
        "nodes": split.nodes,
        "concurrency": split.concurrency,
        "ttft_ms": _round(split.result.ttft_ms),
        "tpot_ms": _round(split.result.tpot_ms),
        "tpot_interval_ms": [_round(value) for value in split.result.interval],
        "tokens_per_user": _round(split.result.tokens_per_user),
        "tokens_per_gpu": _round(split.tokens_per_gpu),
        "bound": split.result.bound,
    }


def _marks(rows: list[dict[str, Any]]) -> list[Mark]:
    return [Mark(row["tokens_per_user"], row["tokens_per_gpu"], row["layout"]) for row in rows]


def _round(value: float) -> float:
    """Four figures: reports are equal byte for byte on every machine."""
    return float(f"{value:.4g}")
