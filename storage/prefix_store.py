"""PrefixStore: blocks of KV that outlive the process, bounded, shared by processes, and never trusted without a check.

Under ``<root>/prefix``: a small LMDB index, and slabs of equal slots that the records lie in (``storage.codec``). What
makes it a cache that cannot harm:

- **Writing never holds anybody up.** Blocks go into a bounded queue; what does not fit, or cannot be written, is shed
  and counted. One thread writes, a batch a transaction.
- **Reading checks everything**: namespace, stamp, number of tokens, their ids, checksum. Whatever does not agree is a
  miss. A record that is really damaged is taken out of the index and its slot is not used again.
- **Nothing is repaired by hand.** A process may be killed anywhere, and any file be damaged: the store opens with what
  is left, or empty, or says in one line why it cannot.
"""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from tierkv.errors import StoreError
from tierkv.eviction import make_policy
from tierkv.storage import prefix_rows as rows
from tierkv.storage.codec import record_bytes
from tierkv.storage.prefix_ahead import reading_ahead
from tierkv.storage.prefix_care import PrefixCare
from tierkv.storage.prefix_check import GcReport, NamespaceInfo, VerifyReport
from tierkv.storage.prefix_export import ExportReport, read_chain
from tierkv.storage.prefix_index import NAMESPACES, SIGHTED
from tierkv.storage.prefix_queue import SIGHT_BYTES, Block, Queued
from tierkv.storage.prefix_reader import Found
from tierkv.storage.prefix_shared import SharedStore
from tierkv.storage.prefix_slab import slot_bytes_of
from tierkv.storage.prefix_stats import PrefixStoreStats, read_stats

__all__ = [
    "Block", "ExportReport", "Found", "GcReport", "NamespaceInfo", "PrefixStore", "PrefixStoreStats", "VerifyReport",
]  # fmt: skip

_log = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_PINNED: Final = 65536
_IMPORT_SECONDS: Final = 60.0


