"""SequenceBatch: any history of appends, torn forwards, crops, row selections and forks reads like a plain cache.

One state machine, on every executor and on a real disk; the model is a plain cache of full tensors.
"""

import gc
import random
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from tierkv.errors import BlockLost, CapacityError, ClosedError, RecordError
from tierkv.sequences import SequenceBatch
from tierkv.storage.spill import SpillStore
from tierkv.testing.engines import (
    LAYOUTS,
    PlainCache,
    assert_same,
    forward,
    random_tokens,
    small_engine,
    small_layout,
)
from tierkv.testing.fake_cuda import FakeCuda
from tierkv.testing.stores import DictStore, FaultyStore
from tierkv.testing.transfers import ManualTransfers
from tierkv.tier import Tier
from tierkv.transfer import WAIT_SECONDS, ThreadTransfers
from tierkv.transfer_cuda import CudaTransfers

MOST_BATCHES = 4
QUEUE_BYTES = 1 << 13


class Sequences(RuleBasedStateMachine):
    """Batches of one engine, each beside its plain cache."""

    pairs: dict[int, tuple[SequenceBatch, PlainCache]]

    def make_transfers(self):
        raise NotImplementedError

    def make_disk(self, num_slots):
        return DictStore(self.layout, num_slots=num_slots)

    def settle(self):
        """Let every copy end."""

    @initialize(
        layout=st.sampled_from(sorted(LAYOUTS)),
        device_tokens=st.integers(40, 140),
        host_tokens=st.sampled_from([0, 16, 48, 160]),
        disk_slots=st.sampled_from([1000, 6, 0]),
        layers_ahead=st.integers(0, 2),
        keep=st.tuples(st.integers(0, 2), st.integers(1, 3)),
        bounce=st.booleans(),
    )
    def start(self, layout, device_tokens, host_tokens, disk_slots, layers_ahead, keep, bounce):
        self.layout = small_layout(layout)
        self.pairs, self.seed = {}, 0
        self.transfers = self.make_transfers()
        self.disk = FaultyStore(self.make_disk(disk_slots)) if disk_slots else None
        self.engine = small_engine(
            self.layout,
            device_tokens=device_tokens,
            host_tokens=host_tokens,
            disk=self.disk,
            queue_bytes=QUEUE_BYTES,
            transfers=self.transfers,
            layers_ahead=layers_ahead,
            keep=keep,
            bounce=bounce,
        )

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        with self.engine:
            for batch, _ in self.pairs.values():
                batch.release()
            self.pairs.clear()
            self.settle()
            manager = self.engine.manager
            self.clean_up()
            if any(pool.used for pool in manager.pools.values()):
                gc.collect()  # an error knows the frames that it passed, and those know the batch
                self.clean_up()
            assert set(manager.census().values()) == {(0, 0)}
            assert {tier: pool.used for tier, pool in manager.pools.items()} == dict.fromkeys(Tier, 0)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("tierkv")]

    def clean_up(self):
        with self.engine.exclusive():
            self.engine._mover.wait()
            self.engine._mover.reap()

    names = Bundle("names")  # of batches; the objects are kept here alone, so that they can be dropped

    @precondition(lambda self: len(self.pairs) < MOST_BATCHES)
    @rule(target=names)
    def open(self):
        return self.keep(self.engine.open(), PlainCache(self.layout))

    def keep(self, batch, plain):
        self.seed += 1
        self.pairs[self.seed] = batch, plain
        return self.seed

    def tokens(self, name, rows, count):
        self.seed += 1
        batch, plain = self.pairs[name]
        return random_tokens(self.layout, plain.rows or batch.rows or rows, count, self.seed)

    @rule(name=names, rows=st.integers(1, 3), count=st.integers(1, 30))
    def append(self, name, rows, count):
        """A whole forward, which the tiers may be too small for; then nothing has changed."""
        new = self.tokens(name, rows, count)
        try:
            forward(*self.pairs[name], new)
        except CapacityError:
            batch, _ = self.pairs[name]
            assert batch.step is None
            if self.engine.stores.slots[Tier.DISK] >= 1000 and not any(b.step for b, _ in self.pairs.values()):
                # The disk takes everything, so all that can be missing is room for the working set on the device.
                with pytest.raises(CapacityError):
                    self.engine.capacity.plan(len(new[0][0]), batch.length + count)

    @rule(name=names, steps=st.integers(2, 6))
    def decode(self, name, steps):
        for _ in range(steps):
            self.append(name, 1, 1)

    @rule(name=names, rows=st.integers(1, 3), count=st.integers(1, 9), layers=st.integers(1, 3))
    def tear(self, name, rows, count, layers):
        """A forward that stops, as if the user had pressed Ctrl-C in the model."""
        most = len(self.layout.layers) - 1
        try:
            forward(*self.pairs[name], self.tokens(name, rows, count), layers=min(layers, most))
        except CapacityError:
            assert self.pairs[name][0].step is None

    @precondition(lambda self: self.disk is not None)
    @rule(name=names, count=st.integers(1, 5), nth=st.integers(1, 4))
    def lose_a_block(self, name, count, nth):
        """The disk fails to read once, perhaps in a copy that nobody waits for."""
        assert self.disk is not None
        self.disk.faults.fail("read", RecordError("bad sector"), nth=nth)
        try:
            forward(*self.pairs[name], self.tokens(name, 1, count))
        except (BlockLost, CapacityError):
            pass
        finally:
            self.settle()
            self.disk.faults.planned.clear()

    @rule(name=names, tokens=st.integers(0, 9) | st.just(1000))
    def crop(self, name, tokens):
        """Drop some of the last tokens, or all."""
        length = max(0, self.pairs[name][1].length - tokens)
        for cache in self.pairs[name]:
            cache.crop(length)

    @rule(name=names, data=st.data())
    def select(self, name, data):
        if rows := self.pairs[name][1].rows:
            indices = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=3))
            for cache in self.pairs[name]:
                cache.select(indices)

    @precondition(lambda self: len(self.pairs) < MOST_BATCHES)
    @rule(target=names, name=names)
    def fork(self, name):
        return self.keep(*(cache.fork() for cache in self.pairs[name]))

    @rule(name=names)
    def reset(self, name):
        self.pairs[name][0].reset()
        self.pairs[name][1].layers = []

    @rule(name=consumes(names))
    def release(self, name):
        new = self.tokens(name, 1, 1)
        batch, _ = self.pairs.pop(name)
        batch.release()
        batch.release()
        with pytest.raises(ClosedError, match="closed"):
            batch.append(0, *new[0])

    @rule(name=consumes(names))
    def drop(self, name):
        """Nobody releases the batch, perhaps in the middle of a forward."""
        del self.pairs[name]

    @rule(name=names)
    def read(self, name):
        batch, plain = self.pairs[name]
        for layer, wanted in enumerate(plain.layers):
            assert_same(batch.read(layer), wanted)

    @invariant()
    def lengths_and_budgets_hold(self):
        if not hasattr(self, "engine"):
            return
        for batch, plain in self.pairs.values():
            assert batch.length == plain.length
            assert batch.rows == plain.rows or not plain.length
        for tier, pool in self.engine.manager.pools.items():
            assert pool.used <= self.engine.stores.slots[tier]
        stats = self.engine.stats()
        for name in ("device", "host"):
            assert stats.tiers[name].peak_bytes <= stats.tiers[name].capacity_bytes


