"""Clients of the socket: well-behaved ones, and those that send garbage, nothing, or half a line."""

import json
import os
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.publishing import Client, own_socket, wait_until
from tierkv import publish_server
from tierkv.testing.engines import random_tokens, small_engine, small_layout

LAYOUT = small_layout("plain")


@pytest.fixture
def engine():
    with small_engine(LAYOUT, device_tokens=64) as one:
        yield one


def open_descriptors():
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


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
    with ExitStack() as crowd:
        clients = [crowd.enter_context(Client(own_socket(runtime))) for _ in range(publish_server.MOST_CLIENTS)]
        wait_until(lambda: len(publisher._server._clients) == publish_server.MOST_CLIENTS)
        assert clients[0].ask()["pid"] == os.getpid()
        with Client(own_socket(runtime)) as late:
            assert late.ask()["pid"] == os.getpid()
            assert clients[1].line() == b""
            assert clients[0].ask()["pid"] == os.getpid()
            assert len(publisher._server._clients) == publish_server.MOST_CLIENTS


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
