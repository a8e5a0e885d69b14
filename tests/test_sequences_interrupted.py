"""Ctrl-C, close and fork in the middle of forwards: KeyboardInterrupt comes out, and the same batch goes on exactly."""

import os
import random
import signal
import threading
import time

import pytest

from tierkv.testing.ctrl_c import interrupts
from tierkv.testing.engines import PlainCache, divide, forward, random_tokens, small_engine, small_layout
from tierkv.testing.stores import DictStore
from tierkv.testing.transfers import ManualTransfers
from tierkv.tier import Tier

START = 30


class Bench:
    """A batch with blocks in three tiers beside its plain cache; interrupted forwards start at one length."""

    def __init__(self, transfers=None, rows=1):
        self.layout = small_layout("two groups")
        self.engine = small_engine(
            self.layout, device_tokens=300, host_tokens=8, disk=DictStore(self.layout), transfers=transfers
        )
        divide(self.engine, device_slots=4 * rows, num_buffers=2, buffer_tokens=(START + 10) * rows)
        self.rows = rows
        self.seed = 0
        self.batch, self.plain = self.engine.open(), PlainCache(self.layout)
        forward(self.batch, self.plain, self.tokens(START))
        assert all(blocks for blocks, _ in self.engine.manager.census().values())

    def tokens(self, count):
        self.seed += 1
        return random_tokens(self.layout, self.rows, count, self.seed)

    def append(self, new):
        for layer, tokens in enumerate(new):
            self.batch.append(layer, *tokens)

    def go_on(self, new):
        """What must hold after an interrupt: the forward counts whole or not at all, and the batch can be used."""
        batch, plain = self.batch, self.plain
        assert self.engine.manager._steps == ({batch.step} if batch.step else set()), "a step belongs to nobody"
        if batch.length != plain.length:
            plain.extend(new)
        assert batch.length == plain.length
        batch.rollback()
        if isinstance(self.engine.transfers, ManualTransfers):
            known = set(self.engine._mover._tickets.values())
            assert set(self.engine.transfers.pending) <= known, "nobody waits for a copy"
        forward(batch, plain, self.tokens(1))
        for cache in (batch, plain):
            cache.crop(START)

    def close(self):
        """Nothing may be left: no block, no slot, no thread."""
        with self.engine:
            self.batch.release()
            with self.engine.exclusive():
                self.engine._mover.wait()
                self.engine._mover.reap()
            manager = self.engine.manager
            assert set(manager.census().values()) == {(0, 0)}
            assert {tier: pool.used for tier, pool in manager.pools.items()} == dict.fromkeys(Tier, 0)
            assert not manager.moves
            assert not manager._steps
            assert self.engine.gate._owner is None
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("tierkv")]


@pytest.fixture(autouse=True)
def handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def interrupt_everywhere(bench, count, first, step):
    """Press Ctrl-C at places ``first``, ``first + step`` ... of one forward after the other; return how many there were."""
    number = 0
    for interrupt in interrupts(first, step):
        new = bench.tokens(count)
        interrupt.during(lambda: bench.append(new))  # noqa: B023
        try:
            bench.go_on(new)
        except BaseException as error:
            error.add_note(f"after {interrupt}")
            raise
        number += interrupt.is_sent
    return number


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("first", range(3))
def test_ctrl_c_at_some_places(first, count):
    bench = Bench(ManualTransfers())
    assert interrupt_everywhere(bench, count, 37 * first, 111) > 10
    bench.close()


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 7])
def test_ctrl_c_at_every_place(count):
    bench = Bench(ManualTransfers())
    assert interrupt_everywhere(bench, count, 0, 1) > 1000
    bench.close()


def test_ctrl_c_at_random_moments():
    bench = Bench(rows=2)
    rng = random.Random(11)
    began = time.perf_counter()
    for _ in range(5):
        new = bench.tokens(2)
        bench.append(new)
        bench.go_on(new)
    typical = (time.perf_counter() - began) / 5
    interrupted = 0
    for _ in range(60):
        new = bench.tokens(rng.choice((1, 2, 5)))
        sent = threading.Event()

        def press(sent=sent):
            sent.set()
            os.kill(os.getpid(), signal.SIGINT)

        timer = threading.Timer(rng.uniform(0, typical), press)
        try:
            timer.start()
            bench.append(new)
            timer.join()
            time.sleep(0.0005)
        except KeyboardInterrupt:
            interrupted += 1
        timer.join()
        bench.go_on(new)
    assert interrupted == 60
    bench.close()
