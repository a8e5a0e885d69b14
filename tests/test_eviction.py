"""Eviction: the rules and the book in memory pass the contract, and each rule does what its paper says."""

import random

import pytest

from tierkv.eviction import GHOST, HELD, LRU, QUEUES, S3FIFO, CostAware, Entry, MemoryLedger, make_policy, refile
from tierkv.testing.eviction_contract import EvictionPolicyContract, chain, evict
from tierkv.testing.ledger_contract import LedgerContract


class TestMemoryLedger(LedgerContract):
    @pytest.fixture
    def new_ledger(self):
        return MemoryLedger

    def test_order_holds_with_many_entries(self):
        """So many that its lists are split and joined, with places that come and go at random."""
        draw, ledger = random.Random(1), MemoryLedger()
        wanted: dict[bytes, int] = {}
        assert list(ledger.ascending(0)) == []
        for step in range(30_000):
            key = draw.randrange(8_000).to_bytes(2, "big")
            if draw.random() < (0.2 if step < 15_000 else 0.7):
                ledger.remove(key)
                wanted.pop(key, None)
            else:
                wanted[key] = draw.randrange(5_000)
                ledger.file(Entry(key, None, 3, rank=wanted[key]))
        expected = sorted((rank, key) for key, rank in wanted.items())
        assert [(entry.rank, entry.key) for entry in ledger.ascending(0)] == expected
        assert len(ledger) == len(expected)
        for _, key in expected:
            ledger.remove(key)
        assert list(ledger.ascending(0)) == []
        assert ledger.bytes_in(0) == 0


class TestRulesInMemory(EvictionPolicyContract):
    @pytest.fixture
    def new_ledger(self):
        return MemoryLedger


def test_rules_go_by_their_names():
    assert [type(make_policy(name)) for name in ("lru", "s3fifo", "cost")] == [LRU, S3FIFO, CostAware]
    with pytest.raises(ValueError, match=r"^'fifo' is not an eviction rule \(legal: lru, s3fifo, cost\)$"):
        make_policy("fifo")


def single(policy, ledger, name, num_bytes=100, cost=1.0):
    """Insert a block without relatives; return its key."""
    key = str(name).encode()
    policy.insert(ledger, Entry(key, None, num_bytes, cost))
    return key


def touch(policy, ledger, *keys):
    for key in keys:
        policy.touch(ledger, ledger.find(key))


def test_lru_goes_by_the_last_time_found():
    policy, ledger = LRU(), MemoryLedger()
    keys = [single(policy, ledger, name) for name in "abcd"]
    touch(policy, ledger, keys[0], keys[2])
    assert evict(ledger, policy, 4) == [keys[1], keys[3], keys[0], keys[2]]


def test_lru_takes_the_ends_of_chains_first_where_they_are_older():
    policy, ledger = LRU(), MemoryLedger()
    old, new = chain(ledger, policy, "a", 4), chain(ledger, policy, "b", 4)
    touch(policy, ledger, *reversed(old[:2]))  # a request that shares two blocks
    assert evict(ledger, policy, 8) == [*old[:1:-1], *new[::-1], old[1], old[0]]


class TestS3FIFO:
    @pytest.fixture
    def policy(self):
        return S3FIFO()

    @pytest.fixture
    def ledger(self):
        return MemoryLedger()

    def queue_of(self, ledger, key):
        return ledger.find(key).queue

    def test_a_scan_passes_through(self, policy, ledger):
        """Blocks that were found twice stay while a thousand are seen once; LRU would lose them all."""
        hot = [single(policy, ledger, f"hot{index}") for index in range(50)]
        for _ in range(2):
            touch(policy, ledger, *hot)
        for index in range(50):
            single(policy, ledger, f"cold{index}")
        for index in range(1_000):
            evict(ledger, policy)
            single(policy, ledger, f"scan{index}")
        assert all(ledger.find(key).stored for key in hot)

    def test_the_small_queue_is_a_tenth_of_the_bytes(self, policy, ledger):
        """Main entries go as soon as the small queue has shrunk to a tenth, and not before."""
        for index in range(100):
            touch(
                policy, ledger, *[single(policy, ledger, index)] * 2 if index < 80 else [single(policy, ledger, index)]
            )
        evict(ledger, policy, 10)
        in_small = [ledger.bytes_in(S3FIFO.SMALL), ledger.bytes_in(S3FIFO.MAIN)]
        assert in_small == [1_000, 8_000]
        gone = evict(ledger, policy, 20)
        assert sum(int(key) < 80 for key in gone) == 17
        assert ledger.bytes_in(S3FIFO.SMALL) == 700

    def test_at_exactly_a_tenth_the_small_queue_gives(self, policy, ledger):
        keys = [single(policy, ledger, index) for index in range(10)]
        touch(policy, ledger, *keys[:9] * 2)
        assert evict(ledger, policy) == [keys[9]]

    def test_one_that_comes_back_enters_the_main_queue(self, policy, ledger):
        keys = [single(policy, ledger, index) for index in range(10)]
        assert evict(ledger, policy, 2) == keys[:2]
        ghost = ledger.find(keys[0])
        assert (ghost.stored, ghost.queue, ghost.num_bytes) == (False, GHOST, 0)
        single(policy, ledger, 0)
        assert self.queue_of(ledger, keys[0]) == S3FIFO.MAIN
        assert self.queue_of(ledger, keys[1]) == GHOST

    def test_ghosts_are_as_many_as_blocks_and_the_oldest_is_forgotten_first(self, policy, ledger):
        keys = [single(policy, ledger, index) for index in range(10)]
        evict(ledger, policy, 6)
        assert [entry.key for entry in ledger.ascending(GHOST)] == keys[2:6]
        evict(ledger, policy, 4)
        assert list(ledger.ascending(GHOST)) == []
        assert ledger.floor == 0

    def test_main_gives_a_round_for_each_hit_up_to_three(self, policy, ledger):
        keys = [single(policy, ledger, index) for index in range(4)]
        for key in keys:
            touch(policy, ledger, key, key)
        assert evict(ledger, policy) == keys[:1]  # all moved to main, where none was found since
        assert ledger.find(keys[0]) is None  # only the small queue leaves ghosts
        touch(policy, ledger, *[keys[1]] * 9, keys[2])
        assert ledger.find(keys[1]).hits == 3
        assert evict(ledger, policy, 3) == [keys[3], keys[2], keys[1]]

    def test_one_with_enough_hits_is_not_written_again(self, policy, ledger):
        key = single(policy, ledger, 0)
        touch(policy, ledger, *[key] * 3)
        ledger.file = None
        touch(policy, ledger, key)

    def test_a_parent_changes_to_main_when_it_is_found_the_second_time(self, policy, ledger):
        keys = chain(ledger, policy, "a", 3)
        touch(policy, ledger, *keys[::-1])
        assert [self.queue_of(ledger, key) for key in keys] == [HELD, HELD, 0]
        touch(policy, ledger, *keys[::-1])
        assert [self.queue_of(ledger, key) for key in keys] == [HELD + 1, HELD + 1, 0]
        assert evict(ledger, policy, 3) == keys[::-1]


