"""PrefixCare: what a person, or the command line, does with a prefix store while others use it."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tierkv.errors import ClosedError, StoreError
from tierkv.storage.prefix_check import GcReport, NamespaceInfo, VerifyReport, clear, collect, list_namespaces, verify
from tierkv.storage.prefix_export import ExportReport, chain_of, write_chain
from tierkv.storage.prefix_shared import SharedStore


class PrefixCare:
    """The part of ``PrefixStore`` that looks after it.

    Attributes:
        path: its directory, ``<root>/prefix``.
        capacity_bytes: bound on the allocated bytes of everything in it.
    """

    def __init__(self, shared: SharedStore) -> None:
        """Use an open store; ``open`` is how to get one."""
        self.path = shared.parts.folder.path
        self.capacity_bytes = shared.parts.capacity_bytes
        self._shared = shared
        self._parts = shared.parts
        self._queue = shared.queue
        self._writer = shared.writer
        self._reader = shared.reader
        self._tally = shared.tally
        self._closed = False

    def ls(self) -> list[NamespaceInfo]:
        """Return what is stored of each namespace, the largest first.

        Raises:
            StoreError: the index cannot be read.
        """
        self.check_open()
        with self._reader.reading():
            return list_namespaces(self._parts)

    def verify(self, *, repair: bool, on_progress: Callable[[int, int], None] | None = None) -> VerifyReport:
        """Read and check every record; ``repair`` has bad ones taken out. What is evicted meanwhile is not bad.

        Args:
            repair: take bad records out of the index, and use their slots no more (until ``gc``).
            on_progress: called now and then with the number of records checked and of all.

        Raises:
            StoreError: the index cannot be read.
        """
        self.check_open()
        with self._reader.reading():
            report = verify(self._parts, self._reader, repair=repair, on_progress=on_progress)
        if repair:
            self._queue.wait_finished(self._shared.wait_seconds)
        return report

    def gc(self, *, budget_bytes: int | None = None, max_age_seconds: float | None = None) -> GcReport:
        """Forget blocks that are too many, too old or of a broken chain, and give back all room that nobody uses.

        Args:
            budget_bytes: most bytes on the disk that records may take; None: as many as now.
            max_age_seconds: blocks older than this go, pinned ones and what they continue aside; None: none.

        Raises:
            StoreError: the store cannot be written to.
        """
        self.check_open()
        with self._reader.reading(), self._writable():
            return collect(self._parts, budget_bytes=budget_bytes, max_age_seconds=max_age_seconds)

    def clear(self, namespace: bytes | None = None) -> int:
        """Forget all blocks of a namespace, or of all, pinned ones too; return how many there were.

        Raises:
            StoreError: the store cannot be written to.
        """
        self.check_open()
        with self._reader.reading(), self._writable():
            return clear(self._parts, namespace)

    def export(self, leaf: bytes, path: str | os.PathLike[str]) -> ExportReport:
        """Write a block and all that it continues to one file, in place of one that is there.

        Args:
            leaf: key of the last block.
            path: of the file.

        Raises:
            StoreError: the file cannot be written, or a block is not there or damaged.
        """
        self.check_open()
        with self._reader.reading():
            chain, manifest = chain_of(self._parts, leaf)
            return write_chain(Path(path), chain, manifest, self._reader.use_row)

    def close(self) -> None:
        """Stop using the store. Idempotent.

        The last user in this process writes what is queued, within ``wait_seconds``, sheds the rest, and lets go of the
        files.
        """
        if not self._closed:
            self._closed = True
            self._shared.release()

    def check_open(self) -> None:
        """Raise ClosedError if the store is closed, or belongs to the process that this one was forked from."""
        self._shared.check_process()
        if self._closed or self._queue.closed:
            raise ClosedError(f"the prefix store {self.path} is closed")

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"the prefix store {self.path} cannot be written to: {error.strerror or error}") from error
