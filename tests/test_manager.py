"""TierManager, case by case: what stays, what leaves first, what is copied, and what late or failed copies may do.

`tests/test_manager_stateful.py` shows that no order of events breaks it; here is what it is meant to do.
"""

import pytest

from tierkv.errors import CapacityError
from tierkv.manager import MAX_PROMOTIONS_PER_STEP, TierManager
from tierkv.moves import Move, Room, Step
from tierkv.placement import Keep
from tierkv.tier import Tier, Wire

SIZE = 2
DEVICE, HOST, DISK = Tier
LETTERS = {DEVICE: "d", HOST: "h", DISK: "s"}


def make(device, host=0, disk=0, first=1, recent=2, per_segment=4):
    slots = {DEVICE: device, HOST: host, DISK: disk}
    return TierManager(SIZE, slots, {DEVICE: per_segment, HOST: per_segment}, Keep(first, recent))


def finish(manager, moves=None):
    for move in list(manager.moves if moves is None else moves):
        manager.complete(move)


def begin(manager, tables, count):
    """Begin a step, running every move at once; return it and the moves."""
    moves: list[Move] = []
    while isinstance(outcome := manager.begin(tables, count), Room):
        assert manager.moves, "told to wait for nothing"
        moves += outcome.moves
        finish(manager)
    return outcome, moves


def append(manager, tables, count):
    """Append and commit; return the moves that had to run first."""
    tables = tables if isinstance(tables, list) else [tables]
    step, moves = begin(manager, tables, count)
    manager.commit(step)
    return moves


def sequence(manager, blocks):
    """Return a sequence of full blocks."""
    table = manager.open()
    append(manager, table, blocks * SIZE)
    return table


def places(table):
    """Return where each block has copies, highest first: ``d``, ``h`` and ``s`` for device, host and disk (SSD)."""
    return ["".join(LETTERS[tier] for tier in sorted(block.slots)) for block in table.blocks]


def assert_whole(manager):
    assert not manager.moves
    for pool in manager.pools.values():
        assert (pool.used, pool.free) == (0, pool.num_slots)
    assert manager.census() == dict.fromkeys(Tier, (0, 0))


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


# -- last blocks ------------------------------------------------------------------------------------------------------


def test_a_last_block_of_its_own_is_written_in_place():
    manager = make(device=4)
    table = manager.open()
    append(manager, table, 1)
    block = table.blocks[0]
    assert append(manager, table, 1) == []
    assert table.blocks == [block]


@pytest.mark.parametrize(("holders", "sharers", "copies"), [(2, 1, 1), (2, 2, 1), (3, 2, 2), (4, 4, 3)])
def test_k_of_r_holders_append_to_a_shared_last_block(holders, sharers, copies):
    manager = make(device=12)
    first = manager.open()
    append(manager, first, SIZE + 1)
    tables = [first, *(manager.fork(first) for _ in range(holders - 1))]
    shared = first.blocks[1]
    moves = append(manager, tables[:sharers], 1)
    assert len(moves) == manager.num_tail_copies == copies
    assert all((move.source, move.wire) == (shared, Wire(DEVICE, DEVICE)) for move in moves)
    assert len({table.blocks[1] for table in tables[:sharers]}) == sharers
    assert len({table.blocks[0] for table in tables}) == 1  # full blocks stay shared: beams copy tails only
    assert shared.references == holders - copies
    for table in tables:
        manager.release(table)
    assert_whole(manager)


def test_a_block_is_sealed_only_when_a_later_forward_appends_beyond_it():
    manager = make(device=4)
    table = manager.open()
    append(manager, table, SIZE)
    assert not table.blocks[0].sealed
    manager.crop(table, 1)
    assert append(manager, table, 1) == []  # taken back before anything was appended beyond: written in place
    step, _ = begin(manager, [table], 1)
    assert table.blocks[0].sealed
    assert not table.blocks[1].sealed
    manager.commit(step)


