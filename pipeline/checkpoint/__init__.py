"""Checkpoints on disk, without torch: reading, writing, and what each tensor is."""

from pipeline.checkpoint.digest import digest
from pipeline.checkpoint.source import Checkpoint, Entry, dequantized
from pipeline.checkpoint.writer import ShardWriter

__all__ = ["Checkpoint", "Entry", "ShardWriter", "dequantized", "digest"]
