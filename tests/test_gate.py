"""ForwardGate: one thread inside, and everybody gets a turn."""

import threading
import time

import pytest

from tierkv.gate import ForwardGate


def test_threads_take_turns():
    """Each comes back the moment it has left; without a line, one of them would keep the others out."""
    gate, order, start = ForwardGate(), [], threading.Barrier(3)

    def work(name):
        start.wait()
        for _ in range(20):
            gate.enter()
            order.append(name)
            time.sleep(0.002)
            gate.leave()

    threads = [threading.Thread(target=work, args=(name,)) for name in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(order) == [0] * 20 + [1] * 20 + [2] * 20
    for count in range(6, 54):  # while all three are there, nobody is ahead by more than a turn or two
        turns = [order[:count].count(name) for name in range(3)]
        assert max(turns) - min(turns) <= 3


def test_a_thread_that_died_inside_or_in_the_line_is_not_waited_for():
    gate = ForwardGate()
    inside, leave = threading.Event(), threading.Event()

    def die_inside():
        gate.enter()
        inside.set()
        leave.wait(10)

    def die_in_line():
        gate._line.append(threading.get_ident())

    first = threading.Thread(target=die_inside)
    first.start()
    inside.wait(10)
    second = threading.Thread(target=die_in_line)
    second.start()
    second.join(10)
    leave.set()
    first.join(10)
    gate.enter()
    assert gate.mine
    assert gate._line == []
    gate.leave()


def test_an_interrupted_wait_leaves_the_line(monkeypatch):
    gate, taken = ForwardGate(), threading.Event()

    def hold():
        gate.enter()
        taken.set()
        time.sleep(0.2)
        gate.leave()

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(10)

    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("tierkv.gate.time.sleep", interrupted)
        try:
            gate.enter()
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("nobody interrupted it")
    assert gate._line == []
    thread.join(10)
    with gate.exclusive():
        assert gate.mine


def test_whoever_comes_in_or_goes_out_is_announced_while_inside():
    said = []
    gate = ForwardGate(lambda: said.append(("in", gate.mine)), lambda: said.append(("out", gate.mine)))
    with gate.exclusive():
        with gate.exclusive():
            pass
        gate.enter()
    gate.leave()
    assert said == [("in", True), ("out", True)]


def test_a_farewell_that_fails_leaves_the_gate_open():
    def fails():
        raise RuntimeError("the device is gone")

    gate = ForwardGate(leaves=fails)
    gate.enter()
    with pytest.raises(RuntimeError, match="gone"):
        gate.leave()
    assert gate.is_free
    gate.enter()
