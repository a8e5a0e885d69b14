"""Reading ahead: one thread reads records in the order in which they lie, in large pieces, a little before their readers.

To the operating system several readers of a record each look like chance: it asks the disk for little at a time. For one
that reads on and on it asks for megabytes at once, which some disks give three times as fast. What the thread reads it
throws away: the records' readers, who check them, find them in the page cache.
"""

import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Final, NamedTuple

from tierkv.errors import TierKVError
from tierkv.storage.prefix_reader import Found
from tierkv.storage.prefix_slab import SlabFiles

CHUNK_BYTES: Final = 4 << 20
"""Bytes that are asked for at once, in whole slots."""

LEAST_BYTES: Final = 2 * CHUNK_BYTES
"""Less than this is read before a thread is under way."""


class _Chunk(NamedTuple):
    """Slots side by side."""

    slot_bytes: int
    slot: int
    num_slots: int


@contextmanager
def reading_ahead(
    slabs: SlabFiles, found: Sequence[Found], reading: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Read the records of ``found`` ahead of the readers in the block. Does nothing where that would not help.

    Args:
        slabs: where they lie.
        found: in the order in which they will be read.
        reading: keeps the store from being closed; raises ClosedError if it is.
    """
    chunks = _chunks([one for one in found if one.queued is None])
    stop = threading.Event()
    try:
        if sum(chunk.slot_bytes * chunk.num_slots for chunk in chunks) >= LEAST_BYTES:
            with suppress(RuntimeError):  # no thread to be had: everything is read all the same
                threading.Thread(
                    target=_read, args=(slabs, chunks, reading, stop), name="tierkv-read-ahead", daemon=True
                ).start()
        yield
    finally:
        stop.set()


def _chunks(found: Sequence[Found]) -> list[_Chunk]:
    """Return pieces of neighbours, each as large as may be."""
    chunks: list[_Chunk] = []
    for one in found:
        last = chunks[-1] if chunks else _Chunk(0, 0, 0)
        follows = (one.slot_bytes, one.slot) == (last.slot_bytes, last.slot + last.num_slots)
        if follows and (last.num_slots + 1) * last.slot_bytes <= CHUNK_BYTES:
            chunks[-1] = last._replace(num_slots=last.num_slots + 1)
        else:
            chunks.append(_Chunk(one.slot_bytes, one.slot, 1))
    return chunks


def _read(
    slabs: SlabFiles,
    chunks: Sequence[_Chunk],
    reading: Callable[[], AbstractContextManager[None]],
    stop: threading.Event,
) -> None:
    """Read until there is no more, nobody waits for it, or it fails; the records' readers then say how."""
    with suppress(TierKVError, OSError):
        middle, last = chunks[len(chunks) // 2], chunks[-1]
        with reading():
            if all(slabs.is_cached(chunk.slot_bytes, chunk.slot) for chunk in (middle, last)):
                return
        memory = memoryview(mmap.mmap(-1, max(chunk.slot_bytes * chunk.num_slots for chunk in chunks)))
        for chunk in chunks:
            if stop.is_set():
                return
            with reading():
                slabs.read(chunk.slot_bytes, chunk.slot, memory, chunk.num_slots)
