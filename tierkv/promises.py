"""Promises: what calls that are under way may still come to, so that no later one takes it from them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from tierkv.rows import RowTables


@dataclass(frozen=True, slots=True)
class Promise:
    """What one call was promised.

    Attributes:
        blocks: that its rows may come to.
        buffer_tokens: that a buffer of the scratch must hold for it.
    """

    blocks: int
    buffer_tokens: int


class Promises:
    """The promises of an engine. Used inside its gate."""

    def __init__(self) -> None:
        """Promise nothing."""
        self._of: WeakKeyDictionary[RowTables, Promise] = WeakKeyDictionary()

    def give(self, batch: "RowTables", promise: Promise) -> None:
        """Promise something to a call on ``batch``, in place of what it was promised before."""
        self._of[batch] = promise

    def end(self, batch: "RowTables") -> bool:
        """The call on ``batch`` is over; return whether there was one."""
        return self._of.pop(batch, None) is not None

    def blocks_to_come(self, batch: "RowTables") -> int:
        """Return the blocks by which the others may grow."""
        return sum(
            max(0, promise.blocks - sum(len(table.blocks) for table in other.tables))
            for other, promise in list(self._of.items())
            if other is not batch
        )

    def least_buffer(self, batch: "RowTables") -> int:
        """Return the tokens that a buffer must hold for the others."""
        return max(
            (promise.buffer_tokens for other, promise in list(self._of.items()) if other is not batch), default=0
        )
