"""PrefixCache: prompts that begin like earlier ones begin with their KV.

    reuse     before a prefill: rows of an empty batch get the blocks that memory holds, and the rest of what the store
              holds is read into new blocks, many reads in flight; one block that cannot be read ends the row's part there
    publish   after a forward: full blocks get their keys, equal ones become one, and the store is offered them

What is matched, what is restored and what is used are counted apart: rows of a batch share one length, so a batch uses
what its worst row has. That fewer tokens were really computed shows in the model's own forwards.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tierkv.errors import CapacityError
from tierkv.keys import chain_keys
from tierkv.metrics import PrefixStats
from tierkv.payload import WHOLE, Piece, block_views, empty_views, unpack
from tierkv.prefix_rates import Rates
from tierkv.tier import Tier, Wire
from tierkv.transfer import Copy

if TYPE_CHECKING:
    import torch

    from tierkv.block_table import Block, BlockTable
    from tierkv.config import PrefixConfig
    from tierkv.engine import Engine
    from tierkv.moves import Step
    from tierkv.prefix_offers import PrefixOffers
    from tierkv.sequences import SequenceBatch
    from tierkv.storage.prefix_store import Found, PrefixStore


@dataclass(frozen=True)
class Prompt:
    """One row of a call: ``pad`` places of padding, then tokens."""

    ids: Sequence[int]
    pad: int = 0


@dataclass
class KeyedRow:
    """What one row of a cache has keys for.

    Attributes:
        pad: places before its first token.
        keys: of its full blocks, counted from its first token.
        stored: how many of them the store has or was offered.
        closed: nothing that follows can have a key: it is not a function of the ids alone.
    """

    pad: int = 0
    keys: list[bytes] = field(default_factory=list)
    stored: int = 0
    closed: bool = False

    def crop(self, length: int, block_size: int) -> None:
        """Keep what ``length`` places, padding included, have keys for."""
        del self.keys[max(0, length - self.pad) // block_size :]
        self.stored = min(self.stored, len(self.keys))

    def copy(self) -> "KeyedRow":
        """Return an independent copy."""
        return replace(self, keys=list(self.keys))


@dataclass
class _Match:
    """What is known of one prompt.

    Attributes:
        prompt: it.
        keys: of its full blocks.
        in_memory: how many of them memory holds, from the first on.
        found: those that the store has beyond them.
        stored: how many the store has, from the first on.
    """

    prompt: Prompt
    keys: list[bytes]
    in_memory: int
    found: "list[Found]"
    stored: int


class PrefixCache:
    """The shared and the stored prefixes of one engine. Called by the thread inside the engine's gate."""

    def __init__(self, engine: "Engine", config: "PrefixConfig", store: "PrefixStore | None") -> None:
        """Make one.

        Args:
            engine: whose blocks are shared.
            config: ``[prefix]``.
            store: where prefixes are kept on disk, or None.
        """
        self._engine = engine
        self._config = config
        self.store = store
        self.rates = Rates()
        self.stats_so_far = PrefixStats()
        self.knee_tokens = 8192
        """Position at which computing a token costs twice what it costs at the start; for the cost rule."""
        self._offers: PrefixOffers | None = None
        if store is not None:
            from tierkv import prefix_offers  # loads the store's libraries

            self._offers = prefix_offers.PrefixOffers(engine.layout, engine.stores, config, store)

    @property
    def on(self) -> bool:
        """Whether anything is shared or kept."""
        return self._config.share or self.store is not None

    def count(self, **events: float) -> None:
        """Add to the counters of ``PrefixStats``."""
        self.stats_so_far = replace(
            self.stats_so_far, **{name: getattr(self.stats_so_far, name) + number for name, number in events.items()}
        )

    def refuse(self, rows: int, reason: str) -> None:
        """Count rows whose KV is not a function of their ids alone, so that nothing may be looked up or kept."""
        self.count(uncacheable_rows=rows)
        self.stats_so_far = replace(self.stats_so_far, uncacheable_reason=reason)

    # -- before a prefill -----------------------------------------------------------------------------------------

    def reuse(self, batch: "SequenceBatch", namespace: bytes, prompts: Sequence[Prompt], limit: int) -> list[KeyedRow]:
        """Begin an empty batch with what is known of its prompts.

        Args:
            batch: without rows; afterwards it has one for each prompt and some length, or none if nothing could be used.
            namespace: digest of all that decides KV besides the ids.
            prompts: in padded places all are equally long.
            limit: places that may be filled; one token at least must be left to compute.

        Returns:
            The rows with what they have keys for; empty where nothing could be used.
        """
        with self._engine.exclusive():
            matches = [self._match(namespace, prompt) for prompt in prompts]
            matches = self._worth_loading(matches)
            size = self._engine.layout.block_size
            places = [m.prompt.pad + (m.in_memory + len(m.found)) * size for m in matches]
            self.count(
                lookups=len(prompts),
                prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
                matched_tokens_memory=sum(m.in_memory for m in matches) * size,
                matched_tokens_disk=sum(len(m.found) for m in matches) * size,
            )
            target = min(limit, *places)
            if target <= max(prompt.pad for prompt in prompts):
                return []
            try:
                return self._build(batch, matches, target)
            except CapacityError:
                batch.reset()  # what the tiers cannot hold now, they can hold block by block during the prefill
                return []
            except BaseException:
                batch.reset()
                raise

    def _match(self, namespace: bytes, prompt: Prompt) -> _Match:
        size = self._engine.layout.block_size
        keys = chain_keys(namespace, prompt.ids, size)
        in_memory = 0
        if self._config.share:
            shared = self._engine.manager.shared
            blocks = (prompt.ids[index * size : (index + 1) * size] for index in range(len(keys)))
            known = (shared.find(key, ids) is not None for key, ids in zip(keys, blocks, strict=True))
            in_memory = next((index for index, one in enumerate(known) if not one), len(keys))
        found: list[Found] = []
        if self.store is not None and len(prompt.ids) >= self._config.min_tokens:
            found = self.store.match(namespace, keys)
        return _Match(prompt, keys, in_memory, found[in_memory:], len(found))

    def _worth_loading(self, matches: list[_Match]) -> list[_Match]:
        """Leave out what is sooner computed than read, as far as either was measured here."""
        blocks = sum(len(match.found) for match in matches)
        layout = self._engine.layout
        if not blocks or self.rates.loading_pays(blocks * layout.block_bytes, blocks * layout.block_size):
            return matches
        self.count(computed_instead=blocks * layout.block_size)
        return [replace(match, found=[]) for match in matches]

    def _build(self, batch: "SequenceBatch", matches: Sequence[_Match], target: int) -> list[KeyedRow]:
        size = self._engine.layout.block_size
        batch.open_rows(len(matches))
        if self.store is not None:
            self.store.prefetch([found for match in matches for found in match.found])
        for row, match in enumerate(matches):
            length = self._build_row(batch, row, match, target)
            target = min(target, length)
        if target <= max(match.prompt.pad for match in matches):
            batch.reset()
            return []
        batch.crop_rows(target)
        rows = []
        for row, match in enumerate(matches):
            whole = max(0, target - match.prompt.pad) // size
            keyed = KeyedRow(match.prompt.pad, match.keys[:whole])
            self._name(
                batch.tables[row], keyed, range(match.in_memory, whole), match.prompt.ids[match.in_memory * size :]
            )
            keyed.stored = min(match.stored, whole)
            rows.append(keyed)
            self.count(used_tokens=target - match.prompt.pad)
            if self.store is not None:
                self.store.touch(match.keys[: keyed.stored])
        return rows

    def _build_row(self, batch: "SequenceBatch", row: int, match: _Match, target: int) -> int:
        """Fill one row with up to ``target`` places; return how many it got."""
        size, pad = self._engine.layout.block_size, match.prompt.pad
        if pad % size == 0:
            if pad:
                batch.fill(row, pad, self._copies(match, {}, 0))
            whole = -(-(target - pad) // size)
            shared = batch.share(row, match.keys[: min(match.in_memory, whole)], match.prompt.ids)
            begin = pad + shared * size
            if begin >= target or shared < match.in_memory:
                return min(begin, target)
            return begin + self._load(batch, row, match, {}, begin, pad + whole * size - begin)
        # Its blocks lie across those of the prompt: their bytes are copied. What memory holds is held on to meanwhile.
        manager = self._engine.manager
        held = manager.open()
        try:
            manager.share(held, match.keys[: match.in_memory], match.prompt.ids)
            return self._load(batch, row, match, dict(enumerate(held.blocks)), 0, target)
        finally:
            manager.release(held)

    def _load(
        self, batch: "SequenceBatch", row: int, match: _Match, held: "dict[int, Block]", begin: int, count: int
    ) -> int:
        """Fill ``count`` places of a row from the store (and from blocks held in memory); return how many were."""
        began = time.perf_counter()
        filled = batch.fill(row, count, self._copies(match, held, begin))
        size = self._engine.layout.block_size
        restored = max(0, (begin + filled - match.prompt.pad) // size - match.in_memory)
        seconds = time.perf_counter() - began if restored else 0.0
        self.count(restored_tokens=restored * size, restore_seconds=seconds, failed_restores=int(filled < count))
        self.rates.loaded(restored * self._engine.layout.block_bytes, seconds)
        return filled

    def _copies(self, match: _Match, held: "dict[int, Block]", begin: int) -> "Callable[[Step], list[Copy]]":
        """Return what fills the new blocks of one row, whose first begins at place ``begin``."""
        layout, stores = self._engine.layout, self._engine.stores
        size, pad = layout.block_size, match.prompt.pad

        def copy_into(index: int, block: "Block") -> Copy:
            tier, slot = block.tier, block.slots[block.tier]

            def load() -> None:
                views = empty_views(layout) if tier is Tier.DISK else stores.slab(tier).block_views(slot)
                first = index * size - pad  # the first token of the block, counted from the prompt's first
                if first < 0:
                    for view in views:
                        view[:, :, : min(size, -first)].zero_()  # padding is masked, but 0 times NaN is NaN
                for source in range(max(0, first) // size, max(0, first + size - 1) // size + 1):
                    into = slice(max(0, source * size - first), min(size, (source + 1) * size - first))
                    if into.start >= into.stop:
                        continue
                    at = first + into.start - source * size
                    self._read(match, source, held, views, into, slice(at, at + into.stop - into.start))
                if tier is Tier.DISK:
                    stores.save_block(views, slot)

            return Copy(Wire(Tier.DISK, tier), layout.block_bytes, load=load)

        return lambda step: [
            copy_into(begin // size + number, block)
            for number, block in enumerate(step.tables[0].blocks[begin // size :])
        ]

    def _read(
        self,
        match: _Match,
        source: int,
        held: "dict[int, Block]",
        views: "list[torch.Tensor]",
        into: slice,
        tokens: slice,
    ) -> None:
        """Copy tokens of the prompt's block ``source`` into a new block. Called by workers."""
        layout = self._engine.layout
        if source in held:
            for view, own in zip(views, block_views(layout, self._engine.stores, held[source]), strict=True):
                view[:, :, into].copy_(own[:, :, tokens])
            return
        index = source - match.in_memory
        if index >= len(match.found):
            return  # behind what is known: whoever asked cuts the row there
        assert self.store is not None
        ids = match.prompt.ids[source * layout.block_size : (source + 1) * layout.block_size]
        self.store.read(
            match.found[index], ids, layout.block_bytes, lambda payload: unpack(layout, payload, views, into, tokens)
        )

    # -- after a forward ------------------------------------------------------------------------------------------

    def publish(
        self,
        batch: "SequenceBatch",
        namespace: bytes,
        rows: Sequence[KeyedRow],
        ends: Sequence[int],
        ids_of: Callable[[int, int, int], list[int]],
    ) -> None:
        """Give keys to the blocks that have become full, and offer them to the store.

        Args:
            batch: at rest.
            namespace: digest of all that decides KV besides the ids.
            rows: what its rows have keys for; changed.
            ends: per row, the place up to which KV is a function of the ids alone.
            ids_of: returns the ids of a row between two places.
        """
        size = self._engine.layout.block_size
        for row, keyed in enumerate(rows):
            full, named = max(0, ends[row] - keyed.pad) // size, len(keyed.keys)
            if full > named:
                ids = ids_of(row, keyed.pad + named * size, keyed.pad + full * size)
                keyed.keys += chain_keys(keyed.keys[-1] if keyed.keys else namespace, ids, size)
                self._name(batch.tables[row], keyed, range(named, full), ids)
            if self._offers is not None and keyed.stored < full and full * size >= self._config.min_tokens:
                ids = ids_of(row, keyed.pad + keyed.stored * size, keyed.pad + full * size)
                new = range(keyed.stored, full)
                self._offers.offer(
                    namespace, keyed.keys, new, ids, [self._cost(index) for index in new],
                    [self._pieces(batch.tables[row], keyed.pad + index * size) for index in new],
                )  # fmt: skip
                keyed.stored = full
        self.drain()

    def is_due(self, keyed: KeyedRow, length: int) -> bool:
        """Whether ``publish`` has anything to do for a row of a cache of ``length`` places. Cheap."""
        size = self._engine.layout.block_size
        full = (length - keyed.pad) // size
        kept = self._offers is not None and full > keyed.stored and full * size >= self._config.min_tokens
        return not keyed.closed and (full > len(keyed.keys) or kept)

    def drain(self) -> None:
        """Hand over to the store what it has room for now."""
        if self._offers is not None and self._offers.waiting:
            self._offers.drain()

    def _name(self, table: "BlockTable", keyed: KeyedRow, blocks: range, ids: Sequence[int]) -> None:
        """Let others find blocks of a row; ``ids`` are those of their tokens, one block after another."""
        size = self._engine.layout.block_size
        first, rest = divmod(keyed.pad, size)
        for number, index in enumerate(blocks if self._config.share and not rest else ()):
            key, parent = keyed.keys[index], keyed.keys[index - 1] if index else None
            own = ids[number * size : (number + 1) * size]
            self._engine.manager.publish(table, first + index, key, own, parent, self._cost(index))

    def _pieces(self, table: "BlockTable", begin: int) -> list[Piece]:
        """Return where the tokens of one key lie in a row, whose padding may have shifted them."""
        size = self._engine.layout.block_size
        index, shift = divmod(begin, size)
        if not shift:
            return [Piece(table.blocks[index], WHOLE, WHOLE)]
        return [
            Piece(table.blocks[index], slice(0, size - shift), slice(shift, size)),
            Piece(table.blocks[index + 1], slice(size - shift, size), slice(0, shift)),
        ]

    def _cost(self, index: int) -> float:
        size = self._engine.layout.block_size
        return size * (1 + index * size / self.knee_tokens)

    # -- the whole ------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forget everything that memory keeps; blocks in use stay with their sequences. The store is not touched."""
        with self._engine.exclusive():
            self._engine.manager.disown_shared()

    def stats(self) -> PrefixStats:
        """Return a snapshot."""
        shared = self._engine.manager.shared
        block_bytes = self._engine.layout.block_bytes
        offers = self._offers
        return replace(
            self.stats_so_far,
            named_blocks=len(shared),
            saved_bytes=shared.num_saved * block_bytes,
            kept_bytes=shared.num_unused * block_bytes,
            shed_blocks=offers.shed if offers else 0,
            waiting_blocks=offers.waiting if offers else 0,
            store=None if self.store is None else self.store.stats(),
        )

    def close(self) -> None:
        """Hand over what waits to be written, for a bounded time."""
        if self._offers is not None and self._offers.waiting:
            with self._engine.gate.exclusive():
                self._offers.drain(wait_seconds=5.0)
