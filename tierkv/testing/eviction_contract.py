"""EvictionPolicyContract: what every eviction rule must do over any ledger, as tests. Give it your ledger.

    class TestRulesOverMyLedger(EvictionPolicyContract):
        @pytest.fixture
        def new_ledger(self, tmp_path):
            return lambda: MyLedger(tmp_path / str(uuid4()))

``new_ledger`` is called once for each example, and must give an empty one each time.
"""

# ruff: noqa: D102 - the name of a test says what it shows

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.eviction import GHOST, HELD, POLICIES, QUEUES, Entry, EvictionPolicy, Ledger, make_policy, refile
from tierkv.testing.ledger_contract import FROM_FIXTURES, key_of

NODES = 40
"""Blocks of a tree in which block n continues block (n - 1) // 2 or n - 1: some forks, some chains."""
PARENTS = [None, *((n - 1) // 2 if n % 3 else n - 1 for n in range(1, NODES))]


def path_to(node: int | None) -> list[int]:
    """Return the blocks of a chain, first one first."""
    path = []
    while node is not None:
        path.append(node)
        node = PARENTS[node]
    return path[::-1]


def chain(ledger: Ledger, policy: EvictionPolicy, name: str, length: int, first: int = 0) -> list[bytes]:
    """Insert blocks ``first`` to ``length`` of a chain; return the keys of all."""
    keys = [f"{name}{index}".encode() for index in range(length)]
    for index in range(first, length):
        policy.insert(ledger, Entry(keys[index], keys[index - 1] if index else None, 100))
    return keys


def evict(ledger: Ledger, policy: EvictionPolicy, count: int = 1) -> list[bytes]:
    """Evict so many blocks, or all there are; return their keys in order."""
    gone: list[bytes] = []
    while len(gone) < count and (entry := policy.victim(ledger, lambda _: True)) is not None:
        policy.evicted(ledger, entry)
        gone.append(entry.key)
    return gone


class EvictionPolicyContract:
    """Tests of the EvictionPolicy contract, for every rule there is."""

    @pytest.fixture
    def new_ledger(self) -> Callable[[], Ledger]:
        """Override: return what makes an empty ledger."""
        raise NotImplementedError

    def reopened(self, ledger: Ledger) -> Ledger:
        """Override where a ledger outlives its process: what a new one would see."""
        return ledger

    @pytest.fixture(params=POLICIES)
    def policy(self, request: pytest.FixtureRequest) -> EvictionPolicy:
        """Give each rule by name."""
        return make_policy(request.param)

    def check(self, ledger: Ledger, policy: EvictionPolicy, wanted: dict[bytes, Entry]) -> None:
        """Compare a book with the blocks that were inserted and have not gone, with parent, bytes and cost as given."""
        found = [entry for queue in QUEUES for entry in ledger.ascending(queue)]
        stored = {entry.key: entry for entry in found if entry.stored}
        ghosts = [entry for entry in found if not entry.stored]
        assert len(found) == len({entry.key for entry in found})
        assert {(one.key, one.parent, one.num_bytes, one.cost) for one in stored.values()} == {
            (one.key, one.parent, one.num_bytes, one.cost) for one in wanted.values()
        }
        for entry in stored.values():
            assert entry.children == sum(one.parent == entry.key for one in stored.values())
            assert (entry.queue >= HELD) == (entry.children > 0)
        assert sum(ledger.bytes_in(queue) for queue in QUEUES) == sum(one.num_bytes for one in wanted.values())
        assert len(ghosts) <= len(stored)
        if policy.name == "s3fifo":
            assert ledger.floor == len(stored) - len(ghosts)
        assert all(ghost.num_bytes == 0 and ghost.parent is None for ghost in ghosts)

    @FROM_FIXTURES
    @given(
        steps=st.lists(
            st.one_of(
                st.tuples(st.just("visit"), st.integers(0, NODES - 1)),
                st.tuples(st.just("evict"), st.integers(0, NODES - 1)),
                st.tuples(st.just("drop"), st.integers(0, NODES - 1)),
                st.tuples(st.just("again"), st.sampled_from(sorted(POLICIES))),
            ),
            max_size=60,
        )
    )
    def test_any_sequence_of_calls(
        self, policy: EvictionPolicy, new_ledger: Callable[[], Ledger], steps: list[tuple[str, int | str]]
    ) -> None:
        """visit: find a chain's leading run, insert the rest; evict: with one block pinned; drop: one and what follows it."""
        ledger, tick, floor = new_ledger(), -1, 0
        wanted: dict[bytes, Entry] = {}
        for name, number in steps:
            if name == "visit":
                self.visit(ledger, policy, int(number), wanted)
            elif name == "evict":
                self.evict_one(ledger, policy, key_of(int(number)), wanted)
            elif name == "drop":
                self.drop_branch(ledger, policy, key_of(int(number)), wanted)
            else:
                policy = make_policy(str(number))
                refile(ledger, policy)
                floor = 0
                ledger = self.reopened(ledger)
            self.check(ledger, policy, wanted)
            assert ledger.tick() > tick
            tick = ledger.tick()
            assert ledger.floor >= (floor if policy.name == "cost" else 0)
            floor = ledger.floor
        while wanted:
            self.evict_one(ledger, policy, b"", wanted)
            self.check(ledger, policy, wanted)
        assert policy.victim(ledger, lambda _: True) is None

    def visit(self, ledger: Ledger, policy: EvictionPolicy, node: int, wanted: dict[bytes, Entry]) -> None:
        """Do what the owner of a store does for a request."""
        path = path_to(node)
        run = 0
        while run < len(path) and (entry := ledger.find(key_of(path[run]))) is not None and entry.stored:
            run += 1
        assert run == sum(key_of(one) in wanted for one in path), "there is no hole in a chain"
        for one in reversed(path[:run]):
            entry = ledger.find(key_of(one))
            assert entry is not None
            policy.touch(ledger, entry)
        for one in path[run:]:
            parent = PARENTS[one]
            entry = Entry(key_of(one), None if parent is None else key_of(parent), 10 + one % 7, cost=0.5 + one)
            wanted[entry.key] = replace(entry)
            policy.insert(ledger, entry)

    def evict_one(self, ledger: Ledger, policy: EvictionPolicy, pinned: bytes, wanted: dict[bytes, Entry]) -> None:
        """Evict what the rule chooses, and check that it may go and is still in the book when it is chosen."""
        entry = policy.victim(ledger, lambda one: one.key != pinned)
        self.check(ledger, policy, wanted)
        parents = {one.parent for one in wanted.values()}
        leaves = {key for key in wanted if key not in parents}
        if entry is None:
            assert leaves <= {pinned}
            return
        assert entry.key in leaves - {pinned}
        assert ledger.find(entry.key) == entry
        policy.evicted(ledger, entry)
        del wanted[entry.key]

    def drop_branch(self, ledger: Ledger, policy: EvictionPolicy, key: bytes, wanted: dict[bytes, Entry]) -> None:
        """Drop a block after all that continue it; a ghost and what is not there, too."""
        for child in [one.key for one in wanted.values() if one.parent == key]:
            self.drop_branch(ledger, policy, child, wanted)
        policy.drop(ledger, ledger.find(key) or Entry(key, None, 1))
        wanted.pop(key, None)
        assert ledger.find(key) is None

    def test_children_go_before_parents_and_old_chains_before_new(
        self, policy: EvictionPolicy, new_ledger: Callable[[], Ledger]
    ) -> None:
        ledger = new_ledger()
        old = chain(ledger, policy, "a", 6)
        new = chain(ledger, policy, "b", 6)
        gone = evict(ledger, policy, 12)
        assert [key for key in gone if key in old] == old[::-1]
        assert [key for key in gone if key in new] == new[::-1]
        if policy.name != "cost":  # all are worth the same to it
            assert gone[:6] == old[::-1]

    def test_what_cannot_go_is_passed_over(self, policy: EvictionPolicy, new_ledger: Callable[[], Ledger]) -> None:
        ledger = new_ledger()
        pinned, other = chain(ledger, policy, "a", 4), chain(ledger, policy, "b", 4)
        gone = []
        while (entry := policy.victim(ledger, lambda one: one.key not in pinned)) is not None:
            policy.evicted(ledger, entry)
            gone.append(entry.key)
        assert gone == other[::-1]
        assert evict(ledger, policy, 9) == pinned[::-1]

    def test_a_chain_that_lost_its_end_grows_again(
        self, policy: EvictionPolicy, new_ledger: Callable[[], Ledger]
    ) -> None:
        ledger = new_ledger()
        keys = chain(ledger, policy, "a", 8)
        assert evict(ledger, policy, 3) == keys[:4:-1]
        chain(ledger, policy, "a", 8, first=5)
        assert sum(ledger.bytes_in(queue) for queue in QUEUES) == 800
        assert evict(ledger, policy, 8) == keys[::-1]

    def test_a_damaged_parent_leaves_children_that_can_go(
        self, policy: EvictionPolicy, new_ledger: Callable[[], Ledger]
    ) -> None:
        """A block in the middle is lost and computed again; nothing is counted twice, and nothing stays for ever."""
        ledger = new_ledger()
        keys = chain(ledger, policy, "a", 5)
        lost = ledger.find(keys[2])
        assert lost is not None
        policy.drop(ledger, lost)
        policy.insert(ledger, Entry(keys[2], keys[1], 100))
        policy.insert(ledger, Entry(b"fork", keys[1], 100))
        policy.drop(ledger, lost)
        policy.drop(ledger, lost)
        parent = ledger.find(keys[1])
        assert parent is not None
        assert parent.children == 1
        policy.insert(ledger, Entry(keys[2], keys[1], 100))
        assert sorted(evict(ledger, policy, 9)) == sorted([*keys, b"fork"])
        assert sum(ledger.bytes_in(queue) for queue in QUEUES) == 0

    def test_a_ghost_is_no_block(self, policy: EvictionPolicy, new_ledger: Callable[[], Ledger]) -> None:
        ledger = new_ledger()
        chain(ledger, policy, "a", 30)
        gone = evict(ledger, policy, 10)
        for key in gone:
            entry = ledger.find(key)
            assert entry is None or not entry.stored
        assert not {one.key for one in _all_but_ghosts(ledger)} & set(gone)
        assert all(entry.queue == GHOST for entry in ledger.ascending(GHOST))
        policy.insert(ledger, Entry(b"child", gone[-1], 100))  # of a block that is not there
        ghost = ledger.find(gone[-1])
        assert ghost is None or (not ghost.stored and ghost.children == 0)


def _all_but_ghosts(ledger: Ledger) -> Iterator[Entry]:
    for queue in QUEUES:
        if queue != GHOST:
            yield from ledger.ascending(queue)
