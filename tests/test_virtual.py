"""Virtual time: wires are first in, first out, take what the cost model says, and the clock never goes back."""

import itertools
import random

import pytest

from tests.managers import make
from tierkv.cost import CostModel, Costs, Line
from tierkv.moves import Room
from tierkv.tier import Tier, Wire
from tierkv.virtual import VirtualMover, VirtualWires

DEVICE, HOST, DISK = Tier
DOWN, UP, SPILL, RESTORE = Wire(DEVICE, HOST), Wire(HOST, DEVICE), Wire(HOST, DISK), Wire(DISK, HOST)
MIB = 1 << 20


def cost(wires=None, *, stored=None, host_rate=None):
    """A block is 4 MiB in 2 layers; a wire moves it in 4 pieces, or 2 where it ends at the disk."""
    lines = {DOWN: 8, UP: 4, SPILL: 2, RESTORE: 1} if wires is None else wires
    rates = {DEVICE: 16.0 * MIB} | ({HOST: host_rate} if host_rate else {})
    return CostModel(
        Costs(
            step_seconds=0.0,
            kv_bytes_per_second=rates,
            wires={wire: Line(0.0, speed * MIB) for wire, speed in lines.items()},
            stored_bytes_per_second=stored,
        ),
        2,
        4 * MIB,
        16,
    )


class Times:
    """Notes when something arrives."""

    def __init__(self, wires):
        self.wires, self.seen = wires, []

    def __call__(self, name):
        return lambda: self.seen.append((name, self.wires.now))


def test_blocks_queue_on_a_wire_in_the_order_in_which_they_come():
    wires = VirtualWires(cost())
    arrived = Times(wires)
    for name in "abc":
        wires.send(UP, arrived(name))
    wires.run_to(2.5)
    assert arrived.seen == [("a", 1.0), ("b", 2.0)]
    assert wires.now == 2.5
    wires.send(UP, arrived("d"))
    wires.run_to(10.0)
    assert arrived.seen[2:] == [("c", 3.0), ("d", 4.0)]
    wires.send(UP, arrived("e"))  # the wire has been idle
    wires.run_to(20.0)
    assert arrived.seen[4:] == [("e", 11.0)]
    assert wires.num_blocks[UP] == 5
    assert wires.busy_seconds[UP] == 5.0


def test_wires_do_not_wait_for_each_other():
    wires = VirtualWires(cost())
    arrived = Times(wires)
    wires.send(UP, arrived("up"))
    wires.send(DOWN, arrived("down"))
    wires.run_to(5.0)
    assert arrived.seen == [("down", 0.5), ("up", 1.0)]


def test_between_device_and_disk_blocks_take_two_wires_in_turn():
    wires = VirtualWires(cost())
    arrived = Times(wires)
    wires.send(Wire(DEVICE, DISK), arrived("a"))  # 0.5 s and 2 s
    wires.send(Wire(DEVICE, DISK), arrived("b"))  # on the second wire once the first block has left it
    wires.send(SPILL, arrived("c"))  # is there before both
    wires.run_to(10.0)
    assert arrived.seen == [("c", 2.0), ("a", 4.0), ("b", 6.0)]
    assert wires.num_blocks == {DOWN: 2, SPILL: 3}
    wires.send(Wire(DISK, DEVICE), arrived("d"))
    wires.run_to(20.0)
    assert arrived.seen[-1] == ("d", 15.0)


def test_a_direct_wire_wins():
    direct = Wire(DISK, DEVICE)
    wires = VirtualWires(cost({direct: 4, RESTORE: 1, UP: 1}))
    assert wires.route(direct) == [(direct, 1.0)]


def test_records_are_read_at_the_rate_of_the_store():
    wires = VirtualWires(cost(stored=0.5 * MIB))
    arrived = Times(wires)
    wires.load(DEVICE, arrived("a"))
    wires.load(HOST, arrived("b"))
    wires.run_to(100.0)
    assert arrived.seen == [("a", 9.0), ("b", 16.0)]


