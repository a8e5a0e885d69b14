"""WriteQueue: values on their way to a store, bounded in bytes, readable until they are committed.

One operation per key: a newer one takes the place of an older one that has not been taken yet, which then never costs
a write. Operations leave in the order in which their keys were first queued.
"""

import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

from tierkv.errors import ClosedError, StoreError, StoreFull, TransferTimeout
from tierkv.storage.codec import Buffer

_DELETES_PER_PUT = 4


class Operation(NamedTuple):
    """A put, or a delete where ``value`` is None."""

    sequence: int
    value: Buffer | None
    size: int


class WriteQueue:
    """Between any number of threads that put and one that writes. Every method is safe to interrupt with Ctrl-C."""

    def __init__(self, owner: str, limit_bytes: int, wait_seconds: float) -> None:
        """Make an empty queue.

        Args:
            owner: named in errors.
            limit_bytes: bytes that may be queued. A larger value is accepted when nothing else is queued.
            wait_seconds: longest wait of a put for room.
        """
        self.failed: StoreError | None = None
        self.queued_bytes = 0
        self.peak_bytes = 0
        self._owner = owner
        self._limit_bytes = limit_bytes
        self._wait_seconds = wait_seconds
        self._waiting: dict[bytes, Operation] = {}
        self._writing: dict[bytes, Operation] = {}
        self._sequence = 0
        self._closed = False
        # The condition is entered through its plain lock: entering a Condition itself runs Python code that Ctrl-C
        # could leave with the lock held.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)

    def put(self, key: bytes, value: Buffer) -> None:
        """Accept a value, waiting for room.

        Raises:
            StoreFull: writing has failed; nothing was accepted.
            TransferTimeout: the queue stayed full; nothing was accepted.
            ClosedError: the queue is closed.
        """
        size = memoryview(value).nbytes
        deadline = time.monotonic() + self._wait_seconds
        with self._lock:
            while True:
                self._check_open()
                if self.failed is not None:
                    raise StoreFull(f"{self._owner} takes no more values: {self.failed}") from self.failed
                others = self._bytes_without(key)
                if others == 0 or others + size <= self._limit_bytes:
                    break
                self._wait(deadline, f"the write queue of {self._owner} stayed full for {self._wait_seconds:g} s")
            self._changed.notify_all()
            self._accept(key, value, size)

    def delete(self, keys: Iterable[bytes]) -> None:
        """Queue deletes. Never waits; bytes of puts that had not been taken are given back."""
        with self._lock:
            self._check_open()
            self._changed.notify_all()
            for key in keys:
                self._accept(key, None, 0)

    def cancel(self, keys: Iterable[bytes]) -> None:
        """Drop operations that had not been taken."""
        with self._lock:
            self._check_open()
            self._changed.notify_all()
            for key in keys:
                if key in self._waiting:
                    remaining = self._bytes_without(key)
                    del self._waiting[key]
                    self.queued_bytes = remaining

    def find(self, keys: Iterable[bytes]) -> dict[bytes, Operation]:
        """Return the newest uncommitted operation under each of the keys that has one."""
        with self._lock:
            if not self._waiting and not self._writing:
                return {}
            found = ((key, self._waiting.get(key) or self._writing.get(key)) for key in keys)
            return {key: operation for key, operation in found if operation is not None}

    def wait_written(self, timeout_seconds: float) -> None:
        """Wait until everything accepted before this call has been written.

        Raises:
            StoreError: writing has failed.
            TransferTimeout: it took longer.
            ClosedError: the queue was closed meanwhile.
        """
        deadline = time.monotonic() + timeout_seconds
        with self._lock:
            last = self._sequence
            while True:
                oldest = next(iter((self._writing or self._waiting).values()), None)
                if oldest is None or oldest.sequence > last:
                    return
                if self.failed is not None:
                    raise StoreError(str(self.failed)) from self.failed
                self._check_open()
                self._wait(deadline, f"{self._owner} did not write its queue within {timeout_seconds:g} s")

    def close(self, *, drop: bool) -> None:
        """Accept nothing more; ``take`` then ends when the queue is empty, at once if ``drop``."""
        with self._lock:
            self._closed = True
            if drop:
                self._waiting.clear()
                self.queued_bytes = sum(operation.size for operation in self._writing.values())
            self._changed.notify_all()

    # -- the writer's side ----------------------------------------------------------------------------------------

    def take(self, num_puts: int) -> dict[bytes, Operation]:
        """Wait for operations and take the oldest; they stay readable until ``finish``. Empty: closed and done.

        Deletes are many and light, but what one transaction frees is one entry of LMDB's free list, which needs pages
        side by side: so they are limited too.
        """
        with self._lock:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            puts = 0
            for key, operation in self._waiting.items():
                if puts == num_puts or len(self._writing) == num_puts * _DELETES_PER_PUT:
                    break
                puts += operation.value is not None
                self._writing[key] = operation
            for key in self._writing:
                del self._waiting[key]
            return self._writing

    def finish(self) -> None:
        """Say that what was taken last has been written."""
        with self._lock:
            self.queued_bytes -= sum(operation.size for operation in self._writing.values())
            self._writing = {}
            self._changed.notify_all()

    def fail(self, error: StoreError) -> None:
        """Accept no more puts. What is queued, and what was taken and not finished, stays readable."""
        with self._lock:
            for key in self._waiting.keys() & self._writing.keys():
                self.queued_bytes -= self._writing[key].size
            self._waiting = self._writing | self._waiting
            self._writing = {}
            self.failed = error
            self._changed.notify_all()

    # -- under the lock -------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self._owner} is closed")

    def _wait(self, deadline: float, message: str) -> None:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TransferTimeout(message)
        self._changed.wait(remaining)

    def _bytes_without(self, key: bytes) -> int:
        """Return the queued bytes other than those that a new operation under ``key`` would replace."""
        old = self._waiting.get(key)
        return self.queued_bytes - (old.size if old else 0)

    def _accept(self, key: bytes, value: Buffer | None, size: int) -> None:
        old = self._waiting.get(key)
        sequence = old.sequence if old else self._sequence + 1
        operation = Operation(sequence, value, size)
        queued = self._bytes_without(key) + size
        # No call from here on: Python delivers Ctrl-C at calls, so a count cannot part from what it counts.
        if sequence > self._sequence:
            self._sequence = sequence
        self._waiting[key] = operation
        self.queued_bytes = queued
        if queued > self.peak_bytes:
            self.peak_bytes = queued
