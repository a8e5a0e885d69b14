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
        self._bounced: dict[int, Ticket] = {}  # host slot to the last move through it; the longest ago first

    def submit(self, moves: Sequence[Move]) -> None:
        """Start moves that the manager has just planned; between a GPU and the disk, a few at a time.

        Raises:
            TransferTimeout: a move that others must follow did not end. Those that were not started, did not happen.
        """
        for move in moves:
            slot = self._free_bounce_slot() if self._stores.bounces(move) else None
            copy = self._stores.copy_of(move, slot)
            ticket = self._tickets[move] = self._transfers.submit([copy])
            if slot is not None:
                self._bounced[slot] = ticket
            self._count_copies([copy])

    def _free_bounce_slot(self) -> int:
        """Return a slot that nothing passes through any more; wait for the oldest move where there is none."""
        slots = self._stores.bounce_slots
        busy = {slot: ticket for slot, ticket in self._bounced.items() if not self._transfers.is_done(ticket)}
        free = next((slot for slot in slots if slot not in busy), None)
        if free is None:
            free = next(slot for slot in busy if slot in slots)
            self._transfers.settle(busy[free])
        self._bounced.pop(free, None)
        return free

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
