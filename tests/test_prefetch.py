"""LayerReader: every layer comes back as ``torch.cat`` would have made it, from whatever tiers, fetched ahead of need.

Copies run only when the test says so, or when somebody waits for them. Until then their destinations are NaN.
"""

import itertools
import random

import pytest
import torch

from tierkv.errors import BlockLost, RecordError, TransferTimeout
from tierkv.testing.engines import (
    LAYOUTS,
    PlainCache,
    divide,
    forward,
    random_tokens,
    small_engine,
    small_layout,
)
from tierkv.testing.stores import DictStore, FaultyStore
from tierkv.testing.transfers import ManualTransfers
from tierkv.tier import Tier, Wire

FETCHES = {Wire(Tier.HOST, Tier.DEVICE), Wire(Tier.DISK, Tier.DEVICE)}
BUFFER_TOKENS = 120


class Bench:
    """An engine on manual transfers with exactly so many slots and buffers, and one batch beside its plain model."""

    def __init__(
        self, layout, *, device_slots=2, host_slots=3, buffers=2, rows=1, disk=True, dtype="float32", bounce=False
    ):
        self.layout = small_layout(layout, dtype)
        self.transfers = ManualTransfers()
        self.disk = FaultyStore(DictStore(self.layout)) if disk else None
        self.engine = small_engine(
            self.layout,
            device_tokens=BUFFER_TOKENS * 8,
            host_tokens=BUFFER_TOKENS * 8 if bounce else host_slots * self.layout.block_size,
            disk=self.disk,
            transfers=self.transfers,
            bounce=bounce,
        )
        if bounce:
            assert self.engine.manager.resize(Tier.HOST, host_slots) is None
        divide(
            self.engine, device_slots=device_slots * rows, num_buffers=buffers, buffer_tokens=BUFFER_TOKENS * rows // 3
        )
        self.rows = rows
        self.seeds = itertools.count()
        self.batch, self.plain = self.engine.open(), PlainCache(self.layout)

    def tokens(self, count):
        return random_tokens(self.layout, self.rows, count, next(self.seeds))

    def forward(self, count, layers=None):
        forward(self.batch, self.plain, self.tokens(count), layers)

    def poison_scratch(self):
        """Nothing that an earlier layer left in a buffer shall pass for what this one needs."""
        slabs = [self.engine.stores.device] + [self.engine.stores.host] * bool(self.engine.stores.bounce)
        for slab, group in itertools.product(slabs, range(len(self.layout.groups))):
            for flat in slab.scratch_tensors(group):
                flat.fill_(float("nan"))

    def fetches(self):
        """Unfinished fetches."""
        return [ticket for ticket in self.transfers.pending if ticket.copies[0].wire in FETCHES]


