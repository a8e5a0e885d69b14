"""Chains of blocks whose bytes follow from their keys, and what must be true of any prefix store at any time."""

import contextlib
import hashlib
import time
from pathlib import Path

from tierkv.errors import RecordError
from tierkv.keys import chain_keys
from tierkv.storage.prefix_repair import audit
from tierkv.storage.prefix_store import Block, PrefixStore

MIB = 1 << 20
NAMESPACE = hashlib.sha256(b"namespace").digest()
OTHER = hashlib.sha256(b"another namespace").digest()
TOKENS = 4


def payload_of(key, size):
    """Return the only bytes that may ever be read under a key."""
    return (hashlib.sha256(key).digest() * (size // 32 + 1))[:size]


def chain(number, length, size=1000, namespace=NAMESPACE):
    """Return the blocks of a sequence; equal numbers give equal sequences, in every process."""
    ids = [number * 1000 + index for index in range(length * TOKENS)]
    blocks, parent = [], None
    for index, key in enumerate(chain_keys(namespace, ids, TOKENS)):
        whole = payload_of(key, size)
        parts = (whole[: size // 3], bytearray(whole[size // 3 :]))
        blocks.append(Block(key, parent, tuple(ids[index * TOKENS : (index + 1) * TOKENS]), parts))
        parent = key
    return blocks


def keys_of(blocks):
    return [block.key for block in blocks]


def open_prefixes(root, capacity=8 * MIB, **options):
    return PrefixStore.open(root, capacity, **({"write_queue_bytes": 4 * MIB} | options))


@contextlib.contextmanager
def prefixes(root, capacity=8 * MIB, **options):
    store = open_prefixes(root, capacity, **options)
    try:
        yield store
    finally:
        store.close()


def put_all(store, blocks, namespace=NAMESPACE):
    """Put blocks, waiting where the queue is full, and have them written."""
    for block in blocks:
        deadline = time.monotonic() + 20
        while not store.put(namespace, block):
            assert time.monotonic() < deadline
            time.sleep(0.002)
    assert store.flush(20)


def read_run(store, blocks, size=1000, namespace=NAMESPACE):
    """Read the leading run that is there; return how long it is. Wrong bytes fail, misses end it."""
    found = store.match(namespace, keys_of(blocks))
    for index, (one, block) in enumerate(zip(found, blocks, strict=False)):
        try:
            assert store.read(one, block.token_ids, size, bytes) == payload_of(block.key, size)
        except RecordError:
            return index
    return len(found)


def check_sound(store, *, exact=True):
    """Index, order, counts, slots and files agree; every record is whole; nothing is larger than it may be."""
    with store._parts.read() as book:
        assert audit(book) == []
        slabs = dict(book.state.slabs)
    folder = store._parts.folder
    assert folder.allocated_bytes() <= store.capacity_bytes
    for size, count in slabs.items():
        length, allocated = store._parts.slabs.measure(size)
        assert length <= count.slots * size
        slack = 4096 * (1 + count.slots // 300)  # the file system's own lists
        assert allocated <= count.allocated * size + slack
        assert not exact or allocated >= count.allocated * size
    report = store.verify(repair=False)
    assert report.bad == []
    return report.checked


def files_below(path):
    return sorted(entry for entry in path.rglob("*") if entry.is_file())


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))
