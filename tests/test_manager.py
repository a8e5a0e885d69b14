"""TierManager, case by case: what stays, what leaves first, what is copied, and what late or failed copies may do.

`tests/test_manager_stateful.py` shows that no order of events breaks it; here is what it is meant to do.
"""

import pytest

from tests.managers import (
    DEVICE,
    DISK,
    HOST,
    SIZE,
    append,
    assert_whole,
    begin,
    finish,
    make,
    places,
    sequence,
)
from tierkv.errors import CapacityError
from tierkv.manager import MAX_PROMOTIONS_PER_STEP
from tierkv.moves import Room, Step
from tierkv.tier import Wire

# -- one live sequence ------------------------------------------------------------------------------------------------


def test_a_prompt_larger_than_device_and_host_gets_first_and_recent_blocks_on_the_device_and_the_middle_below():
    manager = make(device=5, host=3, disk=10)
    table = manager.open()
    step, moves = begin(manager, [table], 12 * SIZE)
    assert moves == []  # every block is born where it will live
    manager.commit(step)
    #                        first  as many as fit          host, then disk              recent
    assert places(table) == ["d", "d", "d", "h", "h", "h", "s", "s", "s", "s", "d", "d"]
    assert manager.census() == {DEVICE: (5, 0), HOST: (3, 0), DISK: (4, 0)}


def test_decoding_pushes_out_exactly_the_block_that_left_the_recent_window_and_never_the_front():
    manager = make(device=6, host=20, recent=3)
    table = sequence(manager, 9)
    assert places(table) == ["d", "d", "d", "h", "h", "h", "d", "d", "d"]
    for length in range(9 * SIZE, 15 * SIZE):
        blocks = list(table.blocks)
        moves = append(manager, table, 1)
        if length % SIZE == 0:
            (move,) = moves
            assert move.source is blocks[len(blocks) - 3]
            assert move.wire == Wire(DEVICE, HOST)
        else:
            assert moves == []
        rest = len(table.blocks) - 6
        assert places(table) == ["d"] * 3 + ["h"] * rest + ["d"] * 3


def test_what_is_below_is_streamed_not_promoted_while_the_device_is_full():
    manager = make(device=4, host=8)
    table = sequence(manager, 8)
    before = places(table)
    step, moves = begin(manager, [table], 1)
    assert [move.wire for move in moves] == [Wire(DEVICE, HOST)]
    assert {extent.tier for extent in step.reads[0]} == {DEVICE, HOST}
    manager.commit(step)
    assert before.count("d") == places(table).count("d") == 4


def test_a_clean_copy_ahead_makes_the_next_boundary_free():
    manager = make(device=4, host=8)
    table = sequence(manager, 4)
    append(manager, table, 1)
    append(manager, table, 1)  # block 4 is full; the next token begins block 5
    (ahead,) = manager.background([table])
    assert ahead.source is table.blocks[len(table.blocks) - 2]
    assert (ahead.wire, ahead.evicts) == (Wire(DEVICE, HOST), False)
    assert manager.background([table]) == []  # it is on its way
    finish(manager)
    assert manager.background([table]) == []  # it is there
    assert places(table) == ["d", "d", "h", "dh", "d"]
    step = manager.begin([table], 1)
    assert isinstance(step, Step)
    manager.commit(step)
    assert places(table) == ["d", "d", "h", "h", "d", "d"]


def test_a_clean_copy_still_on_its_way_at_the_boundary_is_waited_for_not_made_twice():
    manager = make(device=4, host=8)
    table = sequence(manager, 4)
    append(manager, table, 2)
    (ahead,) = manager.background([table])
    assert manager.begin([table], 1) == Room(())
    manager.complete(ahead)
    assert isinstance(manager.begin([table], 1), Step)
    assert manager.pools[HOST].used == 2


