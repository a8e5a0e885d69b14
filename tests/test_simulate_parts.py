"""The parts of a simulation: percentiles, the store, budgets, and sweeps."""

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.simulations import BLOCK, BLOCK_BYTES, CHAT, DEVICE, DISK, HOST, UP, cost, facts
from tierkv.block_table import Block
from tierkv.cost import CostModel, Costs, Line
from tierkv.errors import ConfigError
from tierkv.simulate import Simulation
from tierkv.simulate_requests import Sessions
from tierkv.simulate_setup import make_setup
from tierkv.simulate_store import SimulatedStore
from tierkv.simulate_sweep import Job, parse_sweep, points_of, run_jobs
from tierkv.simulate_times import Times
from tierkv.tier import Wire

if TYPE_CHECKING:
    from collections.abc import Callable


def test_percentiles_are_within_half_a_percent():
    draw = random.Random(2)
    seconds = sorted(draw.lognormvariate(0, 2) for _ in range(5000))
    times = Times()
    for one in seconds:
        times.add(one)
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        assert times.quantile(share) == pytest.approx(seconds[max(0, -int(-share * 5000 // 1) - 1)], rel=0.006)
    assert times.mean == pytest.approx(sum(seconds) / 5000)
    times.add(0.0, 20_000)
    assert times.quantile(0.5) == 0.0
    assert Times().percentiles() == {"p50": None, "p90": None, "p99": None, "mean": None}
    with pytest.raises(ValueError, match="no duration"):
        times.add(-1.0)


class Store:
    """A simulated store whose writes end when the test says so."""

    def __init__(self, blocks, **settings):
        self.waiting: list[Callable[[], None]] = []
        self.store = SimulatedStore(
            blocks, 100, write=lambda tier, done: self.waiting.append(done),
            **({"eviction": "lru", "write_policy": "always", "queue_blocks": 100} | settings),
        )  # fmt: skip
        self.manager_blocks = {}

    def offer(self, chain, first=0):
        keys = [repr(chain[: at + 1]).encode() for at in range(len(chain))]
        blocks = [Block(at) for at in range(first, len(chain))]
        for block in blocks:
            block.slots = {DEVICE: 0}
        self.store.offer(keys, range(first, len(chain)), [1.0] * len(blocks), blocks)
        self.store.drain()
        return keys, blocks


def test_a_store_keeps_chains_whole_and_forgets_the_least_recent_leaf():
    store = Store(4)
    first, _ = store.offer("abc")
    other, _ = store.offer("x")
    assert (store.store.match(first), store.store.match(other)) == (3, 1)
    store.store.touch(first)
    third, _ = store.offer("yz")
    assert (store.store.match(first), store.store.match(other), store.store.match(third)) == (2, 0, 2)
    assert (store.store.num_evicted, len(store.store), store.store.peak_blocks) == (2, 4, 4)
    orphan, _ = store.offer("qrs", first=1)  # nobody has its first block
    assert store.store.match(orphan) == 0
    assert store.store.num_shed == 2


def test_a_store_takes_what_its_queue_has_room_for_and_sheds_what_is_gone():
    store = Store(10, queue_blocks=1)
    keys, blocks = store.offer("abc")
    assert store.store.match(keys) == 1
    assert store.store.waiting
    blocks[1].slots = {}
    store.waiting.pop()()
    store.store.drain()
    assert store.store.match(keys) == 1
    assert store.store.num_shed == 2  # it, and the one that continues it


def test_a_store_may_wait_for_the_second_sighting_or_never_write():
    store = Store(10, write_policy="second_sighting")
    keys, _ = store.offer("ab")
    assert store.store.match(keys) == 0
    keys, _ = store.offer("abc")
    assert store.store.match(keys) == 2
    never = Store(10, write_policy="never")
    keys, _ = never.offer("ab")
    assert never.store.match(keys) == 0


def test_budgets_become_slots():
    made = make_setup(cost(), device_bytes=10 * BLOCK_BYTES + 5, host_bytes=BLOCK_BYTES, disk_bytes=100 * BLOCK_BYTES)
    assert made.slots == {DEVICE: 10, HOST: 1, DISK: 50}
    assert made.store_blocks == 49  # records have a header, and lie in whole pages
    assert made.promoted == (HOST, DISK)
    with pytest.raises(ConfigError, match="cannot hold the 2 blocks"):
        make_setup(cost(), device_bytes=BLOCK_BYTES)
    bare = CostModel(Costs(step_seconds=0.1, kv_bytes_per_second={DEVICE: 1e9}), 4, BLOCK_BYTES, BLOCK)
    assert make_setup(bare, device_bytes=10 * BLOCK_BYTES).promoted == (DISK,)
    with pytest.raises(ConfigError, match="disk budget is of no use"):
        make_setup(bare, device_bytes=10 * BLOCK_BYTES, disk_bytes=10 * BLOCK_BYTES)


def test_a_machine_whose_device_is_ram_reads_both_tiers_where_they_lie():
    wires = {Wire(DEVICE, DISK): Line(0.0, 1e9), Wire(DISK, DEVICE): Line(0.0, 1e9)}
    costs = Costs(step_seconds=0.01, kv_bytes_per_second={DEVICE: 1e9}, wires=wires, token_seconds=1e-4, overlap=0.0)
    model = CostModel(costs, 4, BLOCK_BYTES, BLOCK)
    made = replace(
        make_setup(model, device_bytes=30 * BLOCK_BYTES, host_bytes=40 * BLOCK_BYTES, disk_bytes=80 * BLOCK_BYTES),
        min_tokens=0, write_policy="always",
    )  # fmt: skip
    outcome = Simulation(model, made, Sessions(CHAT, BLOCK)).run()
    assert outcome.counts.sessions == CHAT.sessions
    assert outcome.counts.found_tokens[HOST] > 0
    assert not outcome.streamed_bytes.get(UP)


# -- sweeps -------------------------------------------------------------------------------------------------------


def test_sweeps_are_geometric_or_lists():
    assert parse_sweep("host=64GiB..1TiB/5").values == tuple(64 * 2**30 * 2**step for step in range(5))
    assert parse_sweep("batch=1..100/3").values == (1, 10, 100)
    assert parse_sweep("batch=1..3/9").values == (1, 2, 3)
    assert parse_sweep("disk=0,1GiB").values == (0, 2**30)
    assert parse_sweep("policy=lru, cost").values == ("lru", "cost")
    points = points_of([parse_sweep("batch=1,2"), parse_sweep("policy=lru,cost")])
    assert points == [{"batch": batch, "policy": policy} for batch in (1, 2) for policy in ("lru", "cost")]
    assert points_of([]) == [{}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hots=1GiB..2GiB", "did you mean host=?"),
        ("host", "legal: device, host, disk, batch, clients, policy"),
        ("host=1..x", "is not a size"),
        ("host=0..1GiB", "cannot begin at 0"),
        ("host=40%,1GiB", "is a share"),
        ("host=1GiB..2GiB/1", "legal: 2 to 100"),
        ("host=1GiB..2GiB/x", "is not a size"),
        ("batch=0", "is no number"),
        ("batch=1.5", "is no number"),
        ("policy=fifo", '"fifo" is not a rule (legal: lru, s3fifo, cost)'),
        ("host=", "is not a size"),
    ],
)
def test_a_sweep_that_cannot_be_read_is_one_line(text, words):
    with pytest.raises(ConfigError) as caught:
        parse_sweep(text)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_too_many_points_are_refused():
    with pytest.raises(ConfigError, match="come to 400 points"):
        points_of([parse_sweep("host=1GiB..1TiB/20"), parse_sweep("disk=1GiB..1TiB/20")])
    with pytest.raises(ConfigError, match="two different things"):
        points_of([parse_sweep("host=1GiB,2GiB"), parse_sweep("host=1GiB,2GiB")])


def test_jobs_in_parallel_come_to_the_same_as_one_by_one():
    jobs = [
        Job(
            cost=cost(), budgets={DEVICE: blocks * BLOCK_BYTES, HOST: 40 * BLOCK_BYTES, DISK: 0}, batch=4, policy="lru",
            workload=CHAT,
        )
        for blocks in (40, 60, 80)
    ]  # fmt: skip
    done: list[int] = []
    outcomes = run_jobs(jobs, done.append)
    assert sum(done) == 3
    assert [facts(one) for one in outcomes] == [facts(job.run()) for job in jobs]
