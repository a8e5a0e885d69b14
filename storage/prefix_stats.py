"""What the prefix store counts, and what it reports."""

import threading
from collections import Counter
from dataclasses import dataclass, field

from tierkv.errors import StoreError
from tierkv.storage.prefix_open import OpenStore
from tierkv.storage.prefix_queue import ShedQueue


@dataclass(slots=True)
class Tally:
    """Events since the store was opened in this process. May be used from any thread."""

    _counts: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str, number: int = 1) -> None:
        """Count events."""
        if number:
            with self._lock:
                self._counts[name] += number

    def get(self, name: str) -> int:
        """Return how many there were."""
        return self._counts[name]


@dataclass(frozen=True, slots=True)
class PrefixStoreStats:
    """What a prefix store holds, and what this process has done with it since it opened it.

    Attributes:
        blocks: stored blocks, of all namespaces and processes.
        payload_bytes: of their KV.
        allocated_bytes: of all files in the store's folder, as the file system counts.
        capacity_bytes: bound of the same.
        hits: keys that ``match`` found.
        misses: keys that ``match`` did not find, and blocks found that could not be read.
        puts: blocks written.
        shed: blocks refused, or dropped before they were written.
        evicted: blocks that went to make room.
        expired: blocks that were too old.
        damaged: records that failed their checks and were taken out.
        collisions: whole records that were asked for with other token ids or another length.
        write_failures: blocks of batches that could not be committed.
        queued_bytes: record bytes that wait to be written.
        failed: why nothing can be written or read at the moment; None if all is well.
    """

    blocks: int
    payload_bytes: int
    allocated_bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    puts: int
    shed: int
    evicted: int
    expired: int
    damaged: int
    collisions: int
    write_failures: int
    queued_bytes: int
    failed: str | None


def read_stats(store: OpenStore, tally: Tally, queue: ShedQueue, failed: str | None) -> PrefixStoreStats:
    """Put together what is known; a store that cannot be read holds nothing."""
    blocks = payload_bytes = 0
    try:
        with store.read() as book:
            blocks, payload_bytes = book.state.blocks, book.state.payload_bytes
    except StoreError as error:
        failed = failed or str(error)
    names = ("hits", "misses", "puts", "shed", "evicted", "expired", "damaged", "collisions", "write_failures")
    return PrefixStoreStats(
        blocks=blocks,
        payload_bytes=payload_bytes,
        allocated_bytes=store.folder.allocated_bytes(),
        capacity_bytes=store.capacity_bytes,
        queued_bytes=queue.queued_bytes,
        failed=failed,
        **{name: tally.get(name) for name in names},
    )
