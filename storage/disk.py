"""LmdbStore: bytes under keys in one LMDB environment, written behind by one thread. The only module that uses lmdb.

Puts are accepted into memory and committed in the background, some values a transaction; until then they are served
from memory, so no reader sees that they are late. What is kept and why:

- **File bytes are bounded** by a map size fixed at open. LMDB copies pages on write and reuses a freed page only two
  commits later, so a map holds fewer records than fit into it: ``storage.disk_room`` says how many.
- **Never ``writemap``**: with it a full file system kills the process (SIGBUS); without it, a commit fails.
- **Readahead stays on**: without it, cold values of this size were read at a twentieth of the disk's speed.
- **Read transactions are short, and commits wait for old ones**: an open one keeps freed pages from being reused.
- **Nothing that was accepted is lost** while the process lives: when a commit fails, the store stops accepting and goes
  on serving what it holds in memory.
"""

import atexit
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import lmdb

from tierkv.errors import ClosedError, RecordError, StoreError, StoreFull, TransferTimeout
from tierkv.storage.codec import PAGE_BYTES, Buffer
from tierkv.storage.disk_room import map_bytes
from tierkv.storage.reader_gate import Reader, ReaderGate
from tierkv.storage.write_queue import Operation, WriteQueue

_log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_KEY_BYTES: Final = 511
_LOCK_BYTES: Final = 16384
"""More than LMDB's lock file has with as many readers as it allows by default."""

# Open stores of this process, by (process, real path): LMDB's locks break if a file is opened twice in a process.
_open_stores: "dict[tuple[int, Path], LmdbStore]" = {}
_registry_lock = threading.Lock()


