"""What `Capacity` promises the manager keeps, and the budget that its message names is the smallest that suffices."""

import random
import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tierkv.capacity import Capacity, queue_bytes
from tierkv.errors import CapacityError
from tierkv.geometry import PoolGeometry
from tierkv.layout import BlockLayout, LayerSpec
from tierkv.manager import TierManager
from tierkv.moves import Room
from tierkv.placement import Keep
from tierkv.tier import Tier

MIB = 2**20

shapes = st.tuples(st.integers(1, 4), st.integers(1, 64), st.integers(1, 64))
layouts = st.builds(
    lambda shapes, copies, size, dtype: BlockLayout(
        tuple(LayerSpec(index, *shape) for index, shape in enumerate(shapes * copies)), size, dtype
    ),
    st.lists(shapes, min_size=1, max_size=3),
    st.integers(1, 12),
    st.sampled_from([16, 32, 64]),
    st.sampled_from(["float32", "bfloat16"]),
)
LAYOUT = BlockLayout(tuple(LayerSpec(index, 3, 64, 64) for index in range(30)), 32, "float32")
"""SmolLM2-135M in float32: 46,080 bytes a token, 1.4 MiB a block."""


def capacity(layout, budget_bytes, host=0, disk=0, ahead=2, queue=0):
    pool = PoolGeometry(layout, budget_bytes - queue_bytes(budget_bytes, queue))
    return Capacity(layout, pool, host, disk, ahead, queue_limit=queue)


def named_budget(error):
    found = re.search(r'the smallest device\.capacity that suffices is "(\d+)MiB"', str(error))
    assert found
    return int(found[1])


