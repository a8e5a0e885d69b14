"""TierManager against a plain list of tokens per sequence, with copies that finish only when the test says so.

`World` is a simulated machine: for every slot of every tier the numbers written there, or POISON. A slot is poisoned
when it is freed and while a copy into it is under way; a copy delivers what its source held when it *started*, and its
source must not change before it ends. Reading poison, or another number than the sequence's own, fails the test.

The same operations are driven by a hypothesis state machine (small, shrinks) and by long random walks with fixed seeds,
which also prove that every kind of move was reached.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tierkv.block_pool import BlockPool
from tierkv.block_table import Block, BlockTable, Extent
from tierkv.errors import CapacityError
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


class World:
    """A manager, simulated memory, sequences that are known token by token, and the operations on them."""

    def __init__(self, sizes: Sizes, pick: Pick, note: Callable[[str], None]) -> None:
        self.pick = pick
        self.note = note
        self.size = sizes.block_size
        self.keep = Keep(*sizes.keep)
        slots = dict(zip(Tier, sizes.slots, strict=True))
        per_segment = dict(zip(Tier, sizes.per_segment, strict=True))
        self.manager = TierManager(self.size, slots, per_segment, self.keep)
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
            return move.target.references == 0
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

    # -- steps ----------------------------------------------------------------------------------------------------

    def _idle(self) -> list[Row]:
        return [row for row in self.rows if row.forward is None and row not in self.waiting]

    def _choose_rows(self) -> list[Row]:
        """Return some idle sequences of equal length."""
        idle = self._idle()
        if not idle:
            return []
        length = len(idle[self.pick(len(idle))].tokens)
        equal = [row for row in idle if len(row.tokens) == length]
        chosen = [row for row in equal if self.pick(4)]
        return chosen or equal[:1]

    def _begin(self, *, insist: bool) -> None:
        """Ask for a step; where it insists, run the moves that it waits for and ask again."""
        rows = self._choose_rows()
        count = 1 + self.pick((1, self.size, 3 * self.size, 6 * self.size)[self.pick(4)])
        if not rows or len(rows[0].tokens) + count > self.longest:
            return
        self.waiting.update(rows)
        rounds = 0
        while not self._ask(rows, count) and insist:
            hurry = self.pick(6) == 5  # asks again before every move was reported
            while self.flights:
                self.finish_some()
                # Others that take the room as soon as it is made could go on for ever.
                if rounds < MAX_ROUNDS // 4 and self.pick(6) == 5:
                    self._meddle()
                if hurry:
                    break
            rounds += 1
            assert rounds < MAX_ROUNDS, "room is never made"
        self.waiting.difference_update(rows)
        if rows[0].forward is None and self.pick(2):  # refused: sooner or later some sequence ends
            self.release()

    def _ask(self, rows: list[Row], count: int) -> bool:
        """Ask once; return whether there is an answer, a step or a refusal."""
        tables = [row.table for row in rows]
        before = [(row.table, list(row.table.blocks), row.table.length) for row in self.rows]
        copies = self._copies_needed(tables)
        self._in_begin = True
        try:
            outcome = self.manager.begin(tables, count)
        except CapacityError:
            self.note("capacity error")
            assert not self.manager.moves, "room that is on its way was not waited for"
            assert before == [(row.table, list(row.table.blocks), row.table.length) for row in self.rows]
            assert not self._must_fit(tables, count, copies)
            return True
        finally:
            self._in_begin = False
        if isinstance(outcome, Step):
            self._opened(outcome, rows, count)
            return True
        self._start(outcome.moves)
        assert self.manager.moves, "told to wait for nothing"
        return False

    def _meddle(self) -> None:
        """Do something with other sequences while some wait for room."""
        verbs = (self.release, self.crop, self.fork, self.select, self.begin_once, self.commit, self.background)
        verbs[self.pick(len(verbs))]()

    def begin_once(self) -> None:
        self._begin(insist=False)

    def begin_insisting(self) -> None:
        self._begin(insist=True)

    def begin_and_commit(self) -> None:
        self._begin(insist=True)
        self.commit()

    def _copies_needed(self, tables: list[BlockTable]) -> int:
        """Count tail copies by the rule as it is written: k of r holders append to a tail."""
        appending = Counter(table.tail for table in tables if table.tail is not None)
        copies = 0
        for tail, k in appending.items():
            last_may_keep = (
                k == tail.references and not tail.sealed and not tail.arriving and [*tail.slots] == [Tier.DEVICE]
            )
            copies += k - 1 if last_may_keep else k
        return copies

    def _must_fit(self, tables: list[BlockTable], count: int, copies: int) -> bool:
        """Return whether a step certainly has room once everything that may move has moved. No copy is under way."""
        manager, device = self.manager, self.manager.pools[Tier.DEVICE]
        new = [table.blocks_for(table.length + count) - len(table.blocks) for table in tables]
        hard, total = (copies, copies) if copies else (sum(number > 0 for number in new), sum(new))
        running = {block for row in self.rows if row.forward for block in row.table.blocks}
        room = {tier: pool.free for tier, pool in manager.pools.items()}
        for block in self.live_blocks():
            for tier, slot in block.slots.items():
                pool = manager.pools[tier]
                if tier is not block.tier and block not in running and slot < pool.num_slots and not pool.frozen:
                    room[tier] += 1
        fixed = running | {table.tail for table in tables if table.tail is not None}
        movable = sum(
            block not in fixed and block.slots.get(Tier.DEVICE, device.num_slots) < device.num_slots
            for block in self.live_blocks()
        )
        below = room[Tier.HOST] + room[Tier.DISK]
        return total <= room[Tier.DEVICE] + below and hard <= room[Tier.DEVICE] + min(movable, below)

    def _opened(self, step: Step, rows: list[Row], count: int) -> None:
        assert step.start == len(rows[0].tokens)
        assert step.stop == step.start + count
        new = [[self._next_token + row * count + at for at in range(count)] for row in range(len(rows))]
        self._next_token += count * len(rows)
        forward = Forward(step, rows, new)
        for row in rows:
            row.forward = forward
        self._check_forward(forward)
        self.note("step")
        if len(rows) > 1:
            self.note("step of several rows")
        if self.flights:
            self.note("step with moves in flight")
        if any(row.forward not in (None, forward) for row in self.rows):
            self.note("two open steps")
        for tier in {extent.tier for extents in step.writes for extent in extents}:
            self.note(f"home {tier.label}")
        for tier in {extent.tier for extents in step.reads for extent in extents}:
            self.note(f"reads {tier.label}")

    def _check_forward(self, forward: Forward) -> None:
        """Read what the step reads; see that nobody else sees where it writes."""
        step = forward.step
        for row, reads, writes in zip(forward.rows, step.reads, step.writes, strict=True):
            self._check_reads(reads, row.tokens)
            for tier, slot, _ in set(self._places(writes, step.start, step.stop)):
                blocks = {block for block in self.live_blocks() if block.slots.get(tier) == slot}
                assert len(blocks) == 1
                block = blocks.pop()
                assert block in row.table.blocks
                assert block.references == 1
                assert not block.sealed
                assert block.slots == {tier: slot}, "a second copy would go stale"
                assert not block.arriving
                for move in self.flights:
                    assert self._is_stale(move) or (move.wire.source, move.source_slot) != (tier, slot)
                    assert (move.wire.destination, move.slot) != (tier, slot)

    def _forwards(self) -> list[Forward]:
        return list(dict.fromkeys(row.forward for row in self.rows if row.forward is not None))

    def _choose_forward(self) -> Forward | None:
        forwards = self._forwards()
        return forwards[self.pick(len(forwards))] if forwards else None

    def _write(self, forward: Forward) -> None:
        layer, step = forward.written, forward.step
        self._check_forward(forward)
        for new, extents in zip(forward.new, step.writes, strict=True):
            for token, (tier, slot, at) in zip(new, self._places(extents, step.start, step.stop), strict=True):
                self.memory.setdefault((tier, slot), self._blank())[layer][at] = token * LAYERS + layer
        forward.written += 1

    def write(self) -> None:
        forward = self._choose_forward()
        if forward and not forward.step.torn and forward.written < LAYERS:
            self._write(forward)

    def read(self) -> None:
        forward = self._choose_forward()
        if forward and not forward.step.torn:
            self._check_forward(forward)

    def commit(self) -> None:
        forward = self._choose_forward()
        if forward is None:
            return
        if forward.step.torn:
            with pytest.raises(ValueError, match="only be rolled back"):
                self.manager.commit(forward.step)
            return
        while forward.written < LAYERS:
            self._write(forward)
        self._check_forward(forward)
        for row, new, extents in zip(forward.rows, forward.new, forward.step.writes, strict=True):
            self._check_reads(extents, new, forward.step.start)
            row.tokens += new
            row.forward = None
        self.manager.commit(forward.step)
        if self.pick(2):
            self._start(self.manager.background(forward.step.tables))

    def rollback(self) -> None:
        forward = self._choose_forward()
        if forward is not None:
            self._rollback(forward)

    def _rollback(self, forward: Forward) -> None:
        self.note(f"torn after {forward.written} layers")
        self.manager.rollback(forward.step)
        for row in forward.rows:
            row.forward = None

    # -- verbs between steps --------------------------------------------------------------------------------------

    def open(self) -> None:
        for _ in range(1 + self.pick(2)):
            if len(self.rows) < MAX_SEQUENCES:
                self.rows.append(Row(self.manager.open()))

    def _crop(self, row: Row) -> None:
        length = self.pick(len(row.tokens) + 1)
        if self.pick(2):  # most crops take back a few tokens, as assisted decoding does
            length = max(0, len(row.tokens) - self.pick(2 * self.size))
        self.manager.crop(row.table, length)
        del row.tokens[length:]

    def crop(self) -> None:
        """Crop one sequence, or all of one length alike."""
        idle = self._idle()
        if not idle:
            return
        row = idle[self.pick(len(idle))]
        length = len(row.tokens)
        self._crop(row)
        if self.pick(2):
            for other in idle:
                if other is not row and len(other.tokens) == length:
                    self.manager.crop(other.table, len(row.tokens))
                    del other.tokens[len(row.tokens) :]

    def _fork(self, row: Row) -> None:
        if len(self.rows) < MAX_SEQUENCES:
            self.rows.append(Row(self.manager.fork(row.table), list(row.tokens)))

    def fork(self) -> None:
        idle = self._idle()
        if idle:
            self._fork(idle[self.pick(len(idle))])

    def _release(self, row: Row) -> None:
        self.manager.release(row.table)
        self.rows.remove(row)

    def release(self) -> None:
        idle = self._idle()
        if idle:
            self._release(idle[self.pick(len(idle))])

    def select(self) -> None:
        """Reorder sequences of one length as beam search does: some are forked, the others released."""
        rows = self._choose_rows()
        chosen = [rows[self.pick(len(rows))] for _ in rows]
        for row, times in Counter(chosen).items():
            for _ in range(times - 1):
                self._fork(row)
        for row in rows:
            if row not in chosen:
                self._release(row)

    def background(self) -> None:
        rows = self._choose_rows()
        self._start(self.manager.background([row.table for row in rows]))

    # -- tiers ----------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        self.manager.freeze(Tier.DISK)
        self.note("freeze")

    def resize(self) -> None:
        """Change the size of a tier; open steps are torn by that. Often it is not carried through at once."""
        tier = Tier.HOST if not self.pick(4) else Tier.DEVICE
        self.shrinking[tier] = self.pick(self.largest[tier] + 1) if self.pick(2) else self.largest[tier]
        self.continue_resize()

    def continue_resize(self) -> None:
        for tier, num_slots in list(self.shrinking.items()):
            for _ in range(MAX_ROUNDS):
                before = self.manager.pools[tier].num_slots
                try:
                    room = self.manager.resize(tier, num_slots)
                except CapacityError:
                    self.note("cannot shrink")
                    assert not self.manager.moves
                    assert self.manager.pools[tier].num_slots == before
                    del self.shrinking[tier]
                    if self.manager.pools[tier].used_from(before):  # an earlier request is still being carried through
                        self.shrinking[tier] = before
                    break
                if room is None:
                    del self.shrinking[tier]
                    assert not self.manager.pools[tier].used_from(num_slots)
                    self.note(f"resized {tier.label}")
                    break
                self._start(room.moves)
                assert self.manager.moves, "told to wait for nothing"
                if not self.pick(3):
                    return
                while self.flights:
                    self.finish_some()
            else:
                pytest.fail("a tier never shrinks")

    # -- what always holds ----------------------------------------------------------------------------------------

    def live_blocks(self) -> dict[Block, None]:
        return dict.fromkeys(block for row in self.rows for block in row.table.blocks)

    def check(self) -> None:
        """Budgets, references and the book-keeping, after every operation."""
        manager = self.manager
        assert manager.moves == set(self.flights)
        holders = Counter(block for row in self.rows for block in row.table.blocks)
        references: dict[Tier, Counter[int]] = {tier: Counter() for tier in Tier}
        census = {tier: [0, 0] for tier in Tier}
        arriving: dict[Block, dict[Tier, int]] = {}
        for block, count in holders.items():
            assert block.references == count
            assert block.slots, "a live block without a readable copy"
            for tier, slot in block.slots.items():
                references[tier][slot] += 1
                assert references[tier][slot] == 1, "two blocks in one slot"
                census[tier][tier is not min(block.slots)] += 1
        for move in self.flights:
            references[move.wire.source][move.source_slot] += 1
            references[move.wire.destination][move.slot] += 1
            if move.tail_of is None:
                arriving.setdefault(move.target, {})[move.wire.destination] = move.slot
        for block in holders.keys() | arriving.keys():
            assert block.arriving == arriving.get(block, {})
        for tier, pool in manager.pools.items():
            assert pool.used == len(references[tier])
            assert all(pool.references(slot) == count for slot, count in references[tier].items())
            above = len(pool.used_from(pool.num_slots))
            assert pool.frozen or pool.free == pool.num_slots - pool.used + above >= 0
            assert not above or tier in self.shrinking, "more slots are used than the tier has"
            assert not manager.places._primary[tier].keys() & manager.places._clean[tier].keys()
        assert manager.census() == {tier: tuple(counts) for tier, counts in census.items()}
        for row in self.rows:
            length = row.forward.step.stop if row.forward else len(row.tokens)
            assert row.table.length == len(row.tokens)
            assert 0 <= len(row.table.blocks) * self.size - length < self.size, "waste of a block or more"

    def check_contents(self) -> None:
        """Every copy of every block holds the tokens of every sequence that it belongs to."""
        for row in self.rows:
            self._check_reads(list(row.table.extents(0, len(row.tokens), self.manager.slots_per_segment)), row.tokens)
            for index, block in enumerate(row.table.blocks):
                tokens = row.tokens[index * self.size : (index + 1) * self.size]
                for place in block.slots.items():
                    held = self.memory.get(place, self._blank())
                    for layer in range(LAYERS):
                        assert held[layer][: len(tokens)] == [token * LAYERS + layer for token in tokens]

    def end(self) -> None:
        """Tear the steps, end the moves and the sequences in any order: nothing is left."""
        for forward in self._forwards():
            self._rollback(forward)
        while self.rows or self.flights:
            if self.rows and (self.pick(2) or not self.flights):
                self._release(self.rows[self.pick(len(self.rows))])
            else:
                self.finish_some()
            self.check()
        for pool in self.manager.pools.values():
            assert pool.used == 0
            assert pool.free == (0 if pool.frozen else pool.num_slots)
            for _ in range(2):
                slots = pool.allocate(pool.free)
                assert sorted(slots) == list(range(len(slots)))
                for slot in slots:
                    pool.release(slot)


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
    "continue_resize": 2, "freeze": 0.05,
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
    "resized host", "freeze",
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
    for seed in range(1000, 1060):
        walk(seed, 400, seen)
    assert KINDS - seen.keys() == set()
    assert seen["step"] > 3_000
