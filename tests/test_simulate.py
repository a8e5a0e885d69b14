"""The simulator: what is conserved, what is bounded, what is the same each time, and what must not get worse."""

import random
import tracemalloc
from collections import Counter
from dataclasses import replace

import pytest

from tierkv.cost import CostModel, Costs, Line
from tierkv.errors import ConfigError
from tierkv.simulate import Simulation
from tierkv.simulate_requests import BlockIds, Sessions, TraceTurns
from tierkv.simulate_setup import Setup, make_setup
from tierkv.simulate_store import SimulatedStore
from tierkv.simulate_sweep import Job, parse_sweep, points_of, run_jobs
from tierkv.simulate_times import Times
from tierkv.tier import Tier, Wire
from tierkv.traces import Request, Workload

DEVICE, HOST, DISK = Tier
UP, DOWN = Wire(HOST, DEVICE), Wire(DEVICE, HOST)
BLOCK = 64
BLOCK_BYTES = 1 << 20
PLENTY = 10**6
CHAT = Workload(
    sessions=12, clients=6, system_tokens=300, first_tokens=400, turn_tokens=200, output_tokens=70, turns=5,
    turns_spread=0.3, tokens_spread=0.6, gap_seconds=0.5,
)  # fmt: skip


def cost(speed=1.0):
    wires = {
        DOWN: Line(1e-6, 1e9 * speed),
        UP: Line(1e-6, 1e9 * speed),
        Wire(HOST, DISK): Line(1e-5, 1e8 * speed),
        Wire(DISK, HOST): Line(1e-5, 2e8 * speed),
    }
    costs = Costs(
        step_seconds=0.002, row_seconds=1e-4, kv_bytes_per_second={DEVICE: 2e10}, wires=wires, token_seconds=2e-5,
        pair_seconds=1e-9,
    )  # fmt: skip
    return CostModel(costs, 4, BLOCK_BYTES, BLOCK)


def setup(device=60, host=40, disk=40, store=60, **settings):
    return Setup(
        slots={DEVICE: device, HOST: host, DISK: disk},
        store_blocks=store,
        slots_per_segment={DEVICE: 8, HOST: 8, DISK: 16},
        **({"batch": 4, "min_tokens": 0, "write_policy": "always"} | settings),
    )


def simulation(workload=CHAT, seed=0, model=None, **settings):
    return Simulation(model or cost(), setup(**settings), Sessions(workload, BLOCK, seed))


def facts(outcome):
    return {name: value for name, value in outcome.record().items() if name != "wall_seconds"}


class Watched:
    """A simulation with every decision of its manager counted, and everything checked that must hold at any time."""

    def __init__(self, simulation):
        self.simulation = simulation
        self.manager = simulation.steps.manager
        self.moves = Counter()
        self.checks = 0
        for name in ("begin", "background"):
            setattr(self.manager, name, self.watch(getattr(self.manager, name)))
        commit, complete = self.manager.commit, self.manager.complete

        def checked_commit(step):
            commit(step)
            self.check()

        def counted(move):
            self.moves[move.wire] += 1
            complete(move)
            self.check()

        self.manager.commit, self.manager.complete = checked_commit, counted

    def watch(self, method):
        def call(*args):
            answer = method(*args)
            self.check()
            return answer

        return call

    def check(self):
        self.checks += 1
        places, slots = self.manager.places, self.simulation._setup.slots
        for tier, pool in places.pools.items():
            assert pool.used <= slots[tier]
        tables = list(self.manager._tables)
        held = Counter(block for table in tables for block in table.blocks)
        for block, number in held.items():
            assert block.references == number, "a block has another number of owners than it knows of"
            assert number == 1 or block.sealed, "two sequences hold a block that is not finished"
        lying = Counter((tier, slot) for tier in Tier for b in places.lying_in(tier) for slot in [b.slots[tier]])
        assert not lying or max(lying.values()) == 1, "two blocks lie in one slot"
        for table in tables:
            assert all(block.slots for block in table.blocks), "a sequence has a block that lies nowhere"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "sizes",
    [
        {"device": 60, "host": 40},
        {"device": 30, "host": 20, "disk": 30, "store": 25},
        {"device": 200, "host": 0, "disk": 0, "store": 0},
        {"device": 26, "host": 300, "disk": 0, "store": 40, "promoted": ()},
        {"device": 40, "host": 30, "longest_jump": 1},
    ],
)
def test_nothing_is_lost_and_no_budget_is_exceeded(sizes, seed):
    watched = Watched(simulation(seed=seed, **sizes))
    outcome = watched.simulation.run()
    record = facts(outcome)
    assert watched.checks > 300
    assert outcome.counts.sessions + record["refused"]["requests"] >= CHAT.sessions
    slots = watched.simulation._setup.slots
    assert all(record["peak_blocks"][tier.label] <= slots[tier] for tier in Tier)
    assert record["peak_blocks"]["store"] <= watched.simulation._setup.store_blocks
    # In the end nothing is held, under way, or anywhere but in blocks that are kept for others.
    manager, steps = watched.manager, watched.simulation.steps
    steps.wait()  # clean copies that nobody waits for may be on their way
    steps.reap()
    assert not manager.moves
    assert not manager.places.steps
    assert not manager._tables
    assert sum(primary for primary, _ in manager.census().values()) == manager.shared.num_unused


