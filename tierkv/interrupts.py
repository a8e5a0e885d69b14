"""Keep Ctrl-C out of the few lines that must run whole, and waits that it cannot break.

Python raises KeyboardInterrupt between any two bytecodes of the main thread. In the middle of the manager's
bookkeeping that would leave a slot owned by nobody; so there it is held back for some microseconds and raised right
after. Waiting for copies is never inside: it has to stay interruptible.
"""

import _signal  # type: ignore[import-not-found]  # what signal.signal wraps; typeshed does not list it
import threading
from contextlib import AbstractContextManager, suppress
from signal import SIGINT
from types import FrameType
from typing import Any


def deferred_interrupt() -> AbstractContextManager[None]:
    """Hold back SIGINT while a block runs, then deliver it to the handler that was installed.

    The exception comes out of the end of the block: what must not be lost has to be stored inside it (an assignment
    from a function whose body is such a block comes too late). Does nothing outside the main thread (Python never
    interrupts other threads) or where another program installed a handler that is not Python's.
    """
    return _Deferral()


class _Deferral:
    """Written out, and on the C functions: this runs twice a layer, and generators and enums make it 12 us long."""

    __slots__ = ("_arrived", "_handler")

    def __init__(self) -> None:
        self._handler: Any = None
        self._arrived: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        handler = _signal.getsignal(SIGINT)
        if callable(handler) and not isinstance(getattr(handler, "__self__", None), _Deferral):
            self._handler = handler
            _signal.signal(SIGINT, self._hold)

    def __exit__(self, *exc_info: object) -> None:
        handler = self._handler
        if handler is not None:
            _signal.signal(SIGINT, handler)
            if self._arrived:
                handler(*self._arrived[0])

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append((number, frame))


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
