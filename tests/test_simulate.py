"""The simulator: what is conserved, what is bounded, what is the same each time, and what must not get worse."""

import sys
import tracemalloc
from collections import Counter
from dataclasses import replace

import pytest

from tests.simulations import (
    BLOCK,
    BLOCK_BYTES,
    CHAT,
    DEVICE,
    DISK,
    DOWN,
    HOST,
    PLENTY,
    UP,
    Watched,
    cost,
    facts,
    setup,
    simulation,
)
from tierkv.simulate import Simulation
from tierkv.simulate_requests import BlockIds, TraceTurns
from tierkv.tier import Tier, Wire
from tierkv.traces import Request


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
    written: Counter[Tier] = Counter()
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
    watched.simulation._wires.run_to(float("inf"))  # a few blocks are still under way when the last answer ends
    assert outcome.counts.moves == sum(watched.moves.values()) + len(watched.manager.moves)
    # Up: promotions and what is read from disk. Down: what gives way, clean copies, and what is written from the device.
    moved, moves = watched.simulation._wires.num_blocks, watched.moves
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
    assert other["hit_ratio"]["total"] == pytest.approx(one["hit_ratio"]["total"], rel=0.05)
    assert other["inter_token_seconds"]["mean"] == pytest.approx(one["inter_token_seconds"]["mean"], rel=0.05)
    assert other["ttft_seconds"]["mean"] == pytest.approx(one["ttft_seconds"]["mean"], rel=0.25)


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

    peak(50)  # whatever is made once
    assert peak(requests // 5) - peak(requests // 50) < 32 * requests  # not a single object for each


def test_work_for_a_block_does_not_grow_with_the_number_of_sessions():
    def calls_per_operation(sessions):
        run = simulation(replace(CHAT, sessions=sessions), device=300, host=300, disk=0, store=500, batch=8)
        calls = 0

        def count(frame, event, arg):
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        try:
            outcome = run.run()
        finally:
            sys.setprofile(None)
        return calls / outcome.counts.block_operations

    few, many = calls_per_operation(40), calls_per_operation(160)
    assert many < 1.5 * few
