"""PagedReader: attention over blocks wherever they lie equals attention over the plain cache, fetched ahead of need.

Copies run only when the test says so, or when somebody waits for them. Until then their destinations are NaN, and the
memory of tokens that nobody has written or that padding hides is NaN too.
"""

import itertools
import random

import pytest
import torch

from tierkv.capacity import CHUNK_TOKENS
from tierkv.cold_reads import ColdReads
from tierkv.cost import Costs, Line
from tierkv.errors import BlockLost, RecordError, TransferTimeout, UnsafeCall
from tierkv.kernels import cpu, reference
from tierkv.testing.engines import LAYOUTS, PlainCache, divide, random_tokens, small_engine, small_layout
from tierkv.testing.stores import DictStore, FaultyStore
from tierkv.testing.transfers import ManualTransfers
from tierkv.tier import Tier, Wire

FETCHES = {Wire(Tier.HOST, Tier.DEVICE), Wire(Tier.DISK, Tier.DEVICE)}
GROUP = 3

pytestmark = pytest.mark.skipif(
    bool(cpu.unsupported(torch.float32, 4, 4, GROUP)), reason=cpu.unsupported(torch.float32, 4, 4, GROUP)
)


class Bench:
    """An engine on manual transfers with few slots and a small ring, and one batch beside its plain model."""

    def __init__(
        self, layout="plain", *, device_slots=2, host_slots=3, buffers=2, buffer_tokens=8, rows=1, disk=True,
        dtype="float32", bounce=False, pads=None, transfers=None, cold_read="auto",
    ):  # fmt: skip
        self.layout = small_layout(layout, dtype)
        self.transfers = transfers or ManualTransfers()
        self.disk = FaultyStore(DictStore(self.layout)) if disk else None
        self.engine = small_engine(
            self.layout, device_tokens=1000, host_tokens=1000, disk=self.disk, transfers=self.transfers, bounce=bounce,
            cold_read=cold_read,
        )  # fmt: skip
        for slab in (self.engine.stores.device, self.engine.stores.host):
            for flat in itertools.chain(*slab._flat):
                flat.fill_(float("nan"))
        divide(self.engine, device_slots=device_slots * rows, num_buffers=buffers, buffer_tokens=max(buffer_tokens, 4))
        assert self.engine.manager.resize(Tier.HOST, host_slots) is None
        self.rows, self.pads = rows, pads or [0] * rows
        self.seeds = itertools.count()
        self.batch, self.plain = self.engine.open(), PlainCache(self.layout)

    def tokens(self, count):
        return random_tokens(self.layout, self.rows, count, next(self.seeds))

    def queries(self, layer, count):
        spec = self.layout.layers[layer]
        generator = torch.Generator().manual_seed(next(self.seeds))
        shape = self.rows, count, spec.kv_heads * GROUP, spec.key_dim
        return torch.randn(shape, generator=generator).to(getattr(torch, self.layout.dtype)).transpose(1, 2)

    def append(self, layer, new):
        self.batch.first_seen = self.pads
        self.batch.append_paged(layer, *new[layer])

    def attend(self, layer, query, **how):
        return self.batch.attend(layer, query, scale=0.4, **how)

    def expected(self, layer, query, new, softcap=None, sinks=None):
        keys, values = (
            torch.cat([old, more], 2)
            for old, more in zip(self.plain.layers[layer] if self.plain.layers else new[layer], new[layer], strict=True)
        )
        if not self.plain.layers:
            keys, values = new[layer]
        total, count = keys.shape[2], query.shape[2]
        positions = torch.arange(total).repeat(self.rows, 1)
        for row, pad in enumerate(self.pads):
            positions[row, :pad] = -1
        part = reference.attention(
            query.double(), keys.double(), values.double(), positions, start=total - count, scale=0.4,
            window=self.layout.layers[layer].window, softcap=softcap,
        )  # fmt: skip
        return reference.merge([part], sinks)[0]

    def forward(self, count, layers=None, tolerance=2e-6, **how):
        new = self.tokens(count)
        for layer in range(len(new) if layers is None else layers):
            query = self.queries(layer, count)
            self.append(layer, new)
            got, wanted = self.attend(layer, query, **how), self.expected(layer, query, new, **how)
            assert got.dtype == query.dtype
            assert got.is_contiguous()
            torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=tolerance)
        if layers is None:
            self.plain.extend(new)

    def fetches(self):
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


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounce", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("buffers", "buffer_tokens"), [(1, 4), (2, 9), (3, 40)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_prefill_chunks_and_decoding_equal_attention_over_the_plain_cache(
    make, layout, buffers, buffer_tokens, rows, bounce
):
    bench = make(layout, buffers=buffers, buffer_tokens=buffer_tokens, rows=rows, bounce=bounce)
    for count in (13, 7, 1, 1, 4, 1, 1, 1, 1, 5, 1):
        bench.forward(count)
    census = bench.engine.manager.census()
    assert all(census[tier][0] for tier in Tier), "the test shall read from all tiers"


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 2e-2), ("float16", 2e-3)])
def test_other_dtypes(make, dtype, tolerance):
    bench = make("two groups", dtype=dtype)
    for count in (21, 1, 1, 6):
        bench.forward(count, tolerance=tolerance)


