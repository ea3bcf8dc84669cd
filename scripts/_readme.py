"""Tables in README.md that scripts write from a result."""

from __future__ import annotations

import re
import sys

__all__ = ["placed"]


def placed(text: str, name: str, table: str) -> str:
    """The text with a table between its two comments, `<!-- NAME: how it is written -->` and `<!-- end of NAME -->`."""
    between = re.compile(rf"(<!-- {re.escape(name)}: [^\n]*-->\n).*?(<!-- end of {re.escape(name)} -->)", re.DOTALL)
    if not between.search(text):
        sys.exit(f"README.md has no place for {name}: the comments `<!-- {name}: ... -->` and `<!-- end of {name} -->`.")
    return between.sub(lambda found: f"{found[1]}{table}\n{found[2]}", text)
