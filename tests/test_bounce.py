"""Between a GPU and the disk: all bytes pass through a lent part of the host pool, which is part of the host budget."""

import random

import pytest
import torch

from tierkv.capacity import Capacity
from tierkv.errors import CapacityError, TransferTimeout
from tierkv.geometry import PoolGeometry
from tierkv.stores import BOUNCE_BLOCKS, bounce_of
from tierkv.testing.engines import LAYOUTS, PlainCache, divide, forward, random_tokens, small_engine, small_layout
from tierkv.testing.fake_cuda import FakeCuda
from tierkv.testing.stores import DictStore, FaultyStore
from tierkv.testing.transfers import ManualTransfers
from tierkv.tier import Tier, Wire
from tierkv.transfer_cuda import CudaTransfers


def engine_with(layout, transfers=None, *, device_tokens=200, host_tokens=100, layers_ahead=1, disk=None):
    return small_engine(
        layout,
        device_tokens=device_tokens,
        host_tokens=host_tokens,
        disk=disk or DictStore(layout),
        transfers=transfers,
        layers_ahead=layers_ahead,
        bounce=True,
    )


def shrink(engine, num_buffers=2):
    """Leave three device slots, two host slots and buffers of 130 tokens, so that most blocks lie on disk."""
    divide(engine, device_slots=3, num_buffers=num_buffers, buffer_tokens=130)
    assert engine.manager.resize(Tier.HOST, 2) is None


class Spy:
    """Notes every tensor that a disk store is asked to fill. (What it saves it copies into its queue at once.)"""

    def __init__(self, store):
        self.store, self.seen = store, []

    def __getattr__(self, name):
        return getattr(self.store, name)

    def read(self, layer, run, keys, values, first_token=0):
        self.seen += [keys, values]
        self.store.read(layer, run, keys, values, first_token)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_comes_from_disk_lands_in_the_host_pool(name):
    layout = small_layout(name)
    disk = Spy(DictStore(layout))
    with engine_with(layout, device_tokens=600, host_tokens=600, disk=disk) as engine:
        shrink(engine)
        batch, plain = engine.open(), PlainCache(layout)
        for seed, count in enumerate((100, 1, 1, 20, 1)):
            forward(batch, plain, random_tokens(layout, 1, count, seed))
        assert {wire for wire in engine.moved if Tier.DISK in wire} >= {Wire(Tier.DISK, Tier.DEVICE)}
        pool = {flat.untyped_storage().data_ptr() for pair in engine.stores.host._flat for flat in pair}
        assert disk.seen
        assert {tensor.untyped_storage().data_ptr() for tensor in disk.seen} <= pool


@pytest.mark.parametrize("seed", range(25))
def test_whatever_order_streams_allow_the_layers_are_right(seed):
    """A simulated CUDA: a buffer that was filled too early, or a slot reused too early, shows as poison or mixed bytes."""
    rng = random.Random(seed)
    layout, cuda = small_layout(rng.choice(sorted(LAYOUTS))), FakeCuda(seed, takes_pitched=rng.random() < 0.5)
    transfers = CudaTransfers("cuda:0", 2, cuda)
    with engine_with(layout, transfers, device_tokens=600, host_tokens=600) as engine:
        shrink(engine, num_buffers=rng.randint(1, 3))
        for pair in engine.stores.device._flat:
            for flat in pair:
                cuda.on_device(flat)
        batch, plain = engine.open(), PlainCache(layout)
        while plain.length < 70:
            new = random_tokens(layout, 1, rng.choice((1, 1, 2, 9, 20)), plain.length)
            if plain.length + new[0][0].shape[2] > 80:
                break
            for layer, (keys, values) in enumerate(new):
                got = batch.append(layer, keys, values)
                cuda.run_until(lambda: not cuda.compute.queue)  # attention reads when the stream gets there
                assert all(map(torch.equal, got, plain.seen(layer, (keys, values))))
            plain.extend(new)
        assert engine.moved.get(Wire(Tier.DISK, Tier.DEVICE), 0) > 0
        cuda.advance()
        stats = engine.stats()
        assert stats.counters.copy_seconds > 0
        assert stats.counters.stall_seconds > 0
        assert stats.overlap == max(0.0, 1 - stats.counters.stall_seconds / stats.counters.copy_seconds)


