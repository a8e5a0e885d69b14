"""What is known of the rows of a call: their prompts, the keys of their full blocks, and where those can be had."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierkv.storage.prefix_store import Found


@dataclass(frozen=True)
class Prompt:
    """One row of a call: ``pad`` places of padding, then tokens."""

    ids: Sequence[int]
    pad: int = 0


@dataclass
class KeyedRow:
    """What one row of a cache has keys for.

    Attributes:
        pad: places before its first token.
        keys: of its full blocks, counted from its first token.
        stored: how many of them the store has or was offered.
        closed_at: place from which nothing can have a key, because it is no function of the ids alone; None: none is known.
    """

    pad: int = 0
    keys: list[bytes] = field(default_factory=list)
    stored: int = 0
    closed_at: int | None = None

    def crop(self, length: int, block_size: int) -> None:
        """Keep what ``length`` places, padding included, have keys for."""
        del self.keys[max(0, length - self.pad) // block_size :]
        self.stored = min(self.stored, len(self.keys))
        if self.closed_at is not None and self.closed_at >= length:
            self.closed_at = None

    def close(self, place: int) -> None:
        """Nothing from ``place`` on can have a key."""
        self.closed_at = place if self.closed_at is None else min(self.closed_at, place)

    def copy(self) -> "KeyedRow":
        """Return an independent copy."""
        return replace(self, keys=list(self.keys))


@dataclass
class Match:
    """What is known of one prompt.

    Attributes:
        prompt: it.
        keys: of its full blocks.
        in_memory: how many of them memory holds, from the first on.
        found: those that the store has beyond them.
        stored: how many the store has, from the first on.
    """

    prompt: Prompt
    keys: list[bytes]
    in_memory: int
    found: "list[Found]"
    stored: int
