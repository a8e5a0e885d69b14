"""Orphans: rows that nobody holds any more while copies into or out of them may be under way."""

from collections import deque
from typing import TYPE_CHECKING

from tierkv.interrupts import deferred_interrupt

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.block_table import BlockTable
    from tierkv.manager import TierManager
    from tierkv.moves import Step
    from tierkv.transfer import Ticket, TransferEngine

Rows = tuple["list[BlockTable]", "Step | None", "list[Ticket]"]


class Orphans:
    """Gives back what collected caches and abandoned restores held, as soon as that is safe."""

    def __init__(
        self, manager: "TierManager", transfers: "TransferEngine", end_reads: "Callable[[Step], None]"
    ) -> None:
        """Have none yet. ``end_reads`` waits for the fetches of a step."""
        self._manager = manager
        self._transfers = transfers
        self._end_reads = end_reads
        self._collected: deque[Rows] = deque()
        self._abandoned: list[Rows] = []

    def collected(self, rows: Rows) -> None:
        """Take over the rows of a cache that was collected. Called by any thread at any time."""
        self._collected.append(rows)

    def abandoned(self, rows: Rows) -> None:
        """Take over rows into which copies are under way that nobody waits for. Called inside the gate."""
        self._abandoned.append(rows)

    def adopt(self) -> None:
        """Give back what can be; waits for the copies of a forward that was torn, and for no others."""
        with deferred_interrupt():
            for rows in [one for one in self._abandoned if all(map(self._transfers.is_done, one[2]))]:
                self._abandoned.remove(rows)
                self._release(rows)
            while self._collected:
                _, step, writes = rows = self._collected[0]
                if step is not None:
                    for ticket in writes:
                        self._transfers.settle(ticket)
                    self._end_reads(step)
                self._collected.popleft()
                self._release(rows)

    def _release(self, rows: Rows) -> None:
        tables, step, _ = rows
        if step is not None:
            self._manager.rollback(step)
        for table in tables:
            self._manager.release(table)
