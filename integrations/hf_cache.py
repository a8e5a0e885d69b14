"""TieredCache: a transformers cache whose layers live in the tiers. The gathered read path.

``update`` returns a layer's full K and V, byte for byte what ``DynamicCache`` would return, so any model and any
attention implementation can use it. Layers that are not plain growing attention stay native to transformers.

The container owns the block tables: ``crop``, ``reorder_cache`` and the other verbs change them once and then call the
native layers. Its tiered layers answer questions and refuse verbs of their own.
"""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from tierkv.errors import TornForward, UnsafeCall
from tierkv.integrations.hf_content import CacheContent

if TYPE_CHECKING:
    from tierkv.engine import Engine
    from tierkv.sequences import SequenceBatch


class TieredLayer(CacheLayerMixin):
    """One tiered layer of a ``TieredCache``: a window onto the container's sequences."""

    is_croppable = True
    is_compileable = False

    def __init__(self, sequences: "SequenceBatch", position: int, window: int | None) -> None:
        """Make the layer at ``position`` of the layout; ``window`` in tokens for sliding attention, else None."""
        # CacheLayerMixin.__init__ would assign keys and values, which are computed here.
        self._sequences = sequences
        self.position = position
        self.is_sliding = window is not None
        if window is not None:
            self.sliding_window = window
        self._window = window

    @property
    def is_initialized(self) -> bool:
        """Whether the layer holds tokens."""
        return self._sequences.rows > 0

    @property
    def batch_size(self) -> int:
        """Rows held, -1 while empty (transformers' own convention)."""
        return self._sequences.rows or -1

    @property
    def keys(self) -> torch.Tensor | None:
        """A copy of all committed keys ``[rows, kv_heads, length, key_dim]``; for inspection, slow."""
        return self._sequences.read(self.position)[0] if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:
        """A copy of all committed values ``[rows, kv_heads, length, value_dim]``; for inspection, slow."""
        return self._sequences.read(self.position)[1] if self.is_initialized else None

    @keys.setter
    def keys(self, _: Any) -> None:
        raise UnsafeCall("the keys of a tiered layer cannot be assigned; use the cache's own verbs")

    @values.setter
    def values(self, _: Any) -> None:
        raise UnsafeCall("the values of a tiered layer cannot be assigned; use the cache's own verbs")

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the tiers exist since the engine was made."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to this layer and return all its K and V; see ``TieredCache.update``."""
        return self._sequences.append(self.position, key_states, value_states)

    def get_seq_length(self) -> int:
        """Return the committed length: a torn forward does not count."""
        return self._sequences.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return ``(kv_length, kv_offset)`` of what the next ``update`` with that many tokens returns."""
        length = self.get_seq_length()
        offset = 0 if self._window is None else max(length - self._window + 1, 0)
        return length - offset + query_length, offset

    def get_max_length(self) -> int:
        """Return the window, or -1 for no maximum, as transformers' own layers do."""
        return -1 if self._window is None else self._window

    def offload(self) -> None:
        """Do nothing: the engine schedules by itself."""

    def prefetch(self) -> None:
        """Do nothing: the engine schedules by itself."""

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: one layer cannot be shorter than the others; crop the cache."""
        raise UnsafeCall("a tiered layer cannot change alone; call the verb on the cache, which changes all layers at once")

    reset = batch_repeat_interleave = batch_select_indices = reorder_cache = crop  # type: ignore[assignment]


class TieredCache(DynamicCache):
    """One cache for one batch of sequences. Made by ``engine.new_cache()``; ``close`` gives its blocks back.

    Accepted by ``generate(cache=...)`` and by the model's forward. Not for use from two threads at once.
    """

    def __init__(self, engine: "Engine", config: Any) -> None:
        """Make an empty cache for a model with this decoder config."""
        super().__init__(config=config)
        self._config = config
        self.engine = engine
        self.sequences = engine.open()
        self.content = CacheContent()
        self._offered: tuple[torch.Tensor | None, torch.Tensor | None] | None = None
        self._in_forward = False
        self._torn = False
        self._place_layers()

    def _place_layers(self) -> None:
        for position, spec in enumerate(self.engine.layout.layers):
            self.layers[spec.model_index] = TieredLayer(self.sequences, position, spec.window)
        self._native = [layer for layer in self.layers if not isinstance(layer, TieredLayer)]

    # -- the forward ----------------------------------------------------------------------------------------------

    def begin_forward(self, ids: torch.Tensor | None, mask: torch.Tensor | None) -> None:
        """Tell the cache that a forward begins. Called by the attached model's hook.

        Args:
            ids: the ids that are fed, ``[rows, tokens]``, or None where they are unknown.
            mask: the forward's 2-D attention mask, or None.

        Raises:
            TornForward: an earlier forward was interrupted and native layers cannot be rolled back.
            UnsafeCall: the padding mask contradicts the one that the cached tokens were computed with.
        """
        if self._in_forward:
            self.end_forward()
        if self._torn:
            raise TornForward(
                "an earlier forward through this cache was interrupted, and its recurrent or indexed layers cannot be "
                "rolled back; call cache.reset() and pass the full ids again"
            )
        if mask is not None and mask.dim() != 2:
            mask = None
        elif not self.content.same_padding(mask):
            raise UnsafeCall(
                "the attention mask says another padding than the cached tokens were computed with; pass the mask of "
                "the whole sequence, cached tokens included, or call cache.reset()"
            )
        self._in_forward = True
        self._offered = (ids, mask)

    def end_forward(self) -> None:
        """Tell the cache that the forward ended, one way or another; an unfinished one is rolled back."""
        if not self._in_forward:
            return
        self._in_forward = False
        self._offered = None
        if self.sequences.rollback():
            self._torn = any(getattr(layer, "is_initialized", True) for layer in self._native if not _is_dummy(layer))

    @torch.compiler.disable
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the new tokens of a layer and return all its K and V.

        Args:
            key_states: ``[rows, kv_heads, tokens, key_dim]``.
            value_states: ``[rows, kv_heads, tokens, value_dim]``.
            layer_idx: the layer's index in the model.
            args: passed on to native layers.
            kwargs: passed on to native layers.

        Returns:
            K and V as ``DynamicCache`` would return them. For tiered layers they are scratch, valid until this layer's
            attention has run.
        """
        gathered = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        if self.sequences.length > self.content.length:  # the last tiered layer has just committed the forward
            ids, mask = self._offered or (None, None)
            self.content.append(ids, mask, self.sequences.length - self.content.length)
            self._offered = None
        return gathered

    # -- verbs ----------------------------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every row. Must be at most 0; 0 still trims native layers.

        Raises:
            UnsafeCall: positive, or more tokens than the cache holds.
        """
        if tokens_to_remove > 0:
            raise UnsafeCall(f"crop({tokens_to_remove}): pass how many tokens to remove as a negative number")
        length = self.sequences.length + tokens_to_remove
        if length < 0:
            raise UnsafeCall(f"crop({tokens_to_remove}): the cache holds only {self.sequences.length} tokens")
        if tokens_to_remove:
            self.sequences.crop(length)
            self.content.crop(length)
        for layer in self._native:
            if hasattr(layer, "crop"):
                layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row ``i`` what row ``beam_idx[i]`` is now: block tables move, no tensor is copied."""
        self._select([int(index) for index in beam_idx.tolist()])
        for layer in self._native:
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, side by side; the copies share blocks."""
        self._select([row for row in range(self.sequences.rows) for _ in range(repeats)])
        for layer in self._native:
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices`` (integers or a bool mask), in that order."""
        chosen = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._select([int(index) % max(self.sequences.rows, 1) for index in chosen.tolist()])
        for layer in self._native:
            layer.batch_select_indices(indices)

    def reset(self) -> None:
        """Drop all tokens; the cache is as new."""
        self.sequences.reset()
        self.content = CacheContent()
        self._in_forward = self._torn = False
        self._offered = None
        fresh = DynamicCache(config=self._config)
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, TieredLayer):
                self.layers[index] = fresh.layers[index]
        self._native = [layer for layer in self.layers if not isinstance(layer, TieredLayer)]

    def close(self) -> None:
        """Give the cache's blocks back now; it cannot be used afterwards. Happens by itself when it is collected."""
        self.sequences.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TieredCache":
        """Return a fork: the same blocks, copied only where one of the two writes."""
        twin = TieredCache.__new__(TieredCache)
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        twin.sequences = self.sequences.fork()
        twin.content = self.content.fork()
        twin._offered = None
        twin.layers = [
            layer if isinstance(layer, TieredLayer) else copy.deepcopy(layer, memo) for layer in self.layers
        ]
        twin._place_layers()
        return twin

    def _select(self, indices: Sequence[int]) -> None:
        self.sequences.select(indices)
        self.content.select(indices)

    @property
    def is_compileable(self) -> bool:
        """False: ``generate`` must not compile a model around threads and streams."""
        return False

    def __repr__(self) -> str:
        return f"TieredCache(rows={self.sequences.rows}, length={self.sequences.length})"


def _is_dummy(layer: Any) -> bool:
    return type(layer).__name__ == "DummyLayer"
