"""BlockStore: the contract that every place for KV bytes keeps.

A store holds *slices* (one layer of one block) in numbered *slots*. It knows bytes only: which block lies in which
slot, and whether a slot may be reused, is the tier manager's knowledge. The shared test suite is
``tierkv.testing.contracts.StoreContract``; no store exists without a subclass of it.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import torch

    from tierkv.layout import BlockLayout
    from tierkv.tier import Run, Tier


class BlockStore(ABC):
    """Slices in slots. ``layer`` is always a position in ``layout.layers``."""

    tier: "Tier"
    layout: "BlockLayout"

    @abstractmethod
    def write(self, layer: int, run: "Run", keys: "torch.Tensor", values: "torch.Tensor", first_token: int = 0) -> None:
        """Write tokens into the slots of ``run``, beginning ``first_token`` tokens into its first slot.

        Args:
            layer: position in ``layout.layers``.
            run: adjacent slots; the tokens must fit, ``first_token + tokens <= run.length * block_size``.
            keys: ``[kv_heads, tokens, key_dim]`` of the layout's dtype; may be a strided view. The store does not
                keep a reference to it after returning.
            values: ``[kv_heads, tokens, value_dim]``.
            first_token: offset into the run. A store that only takes whole slices (the disk) raises ValueError
                unless it is 0 and the tokens fill the run.

        May block for room in a bounded queue. A store with a background writer makes the slice readable at once.

        Raises:
            StoreFull: nothing was accepted; the caller still owns the only copy.
        """

    @abstractmethod
    def read(self, layer: int, run: "Run", keys: "torch.Tensor", values: "torch.Tensor", first_token: int = 0) -> None:
        """Fill ``keys`` and ``values`` from the slots of ``run``, beginning ``first_token`` tokens into the first.

        Args:
            keys: ``[kv_heads, tokens, key_dim]``, may be a strided view; filled in place, byte for byte.
            values: ``[kv_heads, tokens, value_dim]``.

        Thread-safe against other reads and against writes to other slots.

        Raises:
            RecordError: a slice is missing or damaged; what was filled so far must not be used.
        """

    @abstractmethod
    def discard(self, slot: int) -> None:
        """Forget the slot's slices. Discarding an empty slot is allowed."""

    @property
    @abstractmethod
    def allocated_bytes(self) -> int:
        """Bytes this store occupies now (memory it allocated, or file bytes on disk), bookkeeping included."""

    @abstractmethod
    def close(self) -> None:
        """Release memory, files and threads. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
