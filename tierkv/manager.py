"""TierManager: where every block is, and what must move next.

A pure state machine: it touches no tensor, thread or file. It is told events and answers with what to do; whoever
moves the bytes reports back. So it can be tested with copies that finish only when a test says so, in any order, and
can run in virtual time.

    begin(tables, count)   ->  Room(moves): run these, report them, ask again
                           ->  Step: every token of every table has a place; write, read, then commit or rollback
    complete / fail(move)  <-  the executor
    background(step)       ->  moves nobody waits for: clean copies of the next victims, promotions into free slots

A copy under way holds a reference to its source slot, and its destination slot is reserved and unreadable until
``complete``: a slot is never reused under a copy, nor read before it is filled, whatever the order of completions.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tierkv.block_pool import BlockPool
from tierkv.block_table import Block, BlockTable, Extent, drop_reference
from tierkv.errors import CapacityError
from tierkv.placement import (
    Demand,
    Keep,
    demand,
    device_share,
    idle_blocks,
    own_blocks,
    tails_to_copy,
)
from tierkv.tier import Tier, Wire

MAX_PROMOTIONS_PER_STEP = 4
"""Promotions are a background job: a few blocks a step, so that they never crowd out the reads of the step."""


@dataclass(eq=False, slots=True)
class Move:
    """One whole block to copy from one slot to another.

    Attributes:
        source: the block that is read.
        wire: from which tier to which.
        source_slot: where it is read; referenced until the move is reported.
        slot: where it is written; unreadable until ``complete``.
        evicts: the source slot is given up once the copy is complete.
        tail_of: for a private copy of a last block: the table it is for.
        target: the block that gets the copy (``source`` itself unless ``tail_of``).
    """

    source: Block
    wire: Wire
    source_slot: int
    slot: int
    evicts: bool = False
    tail_of: BlockTable | None = None
    target: Block = field(init=False)

    def __post_init__(self) -> None:
        self.target = self.source


@dataclass(frozen=True, slots=True)
class Room:
    """Not yet: run ``moves``, wait until every move in flight is reported, then ask again."""

    moves: tuple[Move, ...]


@dataclass(eq=False, slots=True)
class Step:
    """One forward over some sequences. Every place in it stays valid until ``commit`` or ``rollback``.

    Attributes:
        tables: one per row.
        start: tokens that every row holds already.
        count: tokens that the forward appends to every row.
        reads: per row, where the tokens ``0 .. start`` lie.
        writes: per row, where the tokens ``start .. start + count`` go.
        torn: its places are no longer valid (a tier was resized); it can only be rolled back.
    """

    tables: tuple[BlockTable, ...]
    start: int
    count: int
    reads: tuple[tuple[Extent, ...], ...]
    writes: tuple[tuple[Extent, ...], ...]
    torn: bool = False

    @property
    def stop(self) -> int:
        """Tokens that every row holds once the step is committed."""
        return self.start + self.count


class TierManager:
    """Decides without I/O. Not thread-safe: one owner calls it, executors report through that owner."""

    def __init__(
        self, block_size: int, slots: Mapping[Tier, int], slots_per_segment: Mapping[Tier, int], keep: Keep
    ) -> None:
        """Make a manager of empty tiers.

        Args:
            block_size: tokens in a block.
            slots: how many blocks each tier can hold; 0 or absent turns the tier off.
            slots_per_segment: neighbouring slots of each tier, see ``BlockPool``.
            keep: the blocks of every sequence that stay on the device.
        """
        self.block_size = block_size
        self.keep = keep
        self.slots_per_segment = {tier: slots_per_segment.get(tier, 1) for tier in Tier}
        self.pools = {tier: BlockPool(slots.get(tier, 0), self.slots_per_segment[tier]) for tier in Tier}
        self.moves: set[Move] = set()
        self.num_tail_copies = 0
        self._tables: dict[BlockTable, None] = {}  # least recently used first
        self._steps: set[Step] = set()
        self._primary: dict[Tier, dict[Block, None]] = {tier: {} for tier in Tier}
        self._clean: dict[Tier, dict[Block, None]] = {tier: {} for tier in Tier}
        self._next_uid = 0

    # -- sequences ------------------------------------------------------------------------------------------------

    def open(self) -> BlockTable:
        """Return the table of a new, empty sequence."""
        table = BlockTable(self.block_size)
        self._tables[table] = None
        return table

    def fork(self, table: BlockTable) -> BlockTable:
        """Return a second sequence over the same blocks; a write to either copies the block first."""
        twin = table.fork()
        self._tables[twin] = None
        return twin

    def crop(self, table: BlockTable, length: int) -> None:
        """Keep the first ``length`` tokens of a sequence."""
        for block in table.cut(length):
            self._forget(block)

    def release(self, table: BlockTable) -> None:
        """End a sequence.

        Raises:
            ValueError: it was released before, or belongs to another manager.
        """
        if table not in self._tables:
            raise ValueError("a block table was released twice")
        self.crop(table, 0)
        del self._tables[table]

    # -- steps ----------------------------------------------------------------------------------------------------

    def begin(self, tables: Sequence[BlockTable], count: int) -> Room | Step:
        """Prepare to append ``count`` tokens to every table; all tables have the same length.

        Raises:
            CapacityError: the tiers cannot hold the tokens even when everything idle has moved down. Nothing changed.
        """
        start = tables[0].length if tables else 0
        if not tables or count < 1 or any(table.length != start for table in tables):
            raise ValueError("a step appends at least one token to sequences of one length")
        for table in tables:
            table.seal()
            self._tables[table] = self._tables.pop(table)
        if any(move.tail_of in tables for move in self.moves):
            return Room(())  # the copy would take the place of the block that this step appends to
        tails = tails_to_copy(tables)
        moves, ready = self._make_room(tables, count, len(tails))
        if ready and tails and not moves:
            moves = [self._copy_tail(table) for table in tails]
        if moves or not ready:
            return Room(tuple(moves))
        self._give_homes(tables, count)
        step = Step(
            tuple(tables),
            start,
            count,
            tuple(self._extents(table, 0, start) for table in tables),
            tuple(self._extents(table, start, start + count) for table in tables),
        )
        self._steps.add(step)
        return step

    def commit(self, step: Step) -> None:
        """The forward is done: its tokens are part of the sequences.

        Raises:
            ValueError: the step is torn.
        """
        if step.torn:
            raise ValueError("a tier was resized during this step; it can only be rolled back")
        self._steps.remove(step)
        for table in step.tables:
            table.length = step.stop

    def rollback(self, step: Step) -> None:
        """The forward was torn: forget its tokens. No copy into the step's places may be under way any more."""
        self._steps.remove(step)
        for table in step.tables:
            keep = table.blocks_for(step.start)
            dropped, table.blocks = table.blocks[keep:], table.blocks[:keep]
            for block in dropped:
                if drop_reference(block):
                    self._forget(block)

    def background(self, tables: Sequence[BlockTable]) -> list[Move]:
        """Return moves that help later steps of ``tables`` and that nobody waits for."""
        device = self.pools[Tier.DEVICE]
        moves: list[Move] = []
        if device.free < len(tables):
            # The next block boundary will push this block out: a clean copy below makes that free.
            for table in tables:
                index = len(table.blocks) - self.keep.recent
                if index < self.keep.first or index < 0:
                    continue
                block = table.blocks[index]
                if block.sealed and not block.arriving and list(block.slots) == [Tier.DEVICE]:
                    place = self._place_below(Tier.DEVICE)
                    if place is not None:
                        moves.append(self._start(block, *place, evicts=False))
        elif device.free > 2 * len(tables):
            for table in tables:
                cold = (b for b in table.blocks if b.slots and Tier.DEVICE not in b.slots and not b.arriving)
                for block in cold:
                    if device.free <= 2 * len(tables) or len(moves) == MAX_PROMOTIONS_PER_STEP:
                        return moves
                    moves.append(self._start(block, Tier.DEVICE, device.allocate(1)[0], evicts=False))
        return moves

    # -- completions ----------------------------------------------------------------------------------------------

    def complete(self, move: Move) -> None:
        """Every byte of ``move`` has arrived."""
        block, tier = move.target, move.wire.destination
        self._finish(move)
        table = move.tail_of
        if table is not None:
            if table in self._tables and table.blocks and table.blocks[-1] is move.source:
                table.blocks[-1] = block
                block.slots[tier] = move.slot
                self._refile(block)
                if drop_reference(move.source):
                    self._forget(move.source)
                self.num_tail_copies += 1
            else:
                self.pools[tier].release(move.slot)
        elif block.references == 0:
            self.pools[tier].release(move.slot)
        elif move.wire.source is tier:  # relocated within its tier
            if self._is_read(block):
                self.pools[tier].release(move.slot)
            else:
                self.pools[tier].release(block.slots[tier])
                block.slots[tier] = move.slot
        else:
            block.slots[tier] = move.slot
            if move.evicts and move.wire.source in block.slots and not self._is_read(block):
                self._drop(block, move.wire.source)
            self._refile(block)

    def fail(self, move: Move) -> None:
        """``move`` did not happen: the block stays where it was."""
        self._finish(move)
        self.pools[move.wire.destination].release(move.slot)

    def freeze(self, tier: Tier) -> None:
        """Put nothing more into ``tier``: its medium failed. What lies there can still be read."""
        self.pools[tier].freeze()

    def resize(self, tier: Tier, num_slots: int) -> Room | None:
        """Change the number of slots of a tier. Repeat after running the moves until it returns None.

        No forward may run meanwhile. A step that an interrupt left open is torn by it: it can only be rolled back.

        Raises:
            CapacityError: blocks above the new limit have nowhere to go; the limit is what it was before.
        """
        pool = self.pools[tier]
        before = pool.num_slots
        pool.resize(num_slots)
        above = set(pool.used_from(num_slots))
        holders = [b for b in [*self._primary[tier], *self._clean[tier]] if b.slots[tier] in above and not b.arriving]
        for step in self._steps:
            step.torn = step.torn or bool(holders)
        for block in [b for b in holders if len(b.slots) > 1]:
            self._drop(block, tier)
            self._refile(block)
        only_here = [b for b in holders if tier in b.slots]
        if len(only_here) > pool.free + sum(self._available(lower) for lower in Tier if lower > tier):
            pool.resize(before)
            if self.moves:  # they hold slots that some will give back
                return Room(())
            raise CapacityError(f"the {tier.label} tier cannot shrink to {num_slots} blocks: nothing below has room")
        moves = []
        for block in only_here:
            place = (tier, pool.allocate(1)[0]) if pool.free else self._place_below(tier)
            assert place is not None
            moves.append(self._start(block, *place, evicts=True))
        return Room(tuple(moves)) if pool.used_from(num_slots) else None

    def census(self) -> dict[Tier, tuple[int, int]]:
        """Return per tier ``(blocks whose highest copy is here, further clean copies here)``."""
        return {tier: (len(self._primary[tier]), len(self._clean[tier])) for tier in Tier}

    # -- internals ------------------------------------------------------------------------------------------------

    def _active(self, tables: Iterable[BlockTable]) -> set[Block]:
        running = [table for step in self._steps for table in step.tables]
        return {block for table in [*running, *tables] for block in table.blocks}

    def _is_read(self, block: Block) -> bool:
        """Return whether an open step counts on the places of a block."""
        return any(block in table.blocks for step in self._steps if not step.torn for table in step.tables)

    def _make_room(self, tables: Sequence[BlockTable], count: int, num_tails: int) -> tuple[list[Move], bool]:
        """Free slots for a step; return ``(moves to run first, whether the step can begin without them)``."""
        # Last blocks are copied first, and only then is there a need for new ones: the originals may be free by then.
        need = demand(tables, 0 if num_tails else count, self.keep, num_tails)
        device = self.pools[Tier.DEVICE]
        if device.free >= need.total:
            return [], True
        if not self.moves and need.total > sum(self.pools[tier].free + self._num_droppable(tier) for tier in Tier):
            raise self._no_room(need)  # before anything idle has moved for it
        running = self._active(())
        active = self._active(tables)
        moves: list[Move] = []
        coming = sum(move.evicts and move.wire.source is Tier.DEVICE for move in self.moves)
        waiting = any(move.evicts for move in self.moves)

        def evict(blocks: Iterable[Block], wanted: int) -> None:
            nonlocal coming, waiting
            for block in blocks:
                if device.free + coming >= wanted:
                    return
                if Tier.DEVICE not in block.slots or block in running:
                    continue
                if block.arriving:  # a clean copy is on its way: soon the slot is free for nothing
                    coming, waiting = coming + 1, True
                elif len(block.slots) > 1:
                    self._drop(block, Tier.DEVICE)
                    self._refile(block)
                elif (place := self._place_below(Tier.DEVICE)) is not None:
                    moves.append(self._start(block, *place, evicts=True))
                    coming += 1
                else:
                    return

        evict(idle_blocks(self._tables, active, Tier.DEVICE), need.total)
        # What is still missing goes below, new blocks or older ones: host memory is for them rather than for idle ones.
        vacated = self._vacate_host(need.total - device.free - coming, active)
        moves += vacated
        if not vacated and not any(move.evicts and move.wire.source is Tier.HOST for move in self.moves):
            optional, wished = own_blocks(tables, count, self.keep)
            evict(optional, need.wished)
            evict(wished, need.hard)
        if moves or waiting:
            return moves, False
        room = [device.free, self._available(Tier.HOST), self._available(Tier.DISK)]
        if room[0] < need.hard or need.total > sum(room):
            if self.moves:  # they hold slots that some will give back
                return [], False
            raise self._no_room(need)
        return [], True

    def _no_room(self, need: Demand) -> CapacityError:
        device, host, disk = self.pools[Tier.DEVICE].free, self._available(Tier.HOST), self._available(Tier.DISK)
        return CapacityError(
            f"{need.total} more blocks of {self.block_size} tokens are needed and there is room for {device} on the "
            f"device, {host} in host memory and {disk} on disk; raise a tier's capacity, or use fewer or shorter "
            f"sequences"
        )

    def _vacate_host(self, wanted: int, active: set[Block]) -> list[Move]:
        """Start moving idle blocks from host memory to disk until ``wanted`` slots are or will be free there."""
        if wanted <= 0:
            return []
        moves: list[Move] = []
        room = self._available(Tier.HOST) + sum(move.evicts and move.wire.source is Tier.HOST for move in self.moves)
        for block in idle_blocks(self._tables, active, Tier.HOST):
            if room >= wanted:
                break
            if block.arriving:
                continue
            if len(block.slots) > 1:
                self._drop(block, Tier.HOST)
                self._refile(block)
            elif (place := self._place_below(Tier.HOST)) is not None:
                moves.append(self._start(block, *place, evicts=True))
            else:
                break
            room += 1
        return moves

    def _droppable(self, tier: Tier) -> Iterator[Block]:
        """Yield blocks whose clean copy in ``tier`` nobody reads, oldest first."""
        pool, running = self.pools[tier], self._active(()) if self._steps else frozenset[Block]()
        for block in self._clean[tier]:
            slot = block.slots[tier]
            if slot < pool.num_slots and pool.references(slot) == 1 and block not in running:
                yield block

    def _available(self, tier: Tier) -> int:
        """Slots that ``_take`` can hand out: the free ones, and those of droppable clean copies."""
        pool = self.pools[tier]
        return 0 if pool.frozen or not pool.num_slots else pool.free + self._num_droppable(tier)

    def _num_droppable(self, tier: Tier) -> int:
        return sum(1 for _ in self._droppable(tier))

    def _has_room(self, tier: Tier) -> bool:
        pool = self.pools[tier]
        return pool.free > 0 or (not pool.frozen and next(self._droppable(tier), None) is not None)

    def _give_homes(self, tables: Sequence[BlockTable], count: int) -> None:
        """Append the new blocks of a step, each with a slot in the tier where it will live."""
        on_device = device_share(tables, count, self.keep, self.pools[Tier.DEVICE].free)
        for row, table in enumerate(tables):
            previous = table.blocks[-1] if table.blocks else None
            for index in range(len(table.blocks), table.blocks_for(table.length + count)):
                block = self._new_block()
                tier = Tier.DEVICE if (row, index) in on_device else None
                if tier is None:
                    tier = Tier.HOST if self._has_room(Tier.HOST) else Tier.DISK
                block.slots[tier] = self._take(tier, previous.slots.get(tier) if previous else None)
                table.blocks.append(block)
                self._refile(block)
                previous = block

    def _extents(self, table: BlockTable, start: int, stop: int) -> tuple[Extent, ...]:
        return tuple(table.extents(start, stop, self.slots_per_segment))

    def _new_block(self) -> Block:
        self._next_uid += 1
        return Block(self._next_uid)

    def _copy_tail(self, table: BlockTable) -> Move:
        tail = table.blocks[-1]
        before = table.blocks[-2].slots.get(Tier.DEVICE) if len(table.blocks) > 1 else None
        move = self._start(tail, Tier.DEVICE, self._take(Tier.DEVICE, before), evicts=False, tail_of=table)
        move.target = self._new_block()
        return move

    def _start(self, block: Block, tier: Tier, slot: int, *, evicts: bool, tail_of: BlockTable | None = None) -> Move:
        move = Move(block, Wire(block.tier, tier), block.slots[block.tier], slot, evicts, tail_of)
        self.pools[block.tier].retain(move.source_slot)
        if tail_of is None:
            block.arriving[tier] = slot
        self.moves.add(move)
        return move

    def _finish(self, move: Move) -> None:
        self.moves.remove(move)
        self.pools[move.wire.source].release(move.source_slot)
        if move.tail_of is None:
            del move.source.arriving[move.wire.destination]

    def _place_below(self, tier: Tier) -> tuple[Tier, int] | None:
        """Take a slot in the highest tier below ``tier`` that has room."""
        for lower in Tier:
            if lower > tier and self._has_room(lower):
                return lower, self._take(lower)
        return None

    def _take(self, tier: Tier, after: int | None = None) -> int:
        """Take a slot, giving up the oldest clean copy when none is free."""
        pool = self.pools[tier]
        if not pool.free:
            victim = next(self._droppable(tier))
            self._drop(victim, tier)
            self._refile(victim)
        return pool.allocate(1, after)[0]

    def _drop(self, block: Block, tier: Tier) -> None:
        self.pools[tier].release(block.slots.pop(tier))

    def _forget(self, block: Block) -> None:
        """A block that no table holds: give up its slots. A copy on its way is given up when it is reported."""
        for tier in list(block.slots):
            self._drop(block, tier)
        self._refile(block)

    def _refile(self, block: Block) -> None:
        for tier in Tier:
            self._primary[tier].pop(block, None)
            self._clean[tier].pop(block, None)
        for tier in block.slots:
            (self._primary if tier is block.tier else self._clean)[tier][block] = None
