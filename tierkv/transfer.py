"""TransferEngine: runs copies in the background and says when they are complete.

A copy has up to three stages, in this order: ``load`` (a worker fills host memory, say from a file), the tensor
copies, ``store`` (a worker writes host memory away). Engines differ in how the middle stage runs: on worker threads
where the only device is the CPU (``ThreadTransfers``), on CUDA streams (``tierkv.transfer_cuda``), or when a test says
so (``tierkv.testing.transfers``). The shared suite is ``tierkv.testing.contracts.TransferContract``.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from tierkv.errors import ClosedError, TransferTimeout

if TYPE_CHECKING:
    import torch

    from tierkv.tier import Wire

WAIT_SECONDS: Final = 120.0
"""The bounded wait: no copy of one block takes this long on a medium that still works."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One piece of work for a transfer engine.

    Attributes:
        wire: for the count of moved bytes.
        num_bytes: payload.
        tensors: ``(destination, source)`` pairs of equal shape and dtype, views into pools or scratch.
        load: runs on a worker before the tensor copies.
        store: runs on a worker after the tensor copies, when the bytes have really arrived.
    """

    wire: "Wire"
    num_bytes: int
    tensors: "Sequence[tuple[torch.Tensor, torch.Tensor]]" = ()
    load: Callable[[], None] | None = None
    store: Callable[[], None] | None = None


@dataclass(eq=False)
class Ticket:
    """The handle of copies under way. Keeps their tensors alive until it is done."""

    copies: Sequence[Copy]
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def num_bytes(self) -> int:
        """Payload of all copies."""
        return sum(copy.num_bytes for copy in self.copies)

    def finish(self, error: BaseException | None = None) -> None:
        """Report the end of the work; the first error is kept. Called by engines."""
        self.error = self.error or error
        self.done.set()


class TransferEngine(ABC):
    """Runs copies. ``submit`` and ``order`` are called by one thread at a time; completion may come from any."""

    @abstractmethod
    def submit(self, copies: Sequence[Copy]) -> Ticket:
        """Start copies and return at once.

        The copies begin only after all work that the calling thread has enqueued on its stream so far; so a source
        that was just written, and a destination that was just read, are safe. Copies of one ticket may run in any
        order and at the same time.

        Raises:
            ClosedError: the engine is closed.
        """

    @abstractmethod
    def is_done(self, ticket: Ticket) -> bool:
        """Return whether every byte of the ticket has arrived (or it failed); never blocks."""

    @abstractmethod
    def order(self, ticket: Ticket, timeout_seconds: float = WAIT_SECONDS) -> None:
        """Order the caller's later work after the ticket: what it enqueues from now on sees the bytes.

        Blocks the host only where it must (a ``load`` stage; a CPU-only machine).

        Raises:
            TransferTimeout: it was not complete in time; it may still complete later, so its slots stay reserved.
            BaseException: the error of the copy.
        """

    @abstractmethod
    def wait(self, ticket: Ticket, timeout_seconds: float = WAIT_SECONDS) -> None:
        """Block the host until every stage of the ticket is complete. Raises as ``order`` does."""

    @abstractmethod
    def close(self) -> None:
        """Finish what was submitted and end the workers. Idempotent."""

    def __enter__(self) -> "TransferEngine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class ThreadTransfers(TransferEngine):
    """Copies on worker threads, for machines whose only device is the CPU.

    There the caller's own work is done when a call returns, so the order before ``submit`` needs no event.
    """

    def __init__(self, workers: int) -> None:
        """Make an engine of ``workers`` threads, started when first needed."""
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="tierkv-transfer")
        self._closed = False

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        """Start copies, spread over the workers."""
        if self._closed:
            raise ClosedError("the transfer engine is closed")
        ticket = Ticket(copies)
        if not copies:
            ticket.finish()
            return ticket
        remaining = _Countdown(len(copies), ticket)
        for copy in copies:
            self._pool.submit(remaining.run, copy)
        return ticket

    def is_done(self, ticket: Ticket) -> bool:
        """Return whether the ticket is complete."""
        return ticket.done.is_set()

    def order(self, ticket: Ticket, timeout_seconds: float = WAIT_SECONDS) -> None:
        """Wait for the ticket: on a CPU there is no later work to order, there is only now."""
        self.wait(ticket, timeout_seconds)

    def wait(self, ticket: Ticket, timeout_seconds: float = WAIT_SECONDS) -> None:
        """Block until the ticket is complete."""
        wait_for(ticket, timeout_seconds)

    def close(self) -> None:
        """Finish what was submitted and end the threads."""
        self._closed = True
        self._pool.shutdown(wait=True)


def wait_for(ticket: Ticket, timeout_seconds: float) -> None:
    """Block until ``ticket.done`` is set, then raise its error if it has one.

    Raises:
        TransferTimeout: it was not set in time.
    """
    if not ticket.done.wait(timeout_seconds):
        raise TransferTimeout(
            f"a copy of {ticket.num_bytes} bytes did not finish in {timeout_seconds:g} s; the medium is stuck or overloaded"
        )
    if ticket.error is not None:
        raise ticket.error


class _Countdown:
    """Finishes a ticket when its last copy has run."""

    def __init__(self, count: int, ticket: Ticket) -> None:
        self._left = count
        self._ticket = ticket
        self._lock = threading.Lock()

    def run(self, copy: Copy) -> None:
        error: BaseException | None = None
        try:
            run_here(copy)
        except BaseException as caught:  # noqa: BLE001 - handed to whoever waits for the ticket
            error = caught
        with self._lock:
            self._left -= 1
            self._ticket.error = self._ticket.error or error
            last = self._left == 0
        if last:
            self._ticket.finish()


def run_here(copy: Copy) -> None:
    """Run all stages of a copy in the calling thread."""
    if copy.load is not None:
        copy.load()
    for destination, source in copy.tensors:
        destination.copy_(source)
    if copy.store is not None:
        copy.store()


def moved_bytes(copies: Sequence[Copy], totals: dict[Any, int]) -> None:
    """Add what ``copies`` move to ``totals``, by wire."""
    for copy in copies:
        totals[copy.wire] = totals.get(copy.wire, 0) + copy.num_bytes
