"""ManualTransfers, an executor whose copies run when a test says so, and what tests of executors copy."""

import random
import threading
import zlib
from collections.abc import Callable, Sequence

import torch

from tierkv.errors import ClosedError, TransferTimeout
from tierkv.interrupts import deferred_interrupt
from tierkv.tier import Tier, Wire
from tierkv.transfer import WAIT_SECONDS, Copy, Ticket, TransferEngine, run_here

DOWN, UP = Wire(Tier.DEVICE, Tier.HOST), Wire(Tier.HOST, Tier.DEVICE)
SPILL, RESTORE = Wire(Tier.DEVICE, Tier.DISK), Wire(Tier.DISK, Tier.DEVICE)
RELOCATE, SHIFT = Wire(Tier.DEVICE, Tier.DEVICE), Wire(Tier.HOST, Tier.HOST)

GATE_SECONDS = 60.0
"""A gate that nobody opens in this time fails the test."""


class ManualTransfers(TransferEngine):
    """Copies run when a test says so, in any order, and every mistake around an unfinished one is seen.

    At ``submit`` the destinations are poisoned (NaN, or the largest integer) and the sources are checksummed. A read
    before the end of the copy therefore gives NaN; a source that changed under the copy, or a destination that somebody
    else wrote to, raises AssertionError, then and at every later call, so that nothing can swallow it. What a ``load``
    stage fills or a ``store`` stage reads beyond the tensors cannot be seen.

    Attributes:
        patient: ``order`` and ``wait`` finish an unfinished ticket, as if it had arrived just then. Otherwise they
            raise TransferTimeout at once.
        submitted: every ticket ever submitted with at least one copy.
    """

    def __init__(self, *, patient: bool = True) -> None:
        self.patient = patient
        self.submitted: list[Ticket] = []
        self._pending: dict[Ticket, list[int]] = {}
        self._mistake: str | None = None
        self._closed = False

    @property
    def pending(self) -> list[Ticket]:
        """Unfinished tickets, oldest first."""
        return list(self._pending)

    def submit(self, copies: Sequence[Copy]) -> Ticket:
        """Take the copies and run none."""
        self._check()
        if self._closed:
            raise ClosedError("the transfer engine is closed")
        ticket = Ticket(copies)
        if not copies:
            ticket.finish()
            return ticket
        self._pending[ticket] = [_checksum(source) for copy in copies for _, source in copy.tensors]
        self.submitted.append(ticket)
        for copy in copies:
            for destination, _ in copy.tensors:
                destination.fill_(poison(destination.dtype))
        return ticket

    def finish(self, ticket: Ticket, rng: random.Random | None = None) -> None:
        """Run all copies of a ticket, in random order where ``rng`` is given. Nothing to do where it is finished."""
        self._check()
        if ticket not in self._pending:
            return
        self._inspect(ticket)
        copies = list(ticket.copies)
        if rng is not None:
            rng.shuffle(copies)
        with deferred_interrupt():  # no worker is ever interrupted
            for copy in copies:
                try:
                    run_here(copy)
                except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the ticket
                    ticket.fail(error)
            del self._pending[ticket]
            ticket.finish()

    def finish_some(self, rng: random.Random) -> None:
        """Finish some tickets, none or all, in random order."""
        for ticket in rng.sample(self.pending, rng.randint(0, len(self._pending))):
            self.finish(ticket, rng)

    def fail(self, ticket: Ticket, error: BaseException) -> None:
        """End a ticket with an error. Its destinations stay poisoned."""
        self._check()
        self._inspect(ticket)
        del self._pending[ticket]
        ticket.fail(error)
        ticket.finish()

    def is_done(self, ticket: Ticket) -> bool:
        """Return whether the ticket was finished or failed."""
        self._check()
        return ticket.done.is_set()

    def order(self, ticket: Ticket, timeout_seconds: float = WAIT_SECONDS) -> None:  # noqa: ARG002 - never blocks
        """Finish the ticket, or raise TransferTimeout where the engine is not patient."""
        if self.patient:
            self.finish(ticket)
        self._check()
        if not ticket.done.is_set():
            raise TransferTimeout(f"the test did not finish a copy of {ticket.num_bytes} bytes")
        if ticket.error is not None:
            raise ticket.error

    def wait(self, ticket: Ticket, timeout_seconds: float = WAIT_SECONDS) -> None:
        """Do as ``order``: there is no stage that only ``wait`` would wait for."""
        self.order(ticket, timeout_seconds)

    def close(self) -> None:
        """Finish what was submitted."""
        self._closed = True
        for ticket in self.pending:
            self.finish(ticket)
        self._check()

    def _inspect(self, ticket: Ticket) -> None:
        """Look for traces of others in what belongs to an unfinished ticket."""
        sums = iter(self._pending[ticket])
        for copy in ticket.copies:
            for destination, source in copy.tensors:
                if next(sums) != _checksum(source) and copy.load is None:
                    self._mistake = f"a source changed under a copy from {copy.wire.label}"
                if not _is_poison(destination):
                    self._mistake = f"a destination was written to under a copy from {copy.wire.label}"
        self._check()

    def _check(self) -> None:
        assert self._mistake is None, self._mistake


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def poison(dtype: torch.dtype) -> float:
    """Return what no test data contains: NaN, or the largest integer."""
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max


def _is_poison(tensor: torch.Tensor) -> bool:
    return bool((tensor.isnan() if tensor.dtype.is_floating_point else tensor == poison(tensor.dtype)).all())


class Gate:
    """A ``load`` or ``store`` stage that blocks until the test opens it, then may raise."""

    def __init__(self, error: BaseException | None = None, then: Callable[[], None] | None = None) -> None:
        self.is_inside = threading.Event()
        self._opened = threading.Event()
        self._error = error
        self._then = then

    def open(self) -> None:
        """Let the stage go on."""
        self._opened.set()

    def __call__(self) -> None:
        """Be the stage."""
        self.is_inside.set()
        assert self._opened.wait(GATE_SECONDS), "nobody opened the gate"
        self.is_inside.clear()
        if self._then is not None:
            self._then()
        if self._error is not None:
            raise self._error


def data(*shape: int) -> torch.Tensor:
    """Return different numbers in every place."""
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def copy_of(*pairs: tuple[torch.Tensor, torch.Tensor], wire: Wire = DOWN, load: Gate | None = None) -> Copy:
    """Return a copy of tensors, behind a gate where one is given."""
    return Copy(wire, sum(source.numel() * 4 for _, source in pairs), pairs, load=load)


def refuse() -> None:
    """Be a stage that fails."""
    raise OSError("no such luck")
