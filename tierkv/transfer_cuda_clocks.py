"""What CUDA transfers tell of time, from events on streams: nobody waits for them, what has passed is counted when asked."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tierkv.transfer_clocks import StallClock, WireClock
from tierkv.transfer_cuda_api import CudaApi

if TYPE_CHECKING:
    from tierkv.tier import Wire


class StreamStalls(StallClock):
    """How long the caller's stream has stood still for copies: the time between two events around each wait.

    The first is recorded before the host itself waits for a ``load`` stage, so that counts as far as the stream runs dry
    meanwhile, and no further. Where it is dry anyway, the microseconds that the host takes between both count too.
    """

    def __init__(self, api: CudaApi, device: Any) -> None:
        """Make a clock for the current stream of ``device``."""
        super().__init__()
        self._api = api
        self._device = device
        self._pending: deque[tuple[Any, Any]] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time that the stream stands still for what the block makes it wait for; nothing if it raises."""
        stream = self._api.current_stream(self._device)
        before, after = self._api.new_event(), self._api.new_event()
        before.record(stream)
        yield
        after.record(stream)
        self._pending.append((before, after))
        self._harvest()

    @property
    def seconds(self) -> float:
        """All waits that the stream has left behind."""
        self._harvest()
        return self._seconds

    def _harvest(self) -> None:
        with self._lock:
            while self._pending and self._pending[0][1].query():
                before, after = self._pending.popleft()
                self._seconds += before.elapsed_time(after) / 1e3


class StreamWires(WireClock):
    """How long each wire was at work: its copies on a stream, which never overlap, and what workers read and write for it."""

    def __init__(self) -> None:
        """Know of no copy."""
        super().__init__()
        self._pending: deque[tuple[Wire, Any, Any]] = deque()
        self._on_streams: dict[Wire, float] = {}
        self._event_lock = threading.Lock()

    def enqueued(self, wire: "Wire", start: Any, end: Any) -> None:
        """Take down that copies lie on a stream between two events."""
        with self._event_lock:
            self._pending.append((wire, start, end))
            self._harvest()

    def seconds(self) -> "dict[Wire, float]":
        """Return the seconds of every wire that was used; copies under way are not in it."""
        with self._event_lock:
            self._harvest()
            on_streams = dict(self._on_streams)
        by_workers = super().seconds()
        wires = {**on_streams, **by_workers}
        return {wire: on_streams.get(wire, 0.0) + by_workers.get(wire, 0.0) for wire in wires}

    def _harvest(self) -> None:
        while self._pending and self._pending[0][2].query():
            wire, start, end = self._pending.popleft()
            self._on_streams[wire] = self._on_streams.get(wire, 0.0) + start.elapsed_time(end) / 1e3
