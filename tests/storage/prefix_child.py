"""Programs for tests that need another process. Run as ``python -m tests.storage.prefix_child VERB ROOT ...``.

Each says on stdout what it does, a word a line. Wrong bytes end it with a traceback and status 1.
"""

import contextlib
import random
import resource
import signal
import sys
import time
from collections.abc import Callable

from tests.storage.prefixes import (
    NAMESPACE,
    chain,
    keys_of,
    open_prefixes,
    put_all,
    read_run,
)  # fmt: skip
from tierkv.errors import RecordError, StoreError
from tierkv.eviction import POLICIES

CHAINS = 60
SIZES = (1000, 5000, 20_000)


def say(word):
    print(word, flush=True)  # noqa: T201 - this is how it answers


def size_of(number):
    """Return the payload bytes of all blocks of a chain, the same in every process."""
    return SIZES[number % len(SIZES)]


def churn(root, capacity, seed):
    """Do everything that a store can, in random order, until killed."""
    dice = random.Random(int(seed))
    rule = dice.choice(list(POLICIES))  # processes that disagree about it harm each other's choices, nothing else
    store = open_prefixes(root, int(capacity), write_batch=4, wait_seconds=20.0, eviction=rule)
    say("open")
    while True:
        number = dice.randrange(CHAINS)
        size = size_of(number)
        blocks = chain(number, dice.randrange(1, 9), size)
        for block in blocks:
            store.put(NAMESPACE, block)
        read_run(store, blocks, size)
        chance = dice.random()
        if chance < 0.3:
            store.touch(keys_of(blocks))
        elif chance < 0.4:
            store.sighted(keys_of(blocks))
        elif chance < 0.5:
            store.pin(keys_of(blocks), 0.01)
        elif chance < 0.6:
            store.flush(10)
        elif chance < 0.61:
            store.gc(budget_bytes=int(capacity) // 3)
        elif chance < 0.612:
            store.clear(None if chance < 0.611 else NAMESPACE)
        elif chance < 0.63:
            assert store.verify(repair=False).bad == []
        elif chance < 0.66:
            store.close()
            store = open_prefixes(root, int(capacity), write_batch=4, wait_seconds=20.0, eviction=rule)


def fill(root, capacity, first, number):
    """Put so many chains and close."""
    store = open_prefixes(root, int(capacity))
    say("open")
    for index in range(int(first), int(first) + int(number)):
        put_all(store, chain(index, 6, size_of(index)))
    store.close()
    say("done")


def verify(root, capacity, seconds):
    """Verify again and again for so long, while others change the store."""
    store = open_prefixes(root, int(capacity))
    say("open")
    ends = time.monotonic() + float(seconds)
    checked = 0
    while time.monotonic() < ends:
        report = store.verify(repair=True)
        assert report.bad == [], report.bad
        checked += report.checked
        for number in range(CHAINS):
            read_run(store, chain(number, 8, size_of(number)), size_of(number))
    assert store.stats().damaged == 0
    store.close()
    say(f"{checked}")


def find(root, capacity, number):
    """Say how much of a chain is there."""
    store = open_prefixes(root, int(capacity))
    say(f"{read_run(store, chain(int(number), 8, size_of(int(number))), size_of(int(number)))}")
    store.close()


def hold(root, capacity):
    """Open the store and wait until stdin is closed."""
    store = open_prefixes(root, int(capacity))
    say("open")
    sys.stdin.read()
    store.close()
    say("done")


def limited(root, capacity, limit):
    """Write to a store whose files the kernel lets grow to ``limit`` bytes only, then without that limit."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = open_prefixes(root, int(capacity))
    put_all(store, chain(0, 3, 5000))
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), most))
    for number in range(1, 100):
        for block in chain(number, 6, 5000):
            store.put(NAMESPACE, block)
        with contextlib.suppress(RecordError):
            read_run(store, chain(0, 3, 5000), 5000)
        if not store.flush(10):
            break
    stats = store.stats()
    assert stats.write_failures, stats
    assert stats.failed is not None
    assert "\n" not in stats.failed
    assert read_run(store, chain(0, 3, 5000), 5000) == 3
    say(stats.failed)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    deadline = time.monotonic() + 30
    last = chain(1000, 3, 5000)
    while read_run(store, last, 5000) < 3 or not store.flush(10):
        assert time.monotonic() < deadline
        for block in last:
            store.put(NAMESPACE, block)
        time.sleep(0.05)
    assert store.stats().failed is None
    store.close()
    say("recovered")


VERBS: dict[str, Callable[..., None]] = {
    "churn": churn,
    "fill": fill,
    "verify": verify,
    "find": find,
    "hold": hold,
    "limited": limited,
}

if __name__ == "__main__":
    try:
        VERBS[sys.argv[1]](*sys.argv[2:])
    except StoreError as error:
        say(f"StoreError: {error}")
        raise
