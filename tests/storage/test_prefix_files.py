"""The prefix store's files and manners: private, shared, closed with a stuck disk, and what cannot be opened."""

import os
import threading
import time
from contextlib import ExitStack, suppress

import pytest

from tests.storage.prefixes import (
    MIB,
    NAMESPACE,
    chain,
    check_sound,
    keys_of,
    open_descriptors,
    open_prefixes,
    prefixes,
    put_all,
    read_run,
)  # fmt: skip
from tierkv.errors import ClosedError, StoreError, StoreFull

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
        assert time.monotonic() - began < 10
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


def test_a_full_index_waits_for_those_who_read(tmp_path, monkeypatch):
    with prefixes(tmp_path, 4 * MIB) as store:
        put_all(store, chain(0, 30))
        reading, paused = ExitStack(), []

        def pause(seconds):
            paused.append(seconds)
            reading.close()  # they let go of the pages

        monkeypatch.setattr(store._queue, "pause", pause)
        reading.enter_context(store._parts.index.read())
        deadline = time.monotonic() + 60
        for number in range(1, 10_000):
            put_all(store, chain(number, 6))
            if paused:
                break
            assert time.monotonic() < deadline
        assert read_run(store, chain(number, 6)) == 6
        assert store.stats().failed is None
        assert store.stats().write_failures == 0
        check_sound(store)


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_a_transaction_that_is_tried_again_is_counted_once_and_leaves_nothing_behind(tmp_path, monkeypatch, failures):
    with prefixes(tmp_path, 4 * MIB, write_batch=8) as store:
        number = 0
        while not store.stats().evicted:
            number += 1
            put_all(store, chain(number, 8, 5000))
        before, here = store.stats(), read_run(store, chain(number, 8, 5000), 5000)
        assert here == 8
        assert store.flush(10)
        found = {key: row.found for key, row in rows_of(store, chain(number, 8)).items()}
        left, place = [failures], store._writer._place

        def fails_at_first(book, blocks):
            place(book, blocks)
            if blocks and left[0]:
                left[0] -= 1
                raise StoreFull("the index is full")

        monkeypatch.setattr(store._writer, "_place", fails_at_first)
        monkeypatch.setattr(store._queue, "pause", lambda seconds: None)
        store.touch(keys_of(chain(number, 8)))
        put_all(store, chain(number + 1, 8, 5000))
        after = store.stats()
        assert left == [0]
        assert after.puts - before.puts == 8
        assert after.blocks - before.blocks == 8 - (after.evicted - before.evicted)
        assert after.shed == before.shed
        assert {key: row.found - found[key] for key, row in rows_of(store, chain(number, 8)).items()} == dict.fromkeys(
            found, 1
        )
        check_sound(store)


def rows_of(store, blocks):
    """Return the rows of those blocks that are stored, by key."""
    with store._parts.read() as book:
        found = {key: book.find(key) for key in keys_of(blocks)}
    return {key: row for key, row in found.items() if row is not None and row.stored}


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