def test_a_cut_into_a_sealed_block_makes_a_private_copy_and_leaves_the_sharer_alone():
    manager = make(device=8)
    table = sequence(manager, 2)
    append(manager, table, 1)
    twin = manager.fork(table)
    original = list(table.blocks)
    manager.crop(twin, SIZE + 1)
    (move,) = append(manager, twin, 3)
    assert move.source is original[1]
    assert table.blocks == original
    assert twin.blocks[0] is original[0]
    assert twin.blocks[1] is not original[1]
    assert not twin.blocks[1].sealed


def test_a_cold_last_block_comes_up_as_a_private_copy():
    manager = make(device=2, host=4, recent=1)
    table = manager.open()
    append(manager, table, 1)
    sequence(manager, 2)
    assert places(table) == ["h"]
    *_, tail = append(manager, table, 1)
    assert (tail.wire, tail.tail_of) == (Wire(HOST, DEVICE), table)
    assert places(table) == ["d"]
    assert manager.pools[HOST].used == 1  # of the other sequence: the cold original is gone


def test_a_step_waits_for_the_copy_of_its_last_block_though_the_reason_for_it_is_gone():
    """Written in place meanwhile, the block would be replaced by a copy without the new token when that arrives."""
    manager = make(device=8)
    table = manager.open()
    append(manager, table, 1)
    twin = manager.fork(table)
    (copy,) = manager.begin([table], 1).moves
    manager.release(twin)
    assert manager.begin([table], 1) == Room(())
    assert manager.moves == {copy}
    manager.complete(copy)
    step = manager.begin([table], 1)
    assert table.blocks == [copy.target]
    manager.commit(step)
    assert manager.pools[DEVICE].used == 1


def test_a_copy_of_a_last_block_that_was_cut_off_meanwhile_is_given_up():
    manager = make(device=8)
    table = manager.open()
    append(manager, table, SIZE + 1)
    twin = manager.fork(table)
    (copy,) = manager.begin([table], 1).moves
    manager.crop(table, 1)
    manager.complete(copy)
    assert len(table.blocks) == 1
    assert manager.num_tail_copies == 0
    assert manager.pools[DEVICE].used == 2
    manager.release(table)
    manager.release(twin)
    assert_whole(manager)


# -- torn forwards ----------------------------------------------------------------------------------------------------


def test_rollback_restores_exactly():
    manager = make(device=4, host=4)
    table = sequence(manager, 3)
    append(manager, table, 1)
    twin = manager.fork(table)
    manager.crop(twin, SIZE)

    def state():
        used = {tier: pool.used for tier, pool in manager.pools.items()}
        return [places(table), list(table.blocks), table.length, used, manager.census()]

    before = state()
    step, _ = begin(manager, [table], 1)
    assert state() == before  # the token has a place already
    manager.rollback(step)
    assert state() == before
    step, _ = begin(manager, [table], 2 * SIZE)  # this pushes a block out first
    manager.rollback(step)
    assert [list(table.blocks), table.length] == before[1:3]
    assert sum(manager.census()[tier][0] for tier in Tier) == 4
    with pytest.raises(KeyError):
        manager.rollback(step)
    with pytest.raises(KeyError):
        manager.commit(step)
    append(manager, table, 1)
    assert table.length == 4 * SIZE


def test_a_rolled_back_step_of_several_rows_gives_every_slot_back():
    manager = make(device=4, host=2, disk=6)
    rows = [manager.open() for _ in range(2)]
    step, _ = begin(manager, rows, 6 * SIZE)
    assert sum(pool.used for pool in manager.pools.values()) == 12
    manager.rollback(step)
    assert_whole(manager)
    assert [table.blocks for table in rows] == [[], []]


# -- late, failed and repeated completions ----------------------------------------------------------------------------


def test_a_copy_that_arrives_after_its_sequence_ended_gives_its_slot_back():
    manager = make(device=4, host=4)
    idle = sequence(manager, 4)
    other = manager.open()
    room = manager.begin([other], SIZE)
    (move,) = room.moves
    manager.release(idle)
    assert manager.pools[DEVICE].references(move.source_slot) == 1  # still read by the copy
    assert manager.pools[HOST].references(move.slot) == 1
    manager.complete(move)
    manager.release(other)
    assert_whole(manager)


