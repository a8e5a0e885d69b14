"""Managers with as many slots as a test wants, and what the tests ask of them."""

from tierkv.manager import TierManager
from tierkv.moves import Move, Room
from tierkv.placement import Keep
from tierkv.tier import Tier

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
