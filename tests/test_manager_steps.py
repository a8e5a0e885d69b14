"""TierManager: last blocks, torn forwards, and completions that come late, fail or come twice."""

import pytest

from tests.managers import (
    DEVICE,
    HOST,
    SIZE,
    append,
    assert_whole,
    begin,
    make,
    places,
    sequence,
)
from tierkv.moves import Room, Step
from tierkv.tier import Tier, Wire

# -- last blocks ------------------------------------------------------------------------------------------------------


def test_a_last_block_of_its_own_is_written_in_place():
    manager = make(device=4)
    table = manager.open()
    append(manager, table, 1)
    block = table.blocks[0]
    assert append(manager, table, 1) == []
    assert table.blocks == [block]


def test_shared_blocks_that_have_moved_down_come_up_before_they_are_read_at_every_token():
    manager = make(device=8, host=8)
    first = manager.open()
    append(manager, first, 4 * SIZE)
    keys = [bytes([index]) * 32 for index in range(4)]
    ids = list(range(4 * SIZE))
    for index, key in enumerate(keys):
        manager.publish(
            first, index, key, ids[index * SIZE : (index + 1) * SIZE], keys[index - 1] if index else None, 1.0
        )
    manager.release(first)
    other = manager.open()
    append(manager, other, 8 * SIZE)  # takes their room: they are kept in host memory
    manager.release(other)
    second = manager.open()
    assert manager.share(second, keys, ids) == 4
    assert {block.tier for block in second.blocks} == {HOST}
    moves = append(manager, second, 1)
    assert [move.wire for move in moves] == [Wire(HOST, DEVICE)] * 4
    assert {block.tier for block in second.blocks} == {DEVICE}


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
