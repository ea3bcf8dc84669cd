"""Text of the launchers: shell scripts from small templates, YAML from data.

In `templates/`, `@NAME@` is a place to fill, and none may stay open.
"""

from __future__ import annotations

import re
import shlex
from importlib.resources import files
from typing import Any

import yaml

__all__ = ["Files", "dump", "fill", "quoted"]

Files = dict[str, str]
"""Path relative to `launch/` -> text."""
PLACE = re.compile(r"@([A-Z_]+)@")


def fill(template: str, **values: object) -> str:
    """The text of `templates/<template>` with every place filled; KeyError for one without a value."""
    text = files(__package__).joinpath("templates", template).read_text(encoding="utf-8")
    return PLACE.sub(lambda place: str(values[place[1].lower()]), text)


def dump(*documents: Any) -> str:
    """One YAML document or several, in the order of their keys, without anchors, texts of many lines as they are."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def quoted(value: str) -> str:
    """One word of a shell."""
    return shlex.quote(value)
