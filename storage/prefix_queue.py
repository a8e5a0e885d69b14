"""ShedQueue: blocks and notes on their way to the prefix store. Bounded; what does not fit is refused, nobody waits.

Notes are everything else that a write transaction does: hits to count, pins, keys that were sighted, records that were
found damaged. They are small, bounded in number, and may wait a while; blocks are written at once.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tierkv.errors import ClosedError
from tierkv.storage.codec import Buffer

_MOST_NOTES: Final = 65536
_NOTES_WAIT_SECONDS: Final = 1.0
SIGHT_BYTES: Final = 8
"""Of a key, as many bytes are remembered of one that was only sighted."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block to be put.

    Attributes:
        key: 32 bytes.
        parent: key of the block before it; None for the first of a sequence.
        token_ids: of its tokens.
        payload: pieces of its KV, in order. They must not change until they are written.
        cost: seconds to compute it again, for the eviction rule ``cost``.
    """

    key: bytes
    parent: bytes | None
    token_ids: tuple[int, ...]
    payload: Sequence[Buffer]
    cost: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Queued:
    """A block that waits, with its namespace and its size as a record."""

    namespace: bytes
    block: Block
    record_bytes: int
    payload_bytes: int


@dataclass(slots=True)
class Notes:
    """What else the next transaction is to do.

    Attributes:
        touched: keys that were found, with how often; the last block of a chain comes first.
        pins: keys to pin with their expiry (seconds since 1970), or None to unpin, in the order they were asked for.
        holds: keys to pin until an expiry at least; a pin that lasts longer stays.
        sighted: first bytes of keys that were sighted.
        damaged: keys with the stamps of damaged records, and the wall time they were found at.
    """

    touched: dict[bytes, int] = field(default_factory=dict)
    pins: dict[bytes, float | None] = field(default_factory=dict)
    holds: dict[bytes, float] = field(default_factory=dict)
    sighted: dict[bytes, None] = field(default_factory=dict)
    damaged: dict[bytes, tuple[int, float]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.touched or self.pins or self.holds or self.sighted or self.damaged)

    def urgent(self) -> bool:
        """Whether they should not wait."""
        return bool(self.pins or self.holds or self.damaged)


class ShedQueue:
    """Between any number of threads that put and one that writes."""

    def __init__(self, owner: str, limit_bytes: int) -> None:
        """Make an empty queue.

        Args:
            owner: named in errors.
            limit_bytes: record bytes that may wait, those being written included.
        """
        self.queued_bytes = 0
        self.peak_queued_bytes = 0
        self._owner = owner
        self._limit_bytes = limit_bytes
        self._waiting: dict[bytes, Queued] = {}
        self._writing: dict[bytes, Queued] = {}
        self._notes = Notes()
        self._writing_notes = Notes()
        self._notes_since = 0.0
        self._puts = self._puts_finished = 0
        self._takes = self._takes_finished = 0
        self._hurry = False
        self.closed = False
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    @property
    def room(self) -> int:
        """Bytes that it can take now."""
        return max(0, self._limit_bytes - self.queued_bytes)

    def put(self, queued: Queued) -> bool:
        """Accept a block, unless it does not fit; one that waits already is not taken twice.

        Raises:
            ClosedError: the queue is closed.
        """
        with self._lock:
            self._check_open()
            key = queued.block.key
            if key in self._waiting or key in self._writing:
                return True
            if self.queued_bytes + queued.record_bytes > self._limit_bytes:
                return False
            self._waiting[key] = queued
            self.queued_bytes += queued.record_bytes
            self.peak_queued_bytes = max(self.peak_queued_bytes, self.queued_bytes)
            self._puts += 1
            self._changed.notify_all()
            return True

    def find(self, keys: Iterable[bytes]) -> dict[bytes, Queued]:
        """Return those blocks that are not written yet."""
        with self._lock:
            if not self._waiting and not self._writing:
                return {}
            found = ((key, self._waiting.get(key) or self._writing.get(key)) for key in keys)
            return {key: queued for key, queued in found if queued is not None}

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note that the blocks of a chain were found; beyond a bound they are not counted."""
        with self._lock:
            for key in reversed(keys):
                touched = self._notes.touched
                if len(touched) < _MOST_NOTES:
                    touched[key] = touched.pop(key, 0) + 1
            self._noted()

    def pin(self, pins: dict[bytes, float | None]) -> None:
        """Note pins."""
        with self._lock:
            self._check_open()
            for key, expires in pins.items():
                self._notes.pins.pop(key, None)
                self._notes.pins[key] = expires
            self._noted()

    def hold(self, key: bytes, expires: float) -> None:
        """Note that a block is pinned until then at least."""
        with self._lock:
            self._check_open()
            self._notes.holds[key] = expires
            self._noted()

    def waits_sighted(self, starts: Sequence[bytes]) -> list[bool]:
        """Say which first bytes of keys wait to be noted."""
        with self._lock:
            return [start in self._notes.sighted or start in self._writing_notes.sighted for start in starts]

    def sight(self, starts: Sequence[bytes]) -> None:
        """Note that keys with these first bytes were sighted."""
        with self._lock:
            if len(self._notes.sighted) < _MOST_NOTES:
                self._notes.sighted.update(dict.fromkeys(starts))
            self._noted()

    def report_damage(self, key: bytes, stamp: int) -> None:
        """Note that the record of this write is damaged."""
        with self._lock:
            if len(self._notes.damaged) < _MOST_NOTES:
                self._notes.damaged[key] = stamp, time.time()
            self._noted()

    def damaged(self) -> dict[bytes, int]:
        """Return the stamps of the records that were found damaged and are not out of the index yet, by key.

        To be asked before a read of the index begins: what is not named here any more is out of what that read sees.
        """
        with self._lock:
            noted = {**self._writing_notes.damaged, **self._notes.damaged}
            return {key: stamp for key, (stamp, _) in noted.items()}

    def protected(self) -> set[bytes]:
        """Return the keys of blocks that those which wait continue."""
        with self._lock:
            waiting = (*self._waiting.values(), *self._writing.values())
            return {queued.block.parent for queued in waiting if queued.block.parent is not None}

    def wait_finished(self, timeout_seconds: float, unless: Callable[[], bool] = lambda: False) -> bool:
        """Wait until everything accepted before this call is done with; False if that took longer, or ``unless``."""
        with self._lock:
            puts, takes = self._puts, self._takes + bool(self._notes)
            self._hurry = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (self._puts_finished >= puts and self._takes_finished >= takes) or unless(), timeout_seconds
            )
            return self._puts_finished >= puts and self._takes_finished >= takes

    def close(self) -> None:
        """Accept nothing more."""
        with self._lock:
            self.closed = True
            self._changed.notify_all()

    # -- the writer's side ----------------------------------------------------------------------------------------

    def take(self, num_blocks: int, num_bytes: int, idle_seconds: float) -> tuple[list[Queued], Notes] | None:
        """Wait for work and take the oldest; blocks stay readable until ``finish``. None: closed and all done.

        Args:
            num_blocks: at most so many blocks.
            num_bytes: at most so many record bytes, but one block at least.
            idle_seconds: return without work after so long.
        """
        deadline = time.monotonic() + idle_seconds
        with self._lock:
            while not self._due():
                if self.closed:
                    return None
                now = time.monotonic()
                if now >= deadline:
                    return [], Notes()
                ends = min(deadline, self._notes_since + _NOTES_WAIT_SECONDS) if self._notes else deadline
                self._changed.wait(max(0.0, ends - now))
            taken: dict[bytes, Queued] = {}
            for key, queued in self._waiting.items():
                num_bytes -= queued.record_bytes
                if taken and (num_bytes < 0 or len(taken) == num_blocks):
                    break
                taken[key] = queued
            for key in taken:
                del self._waiting[key]
            self._writing = taken
            self._writing_notes, self._notes = self._notes, Notes()
            self._takes += 1
            self._notes_since = 0.0
            self._hurry = False
            return list(taken.values()), self._writing_notes

    def finish(self) -> None:
        """Say that what was taken last is done with, written or not."""
        with self._lock:
            self.queued_bytes -= sum(queued.record_bytes for queued in self._writing.values())
            self._writing, self._writing_notes = {}, Notes()
            self._puts_finished = self._puts - len(self._waiting)
            self._takes_finished = self._takes
            self._changed.notify_all()

    def put_back(self, notes: Notes) -> None:
        """Keep notes that could not be written for the next time; newer ones win."""
        with self._lock:
            for name in ("touched", "pins", "holds", "sighted", "damaged"):
                old, new = getattr(notes, name), getattr(self._notes, name)
                setattr(self._notes, name, {**old, **new} if len(old) + len(new) <= _MOST_NOTES else new)
            self._notes_since = time.monotonic()

    def shed(self) -> int:
        """Drop the blocks and notes that wait; return how many blocks."""
        with self._lock:
            number = len(self._waiting)
            self.queued_bytes -= sum(queued.record_bytes for queued in self._waiting.values())
            self._waiting, self._notes = {}, Notes()
            self._puts_finished = self._puts
            self._takes = self._takes_finished = self._takes + 1
            self._changed.notify_all()
            return number

    def pause(self, seconds: float) -> None:
        """Wait so long, or until the queue is closed."""
        with self._lock:
            self._changed.wait_for(lambda: self.closed, seconds)

    # -- under the lock -------------------------------------------------------------------------------------------

    def _due(self) -> bool:
        if self._waiting:
            return True
        waited = time.monotonic() - self._notes_since
        return bool(self._notes) and (
            self._notes.urgent() or self._hurry or self.closed or waited >= _NOTES_WAIT_SECONDS
        )

    def _noted(self) -> None:
        """Say that there are notes: the first of them sets the clock, urgent ones wake the writer."""
        if not self._notes_since:
            self._notes_since = time.monotonic()
        self._changed.notify_all()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"{self._owner} is closed")
