"""TieredCache: a transformers cache whose layers live in the tiers.

On the gathered path ``update`` returns a layer's full K and V, byte for byte what ``DynamicCache`` would return, so any
model and any attention implementation can use it; on the paged path attention reads the blocks (``hf_attention``).
Layers that are not plain growing attention stay native to transformers.

The container owns the block tables: ``crop``, ``reorder_cache`` and the other verbs change them once and then call the
native layers.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers.cache_utils import DynamicCache

from tierkv.errors import TierKVError, TornForward, UnsafeCall
from tierkv.integrations.hf_arguments import row_indices, whole_number
from tierkv.integrations.hf_compat import can_crop, is_dummy
from tierkv.integrations.hf_content import CacheContent, ForwardInputs
from tierkv.integrations.hf_layer import TieredLayer
from tierkv.interrupts import deferred_interrupt

if TYPE_CHECKING:
    from tierkv.engine import Engine
    from tierkv.prefix_rows import KeyedRow


class TieredCache(DynamicCache):
    """One cache for one batch of sequences. Made by ``engine.new_cache()``; ``close`` gives its blocks back.

    Accepted by ``generate(cache=...)`` and by the model's forward. Not for use from two threads at once.
    """

    def __init__(self, engine: "Engine", config: Any, publish: "Callable[[TieredCache, int, float], None]") -> None:
        """Make an empty cache.

        Args:
            engine: whose tiers it lives in.
            config: of the model's decoder.
            publish: told after each forward that ended well: the cache, the tokens of each row, the seconds it took.
        """
        super().__init__(config=config)
        self._config = config
        self._publish = publish
        self.engine = engine
        self.sequences = engine.open()
        self.content = CacheContent()
        self.weights = b""  # stamp of the weights that it is filled with
        self._open: ForwardInputs | None = None  # the forward that is under way
        self._began = 0.0
        self._length_before = 0
        self._torn = False
        self._users: dict[str, object] = {}  # the call of generate that uses the cache
        self._generating = False
        self._place_layers()

    def _place_layers(self) -> None:
        for position, spec in enumerate(self.engine.layout.layers):
            self.layers[spec.model_index] = TieredLayer(self.sequences, position, spec.window)
        self._native = [layer for layer in self.layers if not isinstance(layer, TieredLayer)]

    # -- the forward ----------------------------------------------------------------------------------------------

    @property
    def in_forward(self) -> bool:
        """Whether a forward through this cache is under way."""
        return self._open is not None

    def check_usable(self) -> None:
        """Raise unless the cache holds what it says.

        Raises:
            TornForward: an earlier forward was interrupted and native layers cannot be rolled back.
            ClosedError: the cache or its engine is closed, or this is a forked child.
        """
        self.sequences.check_usable()
        self._settle()
        if self._torn:
            raise TornForward(
                "an earlier forward through this cache was interrupted, and its recurrent or indexed layers cannot be "
                "rolled back; call cache.reset() and pass the full ids again"
            )

    @property
    def attends_in_place(self) -> bool:
        """Whether attention of the forward under way must read the tokens that the cache already holds by itself."""
        return self.sequences.first_seen is not None and self._length_before > 0

    def begin_forward(self, inputs: ForwardInputs, first_seen: Sequence[int] | None = None) -> None:
        """Tell the cache that a forward begins. Called by the attached model's wrapped forward.

        Args:
            inputs: what decides the KV that it computes.
            first_seen: per row the first token that is not padding (empty: none is) where attention reads blocks, None
                where it is given whole layers.

        Raises:
            TornForward: an earlier forward was interrupted and native layers cannot be rolled back.
            UnsafeCall: the padding mask contradicts the one that the cached tokens were computed with, or is too short.
        """
        self.check_usable()
        length = self.sequences.length
        if inputs.mask is not None and inputs.mask.shape[1] < length + inputs.count:
            raise UnsafeCall(
                f"the attention mask covers {inputs.mask.shape[1]} tokens; it must cover the {length} cached tokens and the "
                f"{inputs.count} new ones"
            )
        if inputs.usual_mask and not self.content.same_padding(inputs.mask):
            raise UnsafeCall(
                "the attention mask says another padding than the cached tokens were computed with; pass the mask of "
                "the whole sequence, cached tokens included, or call cache.reset()"
            )
        self._length_before = length
        self._began = time.perf_counter()
        self.sequences.first_seen = first_seen
        self._open = inputs

    def end_forward(self, *, completed: bool) -> None:
        """Tell the cache that the forward ended. What an interrupted one has left is rolled back.

        Raises:
            UnsafeCall: it ended well and yet passed only some of the layers.
        """
        if self._open is None:
            return
        inputs, self._open = self._open, None
        if self.sequences.length > self.content.length:
            self.content.append(
                inputs, self.sequences.rows, self.sequences.length - self.content.length, self.engine.device
            )
        partial = self.sequences.step is not None
        if self.engine.closed:
            return
        if completed and not partial:
            self._publish(self, inputs.count, time.perf_counter() - self._began)
            return
        self.sequences.rollback()
        before = self._length_before
        if not before:
            self._clear()
        else:
            if self.sequences.length > before:  # committed, and then a native layer or the head failed
                self.sequences.crop(before)
                self.content.crop(before, self.engine.layout.block_size)
            self._torn = not all(is_dummy(layer) for layer in self._native)
        if completed:
            raise UnsafeCall("this forward passed only some of the model's layers, so the cache could not follow it")

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
            attention has run. Where attention reads blocks by itself, only the new tokens' K and V.
        """
        self._check_watched()
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Update a native layer; see ``Cache.update_conv_state``."""
        self._check_watched()
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Update a native layer; see ``Cache.update_recurrent_state``."""
        self._check_watched()
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    # -- verbs ----------------------------------------------------------------------------------------------------

    def can_crop(self, tokens_to_remove: int) -> bool:
        """Whether ``crop`` can remove that many tokens: recurrent layers cannot go back."""
        return all(can_crop(layer, self.sequences.length, tokens_to_remove) for layer in self._native)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every row. Must be at most 0; 0 still trims native layers.

        Raises:
            UnsafeCall: no whole number, positive, more tokens than the cache holds, or native layers that cannot go back.
        """
        with self._changing():
            tokens_to_remove = whole_number("crop takes minus the number of tokens to remove", tokens_to_remove)
            if tokens_to_remove > 0:
                raise UnsafeCall(f"crop({tokens_to_remove}): pass how many tokens to remove as a negative number")
            length = self.sequences.length + tokens_to_remove
            if length < 0:
                raise UnsafeCall(f"crop({tokens_to_remove}): the cache holds only {self.sequences.length} tokens")
            if tokens_to_remove and not self.can_crop(tokens_to_remove):
                raise UnsafeCall(
                    f"crop({tokens_to_remove}): this model has recurrent or windowed layers that keep no past to go back to; "
                    f"call cache.reset() and pass the full ids again"
                )
            if tokens_to_remove:
                self.sequences.crop(length)
                self.content.crop(length, self.engine.layout.block_size)
            for layer in self._native:
                if hasattr(layer, "crop") and (tokens_to_remove or getattr(layer, "record_past", False)):
                    layer.crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row ``i`` what row ``beam_idx[i]`` is now: block tables move, no tensor is copied.

        Args:
            beam_idx: as the ``indices`` of ``batch_select_indices``; the names are those that transformers has for one verb.

        Raises:
            UnsafeCall: see ``batch_select_indices``.
        """
        self._select("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, side by side; the copies share blocks.

        Raises:
            UnsafeCall: ``repeats`` is no whole number, or less than 1.
        """
        with self._changing():
            legal = "batch_repeat_interleave takes a whole number, at least 1"
            repeats = whole_number(legal, repeats)
            if repeats < 1:
                raise UnsafeCall(f"{legal}, not {repeats}")
            self._make_rows([row for row in range(self.sequences.rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices``, in that order; one that is named twice is there twice, and the two share blocks.

        Args:
            indices: row numbers ``[chosen]``, int64 or int32, not negative; or a mask ``[rows]``, bool. Or a list of these.

        Raises:
            UnsafeCall: of another type or shape, no row at all, or a row that does not exist; nothing is changed then.
        """
        self._select("batch_select_indices", indices)

    @contextmanager
    def in_use(self, prepare: Callable[[], None]) -> Iterator[None]:
        """Keep other calls of ``generate`` off the cache while the block runs, after ``prepare`` has made it ready.

        Raises:
            UnsafeCall: another call, of another thread or one that is not over yet, uses the cache.
        """
        me = object()
        try:
            if self._users.setdefault("generate", me) is not me:
                raise UnsafeCall(
                    "this cache is in use by a generate call that is not over yet; make a cache for each call with "
                    "engine.new_cache(), or fork one with copy.deepcopy(cache)"
                )
            prepare()
            self._generating = True
            yield
        finally:
            if self._users.get("generate") is me:
                self._generating = False
                del self._users["generate"]

    def reset(self) -> None:
        """Drop all tokens; the cache is as new.

        Raises:
            UnsafeCall: a call of ``generate`` is using it.
        """
        if self._generating:
            raise UnsafeCall("the cache cannot be reset while generate runs on it")
        self._clear()

    def _clear(self) -> None:
        with deferred_interrupt():
            self._open = None
            self.sequences.reset()
            self.content = CacheContent()
            self._torn = False
            self._reset_native()

    def begin_with(self, inputs: ForwardInputs, keyed: "list[KeyedRow]") -> None:
        """Note what an empty cache was filled with, without a forward: ``inputs`` say what one would have computed."""
        with deferred_interrupt():
            self.content = CacheContent()
            self.content.append(inputs, self.sequences.rows, self.sequences.length, self.engine.device)
            self.content.keyed = keyed

    def close(self) -> None:
        """Give the cache's blocks back now; it cannot be used afterwards. Happens by itself when it is collected."""
        self._open = None
        self.sequences.release()

    def __deepcopy__(self, memo: dict[int, Any]) -> "TieredCache":
        """Return a fork: the same blocks, copied only where one of the two writes."""
        with self._changing():
            twin = TieredCache.__new__(TieredCache)
            memo[id(self)] = twin
            twin.__dict__.update(self.__dict__)
            twin.sequences = self.sequences.fork()
            twin.content = self.content.fork()
            twin._users, twin._generating = {}, False  # noqa: SLF001 - one of us
            twin.layers = [
                layer if isinstance(layer, TieredLayer) else copy.deepcopy(layer, memo) for layer in self.layers
            ]
            twin._place_layers()  # noqa: SLF001 - one of us
            return twin

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TierKVError(
            "a tiered cache cannot be pickled: its KV lies in the tiers of this process; pickle the token ids and pass them "
            "to generate again (copy.deepcopy(cache) forks it here)"
        )

    @property
    def is_compileable(self) -> bool:
        """False: ``generate`` must not compile a model around threads and streams."""
        return False

    def __repr__(self) -> str:
        return f"TieredCache(rows={self.sequences.rows}, length={self.sequences.length})"

    # -- internals ------------------------------------------------------------------------------------------------

    def _select(self, verb: str, indices: Any) -> None:
        with self._changing():
            self._make_rows(row_indices(verb, indices, self.sequences.rows))

    def _make_rows(self, chosen: Sequence[int]) -> None:
        """Make row ``i`` what row ``chosen[i]`` is now."""
        if not self.sequences.rows:
            return
        self.sequences.select(chosen)
        self.content.select(chosen)
        index = torch.tensor(chosen, dtype=torch.long)
        for layer in self._native:
            layer.reorder_cache(index)  # type: ignore[arg-type]

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Forget an interrupted forward, then let the block run alone and whole: what changes, changes together."""
        self.check_usable()
        self.engine.check_open()
        with self.engine.exclusive(), deferred_interrupt():
            yield

    def _settle(self) -> None:
        """Forget a forward whose end nobody reported, and what a torn restore has left."""
        if self._open is not None:
            self.end_forward(completed=False)
        elif self.sequences.length != self.content.length:
            self._clear()

    def _check_watched(self) -> ForwardInputs:
        self.engine.check_open()
        if self._open is None:
            raise UnsafeCall(
                "this forward did not come through the model that tierkv is attached to, so nobody could tell what the cache "
                "holds; call that model itself"
            )
        return self._open

    def _reset_native(self) -> None:
        """Put new native layers in place of the old ones."""
        fresh = DynamicCache(config=self._config)
        for index, layer in enumerate(self.layers):
            if isinstance(layer, TieredLayer):
                continue
            self.layers[index] = fresh.layers[index]
            if getattr(layer, "record_past", False):
                fresh.layers[index].activate_past_recording()
        self._native = [layer for layer in self.layers if not isinstance(layer, TieredLayer)]
