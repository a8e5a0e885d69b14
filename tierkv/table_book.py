"""TableBook: the sequences of a manager, and who holds which block.

What is done to whole sequences between forwards: they are opened, forked, cropped and released, begin with blocks that
others have computed, and let others find theirs. Steps and moves are the manager's.
"""

from collections.abc import Iterable, Sequence

from tierkv.block_table import Block, BlockTable, drop_reference
from tierkv.places import Places
from tierkv.sharing import SharedBlocks

STEPS_UNTIL_IDLE = 8
"""A sequence that this many steps of others have passed is not one of those that take turns."""


class TableBook:
    """All sequences. Not thread-safe.

    Attributes:
        block_size: tokens in a block.
        places: where the copies of every block lie.
        shared: which blocks hold which keys.
    """

    def __init__(self, block_size: int, places: Places, shared: SharedBlocks) -> None:
        """Make a book without sequences."""
        self.block_size = block_size
        self.places = places
        self.shared = shared
        self._num_steps = 0
        self._tables: dict[BlockTable, int] = {}  # least recently used first, each with the number of its last step

    # -- sequences ------------------------------------------------------------------------------------------------

    def open(self) -> BlockTable:
        """Return the table of a new, empty sequence."""
        table = BlockTable(self.block_size)
        self._tables[table] = self._num_steps
        return table

    def fork(self, table: BlockTable) -> BlockTable:
        """Return a second sequence over the same blocks; a write to either copies the block first."""
        twin = table.fork()
        self._tables[twin] = self._num_steps
        return twin

    def crop(self, table: BlockTable, length: int) -> None:
        """Keep the first ``length`` tokens of a sequence."""
        for block in table.cut(length):
            self._let_go(block)

    def release(self, table: BlockTable) -> None:
        """End a sequence.

        Raises:
            ValueError: it was released before, or belongs to another manager.
        """
        if table not in self._tables:
            raise ValueError("a block table was released twice")
        self.crop(table, 0)
        del self._tables[table]

    def rest(self, tables: Iterable[BlockTable]) -> None:
        """Whoever used these sequences is done for now: others may have their room at once."""
        for table in tables:
            if table in self._tables:
                self._tables[table] = min(self._tables[table], self._num_steps - STEPS_UNTIL_IDLE - 1)

    def _is_idle(self, table: BlockTable) -> bool:
        return self._tables[table] < self._num_steps - STEPS_UNTIL_IDLE

    def _idle(self) -> list[BlockTable]:
        """Return the sequences that are idle, the least recently used first; those that take turns are not."""
        return [table for table in self._tables if self._is_idle(table)]

    # -- shared blocks --------------------------------------------------------------------------------------------

    def share(self, table: BlockTable, keys: Sequence[bytes], ids: Sequence[int]) -> int:
        """Append the blocks that hold ``keys``, up to the first that nobody holds, to a table of whole blocks.

        Args:
            table: of a sequence outside of any step.
            keys: of the blocks.
            ids: of their tokens, one block after another.

        Returns:
            How many were appended. Another sequence may write to none of them: they are sealed.
        """
        if table.tail is not None or table not in self._tables:
            raise ValueError("shared blocks go behind whole blocks of a sequence")
        found = []
        for index, key in enumerate(keys):
            block = self.shared.find(key, ids[index * self.block_size : (index + 1) * self.block_size])
            if block is None:
                break
            found.append(block)
        for block in reversed(found):
            self.shared.use(block)
        table.blocks += found
        table.length += len(found) * self.block_size
        table.seal()
        return len(found)

    def publish(
        self, table: BlockTable, index: int, key: bytes, ids: Sequence[int], parent: bytes | None, cost: float
    ) -> Block:
        """Name a full block, so that others find it. Where its key is known already, the known block takes its place.

        Args:
            table: of a sequence outside of any step.
            index: of the block in the table.
            key: of the block, and so of all tokens up to its end.
            ids: of its tokens.
            parent: key of the block before it.
            cost: to compute it again, in any measure.

        Returns:
            The block that holds the key now, in the table and for others.
        """
        block = table.blocks[index]
        if (index + 1) * self.block_size > table.length or any(table in step.tables for step in self.places.steps):
            raise ValueError("only a full block of a sequence at rest has a key")
        known = self.shared.find(key, ids)
        if block.key is not None or known is block or (known is None and key in self.shared):
            return block  # the last: two texts with one key, of which the first keeps it
        if known is not None and known.tier > block.tier:
            if not self.shared.is_kept(known):
                return block  # others hold it further down; both stay
            self.shared.forget(known)
            self.places.forget(known)
            known = None
        if known is None:
            self.shared.add(block, key, ids, parent, cost)
            return block
        self.shared.use(known)
        table.blocks[index] = known
        if drop_reference(block):
            self._let_go(block)
        return known

    def disown_shared(self) -> None:
        """Forget all keys: what they stood for has changed (the model's weights, for one)."""
        for block in self.shared.disown():
            self.places.forget(block)

    def _let_go(self, block: Block) -> None:
        """No sequence holds a block any more."""
        if not self.shared.keep(block):
            self.places.forget(block)