@pytest.mark.parametrize("write_policy", ["always", "second_sighting", "never"])
def test_bytes_moved_are_blocks_times_their_size(write_policy):
    watched = Watched(simulation(device=40, host=30, write_policy=write_policy))
    written = Counter()
    store = watched.simulation.prefixes.store
    write = store._write

    def counted(tier, done):
        written[tier] += 1
        write(tier, done)

    store._write = counted
    outcome = watched.simulation.run()
    record = facts(outcome)
    for wire, blocks in record["blocks_moved"].items():
        assert record["bytes_moved"][wire] == blocks * BLOCK_BYTES
    assert outcome.counts.moves == sum(watched.moves.values())
    # Up: promotions and what is read from disk. Down: what gives way, clean copies, and what is written from the device.
    moved, moves = outcome.moved_blocks, watched.moves
    down = moves[DOWN] + moves[Wire(DEVICE, DISK)] + written[DEVICE]
    below = moved[DOWN] - down  # new blocks whose home was below the device
    assert below >= 0
    spilled = moves[Wire(DEVICE, DISK)] + moves[Wire(HOST, DISK)] + sum(written.values())
    assert moved.get(Wire(HOST, DISK), 0) >= spilled
    assert (sum(written.values()) > 0) == (write_policy != "never")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", [{}, {"host": 0, "disk": 0, "store": 0}, {"device": 30, "host": 10, "store": 200}])
def test_hit_ratios_add_up_and_none_is_above_the_ceiling(sizes, seed):
    outcome = simulation(seed=seed, **sizes).run()
    hits = facts(outcome)["hit_ratio"]
    assert hits["total"] == pytest.approx(hits["device"] + hits["host"] + hits["disk"], abs=2e-6)
    assert 0 < hits["total"] <= hits["ceiling"] < 1
    if not sizes.get("host", 1):
        assert hits["host"] == hits["disk"] == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("where", ["device", "host", "store"])
def test_tiers_without_bounds_reach_the_ceiling(seed, where):
    sizes = {"device": 60, "host": 0, "disk": 0, "store": 0} | {where: PLENTY}
    outcome = simulation(seed=seed, queue_blocks=PLENTY, **sizes).run()
    hits = facts(outcome)["hit_ratio"]
    assert hits["total"] == hits["ceiling"] > 0.5
    assert outcome.sessions_held == CHAT.sessions


