"""TransferEngine: runs copies in the background and says when they are complete.

A copy has up to three stages, in this order: ``load`` (a worker fills host memory, say from a file), the tensor
copies, ``store`` (a worker writes host memory away). Engines differ in how the middle stage runs: on worker threads
where the only device is the CPU (``ThreadTransfers``), on CUDA streams (``tierkv.transfer_cuda``), or when a test says
so (``tierkv.testing.transfers``). The shared suite is ``tierkv.testing.transfer_contract.TransferContract``.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from tierkv.errors import ClosedError, TransferTimeout
from tierkv.interrupts import Latch, deferred_interrupt
from tierkv.transfer_clocks import StallClock, WireClock

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
    load: Callable[[], object] | None = None
    store: Callable[[], object] | None = None


@dataclass(eq=False)
class Ticket:
    """The handle of copies under way. Keeps their tensors alive until it is done."""

    copies: Sequence[Copy]
    error: BaseException | None = None
    done: Latch = field(default_factory=Latch)
    seconds: float = 0.0
    """From the begin of its first copy to the end of its last, once it is done; 0 where nobody measures it."""

    @property
    def num_bytes(self) -> int:
        """Payload of all copies."""
        return sum(copy.num_bytes for copy in self.copies)

    def fail(self, error: BaseException) -> None:
        """Keep the error of a copy, unless there is one already. Called by engines."""
        if self.error is None:
            self.error = error

    def finish(self) -> None:
        """Report that nothing of the ticket is under way any more. Called by engines."""
        self.done.set()


class TransferEngine(ABC):
    """Runs copies. ``submit`` and ``order`` are called by one thread at a time; completion may come from any."""

    @abstractmethod
    def submit(self, copies: Sequence[Copy]) -> Ticket:
        """Start copies and return at once.

        The copies begin only after all work that the calling thread has enqueued on its stream so far; so a source
        that was just written, and a destination that was just read, are safe. Copies of one ticket may run in any
        order and at the same time.

        Whoever lets Ctrl-C come between this call and the place where the ticket is kept has copies that nobody waits
        for. So call it inside ``deferred_interrupt``, together with the assignment.

        Raises:
            ClosedError: the engine is closed.
        """

    @abstractmethod
    def is_done(self, ticket: Ticket) -> bool:
        """Return whether nothing of the ticket is under way any more: all has arrived, or it failed. Never blocks."""

    @abstractmethod
    def order(self, ticket: Ticket, timeout_seconds: float = WAIT_SECONDS) -> None:
        """Order the caller's later work after the ticket: what it enqueues from now on sees the bytes.

        Blocks the host only where it must (a ``load`` stage; a CPU-only machine).

        Raises:
            TransferTimeout: it was not complete in time; it may still complete later, so its slots stay reserved.
            BaseException: the error of a copy, the same object each time. Nothing the caller enqueues from now on
                runs while other copies of the ticket still do.
        """

    @abstractmethod
    def wait(self, ticket: Ticket, timeout_seconds: float = WAIT_SECONDS) -> None:
        """Block the host until every stage of the ticket is complete. Raises as ``order`` does."""

    def settle(self, ticket: Ticket, timeout_seconds: float = WAIT_SECONDS) -> None:
        """Block the host until nothing of the ticket is under way any more, however it ended.

        Raises:
            TransferTimeout: something still is.
        """
        try:
            self.wait(ticket, timeout_seconds)
        except BaseException as error:
            if error is not ticket.error:
                raise

    @property
    def clock(self) -> WireClock | None:
        """How long each wire was at work; None where nobody measures it."""
        return None

    def follow(self) -> None:  # noqa: B027 - where there are no streams there is nothing to do
        """Order the caller's later work, and so later copies, after what was enqueued until the last ``mark``.

        Needed where callers come on different streams one after the other.
        """

    def mark(self) -> None:  # noqa: B027
        """Remember what the caller has enqueued until now."""

    def stall_clock(self) -> StallClock:
        """Return a clock for waits in ``order``, by what stands still: the host, unless later work is on a stream."""
        return StallClock()

    @abstractmethod
    def close(self) -> None:
        """Finish what was submitted and end the workers. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ThreadTransfers(TransferEngine):
    """Copies on worker threads, for machines whose only device is the CPU.

    There the caller's own work is done when a call returns, so the order before ``submit`` needs no event.
    """

    def __init__(self, workers: int) -> None:
        """Make an engine of ``workers`` threads, started when first needed."""
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="tierkv-transfer")
        self._under_way: set[Ticket] = set()
        self._clock = WireClock()
        self._closed = False

    @property
    def clock(self) -> WireClock:
        """How long each wire was at work."""
        return self._clock

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        """Start copies, spread over the workers."""
        if self._closed:
            raise ClosedError("the transfer engine is closed")
        ticket = Ticket(copies)
        if not copies:
            ticket.finish()
            return ticket
        remaining = _Countdown(len(copies), ticket, self._under_way, self._clock)
        with deferred_interrupt():  # an executor that Ctrl-C hits while it counts idle threads never runs again
            self._under_way.add(ticket)
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
        # Not by joining the threads: when Ctrl-C ends a join, CPython 3.11 believes that the thread has ended.
        for ticket in tuple(self._under_way):
            ticket.done.wait()
        self._pool.shutdown(wait=True)


def wait_for(ticket: Ticket, timeout_seconds: float) -> None:
    """Block until ``ticket.done`` is set, then raise its error if it has one.

    Raises:
        TransferTimeout: it was not set in time.
    """
    if not ticket.done.wait(timeout_seconds):
        raise TransferTimeout(
            f"a copy of {ticket.num_bytes} bytes did not finish in {timeout_seconds:g} s; the medium is stuck or busy"
        )
    if ticket.error is not None:
        raise ticket.error


class _Countdown:
    """Finishes a ticket, and takes it out of ``under_way``, when its last copy has run."""

    def __init__(self, count: int, ticket: Ticket, under_way: set[Ticket], clock: WireClock) -> None:
        self._left = count
        self._began = 0.0
        self._ticket = ticket
        self._under_way = under_way
        self._clock = clock
        self._lock = threading.Lock()

    def run(self, copy: Copy) -> None:
        began = time.perf_counter()
        self._began = self._began or began
        failed = None
        try:
            run_here(copy)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the ticket
            failed = error
        self._clock.ended(copy.wire, began)
        self._end(failed)

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            self._left -= 1
            if error is not None:
                self._ticket.fail(error)
            last = self._left == 0
        if last:
            self._ticket.seconds = time.perf_counter() - self._began
            self._under_way.discard(self._ticket)
            self._ticket.finish()


def run_here(copy: Copy) -> None:
    """Run all stages of a copy in the calling thread."""
    if copy.load is not None:
        copy.load()
    for destination, source in copy.tensors:
        destination.copy_(source)
    if copy.store is not None:
        copy.store()