@settings(suppress_health_check=[HealthCheck.filter_too_much])
@given(
    layout=layouts,
    device_mib=st.integers(0, 30),
    host=st.integers(0, 200),
    disk=st.integers(0, 200),
    ahead=st.integers(0, 4),
    queue=st.sampled_from([0, 1, MIB // 2, 3 * MIB, 256 * MIB]),
    rows=st.integers(1, 6),
    tokens=st.integers(1, 4000),
    held=st.sampled_from([0, 0, 7]),
)
@example(  # 21 MiB suffice, 22 do not, 23 and more do: segments are larger in a larger pool
    layout=BlockLayout(tuple(LayerSpec(index, 3, 39, 63) for index in range(9)), 16, "bfloat16"),
    device_mib=22, host=50, disk=100, ahead=0, queue=0, rows=3, tokens=1860, held=0,
)  # fmt: skip
def test_the_named_budget_suffices_and_one_mib_less_does_not(
    layout, device_mib, host, disk, ahead, queue, rows, tokens, held
):
    def plan(mib):
        return capacity(layout, mib * MIB, host, disk, ahead, queue).plan(rows, tokens, held)

    try:
        plan(device_mib)
    except CapacityError as error:
        message = str(error)
    else:
        return
    needed = named_budget(message)
    assert needed > device_mib
    for mib in (needed, needed + 1, needed + 2, needed + 3, needed + needed // 8):  # nor does a little more hold less
        plan(mib)
    with pytest.raises(CapacityError) as one_less:
        plan(needed - 1)
    assert named_budget(one_less.value) == needed
    assert "\n" not in message


@given(
    layout=layouts,
    device_bytes=st.integers(0, 8_000_000),
    host=st.integers(0, 100),
    disk=st.integers(0, 100),
    ahead=st.integers(0, 4),
    rows=st.integers(1, 6),
    tokens=st.integers(1, 1000),
)
def test_a_plan_holds_the_scratch_and_every_block(layout, device_bytes, host, disk, ahead, rows, tokens):
    asked = capacity(layout, device_bytes, host, disk, ahead)
    try:
        plan = asked.plan(rows, tokens)
    except CapacityError:
        return
    assert 1 <= plan.num_buffers <= 1 + ahead
    assert plan.buffer_tokens == rows * tokens
    assert plan.device_slots == asked.device.num_slots(plan.num_buffers * plan.buffer_tokens)
    assert plan.device_slots >= 2 * rows
    assert plan.device_slots + host + disk >= rows * layout.blocks_for(tokens)
    # Fetching ahead is a convenience: it leaves at least half of the device to the KV.
    assert plan.num_buffers == 1 or 2 * plan.device_slots >= asked.device.num_slots()


def test_scratch_for_layers_ahead_gives_way_before_a_call_is_refused():
    slots = PoolGeometry(LAYOUT, 100 * MIB).num_slots()
    generous = capacity(LAYOUT, 100 * MIB, disk=10_000).plan(1, 1_000)
    assert generous.num_buffers == 3
    assert slots - generous.device_slots < 8
    long = capacity(LAYOUT, 100 * MIB, disk=10_000).plan(1, 32_000)
    assert long.num_buffers == 1
    assert capacity(LAYOUT, 100 * MIB, disk=10_000, ahead=0).plan(1, 32_000) == long


def test_the_message_says_what_is_needed_what_there_is_and_what_to_do():
    with pytest.raises(CapacityError) as caught:
        capacity(LAYOUT, 100 * MIB, host=10).plan(2, 4096, held_elsewhere=3)
    message = str(caught.value)
    for part in (
        "2 sequences of up to 4,096 tokens",
        "360.0 MiB of KV",  # 2 x 4096 x 46,080 bytes
        "12.0 MiB of device scratch",
        "blocks of 32 tokens on the device, 10 in host memory and 0 on disk (1.4 MiB each)",
        "3 of them taken by other caches",
        "give disk.capacity some room",
    ):
        assert part in message
    failed = replace(capacity(LAYOUT, MIB), disk_failed=True)
    with pytest.raises(CapacityError, match="the disk tier failed, make room there"):
        failed.plan(1, 4096)
    with pytest.raises(CapacityError, match="1 sequence of up to") as caught:
        capacity(LAYOUT, MIB, disk=5).plan(1, 4096)
    assert "disk.capacity" not in str(caught.value)
    assert "other caches" not in str(caught.value)


def test_device_scratch_alone_can_be_too_much_however_large_the_disk():
    with pytest.raises(CapacityError) as caught:
        capacity(LAYOUT, 20 * MIB, disk=10**9).plan(1, 1_000_000)
    assert named_budget(caught.value) * MIB > LAYOUT.scratch_bytes(1, 1_000_000)


def drive(manager, tables, count):
    """Append to all tables, running every move at once."""
    while isinstance(outcome := manager.begin(tables, count), Room):
        assert manager.moves
        for move in list(manager.moves):
            manager.complete(move)
    manager.commit(outcome)
    for move in manager.background(tables):
        manager.complete(move)


@settings(max_examples=60)
@given(
    rows=st.integers(1, 4),
    tokens=st.integers(1, 60),
    spare=st.sampled_from([0, 0, 1, 5]),
    device=st.integers(0, 12),
    host_share=st.integers(0, 10),
    keep=st.builds(Keep, st.integers(0, 3), st.integers(1, 5)),
    reorder=st.sampled_from(["never", "beams", "drafts"]),
    seed=st.integers(0, 2**32),
)
@example(4, 60, 0, 0, 5, Keep(1, 4), "beams", 0)
@example(1, 60, 0, 0, 0, Keep(1, 4), "drafts", 0)
def test_the_manager_never_refuses_what_capacity_promised(rows, tokens, spare, device, host_share, keep, reorder, seed):
    """Whole prompts, decoding, beams that are reordered and drafts that are taken back, to the last token."""
    chance = random.Random(seed)
    size = 4
    blocks = rows * -(-tokens // size)
    device_slots = Capacity.least_slots(rows) + device
    below = max(0, blocks - device_slots) + spare
    host = below * host_share // 10
    slots = {Tier.DEVICE: device_slots, Tier.HOST: host, Tier.DISK: below - host}
    manager = TierManager(size, slots, {Tier.DEVICE: 4, Tier.HOST: 2}, keep)
    tables = [manager.open() for _ in range(rows)]
    drive(manager, tables, chance.randint(1, tokens))
    while tables[0].length < tokens:
        if reorder == "beams":
            new = tables[:0]
            for table in [chance.choice(tables) for _ in tables]:
                new.append(manager.fork(table) if table in new else table)
            for table in tables:
                if table not in new:
                    manager.release(table)
            tables = new
        if reorder == "drafts":
            length = max(0, tables[0].length - chance.randint(0, 2 * size))
            for table in tables:
                manager.crop(table, length)
        drive(manager, tables, min(tokens - tables[0].length, chance.choice([1, 1, 2 * size + 1])))
        if reorder == "drafts" and chance.random() < 0.02:
            reorder = "never"
    for table in tables:
        manager.release(table)
    assert all(pool.used == 0 and pool.free == pool.num_slots for pool in manager.pools.values())
