"""The simulated memory that a manager is tested on: bytes in slots, copies under way, and poison where nothing may be read."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from tierkv.block_pool import BlockPool
from tierkv.block_table import BlockTable, Extent
from tierkv.manager import TierManager
from tierkv.moves import Move, Step
from tierkv.placement import Keep
from tierkv.tier import Tier

LAYERS = 2
POISON = -1
MAX_SEQUENCES = 7
MAX_ROUNDS = 200
"""Rounds of making room, a tenth of whose moves fail; without failures a handful suffice."""

Pick = Callable[[int], int]
"""Return a number from 0 to n - 1: a hypothesis draw or a random number."""


class WatchedPool(BlockPool):
    """Tells when a slot becomes free, so that its bytes can be poisoned at that very moment."""

    def __init__(self, num_slots: int, slots_per_segment: int, on_free: Callable[[int], None]) -> None:
        super().__init__(num_slots, slots_per_segment)
        self._on_free = on_free

    def release(self, slot: int) -> bool:
        freed = super().release(slot)
        if freed:
            self._on_free(slot)
        return freed


@dataclass(eq=False)
class Forward:
    """An open step: what it appends to each row, and how many layers were written."""

    step: Step
    rows: list["Row"]
    new: list[list[int]]
    written: int = 0


@dataclass(eq=False)
class Row:
    """A sequence: its table, and the tokens that it must hold."""

    table: BlockTable
    tokens: list[int] = field(default_factory=list)
    forward: Forward | None = None


@dataclass
class Sizes:
    """The shape of a world."""

    block_size: int
    slots: tuple[int, int, int]
    per_segment: tuple[int, int, int]
    keep: tuple[int, int]


class Memory:
    """A manager, simulated memory, sequences that are known token by token, and copies that end only when told."""

    def __init__(self, sizes: Sizes, pick: Pick, note: Callable[[str], None]) -> None:
        self.pick = pick
        self.note = note
        self.size = sizes.block_size
        self.keep = Keep(*sizes.keep)
        slots = dict(zip(Tier, sizes.slots, strict=True))
        per_segment = dict(zip(Tier, sizes.per_segment, strict=True))
        eviction = ("lru", "s3fifo", "cost")[pick(3)]
        self.manager = TierManager(self.size, slots, per_segment, self.keep, eviction=eviction)
        self.manager.pools = self.manager.places.pools = {
            tier: WatchedPool(slots[tier], per_segment[tier], lambda slot, tier=tier: self._freed(tier, slot))  # type: ignore[misc]
            for tier in Tier
        }
        self.largest = slots
        self.longest = self.size * max(2, sum(sizes.slots) // 2)
        self.memory: dict[tuple[Tier, int], list[list[int]]] = {}
        self.flights: dict[Move, list[list[int]]] = {}
        self.rows: list[Row] = []
        self.waiting: set[Row] = set()
        self.shrinking: dict[Tier, int] = {}
        self.published: dict[bytes, list[int]] = {}  # the tokens up to the end of the block with this key
        self._next_token = 0
        self._failed_in_a_row = 0
        self._in_begin = False

    # -- simulated memory -----------------------------------------------------------------------------------------

    def _blank(self) -> list[list[int]]:
        return [[POISON] * self.size for _ in range(LAYERS)]

    def _freed(self, tier: Tier, slot: int) -> None:
        self.memory[tier, slot] = self._blank()
        if self._in_begin:
            self.note(f"dropped for nothing: {tier.label}")

    def _places(self, extents: Sequence[Extent], start: int, stop: int) -> Iterable[tuple[Tier, int, int]]:
        """Yield (tier, slot, position in block) of the tokens ``start`` to ``stop``, checking the extents."""
        at = start
        for extent in extents:
            per_segment = self.manager.slots_per_segment[extent.tier]
            assert extent.start == at < extent.stop
            assert extent.run.slot // per_segment == (extent.run.slot + extent.run.length - 1) // per_segment
            assert extent.first_token >= 0
            assert extent.first_token + extent.stop - extent.start <= extent.run.length * self.size
            for offset in range(extent.first_token, extent.first_token + extent.stop - extent.start):
                yield extent.tier, extent.run.slot + offset // self.size, offset % self.size
            at = extent.stop
        assert at == stop

    def _check_reads(self, extents: Sequence[Extent], tokens: list[int], start: int = 0) -> None:
        for token, (tier, slot, at) in zip(tokens, self._places(extents, start, start + len(tokens)), strict=True):
            for layer in range(LAYERS):
                got = self.memory.get((tier, slot), self._blank())[layer][at]
                assert got == token * LAYERS + layer, f"{tier.label} slot {slot} layer {layer} at {at}: {got}"

    # -- moves ----------------------------------------------------------------------------------------------------

    def _start(self, moves: Iterable[Move]) -> None:
        for move in moves:
            assert move in self.manager.moves
            assert move not in self.flights
            source, destination = move.wire
            assert self.manager.pools[destination].references(move.slot) == 1
            assert move.slot < self.manager.pools[destination].num_slots
            self.memory[destination, move.slot] = self._blank()
            self.flights[move] = [list(layer) for layer in self.memory.get((source, move.source_slot), self._blank())]
            if move.tail_of is not None:
                kind = "tail copy"
            elif source is destination:
                kind = "relocate"
            elif source > destination:
                kind = "promote"
            else:
                kind = "evict" if move.evicts else "clean"
            self.note(f"{kind} {move.wire.label}")

    def _is_stale(self, move: Move) -> bool:
        """Return whether nobody wants the result any more."""
        if move.tail_of is None:
            return move.target.references == 0 and not self.manager.shared.is_kept(move.target)
        row = next((row for row in self.rows if row.table is move.tail_of), None)
        return row is None or not row.table.blocks or row.table.blocks[-1] is not move.source

    def finish(self, move: Move, *, fails: bool = False) -> None:
        source, destination = move.wire
        delivered = self.flights.pop(move)
        stale = self._is_stale(move)
        held = self.memory.get((source, move.source_slot), self._blank())
        assert stale or held == delivered, "the source of a copy changed under it"
        assert self.memory[destination, move.slot] == self._blank(), "somebody wrote into a slot that is being filled"
        assert self.manager.pools[destination].references(move.slot) == 1
        if fails:
            self.note("failed")
            self.manager.fail(move)
            assert self.manager.pools[destination].references(move.slot) == 0
            return
        self.memory[destination, move.slot] = [
            [was if was == now else POISON for was, now in zip(*layers, strict=True)]
            for layers in zip(delivered, held, strict=True)
        ]
        self.manager.complete(move)
        if stale:
            self.note("stale completion")
            assert self.manager.pools[destination].references(move.slot) == 0
        elif move.evicts and source is not destination and source in move.target.slots:
            self.note("source kept for an open step")

    def finish_some(self) -> None:
        """End one move, or all of them, in any order; one in ten fails."""
        count = len(self.flights) if self.pick(3) == 0 else 1
        while self.flights and count:
            moves = list(self.flights)
            fails = self.pick(10) == 9 and self._failed_in_a_row < 3
            self._failed_in_a_row = self._failed_in_a_row + 1 if fails else 0
            self.finish(moves[self.pick(len(moves))], fails=fails)
            count -= 1
