"""What the prefix store forgets and what it remembers: rules, pins, age, sightings."""

import os
import time

import pytest

from tests.storage.prefixes import (
    MIB,
    NAMESPACE,
    chain,
    check_sound,
    keys_of,
    prefixes,
    put_all,
    read_run,
)  # fmt: skip
from tierkv.eviction import POLICIES

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
