"""Mover: carries out the manager's moves with the transfer engine, and reports how they ended."""

from collections.abc import Callable, Sequence

from tierkv.errors import BlockLost, RecordError
from tierkv.manager import TierManager
from tierkv.moves import Move
from tierkv.stores import Stores
from tierkv.tier import Tier
from tierkv.transfer import Copy, Ticket, TransferEngine


class Mover:
    """The link between decisions and copies. Called by the thread inside the engine's gate."""

    def __init__(
        self,
        manager: TierManager,
        stores: Stores,
        transfers: TransferEngine,
        count_copies: Callable[[Sequence[Copy]], None],
        disk_failed: Callable[[], None],
    ) -> None:
        """Make a mover.

        Args:
            manager: whose moves these are.
            stores: between which blocks move.
            transfers: runs the copies.
            count_copies: told of every copy that is submitted.
            disk_failed: called when the disk tier refused a block.
        """
        self._manager = manager
        self._stores = stores
        self._transfers = transfers
        self._count_copies = count_copies
        self._disk_failed = disk_failed
        self._tickets: dict[Move, Ticket] = {}

    def submit(self, moves: Sequence[Move]) -> None:
        """Start moves that the manager has just planned."""
        for move in moves:
            copy = self._stores.copy_of(move)
            self._tickets[move] = self._transfers.submit([copy])
            self._count_copies([copy])

    def reap(self) -> None:
        """Report the moves that ended to the manager; never waits.

        Raises:
            BlockLost: the last block of a sequence could not be read for its private copy.
            BaseException: a copy failed for a reason that no tier explains.
        """
        lost: BaseException | None = None
        for move in list(self._manager.moves):
            ticket = self._tickets.get(move)
            if ticket is not None and not self._transfers.is_done(ticket):
                continue
            self._tickets.pop(move, None)
            # No ticket: an interrupt came between planning and submitting. It did not happen.
            error = None if ticket is None else ticket.error
            if ticket is None or error is not None:
                self._manager.fail(move)
            else:
                self._manager.complete(move)
            if error is not None and move.wire.destination is Tier.DISK and isinstance(error, OSError):
                self._disk_failed()
            elif isinstance(error, RecordError):
                # Without its private copy a sequence cannot go on; any other read of the block will fail when it comes.
                lost = error if move.tail_of is not None else lost
            elif error is not None:
                raise error
        if lost is not None:
            raise BlockLost(f"the last block of a sequence cannot be read back ({lost})") from lost

    def wait(self) -> None:
        """Wait until every move in flight has ended; ``reap`` says how.

        Raises:
            TransferTimeout: one did not end in time.
        """
        for ticket in list(self._tickets.values()):
            self._transfers.settle(ticket)
