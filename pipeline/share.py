"""Where the data that comes with the code lies: beside it in a checkout, inside the package in a wheel."""

from pathlib import Path

__all__ = ["code_root", "share"]

_PACKAGE = Path(__file__).resolve().parent


def share(name: str) -> Path:
    """Folder `conf` or `triton_repo`, wherever this installation keeps it."""
    for base in (_PACKAGE.parent, _PACKAGE / "_share"):
        if (base / name).is_dir() and (base != _PACKAGE.parent or (base / "pyproject.toml").exists()):
            return base / name
    raise FileNotFoundError(f"{name}/ is missing from this installation: install the package again")


def code_root() -> Path:
    """Folder that holds the packages `pipeline` and `plugins`."""
    return _PACKAGE.parent
