"""Looking after a prefix store: list, verify, collect, clear. Other processes may be using it meanwhile.

No transaction is open while a record is read, and none that changes something is long: work is done in chunks.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from tierkv.storage import prefix_rows as rows
from tierkv.storage.prefix_index import ENTRIES, NAMESPACES, NOTES, PINS, RETIRED, SIGHTED
from tierkv.storage.prefix_open import OpenStore
from tierkv.storage.prefix_reader import PrefixReader, found_of
from tierkv.storage.prefix_rows import SlabCount

_CHUNK: Final = 256
_ATTEMPTS: Final = 8


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """What a store holds of one namespace.

    Attributes:
        digest: 32 bytes.
        manifest: what was registered; empty if nothing was.
        blocks: stored blocks.
        num_bytes: of their KV.
        oldest_seconds: age of the oldest block, 0 if there is none.
        newest_seconds: age of the newest.
        hits: times its blocks were found.
    """

    digest: bytes
    manifest: dict[str, Any]
    blocks: int
    num_bytes: int
    oldest_seconds: float
    newest_seconds: float
    hits: int


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a complete check found.

    Attributes:
        checked: records read.
        bad: keys, in hexadecimal, with what is wrong with their records.
        seconds: how long it took.
    """

    checked: int
    bad: list[tuple[str, str]]
    seconds: float


@dataclass(frozen=True, slots=True)
class GcReport:
    """What was collected.

    Attributes:
        aged: blocks that were older than asked for.
        orphans: blocks whose chain was broken.
        evicted: blocks that went because of the budget.
        retired: slots of damaged records that may be used again.
        freed_bytes: by how much all files in the folder became smaller on the disk.
    """

    aged: int
    orphans: int
    evicted: int
    retired: int
    freed_bytes: int


@dataclass(slots=True)
class _Sum:
    blocks: int = 0
    num_bytes: int = 0
    hits: int = 0
    created: list[float] = field(default_factory=list)


def list_namespaces(store: OpenStore) -> list[NamespaceInfo]:
    """Return what is stored, the namespace with the most bytes first.

    Raises:
        StoreError: the index cannot be read.
    """
    sums: dict[bytes, _Sum] = {}
    manifests = {}
    with store.read() as book:
        for digest, value in book.tables.items(NAMESPACES):
            if (manifest := rows.unpack_manifest(digest, value)) is not None:
                manifests[digest] = manifest
                sums[digest] = _Sum()
        for row in book.all_rows():
            one = sums.setdefault(row.namespace, _Sum())
            one.blocks += 1
            one.num_bytes += row.payload_bytes
            one.hits += row.found
            one.created = [min([*one.created, row.created]), max([*one.created, row.created])]
    now = time.time()
    infos = []
    for digest, one in sums.items():
        oldest, newest = (max(0.0, now - created) for created in one.created or (now, now))
        infos.append(
            NamespaceInfo(digest, manifests.get(digest, {}), one.blocks, one.num_bytes, oldest, newest, one.hits)
        )
    return sorted(infos, key=lambda info: -info.num_bytes)


def verify(
    store: OpenStore, reader: PrefixReader, *, repair: bool, on_progress: Callable[[int, int], None] | None
) -> VerifyReport:
    """Read and check every record. What is evicted meanwhile is not bad.

    Args:
        repair: have bad records taken out of the index, and their slots not used again.
        on_progress: called with the number of records checked and of all, now and then.

    Raises:
        StoreError: the index cannot be read.
    """
    began = time.monotonic()
    checked, bad, start = 0, [], b""
    while True:
        with store.read() as book:
            total = book.state.blocks
            chunk = list(islice(book.tables.items(ENTRIES, start), _CHUNK))
        for key, value in chunk:
            row = rows.unpack_row(key, value)
            if row is None:
                bad.append(
                    (
                        key.hex(),
                        "its row in the index is damaged; restart to repair it",
                    )
                )
                reader.suspect = True
            elif row.stored:
                checked += 1
                found = found_of(row)
                if problem := reader.check(found):
                    bad.append((key.hex(), problem))
                    if repair:
                        reader.report(found)
        if on_progress is not None:
            on_progress(checked, max(total, checked))
        if len(chunk) < _CHUNK:
            return VerifyReport(checked, bad, time.monotonic() - began)
        start = chunk[-1][0] + b"\0"


def collect(
    store: OpenStore, *, budget_bytes: int | None, max_age_seconds: float | None, now: float | None = None
) -> GcReport:
    """Forget what is old, broken or too much, and give all room back that nobody uses.

    Args:
        budget_bytes: most bytes on the disk that records may take; None: as many as now.
        max_age_seconds: blocks older than this go, pinned ones and what they continue aside; None: none.
        now: wall time.

    Raises:
        StoreError: the store cannot be written to.
        OSError: the disk failed.
    """
    now = time.time() if now is None else now
    before = store.folder.allocated_bytes()
    aged = 0
    if max_age_seconds is not None:
        oldest = now - max_age_seconds
        aged = store.drop_where(lambda row, _: row.created < oldest, unless_pinned=now)
    orphans = store.drop_where(lambda row, others: row.parent is not None and row.parent not in others)
    evicted = 0 if budget_bytes is None else _evict_to(store, budget_bytes, now)
    retired = _reuse_retired(store)
    for _ in range(_ATTEMPTS):  # a slot that was freed is given back in the next transaction
        with store.write() as book:
            book.punch_vacant()
            if not book.slabs.can_punch or not any(count.vacant for count in book.state.slabs.values()):
                break
    with store.write() as book:
        pins = [key for key, _ in book.tables.items(PINS)]
        for key in pins:
            if not book.is_pinned(key, now) or book.tables.get(ENTRIES, key) is None:
                book.tables.delete(PINS, key)
    store.folder.remove_moved_aside()
    store.measure_others()
    return GcReport(aged, orphans, evicted, retired, max(0, before - store.folder.allocated_bytes()))


def clear(store: OpenStore, namespace: bytes | None) -> int:
    """Forget all blocks of a namespace, or of all, pinned ones too; return how many there were.

    Raises:
        StoreError: the store cannot be written to.
        OSError: the disk failed.
    """
    number = store.drop_where(lambda row, _: namespace is None or row.namespace == namespace)
    with store.write() as book:
        digests = [digest for digest, _ in book.tables.items(NAMESPACES) if namespace in (None, digest)]
        for digest in digests:
            book.tables.delete(NAMESPACES, digest)
        if namespace is None:
            for table in (PINS, SIGHTED, NOTES):
                book.tables.clear(table)
        book.punch_vacant()
    for digest in digests:
        store.folder.forget_manifest(digest)
    store.measure_others()
    return number


def _evict_to(store: OpenStore, budget_bytes: int, now: float) -> int:
    total = 0
    while True:
        with store.write() as book:
            evicted = 0
            while evicted < _CHUNK and _used_bytes(book.state.slabs) > budget_bytes:
                if book.evict(store.policy, lambda entry: not book.is_pinned(entry.key, now)) is None:
                    break
                evicted += 1
        total += evicted
        if evicted < _CHUNK:
            return total


def _used_bytes(slabs: dict[int, SlabCount]) -> int:
    return sum(size * (count.allocated - count.vacant) for size, count in slabs.items())


def _reuse_retired(store: OpenStore) -> int:
    with store.write() as book:
        retired = [at for at, _ in book.tables.items(RETIRED)]
        for at in retired:
            book.tables.delete(RETIRED, at)
            book.release(*rows.unpack_retired(at))
    return len(retired)
