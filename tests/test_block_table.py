"""Block tables: lengths, sharing, sealing, and where the tokens lie."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.block_table import Block, BlockTable, Extent, drop_reference
from tierkv.tier import Run, Tier, Wire

ONE_EACH = dict.fromkeys(Tier, 1)


def table_of(length, places, block_size=4):
    """Make a table whose blocks lie at ``places``, each ``(tier, slot)``."""
    table = BlockTable(block_size)
    for uid, (tier, slot) in enumerate(places):
        block = Block(uid)
        block.slots[tier] = slot
        table.blocks.append(block)
    table.length = length
    return table


def on_device(length, block_size=4):
    return table_of(length, [(Tier.DEVICE, slot) for slot in range(-(-length // block_size))], block_size)


@given(st.integers(0, 300), st.integers(1, 40))
def test_waste_is_less_than_a_block(length, size):
    table = BlockTable(size)
    places = table.blocks_for(length) * size
    assert 0 <= places - length < size


def test_the_tail_is_the_last_block_while_it_is_partly_filled():
    assert on_device(0).tail is None
    assert on_device(4).tail is None
    table = on_device(5)
    assert table.tail is table.blocks[1]


def test_a_fork_holds_the_same_blocks_once_more():
    table = on_device(9)
    table.seal()
    twin = table.fork()
    assert twin is not table
    assert twin.blocks == table.blocks
    assert twin.blocks is not table.blocks
    assert (twin.length, twin.num_sealed, twin.block_size) == (9, 2, 4)
    assert [block.references for block in table.blocks] == [2, 2, 2]


def test_a_cut_returns_only_the_blocks_that_nobody_else_holds():
    table = on_device(12)
    twin = table.fork()
    twin.blocks.append(own := Block(9))
    twin.length = 13
    assert twin.cut(5) == [own]
    assert (len(twin.blocks), twin.length) == (2, 5)
    assert [block.references for block in table.blocks] == [2, 2, 1]
    blocks = list(table.blocks)
    assert table.cut(0) == [blocks[2]]
    assert twin.cut(0) == blocks[:2]
    assert [block.references for block in blocks] == [0, 0, 0]


@pytest.mark.parametrize("length", [-1, 6])
def test_a_cut_keeps_no_more_than_there_is(length):
    table = on_device(5)
    with pytest.raises(ValueError, match=f"cannot keep {length} of 5 tokens"):
        table.cut(length)
    assert (table.length, len(table.blocks)) == (5, 2)


def test_a_cut_to_the_same_length_changes_nothing():
    table = on_device(5)
    assert table.cut(5) == []
    assert len(table.blocks) == 2


def test_full_blocks_are_sealed_and_a_cut_block_stays_sealed():
    table = on_device(9)
    table.seal()
    assert [block.sealed for block in table.blocks] == [True, True, False]
    assert table.num_sealed == 2
    table.cut(6)
    assert (table.num_sealed, table.tail.sealed) == (1, True)
    table.cut(3)
    assert (table.num_sealed, table.tail.sealed) == (0, True)
    table.seal()
    assert table.num_sealed == 0


def test_a_block_in_place_of_a_cut_one_is_sealed_in_its_turn():
    table = on_device(8)
    table.seal()
    table.cut(5)
    table.blocks[-1] = private = Block(9)
    table.length = 8
    table.seal()
    assert private.sealed
    assert table.num_sealed == 2


def test_a_reference_dropped_twice_raises():
    block = Block(7)
    assert drop_reference(block) is True
    with pytest.raises(ValueError, match="block 7 was released twice"):
        drop_reference(block)


def test_a_blocks_tier_is_its_highest_copy():
    block = Block(1)
    block.slots = {Tier.DISK: 4, Tier.HOST: 2}
    assert repr(block) == "Block(1 host:2,disk:4 refs=1)"
    assert [tier for tier in Tier if tier is block.tier] == [Tier.HOST]
    block.slots[Tier.DEVICE] = 0
    block.sealed = True
    assert [tier for tier in Tier if tier is block.tier] == [Tier.DEVICE]
    assert repr(block) == "Block(1 device:0,host:2,disk:4 refs=1 sealed)"


def test_labels_of_tiers_and_wires():
    assert [tier.label for tier in Tier] == ["device", "host", "disk"]
    assert Wire(Tier.DISK, Tier.HOST).label == "disk_to_host"


# -- extents ----------------------------------------------------------------------------------------------------------


def test_neighbouring_slots_of_one_tier_are_one_extent():
    table = table_of(14, [(Tier.DEVICE, 4), (Tier.DEVICE, 5), (Tier.DEVICE, 6), (Tier.DEVICE, 7)])
    eight = ONE_EACH | {Tier.DEVICE: 8}
    assert list(table.extents(0, 14, eight)) == [Extent(Tier.DEVICE, Run(4, 4), 0, 0, 14)]
    assert list(table.extents(0, 14, ONE_EACH | {Tier.DEVICE: 2})) == [
        Extent(Tier.DEVICE, Run(4, 2), 0, 0, 8),
        Extent(Tier.DEVICE, Run(6, 2), 0, 8, 14),
    ]
    assert list(table.extents(6, 13, eight)) == [Extent(Tier.DEVICE, Run(5, 3), 2, 6, 13)]
    assert list(table.extents(3, 4, eight)) == [Extent(Tier.DEVICE, Run(4, 1), 3, 3, 4)]
    assert list(table.extents(14, 14, eight)) == []


def test_another_tier_a_gap_or_a_step_back_begins_another_extent():
    places = [(Tier.DEVICE, 0), (Tier.HOST, 1), (Tier.HOST, 2), (Tier.HOST, 4), (Tier.HOST, 3), (Tier.DISK, 4)]
    found = list(table_of(24, places).extents(0, 24, dict.fromkeys(Tier, 8)))
    assert [(extent.tier, extent.run) for extent in found] == [
        (Tier.DEVICE, Run(0, 1)),
        (Tier.HOST, Run(1, 2)),
        (Tier.HOST, Run(4, 1)),
        (Tier.HOST, Run(3, 1)),
        (Tier.DISK, Run(4, 1)),
    ]


def test_the_highest_copy_is_the_one_that_is_read():
    table = table_of(4, [(Tier.HOST, 3)])
    table.blocks[0].slots[Tier.DEVICE] = 6
    assert list(table.extents(0, 4, ONE_EACH)) == [Extent(Tier.DEVICE, Run(6, 1), 0, 0, 4)]


@given(st.data())
def test_extents_name_the_place_of_every_token_once(data):
    size = data.draw(st.integers(1, 5))
    places = data.draw(st.lists(st.tuples(st.sampled_from(Tier), st.integers(0, 9)), max_size=8))
    length = data.draw(st.integers(max(0, (len(places) - 1) * size + 1) if places else 0, len(places) * size))
    table = table_of(length, places, size)
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    per_segment = {tier: data.draw(st.integers(1, 4)) for tier in Tier}
    at = start
    previous = None
    for extent in table.extents(start, stop, per_segment):
        assert extent.start == at < extent.stop
        for position in range(extent.start, extent.stop):
            offset = extent.first_token + position - extent.start
            assert (extent.tier, extent.run.slot + offset // size) == places[position // size]
            assert offset % size == position % size
        segments = {slot // per_segment[extent.tier] for slot in range(extent.run.slot, sum(extent.run))}
        assert len(segments) == 1
        if previous is not None:  # as long as possible
            assert (
                previous.tier is not extent.tier
                or sum(previous.run) != extent.run.slot
                or (extent.run.slot % per_segment[extent.tier] == 0)
            )
        previous, at = extent, extent.stop
    assert at == stop
