"""Repair: what must be true between the prefix store's index, its order and its slabs, and how it is made true again.

The rows of blocks are the truth; each carries a seal. All else (order, children, counts, vacant slots) follows from
them and is made anew where it does not agree. LMDB's own structure is not this module's business: it was checked before.
"""

import struct
from collections import Counter
from collections.abc import Iterator
from typing import Final

from tierkv.eviction import HELD, EvictionPolicy, refile
from tierkv.storage import prefix_rows as rows
from tierkv.storage.prefix_book import Book
from tierkv.storage.prefix_index import ENTRIES, ORDER, PINS, RETIRED, VACANT
from tierkv.storage.prefix_rows import ALLOCATED, HOLE, Row, SlabCount, State

_HIGHEST_SLOT: Final = 1 << 40


def audit(book: Book) -> list[str]:
    """Return what is wrong with a book, one line each; reads all of the index and nothing else."""
    problems = [] if book.intact else ["the state is damaged"]
    state = State(payload_bytes=0)
    owners: Counter[tuple[int, int]] = Counter()
    children: Counter[bytes | None] = Counter()
    found = {}
    for key, value in book.tables.items(ENTRIES):
        row = rows.unpack_row(key, value)
        if row is None:
            problems.append(f"the row of block {key.hex()} is damaged")
            continue
        found[key] = row
        state.queues[row.queue] = state.queues.get(row.queue, 0) + row.num_bytes
        if row.stored:
            children[row.parent] += 1
            state.blocks += 1
            state.payload_bytes += row.payload_bytes
            owners[row.slot_bytes, row.slot] += 1
    for row in found.values():
        if row.stored and row.parent is not None and row.parent not in found:
            problems.append(f"block {row.key.hex()} continues one that is not there")
        if row.children != children[row.key]:
            problems.append(f"block {row.key.hex()} has {children[row.key]} children, not {row.children}")
    order = [key for key, _ in book.tables.items(ORDER)]
    if order != sorted(rows.order_key(row) for row in found.values() if row.queue < HELD):
        problems.append("the order of blocks does not agree with their rows")
    problems.extend(_audit_counts(book.state, state))
    problems.extend(_audit_slots(book, owners))
    return problems


def _audit_counts(kept: State, counted: State) -> Iterator[str]:
    for name in ("blocks", "payload_bytes"):
        if getattr(kept, name) != getattr(counted, name):
            yield f"{name} is {getattr(counted, name)}, not {getattr(kept, name)}"
    if {queue: count for queue, count in kept.queues.items() if count} != {
        q: n for q, n in counted.queues.items() if n
    }:
        yield "the bytes of a queue do not agree with its rows"


def _audit_slots(book: Book, owners: Counter[tuple[int, int]]) -> Iterator[str]:
    allocated = Counter(owners.keys())
    vacant: Counter[int] = Counter()
    for at, value in book.tables.items(RETIRED):
        if rows.unseal(at, value) is None:
            yield "the row of a retired slot is damaged"
            continue
        owners[rows.unpack_retired(at)] += 1
        allocated[rows.unpack_retired(at)] += 1
    for key, _ in book.tables.items(VACANT):
        try:
            size, kind, slot = rows.unpack_vacant(key)
        except struct.error:
            yield "the row of a vacant slot is damaged"
            continue
        owners[size, slot] += 1
        vacant[size] += kind == ALLOCATED
        if kind == ALLOCATED:
            allocated[size, slot] += 1
    yield from (
        f"slot {slot} of {size} bytes has {times} owners" for (size, slot), times in owners.items() if times > 1
    )
    slots, used = Counter(size for size, _ in owners), Counter(size for size, _ in allocated)
    for size in slots.keys() | book.state.slabs.keys():
        count = book.state.slabs.get(size, SlabCount())
        if slots[size] != count.slots or any(slot >= count.slots for one, slot in owners if one == size):
            yield f"{slots[size]} slots of {size} bytes are accounted for, not {count.slots}"
        if (used[size], vacant[size]) != (count.allocated, count.vacant):
            yield f"of the slots of {size} bytes {used[size]} have room on the disk, not {count.allocated}"