def test_a_single_session_finds_all_that_was_said():
    """Exactly: full blocks of what the turns before came to, the last answer's last token aside."""
    workload = replace(CHAT, sessions=1, clients=1, turns=4, turns_spread=0.0, tokens_spread=0.0)
    outcome = simulation(workload, device=PLENTY).run()
    prompts = [700, 900, 1100, 1300]
    found = [(before + 69) // BLOCK * BLOCK for before in prompts[:-1]]
    assert outcome.counts.prompt_tokens == sum(prompts)
    assert outcome.counts.found_tokens == {DEVICE: sum(found), HOST: 0, DISK: 0}
    assert outcome.counts.findable_tokens == sum(found)
    assert outcome.counts.output_tokens == 4 * 70
    assert outcome.counts.inter_token.count == 4 * 69
    assert outcome.counts.ttft.count == 4


def test_times_of_a_lone_session_are_those_of_the_cost_model():
    workload = replace(CHAT, sessions=1, clients=1, turns=1, turns_spread=0.0, tokens_spread=0.0)
    model = cost()
    outcome = simulation(workload, device=PLENTY, model=model).run()
    prefill = model.prefill(700).seconds
    assert outcome.counts.ttft.mean == pytest.approx(prefill)
    per_token = BLOCK_BYTES / BLOCK
    decode = sum(model.decode({DEVICE: (700 + token) * per_token}).seconds for token in range(1, 70))
    assert outcome.counts.inter_token.total == pytest.approx(decode)
    assert outcome.counts.stall_seconds == 0


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "cost"])
def test_the_same_seed_gives_the_same_record_and_another_one_another(policy):
    first, again, other = (facts(simulation(seed=seed, eviction=policy).run()) for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.parametrize("seed", range(4))
def test_jumps_decide_what_single_tokens_decide(seed):
    """Nothing changes between block boundaries: taking them in one jump moves nothing else, and times stay close."""
    exact = simulation(seed=seed, device=60, host=60, longest_jump=1).run()
    fast = simulation(seed=seed, device=60, host=60).run()
    one, other = facts(exact), facts(fast)
    for name in ("requests", "sessions", "refused", "prompt_tokens", "output_tokens"):
        assert one[name] == other[name]
    assert exact.counts.inter_token.count == fast.counts.inter_token.count
    assert other["hit_ratio"]["total"] == pytest.approx(one["hit_ratio"]["total"], rel=0.03)
    assert other["inter_token_seconds"]["mean"] == pytest.approx(one["inter_token_seconds"]["mean"], rel=0.05)
    assert other["ttft_seconds"]["mean"] == pytest.approx(one["ttft_seconds"]["mean"], rel=0.15)


def test_one_sequence_at_a_time_is_exact_in_jumps_too():
    workload = replace(CHAT, clients=1)
    one, other = (facts(simulation(workload, device=PLENTY, batch=1, longest_jump=jump).run()) for jump in (1, 1 << 30))
    assert one.pop("virtual_seconds") == pytest.approx(other.pop("virtual_seconds"), rel=1e-5)
    for name in ("hit_ratio", "blocks_moved", "peak_blocks", "block_operations", "sessions_held"):
        assert one[name] == other[name]


@pytest.mark.parametrize("seed", range(5))
def test_wires_twice_as_fast_make_nothing_worse(seed):
    slow, fast = (
        facts(simulation(seed=seed, device=40, host=60, model=cost(speed)).run())["ttft_seconds"]
        for speed in (1.0, 2.0)
    )
    assert fast["p50"] <= slow["p50"] * 1.05
    assert fast["mean"] <= slow["mean"] * 1.05


def test_steps_stall_only_where_room_has_to_be_made():
    roomy = simulation(device=PLENTY, store=0).run()
    assert roomy.counts.waits == 0
    assert roomy.counts.stall_seconds == roomy.counts.restore_seconds == 0
    tight = simulation(device=30, host=60, store=0).run()
    assert tight.counts.waits > 0
    assert tight.counts.stall_seconds > 0


def test_what_is_on_disk_is_waited_for():
    outcome = simulation(device=40, host=0, disk=0, store=PLENTY, queue_blocks=PLENTY).run()
    assert outcome.counts.found_tokens[DISK] > 0
    blocks = outcome.moved_blocks[Wire(DISK, HOST)]
    assert outcome.counts.restore_seconds >= blocks * BLOCK_BYTES / 2e8


def test_prompts_that_could_never_fit_are_refused_with_the_reason():
    requests = [
        Request(0.0, 64 * 100, 5, tuple(range(13)), "a"),
        Request(1.0, 200, 5, (99,), "b"),
        Request(2.0, 0, 1, ()),
    ]
    outcome = Simulation(cost(), setup(device=20, host=20, disk=0), TraceTurns(requests, BLOCK)).run()
    refused = facts(outcome)["refused"]
    assert outcome.counts.requests == 1
    assert refused["requests"] == 2
    assert set(refused["reasons"]) == {
        "longer than all tiers together, which hold 40 blocks of 64 tokens",
        "the prompt is empty",
    }


def test_a_prompt_may_exceed_the_device():
    requests = [Request(0.0, 64 * 50, 100, tuple(range(7)), "a")]
    outcome = Simulation(cost(), setup(device=20, host=60, disk=0), TraceTurns(requests, BLOCK)).run()
    assert outcome.counts.requests == 1
    assert outcome.counts.output_tokens == 100
    assert outcome.streamed_bytes[UP] > 30 * BLOCK_BYTES * 99  # at every token
    assert outcome.moved_blocks[DOWN] >= 30


def test_a_turn_waits_for_the_answer_that_it_continues():
    requests = [Request(0.0, 1000, 50, (), "a"), Request(0.0001, 1100, 50, (), "a"), Request(0.0002, 500, 5, (), "b")]
    outcome = Simulation(cost(), setup(device=PLENTY, batch=4), TraceTurns(requests, BLOCK)).run()
    assert outcome.counts.requests == 3
    assert outcome.counts.found_tokens[DEVICE] == (1000 + 49) // BLOCK * BLOCK


def test_ids_of_a_trace_are_chained():
    """Equal ids behind different ones are other tokens; with blocks smaller than those of the ids each has its parts."""
    requests = [Request(0.0, 1536, 2, (1, 2, 3)), Request(9.0, 1536, 2, (1, 9, 3)), Request(18.0, 1536, 2, (1, 2, 3))]
    outcome = Simulation(cost(), setup(device=PLENTY), TraceTurns(requests, BLOCK)).run()
    assert outcome.counts.found_tokens[DEVICE] == outcome.counts.findable_tokens == 512 + 1535
    with pytest.raises(ValueError, match="no multiple of 96"):
        TraceTurns([Request(0.0, 512, 1, (1,))], 96).take()


def test_block_ids_are_one_number_a_block():
    ids = BlockIds([(5,), (7,)], 4)
    assert len(ids) == 8
    assert (ids[0:4], ids[4:8], ids[5]) == ((5,), (7,), 7)


@pytest.mark.slow
@pytest.mark.parametrize("requests", [10_000])
def test_memory_does_not_grow_with_the_number_of_requests(requests):
    workload = replace(CHAT, first_tokens=100, turn_tokens=70, output_tokens=20, system_tokens=64, turns_spread=0.0)

    def peak(sessions):
        run = simulation(replace(workload, sessions=sessions), device=40, host=20, disk=0, store=30)
        tracemalloc.start()
        outcome = run.run()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert outcome.counts.requests == sessions * 5
        return most

    assert peak(requests // 5) < 1.5 * peak(requests // 50)


def test_a_million_operations_would_take_less_than_a_minute():
    run = simulation(replace(CHAT, sessions=400), device=300, host=300, disk=0, store=500, batch=8)
    outcome = run.run()
    assert outcome.counts.block_operations > 20_000
    assert outcome.wall_seconds / outcome.counts.block_operations < 60e-6 * 3  # a busy machine is no slow program


# -- parts --------------------------------------------------------------------------------------------------------


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
        self.waiting = []
        self.store = SimulatedStore(
            blocks, 100, write=lambda tier, done: self.waiting.append(done),
            **({"eviction": "lru", "write_policy": "always", "queue_blocks": 100} | settings),
        )  # fmt: skip
        self.manager_blocks = {}

    def offer(self, chain, first=0):
        from tierkv.block_table import Block

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
    done = []
    outcomes = run_jobs(jobs, done.append)
    assert sum(done) == 3
    assert [facts(one) for one in outcomes] == [facts(job.run()) for job in jobs]
