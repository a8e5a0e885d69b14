"""SequenceBatch: the sequences of one cache, one block table a row, appended to layer by layer."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tierkv.errors import BlockLost, RecordError, StoreFull, UnsafeCall
from tierkv.interrupts import deferred_interrupt
from tierkv.moves import Step
from tierkv.new_tokens import check_tokens, write_tokens
from tierkv.rows import RowTables

if TYPE_CHECKING:
    import torch

    from tierkv.engine import Engine

    Layer = tuple[torch.Tensor, torch.Tensor]


class SequenceBatch(RowTables):
    """Rows of equal length over one engine's tiers. Made by ``Engine.open``; ``release`` gives everything back.

    Attributes:
        first_seen: how the next forward is read. None: gathered. Otherwise over blocks, and per row this is the position
            of the first token that is not padding; empty where there is no padding.
    """

    def __init__(self, engine: "Engine") -> None:
        """Make an empty batch; the number of rows is that of the first append."""
        super().__init__(engine)
        self.first_seen: Sequence[int] | None = None
        self._next_layer = 0
        self._new: Layer | None = None  # K and V that were appended to the layer before the next, until it has attended
        self._entered = False

    def append(self, layer: int, keys: "torch.Tensor", values: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """Add the new tokens of one layer and return all of them; the last layer commits the forward.

        Args:
            layer: position in the engine's layout; a forward passes each once, in order.
            keys: ``[rows, kv_heads, tokens, key_dim]``, any strides.
            values: ``[rows, kv_heads, tokens, value_dim]``.

        Returns:
            K ``[rows, kv_heads, total, key_dim]`` and V ``[rows, kv_heads, total, value_dim]``, contiguous scratch
            that later layers overwrite.

        Raises:
            CapacityError: the tiers cannot hold the new tokens.
            BlockLost: a cold block cannot be read back.
            StoreFull: the disk tier refused the only copy of a block.
            UnsafeCall: layers out of order, another number of rows, or tensors that need gradients.
            UnsupportedModel: the tensors are not what the model's config promised.
            ClosedError: the engine is closed, or this is a forked child.
        """
        step = self._start_layer(layer, keys, values, None)
        with self._tier_faults():
            self._write(layer, step, keys, values)
            gathered = self.engine.gathered.gather(layer, keys, values)
        self._finish_layer(layer)
        return gathered

    def append_paged(self, layer: int, keys: "torch.Tensor", values: "torch.Tensor") -> None:
        """Add the new tokens of one layer; ``attend`` or ``attended`` must follow before the next layer.

        Args:
            layer: position in the engine's layout; a forward passes each once, in order.
            keys: ``[rows, kv_heads, tokens, key_dim]``, dense in the last dimension.
            values: ``[rows, kv_heads, tokens, value_dim]``.

        Raises:
            As ``append``.
        """
        step = self._start_layer(layer, keys, values, self.first_seen or [0] * keys.shape[0])
        with self._tier_faults():
            if not self.engine.paged.append(layer, keys, values):
                self._write(layer, step, keys, values)
        self._new = keys, values

    def attend(
        self,
        layer: int,
        query: "torch.Tensor",
        *,
        scale: float,
        softcap: float | None = None,
        sinks: "torch.Tensor | None" = None,
    ) -> "torch.Tensor":
        """Return attention of the new tokens of a layer over all tokens; the last layer commits the forward.

        Args:
            layer: whose tokens were just appended.
            query: ``[rows, query_heads, tokens, key_dim]``, of the dtype of K and V, dense in the last dimension.
            scale: factor of the scores.
            softcap: limit of the scores, or None.
            sinks: a score ``[query_heads]`` that takes part in the softmax alone, or None.

        Returns:
            ``[rows, tokens, query_heads, value_dim]``, contiguous, of the query's dtype.

        Raises:
            BlockLost: a cold block cannot be read back.
            TransferTimeout: a cold block did not arrive in time.
            UnsafeCall: the layer's tokens were not appended.
        """
        self._check_appended(layer)
        assert self._new is not None
        if query.requires_grad:
            raise UnsafeCall("a tiered cache has no gradients; run the model under torch.no_grad()")
        with self._tier_faults():
            out = self.engine.paged.attend(layer, query, *self._new, scale=scale, softcap=softcap, sinks=sinks)
        self.attended(layer)
        return out

    def attended(self, layer: int) -> None:
        """Note that a layer's attention was computed elsewhere, over the new tokens alone: there were none before."""
        self._check_appended(layer)
        self._new = None
        self._finish_layer(layer)

    def rollback(self) -> bool:
        """Forget an open forward; return whether there was one."""
        step = self.step
        if step is None:
            return False
        try:
            with self.engine.exclusive():
                self._drain_writes(torn=True)
                self.engine.end_reads(step)
                with deferred_interrupt():
                    self.engine.manager.rollback(step)
                    self.step, self._new = None, None
            self.engine.count(torn_forwards=1)
        finally:
            if self.step is None:
                self._leave()
        return True

    def __del__(self) -> None:
        # Collected, perhaps by another thread in the middle of anything: the engine takes the tables over later.
        if getattr(self, "tables", None):
            self.engine.orphan(self.tables, self.step, self._writes)

    # -- the stages of a forward ----------------------------------------------------------------------------------

    def _start_layer(
        self, layer: int, keys: "torch.Tensor", values: "torch.Tensor", first_seen: Sequence[int] | None
    ) -> Step:
        self.check_usable()
        if self._new is not None and layer:
            raise UnsafeCall(
                f"attention of layer {self.engine.layout.layers[self._next_layer].model_index} did not read the cache; set "
                f'attention.path = "gathered" for this model'
            )
        if layer == 0:
            self._begin(keys, first_seen)
        step = self.step
        if step is None or layer != self._next_layer:
            model_index = self.engine.layout.layers[layer].model_index
            raise UnsafeCall(
                f"layer {model_index} came to the cache out of order; every forward must pass all layers in turn"
            )
        check_tokens(self.engine.layout, self.engine.device, layer, self.rows, step.count, keys, values)
        return step

    def _check_appended(self, layer: int) -> None:
        if self._new is None or layer != self._next_layer:
            model_index = self.engine.layout.layers[layer].model_index
            raise UnsafeCall(f"layer {model_index} attends to a cache that was not given its new tokens")

    def _finish_layer(self, layer: int) -> None:
        self._next_layer = layer + 1
        if self._next_layer == len(self.engine.layout.layers):
            self._commit()

    @contextmanager
    def _tier_faults(self) -> Iterator[None]:
        """Say what a failure of a tier means for the sequences."""
        try:
            yield
        except RecordError as error:
            self.engine.block_lost()
            raise BlockLost(f"a block that only the disk tier held cannot be read back ({error})") from error
        except StoreFull:
            self.engine.disk_failed()
            raise

    def _begin(self, keys: "torch.Tensor", first_seen: Sequence[int] | None) -> None:
        self.rollback()
        rows, count = keys.shape[0], keys.shape[2]
        # Where nobody watches the model's forward (a part of it is called directly) the forward is entered here.
        self._entered = self._entered or not self.engine.gate.mine
        try:
            self.engine.gate.enter()
            self._take_over()
            if not self.tables or (not self.length and rows != self.rows):
                self.reset()
                with deferred_interrupt():
                    self.tables = [self.engine.manager.open() for _ in range(rows)]
            if rows != self.rows:
                raise UnsafeCall(
                    f"the cache holds {self.rows} rows and the forward brings {rows}; "
                    f"use cache.batch_repeat_interleave or cache.batch_select_indices first"
                )
            self._next_layer = 0
            self.engine.begin_step(self, count, first_seen)
        finally:
            if self.step is None:
                self._leave()

    def _take_over(self) -> None:
        """Roll back a forward of another batch that was torn and never came back: nobody else is inside the gate."""
        torn = self.engine.open_batch() if self.engine.open_batch is not None else None
        if torn is not None and torn is not self and torn.step is not None:
            self._entered, torn._entered = self._entered or torn._entered, False  # noqa: SLF001 - one of us
            torn.rollback()
        self.engine.open_batch = weakref.ref(self)

    def _write(self, layer: int, step: Step, keys: "torch.Tensor", values: "torch.Tensor") -> None:
        """Put the new tokens of a layer where they will live."""
        engine = self.engine
        copies = write_tokens(engine.stores, layer, step, keys, values, engine.count_copies, engine.transfers.clock)
        # Each layer's tensors live until they are copied: at most two layers' at a time.
        self._drain_writes()
        if copies:
            with deferred_interrupt():  # a copy under way that nobody knows of could outlive its slots
                self._writes.append(engine.transfers.submit(copies))

    def _commit(self) -> None:
        step = self.step
        assert step is not None
        self._drain_writes()
        self.engine.end_reads(step)
        try:
            with deferred_interrupt():
                self.engine.manager.commit(step)
                self.step = None
            self.engine.finish_step(step, paged=self.first_seen is not None)
        finally:
            if self.step is None:
                self._leave()

    def _leave(self) -> None:
        if self._entered:
            # In this order: interrupted in between, the next forward of this batch leaves for both.
            self.engine.gate.leave()
            self._entered = False
