"""What a machine can do: `here.py` says it of this one for every engine, `target.py` holds a node against what a plan needs."""

from __future__ import annotations

from pipeline.doctor.here import Finding, examine

__all__ = ["Finding", "examine"]
