"""PrefixStore where nothing goes wrong: found, read, evicted, pinned, too old, shared."""

import os
import threading
import time
from contextlib import suppress

import pytest

from tests.storage.prefixes import (
    MIB,
    NAMESPACE,
    OTHER,
    chain,
    check_sound,
    keys_of,
    open_descriptors,
    open_prefixes,
    payload_of,
    prefixes,
    put_all,
    read_run,
)  # fmt: skip
from tierkv.errors import ClosedError, RecordError, StoreError, StoreFull
from tierkv.eviction import POLICIES
from tierkv.storage.prefix_store import Block


@pytest.fixture
def store(tmp_path):
    with prefixes(tmp_path) as store:
        yield store


# -- found and read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 3968, 3969, 100_000])
def test_round_trip_from_the_queue_from_the_file_and_after_a_restart(tmp_path, size):
    blocks = chain(1, 5, size)
    with prefixes(tmp_path) as store:
        for block in blocks:
            assert store.put(NAMESPACE, block)
            assert store.match(NAMESPACE, [block.key])
        assert read_run(store, blocks, size) == 5
        assert store.flush(10)
        assert store.stats().queued_bytes == 0
        assert read_run(store, blocks, size) == 5
        assert check_sound(store) == 5
    with prefixes(tmp_path) as store:
        assert read_run(store, blocks, size) == 5
        assert store.stats().payload_bytes == 5 * size
        assert store.stats().hits == 5


def test_a_match_is_the_leading_run(store):
    blocks = chain(1, 6)
    put_all(store, blocks[:4])
    keys = keys_of(blocks)
    assert [one.key for one in store.match(NAMESPACE, keys)] == keys[:4]
    assert store.match(NAMESPACE, [bytes(32), *keys]) == []
    assert store.match(NAMESPACE, []) == []
    assert store.match(OTHER, keys) == []
    assert (store.stats().hits, store.stats().misses) == (4, 2 + 7 + 6)


def test_whoever_asks_for_other_tokens_or_another_length_gets_a_miss(store):
    (block,) = chain(1, 1)
    for _ in range(2):  # from the queue or the file, then surely from the file
        store.put(NAMESPACE, block)
        (found,) = store.match(NAMESPACE, [block.key])
        for ids, size in ((block.token_ids[:-1], 1000), ((*block.token_ids[:-1], 7), 1000), (block.token_ids, 999)):
            with pytest.raises(RecordError, match="compute it again"):
                store.read(found, ids, size, bytes)
        store.flush(10)
    assert store.stats().collisions == 6
    assert store.stats().damaged == 0
    assert read_run(store, [block]) == 1


def test_a_block_that_was_found_in_the_queue_is_read_from_the_file_later(store):
    (block,) = chain(1, 1)
    store.put(NAMESPACE, block)
    found = store.match(NAMESPACE, [block.key])
    store.flush(10)
    block.payload[1][:] = bytes(len(block.payload[1]))  # written: it is the caller's again
    assert store.read(found[0], block.token_ids, 1000, bytes) == payload_of(block.key, 1000)