@pytest.mark.parametrize("layout", ["plain", "sliding"])
@pytest.mark.parametrize("pads", [[0, 5, 13], [2, 0, 0]])
def test_padding_is_never_seen(make, layout, pads):
    """A prompt's padding in the past, in the chunk that attends, or both; rows whose queries are padding see nothing."""
    bench = make(layout, rows=3, pads=pads)
    for count in (6, 4, 9, 1, 1, 3):
        bench.forward(count)


def test_softcap_and_sinks(make):
    bench = make("plain")
    for count in (14, 1, 1):
        bench.forward(count, softcap=1.5, sinks=torch.tensor([0.3, -1.0, 2.0, 0.0, 0.5, -8.0]))


@pytest.mark.parametrize("seed", range(16))
def test_random_forwards_with_copies_that_end_at_random(make, seed):
    rng = random.Random(seed)
    rows = rng.randint(1, 3)
    bench = make(
        rng.choice(list(LAYOUTS)),
        device_slots=rng.randint(2, 4),
        host_slots=rng.randint(0, 6),
        buffers=rng.randint(1, 3),
        buffer_tokens=rng.randint(4, 30),
        rows=rows,
        bounce=rng.random() < 0.5,
        cold_read=rng.choice(("auto", "stream", "compute", "promote")),
        pads=[rng.choice((0, 0, 3, 7)) for _ in range(rows)],
    )
    while bench.plain.length < 40:
        bench.forward(rng.choice((1, 1, 1, 2, 5, 9)))
        bench.transfers.finish_some(rng)


def test_gathered_and_paged_forwards_may_follow_each_other(make):
    bench = make("two groups")
    bench.forward(17)
    new = bench.tokens(1)
    for layer, (keys, values) in enumerate(new):
        got = bench.batch.append(layer, keys, values)
        assert all(map(torch.equal, got, bench.plain.seen(layer, (keys, values))))
    bench.plain.extend(new)
    bench.forward(1)
    bench.forward(3)


@pytest.mark.parametrize("seed", range(6))
def test_the_way_to_read_host_memory_may_change_from_step_to_step(make, seed):
    """Few bytes are streamed, and from some on the CPU attends to them: the hops are dear here, and the wire is slow."""
    rng = random.Random(seed)
    host_slots = 40 if seed % 2 else 12  # where these are few, the disk is read in the same steps
    bench = make(rng.choice(list(LAYOUTS)), device_slots=3, host_slots=host_slots, rows=rng.randint(1, 2), bounce=True)
    layout = bench.layout
    turns_at = 20 * layout.token_bytes  # bytes whose copy takes as long as all hops
    costs = Costs(
        step_seconds=0.0, kv_bytes_per_second={Tier.DEVICE: 1e18, Tier.HOST: 1e18}, hop_seconds=1 / len(layout.layers),
        wires={Wire(Tier.HOST, Tier.DEVICE): Line(0.0, turns_at)},
    )  # fmt: skip
    bench.engine.paged._cold_reads = bench.engine.cold_reads = ColdReads("streamed", layout, costs)
    seen, counted = [], 0
    while bench.plain.length < 70:
        count = rng.choice((1, 1, 1, 6))
        bench.forward(count)
        counters = bench.engine.stats().counters
        seen.append((count, counters.cpu_forwards - counted))
        counted = counters.cpu_forwards
        bench.transfers.finish_some(rng)
    assert (bench.engine.manager.census()[Tier.DISK][0] > 0) == (host_slots == 12)
    assert {by_cpu for _, by_cpu in seen} == {0, 1}
    assert not [one for one in seen if one[0] > 1 and one[1]]
    by_cpu = [here for count, here in seen if count == 1]
    assert (by_cpu[0], by_cpu[-1]) == (0, 1)
    assert "attended to by the CPU" in bench.engine.cold_reads.describe()