def test_nothing_is_copied_ahead_while_there_is_room_or_before_the_window_moves_off_the_front():
    manager = make(device=8, host=8)
    table = sequence(manager, 4)
    assert manager.background([table]) == []
    short = make(device=2, host=8)
    table = sequence(short, 2)
    assert short.background([table]) == []
    nowhere = make(device=4)
    table = sequence(nowhere, 4)
    assert nowhere.background([table]) == []


def test_what_must_be_on_the_device_beats_what_should():
    manager = make(device=1, host=3, disk=10, first=2, recent=4)
    table = sequence(manager, 6)
    assert places(table) == ["h", "h", "h", "s", "s", "d"]
    (move,) = append(manager, table, 1)
    assert move.source is table.blocks[5]
    assert places(table) == ["h", "h", "h", "s", "s", "s", "d"]


def test_wishes_push_out_optional_blocks_and_only_musts_push_out_wished_ones():
    manager = make(device=3, host=10, first=1, recent=3)
    table = sequence(manager, 3)
    blocks = list(table.blocks)
    moves = append(manager, table, 2 * SIZE)
    # Block 1 alone is optional; block 3 would like to be on the device, but block 2 need not leave for that.
    assert [move.source for move in moves] == [blocks[1]]
    assert places(table) == ["d", "h", "d", "h", "d"]


def test_new_optional_blocks_do_not_push_out_old_ones():
    manager = make(device=4, host=10, first=0, recent=1)
    table = sequence(manager, 3)
    assert append(manager, table, 4 * SIZE) == []
    assert places(table) == ["d", "d", "d", "h", "h", "h", "d"]


def test_the_block_that_is_still_written_to_is_not_copied_ahead():
    manager = make(device=2, host=10, first=0, recent=1)
    table = manager.open()
    append(manager, table, SIZE + 1)
    assert manager.pools[DEVICE].free == 0
    assert manager.background([table]) == []


def test_promotions_fill_room_that_appears_from_the_front_a_few_a_step_and_leave_two_slots_a_row():
    manager = make(device=11, host=20)
    table = sequence(manager, 10)
    crowd = sequence(manager, 11)
    assert places(table) == ["h"] * 10
    assert manager.background([table]) == []
    manager.release(crowd)
    promoted = []
    for count in (MAX_PROMOTIONS_PER_STEP, MAX_PROMOTIONS_PER_STEP, 1, 0):
        moves = manager.background([table])
        assert len(moves) == count
        assert all((move.wire, move.evicts) == (Wire(HOST, DEVICE), False) for move in moves)
        promoted += [move.source for move in moves]
        finish(manager)
    assert promoted == table.blocks[:9]
    assert places(table) == ["dh"] * 9 + ["h"]
    assert manager.census() == {DEVICE: (9, 0), HOST: (1, 9), DISK: (0, 0)}
    # The copies below stay: pushing the blocks out again is free, and so is the room below where it is needed.
    step = manager.begin([manager.open()], 11 * SIZE)
    assert isinstance(step, Step)
    assert places(table) == ["h"] * 10


# -- several sequences ------------------------------------------------------------------------------------------------


def test_idle_sequences_leave_oldest_first_and_whole_before_the_active_one_loses_anything():
    manager = make(device=12, host=40)
    oldest, older, active = (sequence(manager, 4) for _ in range(3))
    left = []
    while len(active.blocks) < 12:
        left += [move.source for move in append(manager, active, 1)]
        assert set(places(active)) == {"d"}
    assert left == [*oldest.blocks, *older.blocks]
    assert append(manager, active, 1) == []
    (move,) = append(manager, active, 1)
    assert move.source in active.blocks  # only now


def test_a_conversation_that_resumes_is_the_youngest():
    manager = make(device=9, host=20)
    one, two = sequence(manager, 4), sequence(manager, 4)
    append(manager, one, 1)
    sequence(manager, 4)
    assert places(one) == ["d"] * 5
    assert places(two) == ["h"] * 4


