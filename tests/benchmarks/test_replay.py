"""Replay: what is counted, and that the optimum is one."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.benchmarks.replay import BELADY, BLOCK_BYTES, HALF_ATTENTION, compile_trace, replay
from tierkv.eviction import POLICIES
from tierkv.traces import BLOCK_TOKENS, PRESETS, Request, generate


def trace_of(*chains, tokens_over=0):
    return compile_trace(
        Request(float(index), len(ids) * BLOCK_TOKENS + tokens_over, 1, (*ids, -1)[: len(ids) + (tokens_over > 0)])
        for index, ids in enumerate(chains)
    )


# Chains in a small tree: an id says which way to go.
CHAINS = st.lists(st.lists(st.integers(0, 1), min_size=0, max_size=4), min_size=1, max_size=8)


def test_blocks_are_numbered_by_all_that_comes_before_them():
    trace = trace_of([7, 8], [7, 9], [8, 8], [7, 8, 8])
    assert [list(blocks) for blocks in trace.requests] == [[0, 1], [0, 2], [3, 4], [0, 1, 5]]
    assert list(trace.parents) == [-1, 0, 0, -1, 3, 1]
    assert list(trace.depths) == [0, 1, 1, 0, 1, 2]
    facts = trace.facts()
    assert (facts["block_lookups"], facts["unique_blocks"], facts["ceiling"]) == (9, 6, round(3 / 9, 6))


def test_what_is_left_over_at_the_end_is_a_token_and_no_block():
    trace = trace_of([1, 2], [1, 2], tokens_over=BLOCK_TOKENS // 2)
    assert trace.lookups == 4
    assert trace.input_tokens == 5 * BLOCK_TOKENS
    outcome = replay(trace, "lru", 9 * BLOCK_BYTES)
    assert (outcome.block_hit_ratio, outcome.token_hit_ratio) == (0.5, 0.4)


def test_compute_counts_late_blocks_for_more():
    trace = trace_of([1, 2], [1, 3])
    outcome = replay(trace, "lru", 9 * BLOCK_BYTES)
    first, second = 1 + 256 / HALF_ATTENTION, 1 + (256 + 512) / HALF_ATTENTION
    assert outcome.block_hit_ratio == 0.25
    assert outcome.compute_hit_ratio == pytest.approx(first / (2 * (first + second)), abs=1e-6)


def test_a_small_example_by_hand():
    """Two blocks fit. LRU drops a's end for b, and b's for a; the optimum does not keep b at all."""
    trace = trace_of([1, 2], [3], [1, 2], [4], [1, 2])
    lru, best = (replay(trace, name, 2 * BLOCK_BYTES) for name in ("lru", BELADY))
    assert (lru.block_hits, lru.evictions) == (2, 4)
    assert (best.block_hits, best.evictions) == (4, 2)


@pytest.mark.parametrize("policy", [*POLICIES, BELADY])
@pytest.mark.parametrize("name", PRESETS)
def test_a_store_without_bounds_reaches_the_ceiling(policy, name):
    trace = compile_trace(generate(replace(PRESETS[name], sessions=6), seed=1))
    outcome = replay(trace, policy, trace.unique * BLOCK_BYTES)
    assert outcome.block_hit_ratio == trace.facts()["ceiling"]
    if policy != BELADY:
        assert outcome.evictions == 0


@pytest.mark.parametrize("policy", [*POLICIES, BELADY])
def test_a_store_without_room_finds_nothing(policy):
    outcome = replay(trace_of([1, 2], [1, 2]), policy, BLOCK_BYTES - 1)
    assert (outcome.block_hits, outcome.evictions) == (0, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_prompt_larger_than_the_store_keeps_its_beginning(policy):
    outcome = replay(trace_of(range(9), range(9)), policy, 4 * BLOCK_BYTES)
    assert outcome.block_hits == 4


@given(chains=CHAINS, capacity=st.integers(1, 8), policy=st.sampled_from(sorted(POLICIES)))
def test_no_rule_finds_more_than_the_optimum(chains, capacity, policy):
    trace = trace_of(*chains)
    rule, best = (replay(trace, name, capacity * BLOCK_BYTES) for name in (policy, BELADY))
    assert rule.block_hits <= best.block_hits <= trace.lookups - trace.unique
    assert rule.evictions <= trace.lookups


@given(chains=st.lists(st.lists(st.integers(0, 1), max_size=3), max_size=6), capacity=st.integers(1, 5))
def test_the_optimum_is_that_of_trying_everything(chains, capacity):
    trace = trace_of(*chains)
    best = {frozenset[int](): 0}  # most hits so far, by what is kept
    for blocks in trace.requests:
        after: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            run = len(list(itertools.takewhile(lambda block, kept=kept: block in kept, blocks)))
            there = kept | set(blocks)
            for size in range(min(capacity, len(there)) + 1):
                for choice in itertools.combinations(there, size):
                    key = frozenset(choice)
                    after[key] = max(after.get(key, 0), hits + run)
        best = after
    assert replay(trace, BELADY, capacity * BLOCK_BYTES).block_hits == max(best.values())


@pytest.mark.parametrize("policy", [*POLICIES, BELADY])
def test_all_requests_are_told(policy):
    trace = compile_trace(generate(replace(PRESETS["hicache"], sessions=33), seed=0))
    told: list[int] = []
    replay(trace, policy, 100 * BLOCK_BYTES, told.append)
    assert sum(told) == len(trace.requests)
    assert 10 < len(told) < 120


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="legal: lru, s3fifo, cost"):
        replay(trace_of([1]), "fifo", BLOCK_BYTES)
