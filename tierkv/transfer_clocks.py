"""What transfers tell of time: how long each wire was at work, and how long computing has stood still for copies."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tierkv.tier import Wire

_RECENT_SPANS: Final = 64


class WireClock:
    """How long each wire was at work: the time in which at least one copy of it ran. Any thread."""

    def __init__(self) -> None:
        """Know of no copy."""
        self._lock = threading.Lock()
        self._seconds: dict[Wire, float] = {}
        # Spans that overlap nothing, oldest first. A copy that ends now can overlap the latest only, so old ones are summed.
        self._recent: dict[Wire, list[tuple[float, float]]] = {}

    def ended(self, wire: "Wire", began: float) -> None:
        """Take down that a copy ended now.

        Args:
            wire: that it went over.
            began: when it began, as ``time.perf_counter`` tells.
        """
        with self._lock:
            now = time.perf_counter()  # under the lock: spans come in the order of their ends
            spans = self._recent.setdefault(wire, [])
            first = len(spans)
            while first and spans[first - 1][1] >= began:
                first -= 1
            spans[first:] = [(min(began, spans[first][0]) if first < len(spans) else began, now)]
            if len(spans) > 2 * _RECENT_SPANS:
                self._seconds[wire] = self._seconds.get(wire, 0.0) + _sum(spans[:_RECENT_SPANS])
                del spans[:_RECENT_SPANS]

    def seconds(self) -> "dict[Wire, float]":
        """Return the seconds of every wire that was used; copies under way are not in it."""
        with self._lock:
            return {wire: self._seconds.get(wire, 0.0) + _sum(spans) for wire, spans in self._recent.items()}


def _sum(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)


class StallClock:
    """How long a caller's work has stood still for copies, by the clock of the host. One thread waits, any may ask."""

    def __init__(self) -> None:
        """Know of no wait."""
        self._seconds = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time that the block takes; nothing if it raises."""
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began

    @property
    def seconds(self) -> float:
        """All waits that are over."""
        return self._seconds