def rebuild(book: Book, policy: EvictionPolicy) -> int:
    """Make all of the index anew from the rows that are whole; return how many blocks were lost.

    Raises:
        StoreFull: the index has no room for it; start with an empty one.
    """
    tables, old = book.tables, book.state
    found: dict[bytes, Row] = {}
    owners = set()
    lost = 0
    for key, value in tables.items(ENTRIES):
        row = rows.unpack_row(key, value)
        if row is None or not row.stored or (row.slot_bytes, row.slot) in owners or row.slot >= _HIGHEST_SLOT:
            lost += row is None or row.stored
            continue
        owners.add((row.slot_bytes, row.slot))
        found[key] = row
    kept = _reachable(found)
    lost += len(found) - len(kept)
    retired = [(at, value) for at, value in tables.items(RETIRED) if rows.unseal(at, value) is not None]
    for table in (ENTRIES, ORDER, VACANT, RETIRED):
        tables.clear(table)
    book.state = State(
        capacity_bytes=old.capacity_bytes,
        policy=old.policy,
        clock=max([old.clock, *(row.rank for row in kept.values())]),
        stamp=max([old.stamp, *(row.stamp for row in kept.values())]),
        sighted=old.sighted,
    )
    book.intact = True
    children = Counter(row.parent for row in kept.values())
    for row in kept.values():
        row.children = children[row.key]
        row.queue = row.queue % HELD + (HELD if row.children else 0)
        book.file(row)
    for at, value in retired:
        if rows.unpack_retired(at) not in owners:
            tables.put(RETIRED, at, value)
    for key in [key for key, _ in tables.items(PINS) if key not in kept]:
        tables.delete(PINS, key)
    _count_slots(book, kept)
    refile(book, policy)
    return lost


def _reachable(found: dict[bytes, Row]) -> dict[bytes, Row]:
    """Return the rows whose chain is whole from its first block on."""
    good: dict[bytes | None, bool] = {None: True}
    for row in found.values():
        chain = []
        at: Row | None = row
        while at is not None and at.key not in good:
            good[at.key] = False  # until its parent is known; a circle, which only damage makes, stays so
            chain.append(at)
            at = found.get(at.parent) if at.parent is not None else None
        for one in reversed(chain):
            good[one.key] = good.get(one.parent, False)
    return {key: row for key, row in found.items() if good[key]}


def _count_slots(book: Book, kept: dict[bytes, Row]) -> None:
    """Count slots anew; all that have no owner are taken for holes, and ``agree_with_files`` makes them so."""
    used: dict[int, set[int]] = {}
    for row in kept.values():
        used.setdefault(row.slot_bytes, set()).add(row.slot)
    for at, _ in book.tables.items(RETIRED):
        size, slot = rows.unpack_retired(at)
        used.setdefault(size, set()).add(slot)
    for size, slots in used.items():
        book.state.slabs[size] = SlabCount(max(slots) + 1, len(slots), 0)
        for slot in set(range(max(slots))) - slots:
            book.tables.put(VACANT, rows.vacant_key(size, HOLE, slot), b"")


def agree_with_files(book: Book) -> None:
    """Make the slabs take the room that the index counts, after processes that were killed while they wrote.

    Raises:
        OSError: the disk failed.
    """
    for size in sorted({*book.slabs.sizes(), *book.state.slabs}):
        count = book.state.slabs.get(size, SlabCount())
        book.slabs.cut(size, count.slots)
        if book.slabs.measure(size)[1] == count.allocated * size:
            continue
        vacant = sorted([*book.vacant_slots(size, ALLOCATED), *book.vacant_slots(size, HOLE)])
        for begin, num_slots in _runs(vacant):
            if not book.slabs.punch(size, begin, num_slots):
                return
        for slot in list(book.vacant_slots(size, ALLOCATED)):
            book.tables.delete(VACANT, rows.vacant_key(size, ALLOCATED, slot))
            book.tables.put(VACANT, rows.vacant_key(size, HOLE, slot), b"")
        count.allocated -= count.vacant
        count.vacant = 0


def _runs(slots: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the number of slots side by side."""
    begin = 0
    for index in range(1, len(slots) + 1):
        if index == len(slots) or slots[index] != slots[index - 1] + 1:
            yield slots[begin], index - begin
            begin = index
