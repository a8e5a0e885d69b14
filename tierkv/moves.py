"""Move, Room and Step: what the manager answers with."""

from dataclasses import dataclass, field

from tierkv.block_table import Block, BlockTable, Extent
from tierkv.tier import Wire


@dataclass(eq=False, slots=True)
class Move:
    """One whole block to copy from one slot to another.

    Attributes:
        source: the block that is read.
        wire: from which tier to which.
        source_slot: where it is read; referenced until the move is reported.
        slot: where it is written; unreadable until ``complete``.
        evicts: the source slot is given up once the copy is complete.
        tail_of: for a private copy of a last block: the table it is for.
        target: the block that gets the copy (``source`` itself unless ``tail_of``).
    """

    source: Block
    wire: Wire
    source_slot: int
    slot: int
    evicts: bool = False
    tail_of: BlockTable | None = None
    target: Block = field(init=False)

    def __post_init__(self) -> None:
        self.target = self.source


@dataclass(frozen=True, slots=True)
class Room:
    """Not yet: run ``moves``, wait until every move in flight is reported, then ask again."""

    moves: tuple[Move, ...]


@dataclass(eq=False, slots=True)
class Step:
    """One forward over some sequences. Every place in it stays valid until ``commit`` or ``rollback``.

    Attributes:
        tables: one per row.
        start: tokens that every row holds already.
        count: tokens that the forward appends to every row.
        reads: per row, where the tokens ``0 .. start`` lie.
        writes: per row, where the tokens ``start .. start + count`` go.
        torn: its places are no longer valid (a tier was resized); it can only be rolled back.
    """

    tables: tuple[BlockTable, ...]
    start: int
    count: int
    reads: tuple[tuple[Extent, ...], ...]
    writes: tuple[tuple[Extent, ...], ...]
    torn: bool = False

    @property
    def stop(self) -> int:
        """Tokens that every row holds once the step is committed."""
        return self.start + self.count
