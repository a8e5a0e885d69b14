"""Ctrl-C: held back where it must be, delivered afterwards, and waits that survive it at any moment."""

import os
import random
import signal
import threading
import time

import pytest

from tierkv.interrupts import Latch, deferred_interrupt
from tierkv.testing.ctrl_c import Interrupt, interrupts
from tierkv.testing.transfers import RESTORE, Gate
from tierkv.transfer import Copy, ThreadTransfers, Ticket


def press():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def handler():
    """The handler is Python's own before each test, and must be again afterwards."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    after = signal.signal(signal.SIGINT, before)
    assert after is signal.default_int_handler


# -- deferred_interrupt -----------------------------------------------------------------------------------------------


def test_ctrl_c_comes_at_the_end_of_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        with deferred_interrupt():
            press()
            done.append("first")
            press()
            done.append("second")
        done.append("not reached")
    assert done == ["first", "second"]


def test_blocks_may_be_nested():
    done = []
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
        with deferred_interrupt():
            with deferred_interrupt():
                press()
            done.append("outer")
    assert done == ["outer"]


def test_without_ctrl_c_nothing_happens(handler):
    with deferred_interrupt():
        assert signal.getsignal(signal.SIGINT) is not handler
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_exception_passes(handler):
    with pytest.raises(ValueError, match="own"), deferred_interrupt():
        raise ValueError("own")
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_wins_over_an_exception_and_keeps_it_as_its_context():
    with pytest.raises(KeyboardInterrupt) as caught, deferred_interrupt():  # noqa: PT012
        press()
        raise ValueError("own")
    assert isinstance(caught.value.__context__, ValueError)


def test_a_program_s_own_handler_is_called_afterwards():
    calls = []

    def own(number, frame):
        calls.append((number, frame is not None))

    before = signal.signal(signal.SIGINT, own)
    with deferred_interrupt():
        press()
        assert calls == []
    assert calls == [(signal.SIGINT, True)]
    assert signal.signal(signal.SIGINT, before) is own


def test_a_sigterm_that_raises_is_held_back_too():
    """A program that unwinds on SIGTERM must not do so in the middle of the bookkeeping."""

    class Told(Exception):
        pass

    def tell(*_):
        raise Told

    done = []
    before = signal.signal(signal.SIGTERM, tell)
    try:
        with pytest.raises(Told), deferred_interrupt():  # noqa: PT012
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("whole")
        assert done == ["whole"]
        assert signal.getsignal(signal.SIGTERM) is tell
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("choice", [signal.SIG_IGN, signal.SIG_DFL])
def test_a_handler_that_is_not_python_s_is_left_alone(choice):
    before = signal.signal(signal.SIGINT, choice)
    with deferred_interrupt():
        assert signal.getsignal(signal.SIGINT) is choice
    assert signal.signal(signal.SIGINT, before) is choice


def test_other_threads_change_nothing(handler):
    seen = []

    def other():
        with deferred_interrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [handler]


def test_a_block_runs_whole_or_not_at_all(handler):
    """Ctrl-C at every place of the block, its entry and its exit."""

    class Books:
        debit = credit = 0

        def book(self):
            with deferred_interrupt():
                self.debit += len("x")
                self.credit += len("x")

    for interrupt in interrupts():
        books = Books()
        came = interrupt.during(books.book)
        assert came == interrupt.is_sent
        assert books.debit == books.credit, interrupt
        assert came or books.debit == 1
        assert signal.getsignal(signal.SIGINT) is handler, interrupt


# -- Latch ------------------------------------------------------------------------------------------------------------


def test_a_latch_lets_through_once_it_is_set():
    latch = Latch()
    assert not latch.is_set()
    assert not latch.wait(0)
    assert not latch.wait(0.01)
    latch.set()
    latch.set()
    assert latch.is_set()
    assert latch.wait(0)
    assert latch.wait()


def test_a_latch_lets_everybody_through():
    latch, through = Latch(), []
    threads = [threading.Thread(target=lambda: through.append(latch.wait(20))) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert not latch.wait(0.02)
    latch.set()
    for thread in threads:
        thread.join()
    assert through == [True] * 8


def test_no_set_is_missed():
    for _ in range(300):
        latch = Latch()
        thread = threading.Thread(target=latch.set)
        thread.start()
        assert latch.wait(20)
        thread.join()


# -- executors --------------------------------------------------------------------------------------------------------


def submit_and_wait(engine, gate, tickets):
    with deferred_interrupt():
        tickets.append(engine.submit([Copy(RESTORE, 1, load=gate)]))
    engine.wait(tickets[0], 20)


def check_that_the_engine_still_works(engine, gate, tickets):
    gate.open()
    for ticket in tickets:
        engine.wait(ticket, 20)
    engine.wait(engine.submit([Copy(RESTORE, 1, load=lambda: None) for _ in range(4)]), 20)
    engine.close()


def test_ctrl_c_at_any_place_of_submit_and_wait_breaks_no_executor():
    """With ``threading.Event`` in tickets, some of these places ended in a lock that nobody could take any more."""
    for interrupt in interrupts():
        engine, gate = ThreadTransfers(2), Gate()
        tickets: list[Ticket] = []
        opener = threading.Timer(0.002, gate.open)
        opener.start()
        came = interrupt.during(lambda: submit_and_wait(engine, gate, tickets))  # noqa: B023
        assert came == interrupt.is_sent
        check_that_the_engine_still_works(engine, gate, tickets)
        opener.join()


def test_ctrl_c_at_a_random_moment_breaks_no_executor():
    rng = random.Random(5)
    pressed = 0
    for _ in range(60):
        engine, gate = ThreadTransfers(2), Gate()
        tickets: list[Ticket] = []
        timers = [threading.Timer(rng.uniform(0, 0.004), press), threading.Timer(0.004, gate.open)]
        try:
            with deferred_interrupt():
                for timer in timers:
                    timer.start()
            submit_and_wait(engine, gate, tickets)
            timers[0].join()
            time.sleep(0.001)
        except KeyboardInterrupt:
            pressed += 1
        for timer in timers:
            timer.join()
        check_that_the_engine_still_works(engine, gate, tickets)
    assert pressed == 60


def test_ctrl_c_ends_a_wait_for_a_stuck_copy():
    engine, gate = ThreadTransfers(1), Gate()
    ticket = engine.submit([Copy(RESTORE, 1, load=gate)])
    timer = threading.Timer(0.02, press)
    timer.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        engine.wait(ticket, 30)
    assert time.monotonic() - began < 10
    timer.join()
    check_that_the_engine_still_works(engine, gate, [ticket])


def test_an_interrupt_reports_where_it_came():
    interrupt = Interrupt(0)
    assert interrupt.during(Latch().is_set)
    assert "Latch.is_set" in repr(interrupt)
    assert not Interrupt(10_000).during(Latch().is_set)
