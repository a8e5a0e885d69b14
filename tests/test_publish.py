"""Publishing: who may read, what is answered, what broken clients cost, and that nothing is left behind."""

import gc
import json
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.publishing import CHILD, Client, EngineProcess
from tierkv import publish, publish_folder, publish_server
from tierkv.errors import ConfigError
from tierkv.publish import Publisher
from tierkv.testing.engines import PlainCache, forward, random_tokens, small_engine, small_layout

LAYOUT = small_layout("plain")


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """Give the folder that stands for ``$XDG_RUNTIME_DIR``; the other place is a folder of this test's own too."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setattr(publish_folder, "SHARED", tmp_path)
    return folder


@pytest.fixture
def publisher(runtime):
    one = Publisher()
    yield one
    one.close()
    assert not list(runtime.rglob("*.sock"))
    assert not [thread for thread in threading.enumerate() if thread.name == "tierkv-publish"]


@pytest.fixture
def engine():
    with small_engine(LAYOUT, device_tokens=64) as one:
        yield one


def own_socket(runtime):
    return runtime / "tierkv" / f"tierkv-{os.getpid()}.sock"


def open_descriptors():
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def test_an_engine_is_served_until_the_last_one_closes(publisher, runtime, engine):
    assert not (runtime / "tierkv").exists()  # nothing before the first engine
    publisher.add(engine, "tiny")
    path = own_socket(runtime)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with small_engine(LAYOUT, device_tokens=32) as second:
        publisher.add(second, "other")
        with Client(path) as client:
            answer = client.ask()
            assert (answer["version"], answer["pid"]) == (1, os.getpid())
            assert [(one["id"], one["name"]) for one in answer["engines"]] == [(1, "tiny"), (2, "other")]
            assert answer["engines"][0]["stats"] == engine.stats().as_dict()
            assert answer["engines"][1]["stats"]["tiers"]["device"]["slots"] == 8
            assert 0 < time.time() - answer["started"] < 100_000
            assert "python" in answer["command"]
            publisher.remove(engine)
            publisher.remove(engine)
            assert [one["id"] for one in client.ask()["engines"]] == [2]
        publisher.remove(second)
        assert not path.exists()
        publisher.add(second, "again")
        with Client(path) as client:
            assert [one["id"] for one in client.ask()["engines"]] == [3]
        publisher.remove(second)


def test_numbers_follow_the_forwards(publisher, runtime, engine):
    publisher.add(engine, "tiny")
    batch = engine.open()
    with Client(own_socket(runtime)) as client:
        before = client.ask()
        forward(batch, PlainCache(LAYOUT), random_tokens(LAYOUT, 1, 9, 0))
        after = client.ask()
    assert before["engines"][0]["stats"]["counters"]["tokens"] == 0
    assert after["engines"][0]["stats"]["counters"]["tokens"] == 9
    assert after["engines"][0]["stats"]["tiers"]["device"]["blocks"] == 3
    assert after["taken"] > before["taken"]


def test_answers_come_in_the_middle_of_a_forward(publisher, runtime, engine):
    """The gate that a forward holds is nothing that a look waits for."""
    publisher.add(engine, "tiny")
    batch = engine.open()
    with Client(own_socket(runtime), wait_seconds=2.0) as client:
        batch.append(0, *random_tokens(LAYOUT, 1, 9, 0)[0])
        assert batch.step is not None
        assert client.ask()["engines"][0]["stats"]["caches"] == 1
        batch.rollback()
        with engine.exclusive():
            assert client.ask()["engines"][0]["stats"]["caches"] == 1


@pytest.mark.parametrize(
    "sent",
    [
        b"\n", b"garbage\n", b"\xff\x00\n", b"[]\n", b"{}\n", b'{"want":"secrets"}\n', b"[" * 4000 + b"\n", b"x" * 5000,
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)  # fmt: skip
def test_garbage_is_told_so_and_hung_up_on(publisher, runtime, engine, sent):
    publisher.add(engine, "tiny")
    with Client(own_socket(runtime)) as client:
        client.send(sent)
        answer = json.loads(client.line())
        assert answer["version"] == 1
        assert "stats" in answer["error"] or "4096 bytes" in answer["error"]
        assert client.line() == b""
    with Client(own_socket(runtime)) as client:
        assert client.ask()["pid"] == os.getpid()


def test_requests_may_come_in_pieces_or_many_at_once(publisher, runtime, engine):
    publisher.add(engine, "tiny")
    with Client(own_socket(runtime)) as client:
        for piece in (b'{"wa', b'nt":"st', b'ats"}'):
            client.send(piece)
            time.sleep(0.02)
        with Client(own_socket(runtime)) as other:  # whom half a line does not hold up
            assert other.ask()["pid"] == os.getpid()
        client.send(b'\n{"want": "stats", "more": 1}\n{"want": "stats"}\n')
        assert [json.loads(client.line())["pid"] for _ in range(3)] == [os.getpid()] * 3
    with Client(own_socket(runtime)) as client:  # as a shell's pipe does
        client.send(b'{"want": "stats"}\n')
        client.connection.shutdown(socket.SHUT_WR)
        assert json.loads(client.line())["pid"] == os.getpid()
        assert client.line() == b""


def test_silent_and_stuck_clients_are_dropped(publisher, runtime, engine, monkeypatch):
    monkeypatch.setattr(publish_server, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(publish_server, "STUCK_SECONDS", 0.2)
    # Longer than what the kernel keeps for a client that does not read.
    publisher.add(engine, "tiny")
    monkeypatch.setattr(publisher._server, "_snapshot", lambda: b"x" * (8 << 20))
    with Client(own_socket(runtime)) as silent, Client(own_socket(runtime)) as stuck:
        stuck.send(b'{"want": "stats"}\n')
        assert silent.line() == b""
        time.sleep(0.3)
        received = 0
        while more := stuck.connection.recv(1 << 20):
            received += len(more)
        assert received < 8 << 20
    wait_until(lambda: not publisher._server._clients)


def test_who_was_silent_longest_makes_room(publisher, runtime, engine):
    publisher.add(engine, "tiny")
    crowd = [Client(own_socket(runtime)) for _ in range(publish_server.MOST_CLIENTS)]
    assert crowd[0].ask()["pid"] == os.getpid()
    with Client(own_socket(runtime)) as late:
        assert late.ask()["pid"] == os.getpid()
        assert crowd[1].line() == b""
        assert crowd[0].ask()["pid"] == os.getpid()
        assert len(publisher._server._clients) == publish_server.MOST_CLIENTS
    for client in crowd:
        client.connection.close()


def test_a_thousand_snapshots_leave_no_descriptor(publisher, runtime, engine):
    publisher.add(engine, "tiny")

    def look():
        with Client(own_socket(runtime)) as client:
            assert client.ask()["pid"] == os.getpid()

    look()
    wait_until(lambda: not publisher._server._clients)
    before = open_descriptors()
    for _ in range(1000):
        look()
    wait_until(lambda: not publisher._server._clients)
    assert open_descriptors() == before
    publisher.remove(engine)
    assert len(open_descriptors()) == len(before) - 4  # the listener, what it sleeps on, and the pair that wakes it


def test_a_collected_engine_is_let_go(publisher, runtime):
    class Short:
        def stats(self):
            raise AssertionError("nobody asks")

    publisher.add(Short(), "short")
    gc.collect()
    wait_until(lambda: not own_socket(runtime).exists())
    assert publisher._server is None
    assert publisher._entries == {}


def test_an_engine_that_fails_is_a_gap(publisher, runtime, engine, caplog):
    class Broken:
        def stats(self):
            raise RuntimeError("dictionary changed size during iteration")

    broken = Broken()
    publisher.add(broken, "broken")
    publisher.add(engine, "tiny")
    with caplog.at_level(logging.DEBUG, "tierkv.publish"), Client(own_socket(runtime)) as client:
        first, second = client.ask()["engines"]
    assert first["stats"] is None
    assert second["stats"]["caches"] == 0
    assert {record.levelname for record in caplog.records} == {"DEBUG"}


def test_no_engine_is_asked_while_it_closes(publisher, runtime):
    """``remove`` waits for an answer under way, since the stores are gone right after it."""
    asked, go_on, gone = threading.Event(), threading.Event(), threading.Event()

    class Slow:
        def stats(self):
            asked.set()
            go_on.wait(10)
            assert not gone.is_set()
            raise RuntimeError("nothing to tell")

    slow = Slow()
    publisher.add(slow, "slow")

    def leave():
        publisher.remove(slow)
        gone.set()

    with Client(own_socket(runtime)) as client:
        client.send(b'{"want": "stats"}\n')
        assert asked.wait(10)
        thread = threading.Thread(target=leave)
        thread.start()
        time.sleep(0.1)
        assert not gone.is_set()
        go_on.set()
        thread.join(10)
        assert gone.is_set()


@pytest.mark.parametrize("what", ["a file", "a link", "open to others"])
def test_a_folder_that_is_not_private_is_not_used(publisher, runtime, engine, what, tmp_path, caplog):
    folder, elsewhere = runtime / "tierkv", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if what == "a file":
        folder.write_text("")
    elif what == "a link":
        folder.symlink_to(elsewhere)
    else:
        folder.mkdir()
        folder.chmod(0o755)
    with caplog.at_level(logging.DEBUG, "tierkv.publish"):
        publisher.add(engine, "tiny")
    assert str(folder) in caplog.text
    assert list(elsewhere.iterdir()) == []
    # The other place is there for that.
    other = tmp_path / f"tierkv-{os.geteuid()}" / f"tierkv-{os.getpid()}.sock"
    with Client(other) as client:
        assert client.ask()["pid"] == os.getpid()
    publisher.remove(engine)
    assert not other.exists()


def test_folders_of_other_users_are_not_used(tmp_path, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("only root can make a folder of another user")
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 4711, 4711)
    with pytest.raises(publish_folder.FolderRefused, match="belongs to another user"):
        publish_folder.make_private(theirs)
    # After su the variable may still name the other user's.
    monkeypatch.setattr(publish_folder, "SHARED", tmp_path)
    assert publish_folder.folders({"XDG_RUNTIME_DIR": str(theirs)}) == [tmp_path / "tierkv-0"]


def test_only_own_and_short_places_are_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(publish_folder, "SHARED", tmp_path)
    shared = [tmp_path / f"tierkv-{os.geteuid()}"]
    good, open_to_all = tmp_path / "good", tmp_path / "open"
    good.mkdir(mode=0o700)
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert publish_folder.folders({"XDG_RUNTIME_DIR": str(good)}) == [good / "tierkv", *shared]
    for text in ("", "relative", str(tmp_path / "missing"), str(open_to_all)):
        assert publish_folder.folders({"XDG_RUNTIME_DIR": text}) == shared
    long = tmp_path / ("x" * 100)
    long.mkdir(mode=0o700)
    assert publish_folder.folders({"XDG_RUNTIME_DIR": str(long)}) == shared


def test_the_longest_place_that_is_taken_can_be_bound(tmp_path, monkeypatch, engine):
    room = 107 - len("/tierkv/.tierkv-4194304-01234567") - len(str(tmp_path)) - 1
    if room < 1:
        pytest.skip("the temporary folder's own path is too long")
    longest = tmp_path / ("x" * room)
    longest.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(longest))
    monkeypatch.setattr(publish_folder, "SHARED", tmp_path / "missing")
    monkeypatch.setattr(os, "getpid", lambda: 4194304)
    assert publish_folder.folders()[0] == longest / "tierkv"
    one = Publisher()
    one.add(engine, "tiny")
    with Client(longest / "tierkv" / "tierkv-4194304.sock") as client:
        assert client.ask()["pid"] == 4194304
    one.close()


def test_nowhere_to_publish_is_said_once_and_harms_nothing(tmp_path, monkeypatch, engine, caplog):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(publish_folder, "SHARED", tmp_path / "missing")
    one = Publisher()
    with caplog.at_level(logging.DEBUG, "tierkv.publish"):
        for _ in range(3):
            one.add(engine, "tiny")
            one.remove(engine)
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert one._server is None


@pytest.mark.parametrize(
    ("text", "wanted"), [("", True), ("1", True), ("true", True), ("0", False), ("false", False), ("False", False)]
)
def test_the_switch(text, wanted, runtime, monkeypatch, engine):
    assert publish.is_wanted({"TIERKV_PUBLISH": text}) is wanted
    monkeypatch.setenv("TIERKV_PUBLISH", text)
    publish.add(engine, "tiny")
    assert own_socket(runtime).exists() is wanted
    publish.remove(engine)


def test_a_switch_that_says_nothing_is_one_line():
    assert publish.is_wanted({})
    with pytest.raises(ConfigError, match='TIERKV_PUBLISH = "perhaps" is not possible'):
        publish.is_wanted({"TIERKV_PUBLISH": "perhaps"})


def test_the_socket_of_a_killed_process_is_cleaned_up_by_the_next(publisher, runtime, engine):
    with EngineProcess(runtime) as child:
        with Client(child.socket) as client:
            assert client.ask()["pid"] == child.pid
        child.kill()
        assert child.socket.exists()
        half_born = runtime / "tierkv" / ".tierkv-1-00000000"
        with socket.socket(socket.AF_UNIX) as never:
            never.bind(str(half_born))
        os.utime(half_born, (1, 1))
        publisher.add(engine, "tiny")
        wait_until(lambda: not child.socket.exists() and not half_born.exists())
        assert own_socket(runtime).exists()


def test_the_socket_is_gone_when_a_process_ends(runtime):
    ends = CHILD.replace("for step, line", "sys.exit(0)\nfor step, line")
    with EngineProcess(runtime, code=ends) as child:
        assert child.process.wait(30) == 0
        assert list((runtime / "tierkv").iterdir()) == []


def test_a_process_of_this_number_that_died_makes_room_and_a_live_one_does_not(publisher, runtime, engine, caplog):
    path = own_socket(runtime)
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(1)
        with caplog.at_level(logging.DEBUG, "tierkv.publish"):
            publisher.add(engine, "tiny")  # as from another container: this one goes to the other place
        assert "another process of this number" in caplog.text
        assert path.exists()
        publisher.remove(engine)
        assert path.exists()
    publisher.add(engine, "tiny")
    with Client(path) as client:
        assert client.ask()["pid"] == os.getpid()


FORK = """
import os, psutil, socket, sys, torch
torch.set_num_threads(1)
from tierkv import publish
from tierkv.testing.engines import small_engine, small_layout
engine = small_engine(small_layout("plain"), device_tokens=64)
publish.add(engine, "parent")
child = os.fork()
if child == 0:
    held = [one for one in psutil.Process().net_connections("unix") if one.type == socket.SOCK_STREAM]
    engine.close()
    print("held", len(held), "served", publish._publisher._server, flush=True)
    again = small_engine(small_layout("plain"), device_tokens=32)
    publish.add(again, "child")
    print(os.getpid(), flush=True)
    sys.stdin.readline()
    publish.remove(again)
    again.close()
    os._exit(0)
