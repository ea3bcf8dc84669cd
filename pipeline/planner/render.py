"""A plan's report as lines of plain text."""

from __future__ import annotations

from typing import Any

from pipeline.planner.memory import GIB
from pipeline.planner.perf import BASELINE

__all__ = ["ABLATION_HEADS", "ablation_cells", "render", "render_ablation"]

ABLATION_HEADS = ("optimisation", "predicted", "at the published load", "published", "source")


def render(report: dict[str, Any]) -> list[str]:
    """What `plan` prints: subject, memory of one rank, limits, decisions, warnings."""
    return [
        *_subject(report),
        *_speed(report),
        "",
        *_memory(report["memory"]),
        *_limits(report["limits"]),
        "",
        *_decisions(report["decisions"]),
        *_reuse(report.get("reuse")),
        *_topology(report.get("topology")),
        *[f"! {text}" for text in report["warnings"]],
        *[f"Not checked: {text}" for text in report["not_checked"]],
    ]


def render_ablation(report: dict[str, Any]) -> list[str]:
    """What each optimisation is worth at the planned point."""
    if "ablation" not in report:
        return [f"No speed is predicted for {report['hw']['title']} with engine {report['engine']}: nothing can be switched off."]
    rows = [ABLATION_HEADS, *(ablation_cells(row) for row in report["ablation"])]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d:<{widths[3]}}  {e}" for a, b, c, d, e in rows]
    return [*_subject(report), *_speed(report), "", *lines, BASELINE]


def ablation_cells(row: dict[str, Any]) -> tuple[str, str, str, str, str]:
    """One optimisation, below `ABLATION_HEADS`."""
    return row["title"], gain_text(row["gain"]), gain_text(row["gain_at_published"]), row["published"], row["source"]


def gain_text(gain: float | None) -> str:
    """+12.3 %, or how many times where that says more."""
    if gain is None:
        return "not in use"
    return f"{gain:+.1%}" if gain < 9 else f"{gain + 1:.0f} times"


def _subject(report: dict[str, Any]) -> list[str]:
    model, workload, deploy = report["model"], report["workload"], report["deploy"]
    asked = f"{workload['concurrency']} at once" if workload["concurrency"] else "as many as fit"
    parameters = f"{model['parameters']:,} parameters without MTP"
    stored = report.get("checkpoint")
    counted = [f"checkpoint: {stored['tensors']:,} tensors, {_decimal(stored['bytes'])}, by their headers"] if stored else []
    return [
        f"{model['name']}: {parameters}, {_decimal(model['checkpoint_bytes'])} as {report['quant']}",
        f"{report['hw']['title']}: engine {report['engine']}, {report['layout']}, {_devices(deploy['num_devices'])}",
        f"{workload['name']}: {workload['isl']} tokens in, {workload['osl']} out, {asked}",
        *counted,
    ]


def _speed(report: dict[str, Any]) -> list[str]:
    """The predicted point, and what other precisions or splitting prefill from decode would give at no more TPOT."""
    if "predicted" not in report:
        return []
    point, search = report["predicted"], report["search"]
    low, high = point["tpot_interval_ms"]
    lines = [
        f"predicted: {point['tokens_per_gpu']:,.0f} tokens/s/GPU at {point['concurrency']:,} requests at once, TPOT "
        f"{point['tpot_ms']:.1f} ms (80 %: {low:.1f} to {high:.1f}), TTFT {point['ttft_ms']:,.0f} ms; "
        f"best of {point['candidates']:,} configurations"
    ]
    for name, rows in (*search["other_precisions"].items(), ("prefill and decode apart", search["disaggregated"])):
        slow_enough = [row for row in rows if row["tpot_ms"] <= point["tpot_ms"]]
        if slow_enough:
            best = max(slow_enough, key=lambda row: row["tokens_per_gpu"])
            change = best["tokens_per_gpu"] / point["tokens_per_gpu"] - 1
            speed = f"{best['tokens_per_gpu']:,.0f} tokens/s/GPU ({change:+.0%}) at TPOT {best['tpot_ms']:.1f} ms"
            lines.append(f"  {name}: {best['layout']}, {speed}")
    return [*lines, *_nodes(search["nodes"])]


def _nodes(rows: list[dict[str, Any]]) -> list[str]:
    """What each number of nodes that was tried would give, where more than one was."""
    lines = [("nodes", "tokens/s", "TPOT, ms", "")] if len(rows) > 1 else []
    for row in rows if lines else ():
        verdict = f"{row['layout']}, {row['concurrency']:,} at once{'' if row['enough'] else ': not enough'}"
        lines.append((str(row["nodes"]), f"{row['tokens_per_second']:,.0f}", f"{row['tpot_ms']:.1f}", verdict))
    return [f"  {a:>5}  {b:>9}  {c:>8}  {d}".rstrip() for a, b, c, d in lines]


def _memory(memory: dict[str, Any]) -> list[str]:
    rows = [("memory of one rank", "GiB", "bytes")]
    rows += [(_component(row), _gib(row["bytes"]), f"{row['bytes']:,}") for row in memory["rows"]]
    rows.append(("visible to software", _gib(memory["visible"]), f"{memory['visible']:,}"))
    return _table(rows)


def _component(row: dict[str, Any]) -> str:
    return f"{row['component']} ({row['format']})" if row.get("format") else str(row["component"])


def _limits(limits: list[dict[str, Any]]) -> list[str]:
    if not limits:
        return []
    rows = [("limits", "a rank", "instance")]
    rows += [(row["name"], f"{row['rank']:,}", _count(row["instance"])) for row in limits]
    return ["", *_table(rows)]


def _decisions(decisions: list[dict[str, Any]]) -> list[str]:
    width = max(len(f"{row['name']} = {row['value']}") for row in decisions)
    lines = []
    for row in decisions:
        source = f" [{row['source']}]" if row["source"] else ""
        lines.append(f"{row['name']} = {row['value']}".ljust(width) + f"  {row['reason']}{source}")
    return lines


def _reuse(reuse: dict[str, Any] | None) -> list[str]:
    if not reuse:
        return []
    found = f"{reuse['this_cache']:.1%} of the prompt tokens are in the cache ({reuse['endless_cache']:.1%} in an endless one)"
    saved = f"{reuse['computed_tokens']:,} of {reuse['prompt_tokens']:,} tokens of a prompt are computed"
    times = reuse["prefill_ms"]
    return ["", f"reuse: {found}: {saved}, in at least {times['with']:,.1f} ms where all take {times['without']:,.1f}"]


def _topology(found: dict[str, Any] | None) -> list[str]:
    if not found:
        return []
    lines = ["", f"ranks on GPUs: CUDA_VISIBLE_DEVICES={found['visible_devices'][0]}, NVLink domains {found['nvlink_domains']}"]
    for name in ("decode_step", "prefill_step"):
        step = found[name]
        for kind in ("all_reduce_us", "all_to_all_us"):
            before, after = step[kind]["before"], step[kind]["after"]
            lines.append(f"  {kind[:-3]} of {step['tokens']:,} tokens: {before:,.1f} us in GPU order, {after:,.1f} us in this one")
    return lines


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    """Left-aligned names, right-aligned figures, a rule under the head."""
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}".rstrip() for a, b, c in rows]
    return [lines[0], "-" * (sum(widths) + 4), *lines[1:]]


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _decimal(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
