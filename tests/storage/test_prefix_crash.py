"""The prefix store where processes are killed: it opens by itself, nothing it serves is wrong, nothing leaks."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.storage.prefix_child import CHAINS, size_of
from tests.storage.prefixes import MIB, NAMESPACE, chain, check_sound, keys_of, prefixes, put_all, read_run

ROOT = Path(__file__).resolve().parents[2]
CAPACITY = 5 * MIB


def start(verb, *arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.storage.prefix_child", verb, *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def kill(child):
    """Kill a child that must still be running."""
    child.kill()
    _, error = child.communicate(timeout=30)
    assert child.returncode == -signal.SIGKILL, error


def kill_many(root, number, seed, *, together, on_check=lambda: None):
    """Start and kill children on one store, ``together`` at a time; look at it after each kill."""
    dice = random.Random(seed)
    running: list[tuple[subprocess.Popen[str], float]] = []
    for turn in range(1, number + 1):
        while len(running) < together:
            running.append((start("churn", root, CAPACITY, dice.randrange(1 << 30)), time.monotonic()))
        child, began = running.pop(0)
        # From the middle of the imports to the middle of the work.
        time.sleep(max(0.0, dice.uniform(0.08, 0.35) - (time.monotonic() - began)))
        kill(child)
        if turn % 25 == 0 or turn == number:
            while running:
                kill(running.pop()[0])
            with prefixes(root, CAPACITY) as store:
                check_sound(store)
        elif turn % 3 == 0:
            with prefixes(root, CAPACITY) as store:
                for which in dice.sample(range(CHAINS), 10):
                    read_run(store, chain(which, 8, size_of(which)), size_of(which))
                assert store.stats().damaged == 0
                assert store.stats().allocated_bytes <= CAPACITY + 4 * 24_576  # of a batch that was never committed
        on_check()


@pytest.mark.slow
@pytest.mark.parametrize("together", [1, 3])
def test_processes_that_are_killed_at_any_moment(tmp_path, caplog, together):
    kill_many(tmp_path, 110, seed=together, together=together)
    assert "damaged" not in caplog.text
    assert "mended" not in caplog.text
    with prefixes(tmp_path, CAPACITY) as store:
        put_all(store, chain(5000, 6, 20_000))
        assert read_run(store, chain(5000, 6, 20_000), 20_000) == 6
        check_sound(store)


def test_a_few_processes_that_are_killed(tmp_path, caplog):
    kill_many(tmp_path, 6, seed=9, together=2)
    assert "damaged" not in caplog.text


@pytest.mark.parametrize("where", ["write", "sync", "punch", "insert"])
def test_killed_between_the_steps_of_a_transaction(tmp_path, where):
    code = f"""
import os, signal
from tests.storage.prefixes import *
from tierkv.eviction import LRU
from tierkv.storage.prefix_slab import SlabFiles
store = open_prefixes({str(tmp_path)!r}, {CAPACITY})
for number in range(30):
    put_all(store, chain(number, 6, 20_000))
assert store.stats().evicted
owner = LRU if {where!r} == "insert" else SlabFiles
step = getattr(owner, {where!r})
count = 0
def killed(*arguments):
    global count
    count += 1
    result = step(*arguments)
    if count == 2 or {where!r} != "write":
        os.kill(os.getpid(), signal.SIGKILL)
    return result
setattr(owner, {where!r}, killed)
for number in range(100, 120):
    for block in chain(number, 6, 100_000):
        store.put(NAMESPACE, block)
    store.flush(10)
"""
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True)
    assert child.returncode == -signal.SIGKILL, child.stderr
    with prefixes(tmp_path, CAPACITY) as store:
        check_sound(store)
        assert sum(read_run(store, chain(number, 6, 20_000), 20_000) for number in range(30)) > 10
        put_all(store, chain(1000, 6, 100_000))
        assert read_run(store, chain(1000, 6, 100_000), 100_000) == 6
        check_sound(store)


def test_a_store_that_was_killed_is_whole_without_being_emptied(tmp_path):
    child = start("hold", tmp_path, 8 * MIB)
    assert child.stdout.readline() == "open\n"
    kill(child)
    with prefixes(tmp_path) as store:
        put_all(store, chain(1, 8))
    child = start("hold", tmp_path, 8 * MIB)
    assert child.stdout.readline() == "open\n"
    kill(child)
    with prefixes(tmp_path) as store:
        assert not store._parts.folder.clean
        assert read_run(store, chain(1, 8)) == 8
        assert keys_of(chain(1, 8)) == [one.key for one in store.match(NAMESPACE, keys_of(chain(1, 9)))]
    with prefixes(tmp_path) as store:
        assert store._parts.folder.clean
