"""Ctrl-C, close and fork in the middle of forwards: KeyboardInterrupt comes out, and the same batch goes on exactly."""

import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tierkv.errors import ClosedError
from tierkv.storage.spill import SpillStore
from tierkv.testing.ctrl_c import interrupts
from tierkv.testing.engines import PlainCache, divide, forward, random_tokens, small_engine, small_layout
from tierkv.testing.stores import DictStore
from tierkv.testing.transfers import RESTORE, Gate, ManualTransfers
from tierkv.tier import Run, Tier
from tierkv.transfer import Copy

START = 30


class Bench:
    """A batch with blocks in three tiers beside its plain cache; interrupted forwards start at one length."""

    def __init__(self, transfers=None, rows=1, folder=None):
        self.layout = small_layout("two groups")
        disk = SpillStore(self.layout, folder, 1 << 22, write_queue_bytes=1 << 14) if folder else DictStore(self.layout)
        self.engine = small_engine(self.layout, device_tokens=300, host_tokens=8, disk=disk, transfers=transfers)
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
        steps = {other.step for other in self.engine._caches} - {None}
        assert self.engine.manager._steps == steps, "a step belongs to nobody"
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
@pytest.mark.parametrize(("count", "on_disk"), [(1, False), (7, False), (7, True)])
def test_ctrl_c_at_many_places(count, on_disk, tmp_path):
    bench = Bench(ManualTransfers(), folder=tmp_path if on_disk else None)
    assert interrupt_everywhere(bench, count, count, 5) > 100
    bench.close()


def select_both(cache):
    cache.select([1, 0])


def crop(cache):
    cache.crop(17)


def reset(cache):
    if isinstance(cache, PlainCache):
        cache.layers = []
    else:
        cache.reset()


@pytest.mark.parametrize("verb", [select_both, crop, reset], ids=lambda verb: verb.__name__)
def test_ctrl_c_in_a_verb_leaves_it_done_or_not_begun(verb):
    bench = Bench(ManualTransfers(), rows=2)
    for interrupt in interrupts(step=3):
        interrupt.during(lambda: verb(bench.batch))
        changed = bench.plain.fork()
        verb(changed)
        read = [bench.batch.read(layer) for layer in range(len(bench.layout.layers))] if bench.batch.length else []
        outcomes = [
            cache
            for cache in (bench.plain, changed)
            if len(read) == len(cache.layers)
            and all(map(torch.equal, itertools.chain(*read), itertools.chain(*cache.layers)))
        ]
        assert outcomes, interrupt
        bench.plain = outcomes[0]
        forward(bench.batch, bench.plain, bench.tokens(max(1, START - bench.plain.length)))
        for cache in (bench.batch, bench.plain):
            cache.crop(START)
    bench.close()


def test_ctrl_c_in_a_rollback():
    bench = Bench(ManualTransfers())
    for interrupt in interrupts():
        new = bench.tokens(1)
        forward(bench.batch, bench.plain, new, layers=2)
        interrupt.during(bench.batch.rollback)
        bench.go_on(new)
    bench.close()


def test_ctrl_c_in_a_fork_leaves_no_blocks_behind():
    bench = Bench(ManualTransfers())
    for interrupt in interrupts():
        twins = []
        interrupt.during(lambda: twins.append(bench.batch.fork()))  # noqa: B023
        for twin in twins:
            forward(twin, bench.plain.fork(), bench.tokens(2))
            twin.release()
    gc.collect()
    bench.close()


def test_ctrl_c_never_locks_other_threads_out():
    bench = Bench(ManualTransfers())
    for interrupt in interrupts(step=13):
        new = bench.tokens(1)
        interrupt.during(lambda: bench.append(new))  # noqa: B023
        bench.go_on(new)
        done: list[int] = []
        thread = threading.Thread(target=lambda: done.append(bench.batch.read(0)[0].shape[2]), daemon=True)  # noqa: B023
        thread.start()
        thread.join(10)
        assert done == [START], interrupt
    bench.close()


def test_ctrl_c_while_a_second_batch_takes_over_from_a_torn_one():
    bench = Bench(ManualTransfers())
    other, plain = bench.engine.open(), PlainCache(bench.layout)
    forward(other, plain, bench.tokens(9))
    for interrupt in interrupts(step=7):
        forward(bench.batch, bench.plain, bench.tokens(1), layers=1)
        new = bench.tokens(1)
        interrupt.during(lambda: [other.append(layer, *tokens) for layer, tokens in enumerate(new)])  # noqa: B023
        if other.length != plain.length:
            plain.extend(new)
        bench.go_on(new)
        forward(other, plain, bench.tokens(1))
        for cache in (other, plain):
            cache.crop(9)
    other.release()
    bench.close()


@pytest.mark.parametrize("on_disk", [False, True], ids=["dict", "disk"])
def test_ctrl_c_at_random_moments(on_disk, tmp_path):
    bench = Bench(rows=2, folder=tmp_path if on_disk else None)
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


# -- close and fork ---------------------------------------------------------------------------------------------------


def verbs_of(bench):
    """Everything that a closed engine must refuse."""
    batch, new = bench.batch, bench.tokens(1)
    return {
        "append": lambda: batch.append(0, *new[0]),
        "crop": lambda: batch.crop(3),
        "select": lambda: batch.select([0]),
        "fork": batch.fork,
        "read": lambda: batch.read(0),
        "open": bench.engine.open,
        "stats": bench.engine.stats,
    }


@pytest.mark.parametrize("layers", [0, 2])
@pytest.mark.parametrize("make_transfers", [ManualTransfers, lambda: None], ids=["manual", "threads"])
def test_a_closed_engine_refuses_all_but_release(make_transfers, layers):
    bench = Bench(make_transfers())
    forward(bench.batch, bench.plain, bench.tokens(1), layers=layers)
    bench.engine.close()
    bench.engine.close()
    for verb in verbs_of(bench).values():
        with pytest.raises(ClosedError, match="closed"):
            verb()
    bench.batch.reset()
    bench.batch.release()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tierkv")]


def test_close_after_an_interrupted_close_finishes_the_work():
    bench = Bench()
    gate = Gate()
    bench.engine.transfers.submit([Copy(RESTORE, 1, load=gate)])
    timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        bench.engine.close()
    timer.join()
    gate.open()
    bench.engine.close()
    with pytest.raises(ClosedError):
        bench.engine.stores.device.write(0, Run(0, 1), *[part[0] for part in bench.tokens(4)[0]])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tierkv")]


IN_A_FORKED_CHILD = """
import os, sys, traceback
sys.path.insert(0, {folder!r})
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("module", {path!r})
module = module_from_spec(spec)
spec.loader.exec_module(module)

bench = module.Bench()
module.forward(bench.batch, bench.plain, bench.tokens(1), layers=2)
child = os.fork()
if child == 0:
    try:
        for name, verb in module.verbs_of(bench).items():
            try:
                verb()
            except module.ClosedError as error:
                assert "fork" in str(error), error
            else:
                raise AssertionError(name + " went through")
        bench.engine.close()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
_, status = os.waitpid(child, 0)
module.forward(bench.batch, bench.plain, bench.tokens(2))
bench.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_is_refused_and_its_parent_goes_on():
    code = IN_A_FORKED_CHILD.format(folder=str(Path(__file__).parents[1]), path=__file__)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
