"""RoomMaker: whose blocks give way when a step needs slots.

In this order: blocks that no sequence holds any more (they move to host memory while there is room for nothing, and are
forgotten otherwise), idle sequences, the least recently used first, and at last the step's own blocks that belong
further down (``tierkv.placement``). Nothing is started that cannot end in room for the step.
"""

from collections.abc import Iterable, Mapping, Sequence

from tierkv.block_table import Block, BlockTable
from tierkv.errors import CapacityError
from tierkv.moves import Move
from tierkv.placement import Demand, Keep, demand, idle_blocks, own_blocks
from tierkv.places import Places
from tierkv.sharing import SharedBlocks
from tierkv.tier import Tier


class RoomMaker:
    """Plans moves that make room. The manager's; knows slots, not bytes."""

    def __init__(
        self, places: Places, tables: Mapping[BlockTable, int], shared: SharedBlocks, keep: Keep, block_size: int
    ) -> None:
        """Plan over the manager's own books.

        Args:
            places: where everything lies.
            tables: all sequences, the least recently used first.
            shared: knows the blocks that no sequence holds.
            keep: the blocks of every sequence that stay on the device.
            block_size: tokens in a block, for messages.
        """
        self._places = places
        self._tables = tables
        self._shared = shared
        self._keep = keep
        self._block_size = block_size

    def make(self, tables: Sequence[BlockTable], count: int, num_tails: int) -> tuple[list[Move], bool]:
        """Free slots for a step; return ``(moves to run first, whether the step can begin without them)``.

        Args:
            tables: that grow.
            count: by so many tokens each.
            num_tails: last blocks that are copied first.

        Raises:
            CapacityError: the tiers cannot hold the tokens even when everything idle has moved down. Nothing changed.
        """
        places, moves_under_way = self._places, self._places.moves
        # Last blocks are copied first, and only then is there a need for new ones: the originals may be free by then.
        need = demand(tables, 0 if num_tails else count, self._keep, num_tails)
        device = places.pools[Tier.DEVICE]
        if device.free >= need.total:
            return [], True
        if need.total > sum(pool.free for pool in places.pools.values()):  # otherwise clean copies need no counting
            self.forget_unused(need.total - self._free_everywhere())
            if not moves_under_way and need.total > self._free_everywhere():
                raise self._no_room(need)  # before anything idle has moved for it
        coming = sum(move.evicts and move.wire.source is Tier.DEVICE for move in moves_under_way)
        moves = self._clear_unused(need.total - coming)
        coming += len(moves)
        waiting = any(move.evicts for move in moves_under_way)
        if device.free + coming >= need.total:  # the usual case: no need to look at what sequences hold
            return moves, not (moves or waiting)
        running = places.active()
        active = places.active(tables)

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
                    places.drop(block, Tier.DEVICE)
                elif (place := places.take_below(Tier.DEVICE)) is not None:
                    moves.append(places.start(block, *place, evicts=True))
                    coming += 1
                else:
                    return

        evict(idle_blocks(self._tables, active, Tier.DEVICE), need.total)
        # What is still missing goes below, new blocks or older ones: host memory is for them rather than for idle ones.
        vacated = self._vacate_host(need.total - device.free - coming, active)
        moves += vacated
        if not vacated and not any(move.evicts and move.wire.source is Tier.HOST for move in moves_under_way):
            optional, wished = own_blocks(tables, count, self._keep)
            evict(optional, need.wished)
            evict(wished, need.hard)
        if moves or waiting:
            return moves, False
        room = [device.free, places.available(Tier.HOST), places.available(Tier.DISK)]
        if room[0] < need.hard or need.total > sum(room):
            if moves_under_way:  # they hold slots that some will give back
                return [], False
            raise self._no_room(need)
        return [], True

    def make_way(self, idle: Sequence[BlockTable], tables: Sequence[BlockTable], wanted: int) -> list[Move]:
        """Return moves after which ``wanted`` device slots are free, as far as only blocks of ``idle`` have to go for it.

        Args:
            idle: sequences, the least recently used first.
            tables: whose blocks stay.
            wanted: device slots.
        """
        places, device, top = self._places, self._places.pools[Tier.DEVICE], Tier.DEVICE
        coming = sum(1 for move in places.moves if move.evicts and move.wire.source is top)
        moves = self._clear_unused(wanted - coming)
        coming += len(moves)
        if not idle or device.free + coming >= wanted:
            return moves
        for block in idle_blocks(idle, places.active(tables), Tier.DEVICE):
            if device.free + coming >= wanted:
                break
            if block.arriving:
                continue
            if len(block.slots) > 1:
                places.drop(block, Tier.DEVICE)
            elif (place := places.take_below(Tier.DEVICE)) is not None:
                moves.append(places.start(block, *place, evicts=True))
                coming += 1
            else:
                break
        return moves

    def forget_unused(self, wanted: int) -> None:
        """Forget blocks that no sequence holds until ``wanted`` slots, wherever they are, have come free."""
        while wanted > 0 and (block := self._shared.victim()) is not None:
            pool = self._places.pools[block.tier]
            # Clean copies further down could be given up before: what is won is the slot of the highest one.
            wanted -= block.slots[block.tier] < pool.num_slots and not pool.frozen
            self._forget(block)

    def _free_everywhere(self) -> int:
        return sum(pool.free + self._places.num_droppable(tier) for tier, pool in self._places.pools.items())

    def _clear_unused(self, wanted: int) -> list[Move]:
        """Take unused blocks off the device until ``wanted`` slots are or will be free there."""
        moves: list[Move] = []
        device, host = self._places.pools[Tier.DEVICE], self._places.pools[Tier.HOST]
        for block in self._shared.unused_on_device():
            if device.free + len(moves) >= wanted:
                break
            if block.arriving:
                continue
            # Never to disk: nobody asked for that, and without them all is as it was before they were kept.
            while self._shared.is_kept(block) and not host.free:
                self._forget(self._shared.victim((Tier.DEVICE, Tier.HOST)) or block)
                if device.free + len(moves) >= wanted:
                    return moves
            if self._shared.is_kept(block):
                if len(block.slots) > 1:
                    self._places.drop(block, Tier.DEVICE)
                else:
                    moves.append(self._places.start(block, Tier.HOST, host.allocate(1)[0], evicts=True))
        return moves

    def _forget(self, block: Block) -> None:
        self._shared.forget(block)
        self._places.forget(block)

    def _no_room(self, need: Demand) -> CapacityError:
        device, host, disk = (
            self._places.pools[Tier.DEVICE].free,
            self._places.available(Tier.HOST),
            self._places.available(Tier.DISK),
        )
        return CapacityError(
            f"{need.total} more blocks of {self._block_size} tokens are needed and there is room for {device} on the "
            f"device, {host} in host memory and {disk} on disk; raise a tier's capacity, or use fewer or shorter "
            f"sequences"
        )

    def _vacate_host(self, wanted: int, active: set[Block]) -> list[Move]:
        """Start moving idle blocks from host memory to disk until ``wanted`` slots are or will be free there."""
        if wanted <= 0:
            return []
        places = self._places
        moves: list[Move] = []
        coming = sum(move.evicts and move.wire.source is Tier.HOST for move in places.moves)
        while places.available(Tier.HOST) + coming < wanted and (unused := self._shared.victim((Tier.HOST,))):
            self._forget(unused)
        room = places.available(Tier.HOST) + coming
        for block in idle_blocks(self._tables, active, Tier.HOST):
            if room >= wanted:
                break
            if block.arriving:
                continue
            if len(block.slots) > 1:
                places.drop(block, Tier.HOST)
            elif (place := places.take_below(Tier.HOST)) is not None:
                moves.append(places.start(block, *place, evicts=True))
            else:
                break
            room += 1
        return moves
