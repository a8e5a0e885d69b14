"""LmdbStore where nothing goes wrong: order, read-your-writes, backpressure, one environment."""

import contextlib
import os
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.storage.disks import MIB, is_missing, open_store, read, stalled, wait_until
from tierkv.errors import RecordError, StoreError, StoreFull, TransferTimeout


@pytest.fixture
def store(tmp_path):
    with contextlib.closing(open_store(tmp_path / "store")) as store:
        yield store


# -- bytes in, bytes out ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 2000, 4072, 4073, 100_000, 2 * MIB])
def test_round_trip_from_the_queue_and_from_the_file(store, size):
    value = os.urandom(size)
    with stalled(store):
        store.put(b"key", value)
        assert read(store, b"key") == value
    store.flush()
    assert store.queued_bytes == 0
    assert read(store, b"key") == value


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_a_value(store, kind):
    store.put(b"key", kind(b"value"))
    store.flush()
    assert read(store, b"key") == b"value"


def test_use_gets_read_only_bytes_and_its_answer_and_errors_come_back(store):
    with stalled(store):
        store.put(b"key", bytearray(b"value"))
        assert store.get(b"key", lambda view: (view.readonly, view.format, len(view))) == (True, "B", 5)
    store.flush()
    assert store.get(b"key", lambda view: (view.readonly, view.format, len(view))) == (True, "B", 5)
    with pytest.raises(ZeroDivisionError):
        store.get(b"key", lambda view: 1 // 0)
    assert read(store, b"key") == b"value"


def test_use_may_read_another_key(store):
    store.put(b"a", b"1")
    store.put(b"b", b"2")
    store.flush()
    assert store.get(b"a", lambda view: bytes(view) + read(store, b"b")) == b"12"


def test_a_key_without_a_value(store):
    with pytest.raises(RecordError, match="no record under key 6b6579"):
        read(store, b"key")


@pytest.mark.parametrize("key", [b"", b"k" * 512])
def test_keys_that_lmdb_cannot_hold_are_refused_at_once(store, key):
    with pytest.raises(ValueError, match="1 to 511 bytes"):
        store.put(key, b"value")


def test_a_value_that_can_never_fit_is_refused_and_harms_nothing(store):
    with pytest.raises(StoreFull, match="does not fit"):
        store.put(b"key", bytes(5 * MIB))
    store.put(b"key", b"value")
    store.flush()
    assert store.failed is None


# -- order ------------------------------------------------------------------------------------------------------------


def test_the_newest_value_wins_in_every_state(store):
    with stalled(store) as given:
        store.put(b"key", b"one")
        wait_until(lambda: given)
        store.put(b"key", b"two")
        assert read(store, b"key") == b"two"
        store.put(b"key", b"three")
        assert read(store, b"key") == b"three"
        assert store.queued_bytes == len(b"one") + len(b"three")
    store.flush()
    assert read(store, b"key") == b"three"


def test_a_delete_hides_what_is_being_written_and_what_was(store):
    store.put(b"old", b"value")
    store.flush()
    with stalled(store) as given:
        store.put(b"new", b"value")
        wait_until(lambda: given)
        store.delete([b"old", b"new", b"never"])
        assert is_missing(store, b"old")
        assert is_missing(store, b"new")
    store.flush()
    assert is_missing(store, b"old")
    assert is_missing(store, b"new")


def test_a_put_after_a_delete_stays(store):
    store.put(b"key", b"one")
    store.delete([b"key"])
    store.put(b"key", b"two")
    store.flush()
    assert read(store, b"key") == b"two"


def test_a_delete_of_a_queued_put_frees_its_bytes_and_is_never_written(store):
    with stalled(store) as given:
        store.put(b"first", b"x")
        wait_until(lambda: given)
        store.put(b"key", bytes(1000))
        store.delete([b"key"])
        assert store.queued_bytes == 1
        store.put(b"other", b"y")
        store.cancel([b"other", b"never"])
        assert store.queued_bytes == 1
        assert is_missing(store, b"other")
    store.flush()
    assert is_missing(store, b"key")
    assert is_missing(store, b"other")


def test_cancel_uncovers_what_was_committed(store):
    store.put(b"key", b"old")
    store.flush()
    with stalled(store) as given:
        store.put(b"first", b"x")
        wait_until(lambda: given)
        store.put(b"key", b"new")
        store.cancel([b"key"])
        assert read(store, b"key") == b"old"
    store.flush()
    assert read(store, b"key") == b"old"


def test_batches_are_bounded_and_keep_the_order(store):
    keys = [bytes([index]) for index in range(10)]
    deleted = [bytes([100 + index]) for index in range(40)]
    commit, batches, proceed = store._commit, [], threading.Event()

    def note(batch):
        batches.append(list(batch))
        proceed.wait(10)
        commit(batch)

    store._commit = note
    store.put(b"first", b"x")
    wait_until(lambda: batches)
    for key in keys:
        store.put(key, b"value")
    store.delete(deleted)
    store.put(keys[0], b"again")
    proceed.set()
    store.flush()
    assert [key for batch in batches[1:] for key in batch] == keys + deleted
    assert [len(batch) for batch in batches] == [1, 4, 4, 16, 16, 10]


def test_flush_waits_for_what_was_accepted_before_it(store):
    with stalled(store):
        store.put(b"key", b"value")
        with pytest.raises(TransferTimeout, match=r"within 0\.05 s"):
            store.flush(0.05)
    store.flush()
    assert store.queued_bytes == 0


def test_flush_ends_while_others_go_on_putting(store):
    stop = threading.Event()

    def put_for_ever():
        number = 0
        while not stop.is_set():
            store.put(number.to_bytes(2, "big"), bytes(1000))
            number = (number + 1) % 1000

    thread = threading.Thread(target=put_for_ever)
    thread.start()
    try:
        for _ in range(5):
            store.flush(10)
    finally:
        stop.set()
        thread.join()


operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 5), st.binary(max_size=9000)),
        st.tuples(st.just("delete"), st.integers(0, 5), st.none()),
        st.tuples(st.just("flush"), st.none(), st.none()),
        st.tuples(st.just("pause"), st.none(), st.none()),
    ),
    max_size=60,
)


