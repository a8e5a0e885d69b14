"""How much fits: a store that holds all it promised is overwritten at random, and never runs out of room or bounds."""

import contextlib
import random
import threading
import time

import pytest

from tierkv.errors import RecordError
from tierkv.storage.codec import PAGE_BYTES
from tierkv.storage.disk import LmdbStore
from tierkv.storage.disk_room import map_bytes, usable_records, usable_sets

MIB = 1 << 20


def key_of(number):
    # 64 bytes, the longest that the promise holds for, spread over the whole index.
    return random.Random(number).randbytes(64)


def open_store(path, capacity, write_batch):
    return LmdbStore(path, capacity, write_batch=write_batch, write_queue_bytes=MIB, durable=False)


def churn(monkeypatch, path, capacity, sizes, write_batch, rounds, num_sets, readers=0):
    """Overwrite and delete at random; return how often the store had to make room, and its largest file size."""
    rng = random.Random(1)
    numbers = list(range(num_sets * len(sizes)))
    values = [bytes([index]) * size for index, size in enumerate(sizes)]
    with contextlib.closing(open_store(path, capacity, write_batch)) as store:
        rescues: list[int] = []
        wrong: list[int] = []
        peak, stop = 0, threading.Event()
        drain = store._gate.without_readers

        def note():
            rescues.append(1)
            return drain()

        monkeypatch.setattr(store._gate, "without_readers", note)

        def read():
            own = random.Random(2)
            while not stop.is_set():
                number = own.choice(numbers)
                with contextlib.suppress(RecordError):
                    wrong.extend({store.get(key_of(number), lambda view: view[-1])} - {number % len(sizes)})
                # On a machine with few cores, threads that never pause would take turns with the writer for minutes.
                time.sleep(0.0002)

        threads = [threading.Thread(target=read) for _ in range(readers)]
        for thread in threads:
            thread.start()
        try:
            for round_ in range(rounds + 1):
                rng.shuffle(numbers)
                for position, number in enumerate(numbers):
                    if round_ % 3 == 2 and position % 7 == 0:
                        store.delete([key_of(number)])
                    store.put(key_of(number), values[number % len(sizes)])
                store.flush()
                peak = max(peak, store.allocated_bytes)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not wrong
        for number in numbers:
            assert store.get(key_of(number), len) == sizes[number % len(sizes)]
        return len(rescues), peak


@pytest.mark.parametrize(
    ("capacity", "record_bytes", "write_batch", "least_filled"),
    [
        (16 * MIB, 16 * PAGE_BYTES - 24, 4, 0.87),
        (16 * MIB, 16 * PAGE_BYTES - 24, 1, 0.92),
        (16 * MIB, 3 * PAGE_BYTES, 16, 0.87),
        (8 * MIB, 1000, 16, 0.85),
        (64 * MIB, 737_280, 2, 0.8),
    ],
)
def test_a_full_store_can_be_overwritten_for_ever(
    monkeypatch, tmp_path, capacity, record_bytes, write_batch, least_filled
):
    count = usable_records(capacity, record_bytes, write_batch)
    pages = -(-(record_bytes + 24) // PAGE_BYTES)
    assert count * pages * PAGE_BYTES / capacity >= least_filled
    rescues, peak = churn(monkeypatch, tmp_path / "store", capacity, [record_bytes], write_batch, 6, count)
    assert rescues == 0
    assert peak <= capacity


def test_readers_do_not_take_the_room_away(monkeypatch, tmp_path):
    # Small values and batches: many commits pass while a reader waits for its turn with its transaction open.
    count = usable_records(8 * MIB, 4 * PAGE_BYTES - 24, 4)
    _, peak = churn(monkeypatch, tmp_path / "store", 8 * MIB, [4 * PAGE_BYTES - 24], 4, 12, count, readers=3)
    assert peak <= 8 * MIB


def test_a_store_that_is_full_for_a_slow_reader_waits_for_it(tmp_path):
    size = 16 * PAGE_BYTES - 24
    count = usable_records(8 * MIB, size, 4)
    with contextlib.closing(open_store(tmp_path / "store", 8 * MIB, 4)) as store:
        for number in range(count):
            store.put(key_of(number), bytes(size))
        store.flush()
        inside = threading.Event()

        def use(view):
            inside.set()
            time.sleep(0.8)  # longer than commits wait for it, while they use up what is free
            return view[0]

        reader = threading.Thread(target=store.get, args=(key_of(0), use))
        reader.start()
        inside.wait(10)
        for number in range(count):
            store.put(key_of(number), b"\1" * size)
        store.flush()
        reader.join()
        assert store.failed is None
        assert all(store.get(key_of(number), lambda view: view[0]) == 1 for number in range(count))


@pytest.mark.parametrize("pages", [(16, 8), (17, 11, 7, 3), (16, 2, 2, 2, 2, 2)])
def test_records_of_several_sizes_fit_in_any_order(monkeypatch, tmp_path, pages):
    sizes = [count * PAGE_BYTES - 24 for count in pages]
    num_sets = usable_sets(16 * MIB, sizes, 4)
    assert num_sets * sum(sizes) >= 0.75 * 16 * MIB
    rescues, peak = churn(monkeypatch, tmp_path / "store", 16 * MIB, sizes, 4, 6, num_sets)
    assert rescues == 0
    assert peak <= 16 * MIB


def test_large_stores_are_used_almost_whole():
    assert usable_records(100 << 30, 128 * 1024, 16) * 33 * PAGE_BYTES > 0.98 * (100 << 30)


@pytest.mark.parametrize("capacity", [0, 1000, 65536, 200_000])
def test_a_tiny_capacity_holds_nothing(capacity):
    assert usable_records(capacity, 100_000, 16) == 0
    assert 0 <= map_bytes(capacity) <= capacity
