"""Eviction: which stored block is forgotten first, as rules over an ordered book.

A rule never touches bytes. It files every entry in one of its queues under a rank; the lowest rank of a queue is looked
at first. The book may lie in memory (``MemoryLedger``: the index of shared blocks, the replay benchmark) or in a file
(the prefix store), so a rule survives a restart and serves several processes, and what is measured is what runs.

Blocks form chains: one whose parent is gone can never be found again. So children always go before their parents, and
an entry with children waits in a queue of its own (``HELD``) where no rule looks: choosing takes no longer for long
chains. It keeps its rank, and so its turn, for the time when its last child is gone.

What an owner of bytes does::

    entry = ledger.find(key)            a block is there if entry is not None and entry.stored
    policy.touch(ledger, entry)         it was found; of a chain, the last block first
    policy.insert(ledger, Entry(...))   its bytes were written; of a chain, the first block first
    entry = policy.victim(ledger, ...)  something must go: then policy.evicted(ledger, entry), and its bytes with it
    policy.drop(ledger, entry)          it is gone for any other reason: damaged, too old, cleared

**Ghosts.** A rule may remember keys of blocks that it evicted: entries in the queue ``GHOST``, with ``stored`` false
and 0 bytes. They are misses to everybody but the rule, never victims, never more than there are stored blocks, and the
rule forgets them itself; inserting the block again replaces its ghost. The room taken is the sum of ``bytes_in`` over
``QUEUES``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Final

from tierkv.eviction_ledger import GHOST, HELD, QUEUES, Entry, Ledger, MemoryLedger

__all__ = [
    "GHOST", "HELD", "LRU", "POLICIES", "QUEUES", "S3FIFO", "CostAware", "Entry", "EvictionPolicy", "Ledger",
    "MemoryLedger", "make_policy", "refile",
]  # fmt: skip


class EvictionPolicy(ABC):
    """One rule. Stateless: all it must remember lies in the ledger.

    Entries that are handed in are as the book has them now; one that was found before another call may be out of date.
    All verbs change the book, ``victim`` too.
    """

    name: ClassVar[str]

    def insert(self, ledger: Ledger, entry: Entry) -> None:
        """Put a new block into the book, one that is not stored yet.

        A parent that is not there is not waited for: such an entry can never be found, and ages out as any other.
        """
        if entry.parent is not None and (parent := ledger.find(entry.parent)) is not None and parent.stored:
            parent.children += 1
            _file(ledger, parent, parent.queue % HELD)
        self.admit(ledger, entry)

    def drop(self, ledger: Ledger, entry: Entry) -> None:
        """Take a block out of the book for any reason but eviction; one that is not there is fine."""
        if ledger.find(entry.key) is None:
            return
        ledger.remove(entry.key)
        if entry.parent is not None and (parent := ledger.find(entry.parent)) is not None and parent.children:
            parent.children -= 1  # 0 where the parent came, or came back, after this entry: that one isn't counted
            _file(ledger, parent, parent.queue % HELD)

    def evicted(self, ledger: Ledger, entry: Entry) -> None:
        """Take a victim out of the book. Its bytes may be gone before or after, in the same transaction."""
        self.drop(ledger, entry)

    @abstractmethod
    def admit(self, ledger: Ledger, entry: Entry) -> None:
        """File a new entry."""

    @abstractmethod
    def touch(self, ledger: Ledger, entry: Entry) -> None:
        """Note that an entry was found. Of a chain, the last block is touched first, so that parents outlive children."""

    @abstractmethod
    def victim(self, ledger: Ledger, may_go: Callable[[Entry], bool]) -> Entry | None:
        """Choose what goes next: an entry without children that ``may_go``; None where there is none.

        It stays in the book until the caller says that it was ``evicted``. Those that may not go are passed over each
        time: there should be few without children, as there are where only blocks in use are held.
        """


class LRU(EvictionPolicy):
    """Least recently found first."""

    name = "lru"

    def admit(self, ledger: Ledger, entry: Entry) -> None:
        """File it as the most recent."""
        entry.rank = ledger.tick()
        _file(ledger, entry, 0)

    def touch(self, ledger: Ledger, entry: Entry) -> None:
        """File it as the most recent."""
        self.admit(ledger, entry)

    def victim(self, ledger: Ledger, may_go: Callable[[Entry], bool]) -> Entry | None:
        """Choose the least recent leaf."""
        return _first(ledger, 0, may_go)


class S3FIFO(EvictionPolicy):
    """Three queues, first in first out: what is seen once passes through a small one and disturbs nothing else.

    Yang, Zhang, Qiu, Yue, Vigfusson, "FIFO queues are all you need for cache eviction", SOSP 2023, algorithm 1. New
    blocks enter the small queue, a tenth of all bytes, and leave it for the main one if they were found twice, otherwise
    for good; their keys stay as ghosts, and a block that comes back while its ghost is there enters the main queue at
    once. There each time it was found, up to three, buys one more round.

    Three things differ, because blocks form chains. One with children is not looked at, as it cannot go; it changes to
    the main queue when it is found the second time. Sizes are bytes. There are as many ghosts as stored blocks instead
    of as many as the main queue could hold; ``floor`` counts how many more there may be.
    """

    name = "s3fifo"
    SMALL: Final = 0
    MAIN: Final = 1
    SMALL_SHARE: Final = 10
    """The small queue's bytes are the total divided by this."""
    MOST_HITS: Final = 3
    HOT: Final = 2
    """Hits that move an entry from the small to the main queue."""

    def admit(self, ledger: Ledger, entry: Entry) -> None:
        """File it in the small queue, or in the main one where its ghost is found."""
        ghost = ledger.find(entry.key) is not None
        entry.rank = ledger.tick()
        _file(ledger, entry, self.MAIN if ghost else self.SMALL)
        ledger.floor += 2 if ghost else 1

    def touch(self, ledger: Ledger, entry: Entry) -> None:
        """Count, up to three; one that has enough hits is not written again."""
        hits = min(entry.hits + 1, self.MOST_HITS)
        if entry.queue == self.SMALL + HELD and hits >= self.HOT:
            self._to_main(ledger, entry, 0)
        elif hits != entry.hits:
            entry.hits = hits
            ledger.file(entry)

    def victim(self, ledger: Ledger, may_go: Callable[[Entry], bool]) -> Entry | None:
        """Look at the oldest of the queue that is too large; give those that were found another round."""
        while True:
            small, main = (ledger.bytes_in(queue) + ledger.bytes_in(queue + HELD) for queue in (self.SMALL, self.MAIN))
            queue = self.SMALL if small * self.SMALL_SHARE >= small + main else self.MAIN
            entry = _first(ledger, queue, may_go) or _first(ledger, self.SMALL + self.MAIN - queue, may_go)
            if entry is None:
                return None
            if entry.queue == self.SMALL:
                if entry.hits < self.HOT:
                    return entry
                self._to_main(ledger, entry, 0)
            else:
                if not entry.hits:
                    return entry
                self._to_main(ledger, entry, entry.hits - 1)

    def evicted(self, ledger: Ledger, entry: Entry) -> None:
        """Take it out; one that leaves the small queue stays as a ghost."""
        self.drop(ledger, entry)
        if entry.queue == self.SMALL and self._spend(ledger):
            ledger.file(Entry(entry.key, None, 0, queue=GHOST, rank=ledger.tick()))

    def drop(self, ledger: Ledger, entry: Entry) -> None:
        """Take a block or a ghost out."""
        found = ledger.find(entry.key)
        if found is not None:
            super().drop(ledger, found)
            if found.stored:
                self._spend(ledger)
            else:
                ledger.floor += 1

    def _to_main(self, ledger: Ledger, entry: Entry, hits: int) -> None:
        entry.hits = hits
        entry.rank = ledger.tick()
        _file(ledger, entry, self.MAIN)

    def _spend(self, ledger: Ledger) -> bool:
        """Make do with one ghost less from now on; return whether there was one to spend, kept or still free."""
        if ledger.floor:
            ledger.floor -= 1
            return True
        oldest = next(ledger.ascending(GHOST), None)
        if oldest is not None:
            ledger.remove(oldest.key)
        return oldest is not None


