"""PrefixStore where nothing goes wrong: found, read, put, shared."""

import threading
import time
from unittest.mock import Mock

import pytest

from tests.storage.prefixes import (
    MIB,
    NAMESPACE,
    OTHER,
    chain,
    check_sound,
    keys_of,
    payload_of,
    prefixes,
    put_all,
    read_run,
)  # fmt: skip
from tierkv.errors import RecordError
from tierkv.storage.prefix_store import Block

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
                store.match(NAMESPACE, keys_of(blocks))
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


def test_a_long_chain_is_matched_in_one_look_at_the_index(tmp_path, monkeypatch):
    blocks = chain(1, 250, 2000)
    with prefixes(tmp_path) as store:
        put_all(store, blocks)
        index = store._parts.index
        look = Mock(wraps=index.read)
        monkeypatch.setattr(index, "read", look)
        assert len(store.match(NAMESPACE, keys_of(blocks))) == 250
        look.assert_called_once_with()


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
        assert time.monotonic() - began < 5
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
