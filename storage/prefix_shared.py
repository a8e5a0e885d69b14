"""SharedStore: the one open prefix store that a process has at a path, however many use it there."""

import atexit
import logging
import os
import threading
from pathlib import Path

from tierkv.errors import ClosedError, StoreError
from tierkv.eviction import EvictionPolicy
from tierkv.storage.prefix_folder import PrefixFolder
from tierkv.storage.prefix_open import OpenStore, close_parts, open_parts
from tierkv.storage.prefix_queue import ShedQueue
from tierkv.storage.prefix_reader import PrefixReader
from tierkv.storage.prefix_stats import Tally
from tierkv.storage.prefix_writer import PrefixWriter

_log = logging.getLogger(__name__)

# By (process, real path): LMDB's locks break if a file is opened twice in a process.
_open_stores: "dict[tuple[int, Path], SharedStore]" = {}
_registry_lock = threading.Lock()


class SharedStore:
    """Parts, queue, threads and counters of an open store.

    Attributes:
        parts: index and slabs.
        queue: what waits to be written.
        writer: the thread that writes.
        reader: finds and reads.
        tally: counters.
        wait_seconds: longest wait of whoever waits at all.
    """

    def __init__(
        self,
        parts: OpenStore,
        place: tuple[int, Path],
        *,
        ttl_seconds: float,
        write_batch: int,
        write_queue_bytes: int,
        wait_seconds: float,
    ) -> None:
        """Start the writer of a store whose parts have just been opened."""
        self.parts = parts
        self.tally = Tally()
        self.queue = ShedQueue(f"the prefix store {parts.folder.path}", write_queue_bytes)
        self.writer = PrefixWriter(parts, self.queue, self.tally, ttl_seconds=ttl_seconds, write_batch=write_batch)
        self.reader = PrefixReader(parts, self.queue, self.tally, self.writer.is_expired)
        self._place = place
        self.wait_seconds = wait_seconds
        self._users = 0
        self.writer.start()

    def check_process(self) -> None:
        """Raise ClosedError in a process that was forked from the one that opened it."""
        if os.getpid() != self._place[0]:
            path = self.parts.folder.path
            raise ClosedError(f"the prefix store {path} belongs to the parent process; open another after fork()")

    def release(self) -> None:
        """Say that one user has closed it; the last one writes what is queued and lets go of the files."""
        if os.getpid() != self._place[0]:
            return
        with _registry_lock:
            self._users -= 1
            if self._users == 0:
                self.shut()

    def shut(self) -> None:
        """Close it, whoever uses it."""
        self.queue.close()
        if not self.writer.join(self.wait_seconds):
            self.tally.add("shed", self.queue.shed())
            self.writer.join(self.wait_seconds)
        if self.writer.running or not self.reader.close():
            # Closing the index under a thread that uses it would crash the process. The kernel cleans up after us.
            _log.warning("the prefix store %s is still in use and stays open", self.parts.folder.path)
            return
        broken = self.writer.broken or self.reader.broken
        sound = not (broken or self.writer.suspect or self.reader.suspect)
        close_parts(self.parts, sound=sound, broken=broken, wait_seconds=self.wait_seconds)
        _open_stores.pop(self._place, None)

    def let_go(self) -> None:
        """Close what a forked child must not hold; nothing else is its own."""
        if os.getpid() != self._place[0]:
            self.parts.folder.let_go()

    @classmethod
    def acquire(
        cls,
        root: str | os.PathLike[str],
        capacity_bytes: int | None,
        policy: EvictionPolicy | None,
        *,
        ttl_seconds: float,
        write_batch: int,
        write_queue_bytes: int,
        wait_seconds: float,
    ) -> "SharedStore":
        """Return the store below ``root`` with one user more, opened if it is not open in this process.

        Raises:
            StoreError: it cannot be opened.
        """
        folder = PrefixFolder(root)
        with _registry_lock:
            place = (os.getpid(), folder.path.resolve())
            store = _open_stores.get(place)
            if store is not None and store.queue.closed:
                store.shut()  # it was in use when it should have been closed
                if place in _open_stores:
                    raise StoreError(f"the prefix store {folder.path} is still being closed; its disk does not answer")
                store = None
            if store is None:
                store = _open_stores[place] = cls(
                    open_parts(folder, capacity_bytes, policy, wait_seconds),
                    place,
                    ttl_seconds=ttl_seconds,
                    write_batch=write_batch,
                    write_queue_bytes=write_queue_bytes,
                    wait_seconds=wait_seconds,
                )
            store._users += 1
            return store


def _close_open_stores() -> None:
    """Close what its owners forgot, before the interpreter takes the writer threads down."""
    for (pid, _), store in list(_open_stores.items()):
        if pid == os.getpid():
            store.shut()


def _after_fork() -> None:
    """Close the lock files that a forked child has inherited: held there, they would outlive the parent."""
    global _registry_lock  # noqa: PLW0603 - whoever holds the old one is not in the child
    _registry_lock = threading.Lock()
    for store in _open_stores.values():
        store.let_go()


atexit.register(_close_open_stores)
os.register_at_fork(after_in_child=_after_fork)
