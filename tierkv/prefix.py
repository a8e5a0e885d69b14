"""PrefixCache: prompts that begin like earlier ones begin with their KV.

    reuse     before a prefill: rows of an empty batch get the blocks that memory holds, and the rest of what the store
              holds is read into new blocks, many reads in flight; one block that cannot be read ends the row's part there
    publish   after a forward: full blocks get their keys, equal ones become one, and the store is offered them

What is matched, what is restored and what is used are counted apart: rows of a batch share one length, so a batch uses
what its worst row has. That fewer tokens were really computed shows in the model's own forwards.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tierkv.errors import CapacityError, TierKVError, TransferTimeout
from tierkv.interrupts import deferred_interrupt
from tierkv.keys import chain_keys
from tierkv.metrics import PrefixStats
from tierkv.payload import WHOLE, Piece
from tierkv.prefix_fill import RowFiller
from tierkv.prefix_rates import Rates
from tierkv.prefix_rows import KeyedRow, Match, Prompt
from tierkv.rows import RESTORE_SECONDS

if TYPE_CHECKING:
    from tierkv.block_table import BlockTable
    from tierkv.config import PrefixConfig
    from tierkv.engine import Engine
    from tierkv.prefix_offers import PrefixOffers
    from tierkv.sequences import SequenceBatch
    from tierkv.storage.prefix_store import Found, PrefixStore


_KNEE_TOKENS: Final = 8192
"""Position at which computing a token costs about twice what it costs at the start; for the cost rule."""


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
        self._filler = RowFiller(engine, store, self._restored)
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

    def reuse(
        self,
        batch: "SequenceBatch",
        namespace: bytes,
        prompts: Sequence[Prompt],
        limit: int,
        *,
        from_store: bool = True,
    ) -> list[KeyedRow]:
        """Begin an empty batch with what is known of its prompts.

        Args:
            batch: without rows; afterwards it has one for each prompt and some length, or none if nothing could be used.
            namespace: digest of all that decides KV besides the ids.
            prompts: in padded places all are equally long.
            limit: places that may be filled; one token at least must be left to compute.
            from_store: read what memory does not hold.

        Returns:
            The rows with what they have keys for; empty where nothing could be used.
        """
        with self._engine.exclusive():
            matches = [self._match(namespace, prompt) for prompt in prompts]
            matches = self._worth_loading(matches) if from_store else [replace(m, found=[]) for m in matches]
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
            except TransferTimeout:
                # The store's disk does not answer. What is in flight keeps its places until it ends; we compute.
                self.count(failed_restores=1)
                self.rates.loaded(1, RESTORE_SECONDS)
                batch.abandon()
                return []
            except BaseException:
                batch.reset()
                raise

    def known_places(self, namespace: bytes, prompts: Sequence[Prompt]) -> int:
        """Return how many places ``reuse`` could fill of each row, limits and rates aside."""
        with self._engine.exclusive():
            size = self._engine.layout.block_size
            matches = (self._match(namespace, prompt) for prompt in prompts)
            return min(match.prompt.pad + (match.in_memory + len(match.found)) * size for match in matches)

    def _match(self, namespace: bytes, prompt: Prompt) -> Match:
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
        return Match(prompt, keys, in_memory, found[in_memory:], len(found))

    def _worth_loading(self, matches: list[Match]) -> list[Match]:
        """Leave out what is sooner computed than read, as far as either was measured here."""
        blocks = sum(len(match.found) for match in matches)
        layout = self._engine.layout
        if not blocks or self.rates.loading_pays(blocks * layout.block_bytes, blocks * layout.block_size):
            return matches
        self.count(computed_instead=blocks * layout.block_size)
        return [replace(match, found=[]) for match in matches]

    def _build(self, batch: "SequenceBatch", matches: Sequence[Match], target: int) -> list[KeyedRow]:
        size = self._engine.layout.block_size
        batch.open_rows(len(matches))
        for row, match in enumerate(matches):
            target = min(target, self._filler.build(batch, row, match, target))
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

    def _restored(self, tokens: int, seconds: float, *, complete: bool) -> None:
        self.count(restored_tokens=tokens, restore_seconds=seconds, failed_restores=int(not complete))
        layout = self._engine.layout
        self.rates.loaded(tokens // layout.block_size * layout.block_bytes, seconds)

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
        end = length if keyed.closed_at is None else min(length, keyed.closed_at)
        full = (end - keyed.pad) // size
        kept = self._offers is not None and full > keyed.stored and full * size >= self._config.min_tokens
        return full > len(keyed.keys) or kept

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
            with deferred_interrupt():
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
        return size * (1 + index * size / _KNEE_TOKENS)

    # -- the whole ------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forget everything that memory keeps; blocks in use stay with their sequences. The store is not touched."""
        with self._engine.exclusive(), deferred_interrupt():
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
        gate = self._engine.gate
        if self._offers is not None and self._offers.waiting and (gate.mine or gate.is_free):
            with gate.exclusive(), suppress(TierKVError):  # the store may be closed already, at the interpreter's end
                self._offers.drain(wait_seconds=5.0)
