"""LedgerContract: what every ledger of eviction must do, as tests. Subclass it in a test file and give it yours.

    class TestMyLedger(LedgerContract):
        @pytest.fixture
        def new_ledger(self, tmp_path):
            return lambda: MyLedger(tmp_path / str(uuid4()))

``new_ledger`` is called once for each example, and must give an empty one each time. ``eviction_contract`` has the tests
of what rules do with it.
"""

# ruff: noqa: D102 - the name of a test says what it shows

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierkv.eviction import QUEUES, Entry, Ledger

FROM_FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
"""For properties whose fixtures only make what an example starts with."""


def key_of(number: int) -> bytes:
    """Return the key of a block: as long as real ones, in no useful order."""
    return ((number * 0x9E3779B97F4A7C15) % 2**64).to_bytes(8, "big") * 4


class LedgerContract:
    """Tests of the Ledger contract."""

    @pytest.fixture
    def new_ledger(self) -> Callable[[], Ledger]:
        """Override: return what makes an empty ledger."""
        raise NotImplementedError

    def reopened(self, ledger: Ledger) -> Ledger:
        """Override where a ledger outlives its process: what a new one would see."""
        return ledger

    def test_a_new_one_is_empty(self, new_ledger: Callable[[], Ledger]) -> None:
        ledger = new_ledger()
        assert ledger.find(b"k" * 32) is None
        assert all(next(ledger.ascending(queue), None) is None for queue in QUEUES)
        assert [ledger.bytes_in(queue) for queue in QUEUES] == [0] * len(QUEUES)
        assert ledger.floor == 0
        ledger.remove(b"k" * 32)

    def test_every_field_comes_back(self, new_ledger: Callable[[], Ledger]) -> None:
        ledger = new_ledger()
        small = Entry(b"\0" * 32, None, 0, cost=0.0)
        large = Entry(b"\xff" * 32, b"\0" * 32, 2**40, cost=1.5e-7, queue=4, rank=2**63 - 1, hits=255, children=2**20)
        for entry in (small, large):
            ledger.file(entry)
        ledger = self.reopened(ledger)
        assert ledger.find(small.key) == small
        assert ledger.find(large.key) == large

    def test_what_is_found_or_filed_is_a_copy(self, new_ledger: Callable[[], Ledger]) -> None:
        ledger = new_ledger()
        entry = Entry(b"k" * 32, None, 10, rank=5)
        ledger.file(entry)
        entry.rank = entry.num_bytes = 7
        found = ledger.find(entry.key)
        assert found is not None
        assert (found.rank, found.num_bytes) == (5, 10)
        found.queue = found.rank = 3
        assert [(one.queue, one.rank) for one in ledger.ascending(0)] == [(0, 5)]
        ledger.file(found)
        assert (ledger.bytes_in(0), ledger.bytes_in(3)) == (0, 10)

    @pytest.mark.parametrize("number", [1, 2**32, 2**63 - 1, 0])
    def test_floor_is_kept(self, new_ledger: Callable[[], Ledger], number: int) -> None:
        ledger = new_ledger()
        ledger.floor = number
        ledger.file(Entry(b"k" * 32, None, 1))
        assert ledger.floor == number
        assert self.reopened(ledger).floor == number

    def test_ticks_ascend(self, new_ledger: Callable[[], Ledger]) -> None:
        ledger = new_ledger()
        ticks = [ledger.tick() for _ in range(5)]
        ledger = self.reopened(ledger)
        ticks += [ledger.tick() for _ in range(5)]
        assert ticks == sorted(set(ticks))
        assert ticks[0] >= 0

    @FROM_FIXTURES
    @given(
        steps=st.lists(
            st.tuples(st.integers(0, 30), st.sampled_from([*QUEUES, -1]), st.integers(0, 12), st.integers(0, 9)),
            max_size=80,
        )
    )
    def test_it_is_a_sorted_dict(
        self, new_ledger: Callable[[], Ledger], steps: list[tuple[int, int, int, int]]
    ) -> None:
        """Queue -1 takes out; what is there afterwards is compared with a dict after every step."""
        ledger = new_ledger()
        wanted: dict[bytes, Entry] = {}
        for node, queue, rank, num_bytes in steps:
            key = key_of(node)
            if queue < 0:
                ledger.remove(key)
                wanted.pop(key, None)
            else:
                entry = Entry(key, None, num_bytes, queue=queue, rank=rank)
                ledger.file(entry)
                wanted[key] = replace(entry)
            assert ledger.find(key) == wanted.get(key)
            for place in QUEUES:
                inside = [one for one in wanted.values() if one.queue == place]
                found = list(ledger.ascending(place))
                assert [one.rank for one in found] == sorted(one.rank for one in inside)
                assert sorted(found, key=lambda one: one.key) == sorted(inside, key=lambda one: one.key)
                assert ledger.bytes_in(place) == sum(one.num_bytes for one in inside)

    def test_several_may_look_through_it_at_a_time(self, new_ledger: Callable[[], Ledger]) -> None:
        ledger = new_ledger()
        for rank in range(20):
            ledger.file(Entry(key_of(rank), None, 1, rank=rank))
        first, second = ledger.ascending(0), ledger.ascending(0)
        assert [next(first).rank for _ in range(5)] == list(range(5))
        assert [one.rank for one in second] == list(range(20))
        assert [one.rank for one in first] == list(range(5, 20))
