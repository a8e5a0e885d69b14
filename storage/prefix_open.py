"""OpenStore: the parts of an open prefix store; how they are brought up, made to agree, and closed again."""

import logging
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Final

from tierkv.errors import StoreError
from tierkv.eviction import LRU, POLICIES, EvictionPolicy, refile
from tierkv.storage.prefix_book import Book
from tierkv.storage.prefix_folder import PrefixFolder
from tierkv.storage.prefix_index import PrefixIndex, page_limit
from tierkv.storage.prefix_repair import agree_with_files, audit, rebuild
from tierkv.storage.prefix_rows import Row
from tierkv.storage.prefix_slab import SlabFiles

_log = logging.getLogger(__name__)

MIN_CAPACITY_BYTES: Final = 4 << 20
"""Less would hold an index and hardly a record."""

_INDEX_SHARE: Final = 32
_INDEX_BYTES: Final = (2 << 20, 1 << 30)
_CHUNK: Final = 512
_ATTEMPTS: Final = 8


_UNBOUNDED: Final = 1 << 62


@dataclass(slots=True)
class OpenStore:
    """What all of the store's modules work on.

    Attributes:
        folder: its directory and locks.
        index: its tables.
        slabs: its files.
        policy: the eviction rule.
        capacity_bytes: bound on the allocated bytes of everything in the folder; 0 where it was lost with a damaged index
            and nobody has given one since: then nothing is evicted for it.
    """

    folder: PrefixFolder
    index: PrefixIndex
    slabs: SlabFiles
    policy: EvictionPolicy
    capacity_bytes: int
    _other_bytes: int = 0

    @property
    def budget_bytes(self) -> int:
        """Bound on the allocated bytes of all slabs: the capacity without everything else."""
        if not self.capacity_bytes:
            return _UNBOUNDED
        # File systems count their own lists of a file's blocks as the file's: up to 4 KiB for 340 slots.
        overhead = self.capacity_bytes // 256 + (128 << 10)
        return max(0, self.capacity_bytes - self.index.map_bytes - overhead - self._other_bytes)

    def measure_others(self) -> None:
        """Look how many bytes lie in the folder besides index and slabs; the budget is what they leave."""
        self._other_bytes = self.folder.other_bytes()

    @contextmanager
    def write(self) -> Iterator[Book]:
        """Change the store; committed at the end of the block, given up if it raises.

        Raises:
            StoreError: as ``PrefixIndex.write``.
        """
        with self.index.write() as tables:
            book = Book(tables, self.slabs, self.budget_bytes)
            yield book
            book.save()

    @contextmanager
    def read(self) -> Iterator[Book]:
        """See the store as it is now, changing nothing. Keep it short.

        Raises:
            StoreError: as ``PrefixIndex.read``.
        """
        with self.index.read() as tables:
            yield Book(tables, self.slabs, self.budget_bytes)

    def drop_where(
        self, choose: Callable[[Row, Mapping[bytes, Row]], bool], *, unless_pinned: float | None = None
    ) -> int:
        """Forget the blocks that ``choose`` says, and those that continue them, some in each transaction.

        Args:
            choose: told each row and all that were there at that moment, by key.
            unless_pinned: keep blocks that are pinned at this wall time, and what they continue.

        Returns:
            How many blocks are gone.
        """
        with self.read() as book:
            rows = list(book.all_rows())
            by_key = {row.key: row for row in rows}
            pinned = set()
            if unless_pinned is not None:
                for row in rows:
                    at: Row | None = row if book.is_pinned(row.key, unless_pinned) else None
                    while at is not None and at.key not in pinned:
                        pinned.add(at.key)
                        at = by_key.get(at.parent) if at.parent is not None else None
            chosen = book.with_descendants([row for row in rows if row.key not in pinned and choose(row, by_key)])
        keys = iter([row.key for row in reversed(chosen)])  # children first
        number = 0
        while chunk := list(islice(keys, _CHUNK)):
            with self.write() as book:
                found = (book.find(key) for key in chunk)
                number += len(book.drop(self.policy, [row for row in found if row is not None and row.stored]))
        return number

    def shrink(self) -> None:
        """Evict down to the budget, and give the room back.

        Raises:
            StoreError: as ``PrefixIndex.write``.
            OSError: the disk failed.
        """
        settled, futile = False, 0
        while not settled and futile < _ATTEMPTS:
            with self.write() as book:
                evicted = 0
                while evicted < _CHUNK and book.shortfall({}) and book.evict(self.policy, lambda _: True):
                    evicted += 1
                settled = book.settle({})
            futile += not evicted


