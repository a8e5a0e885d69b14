"""Publishing: who may read, what is answered, what broken clients cost, and that nothing is left behind."""

import gc
import logging
import os
import stat
import threading
import time

import pytest

from tests.publishing import Client, own_socket, wait_until
from tierkv import publish
from tierkv.errors import ConfigError
from tierkv.publish import Publisher
from tierkv.testing.ctrl_c import interrupts
from tierkv.testing.engines import PlainCache, forward, random_tokens, small_engine, small_layout

LAYOUT = small_layout("plain")


@pytest.fixture
def engine():
    with small_engine(LAYOUT, device_tokens=64) as one:
        yield one


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


def test_no_engine_is_asked_while_it_closes(publisher, runtime, engine):
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
    publisher.add(engine, "another")  # for which the thread goes on

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


def test_ctrl_c_at_any_place_leaves_nothing_half_done(runtime, engine):
    """Wherever it comes, the next ``remove`` leaves no socket, no thread and no lock that is held."""
    count = 0
    kept = []  # a thread object that died would run a weak reference's callback, which swallows what is raised in it
    for interrupt in interrupts(step=2):
        one = Publisher()

        def come_and_go(one=one):
            one.add(engine, "tiny")
            kept.append(one._server)
            one.remove(engine)

        raised = interrupt.during(come_and_go)
        one.remove(engine)
        assert not own_socket(runtime).exists(), interrupt
        assert one._lock.acquire(timeout=1), interrupt
        one._lock.release()
        wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "tierkv-publish"])
        count += raised
    assert count > 20
    assert list((runtime / "tierkv").iterdir()) == []