class OnThreads(Sequences):
    def make_transfers(self):
        return ThreadTransfers(2)

    def settle(self):
        for ticket in list(self.engine._mover._tickets.values()):
            self.transfers.settle(ticket)


class OnDisk(OnThreads):
    """The whole house: threads, and slices that really go to a file."""

    def make_disk(self, num_slots):  # the number is the file's to say
        self.folder = tempfile.TemporaryDirectory()
        return SpillStore(self.layout, self.folder.name, 1 << 25, write_queue_bytes=QUEUE_BYTES)

    def teardown(self):
        super().teardown()
        if hasattr(self, "folder"):
            assert not [path for path in Path(self.folder.name).rglob("*") if path.suffix == ".mdb"]
            self.folder.cleanup()


class HostAsStream(CudaTransfers):
    """The host is the compute stream here: what is ordered after a copy has to wait for it."""

    def order(self, ticket, timeout_seconds=WAIT_SECONDS):
        self.wait(ticket, timeout_seconds)


class OnStreams(OnThreads):
    """The executor for GPUs, on streams that advance at random."""

    def make_transfers(self):
        return HostAsStream("cuda:0", 2, FakeCuda(self.seed))


class Manual(Sequences):
    def make_transfers(self):
        return ManualTransfers()

    def settle(self):
        self.transfers.finish_some(random.Random(0))
        for ticket in self.transfers.pending:
            self.transfers.finish(ticket)
        self.transfers.submitted.clear()

    @precondition(lambda self: bool(getattr(self, "transfers", None) and self.transfers.pending))
    @rule(seed=st.integers(0, 2**16))
    def some_copies_end(self, seed):
        self.transfers.finish_some(random.Random(seed))


TestOnThreads = OnThreads.TestCase
TestOnThreads.settings = settings(max_examples=40, stateful_step_count=30)
TestOnDisk = OnDisk.TestCase
TestOnDisk.settings = settings(max_examples=15, stateful_step_count=30)
TestOnStreams = OnStreams.TestCase
TestOnStreams.settings = settings(max_examples=15, stateful_step_count=30)
TestManual = Manual.TestCase
TestManual.settings = settings(max_examples=40, stateful_step_count=30)
