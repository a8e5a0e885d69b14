"""The book that eviction rules keep: what they know of each stored block, and the order in which they look at them.

``Ledger`` is what a rule needs of a book; ``MemoryLedger`` is one in memory. One in a file needs no more methods.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Protocol

GHOST: Final = 2
"""The queue, of every rule, for keys of blocks that were evicted: there are no bytes behind them."""
HELD: Final = 3
"""What is added to the queue of an entry that has children. It cannot go, so no rule looks at these queues."""
QUEUES: Final = range(HELD + GHOST)
"""All queues that a rule may use."""


@dataclass(slots=True)
class Entry:
    """What a rule knows of one stored block.

    Attributes:
        key: of the block.
        parent: key of the block before it in its sequence; None for a first one.
        num_bytes: what forgetting it gives back; 0 for a ghost.
        cost: seconds to compute it again, or any measure that is proportional to them.
        queue: where the rule filed it.
        rank: its place there, from 0 to 2^63 - 1; the lowest is looked at first.
        hits: times it was found since the rule last looked; rules cap it at 255 or less.
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

    @property
    def stored(self) -> bool:
        """Whether there are bytes behind it; a ghost is only a key that is remembered."""
        return self.queue != GHOST


class Ledger(Protocol):
    """The book that a rule keeps. Not thread-safe: its owner holds a lock or a transaction."""

    floor: int
    """A number that a rule keeps between its decisions, from 0 to 2^63 - 1; 0 at first."""

    def find(self, key: bytes) -> Entry | None:
        """Return the entry of a key, a ghost's too, or None. A copy: changing it changes nothing until it is filed."""

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


_Row = tuple[bytes, bytes | None, int, float, int, int, int, int]  # the fields of an entry, in their order


class MemoryLedger:
    """A book in memory, for the index of shared blocks and for replaying traces.

    Every operation takes O(log n) comparisons. A queue that nobody looks through, as those of entries with children,
    is not kept in order.
    """

    def __init__(self) -> None:
        self.floor = 0
        self._rows: dict[bytes, _Row] = {}
        self._bytes: Counter[int] = Counter()
        self._orders: dict[int, _Order] = {}
        self._ticks = 0

    def __len__(self) -> int:
        return len(self._rows)

    def find(self, key: bytes) -> Entry | None:
        """Return a copy of the entry of a key, or None."""
        row = self._rows.get(key)
        return None if row is None else Entry(*row)

    def file(self, entry: Entry) -> None:
        """Put an entry in, or put it to another place."""
        key, queue, rank = entry.key, entry.queue, entry.rank
        old = self._rows.get(key)
        self._rows[key] = (
            key, entry.parent, entry.num_bytes, entry.cost, queue, rank, entry.hits, entry.children
        )  # fmt: skip
        if old is None:
            self._bytes[queue] += entry.num_bytes
        else:
            if old[4] != queue or old[2] != entry.num_bytes:
                self._bytes[old[4]] -= old[2]
                self._bytes[queue] += entry.num_bytes
            if old[4] == queue and old[5] == rank:
                return
            if (order := self._orders.get(old[4])) is not None:
                order.remove((old[5], key))
        if (order := self._orders.get(queue)) is not None:
            order.add((rank, key))

    def remove(self, key: bytes) -> None:
        """Take an entry out; one that is not there is fine."""
        old = self._rows.pop(key, None)
        if old is not None:
            self._bytes[old[4]] -= old[2]
            if (order := self._orders.get(old[4])) is not None:
                order.remove((old[5], key))

    def ascending(self, queue: int) -> Iterator[Entry]:
        """Yield copies of the entries of a queue, lowest rank first, equal ranks by key."""
        if (order := self._orders.get(queue)) is None:
            order = self._orders[queue] = _Order((row[5], row[0]) for row in self._rows.values() if row[4] == queue)
        for _, key in order:
            yield Entry(*self._rows[key])

    def bytes_in(self, queue: int) -> int:
        """Return the bytes of all entries of a queue."""
        return self._bytes[queue]

    def tick(self) -> int:
        """Return a number larger than all before."""
        self._ticks += 1
        return self._ticks


_Place = tuple[int, bytes]
_LOAD: Final = 512
"""Places in one list of an order: moving that many costs less than finding the right one."""


class _Order:
    """Places in ascending order, in lists short enough that putting one in or out moves little memory.

    No place in a list is above its bound, and all places in the next one are.
    """

    def __init__(self, places: Iterator[_Place]) -> None:
        self._split_up(sorted(places))

    def _split_up(self, places: list[_Place]) -> None:
        self._lists = [places[begin : begin + _LOAD] for begin in range(0, len(places), _LOAD)]
        self._bounds = [one[-1] for one in self._lists]
        self._count = len(places)

    def add(self, place: _Place) -> None:
        index = bisect_left(self._bounds, place)
        if index < len(self._lists):
            insort(self._lists[index], place)
        elif self._lists:
            index -= 1
            self._lists[index].append(place)
            self._bounds[index] = place
        else:
            self._lists.append([place])
            self._bounds.append(place)
        self._count += 1
        full = self._lists[index]
        if len(full) > 2 * _LOAD:
            self._lists[index : index + 1] = [full[:_LOAD], full[_LOAD:]]
            self._bounds[index : index + 1] = [full[_LOAD - 1], full[-1]]

    def remove(self, place: _Place) -> None:
        index = bisect_left(self._bounds, place)
        places = self._lists[index]
        del places[bisect_left(places, place)]
        self._count -= 1
        if not places:
            del self._lists[index], self._bounds[index]
        if len(self._lists) > 4 * (self._count // _LOAD) + 8:  # many short ones: moves are then in the list of lists
            self._split_up(list(self))

    def __iter__(self) -> Iterator[_Place]:
        for places in self._lists:
            yield from places
