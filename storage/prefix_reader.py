"""PrefixReader: finds blocks in the prefix store and reads their records, from any number of threads.

An index entry is looked up in a transaction, its record is read after it. In between the block may be evicted and its
slot written anew; the stamp, which no two writes share, tells. So a record that does not pass is looked up once more: if
the index still names this write, the record is damaged, otherwise the block is simply gone.
"""

import mmap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from tierkv.errors import ClosedError, RecordError, StoreError
from tierkv.storage.codec import ALL_LAYERS, Expected, Record, decode, record_bytes
from tierkv.storage.prefix_index import ENTRIES, IndexBroken, Tables
from tierkv.storage.prefix_open import OpenStore
from tierkv.storage.prefix_queue import Queued, ShedQueue
from tierkv.storage.prefix_rows import Row, unpack_place
from tierkv.storage.prefix_slab import slot_bytes_of
from tierkv.storage.prefix_stats import Tally
from tierkv.storage.reader_gate import Reader, ReaderGate

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found:
    """A block that ``match`` found.

    Attributes:
        namespace: its digest.
        key: its name.
        stamp: number of the write.
        slot_bytes: size of the slots of its slab.
        slot: where it lies there.
        num_tokens: of the block.
        payload_bytes: of its KV.
        queued: the block itself, where it waits to be written; the numbers of its place are then 0.
    """

    namespace: bytes
    key: bytes
    stamp: int
    slot_bytes: int
    slot: int
    num_tokens: int
    payload_bytes: int
    queued: Queued | None = None


def found_of(row: Row) -> Found:
    """Return what ``match`` says of a row."""
    return Found(row.namespace, row.key, row.stamp, row.slot_bytes, row.slot, row.num_tokens, row.payload_bytes)


class _Damaged(RecordError):
    """The index still names this write, and its record does not pass."""


class _ThreadBuffer(threading.local):
    """Memory of a thread that records are read into: whole pages, kept for the next read."""

    memory: mmap.mmap | None = None


