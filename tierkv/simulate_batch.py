"""Batch: the sequences that a simulated engine decodes together, and where what they read lies."""

from typing import TYPE_CHECKING

from tierkv.manager import TierManager
from tierkv.simulate_times import Times
from tierkv.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tierkv.block_table import Block, BlockTable
    from tierkv.moves import Step
    from tierkv.simulate_requests import Turn


class Row:
    """One sequence.

    Attributes:
        turn: the request that it serves.
        table: its blocks.
        longest: blocks that it may come to.
        step: that is open, or None.
        coming: tokens of the open step that are not decoded yet.
        left: tokens that are still to be fed. The last one of an answer never is.
        named: leading blocks that have keys.
        stored: leading blocks that the prefix store has or was offered.
        cold: its blocks below the device, as ``Batch.cold_blocks`` last saw them.
    """

    __slots__ = ("cold", "coming", "left", "longest", "named", "step", "stored", "table", "turn")

    def __init__(self, turn: "Turn", table: "BlockTable", longest: int) -> None:
        """Begin empty."""
        self.turn = turn
        self.table = table
        self.longest = longest
        self.step: Step | None = None
        self.coming = 0
        self.left = turn.output_tokens - 1
        self.named = self.stored = 0
        self.cold: list[Block] = []

    @property
    def tokens(self) -> int:
        """Tokens that it holds, decoded ones of its open step included."""
        return self.table.length + (self.step.count - self.coming if self.step else 0)


class Batch:
    """The rows that run, in the order in which they joined."""

    def __init__(self, manager: TierManager, gaps: Times) -> None:
        """Make an empty batch.

        Args:
            manager: whose blocks these are.
            gaps: takes the times between two tokens of a row.
        """
        self.rows: list[Row] = []
        self._manager = manager
        self._gaps = gaps
        self._last_token = 0.0  # of every row but those that have joined since
        self._joined: list[float] = []  # when those had their first token
        self._cold: dict[Tier, float] = {}
        self._counted = (-1, -1)  # rises and falls when cold blocks were last counted
        self._tokens = 0

    def __len__(self) -> int:
        return len(self.rows)

    def join(self, row: Row, now: float) -> None:
        """Take in a row that has just had its first token."""
        self.rows.append(row)
        self._joined.append(now)
        self._tokens += row.tokens
        self._counted = (-1, -1)

    def leave(self, row: Row) -> None:
        """Let a row go."""
        self._tokens -= row.tokens
        self.rows.remove(row)
        self._counted = (-1, -1)

    @property
    def tokens(self) -> int:
        """Tokens that all rows hold together."""
        return self._tokens

    def num_blocks(self) -> int:
        """Return the blocks that rows hold, shared ones once."""
        return sum(primary for primary, _ in self._manager.census().values()) - self._manager.shared.num_unused

    def blocks_to_come(self) -> int:
        """Return by how many blocks the rows may still grow."""
        return sum(row.longest - len(row.table.blocks) for row in self.rows)

    # -- what lies below the device -------------------------------------------------------------------------------

    def cold_blocks(self) -> dict[Tier, float]:
        """Return how many blocks the rows read from below the device, by tier; shared ones once for each row."""
        places = self._manager.places
        now = (places.num_rises, places.num_falls)
        if now != self._counted:
            anew = now[1] != self._counted[1]  # where none fell, those that were below are all that can be
            self._counted = now
            host = Tier.HOST
            num_cold = num_on_disk = 0
            for row in self.rows:
                if anew or row.cold:
                    row.cold = cold_blocks(row.table.blocks if anew else row.cold)
                    num_cold += len(row.cold)
                    num_on_disk += sum(1 for block in row.cold if host not in block.slots)
            counts = {Tier.HOST: num_cold - num_on_disk, Tier.DISK: num_on_disk}
            self._cold = {tier: number for tier, number in counts.items() if number}
        return self._cold

    def rising(self, tier: Tier) -> int:
        """Return how many of the cold blocks are on their way up from a tier."""
        return sum(
            move.source.references
            for move in self._manager.moves
            if move.wire.destination is Tier.DEVICE and move.wire.source is tier and move.tail_of is None
        )

    # -- time -----------------------------------------------------------------------------------------------------

    def note_tokens(self, begin: float, seconds: float, count: int) -> None:
        """Note the times between tokens: ``count`` more for every row, ``seconds`` each, from ``begin`` on."""
        first = begin + seconds
        newer = self._joined[-len(self.rows) :]
        for joined in newer:
            self._gaps.add(first - joined)
        if older := len(self.rows) - len(newer):
            self._gaps.add(first - self._last_token, older)
        if count > 1:
            self._gaps.add(seconds, len(self.rows) * (count - 1))
        self._joined.clear()
        self._last_token = begin + seconds * count

    def advance(self, count: int) -> list[Row]:
        """Let every row have ``count`` tokens more; commit the steps that are full, and return their rows."""
        ended = []
        for row in self.rows:
            row.coming -= count
            row.left -= count
            if not row.coming:
                assert row.step is not None
                self._manager.commit(row.step)
                row.step = None
                ended.append(row)
        self._tokens += count * len(self.rows)
        return ended


def cold_blocks(blocks: "Iterable[Block]") -> "list[Block]":
    """Return the blocks that do not lie on the device."""
    device = Tier.DEVICE  # looked up once, as this runs very often
    return [block for block in blocks if device not in block.slots]
