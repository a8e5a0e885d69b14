"""Keep Ctrl-C out of the few lines that must run whole, and waits that it cannot break.

Python raises KeyboardInterrupt between any two bytecodes of the main thread. In the middle of the manager's
bookkeeping that would leave a slot owned by nobody; so there it is held back for some microseconds and raised right
after. Waiting for copies is never inside: it has to stay interruptible. The same holds for SIGTERM in programs whose
handler of it raises.
"""

import _signal  # type: ignore[import-not-found]  # what signal.signal wraps; typeshed does not list it
import threading
from contextlib import AbstractContextManager, suppress
from signal import SIGINT, SIGTERM
from types import FrameType
from typing import Any


def deferred_interrupt() -> AbstractContextManager[None]:
    """Hold back SIGINT and SIGTERM while a block runs, then deliver them to the handlers that were installed.

    The exception comes out of the end of the block: what must not be lost has to be stored inside it (an assignment
    from a function whose body is such a block comes too late). Does nothing outside the main thread (Python never
    interrupts other threads) or where another program installed a handler that is not Python's.
    """
    return _Deferral()


class _Deferral:
    """Written out, and on the C functions: this runs twice a layer, and generators and enums make it 12 us long."""

    __slots__ = ("_arrived", "_handlers")

    def __init__(self) -> None:
        self._handlers: list[tuple[int, Any]] = []
        self._arrived: dict[int, FrameType | None] = {}

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        try:
            for number in (SIGTERM, SIGINT):
                handler = _signal.getsignal(number)
                if callable(handler) and not isinstance(getattr(handler, "__self__", None), _Deferral):
                    self._handlers.append((number, handler))
                    _signal.signal(number, self._hold)
        except BaseException:  # one of the two came before it was held back
            self._restore()
            raise

    def __exit__(self, *exc_info: object) -> None:
        try:
            self._restore()
        except BaseException:  # one of the two came as soon as it was let through
            self._restore()
            raise
        if self._arrived:
            for number, handler in self._handlers:
                if number in self._arrived:
                    handler(number, self._arrived[number])

    def _restore(self) -> None:
        for number, handler in self._handlers:
            _signal.signal(number, handler)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._arrived[number] = frame


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
