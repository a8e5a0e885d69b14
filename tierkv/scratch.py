"""Scratch: the memory at the end of the pools that readers fill with cold tokens, as a ring of equal buffers."""

from typing import TYPE_CHECKING

from tierkv.capacity import ScratchPlan
from tierkv.layout import BlockLayout
from tierkv.tier import Tier

if TYPE_CHECKING:
    import torch

    from tierkv.stores import Stores


class Scratch:
    """Buffers of ``buffer_tokens`` tokens of one layer each, lent by the device pool.

    Where a GPU and the disk meet in the host pool, that lends as many beside them: whoever may fill a buffer of the
    device may fill the same one there. Empty until ``divide``.
    """

    def __init__(self, layout: BlockLayout, stores: "Stores") -> None:
        """Make the scratch of an engine's stores."""
        self.num_buffers = 1
        self.buffer_tokens = 0
        self._layout = layout
        self._stores = stores

    @property
    def tokens(self) -> int:
        """Tokens of one layer that all buffers together hold."""
        return self.num_buffers * self.buffer_tokens

    def holds(self, tokens: int) -> bool:
        """Return whether a buffer has room for ``tokens`` tokens, summed over rows."""
        return tokens <= self.buffer_tokens

    def divide(self, plan: ScratchPlan) -> None:
        """Lend what ``plan`` says. No buffer may be in use, and the slots that it takes must be empty."""
        self._stores.set_scratch(plan.scratch_tokens)
        self.num_buffers, self.buffer_tokens = plan.num_buffers, plan.buffer_tokens

    def buffer(self, layer: int, index: int, tier: Tier = Tier.DEVICE) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return the flat K and V of a buffer of the layer's group.

        Args:
            layer: position in the layout.
            index: which buffer; counted round the ring.
            tier: DEVICE, or HOST for the pinned one that disk reads pass through.
        """
        spec = self._layout.layers[layer]
        group, _ = self._layout.group_of[layer]
        begin = index % self.num_buffers * self.buffer_tokens * spec.kv_heads
        end = begin + self.buffer_tokens * spec.kv_heads
        keys, values = self._stores.slab(tier).scratch_tensors(group)
        return keys[begin * spec.key_dim : end * spec.key_dim], values[begin * spec.value_dim : end * spec.value_dim]

    def pieces(
        self, layer: int, index: int, tokens: list[int], tier: Tier = Tier.DEVICE
    ) -> "list[tuple[torch.Tensor, torch.Tensor]]":
        """Return dense K ``[kv_heads, n, key_dim]`` and V ``[kv_heads, n, value_dim]`` for each ``n`` of ``tokens``.

        They lie one behind the other in the buffer.
        """
        spec = self._layout.layers[layer]
        flat = self.buffer(layer, index, tier)
        views, begin = [], 0
        for count in tokens:
            keys, values = (
                part[begin * spec.kv_heads * dim : (begin + count) * spec.kv_heads * dim].view(
                    spec.kv_heads, count, dim
                )
                for part, dim in zip(flat, (spec.key_dim, spec.value_dim), strict=True)
            )
            views.append((keys, values))
            begin += count
        return views
