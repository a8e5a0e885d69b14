"""SimulatedStore: which blocks a prefix store keeps, decided by the rules that the real one follows. No bytes.

What ``tierkv.prefix_offers`` and ``tierkv.storage`` do in threads and transactions happens here at once, in the same
order: a block that is offered waits until the queue has room, is found from then on, takes the place of those that the
rule evicts for it, and is written in virtual time. What is gone from memory before its turn comes is shed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tierkv.block_table import Block
from tierkv.eviction import Entry, make_policy
from tierkv.eviction_ledger import MemoryLedger
from tierkv.tier import Tier

WritePolicy = Literal["always", "second_sighting", "never"]

_MOST_WAITING: Final = 65536
_MOST_SIGHTED: Final = 65536


@dataclass(frozen=True, slots=True)
class _Offer:
    key: bytes
    parent: bytes | None
    cost: float
    block: Block


class SimulatedStore:
    """The prefix store of one engine.

    Attributes:
        num_evicted: blocks that the rule forgot.
        num_shed: blocks that should have been kept and were not.
        peak_blocks: the most that it held.
        on_forgotten: told the key of each block that is evicted.
    """

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int,
        *,
        eviction: str,
        write_policy: WritePolicy,
        queue_blocks: int,
        write: Callable[[Tier, Callable[[], None]], None],
    ) -> None:
        """Make an empty store.

        Args:
            num_blocks: that it holds.
            block_bytes: of each; for rules that weigh costs against bytes.
            eviction: name of the rule.
            write_policy: when a block is kept.
            queue_blocks: that may be on their way to the disk at a time.
            write: starts the write of a block from a tier; calls back when it is done.
        """
        self.num_evicted = self.num_shed = self.peak_blocks = 0
        self.on_forgotten: Callable[[bytes], None] | None = None
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._policy = make_policy(eviction)
        self._ledger = MemoryLedger()
        self._stored: set[bytes] = set()
        self._write_policy = write_policy
        self._sighted: dict[bytes, None] = {}
        self._backlog: deque[_Offer] = deque()
        self._queue_blocks = queue_blocks
        self._queued = 0
        self._write = write

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, key: bytes) -> bool:
        return key in self._stored

    @property
    def waiting(self) -> bool:
        """Whether blocks wait for room in the queue."""
        return bool(self._backlog)

    def match(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys are there."""
        return next((at for at, key in enumerate(keys) if key not in self._stored), len(keys))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that the blocks of a chain, first block first, were found."""
        policy, ledger = self._policy, self._ledger
        for key in reversed(keys):
            if key in self._stored and (entry := ledger.find(key)) is not None:
                policy.touch(ledger, entry)

    def offer(self, keys: Sequence[bytes], new: range, costs: Sequence[float], blocks: Sequence[Block]) -> None:
        """Take blocks into account that have become full.

        Args:
            keys: of the sequence, from the first block on.
            new: which of them are offered.
            costs: to compute each again.
            blocks: that hold them.
        """
        if self._write_policy == "never":
            return
        wanted = [True] * len(new)
        if self._write_policy == "second_sighting":
            wanted = self._sight([keys[index] for index in new])
        for index, is_wanted, cost, block in zip(new, wanted, costs, blocks, strict=True):
            if is_wanted:
                block.sealed = True  # it waits: whoever crops into it gets a copy to write to
                if len(self._backlog) == _MOST_WAITING:
                    self._backlog.popleft()
                    self.num_shed += 1
                self._backlog.append(_Offer(keys[index], keys[index - 1] if index else None, cost, block))

    def drain(self) -> None:
        """Take what the queue has room for."""
        while self._backlog and self._queued < self._queue_blocks:
            offer = self._backlog.popleft()
            if offer.key in self._stored:
                continue  # another sequence was faster
            if offer.block.slots and self._keep(offer):
                self._queued += 1
                self._write(offer.block.tier, self._written)
            else:
                self.num_shed += 1

    def _sight(self, keys: Sequence[bytes]) -> list[bool]:
        seen = [key in self._sighted for key in keys]
        self._sighted.update(dict.fromkeys(keys))
        while len(self._sighted) > _MOST_SIGHTED:
            del self._sighted[next(iter(self._sighted))]
        return seen

    def _keep(self, offer: _Offer) -> bool:
        """Put a block into the book, and evict others for it; return whether there was room to make."""
        if offer.parent is not None and offer.parent not in self._stored:
            return False  # what it continues is not there, so nobody would ever find it
        while len(self._stored) >= self._num_blocks:
            victim = self._policy.victim(self._ledger, lambda entry: entry.key != offer.parent)
            if victim is None:
                return False
            self._policy.evicted(self._ledger, victim)
            self._stored.remove(victim.key)
            self.num_evicted += 1
            if self.on_forgotten is not None:
                self.on_forgotten(victim.key)
        self._policy.insert(self._ledger, Entry(offer.key, offer.parent, self._block_bytes, offer.cost))
        self._stored.add(offer.key)
        self.peak_blocks = max(self.peak_blocks, len(self._stored))
        return True

    def _written(self) -> None:
        self._queued -= 1
