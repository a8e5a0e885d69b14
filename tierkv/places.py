"""Places: where the copies of every block lie, and which slots may be given up.

The book that the manager keeps. It knows slots and copies under way; it does not decide who moves where.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from tierkv.block_pool import BlockPool
from tierkv.block_table import Block, BlockTable
from tierkv.moves import Move, Step
from tierkv.tier import Tier, Wire

_TIERS: Final = tuple(Tier)
"""Walking a tuple is several times faster than walking an enum, and ``_file`` does it for every copy that comes or goes."""


class Places:
    """Slots, copies and copies under way of all blocks.

    Attributes:
        pools: the slots of every tier.
        moves: copies under way; each holds a reference to its source slot and reserves its destination slot.
        steps: forwards under way; the places of their blocks must not change.
        num_rises: how often a block that sequences hold has come to a higher tier than before.
        num_falls: how often one has lost its copy in the highest.
    """

    def __init__(self, slots: Mapping[Tier, int], slots_per_segment: Mapping[Tier, int]) -> None:
        """Make the book of empty tiers; a tier without slots is off."""
        self.pools = {tier: BlockPool(slots.get(tier, 0), slots_per_segment[tier]) for tier in Tier}
        self.moves: set[Move] = set()
        self.steps: set[Step] = set()
        self._primary: dict[Tier, dict[Block, None]] = {tier: {} for tier in Tier}
        self._clean: dict[Tier, dict[Block, None]] = {tier: {} for tier in Tier}
        self._next_uid = 0
        self.num_rises = self.num_falls = 0

    def new_block(self) -> Block:
        """Return a block that lies nowhere yet."""
        self._next_uid += 1
        return Block(self._next_uid)

    def census(self) -> dict[Tier, tuple[int, int]]:
        """Return per tier ``(blocks whose highest copy is here, further clean copies here)``."""
        return {tier: (len(self._primary[tier]), len(self._clean[tier])) for tier in _TIERS}

    def num_highest(self, tier: Tier) -> int:
        """Return how many blocks have their highest copy in ``tier``."""
        return len(self._primary[tier])

    def lying_in(self, tier: Tier) -> list[Block]:
        """Return all blocks with a copy in ``tier``."""
        return [*self._primary[tier], *self._clean[tier]]

    # -- who counts on a place ------------------------------------------------------------------------------------

    def active(self, tables: Iterable[BlockTable] = ()) -> set[Block]:
        """Return the blocks of open steps and of ``tables``."""
        running = [table for step in self.steps for table in step.tables]
        return {block for table in [*running, *tables] for block in table.blocks}

    def is_read(self, block: Block) -> bool:
        """Return whether an open step counts on the places of a block."""
        if not block.references:
            return False  # no sequence holds it
        return any(block in table.blocks for step in self.steps if not step.torn for table in step.tables)

    # -- room -----------------------------------------------------------------------------------------------------

    def available(self, tier: Tier) -> int:
        """Slots that ``take`` can hand out: the free ones, and those of clean copies that nobody reads."""
        pool = self.pools[tier]
        return 0 if pool.frozen or not pool.num_slots else pool.free + self.num_droppable(tier)

    def num_droppable(self, tier: Tier) -> int:
        """Clean copies in ``tier`` that may be given up."""
        return sum(1 for _ in self._droppable(tier))

    def has_room(self, tier: Tier) -> bool:
        """Return whether ``take`` can hand out a slot."""
        pool = self.pools[tier]
        return pool.free > 0 or (not pool.frozen and next(self._droppable(tier), None) is not None)

    def take(self, tier: Tier, after: int | None = None) -> int:
        """Take a slot, giving up the oldest clean copy when none is free."""
        pool = self.pools[tier]
        if not pool.free:
            self.drop(next(self._droppable(tier)), tier)
        return pool.allocate(1, after)[0]

    def take_below(self, tier: Tier) -> tuple[Tier, int] | None:
        """Take a slot in the highest tier below ``tier`` that has room; None where none has."""
        for lower in Tier:
            if lower > tier and self.has_room(lower):
                return lower, self.take(lower)
        return None

    # -- copies ---------------------------------------------------------------------------------------------------

    def put(self, block: Block, tier: Tier, slot: int) -> None:
        """Note a readable copy of ``block`` in a slot that was taken for it."""
        before = tuple(block.slots)
        block.slots[tier] = slot
        self._file(block, before)

    def drop(self, block: Block, tier: Tier) -> None:
        """Give up the copy of ``block`` in ``tier``."""
        before = tuple(block.slots)
        self.pools[tier].release(block.slots.pop(tier))
        self._file(block, before)

    def forget(self, block: Block) -> None:
        """A block that no table holds: give up its copies. One on its way is given up when it is reported."""
        for tier in list(block.slots):
            self.drop(block, tier)

    def start(self, block: Block, tier: Tier, slot: int, *, evicts: bool, tail_of: BlockTable | None = None) -> Move:
        """Note a copy of ``block`` that is under way to ``slot``."""
        source = block.tier
        move = Move(block, Wire(source, tier), block.slots[source], slot, evicts, tail_of)
        self.pools[source].retain(move.source_slot)
        if tail_of is None:
            block.arriving[tier] = slot
        self.moves.add(move)
        return move

    def finish(self, move: Move) -> None:
        """Note that a copy is under way no more, however it ended."""
        self.moves.remove(move)
        self.pools[move.wire.source].release(move.source_slot)
        if move.tail_of is None:
            del move.source.arriving[move.wire.destination]

    def _droppable(self, tier: Tier) -> Iterator[Block]:
        """Yield blocks whose clean copy in ``tier`` nobody reads, oldest first."""
        pool, running = self.pools[tier], self.active() if self.steps else frozenset[Block]()
        for block in self._clean[tier]:
            slot = block.slots[tier]
            if slot < pool.num_slots and pool.references(slot) == 1 and block not in running:
                yield block

    def _file(self, block: Block, before: tuple[Tier, ...]) -> None:
        """Put a block where its copies are now; before, they were in these tiers. The oldest in a place comes first."""
        was = min(before, default=None)
        for tier in before:
            del (self._primary if tier is was else self._clean)[tier][block]
        if not block.slots:
            return
        highest = block.tier
        for tier in block.slots:
            (self._primary if tier is highest else self._clean)[tier][block] = None
        if was is not None and was is not highest and block.references:
            self.num_rises += highest < was
            self.num_falls += highest > was
