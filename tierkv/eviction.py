"""Eviction: which stored block is forgotten first, as rules over an ordered book.

A rule never touches bytes. It files every entry in one of its queues under a rank; the lowest rank of a queue is looked
at first. The book may lie in memory (``MemoryLedger``: the index of shared blocks, the replay benchmark) or in a file
(the prefix store), so a rule survives a restart and serves several processes, and what is measured is what runs.

Blocks form chains: one whose parent is gone can never be found again. So children always go before their parents.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol


@dataclass(slots=True)
class Entry:
    """What a rule knows of one stored block.

    Attributes:
        key: of the block.
        parent: key of the block before it in its sequence; None for a first one.
        num_bytes: what forgetting it gives back.
        cost: seconds to compute it again, or any measure that is proportional to them.
        queue: where the rule filed it.
        rank: its place there; the lowest is looked at first.
        hits: times it was found since the rule last looked; rules cap it.
        children: stored blocks that continue it.
    """

    key: bytes
    parent: bytes | None
    num_bytes: int
    cost: float = 1.0
    queue: int = 0
    rank: int = 0
    hits: int = 0
    children: int = 0


class Ledger(Protocol):
    """The book that a rule keeps. Not thread-safe: its owner holds a lock or a transaction."""

    floor: int
    """A number that a rule keeps between its decisions; 0 at first."""

    def find(self, key: bytes) -> Entry | None:
        """Return the entry of a key, or None."""

    def file(self, entry: Entry) -> None:
        """Put an entry in, or put it to another place: its ``queue`` and ``rank`` as they are now."""

    def remove(self, key: bytes) -> None:
        """Take an entry out; one that is not there is fine."""

    def ascending(self, queue: int) -> Iterator[Entry]:
        """Yield the entries of a queue, lowest rank first. Whoever changes the book stops iterating."""

    def bytes_in(self, queue: int) -> int:
        """Return the bytes of all entries of a queue."""

    def tick(self) -> int:
        """Return a number larger than all before, after a restart too."""


class EvictionPolicy(ABC):
    """One rule. Stateless: all it must remember lies in the ledger."""

    name: ClassVar[str]

    def insert(self, ledger: Ledger, entry: Entry) -> None:
        """Put a new block into the book."""
        if entry.parent is not None and (parent := ledger.find(entry.parent)) is not None:
            parent.children += 1
            ledger.file(parent)
        self.admit(ledger, entry)

    def drop(self, ledger: Ledger, entry: Entry) -> None:
        """Take a block out of the book, because it was evicted or for any other reason."""
        ledger.remove(entry.key)
        if entry.parent is not None and (parent := ledger.find(entry.parent)) is not None:
            parent.children -= 1
            ledger.file(parent)

    @abstractmethod
    def admit(self, ledger: Ledger, entry: Entry) -> None:
        """File a new entry."""

    @abstractmethod
    def touch(self, ledger: Ledger, entry: Entry) -> None:
        """Note that an entry was found. Of a chain, the last block is touched first, so that parents outlive children."""

    @abstractmethod
    def victim(self, ledger: Ledger, may_go: Callable[[Entry], bool]) -> Entry | None:
        """Choose what goes next: an entry without children that ``may_go``; None where there is none.

        It stays in the book until the caller drops it.
        """


class LRU(EvictionPolicy):
    """Least recently found first."""

    name = "lru"

    def admit(self, ledger: Ledger, entry: Entry) -> None:
        """File it as the most recent."""
        entry.rank = ledger.tick()
        ledger.file(entry)

    def touch(self, ledger: Ledger, entry: Entry) -> None:
        """File it as the most recent."""
        self.admit(ledger, entry)

    def victim(self, ledger: Ledger, may_go: Callable[[Entry], bool]) -> Entry | None:
        """Choose the least recent leaf."""
        return next((entry for entry in ledger.ascending(0) if not entry.children and may_go(entry)), None)
