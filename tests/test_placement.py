"""The placement rules on small tables by hand: who must be on the device, who leaves first, which tails are copied."""

import pytest

from tierkv.block_table import Block, BlockTable
from tierkv.placement import (
    HARD,
    OPTIONAL,
    WISHED,
    Demand,
    Keep,
    demand,
    device_share,
    idle_blocks,
    own_blocks,
    tails_to_copy,
)
from tierkv.tier import Tier

SIZE = 4
DEVICE, HOST, DISK = Tier


def table(tiers, length=None):
    """Make a table with a block in each of ``tiers``; full unless a length is given."""
    made = BlockTable(SIZE)
    for slot, tier in enumerate(tiers):
        block = Block(slot)
        block.slots[tier] = slot
        made.blocks.append(block)
    made.length = len(tiers) * SIZE if length is None else length
    return made


def indices(made, blocks):
    return [made.blocks.index(block) for block in blocks]


def test_ranks_of_a_sequence():
    keep = Keep(first=2, recent=3)
    assert [keep.rank(index, 9) for index in range(9)] == [WISHED] * 2 + [OPTIONAL] * 4 + [WISHED] * 2 + [HARD]
    assert [keep.rank(index, 3) for index in range(3)] == [WISHED, WISHED, HARD]
    assert Keep(first=0, recent=1).rank(0, 2) == OPTIONAL


@pytest.mark.parametrize(
    ("length", "count", "rows", "copies", "expected"),
    [
        (0, 1, 1, 0, Demand(1, 1, 1)),
        (3, 1, 1, 0, Demand(0, 0, 0)),  # the last block has room
        (4, 1, 2, 0, Demand(2, 2, 2)),
        (4, 0, 2, 2, Demand(2, 2, 2)),  # tail copies alone
        (0, 10 * SIZE, 1, 0, Demand(1, 4, 10)),  # one to write to, first + recent - 1 wished, the rest optional
        (8 * SIZE, 2 * SIZE, 1, 0, Demand(1, 2, 2)),
        (7, 2 * SIZE, 3, 1, Demand(1 + 3, 1 + 6, 1 + 6)),
    ],
)
def test_demand_counts_what_must_what_should_and_what_may_be_on_the_device(length, count, rows, copies, expected):
    tables = [table([DEVICE] * -(-length // SIZE), length) for _ in range(rows)]
    assert demand(tables, count, Keep(first=1, recent=3), copies) == expected


def test_scarce_device_slots_go_to_the_last_block_of_every_row_then_to_wishes_then_to_the_front():
    rows = [table([]), table([])]
    keep = Keep(first=1, recent=2)

    def share(num_slots):
        return sorted(device_share(rows, 6 * SIZE, keep, num_slots))

    assert share(2) == [(0, 5), (1, 5)]
    assert share(4) == [(0, 0), (0, 5), (1, 0), (1, 5)]
    assert share(6) == [(0, 0), (0, 4), (0, 5), (1, 0), (1, 4), (1, 5)]
    assert share(8) == [(0, 0), (0, 1), (0, 4), (0, 5), (1, 0), (1, 1), (1, 4), (1, 5)]
    assert share(0) == []
    assert len(share(100)) == 12


def test_the_block_that_left_the_recent_window_leaves_first_and_the_front_last():
    made = table([DEVICE] * 8)
    optional, wished = own_blocks([made], 1, Keep(first=1, recent=3))  # a ninth block begins
    assert indices(made, optional) == [5, 4, 3, 2, 1]
    assert indices(made, wished) == [7, 6, 0]


def test_last_blocks_with_room_and_blocks_below_are_not_offered():
    made = table([DEVICE, HOST, DEVICE, DEVICE], length=14)
    optional, wished = own_blocks([made], 1, Keep(first=1, recent=2))
    assert (indices(made, optional), indices(made, wished)) == ([], [2, 0])


def test_a_block_of_two_rows_is_offered_once():
    made = table([DEVICE] * 4)
    optional, wished = own_blocks([made, made.fork()], 1, Keep(first=1, recent=1))
    assert indices(made, optional) == [3, 2, 1]
    assert indices(made, wished) == [0]


def test_idle_sequences_are_emptied_oldest_first_and_whole():
    old, young, active = table([DEVICE, HOST, DEVICE]), table([DEVICE]), table([DEVICE, DEVICE])
    found = list(idle_blocks([old, young, active], active.blocks, DEVICE))
    assert found == [old.blocks[0], old.blocks[2], young.blocks[0]]
    assert list(idle_blocks([old, young, active], active.blocks, HOST)) == [old.blocks[1]]
    assert list(idle_blocks([old, young, active], active.blocks, DISK)) == []


def test_a_shared_block_is_idle_only_when_all_its_sequences_are_and_counts_once():
    old = table([DEVICE, DEVICE])
    twin, active = old.fork(), table([])
    active.blocks = [old.blocks[0]]
    assert list(idle_blocks([old, twin, active], active.blocks, DEVICE)) == [old.blocks[1]]


def test_only_the_highest_copy_says_where_an_idle_block_is():
    made = table([DEVICE])
    made.blocks[0].slots[HOST] = 3
    assert list(idle_blocks([made], (), HOST)) == []
    assert list(idle_blocks([made], (), DEVICE)) == made.blocks


# -- tails ------------------------------------------------------------------------------------------------------------


def test_a_tail_of_its_own_on_the_device_is_written_in_place():
    assert tails_to_copy([table([DEVICE, DEVICE], length=6)]) == []


def test_full_last_blocks_are_never_copied():
    made = table([DEVICE, DEVICE])
    assert tails_to_copy([made, made.fork()]) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda block: setattr(block, "sealed", True),
        lambda block: block.arriving.update({HOST: 3}),
        lambda block: block.slots.update({HOST: 3}),
        lambda block: (block.slots.clear(), block.slots.update({DISK: 3})),
    ],
    ids=["sealed", "being copied", "two copies", "not on the device"],
)
def test_any_other_tail_is_copied(spoil):
    made = table([DEVICE, DEVICE], length=6)
    spoil(made.blocks[1])
    assert tails_to_copy([made]) == [made]


@pytest.mark.parametrize(
    ("holders", "sharers", "copied"), [(1, 1, 0), (2, 1, 1), (2, 2, 1), (3, 2, 2), (3, 3, 2), (5, 4, 4), (5, 5, 4)]
)
def test_k_of_r_holders_of_a_tail(holders, sharers, copied):
    """The last of all holders may keep it; while anybody else holds it, every one that appends gets a copy."""
    tables = [table([DEVICE, DEVICE], length=6)]
    tables += [tables[0].fork() for _ in range(holders - 1)]
    assert tails_to_copy(tables[:sharers]) == tables[:copied]


def test_a_sealed_tail_is_copied_for_every_sharer():
    first = table([DEVICE, DEVICE], length=6)
    first.blocks[1].sealed = True
    tables = [first, first.fork()]
    assert tails_to_copy(tables) == tables


def test_tails_of_different_sequences_do_not_count_for_each_other():
    one, other = table([DEVICE], length=1), table([DEVICE], length=1)
    one_twin, other_twin = one.fork(), other.fork()
    assert tails_to_copy([one, other, one_twin, other_twin]) == [one, other]