class TestCostAware:
    @pytest.fixture
    def policy(self):
        return CostAware()

    @pytest.fixture
    def ledger(self):
        return MemoryLedger()

    def test_cheap_large_and_seldom_found_go_first(self, policy, ledger):
        keys = [
            single(policy, ledger, name, num_bytes, cost)
            for name, num_bytes, cost in [
                ("dear", 100, 4.0),
                ("large", 400, 1.0),
                ("plain", 100, 1.0),
                ("found", 100, 1.0),
            ]
        ]
        touch(policy, ledger, keys[3], keys[3])
        assert evict(ledger, policy, 4) == [keys[1], keys[2], keys[3], keys[0]]

    def test_what_is_not_found_any_more_is_overtaken(self, policy, ledger):
        dear = single(policy, ledger, "dear", cost=3.5)
        gone = []
        for index in range(6):
            single(policy, ledger, index)
            gone += evict(ledger, policy)
        assert gone.index(dear) == 3
        assert ledger.floor == pytest.approx(0.045 * CostAware.SCALE)

    def test_ranks_stay_within_63_bits(self, policy, ledger):
        for cost, num_bytes in [(1e300, 1), (float("inf"), 1), (0.0, 2**40), (1e-30, 2**40)]:
            single(policy, ledger, cost, num_bytes, cost)
        ranks = [entry.rank for entry in ledger.ascending(0)]
        assert ranks == [1, 1, CostAware.LARGEST_STEP, CostAware.LARGEST_STEP]

    def test_the_floor_is_the_highest_rank_that_went(self, policy, ledger):
        cheap, dear = single(policy, ledger, "cheap", cost=1.0), single(policy, ledger, "dear", cost=2.0)
        ranks = [ledger.find(key).rank for key in (cheap, dear)]
        evict(ledger, policy)
        assert ledger.floor == ranks[0]
        policy.drop(ledger, ledger.find(dear))
        assert ledger.floor == ranks[0]


@pytest.mark.parametrize("before", ["lru", "s3fifo", "cost"])
@pytest.mark.parametrize("after", ["lru", "s3fifo", "cost"])
def test_a_book_can_be_handed_to_another_rule(before, after):
    old, new, ledger = make_policy(before), make_policy(after), MemoryLedger()
    for name in "abcdef":
        touch(old, ledger, *chain(ledger, old, name, 5)[::-1])
    evict(ledger, old, 7)
    refile(ledger, new)
    assert not list(ledger.ascending(GHOST))
    assert sum(ledger.bytes_in(queue) for queue in QUEUES) == 2_300
    assert len(evict(ledger, new, 99)) == 23


class Counting(MemoryLedger):
    """Counts what a rule asks of the book, entries looked at included."""

    calls = 0

    def find(self, key):
        self.calls += 1
        return super().find(key)

    def file(self, entry):
        self.calls += 1
        super().file(entry)

    def remove(self, key):
        self.calls += 1
        super().remove(key)

    def ascending(self, queue):
        for entry in super().ascending(queue):
            self.calls += 1
            yield entry


@pytest.mark.parametrize("name", ["lru", "s3fifo", "cost"])
def test_long_chains_cost_no_more_than_short_ones(name):
    """A chain of 100,000 blocks is written, found twice, eaten up from its end in steps, and grown again."""
    policy, ledger, length = make_policy(name), Counting(), 100_000
    keys = chain(ledger, policy, "a", length)
    assert ledger.calls <= 4 * length
    for _ in range(2):
        ledger.calls = 0
        touch(policy, ledger, *keys[::-1])
        assert ledger.calls <= 2 * length
    ledger.calls = most = evictions = 0
    while (entry := policy.victim(ledger, lambda _: True)) is not None:
        before = ledger.calls
        policy.evicted(ledger, entry)
        evictions += 1
        if evictions % 1_000 == 0:
            chain(ledger, policy, f"b{evictions}", 10)
        most = max(most, ledger.calls - before)
    assert evictions == length + 10 * (evictions // 1_000)
    assert ledger.calls <= 16 * evictions
    assert most <= 100
