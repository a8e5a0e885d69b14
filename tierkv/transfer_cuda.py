"""CudaTransfers: copies on CUDA streams, ordered by events only.

One stream per direction, so that copies down and copies up overlap each other and the compute stream. Nothing ever
synchronises the device: a copy waits for an event of the submitting stream, and readers wait for an event of the copy.

The few CUDA calls go through ``api`` (``torch.cuda``), so that the order of streams and events is tested without a GPU.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tierkv.errors import ClosedError, TransferTimeout
from tierkv.tier import Tier
from tierkv.transfer import WAIT_SECONDS, Copy, Ticket, TransferEngine, wait_for


@dataclass(eq=False)
class CudaTicket(Ticket):
    """A ticket whose tensor copies are enqueued on a stream.

    Attributes:
        enqueued: every tensor copy is on its stream and ``events`` is complete.
        events: recorded behind the tensor copies, one per stream used.
    """

    def __post_init__(self) -> None:
        self.enqueued = threading.Event()
        self.events: list[Any] = []
        self.stored = threading.Event()


class CudaTransfers(TransferEngine):
    """Copies between device memory and pinned host memory on two side streams of one device."""

    def __init__(self, device: Any, workers: int, api: Any = None) -> None:
        """Make an engine for ``device``.

        Args:
            device: the torch device whose current stream computes.
            workers: threads for ``load`` and ``store`` stages.
            api: the CUDA calls; ``torch.cuda`` unless a test records them.
        """
        if api is None:
            import torch

            api = torch.cuda
        self._api = api
        self._device = device
        self._streams = {"down": api.Stream(device), "up": api.Stream(device)}
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="tierkv-transfer")
        self._closed = False

    def submit(self, copies: Sequence[Copy]) -> CudaTicket:
        """Start copies after all work on the caller's current stream."""
        if self._closed:
            raise ClosedError("the transfer engine is closed")
        ticket = CudaTicket(copies)
        ready = self._api.Event()
        ready.record(self._api.current_stream(self._device))
        if any(copy.load is not None for copy in copies):
            self._pool.submit(self._guard, ticket, self._load_then_enqueue, ready)
        else:
            self._guard(ticket, self._enqueue, ready)
        if any(copy.store is not None for copy in copies):
            self._pool.submit(self._guard, ticket, self._store)
        else:
            ticket.stored.set()
        return ticket

    def is_done(self, ticket: Ticket) -> bool:
        """Return whether all events of the ticket have passed and its stores are written."""
        assert isinstance(ticket, CudaTicket)
        if ticket.error is not None:
            return True
        return ticket.enqueued.is_set() and ticket.stored.is_set() and all(event.query() for event in ticket.events)

    def order(self, ticket: Ticket, timeout_seconds: float = WAIT_SECONDS) -> None:
        """Make the caller's current stream wait for the tensor copies; the host waits for ``load`` stages only."""
        assert isinstance(ticket, CudaTicket)
        self._await(ticket, ticket.enqueued, timeout_seconds)
        current = self._api.current_stream(self._device)
        for event in ticket.events:
            current.wait_event(event)

    def wait(self, ticket: Ticket, timeout_seconds: float = WAIT_SECONDS) -> None:
        """Block the host until the events have passed and the stores are written."""
        assert isinstance(ticket, CudaTicket)
        self._await(ticket, ticket.enqueued, timeout_seconds)
        self._await(ticket, ticket.stored, timeout_seconds)
        for event in ticket.events:
            event.synchronize()
        ticket.finish()
        wait_for(ticket, 0)

    def close(self) -> None:
        """Finish what was submitted, wait for both streams and end the threads."""
        if self._closed:
            return
        self._closed = True
        self._pool.shutdown(wait=True)
        for stream in self._streams.values():
            stream.synchronize()

    def _enqueue(self, ticket: CudaTicket, ready: Any) -> None:
        for direction, stream in self._streams.items():
            copies = [copy for copy in ticket.copies if copy.tensors and _direction(copy) == direction]
            if not copies:
                continue
            stream.wait_event(ready)
            with self._api.stream(stream):
                for copy in copies:
                    for destination, source in copy.tensors:
                        destination.copy_(source, non_blocking=True)
            event = self._api.Event()
            event.record(stream)
            ticket.events.append(event)
        ticket.enqueued.set()

    def _load_then_enqueue(self, ticket: CudaTicket, ready: Any) -> None:
        # The host memory that is loaded may still be read by an earlier copy up: that copy was waited for by the
        # work which `ready` marks.
        ready.synchronize()
        for copy in ticket.copies:
            if copy.load is not None:
                copy.load()
        self._enqueue(ticket, ready)

    def _store(self, ticket: CudaTicket) -> None:
        ticket.enqueued.wait()
        if ticket.error is None:
            for event in ticket.events:
                event.synchronize()
            for copy in ticket.copies:
                if copy.store is not None:
                    copy.store()
        ticket.stored.set()

    @staticmethod
    def _guard(ticket: CudaTicket, stage: Any, *args: Any) -> None:
        try:
            stage(ticket, *args)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the ticket
            ticket.error = ticket.error or error
            ticket.enqueued.set()
            ticket.stored.set()

    @staticmethod
    def _await(ticket: CudaTicket, stage: threading.Event, timeout_seconds: float) -> None:
        if not stage.wait(timeout_seconds):
            raise TransferTimeout(f"a copy of {ticket.num_bytes} bytes was not under way in {timeout_seconds:g} s")
        if ticket.error is not None:
            raise ticket.error


def _direction(copy: Copy) -> str:
    return "up" if copy.wire.destination is Tier.DEVICE and copy.wire.source is not Tier.DEVICE else "down"