def test_slots_on_their_way_are_waited_for_so_that_new_blocks_live_where_they_should():
    manager = make(device=4, host=10)
    sequence(manager, 4)
    table = manager.open()
    first, *others = manager.begin([table], 3 * SIZE).moves
    manager.complete(first)
    assert manager.begin([table], 3 * SIZE) == Room(())
    finish(manager, others)
    append(manager, table, 3 * SIZE)
    assert places(table) == ["d"] * 3


def test_host_memory_full_of_idle_blocks_is_vacated_to_disk_for_a_prompt():
    manager = make(device=4, host=4, disk=20)
    idle = sequence(manager, 8)
    assert places(idle) == ["d", "d", "h", "h", "h", "h", "d", "d"]
    active = manager.open()
    append(manager, active, 8 * SIZE)
    assert places(active) == ["d", "d", "h", "h", "h", "h", "d", "d"]
    assert places(idle) == ["s"] * 8


def test_host_memory_full_of_idle_blocks_is_vacated_to_disk_for_decoding_too():
    """What an active sequence loses is read at every token: it does not go to disk past memory full of idle blocks."""
    manager = make(device=4, host=4, disk=20)
    idle = sequence(manager, 4)
    active = sequence(manager, 4)
    assert places(idle) == ["h"] * 4
    moves = append(manager, active, 1)
    assert [move.wire for move in moves] == [Wire(HOST, DISK), Wire(DEVICE, HOST)]
    assert places(idle) == ["s", "h", "h", "h"]
    for _ in range(3 * SIZE):
        append(manager, active, 1)
    assert places(active) == ["d", "d", "h", "h", "h", "h", "d", "d"]
    assert places(idle) == ["s"] * 4
    append(manager, active, 2)
    assert places(active).count("s") == 1  # now host memory is full of its own


def test_a_block_whose_copy_is_on_disk_already_leaves_host_memory_for_nothing():
    """Copied a second time, the first place on disk would never be given back."""
    manager = make(device=2, host=2, disk=20, recent=1)
    idle = sequence(manager, 2)
    big = manager.open()
    assert isinstance(manager.begin([big], 2 * SIZE), Room)
    finish(manager)
    assert places(idle) == ["h", "h"]
    room = manager.begin([big], 5 * SIZE)  # now their blocks are to leave host memory
    assert {move.wire for move in room.moves} == {Wire(HOST, DISK)}
    step, _ = begin_without_finishing(manager, idle)
    finish(manager)  # the copies arrive while a step reads the originals: these stay
    assert places(idle)[:2] == ["hs", "hs"]
    manager.rollback(step)
    used = manager.pools[DISK].used
    step, moves = begin(manager, [big], 5 * SIZE)
    assert not [move for move in moves if move.wire == Wire(HOST, DISK)]
    assert places(idle) == ["s", "s"]
    assert manager.pools[DISK].used == used + 1
    manager.rollback(step)
    manager.release(big)
    manager.release(idle)
    assert_whole(manager)


def begin_without_finishing(manager, table):
    step = manager.begin([table], 1)
    assert isinstance(step, Step)
    return step, manager.moves


def test_room_that_a_promotion_holds_is_waited_for():
    """Nothing evicts, yet there will be room: a slot that a copy is going into cannot be emptied before it is full."""
    manager = make(device=3, host=6, recent=1)
    idle = sequence(manager, 1)
    crowd = sequence(manager, 3)
    assert places(idle) == ["h"]
    manager.release(crowd)
    (promotion,) = manager.background([idle])
    rows = [manager.open() for _ in range(3)]
    assert manager.begin(rows, 1) == Room(())
    manager.complete(promotion)
    assert isinstance(manager.begin(rows, 1), Step)
    assert places(idle) == ["h"]


