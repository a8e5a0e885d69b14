"""Prefixes of a simulation: what ``tierkv.prefix`` does with bytes, done in virtual time, in the same order."""

from typing import TYPE_CHECKING, Final

from tierkv.cost import CostModel
from tierkv.errors import CapacityError
from tierkv.simulate_batch import Row
from tierkv.simulate_outcome import HeldSessions
from tierkv.simulate_requests import BlockIds, Turn
from tierkv.simulate_setup import Setup
from tierkv.simulate_steps import Steps
from tierkv.simulate_store import SimulatedStore
from tierkv.tier import Tier, Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierkv.block_table import Block

KNEE_TOKENS: Final = 8192
"""Position at which computing a token costs about twice what it costs at the start; for the cost rule, as in an engine."""


class Prefixes:
    """The shared and the stored prefixes of a simulated engine.

    Attributes:
        store: the prefix store, or None where there is none.
        held: the sessions whose blocks are all somewhere.
    """

    def __init__(self, cost: CostModel, setup: Setup, steps: Steps) -> None:
        """Know of no prefix."""
        self.store: SimulatedStore | None = None
        self.held = HeldSessions()
        self._steps = steps
        self._manager = steps.manager
        self._wires = steps.wires
        self._counts = steps.counts
        self._costs = cost.costs
        self._size = cost.block_size
        self._min_tokens = setup.min_tokens
        self._block_costs: list[float] = []
        if setup.store_blocks:
            self.store = SimulatedStore(
                setup.store_blocks, cost.block_bytes, eviction=setup.eviction, write_policy=setup.write_policy,
                queue_blocks=setup.queue_blocks, write=lambda tier, done: self._wires.send(Wire(tier, Tier.DISK), done),
            )  # fmt: skip
            self.store.on_forgotten = self._forgotten
        self._manager.shared.on_forgotten = self._forgotten

    def find(self, turn: Turn) -> "list[Block]":
        """Return the blocks that memory holds of a prompt, from the first on."""
        shared, names, found = self._manager.shared, turn.names, []
        for index in range(min(len(names.keys), turn.input_tokens // self._size)):
            block = shared.find(names.keys[index], names.numbers[index])
            if block is None:
                break
            found.append(block)
        return found

    def begin(self, row: Row, found: "Sequence[Block]") -> dict[Tier, int]:
        """Begin an empty sequence with what memory and the store hold of its prompt.

        Args:
            row: that has no blocks yet.
            found: what memory holds.

        Returns:
            How many tokens were found, by the tier in which they lay.
        """
        turn, size = row.turn, self._size
        keys = turn.names.keys[: turn.input_tokens // size]
        stored = self.store.match(keys) if self.store and turn.input_tokens >= self._min_tokens else 0
        target = min(turn.input_tokens - 1, max(len(found), stored) * size)  # one token at least is left to compute
        if target <= 0:
            return {}
        whole = -(-target // size)
        tiers = [block.tier for block in found[:whole]]
        in_memory = self._manager.share(row.table, keys[: len(tiers)], BlockIds(turn.names.numbers, size))
        self._counts.shares += in_memory
        if in_memory * size < target:
            try:
                self._restore(row, whole - in_memory)
            except CapacityError:  # what the tiers cannot hold now, they can hold block by block during the prefill
                self._manager.release(row.table)
                row.table = self._manager.open()
                return {}
        self._manager.crop(row.table, target)
        row.named = target // size
        row.stored = min(stored, row.named)
        for index in range(in_memory, row.named):
            self._name(row, index)
        if self.store:
            self.store.touch(keys[: row.stored])
        tiers += [Tier.DISK] * (whole - in_memory)
        tokens = dict.fromkeys(Tier, 0)
        for index, tier in enumerate(tiers):
            tokens[tier] += min(size, target - index * size)
        return tokens

    def publish(self, row: Row) -> None:
        """Name the blocks of a sequence at rest that have become full, and offer them to the store."""
        keys = row.turn.names.keys
        full = min(row.table.length // self._size, len(keys))
        for index in range(row.named, full):
            self._name(row, index)
        row.named = max(row.named, full)
        if self.store is None:
            return
        if full > row.stored and full * self._size >= self._min_tokens:
            new = range(row.stored, full)
            self.store.offer(
                keys, new, [self._cost_of(index) for index in new], [row.table.blocks[index] for index in new]
            )
            row.stored = full
        self.store.drain()

    def _restore(self, row: Row, count: int) -> None:
        """Read ``count`` blocks from the store into new ones; everything else waits, as it does in an engine."""
        self._steps.begin(row, count * self._size)
        began = self._wires.now
        self._wires.run_to(began + self._costs.restore_seconds + count * self._costs.block_seconds)
        missing = count

        def arrived() -> None:
            nonlocal missing
            missing -= 1

        for block in row.table.blocks[-count:]:
            self._wires.load(block.tier, arrived)
        self._wires.run_until(lambda: not missing)
        self._counts.restore_seconds += self._wires.now - began
        self._steps.commit(row)

    def _name(self, row: Row, index: int) -> None:
        names = row.turn.names
        parent = names.keys[index - 1] if index else None
        self._manager.publish(row.table, index, names.keys[index], names.numbers[index], parent, self._cost_of(index))
        self._counts.publishes += 1

    def _cost_of(self, index: int) -> float:
        while len(self._block_costs) <= index:
            self._block_costs.append(self._size * (1 + len(self._block_costs) * self._size / KNEE_TOKENS))
        return self._block_costs[index]

    def _forgotten(self, key: bytes) -> None:
        """Memory or the store has forgotten a block."""
        self._counts.evictions += 1
        if key not in self._manager.shared and (self.store is None or key not in self.store):
            self.held.lose(key)
