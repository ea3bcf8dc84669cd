"""A plan as one self-contained HTML page: no network, no script. The same report gives the same bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from pipeline.planner.memory import GIB
from pipeline.planner.perf import BASELINE
from pipeline.planner.render import ABLATION_HEADS, ablation_cells

__all__ = ["page"]

STYLE = """
body { font: 15px/1.45 Helvetica, Arial, sans-serif; color: #1a1a1a; max-width: 960px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: .2em; } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; width: 100%; font-size: .87em; } th { text-align: left; background: #f3f3f3; }
th, td { padding: .3em .6em; border-bottom: 1px solid #e3e3e3; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
svg { max-width: 100%; height: auto; } .wide { overflow-x: auto; }
.big { display: flex; flex-wrap: wrap; gap: 1em 2.2em; margin: 1em 0; }
.big b { display: block; font-size: 1.5em; } .refuse { color: #a40000; } .warn { color: #9a5b00; } small { color: #555; }
""".strip()
FIGURE = re.compile(r"[+-]?[\d.,]+(%| times| to [\d.,]+)?")
Rows = Iterable[Sequence[str]]


def page(report: dict[str, Any], *, front: str | None, memory: str | None) -> str:
    """`report` is that of the plan; `front` and `memory` are SVG pictures."""
    sections = [*_head(report), *_speed(report, front), *_memory(report, memory), *_decisions(report), *_findings(report)]
    title = escape(f"{report['model']['name']} on {report['hw']['title']}")
    return "\n".join([
        "<!doctype html>", '<html lang="en">', '<head><meta charset="utf-8">', f"<title>{title}</title>",
        f"<style>{STYLE}</style></head>", "<body>", *sections, "</body></html>", "",
    ])  # fmt: skip


def _head(report: dict[str, Any]) -> Iterator[str]:
    model, workload = report["model"], report["workload"]
    asked = f"{workload['concurrency']:,} at once" if workload["concurrency"] else "as many at once as fit"
    yield f"<h1>{escape(model['name'])} on {escape(report['hw']['title'])}</h1>"
    yield (
        f"<p>{escape(report['quant'])}, engine {escape(report['engine'])}; workload {escape(workload['name'])}: "
        f"{workload['isl']:,} tokens in, {workload['osl']:,} out, {asked}.</p>"
    )
    if predicted := report.get("predicted"):
        low, high = predicted["tpot_interval_ms"]
        yield '<div class="big">' + "".join(f"<span><b>{value}</b>{escape(name)}</span>" for value, name in (
            (escape(predicted["layout"]), f"{predicted['concurrency']:,} requests at once"),
            (f"{predicted['tokens_per_gpu']:,.0f}", "tokens/s/GPU"),
            (f"{predicted['tpot_ms']:.1f} ms", f"TPOT (80 %: {low:.1f} to {high:.1f})"),
            (f"{predicted['ttft_ms']:,.0f} ms", "TTFT"),
            (f"{predicted['tokens_per_second']:,.0f}", f"tokens/s on {predicted['nodes']} node{'s'[: predicted['nodes'] - 1]}"),
        )) + "</div>"  # fmt: skip


def _speed(report: dict[str, Any], front: str | None) -> Iterator[str]:
    if not front:
        return
    yield "<h2>Speed</h2>"
    yield front
    search = report["search"]
    count = report["predicted"]["candidates"]
    yield f"<p><small>{count:,} configurations of this precision were predicted; none was run.</small></p>"
    heads = ("configuration", "nodes", "at once", "TTFT, ms", "TPOT, ms", "80 %", "tokens/s/user", "tokens/s/GPU")
    yield from _table(heads, (_front_row(row) for row in search["front"]))
    if len(search["nodes"]) > 1:
        yield "<h2>How many nodes</h2>"
        yield from _table((*heads, "tokens/s", "enough"), (_node_row(row) for row in search["nodes"]))
    if search["disaggregated"]:
        yield "<h2>Prefill and decode apart</h2>"
        yield from _table(heads, (_front_row(row) for row in search["disaggregated"]))
    yield "<h2>What each optimisation is worth here</h2>"
    yield from _table(ABLATION_HEADS, (ablation_cells(row) for row in report["ablation"]))
    yield f"<p><small>{escape(BASELINE)}</small></p>"


def _front_row(row: dict[str, Any]) -> list[str]:
    low, high = row["tpot_interval_ms"]
    figures = (f"{row['concurrency']:,}", f"{row['ttft_ms']:,.0f}", f"{row['tpot_ms']:.1f}", f"{low:.1f} to {high:.1f}")
    return [row["layout"], str(row["nodes"]), *figures, f"{row['tokens_per_user']:.1f}", f"{row['tokens_per_gpu']:,.0f}"]


def _node_row(row: dict[str, Any]) -> list[str]:
    return [*_front_row(row), f"{row['tokens_per_second']:,.0f}", "yes" if row["enough"] else "no"]


def _memory(report: dict[str, Any], picture: str | None) -> Iterator[str]:
    memory = report["memory"]
    yield "<h2>Memory of one rank</h2>"
    if picture:
        yield picture
    rows = [(row["component"], f"{row['bytes'] / GIB:.2f}", f"{row['bytes']:,}") for row in memory["rows"]]
    rows.append(("visible to software", f"{memory['visible'] / GIB:.2f}", f"{memory['visible']:,}"))
    yield from _table(("component", "GiB", "bytes"), rows)
    limits = [(row["name"], _count(row["rank"]), _count(row["instance"])) for row in report["limits"]]
    if limits:
        yield "<h2>Limits</h2>"
        yield from _table(("limit", "a rank", "instance"), limits)


def _decisions(report: dict[str, Any]) -> Iterator[str]:
    yield "<h2>Decisions</h2>"
    rows = ((f"{row['name']} = {row['value']}", row["reason"], row["source"]) for row in report["decisions"])
    yield from _table(("decision", "why", "source"), rows)


def _findings(report: dict[str, Any]) -> Iterator[str]:
    yield "<h2>Rules</h2>"
    findings = report.get("findings") or []
    yield f"<p>{len(findings) or 'No'} finding{'' if len(findings) == 1 else 's'}.</p>"
    for item in findings:
        yield f'<p class="{escape(item["level"])}">{escape(item["text"])} <small>{escape(item["source"])}</small></p>'
    for text in (*report["warnings"], *report["not_checked"]):
        if not any(item["text"] == text for item in findings):
            yield f"<p>{escape(text)}</p>"


def _table(heads: Sequence[str], rows: Rows) -> Iterator[str]:
    """Columns of figures are aligned right."""
    body = [[str(cell) for cell in row] for row in rows]
    right = [bool(body) and all(_figure(row[i]) for row in body) for i in range(len(heads))]
    kind = ['class="n"' if number else "" for number in right]
    yield '<div class="wide"><table>'
    yield "<tr>" + "".join(f"<th {k}>{escape(head)}</th>" for head, k in zip(heads, kind, strict=True)) + "</tr>"
    for row in body:
        yield "<tr>" + "".join(f"<td {k}>{escape(cell)}</td>" for cell, k in zip(row, kind, strict=True)) + "</tr>"
    yield "</table></div>"


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _figure(cell: str) -> bool:
    return bool(FIGURE.fullmatch(cell)) or cell in ("", "not in use")