def test_blocks_that_an_open_step_reads_stay_where_they_are():
    manager = make(device=5, host=10)
    one = sequence(manager, 3)
    reading = manager.begin([one], 1)
    before = places(one)
    other = manager.open()
    append(manager, other, 4 * SIZE)
    assert places(one) == before == ["d"] * 4
    assert places(other) == ["h", "h", "h", "d"]
    manager.commit(reading)


def test_a_block_shared_with_an_open_step_is_not_taken_from_it():
    manager = make(device=5, host=10, recent=1)
    one = sequence(manager, 4)
    twin = manager.fork(one)
    reading = manager.begin([one], 1)
    with pytest.raises(CapacityError):  # all that the twin could spare is being read
        manager.begin([twin], 1)
    assert places(one) == ["d"] * 5
    manager.commit(reading)
    (move,) = append(manager, twin, 1)
    assert move.source in (one.blocks[4], twin.blocks[3])


def test_a_copy_down_that_arrives_while_a_step_reads_the_block_leaves_the_original():
    manager = make(device=4, host=10)
    idle = sequence(manager, 3)
    other = manager.open()
    room = manager.begin([other], 2 * SIZE)
    assert [move.source for move in room.moves] == idle.blocks[:1]
    step = manager.begin([idle], 1)
    manager.complete(room.moves[0])
    assert places(idle) == ["dh", "d", "d", "d"]
    manager.commit(step)
    step, moves = begin(manager, [other], SIZE)
    assert moves == []  # the slot is free for nothing now
    assert places(idle) == ["h", "d", "d", "d"]


# -- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "host", "disk"), [(4, 0, 0), (2, 2, 0), (2, 0, 2), (2, 1, 1)])
def test_capacity_error_changes_nothing(device, host, disk):
    manager = make(device, host, disk)
    table = sequence(manager, 2)
    append(manager, table, 1)
    other = manager.open()

    def state():
        used = {tier: pool.used for tier, pool in manager.pools.items()}
        return [places(table), list(table.blocks), table.length, used, manager.census()]

    before = state()
    for rows, count in (([other], 4), ([table], 2 * SIZE + 2)):
        with pytest.raises(CapacityError, match="raise a tier's capacity, or use fewer or shorter sequences"):
            manager.begin(rows, count)
        assert state() == before
        assert not manager.moves
        assert other.blocks == []
    append(manager, table, 1)
    append(manager, table, SIZE)
    assert table.length == 4 * SIZE


def test_rows_that_all_need_the_device_at_once_are_refused_when_it_is_too_small():
    manager = make(device=2, host=10)
    rows = [manager.open() for _ in range(3)]
    with pytest.raises(CapacityError, match=r"3 more blocks of 2 tokens are needed .* room for 2 on the device"):
        manager.begin(rows, 1)
    assert isinstance(manager.begin(rows[:2], 1), Step)


def test_a_draft_is_taken_back_and_written_again_in_tiers_that_are_full_to_the_last_slot():
    """The private copy of a sealed block needs a slot only until the original is given up."""
    manager = make(device=2, host=1, recent=1)
    table = sequence(manager, 2)
    append(manager, table, 1)
    manager.crop(table, SIZE - 1)
    append(manager, table, 2 * SIZE)
    assert len(table.blocks) == 3
    assert manager.num_tail_copies == 1


def test_a_frozen_disk_takes_nothing_more_and_can_still_be_read():
    manager = make(device=2, host=0, disk=10, recent=1)
    table = sequence(manager, 5)
    assert places(table) == ["d", "s", "s", "s", "d"]
    manager.freeze(DISK)
    with pytest.raises(CapacityError):
        begin(manager, [table], 1)
    manager.crop(table, 4 * SIZE)
    step, moves = begin(manager, [table], 1)
    assert moves == []
    assert [extent.tier for extent in step.reads[0]] == [DEVICE, DISK, DISK, DISK]
    manager.rollback(step)
    manager.crop(table, 3 * SIZE - 1)
    (tail,) = append(manager, table, 1)
    assert tail.wire == Wire(DISK, DEVICE)
