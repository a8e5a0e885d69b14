"""Block and BlockTable: a sequence is a list of blocks; several sequences may hold the same block."""

from collections.abc import Iterator
from typing import NamedTuple

from tierkv.tier import Run, Tier


class Block:
    """Up to ``block_size`` tokens of a sequence, in all cached layers.

    Attributes:
        uid: never reused within a manager.
        references: block tables that hold it.
        sealed: full and immutable from now on.
        key: the name under which others find it (``tierkv.keys``), or None.
        slots: valid, readable copies: tier -> slot.
        arriving: copies on their way: tier -> slot reserved for them. Not readable.
    """

    __slots__ = ("arriving", "key", "references", "sealed", "slots", "uid")

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.references = 1
        self.sealed = False
        self.key: bytes | None = None
        self.slots: dict[Tier, int] = {}
        self.arriving: dict[Tier, int] = {}

    @property
    def tier(self) -> Tier:
        """The highest tier with a readable copy."""
        slots = self.slots
        return min(slots) if len(slots) > 1 else next(iter(slots))  # nearly all have one

    def __repr__(self) -> str:
        places = ",".join(f"{tier.label}:{slot}" for tier, slot in sorted(self.slots.items()))
        return f"Block({self.uid} {places} refs={self.references}{' sealed' if self.sealed else ''})"


class Extent(NamedTuple):
    """Consecutive tokens of one sequence that lie in one run of one tier."""

    tier: Tier
    run: Run
    first_token: int
    """Offset of the first token from the start of the run."""
    start: int
    """Position of the first token in the sequence."""
    stop: int
    """Position after the last token."""


class BlockTable:
    """The blocks of one sequence in logical order, and how many tokens of them are committed.

    Logically contiguous, physically scattered: token ``i`` is token ``i % block_size`` of block ``i // block_size``.
    Every block but the last is full, so at most ``block_size - 1`` token places are unused.
    """

    __slots__ = ("__weakref__", "block_size", "blocks", "length", "num_sealed")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: list[Block] = []
        self.length = 0
        self.num_sealed = 0

    @property
    def tail(self) -> Block | None:
        """The last block when it is partly filled, else None."""
        return self.blocks[-1] if self.length % self.block_size else None

    def blocks_for(self, length: int) -> int:
        """Return how many blocks hold ``length`` tokens."""
        return -(-length // self.block_size)

    def fork(self) -> "BlockTable":
        """Return a second table over the same blocks; each gets one more reference."""
        twin = BlockTable(self.block_size)
        twin.blocks = list(self.blocks)
        twin.length = self.length
        twin.num_sealed = self.num_sealed
        for block in twin.blocks:
            block.references += 1
        return twin

    def cut(self, length: int) -> list[Block]:
        """Keep the first ``length`` tokens; return the blocks that no table holds any more."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot keep {length} of {self.length} tokens")
        keep = self.blocks_for(length)
        dropped, self.blocks = self.blocks[keep:], self.blocks[:keep]
        self.length = length
        self.num_sealed = min(self.num_sealed, length // self.block_size)
        return [block for block in dropped if drop_reference(block)]

    def seal(self) -> None:
        """Seal every full block: a forward is about to append beyond it."""
        full = self.length // self.block_size
        for block in self.blocks[self.num_sealed : full]:
            block.sealed = True
        self.num_sealed = full

    def extents(self, start: int, stop: int, slots_per_segment: dict[Tier, int]) -> Iterator[Extent]:
        """Yield where the tokens ``start`` to ``stop`` lie, coalesced into runs that stay inside a segment."""
        size = self.block_size
        index = start // size
        last = self.blocks_for(stop) if start < stop else index
        while index < last:
            first = index
            tier = self.blocks[index].tier
            slot = self.blocks[index].slots[tier]
            per_segment = slots_per_segment[tier]
            index += 1
            while (
                index < last
                and self.blocks[index].tier is tier
                and self.blocks[index].slots[tier] == slot + index - first
                and (slot + index - first) % per_segment
            ):
                index += 1
            begin = max(start, first * size)
            yield Extent(tier, Run(slot, index - first), begin - first * size, begin, min(stop, index * size))


def drop_reference(block: Block) -> bool:
    """Drop one table's reference; return whether it was the last.

    Raises:
        ValueError: the block has no reference left (released twice).
    """
    if block.references < 1:
        raise ValueError(f"block {block.uid} was released twice")
    block.references -= 1
    return block.references == 0
