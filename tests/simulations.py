"""Small simulations: a machine, tiers and a workload, and what tests compare of an outcome."""

from collections import Counter

from tierkv.cost import CostModel, Costs, Line
from tierkv.simulate import Simulation
from tierkv.simulate_requests import Sessions
from tierkv.simulate_setup import Setup
from tierkv.tier import Tier, Wire
from tierkv.traces import Workload

DEVICE, HOST, DISK = Tier
UP, DOWN = Wire(HOST, DEVICE), Wire(DEVICE, HOST)
BLOCK = 64
BLOCK_BYTES = 1 << 20
PLENTY = 10**6
CHAT = Workload(
    sessions=12, clients=6, system_tokens=300, first_tokens=400, turn_tokens=200, output_tokens=70, turns=5,
    turns_spread=0.3, tokens_spread=0.6, gap_seconds=0.5,
)  # fmt: skip


def cost(speed=1.0):
    wires = {
        DOWN: Line(1e-6, 1e9 * speed),
        UP: Line(1e-6, 1e9 * speed),
        Wire(HOST, DISK): Line(1e-5, 1e8 * speed),
        Wire(DISK, HOST): Line(1e-5, 2e8 * speed),
    }
    costs = Costs(
        step_seconds=0.002, row_seconds=1e-4, kv_bytes_per_second={DEVICE: 2e10}, wires=wires, token_seconds=2e-5,
        pair_seconds=1e-9,
    )  # fmt: skip
    return CostModel(costs, 4, BLOCK_BYTES, BLOCK)


def setup(device=60, host=40, disk=40, store=60, **settings):
    return Setup(
        slots={DEVICE: device, HOST: host, DISK: disk},
        store_blocks=store,
        slots_per_segment={DEVICE: 8, HOST: 8, DISK: 16},
        **({"batch": 4, "min_tokens": 0, "write_policy": "always"} | settings),
    )


def simulation(workload=CHAT, seed=0, model=None, **settings):
    return Simulation(model or cost(), setup(**settings), Sessions(workload, BLOCK, seed))


def facts(outcome):
    return {name: value for name, value in outcome.record().items() if name != "wall_seconds"}


class Watched:
    """A simulation with every decision of its manager counted, and everything checked that must hold at any time."""

    def __init__(self, simulation):
        self.simulation = simulation
        self.manager = simulation.steps.manager
        self.moves: Counter[Wire] = Counter()
        self.checks = 0
        for name in ("begin", "background"):
            setattr(self.manager, name, self.watch(getattr(self.manager, name)))
        commit, complete = self.manager.commit, self.manager.complete

        def checked_commit(step):
            commit(step)
            self.check()

        def counted(move):
            self.moves[move.wire] += 1
            complete(move)
            self.check()

        self.manager.commit, self.manager.complete = checked_commit, counted

    def watch(self, method):
        def call(*args):
            answer = method(*args)
            self.check()
            return answer

        return call

    def check(self):
        self.checks += 1
        places, slots = self.manager.places, self.simulation._setup.slots
        for tier, pool in places.pools.items():
            assert pool.used <= slots[tier]
        tables = list(self.manager._tables)
        held = Counter(block for table in tables for block in table.blocks)
        for block, number in held.items():
            assert block.references == number, "a block has another number of owners than it knows of"
            assert number == 1 or block.sealed, "two sequences hold a block that is not finished"
        lying = Counter((tier, slot) for tier in Tier for b in places.lying_in(tier) for slot in [b.slots[tier]])
        assert not lying or max(lying.values()) == 1, "two blocks lie in one slot"
        for table in tables:
            assert all(block.slots for block in table.blocks), "a sequence has a block that lies nowhere"