@pytest.fixture
def make():
    """Benches, closed afterwards; closing fails where a copy's source or destination was touched under it."""
    benches = []

    def make(*args, **options):
        benches.append(Bench(*args, **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.engine.close()


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounce", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("buffers", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_prefill_chunks_and_decoding_equal_the_plain_cache(make, layout, buffers, rows, bounce):
    bench = make(layout, buffers=buffers, rows=rows, bounce=bounce)
    for count in (13, 7, 1, 1, 4, 1, 1, 1, 1, 5, 1):
        bench.poison_scratch()
        bench.forward(count)
    census = bench.engine.manager.census()
    assert all(census[tier][0] for tier in Tier), "the test shall read from all tiers"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes(make, dtype):
    bench = make("two groups", dtype=dtype)
    for count in (21, 1, 1):
        bench.forward(count)


@pytest.mark.parametrize(("host_slots", "disk"), [(0, True), (20, False)])
def test_two_tiers_are_enough(make, host_slots, disk):
    bench = make("sliding", host_slots=host_slots, disk=disk)
    for count in (21, 1, 1, 6, 1):
        bench.poison_scratch()
        bench.forward(count)


@pytest.mark.parametrize("seed", range(12))
def test_random_forwards_with_copies_that_end_at_random(make, seed):
    rng = random.Random(seed)
    rows = rng.randint(1, 3)
    bench = make(
        rng.choice(list(LAYOUTS)),
        device_slots=rng.randint(2, 4),
        host_slots=rng.randint(0, 6),
        buffers=rng.randint(1, 3),
        rows=rows,
        bounce=rng.random() < 0.5,
    )
    while bench.plain.length < 33:
        new = bench.tokens(rng.choice((1, 1, 1, 2, 5, 9)))
        if bench.plain.length + new[0][0].shape[2] > 40:
            break
        for layer, (keys, values) in enumerate(new):
            got = bench.batch.append(layer, keys, values)
            wanted = bench.plain.seen(layer, (keys, values))
            assert all(map(torch.equal, got, wanted))
            bench.transfers.finish_some(rng)
            assert all(map(torch.equal, got, wanted)), "a fetch ahead hit the buffer of a layer that attention reads"
        bench.plain.extend(new)


def test_a_window_fetches_no_more_than_it_needs(make):
    bench = make("sliding", device_slots=2, host_slots=20, disk=False, buffers=1)
    bench.forward(24)
    bench.forward(1)
    before = len(bench.transfers.submitted)
    bench.forward(1)
    fetched = [
        sum(destination.shape[-2] for destination, _ in (pair for copy in ticket.copies for pair in copy.tensors)) // 2
        for ticket in bench.transfers.submitted[before:]
        if ticket.copies[0].wire in FETCHES
    ]
    cold = sum(
        extent.stop - extent.start
        for extent in bench.batch.tables[0].extents(0, 25, dict.fromkeys(Tier, 1))
        if extent.tier
    )
    assert max(fetched) == cold
    assert min(fetched) < 6


# -- time -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_layers_are_fetched_ahead(make, buffers):
    bench = make("plain", buffers=buffers)
    bench.forward(30)
    new = bench.tokens(1)
    num_layers = len(new)
    for layer, tokens in enumerate(new):
        bench.batch.append(layer, *tokens)
        if layer + 1 < num_layers:
            assert len(bench.fetches()) == min(buffers - 1, num_layers - 1 - layer)
    assert bench.fetches() == []


def test_what_has_not_arrived_would_be_noticed(make, monkeypatch):
    """The poison works: a reader that does not wait hands out NaN."""
    bench = make("plain", host_slots=20, disk=False)
    bench.forward(30)
    monkeypatch.setattr(bench.engine.fetcher, "order", lambda layer: None)
    keys, _ = bench.batch.append(0, *bench.tokens(1)[0])
    assert keys.isnan().any()


def test_the_time_spent_waiting_is_counted(make):
    bench = make("plain")
    bench.forward(30)
    before = bench.engine.fetcher.stall_seconds
    bench.forward(1)
    assert bench.engine.fetcher.stall_seconds > before


def test_fetched_bytes_are_counted_by_wire(make):
    bench = make("plain", device_slots=2, host_slots=3)
    bench.forward(32)
    moved = dict(bench.engine.moved)
    bench.forward(1)
    census = {tier: blocks for tier, (blocks, _) in bench.engine.manager.census().items()}
    for tier in (Tier.HOST, Tier.DISK):
        fetched = bench.engine.moved[Wire(tier, Tier.DEVICE)] - moved.get(Wire(tier, Tier.DEVICE), 0)
        assert fetched >= (census[tier] - 1) * bench.layout.block_bytes


# -- torn forwards and errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_end_of_a_torn_forward_waits_for_fetches_that_nobody_collected(make, layers):
    bench = make("plain", buffers=3)
    bench.forward(30)
    bench.forward(1, layers)
    assert bench.fetches()
    assert bench.batch.rollback()
    assert bench.fetches() == []
    bench.forward(2)


def test_a_slice_that_cannot_be_read_is_lost_and_what_follows_is_right(make):
    bench = make("plain")
    bench.forward(30)
    bench.disk.faults.fail("read", RecordError("bad sector"))
    with pytest.raises(BlockLost, match="bad sector"):
        bench.forward(1)
    assert bench.batch.length == 30
    bench.forward(3)


@pytest.mark.parametrize("error", [RecordError("bad sector"), OSError("cable pulled"), MemoryError("no pinned memory")])
def test_a_failed_fetch_can_be_rolled_back_whatever_its_error(make, error):
    bench = make("plain", host_slots=20, disk=False, buffers=3)
    bench.forward(30)
    bench.forward(1, 1)
    for ticket in bench.fetches():
        bench.transfers.fail(ticket, error)
    with pytest.raises((BlockLost, OSError, MemoryError)):
        bench.batch.append(1, *bench.tokens(1)[1])
    bench.forward(2)


def test_a_fetch_that_does_not_end_in_time_keeps_its_slots(make):
    bench = make("plain", host_slots=20, disk=False)
    bench.forward(30)
    bench.transfers.patient = False
    with pytest.raises(TransferTimeout):
        bench.forward(1)
    assert bench.fetches()
    with pytest.raises(TransferTimeout):
        bench.batch.rollback()
    bench.transfers.patient = True
    bench.forward(2)


def test_a_second_batch_waits_for_the_fetches_of_a_torn_one(make):
    bench = make("plain", host_slots=40, disk=False, buffers=3)
    bench.forward(30)
    assert bench.engine.manager.resize(Tier.DEVICE, 8) is None  # room for the other one without any move
    bench.forward(1, 1)
    assert bench.fetches()
    other, plain = bench.engine.open(), PlainCache(bench.layout)
    for count in (8, 1):
        forward(other, plain, bench.tokens(count))
    bench.forward(2)


def test_a_torn_batch_takes_no_room_from_a_second_one(make):
    bench = make("plain", host_slots=40, disk=False, buffers=3)
    bench.forward(30)
    bench.forward(1, 1)
    forward(bench.engine.open(), PlainCache(bench.layout), bench.tokens(8))
    bench.forward(2)


def test_a_second_batch_waits_for_the_fetches_of_one_that_was_dropped_torn(make):
    bench = make("plain", host_slots=40, disk=False, buffers=3)
    bench.forward(30)
    assert bench.engine.manager.resize(Tier.DEVICE, 8) is None
    other, plain = bench.engine.open(), PlainCache(bench.layout)
    forward(other, plain, bench.tokens(8))
    bench.forward(1, 1)
    assert bench.fetches()
    bench.batch = None
    for count in (1, 8):
        forward(other, plain, bench.tokens(count))
