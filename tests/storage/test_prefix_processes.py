"""Processes that share a prefix store, and disks that refuse."""

import os
import subprocess
import sys

import pytest

from tests.storage.disks import mounted
from tests.storage.prefix_child import size_of
from tests.storage.prefixes import MIB, chain, check_sound, open_prefixes, prefixes, put_all, read_run
from tests.storage.test_prefix_crash import ROOT, kill, start
from tierkv.errors import StoreError


def outcome(child):
    """Return what a child said, once it has ended well."""
    out, error = child.communicate(timeout=60)
    assert child.returncode == 0, out + error
    return out.split()


def test_two_processes_that_write_the_same_keys(tmp_path):
    children = [start("fill", tmp_path, 16 * MIB, 0, 20) for _ in range(2)]
    for child in children:
        assert outcome(child) == ["open", "done"]
    with prefixes(tmp_path, 16 * MIB) as store:
        assert all(read_run(store, chain(number, 6, size_of(number)), size_of(number)) == 6 for number in range(20))
        assert check_sound(store) == store.stats().blocks == 120


def test_one_verifies_while_others_evict_and_put(tmp_path):
    with prefixes(tmp_path, 5 * MIB) as store:
        put_all(store, chain(0, 6, size_of(0)))
        children = [start("verify", tmp_path, 5 * MIB, 3), start("fill", tmp_path, 5 * MIB, 0, 60)]
        for number in range(60):
            put_all(store, chain(number, 6, size_of(number)))
        words = [outcome(child) for child in children]
        assert int(words[0][1]) > 100
        check_sound(store)
        assert store.stats().damaged == 0


def test_whoever_has_it_open_sees_what_another_writes_and_frees(tmp_path):
    with prefixes(tmp_path) as store:
        assert read_run(store, chain(3, 6, size_of(3)), size_of(3)) == 0
        assert outcome(start("fill", tmp_path, 8 * MIB, 3, 1)) == ["open", "done"]
        assert read_run(store, chain(3, 6, size_of(3)), size_of(3)) == 6
        assert outcome(start("find", tmp_path, 8 * MIB, 3)) == ["6"]
        assert store.clear() == 6
        assert outcome(start("find", tmp_path, 8 * MIB, 3)) == ["0"]


def test_only_the_last_to_leave_writes_the_digest(tmp_path):
    child = start("hold", tmp_path, 8 * MIB)
    assert child.stdout.readline() == "open\n"
    with prefixes(tmp_path) as store:
        put_all(store, chain(1, 3))
        assert not store._parts.folder.alone
    digest = tmp_path / "prefix" / "index.digest"
    assert not digest.exists()
    assert outcome(child) == ["done"]
    assert digest.exists()
    child = start("hold", tmp_path, 8 * MIB)
    assert child.stdout.readline() == "open\n"
    assert not digest.exists()
    kill(child)
    assert not digest.exists()


@pytest.mark.parametrize("seed", ["0", "1"])
def test_keys_do_not_depend_on_the_hash_seed(tmp_path, seed):
    with prefixes(tmp_path) as store:
        put_all(store, chain(3, 8, size_of(3)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.storage.prefix_child", "find", str(tmp_path), str(8 * MIB), "3"],
        cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == ["8"]


# -- disks that refuse ------------------------------------------------------------------------------------------------


def test_files_that_may_not_grow_any_more(tmp_path):
    words = outcome(start("limited", tmp_path, 64 * MIB, 400_000))
    assert words[-1] == "recovered"
    with prefixes(tmp_path, 64 * MIB) as store:
        check_sound(store)
        assert read_run(store, chain(0, 3, 5000), 5000) == 3


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MiB."""
    with mounted(tmp_path, "4m") as where:
        yield where


def test_a_file_system_that_is_full(small_disk, caplog):
    with prefixes(small_disk, 64 * MIB) as store:
        put_all(store, chain(0, 3, 20_000))
        for number in range(1, 100):
            for block in chain(number, 6, 20_000):
                store.put(block.key and b"n" * 32, block)
        store.flush(10)
        stats = store.stats()
        assert stats.write_failures
        # LMDB reports what it could write only a part of as an error of the device.
        assert "No space left" in stats.failed or "Input/output error" in stats.failed
        assert not store.put(b"n" * 32, chain(1000, 1)[0])
        assert read_run(store, chain(0, 3, 20_000), 20_000) == 3
    # Once for each time that it begins to fail: in between a batch may find room.
    assert 1 <= len([record for record in caplog.records if "goes on without" in record.message]) <= 3
    with prefixes(small_disk, 64 * MIB) as store:
        check_sound(store)
        assert read_run(store, chain(0, 3, 20_000), 20_000) == 3
        assert store.gc(budget_bytes=500_000).evicted
        put_all(store, chain(2000, 6, 20_000))


def test_a_file_system_that_is_full_before_the_store_is_made(small_disk):
    (small_disk / "ballast").write_bytes(bytes(4 * MIB - 8192))
    with pytest.raises(StoreError) as caught:
        open_prefixes(small_disk, 64 * MIB)
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_written_to(small_disk):
    with prefixes(small_disk, 64 * MIB) as store:
        put_all(store, chain(0, 3))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    try:
        with pytest.raises(StoreError, match=r"disk\.path|Read-only") as caught:
            open_prefixes(small_disk, 64 * MIB)
        assert "\n" not in str(caught.value)
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    with prefixes(small_disk, 64 * MIB) as store:
        assert read_run(store, chain(0, 3)) == 3
