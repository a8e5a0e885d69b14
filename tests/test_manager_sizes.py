"""TierManager: tiers that change their size, and misuse."""

import pytest

from tests.managers import (
    DEVICE,
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
from tierkv.moves import Room
from tierkv.tier import Wire

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
