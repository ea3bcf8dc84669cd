"""What a checkpoint is, from its headers: formats, sizes, ranks, and what is odd about it. Without torch."""

from pipeline.inspect.contents import Contents
from pipeline.inspect.report import Inspection, inspect

__all__ = ["Contents", "Inspection", "inspect"]
