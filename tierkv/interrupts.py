"""Keep Ctrl-C out of the few lines that must run whole.

Python raises KeyboardInterrupt between any two bytecodes of the main thread. In the middle of the manager's
bookkeeping that would leave a slot owned by nobody; so there it is held back for some microseconds and raised right
after. Waiting for copies is never inside.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold back SIGINT while the block runs, then deliver it to the handler that was installed.

    Does nothing outside the main thread (Python never interrupts other threads) or where another program installed a
    handler that is not Python's.
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
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(*arrived[0])
