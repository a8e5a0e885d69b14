"""LmdbStores for tests, and ways to look at one and to hold its writer up."""

import contextlib
import threading
import time

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
