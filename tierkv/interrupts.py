"""Keep Ctrl-C out of the few lines that must run whole, and waits that it cannot break.

Python raises KeyboardInterrupt between any two bytecodes of the main thread. In the middle of the manager's
bookkeeping that would leave a slot owned by nobody; so there it is held back for some microseconds and raised right
after. Waiting for copies is never inside: it has to stay interruptible.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold back SIGINT while the block runs, then deliver it to the handler that was installed.

    The exception comes out of the end of the block: what must not be lost has to be stored inside it (an assignment
    from a function whose body is such a block comes too late). Does nothing outside the main thread (Python never
    interrupts other threads) or where another program installed a handler that is not Python's.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or getattr(handler, "tierkv_deferred", False):
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> Any:
        arrived.append((number, frame))

    hold.tierkv_deferred = True  # type: ignore[attr-defined]
    try:
        signal.signal(signal.SIGINT, hold)
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(*arrived[0])


class Latch:
    """A one-way switch that threads wait for: ``threading.Event`` for waits that Ctrl-C may interrupt.

    Entering and leaving a ``threading.Condition`` (which ``Event.wait`` and ``Future.result`` do) runs Python code; a
    KeyboardInterrupt in it leaves the lock taken for ever, or comes out as "release unlocked lock". Here every waiter
    blocks on a lock of its own, in one call that either returns or raises.
    """

    __slots__ = ("_is_set", "_waiters")

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[threading.Lock] = []

    def is_set(self) -> bool:
        """Return whether ``set`` was called."""
        return self._is_set

    def set(self) -> None:
        """Let everybody through, now and later. May be called again."""
        self._is_set = True
        for waiter in tuple(self._waiters):
            with suppress(RuntimeError):  # it was let through before
                waiter.release()

    def wait(self, timeout_seconds: float = threading.TIMEOUT_MAX) -> bool:
        """Block until ``set`` was called, at most so long; return whether it was."""
        if timeout_seconds <= 0:
            return self._is_set
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        # Whoever sets the latch looks for waiters after it is set: this one was either seen, or sees it now.
        return self._is_set or waiter.acquire(timeout=timeout_seconds)
