"""A plugin of pytest that keeps the tests which only run where there is a GPU: `python -m pytest -p tests._utils.only_gpu FILE`.

Their references run on the CPU: several such processes want OMP_NUM_THREADS=2, or each takes every core.
"""

from __future__ import annotations

import pytest

__all__ = ["pytest_collection_modifyitems"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the others nothing is run: no mark would skip them for want of a GPU."""
    kept = [item for item in items if any("no GPU" in mark.kwargs.get("reason", "") for mark in item.iter_markers("skipif"))]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
