"""Book: what may be changed in the prefix store's index, within one write transaction.

The eviction rule's ledger, the slots of the slabs, and their counts change together or not at all.

**A slot that is freed here is not written to before this is committed.** Until then the index still names its old
record, and a process killed half-way must leave that record whole. So whoever needs room frees it in one transaction
and takes it in the next (``settle`` says whether that is needed).
"""

import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from tierkv.errors import StoreError
from tierkv.eviction import HELD, Entry, EvictionPolicy
from tierkv.storage import prefix_rows as rows
from tierkv.storage.prefix_index import ENTRIES, ORDER, PINS, RETIRED, STATE, VACANT, Tables
from tierkv.storage.prefix_rows import ALLOCATED, HOLE, Row, SlabCount, State
from tierkv.storage.prefix_slab import SlabFiles

_STATE_KEY: Final = b"state"


class IndexDamaged(StoreError):
    """A row of the index is not what was written; the next process that opens the store alone repairs it."""


class Book:
    """One write transaction. Implements ``tierkv.eviction.Ledger``.

    Attributes:
        tables: the transaction's tables.
        state: counts and clocks; written back by ``save``.
        fresh: slots freed in this transaction.
        intact: False where the state was lost, and the book must be made anew (``prefix_repair``).
    """

    def __init__(self, tables: Tables, slabs: SlabFiles, budget_bytes: int) -> None:
        """Read the state.

        Args:
            tables: of a write transaction.
            slabs: whose slots this hands out.
            budget_bytes: bound on the allocated bytes of all slabs.
        """
        self.tables = tables
        self.slabs = slabs
        self.budget_bytes = budget_bytes
        self.fresh: set[tuple[int, int]] = set()
        value = tables.get(STATE, _STATE_KEY)
        state = rows.unpack_state(_STATE_KEY, value)
        self.intact = state is not None or (value is None and not tables.count(ENTRIES))
        # Stamps of a store that was made anew are none of those that old records in a forgotten slab carry.
        self.state = state or State(stamp=secrets.randbits(62))

    def save(self) -> None:
        """Write the state back. To be called last."""
        self.tables.put(STATE, _STATE_KEY, rows.pack_state(_STATE_KEY, self.state))

    # -- the ledger -----------------------------------------------------------------------------------------------

    @property
    def floor(self) -> int:
        """A number that the eviction rule keeps."""
        return self.state.floor

    @floor.setter
    def floor(self, value: int) -> None:
        self.state.floor = value

    def find(self, key: bytes) -> Row | None:
        """Return the row of a key, or None.

        Raises:
            IndexDamaged: the row is damaged.
        """
        value = self.tables.get(ENTRIES, key)
        row = rows.unpack_row(key, value)
        if row is None and value is not None:
            raise IndexDamaged(f"the row of block {key.hex()} in the prefix index is damaged; restart to repair it")
        return row

    def file(self, entry: Entry) -> None:
        """Put an entry in, or put it to another place."""
        old = self.find(entry.key)
        if old is not None:
            self._count(old, -1)
            if old.queue < HELD and (old.queue, old.rank) != (entry.queue, entry.rank):
                self.tables.delete(ORDER, rows.order_key(old))
        self._count(entry, 1)
        self.tables.put(ENTRIES, entry.key, rows.pack_row(entry))
        if entry.queue < HELD:
            self.tables.put(ORDER, rows.order_key(entry), b"")

    def remove(self, key: bytes) -> None:
        """Take an entry out; its slot is still its own until ``release``."""
        if (old := self.find(key)) is not None:
            self._count(old, -1)
            if old.queue < HELD:
                self.tables.delete(ORDER, rows.order_key(old))
            self.tables.delete(ENTRIES, key)

    def ascending(self, queue: int) -> Iterator[Entry]:
        """Yield the rows of a queue, lowest rank first; in any order for those that no rule looks at."""
        if queue >= HELD:
            yield from (row for row in self.all_rows() if row.queue == queue)
            return
        for key, _ in self.tables.items(ORDER, rows.order_start(queue)):
            if key[0] != queue:
                return
            row = self.find(rows.order_target(key))
            if row is None or rows.order_key(row) != key:
                raise IndexDamaged("the order of blocks in the prefix index is damaged; restart to repair it")
            yield row

    def bytes_in(self, queue: int) -> int:
        """Return the bytes of all entries of a queue."""
        return self.state.queues.get(queue, 0)

    def tick(self) -> int:
        """Return a number larger than all before."""
        self.state.clock += 1
        return self.state.clock

    def _count(self, entry: Entry, sign: int) -> None:
        queues = self.state.queues
        queues[entry.queue] = queues.get(entry.queue, 0) + sign * entry.num_bytes
        if isinstance(entry, Row) and entry.stored:
            self.state.blocks += sign
            self.state.payload_bytes += sign * entry.payload_bytes

    # -- blocks ---------------------------------------------------------------------------------------------------

    def all_rows(self) -> Iterator[Row]:
        """Yield the rows of all stored blocks; damaged ones are passed over."""
        found = (rows.unpack_row(key, value) for key, value in self.tables.items(ENTRIES))
        return (row for row in found if row is not None and row.stored)

    def next_stamp(self) -> int:
        """Return a stamp that no record had before."""
        self.state.stamp += 1
        return self.state.stamp

    def evict(self, policy: EvictionPolicy, may_go: Callable[[Entry], bool]) -> Row | None:
        """Forget the block that the rule chooses, and free its slot; None where none may go."""
        victim = policy.victim(self, may_go)
        if not isinstance(victim, Row):
            return None
        policy.evicted(self, victim)
        self.release(victim.slot_bytes, victim.slot)
        self.tables.delete(PINS, victim.key)  # if any, it is over
        return victim

    def drop(
        self, policy: EvictionPolicy, doomed: Iterable[Row], retire: Mapping[bytes, float] | None = None
    ) -> list[Row]:
        """Forget blocks and all that continue them, which nobody could find any more; return those.

        Args:
            policy: the rule in use.
            doomed: rows as they are now.
            retire: keys whose slots are not to be used again, with the time this was noticed.
        """
        gone = self.with_descendants(doomed)
        for row in reversed(gone):  # children first
            policy.drop(self, row)
            self.tables.delete(PINS, row.key)
            if retire is not None and row.key in retire:
                at = rows.retired_key(row.slot_bytes, row.slot)
                self.tables.put(RETIRED, at, rows.pack_quarantined(at, row, retire[row.key]))
            else:
                self.release(row.slot_bytes, row.slot)
        return gone

    def with_descendants(self, doomed: Iterable[Row]) -> list[Row]:
        """Return rows and all that continue them, parents first."""
        gone = {row.key: row for row in doomed}
        if not any(row.children for row in gone.values()):
            return list(gone.values())
        children = defaultdict(list)
        for row in self.all_rows():
            children[row.parent].append(row)
        waiting = list(gone.values())
        while waiting:
            row = waiting.pop()
            gone[row.key] = row
            waiting.extend(child for child in children.get(row.key, ()) if child.key not in gone)
        ordered = [row for row in gone.values() if row.parent not in gone]
        for row in ordered:  # grows: each generation in turn
            ordered.extend(children.get(row.key, ()))
        return ordered

    def is_pinned(self, key: bytes, now: float) -> bool:
        """Whether a block is pinned at this wall time."""
        expires = rows.unpack_expiry(key, self.tables.get(PINS, key))
        return expires is not None and now < expires

    # -- slots ----------------------------------------------------------------------------------------------------

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all slots that have room on the disk."""
        return sum(size * count.allocated for size, count in self.state.slabs.items())

    def release(self, slot_bytes: int, slot: int) -> None:
        """Say that a slot has no owner any more."""
        self.tables.put(VACANT, rows.vacant_key(slot_bytes, ALLOCATED, slot), b"")
        self.state.slabs[slot_bytes].vacant += 1
        self.fresh.add((slot_bytes, slot))

    def shortfall(self, need: Mapping[int, int]) -> int:
        """Return the bytes that must be evicted so that there are ``need[slot_bytes]`` more slots; 0: none."""
        growth, surplus = 0, 0
        for size in need.keys() | self.state.slabs.keys():
            missing = need.get(size, 0) - self.state.slabs.get(size, SlabCount()).vacant
            growth += max(0, missing) * size
            surplus += max(0, -missing) * size if self.slabs.can_punch else 0
        return max(0, self.allocated_bytes + growth - surplus - self.budget_bytes)

    def settle(self, need: Mapping[int, int]) -> bool:
        """Give room back until ``need`` slots fit the budget; whether they can be taken in this transaction already.

        Where not, commit and try again: what was freed here can be used then.
        """
        waiting = Counter(size for size, _ in self.fresh)
        excess = self.allocated_bytes - self.budget_bytes
        spare = {}
        for size in need.keys() | self.state.slabs.keys():
            vacant = self.state.slabs.get(size, SlabCount()).vacant
            excess += max(0, need.get(size, 0) - vacant) * size
            spare[size] = max(0, vacant - need.get(size, 0))
        for size in sorted(spare, reverse=True):
            while excess > 0 and spare[size] > 0 and self._punch_one(size):
                excess -= size
                spare[size] -= 1
        return excess <= 0 and all(
            number <= self.state.slabs[size].vacant - waiting[size] or not waiting[size]
            for size, number in need.items()
            if size in self.state.slabs
        )

    def take(self, slot_bytes: int) -> int | None:
        """Return a slot to write to, or None where there is no room for one."""
        count = self.state.slabs.setdefault(slot_bytes, SlabCount())
        for state in (ALLOCATED, HOLE):
            if state == HOLE and self.allocated_bytes + slot_bytes > self.budget_bytes:
                return None
            if (slot := self._vacant(slot_bytes, state)) is not None:
                self.tables.delete(VACANT, rows.vacant_key(slot_bytes, state, slot))
                count.vacant -= state == ALLOCATED
                count.allocated += state == HOLE
                return slot
        count.slots += 1
        count.allocated += 1
        return count.slots - 1

    def punch_vacant(self) -> int:
        """Give the room of all vacant slots back that were not freed just now; return how many bytes that is."""
        before = self.allocated_bytes
        for size in list(self.state.slabs):
            while self._punch_one(size):
                pass
        return before - self.allocated_bytes

    def vacant_slots(self, slot_bytes: int, state: int) -> Iterator[int]:
        """Yield the vacant slots of a slab in one state, ascending."""
        for key, _ in self.tables.items(VACANT, rows.vacant_key(slot_bytes, state, 0)):
            size, found, slot = rows.unpack_vacant(key)
            if (size, found) != (slot_bytes, state):
                return
            yield slot

    def _vacant(self, slot_bytes: int, state: int) -> int | None:
        """Return the first vacant slot that was not freed just now."""
        slots = self.vacant_slots(slot_bytes, state)
        return next((slot for slot in slots if (slot_bytes, slot) not in self.fresh), None)

    def _punch_one(self, slot_bytes: int) -> bool:
        slot = self._vacant(slot_bytes, ALLOCATED)
        if slot is None or not self.slabs.punch(slot_bytes, slot):
            return False
        # Punched before it is committed: a process killed in between leaves a count too high, never one too low.
        self.tables.delete(VACANT, rows.vacant_key(slot_bytes, ALLOCATED, slot))
        self.tables.put(VACANT, rows.vacant_key(slot_bytes, HOLE, slot), b"")
        count = self.state.slabs[slot_bytes]
        count.vacant -= 1
        count.allocated -= 1
        return True
