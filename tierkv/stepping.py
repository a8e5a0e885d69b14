"""Stepping: ask the manager for a step, and move what is in its way, until there is one.

The engine and the simulator share this loop; they differ in who moves the blocks and what time that takes.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from tierkv.errors import BlockLost, TierKVError
from tierkv.interrupts import deferred_interrupt
from tierkv.moves import Move, Step

if TYPE_CHECKING:
    from tierkv.block_table import BlockTable
    from tierkv.manager import TierManager

MAX_ROOM_ROUNDS: Final = 1000
"""Making room takes a few rounds; this many mean that sequences take each other's slots for ever."""


class MoveRunner(Protocol):
    """Whoever carries out a manager's moves: ``Mover`` with copies, ``VirtualMover`` in virtual time."""

    def submit(self, moves: Sequence[Move]) -> None:
        """Start moves that the manager has just planned."""

    def reap(self) -> None:
        """Report the moves that ended to the manager; never wait."""

    def wait(self) -> None:
        """Wait until every move in flight has ended; ``reap`` says how."""


def begin_when_there_is_room(
    manager: "TierManager",
    mover: MoveRunner,
    tables: "Sequence[BlockTable]",
    count: int,
    *,
    take: Callable[[Step], None],
    waits: Callable[[], None],
) -> None:
    """Make room until the manager has a step that appends ``count`` tokens to every table, and hand it over.

    Args:
        manager: that decides.
        mover: carries out its moves.
        tables: that grow; all of one length.
        count: tokens.
        take: gets the step, before any interrupt could lose it.
        waits: called before each wait for moves that are in the way.

    Raises:
        CapacityError: the tiers cannot hold them.
        BlockLost: a last block that must be copied cannot be read.
        TransferTimeout: a copy that must end first did not.
        TierKVError: sequences keep taking each other's blocks.
    """
    for _ in range(MAX_ROOM_ROUNDS):
        with deferred_interrupt():
            try:
                mover.reap()
            except BlockLost:
                manager.disown_shared()
                raise
            outcome = manager.begin(tables, count)
            if isinstance(outcome, Step):
                take(outcome)
                return
            mover.submit(outcome.moves)
        waits()
        mover.wait()
    raise TierKVError("no room could be made: sequences keep taking each other's blocks; close some caches")
