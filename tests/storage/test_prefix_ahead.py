"""Reading ahead: in order, in large pieces, only where it helps; and never in anybody's way."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tierkv.benchmarks.machine import drop_page_cache
from tierkv.errors import ClosedError
from tierkv.storage.prefix_ahead import CHUNK_BYTES, LEAST_BYTES, reading_ahead
from tierkv.storage.prefix_queue import Block, Queued
from tierkv.storage.prefix_reader import Found
from tierkv.storage.prefix_slab import SlabFiles

MIB = 2**20
SLOTS = 24


def found(slot: int, slot_bytes: int = MIB, queued: Queued | None = None) -> Found:
    return Found(bytes(32), bytes([slot]) * 32, 1, slot_bytes, slot, 32, slot_bytes - 1024, queued)


@contextmanager
def nobody_closes() -> Iterator[None]:
    yield


class Recorder(SlabFiles):
    """Real files that keep the reads of more than one byte: slot and number of slots."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reads: list[tuple[int, int]] = []
        self.hold = threading.Event()
        self.hold.set()

    def read(self, slot_bytes: int, slot: int, view: memoryview, num_slots: int = 1) -> int:
        self.hold.wait(10)
        self.reads.append((slot, num_slots))
        return super().read(slot_bytes, slot, view, num_slots)


@pytest.fixture
def slabs(tmp_path: Path) -> Iterator[Recorder]:
    files = Recorder(tmp_path)
    for slot in range(SLOTS):
        files.write(MIB, slot, bytes([slot]) * MIB)
    files.sync(MIB)
    if drop_page_cache(tmp_path):
        pytest.skip("this file system keeps its pages in memory, so there is nothing to read ahead")
    yield files
    files.close()


def wait_until_gone() -> None:
    deadline = time.monotonic() + 10
    while any(thread.name == "tierkv-read-ahead" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_it_reads_neighbours_together_and_leaves_them_in_the_page_cache(slabs: Recorder) -> None:
    assert not slabs.is_cached(MIB, SLOTS - 1)
    with reading_ahead(slabs, [found(slot) for slot in range(SLOTS)], nobody_closes):
        wait_until_gone()
    per_chunk = CHUNK_BYTES // MIB
    assert slabs.reads == [(slot, per_chunk) for slot in range(0, SLOTS, per_chunk)]
    assert all(slabs.is_cached(MIB, slot) for slot in range(SLOTS))


def test_it_does_nothing_where_the_page_cache_has_them_already(slabs: Recorder) -> None:
    blocks = [found(slot) for slot in range(SLOTS)]
    with reading_ahead(slabs, blocks, nobody_closes):
        wait_until_gone()
    slabs.reads.clear()
    with reading_ahead(slabs, blocks, nobody_closes):
        wait_until_gone()
    assert slabs.reads == []


def test_it_does_nothing_for_a_few(slabs: Recorder) -> None:
    with reading_ahead(slabs, [found(slot) for slot in range(LEAST_BYTES // MIB - 1)], nobody_closes):
        wait_until_gone()
    assert slabs.reads == []


def test_scattered_slots_are_read_in_the_order_of_their_readers(slabs: Recorder) -> None:
    order = [5, 6, 7, 1, 3, 20, 21, 9, 11, 13]
    with reading_ahead(slabs, [found(slot) for slot in order], nobody_closes):
        wait_until_gone()
    assert slabs.reads == [(5, 3), (1, 1), (3, 1), (20, 2), (9, 1), (11, 1), (13, 1)]


def test_blocks_that_are_not_written_yet_are_not_looked_for(slabs: Recorder) -> None:
    queued = Queued(bytes(32), Block(bytes(32), None, (1,), [b"payload"]), 200, 7)
    blocks = [found(0, queued=queued), *(found(slot) for slot in range(10, SLOTS)), found(0, queued=queued)]
    with reading_ahead(slabs, blocks, nobody_closes):
        wait_until_gone()
    assert sorted(slot for first, count in slabs.reads for slot in range(first, first + count)) == [*range(10, SLOTS)]


def test_it_stops_when_nobody_reads_any_more(slabs: Recorder) -> None:
    slabs.hold.clear()
    with reading_ahead(slabs, [found(slot) for slot in range(SLOTS)], nobody_closes):
        pass
    slabs.hold.set()
    wait_until_gone()
    assert len(slabs.reads) <= 1


def test_an_error_in_the_block_stops_it_and_is_passed_on(slabs: Recorder) -> None:
    slabs.hold.clear()
    with pytest.raises(KeyboardInterrupt), reading_ahead(slabs, [found(s) for s in range(SLOTS)], nobody_closes):
        raise KeyboardInterrupt
    slabs.hold.set()
    wait_until_gone()
    assert len(slabs.reads) <= 1


@pytest.mark.parametrize("error", [ClosedError("closed"), OSError(5, "Input/output error")])
def test_what_it_cannot_read_is_left_to_the_readers(slabs: Recorder, error: Exception) -> None:
    def refuse() -> AbstractContextManager[None]:
        raise error

    with reading_ahead(slabs, [found(slot) for slot in range(SLOTS)], refuse):
        wait_until_gone()
    assert slabs.reads == []


def test_a_file_that_was_cut_off_does_not_stop_it(slabs: Recorder) -> None:
    os.truncate(slabs.path(MIB), 10 * MIB)
    with reading_ahead(slabs, [found(slot) for slot in range(SLOTS)], nobody_closes):
        wait_until_gone()
    assert len(slabs.reads) == SLOTS // (CHUNK_BYTES // MIB)


def test_where_the_system_does_not_say_what_is_cached_it_reads(
    slabs: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierkv.storage.prefix_slab._NO_WAIT", 0)
    blocks = [found(slot) for slot in range(SLOTS)]
    for _ in range(2):
        slabs.reads.clear()
        with reading_ahead(slabs, blocks, nobody_closes):
            wait_until_gone()
        assert slabs.reads
