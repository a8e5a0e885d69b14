"""CudaTransfers: copies on CUDA streams, ordered by events only.

One stream per direction, so that copies down and copies up overlap each other and the compute stream. Nothing ever
synchronises the device: a copy waits for an event of the submitting stream, and readers wait for an event of the copy.

The few CUDA calls go through ``CudaApi``, so that the order of streams and events is tested without a GPU
(``tierkv.testing.fake_cuda``).
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from tierkv.errors import ClosedError, TransferTimeout
from tierkv.interrupts import Latch, deferred_interrupt
from tierkv.tier import Tier
from tierkv.transfer import WAIT_SECONDS, Copy, Ticket, TransferEngine, wait_for
from tierkv.transfer_cuda_api import CudaApi, TorchCuda
from tierkv.transfer_cuda_clocks import StreamStalls, StreamWires
from tierkv.transfer_pitched import pieces

FIRST_PAUSE_SECONDS: Final = 20e-6
LONGEST_PAUSE_SECONDS: Final = 1e-4
"""Between two looks at an event. Waiting inside CUDA would be neither bounded nor open to Ctrl-C."""


@dataclass(eq=False)
class CudaTicket(Ticket):
    """A ticket whose tensor copies are enqueued on streams.

    Attributes:
        parts: of the ticket that are not on their stream yet; each ``load`` is one.
        enqueued: every tensor copy is on its stream and ``spans`` is complete.
        stored: every ``store`` stage has run.
        spans: events before and behind tensor copies, for each part and each stream that it uses.
        load_began: when the first ``load`` stage began, or 0.
        load_seconds: from then to the end of the last.
    """

    parts: int = 1
    enqueued: Latch = field(default_factory=Latch)
    stored: Latch = field(default_factory=Latch)
    spans: list[tuple[Any, Any]] = field(default_factory=list)
    load_began: float = 0.0
    load_seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def events(self) -> list[Any]:
        """Those behind the tensor copies."""
        return [end for _, end in self.spans]

    def part_done(self) -> None:
        """One part is on its stream, or failed."""
        with self.lock:
            self.parts -= 1
            last = not self.parts
        if last:
            self.enqueued.set()


_Stage = Callable[[CudaTicket, Sequence[Copy], Any], None]


class CudaTransfers(TransferEngine):
    """Copies between device memory and pinned host memory on two side streams of one device."""

    def __init__(self, device: Any, workers: int, api: CudaApi | None = None) -> None:
        """Make an engine for ``device``.

        Args:
            device: the torch device whose current stream computes.
            workers: threads for ``load`` and ``store`` stages.
            api: the CUDA calls; PyTorch's unless a test records them.
        """
        self._api = api or TorchCuda(device)
        self._device = device
        self._streams = {"down": self._api.new_stream(device), "up": self._api.new_stream(device)}
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="tierkv-transfer")
        self._under_way: dict[CudaTicket, None] = {}  # oldest first
        self._last: tuple[Any, Any] | None = None
        self._closed = False
        self._clock = StreamWires()

    @property
    def clock(self) -> StreamWires:
        """How long each wire was at work."""
        return self._clock

    def submit(self, copies: Sequence[Copy]) -> CudaTicket:
        """Start copies after all work on the caller's current stream."""
        if self._closed:
            raise ClosedError("the transfer engine is closed")
        ticket = CudaTicket(copies)
        with deferred_interrupt():
            # A stream keeps no tensor alive: memory that is freed under a copy is another tensor's at once.
            while self._under_way and self.is_done(oldest := next(iter(self._under_way))):
                del self._under_way[oldest]
            self._under_way[ticket] = None
            ready = self._api.new_event()
            ready.record(self._api.current_stream(self._device))
            # What must be read first is read by as many workers as there are, and the rest does not wait for it.
            loads = [copy for copy in copies if _begins_on_host(copy)]
            ticket.parts = 1 + len(loads)
            self._run_part(ticket, self._enqueue, [copy for copy in copies if not _begins_on_host(copy)], ready)
            for copy in loads:
                self._pool.submit(self._run_part, ticket, self._load_then_enqueue, [copy], ready)
            if any(copy.store is not None for copy in copies):
                self._pool.submit(self._store, ticket, ready)
            else:
                ticket.stored.set()
        return ticket

    def is_done(self, ticket: Ticket) -> bool:
        """Return whether all events of the ticket have passed and its stores are written."""
        assert isinstance(ticket, CudaTicket)
        return ticket.enqueued.is_set() and ticket.stored.is_set() and all(event.query() for event in ticket.events)

    def order(self, ticket: Ticket, timeout_seconds: float = WAIT_SECONDS) -> None:
        """Make the caller's current stream wait for the tensor copies; the host waits for ``load`` stages only."""
        assert isinstance(ticket, CudaTicket)
        _await(ticket, ticket.enqueued, time.monotonic() + timeout_seconds)
        current = self._api.current_stream(self._device)
        for event in ticket.events:
            current.wait_event(event)
        if ticket.error is not None:
            raise ticket.error

    def wait(self, ticket: Ticket, timeout_seconds: float = WAIT_SECONDS) -> None:
        """Block the host until the events have passed and the stores are written."""
        assert isinstance(ticket, CudaTicket)
        deadline = time.monotonic() + timeout_seconds
        _await(ticket, ticket.enqueued, deadline)
        for event in ticket.events:
            pause = FIRST_PAUSE_SECONDS
            while not event.query():
                if time.monotonic() >= deadline:
                    raise _timeout(ticket)
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        _await(ticket, ticket.stored, deadline)
        self._under_way.pop(ticket, None)
        on_streams = [start.elapsed_time(end) / 1e3 for start, end in ticket.spans]
        ticket.seconds = ticket.load_seconds + max(on_streams, default=0.0)
        ticket.finish()
        wait_for(ticket, timeout_seconds)

    def follow(self) -> None:
        """Let the caller's stream wait for what was enqueued until the last ``mark``, if that was another stream."""
        current = self._api.current_stream(self._device)
        if self._last is not None and self._last[0] != current:
            current.wait_event(self._last[1])

    def mark(self) -> None:
        """Record an event on the caller's stream."""
        current, event = self._api.current_stream(self._device), self._api.new_event()
        event.record(current)
        self._last = current, event

    def stall_clock(self) -> StreamStalls:
        """Return a clock for waits of the caller's current stream."""
        return StreamStalls(self._api, self._device)

    def close(self) -> None:
        """Finish what was submitted, wait for both streams and end the threads."""
        self._closed = True
        for ticket in tuple(self._under_way):  # as in ThreadTransfers: a join does not outlive Ctrl-C
            ticket.enqueued.wait()
            ticket.stored.wait()
        self._pool.shutdown(wait=True)
        for stream in self._streams.values():
            stream.synchronize()
        self._under_way.clear()

    def _enqueue(self, ticket: CudaTicket, copies: Sequence[Copy], ready: Any) -> None:
        for direction, stream in self._streams.items():
            own = [copy for copy in copies if copy.tensors and _direction(copy) == direction]
            if not own:
                continue
            stream.wait_event(ready)
            for wire in dict.fromkeys(copy.wire for copy in own):
                start, end = self._api.new_event(), self._api.new_event()
                start.record(stream)
                try:
                    with self._api.use(stream):
                        for copy in own:
                            for pair in pieces(copy, pitched=self._api.takes_pitched) if copy.wire == wire else ():
                                self._api.copy(*pair)
                finally:  # what an error left on the stream still runs, and is waited for
                    end.record(stream)
                    ticket.spans.append((start, end))
                    self._clock.enqueued(wire, start, end)

    def _load_then_enqueue(self, ticket: CudaTicket, copies: Sequence[Copy], ready: Any) -> None:
        # Host memory knows no streams: what the caller has enqueued may still read what is loaded here.
        ready.synchronize()
        with ticket.lock:
            ticket.load_began = ticket.load_began or time.perf_counter()
        for copy in copies:
            if copy.load is not None:
                began = time.perf_counter()
                copy.load()
                self._clock.ended(copy.wire, began)
                with ticket.lock:
                    ticket.load_seconds = max(ticket.load_seconds, time.perf_counter() - ticket.load_began)
            if _stays_on_host(copy):
                for destination, source in copy.tensors:
                    destination.copy_(source)
        self._enqueue(ticket, copies, ready)

    @staticmethod
    def _run_part(ticket: CudaTicket, stage: _Stage, copies: Sequence[Copy], ready: Any) -> None:
        try:
            stage(ticket, copies, ready)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the ticket
            ticket.fail(error)
        finally:
            ticket.part_done()

    def _store(self, ticket: CudaTicket, ready: Any) -> None:
        try:
            ticket.enqueued.wait()
            if ticket.error is None:
                ready.synchronize()
                for event in ticket.events:
                    event.synchronize()
                for copy in ticket.copies:
                    if copy.store is not None:
                        began = time.perf_counter()
                        copy.store()
                        self._clock.ended(copy.wire, began)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the ticket
            ticket.fail(error)
        finally:
            ticket.stored.set()


def _await(ticket: CudaTicket, stage: Latch, deadline: float) -> None:
    if not stage.wait(deadline - time.monotonic()):
        raise _timeout(ticket)


def _timeout(ticket: CudaTicket) -> TransferTimeout:
    return TransferTimeout(f"a copy of {ticket.num_bytes} bytes did not finish in time; the device or a disk is stuck")


def _direction(copy: Copy) -> str | None:
    if copy.wire.source is Tier.DEVICE:
        return "down"
    return "up" if copy.wire.destination is Tier.DEVICE else None


def _begins_on_host(copy: Copy) -> bool:
    """Return whether a worker has to do something before a copy can be enqueued, if it is to be enqueued at all."""
    return copy.load is not None or _stays_on_host(copy)


def _stays_on_host(copy: Copy) -> bool:
    """Return whether both ends of the tensors lie in host memory, so that no stream orders the copy."""
    return bool(copy.tensors) and _direction(copy) is None
