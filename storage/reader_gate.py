"""ReaderGate: who is reading, for a writer that must not run far ahead of old readers.

An open LMDB read keeps every page freed after it from being reused. Commits that then take pages elsewhere break up the
room that large values need, and a store that holds what it promised runs full. So a commit waits for reads that
outlived the commit before, and where the map is full all the same, new reads wait for the writer for once. Every wait
is bounded, so a read that never ends slows the writer down and stops nothing.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from weakref import WeakKeyDictionary

_OLD_READER_SECONDS: Final = 0.1
_DRAIN_SECONDS: Final = 1.0


class Reader:
    """One read under way. Keep it in a local variable of the function that reads, and nowhere else."""

    __slots__ = ("__weakref__",)


class ReaderGate:
    """Between any number of reading threads and one that commits. Safe to interrupt with Ctrl-C."""

    def __init__(self) -> None:
        """Make a gate with nobody inside."""
        self.closed = False
        # Reads under way, each with the number of commits before it. Weak, since Ctrl-C may come before `leave` does
        # anything: the read then ends with the frame that it is a local variable of.
        self._reading: WeakKeyDictionary[Reader, int] = WeakKeyDictionary()
        self._commits = 0
        self._draining = False
        # Entered through its plain lock, as in WriteQueue.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def enter(self, reader: Reader) -> bool:
        """Begin a read; False if the gate is closed. ``leave`` must follow, whatever happened here."""
        with self._lock:
            if self._draining:
                self._changed.wait_for(lambda: not self._draining, _DRAIN_SECONDS)
            if not self.closed:
                self._reading[reader] = self._commits
            return not self.closed

    def leave(self, reader: Reader) -> None:
        """End a read."""
        with self._lock:
            self._reading.pop(reader, None)
            self._changed.notify_all()

    def close(self) -> bool:
        """Let nobody in any more; say whether all have left."""
        with self._lock:
            self.closed = True
            return self._changed.wait_for(lambda: not self._reading, _DRAIN_SECONDS)

    # -- the writer's side ----------------------------------------------------------------------------------------

    def wait_for_old_readers(self) -> None:
        """Wait a little for reads that began before the last commit but one."""
        with self._lock:
            oldest = self._commits - 1
            self._changed.wait_for(lambda: all(at >= oldest for at in self._reading.values()), _OLD_READER_SECONDS)

    def count_commit(self) -> None:
        """Say that a commit is complete: reads that begin from now on see it."""
        with self._lock:
            self._commits += 1

    @contextmanager
    def without_readers(self) -> Iterator[None]:
        """Hold new reads back while the block runs."""
        with self._lock:
            self._draining = True
            self._changed.wait_for(lambda: not self._reading, _DRAIN_SECONDS)
        try:
            yield
        finally:
            with self._lock:
                self._draining = False
                self._changed.notify_all()