def test_use_gets_read_only_bytes_and_may_read_another_block(store):
    blocks = chain(1, 2)
    put_all(store, blocks)
    first, second = store.match(NAMESPACE, keys_of(blocks))

    def use(view):
        assert view.readonly
        other = store.read(second, blocks[1].token_ids, 1000, bytes)
        return bytes(view) + other

    expected = payload_of(blocks[0].key, 1000) + payload_of(blocks[1].key, 1000)
    assert store.read(first, blocks[0].token_ids, 1000, use) == expected
    with pytest.raises(ZeroDivisionError):
        store.read(first, blocks[0].token_ids, 1000, lambda view: 1 // 0)
    assert read_run(store, blocks) == 2


def test_many_threads_read_put_and_match_at_once(store):
    chains = [chain(number, 8, 5000) for number in range(12)]
    errors = []

    def work(part):
        try:
            for blocks in chains[part::3] * 3:
                for block in blocks:
                    store.put(NAMESPACE, block)
                read_run(store, blocks, 5000)
                store.touch(keys_of(blocks))
                store.prefetch(store.match(NAMESPACE, keys_of(blocks)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert store.flush(10)
    assert all(read_run(store, blocks, 5000) == 8 for blocks in chains)
    check_sound(store)


def test_a_match_of_a_long_chain_is_quick(tmp_path):
    blocks = chain(1, 250, 2000)
    with prefixes(tmp_path) as store:
        put_all(store, blocks)
        keys = keys_of(blocks)
        seconds = []
        for _ in range(20):
            began = time.perf_counter()
            assert len(store.match(NAMESPACE, keys)) == 250
            seconds.append(time.perf_counter() - began)
    assert min(seconds) < 0.002


# -- putting ----------------------------------------------------------------------------------------------------------


def test_a_key_that_is_there_is_not_written_again(store):
    blocks = chain(1, 3)
    put_all(store, blocks)
    put_all(store, blocks)
    assert store.stats().puts == 3


def test_a_full_queue_sheds_and_never_waits(tmp_path):
    with prefixes(tmp_path, write_queue_bytes=20_000) as store, store._parts.write():  # the writer waits for us
        began = time.monotonic()
        accepted = [store.put(NAMESPACE, block) for number in range(50) for block in chain(number, 1)]
        assert time.monotonic() - began < 1
        assert 1 < sum(accepted) < 50
        assert 0 <= store.room < 1128
        assert store.stats().shed == 50 - sum(accepted)
    with prefixes(tmp_path) as store:
        assert store.stats().blocks == sum(accepted)


def test_a_child_whose_parent_is_not_there_is_shed(store):
    blocks = chain(1, 3)
    assert not store.put(NAMESPACE, blocks[1])
    put_all(store, blocks[:1])
    assert store.put(NAMESPACE, blocks[1])


def test_a_block_that_could_never_fit_is_shed(store):
    assert not store.put(NAMESPACE, Block(bytes(32), None, (1,), [bytes(7 * MIB)]))
    assert store.stats().shed == 1


def test_close_writes_what_is_queued(tmp_path):
    blocks = chain(1, 200)
    with prefixes(tmp_path) as store:
        for block in blocks:
            store.put(NAMESPACE, block)
    with prefixes(tmp_path) as store:
        assert read_run(store, blocks) == 200


# -- eviction ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", POLICIES)
def test_a_full_store_evicts_and_stays_within_its_capacity(tmp_path, rule):
    with prefixes(tmp_path, 6 * MIB, eviction=rule) as store:
        for number in range(60):
            blocks = chain(number, 6, 20_000)
            put_all(store, blocks)
            assert store.stats().allocated_bytes <= 6 * MIB
            store.touch(keys_of(blocks))
        stats = store.stats()
        assert stats.evicted > 100
        assert stats.blocks * 24_576 > 2.5 * MIB
        assert check_sound(store) == stats.blocks
    with prefixes(tmp_path, 6 * MIB, eviction=rule) as store:
        assert store.stats().blocks == stats.blocks
        check_sound(store)


def test_what_was_found_lately_stays_and_chains_lose_their_ends_first(tmp_path):
    with prefixes(tmp_path, 6 * MIB) as store:
        favourite = chain(0, 6, 20_000)
        put_all(store, favourite)
        for number in range(1, 60):
            put_all(store, chain(number, 6, 20_000))
            assert read_run(store, favourite, 20_000) == 6
            store.touch(keys_of(favourite))
        lengths = [read_run(store, chain(number, 6, 20_000), 20_000) for number in range(60)]
        assert lengths[0] == 6
        assert sum(lengths) == store.stats().blocks


def test_touches_reach_the_file_within_a_second_without_a_put(store):
    blocks = chain(1, 3)
    put_all(store, blocks)
    store.touch(keys_of(blocks))
    deadline = time.monotonic() + 5
    while store.ls()[0].hits < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_pinned_blocks_and_what_they_continue_are_not_evicted(tmp_path):
    kept = chain(0, 5, 20_000)
    with prefixes(tmp_path, 6 * MIB) as store:
        put_all(store, kept)
        store.pin([kept[2].key], None)
        store.flush(10)
    with prefixes(tmp_path, 6 * MIB) as store:
        for number in range(1, 60):
            put_all(store, chain(number, 6, 20_000))
        assert read_run(store, kept, 20_000) == 3
        store.unpin([kept[2].key])
        for number in range(100, 160):
            put_all(store, chain(number, 6, 20_000))
        assert read_run(store, kept, 20_000) == 0


def test_a_pin_ends_by_itself(tmp_path):
    with prefixes(tmp_path, 6 * MIB) as store:
        kept = chain(0, 5, 20_000)
        put_all(store, kept)
        store.pin(keys_of(kept), 0.05)
        time.sleep(0.06)
        for number in range(1, 60):
            put_all(store, chain(number, 6, 20_000))
        assert read_run(store, kept, 20_000) == 0


def test_where_everything_is_pinned_new_blocks_are_shed(tmp_path):
    with prefixes(tmp_path, 5 * MIB) as store:
        number = 0
        while not store.stats().evicted and not store.stats().shed:
            blocks = chain(number, 4, 50_000)
            store.pin(keys_of(blocks), None)
            for block in blocks:
                store.put(NAMESPACE, block)
            store.flush(10)
            number += 1
        before = store.stats()
        assert before.evicted == 0
        assert before.failed is None
        for _ in range(3):
            store.put(NAMESPACE, chain(1000, 1, 50_000)[0])
            store.flush(10)
        assert store.stats().blocks == before.blocks
        check_sound(store)


def test_room_of_other_slot_sizes_is_used_for_new_ones(tmp_path):
    with prefixes(tmp_path, 6 * MIB) as store:
        for number in range(30):
            put_all(store, chain(number, 6, 20_000))
        for number in range(100, 110):
            put_all(store, chain(number, 3, 200_000))
            check_sound(store)
        for number in range(200, 230):
            put_all(store, chain(number, 6, 3_000))
        check_sound(store)
        assert read_run(store, chain(229, 6, 3_000), 3_000) == 6


def test_where_holes_cannot_be_punched_the_store_still_keeps_its_bound(tmp_path):
    with prefixes(tmp_path, 6 * MIB) as store:
        store._parts.slabs._fallocate = None
        for number in range(30):
            put_all(store, chain(number, 6, 20_000))
        for block in chain(100, 3, 200_000):
            store.put(NAMESPACE, block)
        store.flush(10)
        put_all(store, chain(50, 6, 20_000))
        check_sound(store)


@pytest.mark.parametrize("capacity", [5 * MIB, 20 * MIB, 200 * MIB])
def test_another_capacity_at_the_next_open(tmp_path, capacity):
    with prefixes(tmp_path, 100 * MIB) as store:
        for number in range(100):
            put_all(store, chain(number, 40, 4_000))
        before = store.stats()
    with prefixes(tmp_path, capacity) as store:
        stats = store.stats()
        assert stats.allocated_bytes <= capacity
        assert stats.blocks == check_sound(store)
        if capacity > 100 * MIB:
            assert stats.blocks == before.blocks
        put_all(store, chain(1000, 5, 4_000))
        assert read_run(store, chain(1000, 5, 4_000), 4_000) == 5
    with prefixes(tmp_path, None) as store:
        assert store.capacity_bytes == capacity


def test_another_rule_at_the_next_open(tmp_path):
    for rule in [*POLICIES, *POLICIES]:
        with prefixes(tmp_path, 6 * MIB, eviction=rule) as store:
            for number in range(40):
                put_all(store, chain(number, 6, 20_000))
            check_sound(store)


@pytest.mark.slow
@pytest.mark.parametrize("rule", POLICIES)
def test_an_index_that_is_small_for_its_records_evicts_and_never_grows(tmp_path, rule):
    with prefixes(tmp_path, 60 * MIB, eviction=rule) as store:
        for number in range(300):
            put_all(store, chain(number, 40, 100))
            for other in range(max(0, number - 20), number):
                store.touch(keys_of(chain(other, 40, 100)))
        stats = store.stats()
        assert stats.evicted
        assert stats.write_failures == 0
        assert stats.blocks > 500
        assert store._parts.index.map_bytes == 2 * MIB
        assert (store.path / "index" / "data.mdb").stat().st_size <= 2 * MIB
        assert read_run(store, chain(299, 40, 100), 100) == 40
        check_sound(store)


# -- age --------------------------------------------------------------------------------------------------------------


def test_what_is_too_old_is_a_miss_is_dropped_and_can_be_put_again(tmp_path, monkeypatch):
    blocks = chain(1, 5)
    with prefixes(tmp_path, ttl_seconds=1000) as store:
        put_all(store, blocks)
        clock = time.time
        monkeypatch.setattr(time, "time", lambda: clock() + 2000)
        assert store.match(NAMESPACE, keys_of(blocks)) == []
        put_all(store, blocks[:2])
        assert read_run(store, blocks) == 2
        check_sound(store)
        store._writer._sweep_at = 0
        put_all(store, chain(2, 1))
        deadline = time.monotonic() + 5
        while store.stats().expired < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert read_run(store, blocks) == 2
        check_sound(store)


def test_a_clock_that_goes_back_makes_nothing_old(tmp_path, monkeypatch):
    blocks = chain(1, 5)
    clock = time.time
    with prefixes(tmp_path, ttl_seconds=1000) as store:
        monkeypatch.setattr(time, "time", lambda: clock() + 10_000_000)
        put_all(store, blocks)
        monkeypatch.setattr(time, "time", clock)
        assert read_run(store, blocks) == 5
        monkeypatch.setattr(time, "time", lambda: 0.0)
        assert read_run(store, blocks) == 5
        assert store.ls()[0].oldest_seconds == 0
        put_all(store, chain(2, 3))


# -- sighted ----------------------------------------------------------------------------------------------------------


def test_sighted_keys_are_known_at_once_and_after_a_restart(tmp_path):
    keys = keys_of(chain(1, 4))
    with prefixes(tmp_path) as store:
        assert store.sighted(keys[:2]) == [False, False]
        assert store.sighted(keys) == [True, True, False, False]
        store.flush(10)
        assert store.sighted(keys) == [True] * 4
    with prefixes(tmp_path) as store:
        assert store.sighted([*keys, bytes(32)]) == [True] * 4 + [False]


def test_only_so_many_sighted_keys_are_remembered_the_latest(tmp_path):
    with prefixes(tmp_path) as store:
        limit = 2 * MIB // 800
        keys = [os.urandom(32) for _ in range(2 * limit)]
        for begin in range(0, len(keys), 100):
            store.sighted(keys[begin : begin + 100])
            store.flush(10)
        with store._parts.index.read() as tables:
            assert tables.count(b"sighted") <= limit
        assert store.sighted(keys[-1000:]) == [True] * 1000
        assert store.sighted(keys[:100]) == [False] * 100


# -- files, processes' manners ----------------------------------------------------------------------------------------


def test_files_are_private(store):
    put_all(store, chain(1, 3))
    store.namespace(NAMESPACE, {"model": "m"})
    for path in (store.path, *store.path.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_one_store_per_path_shared_by_its_users(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with prefixes(tmp_path) as one, prefixes(tmp_path / "link") as other:
        put_all(one, chain(1, 3))
        assert read_run(other, chain(1, 3)) == 3
        one.close()
        one.close()
        assert read_run(other, chain(1, 3)) == 3
        with pytest.raises(ClosedError, match="is closed"):
            one.match(NAMESPACE, [])
    with pytest.raises(ClosedError):
        other.put(NAMESPACE, chain(1, 1)[0])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_may_not_use_it_and_keeps_nothing_open(tmp_path):
    with prefixes(tmp_path) as store:
        put_all(store, chain(1, 3))
        pid = os.fork()
        if pid == 0:
            try:
                store.match(NAMESPACE, [])
            except ClosedError as error:
                if "belongs to the parent" in str(error):
                    store.close()
                    os._exit(7 if store._parts.folder._use < 0 else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert read_run(store, chain(1, 3)) == 3


def test_close_with_a_stuck_disk_sheds_what_waits_and_a_later_open_ends_it(tmp_path, caplog):
    store = open_prefixes(tmp_path, wait_seconds=0.1)
    put_all(store, chain(0, 1))
    with store._parts.write():  # the writer waits for us
        for block in chain(1, 40):
            store.put(NAMESPACE, block)
        began = time.monotonic()
        store.close()
        assert time.monotonic() - began < 3
        assert "stays open" in caplog.text
        assert store._tally.get("shed") >= 40 - 16
        with pytest.raises(ClosedError):
            store.match(NAMESPACE, [])
        with pytest.raises(StoreError, match="still being closed"):
            open_prefixes(tmp_path)
    store._writer.join(10)
    with prefixes(tmp_path) as again:
        assert read_run(again, chain(0, 1)) == 1
        check_sound(again)


def test_an_index_without_a_free_page_sheds_and_recovers(tmp_path, caplog):
    with prefixes(tmp_path) as store:
        put_all(store, chain(0, 30))
        junk = []
        with pytest.raises(StoreFull):  # noqa: PT012 - which of them is the one too many is LMDB's business
            while True:
                junk.append(os.urandom(32))
                with store._parts.index.write() as tables:
                    tables.put(b"namespaces", junk[-1], bytes(3000))
        for block in chain(1, 8):
            store.put(NAMESPACE, block)
        assert not store.flush(10)
        assert "is full" in store.stats().failed
        assert not store.put(NAMESPACE, chain(2, 1)[0])
        assert read_run(store, chain(0, 1)) == 1
        for key in junk:
            with suppress(StoreFull), store._parts.index.write() as tables:
                tables.delete(b"namespaces", key)
        deadline = time.monotonic() + 10
        while read_run(store, chain(1, 8)) < 8 or not store.flush(1):
            assert time.monotonic() < deadline
            for block in chain(1, 8):
                store.put(NAMESPACE, block)
            time.sleep(0.05)
        assert store.stats().failed is None
        check_sound(store)


@pytest.mark.slow
def test_thousands_of_operations_and_hundreds_of_opens_leave_nothing_behind(tmp_path):
    sizes, descriptors = set(), set()
    for turn in range(200):
        with prefixes(tmp_path, 5 * MIB, write_batch=8) as store:
            for number in range(5):
                blocks = chain(turn % 40 * 5 + number, 10, 9000)
                for block in blocks:
                    store.put(NAMESPACE, block)
                read_run(store, blocks, 9000)
                store.touch(keys_of(blocks))
            store.flush(10)
            assert store.stats().allocated_bytes <= 5 * MIB
        descriptors.add(open_descriptors())
        sizes.add(len(list(store.path.rglob("*"))))
    assert len(descriptors) == 1
    assert max(sizes) - min(sizes) == 0
    with prefixes(tmp_path, 5 * MIB) as store:
        check_sound(store)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tierkv-prefix")]


# -- what cannot be opened --------------------------------------------------------------------------------------------


def test_a_capacity_that_is_too_small(tmp_path):
    with pytest.raises(StoreError, match="too small"):
        open_prefixes(tmp_path, MIB)
    assert list(tmp_path.iterdir()) == []


def test_no_store_to_look_at(tmp_path):
    with pytest.raises(StoreError, match="there is no prefix store"):
        open_prefixes(tmp_path, None)
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_used(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be used") as caught:
        open_prefixes(tmp_path / "file")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": "tierkv prefix store", "version": 2}', "newer tierkv"),
        ('{"format": "tierkv prefix store", "version": 0}', "no tierkv ever wrote"),
        ('{"format": "photos", "version": 1}', "something else"),
        ("[1, 2]", "cannot be read"),
        ("\0\0", "cannot be read"),
        (None, "no format.json"),
    ],
)
def test_a_folder_of_another_format_is_left_alone(tmp_path, text, message):
    with prefixes(tmp_path) as store:
        put_all(store, chain(1, 3))
    path = store.path / "format.json"
    path.unlink() if text is None else path.write_text(text)
    before = {
        entry: (entry.stat().st_mtime_ns, entry.read_bytes()) for entry in store.path.rglob("*") if entry.is_file()
    }
    for _ in range(2):
        with pytest.raises(StoreError, match=message) as caught:
            open_prefixes(tmp_path)
        assert "\n" not in str(caught.value)
    after = {
        entry: (entry.stat().st_mtime_ns, entry.read_bytes()) for entry in store.path.rglob("*") if entry.is_file()
    }
    assert after == before
