"""RowTables: the rows of one cache as block tables, and everything that is done to whole rows outside of a forward."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from tierkv.errors import ClosedError, StoreError, TransferTimeout, UnsafeCall
from tierkv.interrupts import deferred_interrupt
from tierkv.prefetch import read_committed

if TYPE_CHECKING:
    import torch

    from tierkv.block_table import BlockTable
    from tierkv.engine import Engine
    from tierkv.moves import Step
    from tierkv.sequences import SequenceBatch
    from tierkv.transfer import Copy, Ticket


RESTORE_SECONDS: Final = 20.0
"""The bounded wait for bytes that could be computed as well."""


class RowTables(ABC):
    """Rows of equal length. ``length`` is always the committed length: a torn forward leaves it where it was.

    Attributes:
        engine: whose tiers these are.
        tables: the block table of each row.
        step: the forward that is under way, or None.
    """

    def __init__(self, engine: "Engine") -> None:
        """Make no rows."""
        self.engine = engine
        self.tables: list[BlockTable] = []
        self.step: Step | None = None
        self._writes: list[Ticket] = []
        self._released = False

    @abstractmethod
    def rollback(self) -> bool:
        """Forget an open forward; return whether there was one."""

    @property
    def length(self) -> int:
        """Committed tokens of every row."""
        return self.tables[0].length if self.tables else 0

    @property
    def rows(self) -> int:
        """Number of sequences; 0 while empty."""
        return len(self.tables)

    def check_usable(self) -> None:
        """Raise unless the batch can be used here.

        Raises:
            ClosedError: it was released, its engine is closed, or this is a forked child.
        """
        self.engine.check_open()
        if self._released:
            raise ClosedError("this cache was closed; make another with engine.new_cache()")

    def crop(self, length: int) -> None:
        """Keep the first ``length`` committed tokens of every row."""
        if not 0 <= length <= self.length:
            raise UnsafeCall(f"cannot crop a cache of {self.length} tokens to {length}; legal: 0 to {self.length}")
        self._settle()
        with self.engine.exclusive(), deferred_interrupt():
            for table in self.tables:
                self.engine.manager.crop(table, length)

    def select(self, indices: Sequence[int]) -> None:
        """Make row ``i`` what row ``indices[i]`` is now. Blocks are shared, nothing is copied.

        Beams are reordered, repeated and dropped this way; a row that is not named is released.
        """
        if any(not 0 <= index < self.rows for index in indices):
            raise UnsafeCall(f"row indices {list(indices)} do not fit a cache of {self.rows} rows")
        self._settle()
        manager = self.engine.manager
        with self.engine.exclusive(), deferred_interrupt():
            kept: set[int] = set()
            tables = []
            for index in indices:
                tables.append(manager.fork(self.tables[index]) if index in kept else self.tables[index])
                kept.add(index)
            for index, table in enumerate(self.tables):
                if index not in kept:
                    manager.release(table)
            self.tables = tables

    def fork(self) -> "SequenceBatch":
        """Return a second batch over the same blocks; a write to either copies a block first."""
        self._settle()
        twin = self.engine.open()
        with self.engine.exclusive(), deferred_interrupt():
            twin.tables = [self.engine.manager.fork(table) for table in self.tables]
        return twin

    def read(self, layer: int) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return copies of all committed K and V of a layer, for inspection (blocks; not the hot path)."""
        self._settle()
        engine = self.engine
        with engine.exclusive():
            rows = [list(table.extents(0, table.length, engine.stores.slots_per_segment)) for table in self.tables]
            return read_committed(engine.layout, engine.stores, rows, layer)

    def reset(self) -> None:
        """Drop all tokens and rows; the batch can be used again."""
        if self.engine.closed:
            self.tables, self.step = [], None
            return
        self._settle()
        with self.engine.exclusive(), deferred_interrupt():
            for table in self.tables:
                self.engine.manager.release(table)
            self.tables = []

    def release(self) -> None:
        """Give everything back for good. Idempotent."""
        if not self._released:
            self.reset()
            self._released = True
            self.engine.end_call(self)

    # -- rows that begin with what is known already ---------------------------------------------------------------

    def open_rows(self, count: int) -> None:
        """Make ``count`` empty rows. Until they are equally long again, only ``share``, ``fill`` and ``reset`` may follow."""
        self.reset()
        with self.engine.exclusive(), deferred_interrupt():
            self.tables = [self.engine.manager.open() for _ in range(count)]

    def share(self, row: int, keys: Sequence[bytes], ids: Sequence[int]) -> int:
        """Continue a row of whole blocks with those that hold ``keys``, whose tokens are ``ids``; return how many it got."""
        with self.engine.exclusive(), deferred_interrupt():
            return self.engine.manager.share(self.tables[row], keys, ids)

    def fill(self, row: int, count: int, copies: "Callable[[Step], Sequence[Copy]]") -> int:
        """Continue a row with ``count`` tokens whose bytes are at hand, so that no forward has to compute them.

        Args:
            row: which one.
            count: tokens.
            copies: returns one copy for each new block, in order; all are in flight together.

        Returns:
            How many tokens the row got: those before the first block that could not be filled.

        Raises:
            CapacityError: the tiers cannot hold them; nothing changed.
            TransferTimeout: a copy did not end; ``abandon`` is all that is left to do.
        """
        engine, table = self.engine, self.tables[row]
        with engine.exclusive():
            start, size = table.length, engine.layout.block_size
            engine.begin_fill(self, table, count)
            step = self.step
            assert step is not None
            good = 0
            with deferred_interrupt():
                for copy in copies(step):
                    self._writes.append(engine.transfers.submit([copy]))
                    engine.count_copies([copy])
            for ticket in self._writes:
                engine.transfers.settle(ticket, RESTORE_SECONDS)
            for ticket in self._writes:
                if ticket.error is not None:
                    if not isinstance(ticket.error, StoreError | TransferTimeout):
                        raise ticket.error
                    break
                good += 1
            with deferred_interrupt():
                self._writes.clear()
                engine.manager.commit(step)
                self.step = None
                filled = min(count, max(0, (start // size + good) * size - start))
                engine.manager.crop(table, start + filled)
            return filled

    def abandon(self) -> None:
        """Be empty, although copies into the rows are under way: their places are given back when they have ended."""
        with self.engine.exclusive(), deferred_interrupt():
            if self.step is not None:
                self.engine.abandon(self.tables, self.step, self._writes)
            self.tables, self.step, self._writes = [], None, []

    def crop_rows(self, length: int) -> None:
        """Keep the first ``length`` tokens of rows that may be of different lengths."""
        with self.engine.exclusive(), deferred_interrupt():
            for table in self.tables:
                self.engine.manager.crop(table, length)

    # -- internals ------------------------------------------------------------------------------------------------

    def _drain_writes(self, *, torn: bool = False) -> None:
        """Wait for the copies to host memory; of a torn forward only that they ended matters, not how."""
        while self._writes:
            ticket = self._writes[-1]
            self.engine.transfers.settle(ticket)
            self._writes.pop()
            if ticket.error is not None and not torn:
                raise ticket.error

    def _settle(self) -> None:
        self.check_usable()
        self.rollback()
