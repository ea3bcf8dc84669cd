"""What scripts share: a result's file is refused before anything is measured."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from scripts._options import result_file


def test_a_result_needs_a_folder_that_is_there(tmp_path: Path) -> None:
    assert result_file(str(tmp_path / "x.json")) == tmp_path / "x.json" and result_file("x.json") == Path("x.json")
    with pytest.raises(argparse.ArgumentTypeError, match="gone is no folder: make it first"):
        result_file(str(tmp_path / "gone" / "x.json"))
    with pytest.raises(argparse.ArgumentTypeError, match="is a folder: name a file in it"):
        result_file(str(tmp_path))
