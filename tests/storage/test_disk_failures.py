"""LmdbStore where things go wrong: no room, damaged files, a stuck disk. Nothing accepted is lost."""

import contextlib
import logging
import os
import threading
import time

import lmdb
import pytest

from tests.storage.disks import mounted
from tierkv.errors import RecordError, StoreError, StoreFull, TransferTimeout
from tierkv.storage.codec import Expected, RecordHeader, decode, encode
from tierkv.storage.disk import LmdbStore

MIB = 1 << 20
NAMESPACE = bytes(range(32))


def open_store(path, capacity=8 * MIB, **options):
    defaults = {"write_batch": 4, "write_queue_bytes": 4 * MIB, "durable": False}
    return LmdbStore(path, capacity, **(defaults | options))


def fill(store, size=100_000, limit=10_000):
    """Put until the store refuses; return what it accepted."""
    accepted = {}
    with contextlib.suppress(StoreFull):
        for number in range(limit):
            value = number.to_bytes(4, "big") * (size // 4)
            store.put(number.to_bytes(4, "big"), value)
            accepted[number.to_bytes(4, "big")] = value
    return accepted


def check_failed_store(store, accepted, caplog):
    """A store that failed: serves all it accepted, takes nothing, says so once, and ends cleanly."""
    assert all(store.get(key, bytes) == value for key, value in accepted.items())
    for _ in range(2):
        with pytest.raises(StoreFull, match="takes no more values") as caught:
            store.put(b"one more", b"value")
        assert "\n" not in str(caught.value)
    with pytest.raises(StoreError):
        store.flush(5)
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1
    key = next(reversed(accepted))
    queued = store.queued_bytes
    store.delete([key])
    assert store.queued_bytes == queued - len(accepted[key])
    with pytest.raises(RecordError):
        store.get(key, bytes)
    store.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tierkv-lmdb")]


def test_a_map_that_is_full(tmp_path, caplog):
    store = open_store(tmp_path / "store", 2 * MIB)
    accepted = fill(store)
    assert isinstance(store.failed, StoreFull)
    assert "MAP_FULL" in str(store.failed)
    assert sum(map(len, accepted.values())) > 2 * MIB
    assert store.allocated_bytes <= 2 * MIB
    check_failed_store(store, accepted, caplog)


def test_a_put_that_waits_for_room_hears_of_the_failure(tmp_path):
    with contextlib.closing(open_store(tmp_path / "store", write_queue_bytes=1000)) as store:
        commit, proceed = store._commit, threading.Event()

        def fail(batch):
            proceed.wait(10)
            commit({b"": next(iter(batch.values()))})  # LMDB refuses an empty key

        store._commit = fail
        store.put(b"a", bytes(900))
        waiting = threading.Timer(0.05, proceed.set)
        waiting.start()
        with pytest.raises(StoreFull):
            store.put(b"b", bytes(900))
        waiting.join()
        assert store.get(b"a", len) == 900


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB."""
    with mounted(tmp_path, "2m") as where:
        yield where


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_system_that_is_full(small_disk, caplog, durable):
    store = open_store(small_disk / "store", 64 * MIB, durable=durable)
    accepted = fill(store)
    assert store.failed is not None
    assert "bytes free on its file system" in str(store.failed)
    assert sum(map(len, accepted.values())) > 2 * MIB
    check_failed_store(store, accepted, caplog)


def test_a_file_system_that_was_full_leaves_a_store_that_opens(small_disk):
    store = open_store(small_disk / "store", 64 * MIB, durable=True)
    fill(store)
    store.close()
    with contextlib.closing(open_store(small_disk / "store", 64 * MIB, durable=True)) as store:
        assert store.get((0).to_bytes(4, "big"), len) == 100_000
        # What a commit frees can be used two commits later.
        for numbers in (range(8), range(8, 9)):
            store.delete(number.to_bytes(4, "big") for number in numbers)
            store.flush()
        store.put(b"again", bytes(50_000))
        store.flush()


@pytest.mark.parametrize("pages", [0, 1, 2, 3, 5])
def test_a_file_system_that_is_full_before_the_store_is_made(small_disk, pages):
    """With room for a part of LMDB's lock file, which it maps: a page that is missing would end the process (SIGBUS)."""
    store = small_disk / "store"
    store.mkdir()
    with contextlib.suppress(OSError), (small_disk / "ballast").open("wb") as ballast:
        while True:
            ballast.write(bytes(4096))
            ballast.flush()
    with (small_disk / "ballast").open("r+b") as ballast:
        ballast.truncate(ballast.seek(0, os.SEEK_END) - pages * 4096)
    with pytest.raises(StoreError) as caught:
        open_store(store, 64 * MIB)
    assert "\n" not in str(caught.value)


# -- damage -----------------------------------------------------------------------------------------------------------


def record(number):
    return encode(RecordHeader(NAMESPACE, 0, number, 1), (), [bytes([number]) * 20_000])


def test_each_flipped_byte_of_a_value_in_the_real_file_is_found(tmp_path):
    with contextlib.closing(open_store(tmp_path / "store", durable=True)) as store:
        store.put(b"key", record(7))
    path = tmp_path / "store" / "data.mdb"
    whole = path.read_bytes()
    start = whole.index(record(7)[:200])
    for offset in [*range(0, 96, 7), 96, 97, 5000, 20_000, len(record(7)) - 1]:
        damaged = bytearray(whole)
        damaged[start + offset] ^= 0x10
        path.write_bytes(damaged)
        with contextlib.closing(open_store(tmp_path / "store", durable=True)) as store, pytest.raises(RecordError):
            store.get(b"key", lambda view: decode(view, Expected(namespace=NAMESPACE, layer=0)))


def test_a_value_that_something_else_wrote_is_found(tmp_path):
    with contextlib.closing(open_store(tmp_path / "store", durable=True)) as store:
        store.put(b"key", record(7))
    with (
        lmdb.open(str(tmp_path / "store"), map_size=8 * MIB, lib_version=0) as environment,
        environment.begin(write=True) as transaction,
    ):
        transaction.put(b"key", record(7)[:-1])
    with contextlib.closing(open_store(tmp_path / "store", durable=True)) as store, pytest.raises(RecordError):
        store.get(b"key", decode)


def test_a_file_that_is_cut_off_is_refused_before_it_is_mapped(tmp_path):
    with contextlib.closing(open_store(tmp_path / "store", durable=True)) as store:
        fill(store, limit=20)
    os.truncate(tmp_path / "store" / "data.mdb", MIB)
    for _ in range(2):
        with pytest.raises(StoreError, match="cut off"):
            open_store(tmp_path / "store")


@pytest.mark.parametrize("noise", [b"", b"x", bytes(8192), b"noise" * 10_000])
def test_a_file_that_is_no_store(tmp_path, noise):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "data.mdb").write_bytes(noise)
    if not noise:
        open_store(tmp_path / "store").close()
        return
    with pytest.raises(StoreError, match="cannot open") as caught:
        open_store(tmp_path / "store")
    assert "\n" not in str(caught.value)


def test_close_with_a_stuck_disk_says_so_and_can_be_repeated(tmp_path):
    store = open_store(tmp_path / "store", wait_seconds=0.1)
    commit, proceed = store._commit, threading.Event()
    store._commit = lambda batch: (proceed.wait(10), commit(batch))
    store.put(b"key", b"value")
    time.sleep(0.05)
    with pytest.raises(TransferTimeout, match="still in use"):
        store.close()
    proceed.set()
    store._writer.join()
    store.close()