class PrefixStore(PrefixCare):
    """Blocks under keys. All methods may be called from any thread, in the process that opened it.

    A forked child must not use its copy: every method but ``close`` raises ClosedError there.

    ``close`` and what looks after a store (``ls``, ``verify``, ``gc``, ``clear``, ``export``) come from ``PrefixCare``.
    """

    @classmethod
    def open(
        cls,
        root: str | os.PathLike[str],
        capacity_bytes: int | None,
        *,
        eviction: str | None = "lru",
        ttl_seconds: float = 0,
        write_batch: int = 16,
        write_queue_bytes: int,
        wait_seconds: float = 5.0,
    ) -> "PrefixStore":
        """Open or make the store below ``root``; one that is open in this process is shared, as it was opened first.

        Args:
            root: made with its parents, readable by its owner only. Not on a network file system.
            capacity_bytes: bound on the allocated bytes of everything in the store's folder, over all processes. A store
                that holds more is evicted down. None: whatever it was when the store was last opened.
            eviction: name of a rule (``tierkv.eviction``). None: whatever it was.
            ttl_seconds: blocks older than this are misses, pinned or not; 0: never.
            write_batch: blocks a transaction.
            write_queue_bytes: record bytes that may wait to be written.
            wait_seconds: longest wait for other processes that open it, and for the queue at close.

        Raises:
            StoreError: it cannot be used; one line says why, and what to do.
            ValueError: there is no such rule.
        """
        return cls(
            SharedStore.acquire(
                root,
                capacity_bytes,
                None if eviction is None else make_policy(eviction),
                ttl_seconds=ttl_seconds,
                write_batch=write_batch,
                write_queue_bytes=write_queue_bytes,
                wait_seconds=wait_seconds,
            )
        )

    # -- finding and reading --------------------------------------------------------------------------------------

    def match(self, namespace: bytes, keys: Sequence[bytes]) -> list[Found]:
        """Return the blocks of the leading run of ``keys`` that are there, those still queued included.

        Looks into the index only, not at payloads. A store that cannot be read has nothing.
        """
        self.check_open()
        return self._reader.match(namespace, keys)

    def read(self, found: Found, token_ids: Sequence[int], payload_bytes: int, use: Callable[[memoryview], T]) -> T:
        """Check a block's record completely, then return ``use(payload)``, called in this thread without a lock.

        ``use`` must not keep the view or anything over it: the bytes change afterwards.

        Args:
            found: from ``match``.
            token_ids: of the block's tokens.
            payload_bytes: exact length of the payload.
            use: copies out what it wants.

        Raises:
            RecordError: the block was evicted meanwhile, is damaged, or is another's. It counts as a miss.
        """
        self.check_open()
        return self._reader.read(found, token_ids, payload_bytes, use)

    def reading_ahead(self, found: Sequence[Found]) -> AbstractContextManager[None]:
        """Give a block that reads many blocks, in this order, from any threads: the disk is asked for them in large pieces."""
        self.check_open()
        return reading_ahead(self._parts.slabs, found, self._reader.reading)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count that the blocks of a chain, first block first, were found. Written later, with the next batch."""
        self.check_open()
        self._queue.touch(keys)

    def sighted(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether each key was noted before, by any process and also before a restart; then note them.

        65,536 keys are remembered at most, fewer in a store of less than 1.7 GB; the oldest are forgotten first.
        """
        self.check_open()
        starts = [key[:SIGHT_BYTES] for key in keys]
        waiting = self._queue.waits_sighted(starts)
        written = [False] * len(keys)
        with suppress(StoreError), self._reader.reading(), self._parts.index.read() as tables:
            written = [tables.get(SIGHTED, start) is not None for start in starts]
        self._queue.sight(starts)
        return [one or other for one, other in zip(waiting, written, strict=True)]

    # -- writing --------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Bytes that the queue can take now."""
        return self._queue.room

    @property
    def queued_bytes(self) -> int:
        """Record bytes that wait to be written."""
        return self._queue.queued_bytes

    @property
    def peak_queued_bytes(self) -> int:
        """The most ``queued_bytes`` has been."""
        return self._queue.peak_queued_bytes

    @property
    def allocated_bytes(self) -> int:
        """Allocated bytes of all files in the store's folder."""
        return self._parts.folder.allocated_bytes()

    def put(self, namespace: bytes, block: Block) -> bool:
        """Queue a block for writing; it is found at once. Never waits, never raises because of the disk.

        Returns:
            False if it was shed: the queue is full, writing has failed lately, the block is too large for the store, or
            the block it continues is not there.
        """
        self.check_open()
        payload_bytes = sum(memoryview(part).nbytes for part in block.payload)
        size = record_bytes(payload_bytes, len(block.token_ids))
        if not self.wants(namespace, block.key, block.parent):
            return True
        acceptable = (
            not self._writer.pausing
            and slot_bytes_of(size) <= self._parts.budget_bytes
            and (block.parent is None or self._is_there(block.parent, namespace))
        )
        if acceptable and self._queue.put(Queued(namespace, block, size, payload_bytes)):
            return True
        self._tally.add("shed")
        return False

    def wants(self, namespace: bytes, key: bytes, parent: bytes | None) -> bool:
        """Return whether a block would be written if it were put: it is not there yet, nor queued.

        Where the block that it continues is about to be written, it may be because that one was damaged; and with it go
        all that continue it. So the writer has the last word.
        """
        self.check_open()
        if parent is not None:
            before = self._reader.find(namespace, [parent])
            if not before or before[0].queued is not None:
                return not self._queue.find([key])
        return not self._is_there(key, namespace)

    def _is_there(self, key: bytes, namespace: bytes) -> bool:
        return bool(self._reader.find(namespace, [key]))

    @property
    def failed(self) -> str | None:
        """Why nothing can be written at the moment; None if all is well."""
        return self._writer.failed

    def namespace(self, digest: bytes, manifest: Mapping[str, Any]) -> None:
        """Register a namespace, for people to see what the store holds. Idempotent; a failure is logged, not raised.

        Args:
            digest: 32 bytes.
            manifest: JSON values that say what it is; no secrets, it is written to a file as well.
        """
        self.check_open()
        value = rows.pack_manifest(digest, manifest)
        try:
            with self._reader.reading():
                with self._parts.index.read() as tables:
                    known = tables.get(NAMESPACES, digest) == value
                if not known:
                    with self._parts.index.write() as tables:
                        tables.put(NAMESPACES, digest, value)
                self._parts.folder.write_manifest(digest, manifest)
                self._parts.measure_others()
        except OSError as error:
            _log.warning("the manifest of namespace %s cannot be written: %s", digest.hex()[:16], error)

    def pin(self, keys: Sequence[bytes], seconds: float | None) -> None:
        """Keep blocks from being evicted, for so long or, with None, until ``unpin``. What they continue stays too.

        Holds for all processes once it is written (``flush``), also after a restart.
        """
        self.check_open()
        expires = float("inf") if seconds is None else time.time() + seconds
        self._queue.pin(dict.fromkeys(keys[:_MOST_PINNED], expires))

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Let blocks be evicted again."""
        self.check_open()
        self._queue.pin(dict.fromkeys(keys[:_MOST_PINNED]))

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything accepted before this call is on the disk; False if that took longer or failed."""
        self.check_open()
        before = self._tally.get("failed_batches")

        def failed() -> bool:
            return self._writer.pausing or self._tally.get("failed_batches") > before

        return self._queue.wait_finished(timeout_seconds, failed) and not failed()

    def stats(self) -> PrefixStoreStats:
        """Return what the store holds and what it has done since this process opened it."""
        self.check_open()
        with self._reader.reading():
            return read_stats(self._parts, self._tally, self._queue, self._writer.failed)

    def import_(self, path: str | os.PathLike[str]) -> ExportReport:
        """Take a file from ``export`` in. Everything in it is checked, its keys are computed again.

        Its blocks are pinned for a minute, so that whoever else writes to a full store does not have them evicted before
        anybody can use them. Where they take the whole store, nobody else's blocks find room for as long.

        Raises:
            StoreError: the file cannot be read, is damaged, or its blocks could not be written.
        """
        self.check_open()
        report = read_chain(Path(path), self._put_patiently)
        self.namespace(report.namespace, report.manifest)
        if not self.flush(self._shared.wait_seconds):
            raise StoreError(f"the blocks of {path} could not all be written to {self.path}; look at its file system")
        return replace(report, stored=len(self._reader.find(report.namespace, report.keys)))

    def _put_patiently(self, namespace: bytes, block: Block) -> bool:
        self._queue.hold(block.key, time.time() + _IMPORT_SECONDS)
        return self.put(namespace, block) or (self.flush(self._shared.wait_seconds) and self.put(namespace, block))
