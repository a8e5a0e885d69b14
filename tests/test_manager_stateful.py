"""TierManager against a plain list of tokens per sequence, with copies that finish only when the test says so.

`World` is a simulated machine: for every slot of every tier the numbers written there, or POISON. A slot is poisoned
when it is freed and while a copy into it is under way; a copy delivers what its source held when it *started*, and its
source must not change before it ends. Reading poison, or another number than the sequence's own, fails the test.

The same operations are driven by a hypothesis state machine (small, shrinks) and by long random walks with fixed seeds,
which also prove that every kind of move was reached.
"""

import random
from collections import Counter

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tests.manager_memory import (
    Pick,
    Sizes,
)
from tests.manager_world import World


def draw_sizes(pick: Pick) -> Sizes:
    return Sizes(
        block_size=1 + pick(4),
        slots=(2 + pick(11), max(0, pick(11) - 2), max(0, pick(20) - 4)),
        per_segment=(1 + pick(4), 1 + pick(4), 1 + pick(2)),
        keep=(pick(3), 1 + pick(3)),
    )


OPERATIONS = {
    "begin_and_commit": 30, "begin_insisting": 5, "begin_once": 8, "write": 8, "read": 3, "commit": 8, "rollback": 3,
    "open": 3, "crop": 3, "fork": 3, "select": 3, "release": 2, "background": 8, "finish_some": 15, "resize": 2,
    "continue_resize": 2, "freeze": 0.05, "publish": 6, "share": 6, "disown": 0.1,
}  # fmt: skip
"""Methods of `World`, and how often a walk takes each."""


class ManagerMachine(RuleBasedStateMachine):
    """Any operation at any time, all equally likely."""

    @initialize(data=st.data())
    def make(self, data):
        self.data = data
        self.world = World(draw_sizes(self._pick), self._pick, event)
        self.world.open()

    def _pick(self, n):
        return self.data.draw(st.integers(0, n - 1)) if n > 1 else 0

    @rule(data=st.data(), operation=st.sampled_from(list(OPERATIONS)))
    def run(self, data, operation):
        self.data = data
        getattr(self.world, operation)()

    @invariant()
    def holds(self):
        if hasattr(self, "world"):
            self.world.check()
            self.world.check_contents()

    def teardown(self):
        if hasattr(self, "world"):
            # Hypothesis draws nothing more here: any fixed order will do.
            self.world.pick = random.Random(0).randrange
            self.world.note = lambda kind: None
            self.world.end()


def test_any_operation_at_any_time():
    run_state_machine_as_test(ManagerMachine, settings=settings(settings(), max_examples=100, stateful_step_count=40))


@pytest.mark.slow
def test_any_operation_at_any_time_deep():
    run_state_machine_as_test(ManagerMachine, settings=settings(settings(), max_examples=250, stateful_step_count=60))


KINDS = {
    "step", "step of several rows", "step with moves in flight", "two open steps", "torn after 0 layers",
    "torn after 1 layers", "torn after 2 layers",
    "home device", "home host", "home disk", "reads device", "reads host", "reads disk",
    "evict device_to_host", "evict device_to_disk", "evict host_to_disk",
    "clean device_to_host", "clean device_to_disk",
    "promote host_to_device", "promote disk_to_device", "relocate device_to_device", "relocate host_to_host",
    "tail copy device_to_device", "tail copy host_to_device", "tail copy disk_to_device",
    "dropped for nothing: device", "dropped for nothing: host", "dropped for nothing: disk",
    "stale completion", "source kept for an open step", "failed", "capacity error", "cannot shrink", "resized device",
    "resized host", "freeze", "shared", "used again", "two became one",
}  # fmt: skip


def walk(seed: int, num_operations: int, seen: Counter[str]) -> None:
    chance = random.Random(seed)
    kinds: list[str] = []
    world = World(draw_sizes(chance.randrange), chance.randrange, kinds.append)
    world.open()
    for number, name in enumerate(chance.choices(list(OPERATIONS), list(OPERATIONS.values()), k=num_operations)):
        getattr(world, name)()
        world.check()
        if number % 4 == 0:
            world.check_contents()
    world.end()
    seen.update(kinds)


def test_random_walks_reach_every_kind_of_move():
    seen: Counter[str] = Counter()
    for seed in range(80):
        walk(seed, 120, seen)
    assert KINDS - seen.keys() <= {"relocate host_to_host"}  # rare: the long walks reach it


@pytest.mark.slow
def test_long_random_walks():
    seen: Counter[str] = Counter()
    for seed in range(1000, 1100):
        walk(seed, 400, seen)
    assert KINDS - seen.keys() == set()
    assert seen["step"] > 3_000
