"""SlabStore: a pool of slots in memory, on the device or (pinned, where CUDA is) on the host.

One flat tensor for K and one for V per layer group, in the order ``[segment, layer, kv_head, slot in segment, token,
dim]``: neighbouring slots of a segment are one dense ``[tokens, dim]`` matrix per head, so a run is one strided copy.
The end of the flat tensors can be lent as scratch, so that pool and scratch together never exceed the tier's bytes.
"""

from typing import TYPE_CHECKING

import torch

from tierkv.errors import ClosedError
from tierkv.geometry import PoolGeometry
from tierkv.layout import BlockLayout
from tierkv.storage.base import BlockStore
from tierkv.tier import Tier

if TYPE_CHECKING:
    from tierkv.tier import Run


class SlabStore(BlockStore):
    """Slices in one slab of memory. Reads and writes run on the caller's stream."""

    def __init__(
        self, layout: BlockLayout, capacity_bytes: int, *, tier: Tier, device: torch.device, pinned: bool = False
    ) -> None:
        """Allocate the slab.

        Args:
            layout: shape of the blocks.
            capacity_bytes: upper bound of what is allocated. On a CPU pages become resident when first written.
            tier: which tier this is.
            device: where the memory lies.
            pinned: page-lock it, so that copies to a GPU run asynchronously.
        """
        self.layout = layout
        self.tier = tier
        self.device = device
        self.pinned = pinned
        self.geometry = PoolGeometry(layout, capacity_bytes)
        self.slots_per_segment = self.geometry.slots_per_segment
        self.num_slots = self.geometry.num_slots()
        self._scratch_tokens = 0
        self._closed = False
        dtype = getattr(torch, layout.dtype)
        tokens = self.geometry.total_tokens
        self._flat = [
            tuple(
                torch.empty(
                    tokens * len(group.members) * group.kv_heads * dim, dtype=dtype, device=device, pin_memory=pinned
                )
                for dim in (group.key_dim, group.value_dim)
            )
            for group in layout.groups
        ]
        self._pools = [self._shape(group, *flat) for group, flat in enumerate(self._flat)]

    def _shape(self, group: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """View flat K and V as ``[segment, layer, kv_head, slot, token, dim]``."""
        spec = self.layout.groups[group]
        segments = self.num_slots // self.slots_per_segment
        lead = (segments, len(spec.members), spec.kv_heads, self.slots_per_segment, self.layout.block_size)

        def shape(flat: torch.Tensor, dim: int) -> torch.Tensor:
            full = (*lead, dim)
            return flat[: torch.Size(full).numel()].view(full)

        return shape(keys, spec.key_dim), shape(values, spec.value_dim)

    def views(self, layer: int, run: "Run", first_token: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K ``[kv_heads, tokens, key_dim]`` and V ``[kv_heads, tokens, value_dim]`` of a run, without a copy.

        Args:
            layer: position in the layout.
            run: adjacent slots of one segment.
            first_token: offset into the run.
            tokens: how many.

        Raises:
            ValueError: the run leaves its segment or the pool, or the tokens leave the run.
            ClosedError: the store is closed.
        """
        if self._closed:
            raise ClosedError(f"the {self.tier.label} pool is closed")
        size = self.layout.block_size
        segment, slot = divmod(run.slot, self.slots_per_segment)
        if run.count < 1 or slot + run.count > self.slots_per_segment or not 0 <= run.slot < self.num_slots:
            raise ValueError(f"{run} leaves its segment of {self.slots_per_segment} slots or the {self.num_slots} of the pool")
        if first_token < 0 or first_token + tokens > run.count * size:
            raise ValueError(f"tokens {first_token} to {first_token + tokens} leave a run of {run.count} blocks of {size}")
        group, member = self.layout.group_of[layer]
        begin = slot * size + first_token
        keys, values = (pool[segment, member].flatten(1, 2)[:, begin : begin + tokens] for pool in self._pools[group])
        return keys, values

    def write(
        self, layer: int, run: "Run", keys: torch.Tensor, values: torch.Tensor, first_token: int = 0
    ) -> None:
        """Copy tokens into a run; see ``BlockStore.write``."""
        own_keys, own_values = self.views(layer, run, first_token, keys.shape[1])
        own_keys.copy_(keys)
        own_values.copy_(values)

    def read(self, layer: int, run: "Run", keys: torch.Tensor, values: torch.Tensor, first_token: int = 0) -> None:
        """Copy tokens out of a run; see ``BlockStore.read``."""
        own_keys, own_values = self.views(layer, run, first_token, keys.shape[1])
        keys.copy_(own_keys)
        values.copy_(own_values)

    def block_views(self, slot: int) -> list[torch.Tensor]:
        """Return the slot's whole block: per group K, then V, each ``[layer, kv_head, token, dim]``."""
        segment, at = divmod(slot, self.slots_per_segment)
        return [pool[segment, :, :, at] for pools in self._pools for pool in pools]

    @property
    def on_cpu(self) -> bool:
        """Whether the memory can be touched without a GPU."""
        return self.device.type == "cpu"

    def copy_pairs(self, slot: int, other: "SlabStore", other_slot: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return ``(destination, source)`` views that copy this store's block at ``slot`` to ``other``'s."""
        return list(zip(other.block_views(other_slot), self.block_views(slot), strict=True))

    def clear(self, slot: int) -> None:
        """Set a block to zero, for slots whose unwritten positions may be read."""
        for view in self.block_views(slot):
            view.zero_()

    def discard(self, slot: int) -> None:
        """Do nothing: memory is reused as it is; the manager never reads a slot it has not filled."""

    def set_scratch(self, tokens: int) -> int:
        """Lend room for ``tokens`` tokens of one layer at the end of every group; return the slots that remain.

        The caller guarantees that slots from the returned number on are empty.
        """
        self._scratch_tokens = tokens
        return self.geometry.num_slots(tokens)

    def scratch_tensors(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the flat K and V scratch of a group: room for the tokens of ``set_scratch``, of one layer each."""
        spec = self.layout.groups[group]
        keys, values = self._flat[group]
        tokens = self._scratch_tokens * spec.kv_heads
        return keys[keys.numel() - tokens * spec.key_dim :], values[values.numel() - tokens * spec.value_dim :]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the slab, scratch included; constant until closed."""
        return 0 if self._closed else self.geometry.allocated_bytes

    def close(self) -> None:
        """Release the memory once nothing refers to it any more. Idempotent."""
        self._closed = True
        self._flat = []
        self._pools = []
