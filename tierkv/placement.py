"""Placement: which blocks belong on the device, and which leave it first.

Exact attention reads every block of a live sequence at every token, so recency *within* a sequence is worthless (a
cyclic scan larger than the cache hits nothing). Within a sequence placement is therefore stable: the first blocks
(attention sinks) and the most recent ones stay on the device, and as many of the others as fit, from the front.
*Between* sequences recency decides: idle ones give way first, the least recently used before the others.

Pure functions over block tables; no state of their own.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tierkv.block_table import Block, BlockTable
from tierkv.tier import Tier

HARD: Final = 0
"""The block that the next token is written to: the device must have room for it."""
WISHED: Final = 1
"""One of the first or most recent blocks."""
OPTIONAL: Final = 2
"""Any other block: on the device while there is room."""


@dataclass(frozen=True, slots=True)
class Keep:
    """The blocks of every sequence that stay on the device."""

    first: int
    recent: int

    def rank(self, index: int, num_blocks: int) -> int:
        """Return how much the block at ``index`` of ``num_blocks`` belongs on the device: HARD, WISHED or OPTIONAL."""
        if index == num_blocks - 1:
            return HARD
        return WISHED if index < self.first or index >= num_blocks - self.recent else OPTIONAL


@dataclass(frozen=True, slots=True)
class Demand:
    """Device slots that a step asks for, each number including the one before it."""

    hard: int
    wished: int
    total: int


def tails_to_copy(tables: Iterable[BlockTable]) -> list[BlockTable]:
    """Return the tables whose partly filled last block must be copied before a step appends to all of ``tables``.

    It may be written in place only while it is one sequence's alone and lies on the device and nowhere else: a shared
    or sealed block must not change, and a copy in another tier would go stale. Of several tables that share one tail
    and are its only holders, the last may keep it: the others have left by then.
    """
    holders: dict[Block, int] = {}
    copies = []
    for table in tables:
        tail = table.tail
        if tail is None:
            continue
        left = holders.setdefault(tail, tail.references)
        in_place = left == 1 and not tail.sealed and not tail.arriving and list(tail.slots) == [Tier.DEVICE]
        if not in_place:
            copies.append(table)
            holders[tail] = left - 1
    return copies


def demand(tables: Sequence[BlockTable], count: int, keep: Keep, num_tail_copies: int) -> Demand:
    """Count the device slots that appending ``count`` tokens to every table asks for."""
    ranks = [0, 0, 0]
    for table in tables:
        total = table.blocks_for(table.length + count)
        for index in range(len(table.blocks), total):
            ranks[keep.rank(index, total)] += 1
    hard = num_tail_copies + ranks[HARD]
    return Demand(hard, hard + ranks[WISHED], hard + ranks[WISHED] + ranks[OPTIONAL])


def device_share(tables: Sequence[BlockTable], count: int, keep: Keep, num_slots: int) -> set[tuple[int, int]]:
    """Choose which new blocks, as ``(row, index)``, get the ``num_slots`` free device slots."""
    ranked = []
    for row, table in enumerate(tables):
        total = table.blocks_for(table.length + count)
        ranked += [(keep.rank(index, total), index, row) for index in range(len(table.blocks), total)]
    if len(ranked) > num_slots:
        ranked.sort()
        del ranked[num_slots:]
    return {(row, index) for _, index, row in ranked}


def idle_blocks(tables: Iterable[BlockTable], active: Collection[Block], tier: Tier) -> Iterator[Block]:
    """Yield the blocks of idle sequences whose highest copy is in ``tier``, least recently used sequence first.

    Args:
        tables: all sequences, least recently used first.
        active: blocks that a running or beginning step reads.
        tier: the tier that shall be emptied.
    """
    seen = set(active)
    for table in tables:
        for block in table.blocks:
            if block not in seen and block.slots and block.tier is tier:
                seen.add(block)
                yield block


def own_blocks(tables: Sequence[BlockTable], count: int, keep: Keep) -> tuple[list[Block], list[Block]]:
    """Return device blocks that active sequences can spare: ``(optional, wished)``, each in order of leaving.

    The highest index leaves first: it is the one that has just dropped out of the recent window, so the front of the
    sequence stays put. Partly filled last blocks never leave.
    """
    by_rank: tuple[list[tuple[int, Block]], ...] = ([], [], [])
    for table in tables:
        total = table.blocks_for(table.length + count)
        for index, block in enumerate(table.blocks):
            if Tier.DEVICE in block.slots and block is not table.tail:
                by_rank[keep.rank(index, total)].append((index, block))
    for ranked in by_rank:
        ranked.sort(key=lambda pair: -pair[0])
    return (
        list(dict.fromkeys(block for _, block in by_rank[OPTIONAL])),
        list(dict.fromkeys(block for _, block in by_rank[WISHED] + by_rank[HARD])),
    )
