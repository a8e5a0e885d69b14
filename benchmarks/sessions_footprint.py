"""What the conversations of one engine take, tier by tier, counted from their own block tables."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierkv.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.block_table import Block, BlockTable


@dataclass(frozen=True)
class Footprint:
    """Bytes that open conversations take while none of them runs and no copy is under way.

    Attributes:
        sessions: conversations.
        tokens: of all of them; what several share counts for each.
        used_bytes: K and V that are there; of a block that several share, once.
        block_bytes: of their blocks, each counted once, in the highest tier that has it.
        copy_bytes: of further clean copies below. They are given up for nothing when their room is wanted.
        engine_bytes: what the engine has allocated, by its stats: pools, scratch and files.
        saved_bytes: of blocks that would be there twice if nobody shared.
    """

    sessions: int
    tokens: int
    used_bytes: int
    block_bytes: dict[str, int]
    copy_bytes: dict[str, int]
    engine_bytes: dict[str, int]
    saved_bytes: int

    @property
    def waste(self) -> float:
        """The share of the blocks' bytes that holds no token; a block with several copies counts once."""
        return 1 - self.used_bytes / sum(self.block_bytes.values())

    @property
    def kv_bytes(self) -> dict[str, int]:
        """Bytes of all copies of the blocks, by tier."""
        return {name: taken + self.copy_bytes[name] for name, taken in self.block_bytes.items()}


def footprint_of(engine: Any, tables: "Sequence[BlockTable]") -> Footprint:
    """Count what conversations take, once the copies under way have ended.

    Args:
        engine: whose they are.
        tables: one of each conversation, none of which runs.
    """
    with engine.exclusive():
        # An engine has no verb of its own for this: its users never wait for what happens in the background.
        mover = engine._mover  # noqa: SLF001
        mover.wait()
        mover.reap()
        if engine.stores.disk is not None:
            engine.stores.disk.flush()
        filled = _filled(tables)
        layout, names = engine.layout, [tier.label for tier in Tier]
        blocks, copies = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
        for block in filled:
            for tier in block.slots:
                (blocks if tier is block.tier else copies)[tier.label] += layout.block_bytes
        stats = engine.stats()
    saved = sum(len(table.blocks) for table in tables) - len(filled)
    return Footprint(
        sessions=len(tables),
        tokens=sum(table.length for table in tables),
        used_bytes=sum(filled.values()) * layout.token_bytes,
        block_bytes=blocks,
        copy_bytes=copies,
        engine_bytes={name: tier.allocated_bytes for name, tier in stats.tiers.items()},
        saved_bytes=saved * layout.block_bytes,
    )


def _filled(tables: "Sequence[BlockTable]") -> "dict[Block, int]":
    """Return every block once, with the most tokens that a table has in it."""
    found: dict[Block, int] = {}
    for table in tables:
        for index, block in enumerate(table.blocks):
            tokens = min(table.block_size, table.length - index * table.block_size)
            found[block] = max(tokens, found.get(block, 0))
    return found
