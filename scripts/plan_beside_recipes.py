#!/usr/bin/env python3
"""The planner's configurations beside published LLM-args files, line by line, both predicted.

    python scripts/plan_beside_recipes.py --recipes DIR [DIR ...] [--markdown FILE] [--json FILE] [--quick]

A `DIR` holds files named MODEL__HW__ISLkOSLk_tpN_concC.yaml, as NVIDIA/TensorRT-LLM examples/configs/database has them as
folders (MODEL/HW/1k1k_tp8_conc1024.yaml). Each is planned for the same GPUs, lengths and requests in flight. Files of
`benchmarks/inferencex/` hold what InferenceX says of a generation instance; the rest is the engine's default.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.config.load import load  # noqa: E402
from pipeline.planner.compare import Comparison, compare_file  # noqa: E402
from pipeline.planner.plan import make_plan  # noqa: E402
from scripts._options import result_file  # noqa: E402

NAME = re.compile(r"(?P<model>.+)__(?P<hw>\w+)__(?P<isl>\d+)k(?P<osl>\d+)k_tp(?P<tp>\d+)_conc(?P<load>\d+)\.yaml")


@dataclass(frozen=True, slots=True)
class Case:
    """One published file and the plan for the same question."""

    name: str
    settings: list[str]
    found: Comparison
    seconds: float

    @property
    def differing(self) -> int:
        """Arguments that are not the same."""
        return sum(line.differs for line in self.found.arguments)


def main() -> int:
    """Compare, print the summary, write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", type=Path, nargs="+", required=True)
    parser.add_argument("--markdown", type=Path, help="write the line-by-line comparison")
    parser.add_argument("--json", type=result_file)
    parser.add_argument("--quick", action="store_true", help="the first four files only")
    options = parser.parse_args()
    files = sorted((file for folder in options.recipes for file in folder.glob("*.yaml")), key=lambda file: file.name)
    files = [file for file in files if NAME.fullmatch(file.name)]
    if not files:
        sys.exit(f"{', '.join(map(str, options.recipes))} has no file named like MODEL__B200__1k1k_tp8_conc1024.yaml.")
    cases = [case_of(file) for file in files[: 4 if options.quick else None]]
    lines = list(summary(cases))
    print("\n".join(lines))
    if options.markdown:
        options.markdown.write_text("\n".join([*lines, "", *details(cases)]), encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps([plain(case) for case in cases], indent=1) + "\n", encoding="utf-8")
    return 0


def case_of(file: Path) -> Case:
    """Plan for the question that the file's name asks."""
    found = NAME.fullmatch(file.name)
    assert found is not None
    quant = "nvfp4_v2" if "FP4" in found["model"] else "fp8_block"
    settings = [
        f"+hw={found['hw'].lower()}", "model=deepseek_r1", f"quant={quant}", f"workload.isl={int(found['isl']) * 1024}",
        f"workload.osl={int(found['osl']) * 1024}", f"workload.concurrency={found['load']}", f"parallel.tp={found['tp']}",
    ]  # fmt: skip
    start = time.process_time()
    per_node = load(settings).hw.num_devices
    settings.append(f"hw.num_nodes={-(-int(found['tp']) // per_node)}")
    config = load(settings)
    report = make_plan(config, dict(config.model.hf)).report
    return Case(file.stem, settings, compare_file(config, config.model.hf, report, file), time.process_time() - start)


def summary(cases: list[Case]) -> Iterator[str]:
    """One row a file."""
    yield f"# Plans beside published configurations, {date.today()}"
    yield ""
    yield f"Predictions, nothing was run; Python {platform.python_version()}, {platform.machine()}."
    yield ""
    yield "| published file | ours | tokens/s/GPU, TPOT | theirs | tokens/s/GPU, TPOT | arguments that differ | CPU s |"
    yield "|---|---|---|---|---|---|---|"
    for case in cases:
        cells = [cell for point in (case.found.ours, case.found.theirs) for cell in speed(point)]
        yield f"| {case.name} | {' | '.join(cells)} | {case.differing} | {case.seconds:.1f} |"


def speed(point: Any) -> tuple[str, str]:
    """Layout, and its predicted speed."""
    if point is None:
        return "-", "not predicted"
    return point.label, f"{point.tokens_per_gpu:,.0f}, {point.prediction.tpot_ms:.1f} ms"


def details(cases: list[Case]) -> Iterator[str]:
    """Every argument that differs, with why ours is what it is."""
    for case in cases:
        yield f"## {case.name}"
        yield ""
        yield f"`plan {' '.join(case.settings)} --compare FILE`"
        yield ""
        yield "| argument | ours | theirs | why ours |"
        yield "|---|---|---|---|"
        for line in case.found.arguments:
            if line.differs:
                yield f"| {line.name} | {shown(line.ours)} | {shown(line.theirs)} | {line.why} |"
        yield ""
        yield from (f"- {text}" for text in case.found.renamed)
        yield from (f"- {item.level}: {item.text}" for item in case.found.findings)
        yield ""


def shown(value: Any) -> str:
    """A cell."""
    return "absent" if value is None else str(value)


def plain(case: Case) -> dict[str, Any]:
    """For JSON."""
    return {"file": case.name, "settings": case.settings, "arguments_that_differ": case.differing, **case.found.plain()}


if __name__ == "__main__":
    sys.exit(main())
