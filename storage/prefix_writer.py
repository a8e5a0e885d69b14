"""PrefixWriter: the thread that puts blocks into the prefix store, a batch a transaction, and makes room for them.

It may fail at any time and nobody notices but the counters: a batch that cannot be committed is dropped, then the writer
pauses, longer each time, and blocks that come meanwhile are refused. Only a full index is tried again first: readers keep
pages from being used anew, and let go of them soon.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Final

from tierkv.errors import StoreError, StoreFull
from tierkv.eviction import Entry
from tierkv.storage import prefix_rows as rows
from tierkv.storage.codec import ALL_LAYERS, RecordHeader, encode
from tierkv.storage.prefix_book import Book
from tierkv.storage.prefix_index import NOTES, PINS, SIGHTED, IndexBroken
from tierkv.storage.prefix_open import OpenStore
from tierkv.storage.prefix_queue import Notes, Queued, ShedQueue
from tierkv.storage.prefix_repair import agree_with_files
from tierkv.storage.prefix_rows import Row
from tierkv.storage.prefix_slab import slot_bytes_of
from tierkv.storage.prefix_stats import Tally

_log = logging.getLogger(__name__)

_ATTEMPTS: Final = 4
"""Transactions for one batch: one to free slots, one to write to them; more where another process took them."""

_MOST_TOUCHED: Final = 1024
_MOST_SIGHTED: Final = 65536
_INDEX_BYTES_FOR_A_SIGHT: Final = 800
_PAUSES_SECONDS: Final = (0.5, 60.0)
_FULL_INDEX_PAUSES_SECONDS: Final = (0.02, 0.1, 0.3)
_READERS_SECONDS: Final = 60.0


class PrefixWriter:
    """One thread. Everything but ``start`` and ``join`` is its own business.

    Attributes:
        failed: why nothing can be written at the moment, or None.
        suspect: whether the index failed: whoever opens it next must check it.
        broken: whether LMDB found it damaged.
    """

    def __init__(
        self, store: OpenStore, queue: ShedQueue, tally: Tally, *, ttl_seconds: float, write_batch: int
    ) -> None:
        self.failed: str | None = None
        self.suspect = self.broken = False
        self._store = store
        self._queue = queue
        self._tally = tally
        self._ttl_seconds = ttl_seconds
        self._write_batch = write_batch
        self._pause_seconds = 0.0
        self._retry_at = 0.0
        self._disagreeing = False
        now = time.monotonic()
        self._sweep_at, self._readers_at = now + self._sweep_seconds, now + _READERS_SECONDS
        self._thread = threading.Thread(target=self._run, name="tierkv-prefix-writer", daemon=True)

    @property
    def pausing(self) -> bool:
        """Whether blocks should be refused, since writing has just failed."""
        return self.failed is not None and time.monotonic() < self._retry_at

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread to end, after the queue was closed; say whether it has."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def is_expired(self, created: float) -> bool:
        """Whether a block of that wall time is too old. A clock that went back makes none older."""
        return self._ttl_seconds > 0 and max(0.0, time.time() - created) > self._ttl_seconds

    # -- the thread -----------------------------------------------------------------------------------------------

    @property
    def _sweep_seconds(self) -> float:
        return max(0.5, min(300.0, self._ttl_seconds / 10)) if self._ttl_seconds else float("inf")

    def _run(self) -> None:
        while True:
            if self.pausing:
                self._queue.pause(self._retry_at - time.monotonic())
            idle_seconds = min(self._sweep_at, self._readers_at) - time.monotonic()
            work = self._queue.take(self._write_batch, self._store.budget_bytes // 4, max(0.0, idle_seconds))
            if work is None:
                return
            blocks, notes = work
            try:
                self._write(blocks, notes)
                if blocks or notes:
                    self.failed, self._pause_seconds = None, 0.0
                blocks, notes = [], Notes()
                self._look_after()
            except Exception as error:  # noqa: BLE001 - a cache that cannot write must not end what it serves
                self._fail(error, blocks, notes)
            finally:
                self._queue.finish()

    def _fail(self, error: Exception, blocks: list[Queued], notes: Notes) -> None:
        least, most = _PAUSES_SECONDS
        self._pause_seconds = min(most, 2 * self._pause_seconds) if self._pause_seconds else least
        self._retry_at = time.monotonic() + self._pause_seconds
        self._disagreeing = True
        self.suspect |= isinstance(error, StoreError) and not isinstance(error, StoreFull)
        self.broken |= isinstance(error, IndexBroken)
        if self.failed is None:
            _log.warning("the prefix store cannot be written to and goes on without: %s", error)
        self.failed = str(error)
        # Counted last: whoever sees the count finds the reason.
        self._tally.add("write_failures", len(blocks))
        self._tally.add("failed_batches")
        if self._queue.closed:
            self._tally.add("shed", self._queue.shed())
            return
        self._queue.put_back(notes)
        if isinstance(error, StoreFull):
            self._relieve()

    def _relieve(self) -> None:
        """Make room in a full index, in transactions as small as they can be."""
        try:
            for _ in range(self._write_batch):
                with self._store.write() as book:
                    self._tally.add("evicted", book.evict(self._store.policy, self._may_go(book, set())) is not None)
        except StoreError as error:
            _log.debug("the prefix index stays full: %s", error)

    def _look_after(self) -> None:
        now = time.monotonic()
        if now >= self._readers_at:
            self._readers_at = now + _READERS_SECONDS
            self._store.index.forget_dead_readers()
        if now >= self._sweep_at:
            self._sweep_at = now + self._sweep_seconds
            self._drop_expired()

    def _drop_expired(self) -> None:
        self._tally.add("expired", self._store.drop_where(lambda row, _: self.is_expired(row.created)))

    # -- one batch ------------------------------------------------------------------------------------------------

    def _write(self, blocks: list[Queued], notes: Notes) -> None:
        if not blocks and not notes:
            return
        most_touched = min(_MOST_TOUCHED, self._store.index.page_limit // 2)
        later = Notes(touched=dict(islice(notes.touched.items(), most_touched, None)))
        if later:
            self._queue.put_back(later)
            notes = replace(notes, touched=dict(islice(notes.touched.items(), most_touched)))
        pauses, attempts = iter(_FULL_INDEX_PAUSES_SECONDS), _ATTEMPTS
        while attempts:
            counts: Counter[str] = Counter()
            try:
                with self._store.write() as book:
                    self._apply(book, notes)
                    kept = self._make_room(book, self._missing(book, blocks, counts), counts)
                    ready = book.settle(_need(kept))
                    if ready:
                        self._place(book, kept)
            except StoreFull:
                self._disagreeing = True  # the index has forgotten what was done, the files have not
                if (seconds := next(pauses, None)) is None:
                    raise
                self._queue.pause(seconds)
                continue
            # Committed: what was done is counted once, and not done again.
            self._disagreeing = False
            blocks, notes, attempts = kept, Notes(), attempts - 1
            for name, number in counts.items():
                self._tally.add(name, number)
            if ready:
                self._tally.add("puts", len(kept))
                return
        self._tally.add("shed", len(blocks))

    def _missing(self, book: Book, blocks: list[Queued], counts: Counter[str]) -> list[Queued]:
        """Return the blocks that are to be written: not there yet, and what they continue is."""
        todo, known = [], set()
        for queued in blocks:
            key, parent = queued.block.key, queued.block.parent
            row = book.find(key)
            if row is not None and row.stored and not self.is_expired(row.created):
                continue
            if parent is not None and parent not in known:
                found = book.find(parent)
                if found is None or not found.stored:
                    counts["shed"] += 1
                    continue
            todo.append(queued)
            known.add(key)
        return todo

    def _make_room(self, book: Book, todo: list[Queued], counts: Counter[str]) -> list[Queued]:
        """Evict until the blocks fit; return those that do: the first ones, since others continue them."""
        may_go = self._may_go(book, {queued.block.parent for queued in todo})
        excess = book.tables.pages() - self._store.index.page_limit
        entries = book.state.blocks
        doomed = len(todo) + entries * excess // max(1, excess + self._store.index.page_limit) if excess > 0 else 0
        evicted = 0
        while evicted < doomed or book.shortfall(_need(todo)):
            if book.evict(self._store.policy, may_go) is None:
                break
            evicted += 1
        kept = list(todo) if evicted >= doomed else []
        while kept and book.shortfall(_need(kept)):
            kept.pop()
        counts.update(evicted=evicted, shed=len(todo) - len(kept))
        return kept

    def _may_go(self, book: Book, parents: set[bytes | None]) -> Callable[[Entry], bool]:
        held, now = parents | self._queue.protected(), time.time()
        return lambda entry: entry.key not in held and not book.is_pinned(entry.key, now)

    def _place(self, book: Book, todo: list[Queued]) -> None:
        """Write the records, then enter them into the book."""
        now, sizes, written = time.time(), set(), []
        for queued in todo:
            block, size = queued.block, slot_bytes_of(queued.record_bytes)
            slot = book.take(size)
            if slot is None:
                raise StoreFull(f"no slot of {size} bytes is left although room was made for one")
            stamp = book.next_stamp()
            header = RecordHeader(queued.namespace, ALL_LAYERS, stamp, len(block.token_ids))
            self._store.slabs.write(size, slot, encode(header, block.token_ids, block.payload))
            sizes.add(size)
            row = Row(block.key, block.parent, size, block.cost, namespace=queued.namespace, slot_bytes=size, slot=slot)
            row.stamp, row.created = stamp, now
            row.payload_bytes, row.num_tokens = queued.payload_bytes, len(block.token_ids)
            written.append(row)
        for size in sizes:
            self._store.slabs.sync(size)
        for row in written:
            old = book.find(row.key)
            if old is None or not old.stored:
                self._store.policy.insert(book, row)
                continue
            # Too old to be served, and still the parent of others: it keeps its place and gets new bytes.
            book.release(old.slot_bytes, old.slot)
            row.queue, row.rank, row.hits = old.queue, old.rank, old.hits
            row.children, row.found = old.children, old.found
            book.file(row)

    def _apply(self, book: Book, notes: Notes) -> None:
        if self._disagreeing:
            agree_with_files(book)
        for key, (stamp, noticed) in notes.damaged.items():
            row = book.find(key)
            if row is not None and row.stored and row.stamp == stamp:
                book.drop(self._store.policy, [row], {key: noticed})
        for key, times in notes.touched.items():
            row = book.find(key)
            if row is not None and row.stored:
                row.found += times
                book.file(row)
                self._store.policy.touch(book, row)
        for key, expires in notes.pins.items():
            if expires is None:
                book.tables.delete(PINS, key)
            else:
                book.tables.put(PINS, key, rows.pack_expiry(key, expires))
        for key, expires in notes.holds.items():
            if not book.is_pinned(key, expires):
                book.tables.put(PINS, key, rows.pack_expiry(key, expires))
        self._sight(book, notes.sighted)

    def _sight(self, book: Book, starts: Iterable[bytes]) -> None:
        new = [start for start in starts if book.tables.get(SIGHTED, start) is None]
        if not new:
            return
        book.state.sighted += 1
        at = book.state.sighted.to_bytes(8, "big")
        book.tables.put(NOTES, at, b"".join(new))
        for start in new:
            book.tables.put(SIGHTED, start, at)
        limit = min(_MOST_SIGHTED, self._store.index.map_bytes // _INDEX_BYTES_FOR_A_SIGHT)
        while book.tables.count(SIGHTED) > limit and (oldest := next(book.tables.items(NOTES), None)) is not None:
            for begin in range(0, len(oldest[1]), len(new[0])):
                book.tables.delete(SIGHTED, oldest[1][begin : begin + len(new[0])])
            book.tables.delete(NOTES, oldest[0])


def _need(todo: Iterable[Queued]) -> Counter[int]:
    """Count the slots that blocks take, by size."""
    return Counter(slot_bytes_of(queued.record_bytes) for queued in todo)
