"""Processes that publish: killed, ended, stopped and forked ones, and models that tierkv is attached to."""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.publishing import CHILD, Client, EngineProcess, own_socket, wait_until
from tierkv.errors import ConfigError
from tierkv.testing.engines import small_engine, small_layout

LAYOUT = small_layout("plain")


@pytest.fixture
def engine():
    with small_engine(LAYOUT, device_tokens=64) as one:
        yield one


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
