"""How processes of ours end: with their parent, and once."""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["STOPS", "die_with_parent", "undisturbed"]

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a command to stop: Ctrl-C, a supervisor, a terminal that was closed."""
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Linux: this process is killed when its parent dies, however it dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Clean up to the end: further signals to stop are ignored meanwhile (only the main thread can say so)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old = {number: signal.signal(number, signal.SIG_IGN) for number in STOPS}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
