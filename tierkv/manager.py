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

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from weakref import WeakKeyDictionary

from tierkv.block_table import Block, BlockTable, Extent, drop_reference
from tierkv.errors import CapacityError
from tierkv.moves import Move, Room, Step
from tierkv.placement import Keep, demand, device_share, tails_to_copy
from tierkv.places import Places
from tierkv.room import RoomMaker
from tierkv.sharing import SharedBlocks
from tierkv.table_book import TableBook
from tierkv.tier import Tier

MAX_PROMOTIONS_PER_STEP = 4
"""Promotions are a background job: a few blocks a step, so that they never crowd out the reads of the step."""


class TierManager(TableBook):
    """Decides without I/O. Not thread-safe: one owner calls it, executors report through that owner."""

    def __init__(
        self,
        block_size: int,
        slots: Mapping[Tier, int],
        slots_per_segment: Mapping[Tier, int],
        keep: Keep,
        *,
        promoted: Collection[Tier] = (Tier.HOST, Tier.DISK),
        eviction: str = "lru",
    ) -> None:
        """Make a manager of empty tiers.

        Args:
            block_size: tokens in a block.
            slots: how many blocks each tier can hold; 0 or absent turns the tier off.
            slots_per_segment: neighbouring slots of each tier, see ``BlockPool``.
            keep: the blocks of every sequence that stay on the device.
            promoted: tiers whose blocks move up for good where there is room: those that attention cannot read in place.
            eviction: the rule by which shared blocks that no sequence holds are forgotten.
        """
        self.slots_per_segment = {tier: slots_per_segment.get(tier, 1) for tier in Tier}
        super().__init__(block_size, Places(slots, self.slots_per_segment), SharedBlocks(eviction))
        self.keep = keep
        self.promoted = promoted
        self.pools, self.moves, self._steps = self.places.pools, self.places.moves, self.places.steps
        self.num_tail_copies = 0
        # Sequences that come back from being idle, each with whether others have made way for it.
        self._returning: WeakKeyDictionary[BlockTable, bool] = WeakKeyDictionary()
        self._room = RoomMaker(self.places, self._tables, self.shared, keep, block_size)

    # -- sequences -----------------------------------------------------------------------------------------------

    def share(self, table: BlockTable, keys: Sequence[bytes], ids: Sequence[int]) -> int:
        """Begin a sequence with blocks that others have computed; see ``TableBook.share``.

        Those that have moved down in the meantime come back like the blocks of a sequence that was idle.
        """
        found = super().share(table, keys, ids)
        if found:
            self._returning[table] = False
        return found

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
            if self._is_idle(table):
                self._returning[table] = False
            del self._tables[table]
            self._tables[table] = self._num_steps
        if any(move.tail_of in tables for move in self.moves):
            return Room(())  # the copy would take the place of the block that this step appends to
        tails = tails_to_copy(tables)
        moves, ready = self._room.make(tables, count, len(tails))
        if ready and tails and not moves:
            moves = [self._copy_tail(table) for table in tails]
        if ready and not moves:
            moves = self._swap_in(tables, count)
        if moves or not ready:
            return Room(tuple(moves))
        self._give_homes(tables, count)
        self._num_steps += 1
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
                    self._let_go(block)

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
                    place = self.places.take_below(Tier.DEVICE)
                    if place is not None:
                        moves.append(self.places.start(block, *place, evicts=False))
        if self._num_cold() and not moves:
            spare = 2 * len(tables)
            moves = self._promote(tables, device.free - spare, MAX_PROMOTIONS_PER_STEP)
            if not moves and any(True for _ in self._cold(tables)):
                moves = self._room.make_way(self._idle(), tables, spare + MAX_PROMOTIONS_PER_STEP)
        return moves

    def _swap_in(self, tables: Sequence[BlockTable], count: int) -> list[Move]:
        """Bring back what lies below of sequences that were idle, once, before it is read at every step.

        First others that are idle make way; then blocks come up as far as there is room beside what the step needs.
        """
        back = [table for table in tables if table in self._returning]
        num_cold = sum(1 for _ in self._cold(back)) if self._num_cold() else 0
        moves: list[Move] = []
        if num_cold:
            spare = demand(tables, count, self.keep, 0).total + 2 * len(tables)
            if not all(self._returning[table] for table in back):
                self._returning.update(dict.fromkeys(back, True))
                moves = self._room.make_way(self._idle(), tables, spare + num_cold)
                if moves:
                    return moves
            moves = self._promote(back, self.pools[Tier.DEVICE].free - spare, num_cold)
        for table in back:  # whether they arrive or fail: a block that does not come up can be read where it lies
            del self._returning[table]
        return moves

    def _promote(self, tables: Sequence[BlockTable], room: int, most: int) -> list[Move]:
        device = self.pools[Tier.DEVICE]
        blocks = islice(self._cold(tables), max(0, min(room, most)))
        return [self.places.start(block, Tier.DEVICE, device.allocate(1)[0], evicts=False) for block in blocks]

    def _cold(self, tables: Sequence[BlockTable]) -> Iterator[Block]:
        """Yield the blocks that should move up and are not on their way, each once."""
        seen: set[Block] = set()
        device = Tier.DEVICE  # looked up once: this passes over most blocks of a sequence at every step
        for table in tables:
            for block in table.blocks:
                slots = block.slots
                if device in slots or not slots:
                    continue
                if not block.arriving and block not in seen and block.tier in self.promoted:
                    seen.add(block)
                    yield block

    def _num_cold(self) -> int:
        return sum(map(self.places.num_highest, self.promoted))

    # -- completions ----------------------------------------------------------------------------------------------

    def complete(self, move: Move) -> None:
        """Every byte of ``move`` has arrived."""
        block, tier = move.target, move.wire.destination
        self.places.finish(move)
        table = move.tail_of
        if table is not None:
            if table in self._tables and table.blocks and table.blocks[-1] is move.source:
                table.blocks[-1] = block
                self.places.put(block, tier, move.slot)
                if drop_reference(move.source):
                    self._let_go(move.source)
                self.num_tail_copies += 1
            else:
                self.pools[tier].release(move.slot)
        elif block.references == 0 and not self.shared.is_kept(block):
            self.pools[tier].release(move.slot)
        elif move.wire.source is tier:  # relocated within its tier
            if self.places.is_read(block):
                self.pools[tier].release(move.slot)
            else:
                self.pools[tier].release(block.slots[tier])
                block.slots[tier] = move.slot
        else:
            self.places.put(block, tier, move.slot)
            if move.evicts and move.wire.source in block.slots and not self.places.is_read(block):
                self.places.drop(block, move.wire.source)

    def fail(self, move: Move) -> None:
        """``move`` did not happen: the block stays where it was."""
        self.places.finish(move)
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
        holders = [b for b in self.places.lying_in(tier) if b.slots[tier] in above and not b.arriving]
        for step in self._steps:
            step.torn = step.torn or bool(holders)
        for block in [b for b in holders if len(b.slots) > 1]:
            self.places.drop(block, tier)
        for block in [b for b in holders if self.shared.is_kept(b) and tier in b.slots]:
            self.shared.forget(block)
            self.places.forget(block)
        only_here = [b for b in holders if tier in b.slots]
        below = [lower for lower in Tier if lower > tier]
        self._room.forget_unused(len(only_here) - pool.free - sum(map(self.places.available, below)))
        if len(only_here) > pool.free + sum(map(self.places.available, below)):
            pool.resize(before)
            if self.moves:  # they hold slots that some will give back
                return Room(())
            raise CapacityError(f"the {tier.label} tier cannot shrink to {num_slots} blocks: nothing below has room")
        moves = []
        for block in only_here:
            place = (tier, pool.allocate(1)[0]) if pool.free else self.places.take_below(tier)
            assert place is not None
            moves.append(self.places.start(block, *place, evicts=True))
        return Room(tuple(moves)) if pool.used_from(num_slots) else None

    def census(self) -> dict[Tier, tuple[int, int]]:
        """Return per tier ``(blocks whose highest copy is here, further clean copies here)``."""
        return self.places.census()

    # -- internals ------------------------------------------------------------------------------------------------

    def _give_homes(self, tables: Sequence[BlockTable], count: int) -> None:
        """Append the new blocks of a step, each with a slot in the tier where it will live."""
        on_device = device_share(tables, count, self.keep, self.pools[Tier.DEVICE].free)
        for row, table in enumerate(tables):
            previous = table.blocks[-1] if table.blocks else None
            for index in range(len(table.blocks), table.blocks_for(table.length + count)):
                block = self.places.new_block()
                tier = Tier.DEVICE if (row, index) in on_device else None
                if tier is None:
                    tier = Tier.HOST if self.places.has_room(Tier.HOST) else Tier.DISK
                slot = self.places.take(tier, previous.slots.get(tier) if previous else None)
                self.places.put(block, tier, slot)
                table.blocks.append(block)
                previous = block

    def _extents(self, table: BlockTable, start: int, stop: int) -> tuple[Extent, ...]:
        return tuple(table.extents(start, stop, self.slots_per_segment))

    def _copy_tail(self, table: BlockTable) -> Move:
        tail = table.blocks[-1]
        before = table.blocks[-2].slots.get(Tier.DEVICE) if len(table.blocks) > 1 else None
        move = self.places.start(tail, Tier.DEVICE, self.places.take(Tier.DEVICE, before), evicts=False, tail_of=table)
        move.target = self.places.new_block()
        return move
