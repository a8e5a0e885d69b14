"""RowFiller: gives one row of an empty batch the KV of a prompt, from blocks in memory and records in the store.

Where a row's blocks begin where the prompt's do, blocks in memory are simply shared, and records go straight into new
blocks, many reads in flight. A row that its padding has shifted gets copies, each block put together from two.
"""

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

from tierkv.errors import RecordError
from tierkv.interrupts import deferred_interrupt
from tierkv.payload import block_of, empty_block, put_block, unpack
from tierkv.prefix_rows import Match
from tierkv.tier import Tier, Wire
from tierkv.transfer import Copy

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierkv.block_table import Block
    from tierkv.engine import Engine
    from tierkv.moves import Step
    from tierkv.sequences import SequenceBatch
    from tierkv.storage.bits import Bits
    from tierkv.storage.prefix_store import PrefixStore


class Report(Protocol):
    """Told of each restore: tokens, seconds, and whether all that was asked for was read."""

    def __call__(self, tokens: int, seconds: float, *, complete: bool) -> None:
        """See the class."""


class RowFiller:
    """Fills rows. Called by the thread inside the engine's gate."""

    def __init__(self, engine: "Engine", store: "PrefixStore | None", report: Report) -> None:
        """Fill rows of ``engine`` from its blocks and from ``store``."""
        self._engine = engine
        self._store = store
        self._report = report

    def build(self, batch: "SequenceBatch", row: int, match: Match, target: int) -> int:
        """Fill an empty row with up to ``target`` places, padding included; return how many it got.

        Raises:
            CapacityError: the tiers cannot hold them.
        """
        size, pad = self._engine.layout.block_size, match.prompt.pad
        if pad % size:
            return self._build_shifted(batch, row, match, target)
        if pad and (padded := batch.fill(row, pad, self._copies(match, {}, 0, pad))) < pad:
            return padded
        whole = -(-(target - pad) // size)
        shared = batch.share(row, match.keys[: min(match.in_memory, whole)], match.prompt.ids)
        begin = pad + shared * size
        if begin >= target or shared < match.in_memory:
            return min(begin, target)
        return begin + self._load(batch, row, match, {}, begin, pad + whole * size - begin)

    def _build_shifted(self, batch: "SequenceBatch", row: int, match: Match, target: int) -> int:
        """Its blocks lie across those of the prompt: bytes are copied. What memory holds is held on to meanwhile."""
        manager = self._engine.manager
        with deferred_interrupt():
            held = self._engine.open()  # a batch of its own: whatever happens, its blocks are given back with it
            held.tables = [manager.open()]
            found = manager.share(held.tables[0], match.keys[: match.in_memory], match.prompt.ids)
        try:
            if found < match.in_memory:
                target = min(target, match.prompt.pad + held.length)  # some have gone since they were matched
            return self._load(batch, row, match, dict(enumerate(held.tables[0].blocks)), 0, target)
        finally:
            held.release()

    def _load(
        self, batch: "SequenceBatch", row: int, match: Match, held: "dict[int, Block]", begin: int, count: int
    ) -> int:
        """Fill ``count`` places of a row from the store (and from blocks held in memory); return how many were."""
        began = time.perf_counter()
        size = self._engine.layout.block_size
        first = (begin - match.prompt.pad) // size - match.in_memory
        stop = -(-(begin + count - match.prompt.pad) // size) - match.in_memory
        needed = match.found[max(0, first) : max(0, stop)]
        ahead = self._store.reading_ahead(needed) if self._store and needed else nullcontext()
        with ahead:
            filled = batch.fill(row, count, self._copies(match, held, begin, begin + count))
        restored = max(0, (begin + filled - match.prompt.pad) // size - match.in_memory)
        self._report(restored * size, time.perf_counter() - began if restored else 0.0, complete=filled == count)
        return filled

    def _copies(self, match: Match, held: "dict[int, Block]", begin: int, stop: int) -> "Callable[[Step], list[Copy]]":
        """Return what fills the new blocks of one row, from place ``begin``, where one begins, to place ``stop``."""
        first = begin // self._engine.layout.block_size
        return lambda step: [
            self._copy(match, held, first + number, stop, block)
            for number, block in enumerate(step.tables[0].blocks[first:])
        ]

    def _copy(self, match: Match, held: "dict[int, Block]", index: int, stop: int, block: "Block") -> Copy:
        """Return what fills the block at ``index`` of a row, up to place ``stop``, wherever its home is."""
        layout, stores = self._engine.layout, self._engine.stores
        tier, slot = block.tier, block.slots[block.tier]
        size = layout.block_size
        first = index * size - match.prompt.pad  # its first token, counted from the prompt's first
        end = min(size, stop - index * size)

        def load() -> None:
            in_place = tier is not Tier.DISK and stores.slab(tier).on_cpu
            if in_place:
                stores.slab(tier).fault_in(slot)
            bits = stores.slab(tier).block_bits(slot) if in_place else empty_block(layout)
            if first < 0:
                for one in bits:
                    one[:, :, : min(size, -first)] = 0  # padding is masked, but 0 times NaN is NaN
            for source in range(max(0, first) // size, max(0, first + size - 1) // size + 1):
                into = slice(max(0, source * size - first), min(end, (source + 1) * size - first))
                if into.start < into.stop:
                    at = first + into.start - source * size
                    self._read(match, source, held, bits, into, slice(at, at + into.stop - into.start))
            if not in_place:
                put_block(layout, stores, tier, slot, bits)

        return Copy(Wire(Tier.DISK, tier), layout.block_bytes, load=load)

    def _read(
        self,
        match: Match,
        source: int,
        held: "dict[int, Block]",
        bits: "list[Bits]",
        into: slice,
        tokens: slice,
    ) -> None:
        """Copy tokens of the prompt's block ``source`` into a new block. Called by workers."""
        layout = self._engine.layout
        if source in held:
            for one, own in zip(bits, block_of(layout, self._engine.stores, held[source]), strict=True):
                one[:, :, into] = own[:, :, tokens]
            return
        index = source - match.in_memory
        if self._store is None or not 0 <= index < len(match.found):
            raise RecordError(f"block {source} of the prompt was there and is no more")
        ids = match.prompt.ids[source * layout.block_size : (source + 1) * layout.block_size]
        self._store.read(
            match.found[index], ids, layout.block_bytes, lambda payload: unpack(layout, payload, bits, into, tokens)
        )
