"""Steps of a simulation: the manager is asked, and its moves are handed to the virtual wires."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tierkv.moves import Move, Step
from tierkv.simulate_outcome import Counts
from tierkv.stepping import MoveRunner, begin_when_there_is_room
from tierkv.virtual import VirtualWires

if TYPE_CHECKING:
    from tierkv.block_table import BlockTable
    from tierkv.manager import TierManager
    from tierkv.simulate_batch import Row


class Steps:
    """The manager and its executor, with everything counted.

    Attributes:
        manager: decides.
        mover: carries out its moves.
        wires: the clock.
        counts: what has happened.
    """

    def __init__(self, manager: "TierManager", mover: MoveRunner, wires: VirtualWires, counts: Counts) -> None:
        """Ask ``manager`` and let ``mover`` move."""
        self.manager = manager
        self.mover = mover
        self.wires = wires
        self.counts = counts

    def begin(self, row: "Row", count: int) -> Step:
        """Give ``count`` tokens of a sequence a place, waiting for room where needed.

        Raises:
            CapacityError: the tiers cannot hold them.
        """
        before, began, waits = len(row.table.blocks), self.wires.now, self.counts.waits
        steps: list[Step] = []
        try:
            begin_when_there_is_room(self.manager, self, [row.table], count, take=steps.append, waits=self._waits)
        finally:
            if self.counts.waits > waits:
                self.counts.stall_seconds += self.wires.now - began
        row.step = steps[0]
        row.coming = count
        self.counts.homes += len(row.table.blocks) - before
        for tier, pool in self.manager.pools.items():
            self.counts.peak_blocks[tier] = max(self.counts.peak_blocks[tier], pool.used)
        return row.step

    def commit(self, row: "Row") -> None:
        """The tokens of a sequence's step have been computed."""
        assert row.step is not None
        self.manager.commit(row.step)
        row.step, row.coming = None, 0

    def background(self, tables: "Sequence[BlockTable]") -> list[Move]:
        """Start what helps later steps of these sequences; return the moves."""
        moves = self.manager.background(tables)
        self.submit(moves)
        return moves

    # -- the executor, counted ------------------------------------------------------------------------------------

    def submit(self, moves: Sequence[Move]) -> None:
        """Start moves that the manager has planned."""
        self.counts.moves += len(moves)
        self.mover.submit(moves)

    def reap(self) -> None:
        """Report the moves that have ended."""
        self.mover.reap()

    def wait(self) -> None:
        """Let the clock go on until every move in flight has ended."""
        self.mover.wait()

    def _waits(self) -> None:
        self.counts.waits += 1