def test_a_late_completion_never_lands_in_a_slot_that_was_given_to_another():
    manager = make(device=4, host=1)
    idle = sequence(manager, 4)
    (move,) = manager.begin([manager.open()], SIZE).moves
    manager.release(idle)
    # Both ends of the copy stay taken until it is reported.
    assert (manager.pools[DEVICE].free, manager.pools[HOST].free) == (3, 0)
    others = sequence(manager, 3)
    assert move.source_slot not in [block.slots[DEVICE] for block in others.blocks]
    assert manager.begin([manager.open()], 2 * SIZE) == Room(())
    manager.complete(move)
    assert (manager.pools[DEVICE].free, manager.pools[HOST].free) == (1, 1)


def test_a_failed_move_leaves_the_block_where_it_was():
    manager = make(device=4, host=4)
    idle = sequence(manager, 4)
    other = manager.open()
    (move,) = manager.begin([other], SIZE).moves
    manager.fail(move)
    assert places(idle) == ["d"] * 4
    assert idle.blocks[0].arriving == {}
    assert manager.pools[HOST].used == 0
    (again,) = manager.begin([other], SIZE).moves
    assert again is not move
    assert again.source is move.source


def test_a_failed_copy_of_a_last_block_is_tried_again():
    manager = make(device=4)
    table = manager.open()
    append(manager, table, 1)
    twin = manager.fork(table)
    (move,) = manager.begin([twin], 1).moves
    manager.fail(move)
    assert twin.blocks == table.blocks
    assert manager.pools[DEVICE].used == 1
    (again,) = manager.begin([twin], 1).moves
    manager.complete(again)
    assert isinstance(manager.begin([twin], 1), Step)
    assert manager.num_tail_copies == 1


@pytest.mark.parametrize("report", ["complete", "fail"])
def test_a_move_is_reported_once(report):
    manager = make(device=4, host=4)
    sequence(manager, 4)
    (move,) = manager.begin([manager.open()], SIZE).moves
    getattr(manager, report)(move)
    before = {tier: pool.used for tier, pool in manager.pools.items()}
    for again in (manager.complete, manager.fail):
        with pytest.raises(KeyError):
            again(move)
    assert {tier: pool.used for tier, pool in manager.pools.items()} == before


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_a_tier_that_shrinks_moves_its_highest_slots_and_keeps_every_block():
    manager = make(device=8, host=4)
    gone, table = sequence(manager, 2), sequence(manager, 4)
    manager.release(gone)
    assert [block.slots[DEVICE] for block in table.blocks] == [4, 5, 6, 7]
    room = manager.resize(DEVICE, 3)
    assert [move.wire for move in room.moves] == [Wire(DEVICE, DEVICE)] * 3 + [Wire(DEVICE, HOST)]
    assert manager.resize(DEVICE, 3) == Room(())  # they are under way
    finish(manager)
    assert manager.resize(DEVICE, 3) is None
    assert all(block.slots.get(DEVICE, 0) < 3 for block in table.blocks)
    assert sorted("".join(places(table))) == ["d", "d", "d", "h"]
    assert manager.resize(DEVICE, 8) is None
    manager.release(table)
    assert_whole(manager)


def test_copies_that_lie_elsewhere_too_are_simply_dropped():
    manager = make(device=4, host=4)
    table = sequence(manager, 4)
    append(manager, table, 2)
    finish(manager, manager.background([table]))
    assert "dh" in places(table)
    index = places(table).index("dh")
    with_copy = table.blocks[index]
    while (room := manager.resize(DEVICE, 1)) is not None:
        assert with_copy not in [move.source for move in room.moves]
        finish(manager)
    assert places(table).count("d") == 1


def test_a_tier_that_cannot_shrink_keeps_its_size():
    manager = make(device=4, host=1)
    table = sequence(manager, 3)
    with pytest.raises(CapacityError, match="the device tier cannot shrink to 1 blocks: nothing below has room"):
        manager.resize(DEVICE, 1)
    assert manager.pools[DEVICE].num_slots == 4
    assert places(table) == ["d"] * 3
    assert not manager.moves
    (move,) = manager.resize(DEVICE, 2).moves
    assert manager.resize(DEVICE, 1) == Room(())  # not yet known: something is under way
    assert manager.pools[DEVICE].num_slots == 2
    manager.complete(move)
    with pytest.raises(CapacityError):
        manager.resize(DEVICE, 1)
    assert manager.resize(DEVICE, 2) is None