@settings(max_examples=40)
@given(operations)
def test_it_behaves_like_a_dict(tmp_path_factory, script):
    model: dict[bytes, bytes] = {}
    with contextlib.closing(open_store(tmp_path_factory.mktemp("dict") / "store", write_batch=2)) as store:
        for verb, number, value in script:
            if verb == "put":
                store.put(bytes([number]), value)
                model[bytes([number])] = value
            elif verb == "delete":
                store.delete([bytes([number])])
                model.pop(bytes([number]), None)
            elif verb == "flush":
                store.flush()
            else:
                time.sleep(0.001)
            for key in (bytes([index]) for index in range(6)):
                assert is_missing(store, key) if key not in model else read(store, key) == model[key]


# -- backpressure -----------------------------------------------------------------------------------------------------


def test_a_full_queue_makes_put_wait_and_never_exceeds_its_bound(tmp_path):
    with contextlib.closing(open_store(tmp_path / "store", 64 * MIB, write_queue_bytes=50_000)) as store:
        written = {index.to_bytes(2, "big"): os.urandom(7_000) for index in range(300)}

        def put(part):
            for key in list(written)[part::3]:
                store.put(key, written[key])

        threads = [threading.Thread(target=put, args=(part,)) for part in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 0 < store.peak_queued_bytes <= 50_000
        assert all(read(store, key) == value for key, value in written.items())


def test_put_waits_for_room_only_so_long(tmp_path):
    with contextlib.closing(open_store(tmp_path / "store", write_queue_bytes=1000, wait_seconds=0.05)) as store:
        with stalled(store):
            store.put(b"a", bytes(900))
            with pytest.raises(TransferTimeout, match="stayed full"):
                store.put(b"b", bytes(200))
            assert is_missing(store, b"b")
            store.put(b"c", bytes(100))
        store.put(b"b", bytes(200))


def test_a_value_larger_than_the_queue_is_accepted_when_it_is_empty(tmp_path):
    with contextlib.closing(open_store(tmp_path / "store", write_queue_bytes=1000)) as store:
        for key in (b"a", b"b", b"c"):
            store.put(key, bytes(5000))
        store.flush()
        assert store.peak_queued_bytes == 5000


def test_replacing_a_queued_value_needs_room_only_for_the_difference(tmp_path):
    options = {"write_queue_bytes": 1000, "wait_seconds": 0.05}
    with contextlib.closing(open_store(tmp_path / "store", **options)) as store, stalled(store) as given:
        store.put(b"first", bytes(100))
        wait_until(lambda: given)
        store.put(b"key", bytes(900))
        store.put(b"key", bytes(900))
        assert store.queued_bytes == 1000


# -- files ------------------------------------------------------------------------------------------------------------


def test_files_are_private_and_within_the_capacity(store):
    store.put(b"key", os.urandom(3 * MIB))
    store.flush()
    assert store.path.stat().st_mode & 0o777 == 0o700
    for name in ("data.mdb", "lock.mdb"):
        assert (store.path / name).stat().st_mode & 0o777 == 0o600
    assert 3 * MIB < store.allocated_bytes <= 8 * MIB


def test_a_durable_store_is_there_again(tmp_path):
    values = {bytes([index]): os.urandom(20_000) for index in range(40)}
    with contextlib.closing(open_store(tmp_path / "store", durable=True)) as store:
        for key, value in values.items():
            store.put(key, value)
        # No flush: close writes what is queued.
    with contextlib.closing(open_store(tmp_path / "store", durable=True)) as store:
        assert all(read(store, key) == value for key, value in values.items())


def test_one_environment_per_path_per_process(store, tmp_path):
    (tmp_path / "link").symlink_to(store.path)
    for path in (store.path, tmp_path / "link"):
        with pytest.raises(StoreError, match="already open in this process") as caught:
            open_store(path)
        assert "\n" not in str(caught.value)
    store.put(b"key", b"value")
    store.flush()
    store.close()
    open_store(store.path).close()


def test_two_stores_side_by_side(tmp_path):
    with contextlib.closing(open_store(tmp_path / "a")) as one, contextlib.closing(open_store(tmp_path / "b")) as other:
        one.put(b"key", b"1")
        other.put(b"key", b"2")
        assert (read(one, b"key"), read(other, b"key")) == (b"1", b"2")


def test_a_store_larger_than_the_new_capacity_is_not_opened(tmp_path):
    with contextlib.closing(open_store(tmp_path / "store", durable=True)) as store:
        store.put(b"key", os.urandom(3 * MIB))
    with pytest.raises(StoreError, match="raise the capacity"):
        open_store(tmp_path / "store", capacity=2 * MIB)
    open_store(tmp_path / "store").close()


def test_a_path_that_cannot_be_used(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="cannot use") as caught:
            open_store(path)
        assert "\n" not in str(caught.value)
