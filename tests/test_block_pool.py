"""BlockPool against a plain dict, and the runs that it is for."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tierkv.block_pool import BlockPool
from tierkv.errors import CapacityError


class PoolMachine(RuleBasedStateMachine):
    """Any operation in any order. The model: references of each slot in use, the limit, and whether it is frozen."""

    held = Bundle("held")  # one entry for every reference

    @initialize(limit=st.integers(0, 20), per_segment=st.integers(1, 5))
    def make(self, limit, per_segment):
        self.pool = BlockPool(limit, per_segment)
        self.per_segment = per_segment
        self.limit = self.largest = limit
        self.references = {}
        self.frozen = False

    def _free(self):
        return 0 if self.frozen else self.limit - sum(slot < self.limit for slot in self.references)

    def _is_free(self, slot):
        return slot < self.limit and slot not in self.references

    @rule(target=held, count=st.integers(0, 6), after=st.none() | st.integers(0, 20))
    def allocate(self, count, after):
        if count > self._free():
            with pytest.raises(CapacityError, match=f"{count} slots were asked for and {self._free()} of {self.limit}"):
                self.pool.allocate(count, after)
            return multiple()
        return multiple(*self._allocated(count, after))

    @rule(target=held, after=consumes(held), count=st.integers(1, 4))
    def extend(self, after, count):
        """Go on after a slot in use, as a sequence does."""
        if count > self._free():
            return after
        return multiple(after, *self._allocated(count, after))

    def _allocated(self, count, after):
        slots = self.pool.allocate(count, after)
        previous = after
        for slot in slots:
            assert self._is_free(slot), "a slot was handed out twice, or beyond the limit"
            # `after` may lie in a segment that was never touched; then nothing is known to be beside it.
            if previous in self.references and (previous + 1) % self.per_segment and self._is_free(previous + 1):
                assert slot == previous + 1
            self.references[slot] = 1
            previous = slot
        return slots

    @rule(target=held, slot=held)
    def retain(self, slot):
        self.pool.retain(slot)
        self.references[slot] += 1
        return slot

    @rule(slot=consumes(held))
    def release(self, slot):
        self._release(slot)

    def _release(self, slot):
        self.references[slot] -= 1
        last = self.references[slot] == 0
        if last:
            del self.references[slot]
        assert self.pool.release(slot) is last

    @rule(slot=st.integers(-1, 30))
    def misuse(self, slot):
        if slot not in self.references:
            with pytest.raises(ValueError, match=f"slot {slot} was released twice"):
                self.pool.release(slot)
            with pytest.raises(ValueError, match=f"slot {slot} is free and cannot be retained"):
                self.pool.retain(slot)

    @rule(limit=st.integers(0, 24))
    def resize(self, limit):
        self.pool.resize(limit)
        self.limit = limit

    @precondition(lambda self: not self.frozen)
    @rule(chance=st.integers(0, 9))
    def freeze(self, chance):
        if chance == 0:
            self.pool.freeze()
            self.frozen = True

    @invariant()
    def agrees(self):
        if not hasattr(self, "pool"):
            return
        assert self.pool.num_slots == self.limit
        assert self.pool.free == self._free()
        assert self.pool.used == len(self.references)
        assert self.pool.frozen == self.frozen
        for slot in range(-1, 30):
            assert self.pool.references(slot) == self.references.get(slot, 0)
        for slot in (0, self.limit, 7):
            assert self.pool.used_from(slot) == sorted(used for used in self.references if used >= slot)
        assert all(slot < self.pool.touched for slot in self.references)

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for slot, count in list(self.references.items()):
            for _ in range(count):
                self._release(slot)
        assert self.pool.used == 0
        if self.frozen:
            assert self.pool.free == 0
            return
        assert_whole(self.pool)


def assert_whole(pool):
    """Nothing is used, and everything can be had again, once."""
    assert pool.used == 0
    assert pool.free == pool.num_slots
    slots = pool.allocate(pool.num_slots)
    assert sorted(slots) == list(range(pool.num_slots))
    assert pool.free == 0
    with pytest.raises(CapacityError):
        pool.allocate(1)
    for slot in slots:
        assert pool.release(slot)


def test_any_operation_in_any_order():
    run_state_machine_as_test(PoolMachine, settings=settings(settings(), max_examples=150, stateful_step_count=40))


@pytest.mark.slow
def test_any_operation_in_any_order_deep():
    run_state_machine_as_test(PoolMachine, settings=settings(settings(), max_examples=200, stateful_step_count=60))


def test_a_sequence_that_grows_alone_gets_ascending_neighbours():
    pool = BlockPool(64, 8)
    slots: list[int] = []
    for _ in range(64):
        slots += pool.allocate(1, slots[-1] if slots else None)
    assert slots == list(range(64))
    assert_whole_after(pool, slots)


def assert_whole_after(pool, slots):
    for slot in slots:
        pool.release(slot)
    assert_whole(pool)


def test_sequences_that_grow_in_turn_get_segments_of_their_own():
    pool = BlockPool(64, 8)
    sequences = [pool.allocate(1) for _ in range(4)]
    for _ in range(7):
        for slots in sequences:
            slots.extend(pool.allocate(1, slots[-1]))
    assert sequences == [list(range(8 * row, 8 * row + 8)) for row in range(4)]


def test_many_sequences_share_segments_only_when_no_whole_one_is_left():
    pool = BlockPool(12, 4)
    first = [pool.allocate(1)[0] for _ in range(3)]
    assert first == [0, 4, 8]
    assert pool.allocate(1) == [1]
    assert pool.allocate(2, after=4) == [5, 6]


def test_a_large_request_is_made_of_whole_runs():
    pool = BlockPool(32, 8)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(18, after=2) == [*range(3, 8), *range(8, 16), *range(16, 21)]


def test_a_run_never_leaves_its_segment_for_a_neighbouring_one():
    pool = BlockPool(16, 4)
    assert pool.allocate(4) == [0, 1, 2, 3]
    other = pool.allocate(1)
    assert other == [4]
    assert pool.allocate(1, after=3) == [8]  # not 5, beside another sequence
    pool = BlockPool(16, 4)
    pool.allocate(6)
    pool.release(4)
    assert pool.allocate(1, after=3) == [8]  # not 4, which would be a run across two segments


def test_returned_segments_are_reused_before_memory_that_was_never_touched():
    pool = BlockPool(40, 4)
    first = pool.allocate(8)
    assert pool.touched == 8
    for slot in first[4:]:
        pool.release(slot)
    assert pool.allocate(4) == [4, 5, 6, 7]
    assert pool.touched == 8
    assert pool.allocate(1) == [8]
    assert pool.touched == 12


def test_holes_are_filled_segment_by_segment_lowest_first_when_nothing_else_is_left():
    pool = BlockPool(8, 4)
    pool.allocate(8)
    for slot in (6, 3, 1):
        pool.release(slot)
    assert [pool.allocate(1)[0] for _ in range(3)] == [6, 1, 3]


def test_allocation_is_all_or_nothing():
    pool = BlockPool(4, 2)
    pool.allocate(2)
    with pytest.raises(CapacityError, match="3 slots were asked for and 2 of 4 are free"):
        pool.allocate(3)
    assert (pool.free, pool.used) == (2, 2)
    assert pool.allocate(2) == [2, 3]


def test_a_last_segment_that_the_limit_cuts_short_is_used_too():
    pool = BlockPool(6, 4)
    assert pool.allocate(6) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(CapacityError):
        pool.allocate(1)
    assert_whole_after(pool, range(6))


def test_a_slot_is_free_only_when_its_last_reference_goes():
    pool = BlockPool(1)
    (slot,) = pool.allocate(1)
    pool.retain(slot)
    assert pool.release(slot) is False
    assert (pool.references(slot), pool.free) == (1, 0)
    assert pool.release(slot) is True
    with pytest.raises(ValueError, match="slot 0 was released twice"):
        pool.release(slot)
    with pytest.raises(ValueError, match="slot 0 is free and cannot be retained"):
        pool.retain(slot)


def test_slots_above_a_lowered_limit_stay_valid_until_released():
    pool = BlockPool(8, 4)
    pool.allocate(8)
    for slot in (0, 1):
        pool.release(slot)
    pool.resize(4)
    assert (pool.num_slots, pool.free, pool.used) == (4, 2, 6)
    assert pool.used_from(4) == [4, 5, 6, 7]
    assert pool.references(6) == 1
    assert pool.release(6) is True
    assert pool.free == 2  # it lies above the limit
    assert sorted(pool.allocate(2)) == [0, 1]
    pool.resize(8)
    assert pool.allocate(1) == [6]


def test_a_frozen_pool_hands_out_nothing_and_takes_back_everything():
    pool = BlockPool(4, 2)
    slots = pool.allocate(2)
    pool.freeze()
    assert (pool.frozen, pool.free, pool.used) == (True, 0, 2)
    with pytest.raises(CapacityError):
        pool.allocate(1)
    pool.retain(slots[0])
    for slot in [slots[0], *slots]:
        pool.release(slot)
    assert (pool.free, pool.used) == (0, 0)


def test_an_empty_pool_is_legal_and_an_impossible_one_is_not():
    assert BlockPool(0).allocate(0) == []
    with pytest.raises(CapacityError):
        BlockPool(0).allocate(1)
    for arguments in ((-1,), (1, 0)):
        with pytest.raises(ValueError, match="a pool needs num_slots >= 0 and slots_per_segment >= 1"):
            BlockPool(*arguments)


def test_a_pool_of_millions_of_slots_costs_memory_only_for_what_was_touched():
    pool = BlockPool(50_000_000, 16)
    slots = pool.allocate(1000)
    assert slots == list(range(1000))
    assert pool.touched == 1008
    assert pool.free == 50_000_000 - 1000
