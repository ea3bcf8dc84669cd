#!/usr/bin/env python3
"""Set up on a fresh machine, then run the main job or the tests. Needs Python 3.11 or 3.12 and git, nothing else.

    python3 scripts/bootstrap.py           set up, build +hw=cpu, serve it, stream text from it
    python3 scripts/bootstrap.py --test    set up, run the tests
    python3 scripts/bootstrap.py --only    set up, no more

It makes .venv in the checkout and installs the project into it. The embedded engine needs a C++ compiler and
tritonserver's python backend needs libpython; as root on Debian or Ubuntu they are installed, elsewhere the line to
run is printed. Only the standard library is used here.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
TORCH = "2.13.0"
MAX_WORKERS = 4
"""A worker of the tests takes a gigabyte."""


def main() -> int:
    """Set up, then do what was asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--test", action="store_true", help="run the tests after setting up")
    parser.add_argument("--only", action="store_true", help="set up and stop")
    options = parser.parse_args()
    started = time.monotonic()
    check_python()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process would compile torch, which pip has not, anew
    install_system_packages(with_browser=options.test)
    install_project(["torch", "server", *(["test"] if options.test else [])])
    print(f"set up in {time.monotonic() - started:.0f} s", flush=True)
    if options.only:
        return 0
    return run_tests() if options.test else run_main_job()


def check_python() -> None:
    """Refuse a Python that cannot run the product or the server."""
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        sys.exit(
            f"Python {platform.python_version()} is not supported here: run this script with python3.11 or python3.12 "
            "(the embedded tritonserver's python backend needs numpy < 2, which later Pythons do not have)."
        )


def install_system_packages(*, with_browser: bool) -> None:
    """A C++ compiler, libpython and venv, where they are missing; for tests a browser too, without which one file is skipped."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    missing = [
        *([] if has_venv() else [f"python{version}-venv"]),
        *([] if shutil.which("g++") or shutil.which("clang++") else ["g++"]),
        *([] if has_libpython(version) else [f"libpython{version}"]),
    ]
    able = os.geteuid() == 0 and shutil.which("apt-get")
    if with_browser and able and not any(shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")):
        missing.append("chromium")
    if not missing:
        return
    command = f"apt-get update && apt-get install -y --no-install-recommends {' '.join(missing)}"
    if not able:
        sys.exit(f"Missing here: {', '.join(missing)}. Run as root (Debian, Ubuntu): {command}")
    print(f"installing {', '.join(missing)}", flush=True)
    run(["sh", "-c", f"export DEBIAN_FRONTEND=noninteractive; {command}"], quiet=True)


def has_venv() -> bool:
    """Debian ships `venv` without the `ensurepip` that it needs."""
    try:
        import ensurepip  # noqa: F401
    except ImportError:
        return False
    return True


def has_libpython(version: str) -> bool:
    """The shared library that embeds this interpreter, beside it or in the system."""
    name = f"libpython{version}.so.1.0"
    if (Path(sysconfig.get_config_var("LIBDIR") or "") / name).exists():
        return True
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def install_project(extras: list[str]) -> None:
    """The project, editable, with torch's CPU build where an index offers one."""
    if not PYTHON.exists():
        run([sys.executable, "-m", "venv", str(VENV)])
    # Python compiles what is imported when it is; pip would compile everything, which is half of its time.
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    run([*pip, "pip>=25"], check=False, quiet=True)  # Python 3.11 brings pip 23, which takes 59 CPU seconds for what 26 does in 21
    if not installed("torch"):
        print("installing torch", flush=True)
        if run([*pip, f"torch=={TORCH}+cpu"], check=False, quiet=True) != 0:
            warn_about_cuda()
            run([*pip, f"torch=={TORCH}"])
    print("installing the project", flush=True)
    run([*pip, "-e", f"{ROOT}[{','.join(extras)}]"])


def installed(package: str) -> bool:
    """Whether the environment has the package, without importing it."""
    probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    return run([str(PYTHON), "-c", probe], check=False) == 0


def warn_about_cuda() -> None:
    """On x86-64 Linux the plain index carries the CUDA build."""
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        print(
            f"note: no index here offers torch {TORCH}+cpu, so pip may take the CUDA build (several GB). To avoid it, stop, "
            "set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels, and run this again.",
            flush=True,
        )


def run_main_job() -> int:
    """Build for this machine, then serve and stream."""
    for command in ("build", "smoke"):
        print(f"\n$ python -m pipeline {command} +hw=cpu", flush=True)
        if code := run([str(PYTHON), "-m", "pipeline", command, "+hw=cpu"], check=False):
            return code
    print("\nServe it yourself: .venv/bin/python -m pipeline serve +hw=cpu", flush=True)
    return 0


def run_tests() -> int:
    """The whole suite, a worker a core and a file on one of them, for its servers; GPU tests skip themselves with the reason."""
    workers = str(min(MAX_WORKERS, os.cpu_count() or 1))
    return run([str(PYTHON), "-m", "pytest", "-q", "-n", workers, "--dist", "loadfile"], check=False)


def run(command: list[str], *, check: bool = True, quiet: bool = False) -> int:
    """Run in the checkout; a failure of a checked command ends this script with its output."""
    output = subprocess.PIPE if quiet else None
    done = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT if quiet else None, text=True, check=False)
    if check and done.returncode != 0:
        sys.exit(f"{done.stdout or ''}\nfailed ({done.returncode}): {' '.join(command)}")
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