def test_another_default_device_changes_nothing(make):
    bench = make("two groups")
    for count in (13, 1, 1):
        new = bench.tokens(count)
        for layer in range(len(new)):
            query = bench.queries(layer, count)
            with torch.device("meta"):
                bench.append(layer, new)
                got = bench.attend(layer, query)
            torch.testing.assert_close(got.double(), bench.expected(layer, query, new), rtol=2e-6, atol=2e-6)
        bench.plain.extend(new)


# -- when ---------------------------------------------------------------------------------------------------------------


def test_chunks_are_fetched_ahead_through_all_layers_and_a_buffer_is_refilled_once_read(make):
    bench = make("plain", host_slots=0, buffers=3, buffer_tokens=8)
    bench.forward(33)
    new = bench.tokens(1)
    per_layer = -(-(bench.engine.manager.census()[Tier.DISK][0]) // 2)
    assert per_layer > 1
    for layer in range(4):
        bench.append(layer, new)
        assert len(bench.fetches()) == (3 if layer < 3 or per_layer >= 3 else per_layer)
        bench.attend(layer, bench.queries(layer, 1))
    assert bench.fetches() == []


def test_without_waiting_for_a_fetch_the_result_would_be_poison(make, monkeypatch):
    bench = make("plain")
    bench.forward(30)
    monkeypatch.setattr(bench.engine.fetcher, "order", lambda key: None)
    with pytest.raises(AssertionError):
        bench.forward(1)
    monkeypatch.undo()
    bench.batch.rollback()
    bench.forward(1)


@pytest.mark.parametrize("cold_read", ["auto", "compute"])
def test_memory_that_a_cpu_can_read_is_not_copied(make, cold_read):
    bench = make("plain", host_slots=100, disk=False, cold_read=cold_read)
    for count in (40, 1, 1, 5):
        bench.forward(count)
    assert bench.engine.manager.census()[Tier.HOST][0] > 0
    assert Wire(Tier.HOST, Tier.DEVICE) not in bench.engine.moved
    assert bench.engine.fetcher.stall_seconds == 0


@pytest.mark.parametrize(("cold_read", "promoted"), [("stream", False), ("promote", True), ("auto", True)])
def test_blocks_move_up_for_good_only_where_that_is_wanted(make, cold_read, promoted):
    bench = make("plain", host_slots=100, disk=False, cold_read=cold_read)
    for count in (40, 1):
        bench.forward(count)
    assert bench.engine.manager.resize(Tier.DEVICE, 20) is None
    below = bench.engine.manager.census()[Tier.HOST][0]
    for _ in range(3):
        bench.forward(1)
        bench.transfers.finish_some(random.Random(0))
    bench.forward(1)
    assert (bench.engine.manager.census()[Tier.HOST][0] < below) == promoted


def test_a_context_may_be_many_times_larger_than_the_scratch():
    layout = small_layout("plain")
    with small_engine(layout, device_tokens=120, host_tokens=16, disk=DictStore(layout)) as engine:
        plan = engine.capacity.plan(1, 5_000, paged=True)
        assert plan.buffer_tokens < CHUNK_TOKENS
        assert plan.scratch_tokens < 500
        batch = engine.open()
        engine.reserve(batch, 1, 5_000, paged=True)


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


def test_a_fetch_that_does_not_end_in_time_keeps_its_slots(make):
    bench = make("plain")
    bench.forward(30)
    bench.transfers.patient = False
    with pytest.raises(TransferTimeout):
        bench.forward(1)
    assert bench.fetches()
    with pytest.raises(TransferTimeout):
        bench.batch.rollback()
    bench.transfers.patient = True
    bench.forward(2)


def test_a_layer_whose_attention_never_came_is_noticed(make):
    bench = make("plain")
    bench.forward(9)
    new = bench.tokens(1)
    bench.append(0, new)
    with pytest.raises(UnsafeCall, match=r'layer 0 did not read the cache; set attention\.path = "gathered"'):
        bench.append(1, new)
    with pytest.raises(UnsafeCall, match="was not given its new tokens"):
        bench.attend(1, bench.queries(1, 1))
    bench.batch.rollback()
    assert bench.batch.length == 9
    bench.forward(1)


def test_a_forward_that_ends_before_its_last_layer_has_attended_is_not_committed(make):
    bench = make("plain")
    bench.forward(9)
    new = bench.tokens(1)
    for layer in range(4):
        bench.append(layer, new)
        if layer < 3:
            bench.attend(layer, bench.queries(layer, 1))
    assert bench.batch.length == 9
    bench.batch.attended(3)
    assert bench.batch.length == 10
