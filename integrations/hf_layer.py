"""TieredLayer: one layer of a tiered cache, as transformers sees it."""

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin

from tierkv.errors import UnsafeCall
from tierkv.integrations.hf_attention import HANDLE

if TYPE_CHECKING:
    from tierkv.sequences import SequenceBatch


class TieredLayer(CacheLayerMixin):
    """One tiered layer of a ``TieredCache``: it answers questions; the container has the verbs."""

    is_croppable = True
    is_compileable = False

    def __init__(self, sequences: "SequenceBatch", position: int, window: int | None) -> None:
        """Make a layer over the sequences of a cache.

        Args:
            sequences: where the KV lies.
            position: of the layer in the engine's layout.
            window: tokens that a query sees, itself included, or None for full attention.
        """
        # CacheLayerMixin.__init__ would assign keys and values, which are computed here.
        self._sequences = sequences
        self._position = position
        self._window = window
        self.is_sliding = window is not None
        if window is not None:
            self.sliding_window = window
            self._sliding_window_tensor = torch.tensor(window)  # yielded by DynamicCache.__iter__ (5.24)

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether the layer holds tokens."""
        return self._sequences.rows > 0

    @property
    def batch_size(self) -> int:
        """Rows held, -1 while empty (transformers' own convention)."""
        return self._sequences.rows or -1

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        """A copy of the keys ``[rows, kv_heads, length, key_dim]`` that transformers' own layer would hold; slow."""
        return self._read(0)

    @keys.setter
    def keys(self, _: Any) -> None:
        self._refuse()

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        """A copy of the values ``[rows, kv_heads, length, value_dim]`` that transformers' own layer would hold; slow."""
        return self._read(1)

    @values.setter
    def values(self, _: Any) -> None:
        self._refuse()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the tiers exist since the engine was made."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ARG002
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append to this layer and return what attention shall be given; see ``TieredCache.update``, which calls it."""
        sequences, position = self._sequences, self._position
        if sequences.first_seen is None:
            return sequences.append(position, key_states, value_states)
        sequences.append_paged(position, key_states, value_states)
        if not sequences.length:  # nothing but the new tokens, which any attention can read
            sequences.attended(position)
        else:
            kwargs["kwargs"][HANDLE] = self
        return key_states, value_states

    def attend(self, query: torch.Tensor, **how: Any) -> torch.Tensor:
        """Return attention over all tokens of this layer; see ``SequenceBatch.attend``."""
        return self._sequences.attend(self._position, query, **how)

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

    def _refuse(self, *_: Any) -> NoReturn:
        raise UnsafeCall(
            "a tiered layer cannot change alone; call the verb on the cache, which changes all layers at once"
        )

    crop = reset = batch_repeat_interleave = batch_select_indices = _refuse
    reorder_cache = _refuse  # type: ignore[assignment]

    def _read(self, which: int) -> torch.Tensor | None:
        if not self._sequences.length:
            return None
        whole = self._sequences.read(self._position)[which]
        return whole if self._window is None else whole[:, :, -self._window + 1 :]