def test_where_device_and_host_are_one_memory_a_copy_is_a_read_and_a_write():
    spill = Wire(DEVICE, DISK)
    wires = VirtualWires(cost({spill: 2, Wire(DISK, DEVICE): 1}))
    assert wires.route(DOWN) == [(DOWN, 0.5)]
    assert wires.route(SPILL) == [(spill, 2.0)]
    assert wires.route(RESTORE) == [(Wire(DISK, DEVICE), 4.0)]
    assert wires.route(Wire(DEVICE, DEVICE)) == [(Wire(DEVICE, DEVICE), 0.5)]
    slow = VirtualWires(cost({}, host_rate=2.0 * MIB))
    assert slow.route(UP) == [(UP, 4.0)]


def test_a_disk_that_nothing_connects_is_said():
    wires = VirtualWires(cost({DOWN: 1, UP: 1}))
    with pytest.raises(ValueError, match="nothing moves host_to_disk here"):
        wires.route(Wire(DEVICE, DISK))


def test_streams_wait_for_what_was_handed_over_before_and_hold_up_what_comes_after():
    wires = VirtualWires(cost())
    arrived = Times(wires)
    assert wires.stream(UP, 10.0, 0.25) == 0.0
    wires.send(UP, arrived("a"))
    assert wires.stream(UP, 10.0, 2.0) == 1.25
    wires.send(UP, arrived("b"))
    wires.run_to(10.0)
    assert arrived.seen == [("a", 1.25), ("b", 4.25)]
    assert wires.streamed_bytes[UP] == 20
    assert wires.busy_seconds[UP] == 4.25


def test_waiting_ends_with_the_arrival_and_waiting_for_nothing_is_an_error():
    wires = VirtualWires(cost())
    arrived = Times(wires)
    for name in "ab":
        wires.send(UP, arrived(name))
    wires.run_until(lambda: bool(arrived.seen))
    assert wires.now == 1.0
    assert [wires.next_event] == [2.0]
    wires.run_until(lambda: len(arrived.seen) == 2)
    assert [wires.next_event] == [None]
    with pytest.raises(RuntimeError, match="nothing is under way"):
        wires.run_until(lambda: False)


def test_any_traffic_is_served_in_order_and_never_faster_than_the_wire():
    draw = random.Random(1)
    wires = VirtualWires(cost())
    sent, seen = {}, []
    for number in range(300):
        wire = draw.choice([DOWN, UP, SPILL, RESTORE])
        sent[number] = (wire, wires.now)
        wires.send(wire, lambda number=number: seen.append((number, wires.now)))
        if draw.random() < 0.5:
            before = wires.now
            wires.run_to(wires.now + draw.random() * 3)
            assert wires.now >= before
    wires.run_to(1e6)
    assert [at for _, at in seen] == sorted(at for _, at in seen)
    for wire in (DOWN, UP, SPILL, RESTORE):
        own = [(number, at) for number, at in seen if sent[number][0] is wire or sent[number][0] == wire]
        assert [number for number, _ in own] == sorted(number for number, _ in own)
        seconds = wires.route(wire)[0][1]
        ends = [at for _, at in own]
        assert all(b - a >= seconds - 1e-9 for a, b in itertools.pairwise(ends))
        assert wires.busy_seconds[wire] == pytest.approx(seconds * len(own))
        assert all(at - sent[number][1] >= seconds - 1e-9 for number, at in own)


def test_a_manager_is_told_of_moves_when_they_have_arrived():
    manager = make(device=4, host=8, first=0, recent=1)
    wires = VirtualWires(cost())
    mover = VirtualMover(manager, wires)
    one, two = manager.open(), manager.open()
    manager.commit(manager.begin([one], 8))
    room = manager.begin([two], 4)
    assert isinstance(room, Room)
    assert len(room.moves) == 2
    mover.submit(room.moves)
    mover.reap()
    assert len(manager.moves) == 2
    wires.run_to(0.5)
    mover.reap()
    assert len(manager.moves) == 1
    mover.wait()
    assert wires.now == 1.0
    mover.reap()
    assert not manager.moves
    manager.commit(manager.begin([two], 4))
    mover.wait()  # for nothing: no time passes
    assert wires.now == 1.0