def test_a_resize_tears_the_steps_whose_places_it_takes():
    manager = make(device=4, host=4)
    table = sequence(manager, 3)
    step, _ = begin(manager, [table], 1)
    assert manager.resize(DEVICE, 8) is None
    assert not step.torn
    while manager.resize(DEVICE, 2) is not None:
        finish(manager)
    assert step.torn
    with pytest.raises(ValueError, match="it can only be rolled back"):
        manager.commit(step)
    manager.rollback(step)
    assert (table.length, len(table.blocks)) == (3 * SIZE, 3)
    append(manager, table, 1)
    manager.release(table)
    assert manager.resize(DEVICE, 4) is None
    assert_whole(manager)


def test_the_blocks_of_a_torn_step_can_be_relocated():
    manager = make(device=8)
    gone, table = sequence(manager, 4), sequence(manager, 2)
    manager.release(gone)
    step, _ = begin(manager, [table], 1)
    room = manager.resize(DEVICE, 4)
    assert [move.wire for move in room.moves] == [Wire(DEVICE, DEVICE)] * 3
    finish(manager)
    assert manager.resize(DEVICE, 4) is None
    manager.rollback(step)
    assert sorted(block.slots[DEVICE] for block in table.blocks) == [0, 1]
    assert manager.pools[DEVICE].used == 2


def test_a_clean_copy_above_a_lowered_limit_makes_no_room_when_it_is_dropped():
    manager = make(device=4, host=2, disk=4)
    table = sequence(manager, 4)
    append(manager, table, SIZE)
    (ahead,) = manager.background([table])
    assert manager.resize(HOST, 1) == Room(())
    manager.complete(ahead)
    assert places(table) == ["d", "d", "h", "dh", "d"]
    assert manager.census()[HOST] == (1, 1)
    append(manager, table, 2 * SIZE)
    assert places(table) == ["d", "d", "h", "h", "s", "d", "d"]
    while manager.resize(HOST, 1) is not None:
        finish(manager)
    assert manager.census()[HOST] == (1, 0)


def test_a_block_is_not_relocated_under_a_step_that_began_meanwhile():
    manager = make(device=4, per_segment=2)
    gone, table = sequence(manager, 2), sequence(manager, 1)
    manager.release(gone)
    (move,) = manager.resize(DEVICE, 2).moves
    step, _ = begin(manager, [table], 1)
    manager.complete(move)
    assert table.blocks[0].slots == {DEVICE: move.source_slot}
    assert manager.pools[DEVICE].references(move.slot) == 0
    manager.commit(step)
    while manager.resize(DEVICE, 2) is not None:
        finish(manager)
    assert sorted(block.slots[DEVICE] for block in table.blocks) == [0, 1]


# -- misuse -----------------------------------------------------------------------------------------------------------


def test_a_sequence_is_released_once_and_by_its_own_manager():
    manager, other = make(device=2), make(device=2)
    table = manager.open()
    with pytest.raises(ValueError, match="released twice"):
        other.release(table)
    manager.release(table)
    with pytest.raises(ValueError, match="released twice"):
        manager.release(table)


def test_a_step_needs_rows_of_one_length_and_a_token():
    manager = make(device=4)
    one, other = sequence(manager, 1), manager.open()
    for tables, count in (([], 1), ([one], 0), ([one, other], 1)):
        with pytest.raises(ValueError, match="a step appends at least one token to sequences of one length"):
            manager.begin(tables, count)


def test_a_crop_of_a_shared_sequence_frees_only_what_nobody_else_holds():
    manager = make(device=8, host=8)
    table = sequence(manager, 4)
    twin = manager.fork(table)
    append(manager, twin, 2 * SIZE)
    manager.crop(twin, SIZE)
    assert manager.pools[DEVICE].used == 4
    manager.crop(table, 0)
    assert manager.pools[DEVICE].used == 1
    manager.release(twin)
    manager.release(table)
    assert_whole(manager)