def open_parts(
    folder: PrefixFolder, capacity_bytes: int | None, policy: EvictionPolicy | None, wait_seconds: float
) -> OpenStore:
    """Open a store and make its parts agree.

    Args:
        folder: its directory.
        capacity_bytes: None: as it was opened before.
        policy: the eviction rule; None: as it was opened before.
        wait_seconds: longest wait for others that are opening it.

    Raises:
        StoreError: it cannot be opened; one line says why.
    """
    if capacity_bytes is None and not folder.exists:
        raise StoreError(f"there is no prefix store in {folder.path}; give the disk.path of one")
    if capacity_bytes is not None and capacity_bytes < MIN_CAPACITY_BYTES:
        raise StoreError(
            f"a prefix store of {capacity_bytes} bytes is too small; give it {MIN_CAPACITY_BYTES} bytes or more"
        )
    with folder.opening(wait_seconds):
        folder.enter()
        try:
            return _bring_up(folder, capacity_bytes, policy)
        except BaseException as error:
            folder.let_go()
            if isinstance(error, OSError) and not isinstance(error, StoreError):
                raise StoreError(f"cannot open the prefix store {folder.path}: {error.strerror or error}") from error
            raise


def close_parts(store: OpenStore, *, sound: bool, broken: bool, wait_seconds: float) -> None:
    """Close a store that nobody in this process uses any more.

    Args:
        sound: whether the next process may trust the index as it is.
        broken: whether it must not trust it, even after a check.
        wait_seconds: longest wait for others that are opening or closing it.
    """
    try:
        with store.folder.opening(wait_seconds):
            store.index.close()
            store.slabs.close()
            store.folder.leave(sound=sound, broken=broken)
    except StoreError as error:
        _log.debug("the prefix store leaves no digest: %s", error)
        store.index.close()
        store.slabs.close()
        store.folder.let_go()


def _bring_up(folder: PrefixFolder, capacity_bytes: int | None, policy: EvictionPolicy | None) -> OpenStore:
    slabs = SlabFiles(folder.path)
    try:
        return _agree(folder, slabs, capacity_bytes, policy)
    except (StoreError, ValueError, LookupError, struct.error) as error:
        slabs.close()
        if not folder.alone or folder.moved:
            raise
        # LMDB does not like it although the verifier did, or there is no room to mend it in.
        folder.move_index_aside(str(error))
    slabs = SlabFiles(folder.path)
    return _agree(folder, slabs, capacity_bytes, policy)


def _agree(
    folder: PrefixFolder, slabs: SlabFiles, capacity_bytes: int | None, wanted_policy: EvictionPolicy | None
) -> OpenStore:
    wanted = 0 if capacity_bytes is None else _index_bytes(capacity_bytes)
    data = folder.index_path / "data.mdb"
    shrinking = bool(wanted and folder.alone and data.exists() and data.stat().st_size > wanted)
    map_bytes = 0 if shrinking or not folder.alone else wanted
    policy = wanted_policy or LRU()
    store = OpenStore(folder, PrefixIndex(folder.index_path, map_bytes), slabs, policy, capacity_bytes or 0)
    try:
        with store.write() as book:
            state = book.state
            if wanted_policy is None and state.policy in POLICIES:
                store.policy = policy = POLICIES[state.policy]()
            store.capacity_bytes = capacity_bytes or state.capacity_bytes
            if folder.alone and not folder.clean and (problems := audit(book)):
                lost = rebuild(book, policy)
                _log.warning("the prefix store %s was mended, %d blocks were lost (%s)", folder.path, lost, problems[0])
            book.state.capacity_bytes = store.capacity_bytes
            if book.state.policy != policy.name:
                if book.state.policy:
                    refile(book, policy)
                book.state.policy = policy.name
            agree_with_files(book)
        store.measure_others()
        store.shrink()
        if shrinking:
            _compact(store, wanted)
    except BaseException:
        store.index.close()
        raise
    return store


def _compact(store: OpenStore, map_bytes: int) -> None:
    """Make the index's file fit a smaller map; nobody else has it open.

    Raises:
        StoreError: it cannot be made to fit.
        OSError: the disk failed.
    """
    with store.read() as book:
        doomed = book.state.blocks - book.state.blocks * page_limit(map_bytes) // max(1, book.tables.pages())
    while doomed > 0:
        with store.write() as book:
            evicted = 0
            while evicted < min(doomed, _CHUNK) and book.evict(store.policy, lambda _: True):
                evicted += 1
        doomed = doomed - evicted if evicted else 0
    new = store.folder.path / "index.tmp"
    store.index.copy_to(new)
    store.index.close()
    (new / "data.mdb").replace(store.folder.index_path / "data.mdb")
    shutil.rmtree(new)
    store.index = PrefixIndex(store.folder.index_path, map_bytes)
    if store.index.map_bytes > map_bytes:
        raise StoreError(f"the prefix store {store.folder.path} cannot be made so small; delete it to start anew")


def _index_bytes(capacity_bytes: int) -> int:
    least, most = _INDEX_BYTES
    return min(max(capacity_bytes // _INDEX_SHARE, least), most)