class CostAware(EvictionPolicy):
    """What is cheapest to compute again, for the room that it takes, goes first; what was found often counts more.

    GreedyDual-Size-Frequency: Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching
    policy", HP Labs 1998, after Cao and Irani, "Cost-aware WWW proxy caching algorithms", USITS 1997. An entry's rank is
    ``floor + times seen * cost / bytes`` when it is found; ``floor`` is the highest rank that was evicted, and so grows:
    what is not found any more is overtaken in the end by what is.

    Times seen are counted to four only. Each turn of a session finds all of it again, so that without a limit what is
    left of a long one, which nobody will ask for, outlives the next ones (benchmarks/results/replay.json says how far
    it is from the optimum all the same).
    """

    name = "cost"
    MOST_HITS: Final = 3
    SCALE: Final = 2**40
    """Ranks are whole: one second for each byte is this many."""
    LARGEST_STEP: Final = 2**42
    """No entry is so dear that ranks could run out of 63 bits: two million such would have to go one after another."""

    def admit(self, ledger: Ledger, entry: Entry) -> None:
        """File it by its cost for each byte, seen once."""
        worth = (entry.hits + 1) * entry.cost * self.SCALE / max(entry.num_bytes, 1)
        entry.rank = ledger.floor + max(1, int(min(worth, self.LARGEST_STEP)))
        _file(ledger, entry, 0)

    def touch(self, ledger: Ledger, entry: Entry) -> None:
        """File it by its cost for each byte, seen once more, from today's floor on."""
        entry.hits = min(entry.hits + 1, self.MOST_HITS)
        self.admit(ledger, entry)

    def victim(self, ledger: Ledger, may_go: Callable[[Entry], bool]) -> Entry | None:
        """Choose the leaf of the lowest rank."""
        return _first(ledger, 0, may_go)

    def evicted(self, ledger: Ledger, entry: Entry) -> None:
        """Take it out and raise the floor to its rank."""
        ledger.floor = max(ledger.floor, entry.rank)
        self.drop(ledger, entry)