class LmdbStore:
    """Values under keys in a directory of its own. All methods may be called from any thread.

    Memory: ``write_queue_bytes`` at most wait in the queue (one value more if it alone is larger), and LMDB holds a
    copy of one batch while it is written.

    A forked child must not use its copy: every method but ``close`` raises ClosedError there.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        write_batch: int,
        write_queue_bytes: int,
        durable: bool,
        readers: int = 2,
        wait_seconds: float = 60.0,
    ) -> None:
        """Open or make the store and start its writer thread.

        Args:
            path: directory of the store; made with its parents, readable by its owner only. Not on a network file
                system, where LMDB's locks do not work.
            capacity_bytes: bound on the allocated bytes of its files.
            write_batch: values a transaction.
            write_queue_bytes: accepted bytes that may wait to be written.
            durable: True: a committed value survives a power failure, and ``close`` commits what is queued. False: a
                scratch store, good for this process's life only; a power failure may corrupt it, ``close`` drops the
                queue.
            readers: threads that usually read at the same time; more are served, a little slower.
            wait_seconds: longest wait for room in the queue, and for the writer at close.

        Raises:
            StoreError: the store cannot be opened, is open in this process already, or is larger than the capacity.
        """
        self.path = Path(path).resolve()
        self.capacity_bytes = capacity_bytes
        self._map_bytes = map_bytes(capacity_bytes)
        self._write_batch = write_batch
        self._durable = durable
        self._wait_seconds = wait_seconds
        self._pid = os.getpid()
        self._queue = WriteQueue(f"the store {self.path}", write_queue_bytes, wait_seconds)
        self._gate = ReaderGate()
        self._writer = threading.Thread(target=self._write, name=f"tierkv-lmdb-{self.path.name}", daemon=True)
        with _registry_lock:
            if (self._pid, self.path) in _open_stores:
                raise StoreError(f"the store {self.path} is already open in this process; share the open one")
            self._environment = _open_environment(self.path, capacity_bytes, durable=durable, readers=readers)
            if not _open_stores:
                atexit.register(_close_open_stores)
            _open_stores[self._pid, self.path] = self
        self._writer.start()

    def put(self, key: bytes, value: Buffer) -> None:
        """Accept a value; it is readable at once. Waits while the queue is full.

        Args:
            key: 1 to 511 bytes.
            value: kept until it is committed, so it must not change meanwhile.

        Raises:
            StoreFull: the store failed earlier, or could never hold the value; nothing was accepted.
            TransferTimeout: the queue stayed full for ``wait_seconds``; nothing was accepted.
            ClosedError: the store is closed.
        """
        self.check_open()
        if not 1 <= len(key) <= MAX_KEY_BYTES:
            raise ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(key)}")
        if (size := memoryview(value).nbytes) > self._map_bytes // 2:
            raise StoreFull(
                f"a value of {size} bytes does not fit the store {self.path} of {self.capacity_bytes} bytes"
            )
        self._queue.put(key, value)

    def get(self, key: bytes, use: Callable[[memoryview], T]) -> T:
        """Return ``use(value)``, called on the stored bytes themselves: the queued buffer, or the file's pages.

        ``use`` copies out what it wants and returns. It must not keep the view or anything over it: the bytes change
        and go away afterwards. It runs in the calling thread, without a lock.

        Raises:
            RecordError: there is no value under ``key``, or the file is damaged.
            ClosedError: the store is closed.
        """
        (result,) = self.get_many([key], lambda _, value: use(value))
        return result

    def get_many(self, keys: Sequence[bytes], use: Callable[[int, memoryview], T]) -> list[T]:
        """Return ``use(index, value)`` for each key, in one read: many small values cost a fraction of as many ``get``.

        Args:
            keys: in any order.
            use: as in ``get``, called with the key's index first.

        Raises:
            RecordError: there is no value under one of them, or the file is damaged; the others may have been used.
            ClosedError: the store is closed.
        """
        self.check_open()
        queued = self._queue.find(keys)
        reader = Reader()
        try:
            if not self._gate.enter(reader):
                self.check_open()
            return self._read(keys, queued, use)
        finally:
            self._gate.leave(reader)

    def delete(self, keys: Iterable[bytes]) -> None:
        """Delete values, in order with puts; keys without one are fine. Never waits.

        A put that is still queued is dropped instead of written.
        """
        self.check_open()
        self._queue.delete(keys)

    def cancel(self, keys: Iterable[bytes]) -> None:
        """Drop puts and deletes that are still queued, without touching the file. Never waits.

        What a key then holds is what was committed before, if anything: for callers who can tell a stale value, a
        delete that costs no transaction.
        """
        self.check_open()
        self._queue.cancel(keys)

    def flush(self, timeout_seconds: float = 60.0) -> None:
        """Wait until everything accepted before this call is committed (on the disk, if the store is durable).

        Raises:
            StoreError: a commit failed; the values are still readable.
            TransferTimeout: it took longer.
        """
        self.check_open()
        self._queue.wait_written(timeout_seconds)

    @property
    def failed(self) -> StoreError | None:
        """Why the store accepts nothing more, or None."""
        return self._queue.failed

    @property
    def allocated_bytes(self) -> int:
        """Allocated blocks of the store's files, in bytes. Never above ``capacity_bytes``."""
        files = (self.path / "data.mdb", self.path / "lock.mdb")
        return sum(file.stat().st_blocks * 512 for file in files if file.exists())

    @property
    def queued_bytes(self) -> int:
        """Bytes accepted and not yet committed."""
        return self._queue.queued_bytes

    @property
    def peak_queued_bytes(self) -> int:
        """The most ``queued_bytes`` has been."""
        return self._queue.peak_bytes

    def close(self) -> None:
        """Stop the writer and release the files. Idempotent; may be repeated after Ctrl-C interrupted it.

        Raises:
            TransferTimeout: the writer or a reader did not finish in time; the files stay open.
        """
        if os.getpid() != self._pid:
            return  # the environment is the parent's
        self._queue.close(drop=not self._durable)
        self._writer.join(self._wait_seconds)
        # Closing the map under a thread that uses it would crash the process.
        if not self._gate.close() or self._writer.is_alive():
            raise TransferTimeout(f"the store {self.path} is still in use and stays open")
        with _registry_lock:
            self._environment.close()
            _open_stores.pop((self._pid, self.path), None)
            if not _open_stores:
                atexit.unregister(_close_open_stores)

    def check_open(self) -> None:
        """Raise ClosedError if the store is closed, or belongs to the process that this one was forked from."""
        if os.getpid() != self._pid:
            raise ClosedError(f"the store {self.path} belongs to the parent process; open another after fork()")
        if self._gate.closed:
            raise ClosedError(f"the store {self.path} is closed")

    def _missing(self, key: bytes) -> RecordError:
        return RecordError(f"no record under key {key.hex()} in {self.path}")

    def _read(
        self, keys: Sequence[bytes], queued: Mapping[bytes, Operation], use: Callable[[int, memoryview], T]
    ) -> list[T]:
        results = []
        key = b""
        try:
            with self._environment.begin(buffers=True) as transaction:
                for index, key in enumerate(keys):
                    operation = queued.get(key)
                    value = transaction.get(key) if operation is None else operation.value
                    if value is None:
                        raise self._missing(key)
                    results.append(use(index, memoryview(value).toreadonly().cast("B")))
        except lmdb.Error as error:
            raise RecordError(f"cannot read key {key.hex()} in {self.path}: {error}") from error
        return results

    # -- the writer thread ----------------------------------------------------------------------------------------

    def _write(self) -> None:
        while batch := self._queue.take(self._write_batch):
            try:
                self._commit_or_make_room(batch)
            except Exception as error:  # noqa: BLE001 - whatever it was, callers must hear of it and not wait for ever
                self._fail(error)
                return
            self._queue.finish()

    def _commit_or_make_room(self, batch: dict[bytes, Operation]) -> None:
        self._gate.wait_for_old_readers()
        try:
            self._commit(batch)
        except lmdb.MapFullError:
            # A slow read may have kept freed pages from reuse all the same. With no reader about, each commit sets free
            # the pages of the one before, and a single value needs the least room.
            with self._gate.without_readers():
                for key, operation in batch.items():
                    self._commit({key: operation})

    def _commit(self, batch: dict[bytes, Operation]) -> None:
        with self._environment.begin(write=True) as transaction:
            for key, operation in batch.items():
                if operation.value is None:
                    transaction.delete(key)
                else:
                    transaction.put(key, operation.value)
        self._gate.count_commit()

    def _fail(self, error: Exception) -> None:
        # LMDB reports a full file system as a short write, "Input/output error": say how much room there is.
        free = "its folder is gone"
        with suppress(OSError):
            status = os.statvfs(self.path)
            free = f"{status.f_bavail * status.f_frsize:,} bytes free on its file system"
        message = f"writing to {self.path} failed: {error} ({free})"
        full = isinstance(error, lmdb.MapFullError | lmdb.DiskError)
        _log.error("%s; what was accepted stays readable in memory, nothing more is accepted", message)
        self._queue.fail(StoreFull(message) if full else StoreError(message))