os.waitpid(child, 0)
print("parent", flush=True)
sys.stdin.readline()
publish.remove(engine)
engine.close()
"""


def test_a_forked_child_serves_its_own_engines_only(runtime):
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", FORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout.readline() == "held 0 served None\n"
        child = int(process.stdout.readline())
        for pid, names in ((process.pid, ["parent"]), (child, ["child"])):
            with Client(runtime / "tierkv" / f"tierkv-{pid}.sock") as client:
                answer = client.ask()
                assert (answer["pid"], [one["name"] for one in answer["engines"]]) == (pid, names)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "parent\n"
        with Client(runtime / "tierkv" / f"tierkv-{process.pid}.sock") as client:  # still, after the child's end
            assert client.ask()["pid"] == process.pid
        assert not (runtime / "tierkv" / f"tierkv-{child}.sock").exists()
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait(30) == 0
    assert list((runtime / "tierkv").iterdir()) == []


def test_a_stopped_process_delays_nobody_for_long(runtime):
    from tierkv.watch import WatchError, read_snapshot

    with EngineProcess(runtime) as child:
        child.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(WatchError, match=r"no answer within 0\.3 s"):
            read_snapshot(child.socket, wait_seconds=0.3)
        assert time.monotonic() - began < 5
        child.process.send_signal(signal.SIGCONT)
        assert read_snapshot(child.socket, wait_seconds=30).pid == child.pid


@pytest.mark.parametrize("publishes", [True, False])
def test_attach_publishes(runtime, monkeypatch, publishes, tmp_path):
    import torch

    import tierkv
    from tests.integrations.conftest import build

    monkeypatch.setenv("TIERKV_PUBLISH", "1" if publishes else "0")
    model: Any = build("llama", "sdpa", torch.float32)
    model.config._name_or_path = "/somewhere/Tiny-1M"
    settings = {"device": {"capacity": "4MiB"}, "host": {"capacity": 0}, "disk": {"capacity": 0}}
    with tierkv.attach(model, settings) as engine:
        model.generate(torch.ones((1, 40), dtype=torch.int64), max_new_tokens=4, do_sample=False)
        assert own_socket(runtime).exists() is publishes
        if publishes:
            with Client(own_socket(runtime)) as client:
                (one,) = client.ask()["engines"]
            assert one["name"] == engine.name == "Tiny-1M"
            assert one["stats"]["counters"] == engine.stats().as_dict()["counters"]
    assert not own_socket(runtime).exists()
    monkeypatch.setenv("TIERKV_PUBLISH", "perhaps")
    with pytest.raises(ConfigError, match="TIERKV_PUBLISH"):
        tierkv.attach(model, settings)
    assert not hasattr(model, "tierkv_engine")
