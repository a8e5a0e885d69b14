"""ForwardGate: one thread at a time inside the tiers of an engine."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tierkv.errors import TierKVError
from tierkv.transfer import WAIT_SECONDS


class ForwardGate:
    """A lock that a forward holds from its first layer to the end of its last attention.

    The scratch that attention reads is shared by all caches of an engine, so a second forward may begin only when the
    first has ended. A thread that is inside may enter again (an interrupted forward never left).
    """

    def __init__(self) -> None:
        """Make an open gate."""
        self._lock = threading.Lock()
        self._owner: int | None = None

    def enter(self) -> bool:
        """Wait until no other thread is inside; return whether this thread was outside before.

        Raises:
            TierKVError: another thread has been inside for too long.
        """
        if self._owner == threading.get_ident():
            return False
        if not self._lock.acquire(timeout=WAIT_SECONDS):
            raise TierKVError(f"another thread has been inside a forward of this engine for {WAIT_SECONDS:g} s")
        self._owner = threading.get_ident()
        return True

    def leave(self) -> None:
        """Let the next thread in; does nothing where this thread is not inside."""
        if self._owner == threading.get_ident():
            self._owner = None
            self._lock.release()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other threads out while the block runs; a forward of this thread stays inside afterwards."""
        entered = self.enter()
        try:
            yield
        finally:
            if entered:
                self.leave()