def _open_environment(path: Path, capacity_bytes: int, *, durable: bool, readers: int) -> lmdb.Environment:
    """Open LMDB, after checks that it does not make itself."""
    map_size = map_bytes(capacity_bytes)
    data = path / "data.mdb"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found_bytes = data.stat().st_size if data.exists() else 0
        # LMDB maps a sparse lock file; a page of it that a full file system has no room for would end the process (SIGBUS).
        if not (lock := path / "lock.mdb").exists():
            lock.touch(mode=0o600)
            lock.write_bytes(bytes(_LOCK_BYTES))
    except OSError as error:
        raise StoreError(f"cannot use {path} for a store: {error.strerror}") from error
    if found_bytes > map_size or map_size < 16 * PAGE_BYTES:
        # LMDB would enlarge the map to what it finds, beyond the bound.
        raise StoreError(
            f"the store {path} needs more than its capacity of {capacity_bytes} bytes (its file has {found_bytes}); "
            f"raise the capacity or delete the directory"
        )
    try:
        environment = lmdb.open(
            str(path),
            map_size=map_size,
            mode=0o600,
            sync=durable,
            readahead=True,
            writemap=False,
            max_spare_txns=readers,
            lib_version=0,
        )
        # Readers that were killed would keep pages from being reused for ever.
        environment.reader_check()
        needed_bytes = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    except (lmdb.Error, OSError) as error:
        raise StoreError(f"cannot open the store {path}: {error}") from error
    except UnicodeEncodeError as error:
        raise StoreError(f"the path {str(path)!a} is not UTF-8, which LMDB needs; give another") from error
    if found_bytes and needed_bytes > found_bytes:
        # Reading beyond the end of a mapped file kills the process (SIGBUS).
        environment.close()
        raise StoreError(f"the store {path} is cut off: {found_bytes} of {needed_bytes} bytes; delete the directory")
    return environment


def _close_open_stores() -> None:
    """Close what its owner forgot, before the interpreter takes the writer threads down."""
    for (pid, _), store in list(_open_stores.items()):
        if pid == os.getpid():
            store.close()
