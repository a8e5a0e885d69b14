"""LmdbStores for tests, and ways to look at one and to hold its writer up."""

import contextlib
import os
import subprocess
import threading
import time

import pytest

from tierkv.errors import RecordError
from tierkv.storage.disk import LmdbStore

MIB = 1 << 20


def open_store(path, capacity=8 * MIB, **options):
    defaults = {"write_batch": 4, "write_queue_bytes": MIB, "durable": False}
    return LmdbStore(path, capacity, **(defaults | options))


@contextlib.contextmanager
def stalled(store):
    """Hold the writer inside its next transactions for as long as the block runs; say which keys it was given."""
    commit, proceed, given = store._commit, threading.Event(), []

    def wait(batch):
        given.append(list(batch))
        assert proceed.wait(30)
        commit(batch)

    store._commit = wait
    try:
        yield given
    finally:
        store._commit = commit
        proceed.set()


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def read(store, key):
    return store.get(key, bytes)


def is_missing(store, key):
    try:
        read(store, key)
    except RecordError:
        return True
    return False


@contextlib.contextmanager
def mounted(folder, size):
    """Mount a file system of a size ("2m") below a folder, where that is possible; it is full sooner than the store."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    where = folder / "small"
    where.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(where)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)
