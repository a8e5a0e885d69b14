"""ForwardGate: one thread at a time inside the tiers of an engine."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tierkv.interrupts import deferred_interrupt

POLL_SECONDS = 0.001
"""A thread outside looks this often whether the gate is free: short beside any forward."""


class ForwardGate:
    """A lock that a forward holds from its first layer to the end of its last attention.

    The scratch that attention reads is shared by all caches of an engine, so a second forward may begin only when the
    first has ended. A thread that is inside may enter again (an interrupted forward never left). Threads come in in the
    order in which they came: several that generate take turns, forward by forward.
    """

    def __init__(self, entered: Callable[[], None] = lambda: None, leaves: Callable[[], None] = lambda: None) -> None:
        """Make an open gate.

        Args:
            entered: called by a thread that has come in.
            leaves: called by one that is about to go out.
        """
        self._entered = entered
        self._leaves = leaves
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._line: list[int] = []  # threads that wait, the first first

    @property
    def mine(self) -> bool:
        """Whether this thread is inside."""
        return self._owner == threading.get_ident()

    @property
    def is_free(self) -> bool:
        """Whether nobody was inside a moment ago."""
        return self._owner is None

    def enter(self) -> None:
        """Wait until no other thread is inside. Whoever was outside before must ``leave``, whatever happens.

        There is no time limit: a long prefill takes as long as it takes. A thread that died inside is not waited for.
        """
        if self.mine:
            return
        me = threading.get_ident()
        try:
            while True:
                with deferred_interrupt():  # between taking the lock and saying whose it is
                    if self._first_in_line(me) and self._take():
                        self._owner = me
                        self._entered()
                        return
                time.sleep(POLL_SECONDS)
        finally:
            self._leave_line(me)

    def _leave_line(self, thread: int) -> None:
        with deferred_interrupt(), suppress(ValueError):
            self._line.remove(thread)

    def _first_in_line(self, me: int) -> bool:
        if me not in self._line:
            self._line.append(me)
        for other in list(self._line):
            if other == me:
                return True
            if _is_alive(other):
                return False
            self._leave_line(other)  # it died while it waited
        return True

    def _take(self) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        # A dead thread never gives its lock back.
        return self._owner is not None and not _is_alive(self._owner)

    def leave(self) -> None:
        """Let the next thread in; does nothing where this thread is not inside."""
        with deferred_interrupt():
            if self.mine:
                try:
                    self._leaves()
                finally:
                    self._owner = None
                    self._lock.release()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other threads out while the block runs; a forward of this thread stays inside afterwards."""
        inside = self.mine
        try:
            self.enter()
            yield
        finally:
            if not inside:
                self.leave()


def _is_alive(ident: int) -> bool:
    return any(thread.ident == ident for thread in threading.enumerate())
