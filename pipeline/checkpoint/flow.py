"""Threads that hand things on through bounded queues, and all stop when one of them fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from threading import Condition, Thread
from typing import Any, Generic, TypeVar

__all__ = ["Channel", "Flow", "StoppedError"]

Item = TypeVar("Item")


class StoppedError(Exception):
    """Another thread has failed, or nobody wants the result any more."""


class Flow:
    """One lock for all queues of a run: they pass a few hundred things a second."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.error: BaseException | None = None
        self.stopped = False
        self._threads: list[Thread] = []

    def start(self, work: Callable[[], None], count: int = 1) -> None:
        """Run `work` on threads of its own."""
        for _ in range(count):
            thread = Thread(target=self._guarded, args=(work,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def wait_until(self, condition: Callable[[], Any]) -> None:
        """Sleep till it holds. The lock is held while it is asked, and when this returns if the caller had it."""
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or condition())
            if self.stopped:
                raise StoppedError

    def stop(self, error: BaseException | None = None) -> None:
        """Wake everybody up to end; the first error is kept."""
        with self.changed:
            self.error = self.error or error
            self.stopped = True
            self.changed.notify_all()

    def join(self) -> None:
        """Wait for all threads."""
        for thread in self._threads:
            thread.join()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except StoppedError:
            pass
        except BaseException as error:
            self.stop(error)


class Channel(Generic[Item]):
    """A queue of at most `limit` things (0: any number)."""

    def __init__(self, flow: Flow, limit: int = 0, items: Iterable[Item] = ()) -> None:
        self._flow, self._limit, self._items = flow, limit, deque(items)

    def put(self, item: Item) -> None:
        """Wait for room."""
        with self._flow.changed:
            self._flow.wait_until(lambda: not self._limit or len(self._items) < self._limit)
            self._items.append(item)
            self._flow.changed.notify_all()

    def get(self) -> Item:
        """Wait for a thing."""
        with self._flow.changed:
            self._flow.wait_until(lambda: self._items)
            item = self._items.popleft()
            self._flow.changed.notify_all()
            return item