POLICIES: Final[dict[str, type[EvictionPolicy]]] = {rule.name: rule for rule in (LRU, S3FIFO, CostAware)}
"""The rules by the names that settings use."""


def make_policy(name: str) -> EvictionPolicy:
    """Return the rule of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in POLICIES:
        raise ValueError(f"{name!r} is not an eviction rule (legal: {', '.join(POLICIES)})")
    return POLICIES[name]()


def refile(ledger: Ledger, policy: EvictionPolicy) -> None:
    """Hand a book that another rule has kept to this one: forget ghosts, and file all blocks anew, oldest rank first."""
    entries = [entry for queue in QUEUES for entry in ledger.ascending(queue)]
    ledger.floor = 0
    for entry in sorted(entries, key=lambda entry: entry.rank):
        ledger.remove(entry.key)
        if entry.stored:
            entry.hits = 0
            policy.admit(ledger, entry)


def _file(ledger: Ledger, entry: Entry, queue: int) -> None:
    """File an entry in a queue, or in the one beside it for those that cannot go."""
    entry.queue = queue + HELD if entry.children else queue
    ledger.file(entry)


def _first(ledger: Ledger, queue: int, may_go: Callable[[Entry], bool]) -> Entry | None:
    return next((entry for entry in ledger.ascending(queue) if may_go(entry)), None)
