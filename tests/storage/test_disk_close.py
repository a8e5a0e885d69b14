"""LmdbStore at its end: closed, interrupted, collected, forked, or left open when the interpreter exits."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.storage.disks import open_store, read, stalled, wait_until
from tierkv.errors import ClosedError


@pytest.fixture
def store(tmp_path):
    with contextlib.closing(open_store(tmp_path / "store")) as store:
        yield store


# -- the end ----------------------------------------------------------------------------------------------------------


def test_close_is_final_and_can_be_repeated(store):
    store.put(b"key", b"value")
    store.close()
    store.close()
    for use in (
        lambda: store.put(b"key", b"value"),
        lambda: read(store, b"key"),
        lambda: store.delete([b"key"]),
        lambda: store.cancel([b"key"]),
    ):
        with pytest.raises(ClosedError, match="closed"):
            use()


def open_descriptors():
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def test_nothing_is_left_after_close(tmp_path):
    descriptors = open_descriptors()
    threads = set(threading.enumerate())
    for round_ in range(3):
        store = open_store(tmp_path / f"store{round_}")
        for index in range(50):
            store.put(bytes([index]), bytes(10_000))
            read(store, bytes([index]))
        store.close()
    assert set(threading.enumerate()) == threads
    assert open_descriptors() == descriptors
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_close_lets_a_put_that_waits_for_room_go(tmp_path):
    store = open_store(tmp_path / "store", write_queue_bytes=1000)
    outcome = []

    def put():
        try:
            store.put(b"b", bytes(900))
        except ClosedError as error:
            outcome.append(error)

    with stalled(store) as given:
        store.put(b"a", bytes(900))
        wait_until(lambda: given)
        thread = threading.Thread(target=put)
        thread.start()
        time.sleep(0.05)
        closer = threading.Thread(target=store.close)
        closer.start()
        thread.join(10)
    closer.join(10)
    assert len(outcome) == 1


def test_close_waits_for_readers(store):
    store.put(b"key", b"value")
    store.flush()
    inside, proceed, seen = threading.Event(), threading.Event(), []

    def use(view):
        inside.set()
        proceed.wait(10)
        return bytes(view)

    reader = threading.Thread(target=lambda: seen.append(store.get(b"key", use)))
    reader.start()
    inside.wait(10)
    closer = threading.Thread(target=store.close)
    closer.start()
    time.sleep(0.1)
    assert closer.is_alive()
    proceed.set()
    reader.join()
    closer.join()
    assert seen == [b"value"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_refused_and_does_no_harm(store):
    store.put(b"key", b"value")
    store.flush()
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (lambda: store.put(b"key", b"x"), lambda: read(store, b"key"), lambda: store.delete([b"key"])):
            try:
                use()
            except ClosedError:
                refused += 1
        store.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert read(store, b"key") == b"value"
    store.put(b"more", b"value")
    store.flush()


FORGETFUL = """
import sys
from tierkv.storage.disk import LmdbStore
store = LmdbStore(sys.argv[1], 8 << 20, write_batch=4, write_queue_bytes=1 << 20, durable=True)
for index in range(40):
    store.put(bytes([index]), bytes([index]) * 5000)
"""


def test_a_process_that_ends_without_close_has_written_everything(tmp_path):
    subprocess.run([sys.executable, "-c", FORGETFUL, str(tmp_path / "store")], check=True, timeout=60)
    with contextlib.closing(open_store(tmp_path / "store", durable=True)) as store:
        assert all(read(store, bytes([index])) == bytes([index]) * 5000 for index in range(40))


INTERRUPTED = """
import os, random, signal, sys, threading, time
from tierkv.storage.disk import LmdbStore

def handle(*_):
    # One Ctrl-C a round: a second one would hit the test's own except clause.
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt

def interrupt():
    while not done:
        time.sleep(random.random() / 300)
        os.kill(os.getpid(), signal.SIGINT)

def use_it():
    for number in range(1, 1000):
        store.put(number.to_bytes(2, "big"), value)
        assert store.get(number.to_bytes(2, "big"), len) == 3000
        if number % 50 == 0:
            store.delete([(number - 1).to_bytes(2, "big")])
            store.flush(20)

armed, done, hits, value = False, False, 0, bytes(3000)
signal.signal(signal.SIGINT, handle)
store = LmdbStore(sys.argv[1], 64 << 20, write_batch=4, write_queue_bytes=20_000, durable=False)
killer = threading.Thread(target=interrupt)
killer.start()
end = time.monotonic() + 3
while time.monotonic() < end:
    try:
        armed = True
        use_it()
        armed = False
    except KeyboardInterrupt:
        hits += 1
done = True
killer.join()
store.flush(20)
assert store.queued_bytes == 0, store.queued_bytes
assert store.peak_queued_bytes <= 20_000
assert not len(store._gate._reading)
store.close()
print(hits)
"""


@pytest.mark.slow
def test_ctrl_c_at_any_moment_leaves_the_store_working(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path / "store")],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


def test_a_killed_process_leaves_a_store_that_opens(tmp_path):
    code = FORGETFUL + "store.flush()\nprint('ready', flush=True)\nwhile True:\n    store.put(b'x', bytes(100_000))\n"
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "store")], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with contextlib.closing(open_store(tmp_path / "store", durable=True)) as store:
            assert all(read(store, bytes([index])) == bytes([index]) * 5000 for index in range(40))
            store.put(b"still", b"works")
            store.flush()