class PrefixReader:
    """Reads; counts hits, misses and what is wrong.

    Attributes:
        suspect: whether the index failed: whoever opens it next must check it.
        broken: whether LMDB found it damaged.
    """

    def __init__(self, store: OpenStore, queue: ShedQueue, tally: Tally, is_expired: Callable[[float], bool]) -> None:
        """Read from ``store``, and from ``queue`` what is not written yet."""
        self.suspect = self.broken = False
        self._store = store
        self._queue = queue
        self._tally = tally
        self._is_expired = is_expired
        self._gate = ReaderGate()
        self._buffer = _ThreadBuffer()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the store from being closed until the end of the block.

        Raises:
            ClosedError: it is closed.
        """
        reader = Reader()
        try:
            if not self._gate.enter(reader):
                raise ClosedError("the prefix store is closed")
            yield
        finally:
            self._gate.leave(reader)

    def close(self) -> bool:
        """Let nobody in any more; say whether all have left."""
        return self._gate.close()

    def match(self, namespace: bytes, keys: Sequence[bytes]) -> list[Found]:
        """Return the blocks of the leading run of ``keys`` that are there, and count."""
        found = self.find(namespace, keys)
        self._tally.add("hits", len(found))
        self._tally.add("misses", len(keys) - len(found))
        return found

    def find(self, namespace: bytes, keys: Sequence[bytes]) -> list[Found]:
        """Return the blocks of the leading run of ``keys`` that are there. A store that cannot be read has none."""
        queued, damaged = self._queue.find(keys), self._queue.damaged()
        found: list[Found] = []
        try:
            with self.reading(), self._store.index.read() as tables:
                for key in keys:
                    waiting = queued.get(key)
                    if waiting is None:
                        one = self._look_up(tables, namespace, key, damaged)
                    elif waiting.namespace == namespace:
                        tokens, size = len(waiting.block.token_ids), waiting.payload_bytes
                        one = Found(namespace, key, 0, 0, 0, tokens, size, waiting)
                    else:
                        one = None
                    if one is None:
                        break
                    found.append(one)
        except StoreError as error:
            self._doubt(error)
        return found

    def _look_up(self, tables: Tables, namespace: bytes, key: bytes, damaged: Mapping[bytes, int]) -> Found | None:
        place = unpack_place(key, tables.get(ENTRIES, key))
        if place is None:
            return None
        owner, slot_bytes, slot, stamp, payload_bytes, num_tokens, created, _ = place
        if owner != namespace or self._is_expired(created) or damaged.get(key) == stamp:
            return None
        return Found(namespace, key, stamp, slot_bytes, slot, num_tokens, payload_bytes)

    def read(self, found: Found, token_ids: Sequence[int], payload_bytes: int, use: Callable[[memoryview], T]) -> T:
        """Check a block's record and return ``use(payload)``.

        Raises:
            RecordError: the block is gone, damaged, or another's.
        """
        with self.reading():
            if (len(token_ids), payload_bytes) != (found.num_tokens, found.payload_bytes):
                raise self._collision(found, "another length")
            if found.queued is not None:
                if self._queue.find([found.key]).get(found.key) is found.queued:
                    return self._read_queued(found, found.queued, token_ids, use)
                again = self.find(found.namespace, [found.key])
                if not again or again[0].queued is not None:
                    raise self._gone(found)
                found = again[0]
            return self._read_stored(found, token_ids, use)

    def _read_queued(self, found: Found, queued: Queued, token_ids: Sequence[int], use: Callable[[memoryview], T]) -> T:
        if tuple(token_ids) != queued.block.token_ids:
            raise self._collision(found, "other token ids")
        parts = queued.block.payload
        payload = parts[0] if len(parts) == 1 else b"".join(parts)
        return use(memoryview(payload).toreadonly().cast("B"))

    def _read_stored(self, found: Found, token_ids: Sequence[int], use: Callable[[memoryview], T]) -> T:
        with self._record(found, report=True) as record:
            if record.token_ids != tuple(token_ids):
                raise self._collision(found, "other token ids")
            return use(record.payload)

    @contextmanager
    def _record(self, found: Found, *, report: bool) -> Iterator[Record]:
        """Read and check a record into this thread's buffer; a damaged one is reported if asked for."""
        length = record_bytes(found.payload_bytes, found.num_tokens)
        # Taken while it is in use: `use` may read another block in the same thread.
        memory, self._buffer.memory = self._buffer.memory, None
        if memory is None or len(memory) < max(length, found.slot_bytes):
            memory = mmap.mmap(-1, max(slot_bytes_of(length), found.slot_bytes))
        expected = Expected(
            namespace=found.namespace,
            layer=ALL_LAYERS,
            stamp=found.stamp,
            num_tokens=found.num_tokens,
            payload_bytes=found.payload_bytes,
        )
        try:
            view = memoryview(memory)
            try:
                number = self._store.slabs.read(found.slot_bytes, found.slot, view[: found.slot_bytes])
                record = decode(view[: min(number, length)], expected)
            except (RecordError, OSError) as error:
                judgement = self._judge(found, error)
                if report and isinstance(judgement, _Damaged):
                    self.report(found)
                raise judgement from error
            yield record
        finally:
            self._buffer.memory = memory

    def use_row(self, row: Row, use: Callable[[Record], T]) -> T:
        """Return ``use(record)`` of a row, as ``read`` does.

        Raises:
            RecordError: the block is gone or damaged.
        """
        with self._record(found_of(row), report=True) as record:
            return use(record)

    def check(self, found: Found) -> str:
        """Read a record without using it; return what is wrong with it, empty if it is whole or gone.

        Raises:
            ClosedError: the store is closed.
        """
        with self.reading():
            try:
                with self._record(found, report=False):
                    return ""
            except _Damaged as error:
                return str(error)
            except RecordError:
                return ""

    def report(self, found: Found) -> None:
        """Have a damaged record taken out of the index, and its slot not used again."""
        self._queue.report_damage(found.key, found.stamp)
        self._tally.add("damaged")
        self._tally.add("misses")

    def _judge(self, found: Found, error: Exception) -> RecordError:
        """Say whether a record that does not pass is damaged or gone."""
        try:
            with self._store.index.read() as tables:
                place = unpack_place(found.key, tables.get(ENTRIES, found.key))
        except StoreError as failure:
            self._doubt(failure)
            return RecordError(f"block {found.key.hex()} cannot be read: {failure}")
        if place is None or place[3] != found.stamp:
            return self._gone(found)
        return _Damaged(f"block {found.key.hex()} in {self._store.folder.path} is damaged: {error}")

    def _doubt(self, error: StoreError) -> None:
        self.suspect = True
        self.broken |= isinstance(error, IndexBroken)

    def _gone(self, found: Found) -> RecordError:
        self._tally.add("misses")
        return RecordError(f"block {found.key.hex()} is not in {self._store.folder.path} any more")

    def _collision(self, found: Found, how: str) -> RecordError:
        self._tally.add("collisions")
        self._tally.add("misses")
        return RecordError(f"block {found.key.hex()} in {self._store.folder.path} has {how}; compute it again")