def test_whole_blocks_pass_a_few_at_a_time():
    layout, transfers = small_layout("plain"), ManualTransfers()
    with engine_with(layout, transfers, device_tokens=400, host_tokens=160) as engine:
        batch, plain = engine.open(), PlainCache(layout)
        assert engine.manager.resize(Tier.HOST, 0) is None  # everything goes straight to disk
        forward(batch, plain, random_tokens(layout, 1, 300, 1))
        other = engine.open()
        forward(other, PlainCache(layout), random_tokens(layout, 1, 200, 2))
        assert engine.moved[Wire(Tier.DEVICE, Tier.DISK)] > 2 * BOUNCE_BLOCKS * layout.block_bytes
        under_way = [ticket for ticket in transfers.pending if Tier.DISK in ticket.copies[0].wire]
        assert len(under_way) <= BOUNCE_BLOCKS
        forward(batch, plain, random_tokens(layout, 1, 1, 3))


def test_a_move_that_never_ends_stops_those_behind_it_and_nothing_is_lost():
    layout, transfers = small_layout("plain"), ManualTransfers()
    disk = FaultyStore(DictStore(layout))
    with engine_with(layout, transfers, device_tokens=400, host_tokens=160, disk=disk) as engine:
        batch, plain = engine.open(), PlainCache(layout)
        assert engine.manager.resize(Tier.HOST, 0) is None
        forward(batch, plain, random_tokens(layout, 1, 300, 1))
        transfers.patient = False
        with pytest.raises(TransferTimeout):
            forward(engine.open(), PlainCache(layout), random_tokens(layout, 1, 200, 2))
        transfers.patient = True
        forward(batch, plain, random_tokens(layout, 1, 1, 3))


def test_the_lent_part_is_reported_and_stays_within_the_budget():
    layout = small_layout("plain")
    with engine_with(layout, device_tokens=200, host_tokens=160) as engine:
        batch, plain = engine.open(), PlainCache(layout)
        engine.reserve(batch, 2, 120)
        before = engine.usage.now(Tier.HOST)
        assert before >= layout.scratch_bytes(1, engine.scratch.tokens) > 0
        for seed, count in enumerate((100, 1, 19)):
            forward(batch, plain, random_tokens(layout, 2, count, seed))
        assert before < engine.usage.peak(Tier.HOST) <= engine.budgets.host
        lent = engine.stores.bounce_slots
        assert max(lent) < engine.stores.host.usable_slots
        assert engine.manager.pools[Tier.HOST].num_slots <= min(lent)


def test_a_host_pool_smaller_than_one_layer_is_refused_with_the_capacity_that_would_do():
    layout = small_layout("plain", block_size=16)
    with engine_with(layout, device_tokens=10_000, host_tokens=300) as engine:
        batch = engine.open()
        engine.reserve(batch, 1, 900)
        with pytest.raises(CapacityError, match=r"host\.capacity for example \"2MiB\", or set disk\.capacity = 0"):
            engine.reserve(batch, 1, 1200)
        engine.reserve(batch, 1, 900)


def test_fewer_layers_are_fetched_ahead_where_the_host_pool_lends_less_than_the_device():
    layout = small_layout("plain", block_size=16)
    with engine_with(layout, host_tokens=300) as engine:
        roomy = Capacity(
            layout, PoolGeometry(layout, 10_000 * layout.token_bytes), 0, 1000, 3, bounce=engine.stores.bounce
        )
        assert roomy.plan(1, 200).num_buffers == 4
        assert roomy.plan(1, 400).num_buffers == 2
        plan = roomy.plan(1, 900)
        assert (plan.num_buffers, plan.device_slots > 0, plan.host_slots >= 0) == (1, True, True)


@pytest.mark.parametrize(("host_tokens", "blocks"), [(4, 1), (32, 1), (64, 2), (1000, BOUNCE_BLOCKS)])
def test_a_small_host_pool_lends_fewer_blocks(host_tokens, blocks):
    layout = small_layout("plain")
    with engine_with(layout, host_tokens=host_tokens) as engine:
        assert bounce_of(engine.stores.host).blocks == blocks
        assert engine.stores.slots[Tier.HOST] == engine.stores.host.num_slots - blocks
