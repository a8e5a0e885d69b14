"""SlabStore: a pool of slots in memory, on the device or (pinned, where CUDA is) on the host.

One flat tensor for K and one for V per layer group, in the order ``[segment, layer, kv_head, slot in segment, token,
dim]``: neighbouring slots of a segment are one dense ``[tokens, dim]`` matrix per head, so a run is one strided copy.
The end of the flat tensors can be lent as scratch, so that pool and scratch together never exceed the tier's bytes.

Memory is handed out as it is: a slot holds what its last owner left. The gathered path reads only tokens that were
written. Whoever reads whole slots calls ``clear`` first, since a leftover NaN times a weight of zero is still a NaN.
"""

from typing import TYPE_CHECKING, Any

import torch

from tierkv.errors import CapacityError, ClosedError, ConfigError
from tierkv.geometry import PoolGeometry
from tierkv.layout import BlockLayout
from tierkv.storage.base import BlockStore
from tierkv.storage.bits import bits_of
from tierkv.storage.page_faults import fault_in
from tierkv.storage.page_lock import page_locked
from tierkv.tier import Tier

if TYPE_CHECKING:
    import weakref

    from tierkv.storage.bits import Bits
    from tierkv.tier import Run


class SlabStore(BlockStore):
    """Slices in one slab of memory. Reads and writes run on the caller's stream.

    Attributes:
        num_slots: all slots of the slab.
        usable_slots: those that remain while scratch is lent (see ``set_scratch``).
        slots_per_segment: a run never crosses a multiple of this.
    """

    def __init__(
        self, layout: BlockLayout, capacity_bytes: int, *, tier: Tier, device: torch.device, pinned: bool = False
    ) -> None:
        """Allocate the slab.

        Args:
            layout: shape of the blocks.
            capacity_bytes: upper bound of what is allocated. On a CPU pages become resident when first written.
            tier: which tier this is.
            device: where the memory lies.
            pinned: page-lock it, so that copies to a GPU run asynchronously. Only where CUDA is.

        Raises:
            ConfigError: the memory cannot be page-locked, or the device has none left.
        """
        self.layout = layout
        self.tier = tier
        self.device = device
        self.pinned = pinned
        self.geometry = PoolGeometry(layout, capacity_bytes)
        self.slots_per_segment = self.geometry.slots_per_segment
        self.num_slots = self.geometry.num_slots()
        self.usable_slots = self.num_slots
        self._scratch_tokens = 0
        self._faulted_in: set[int] = set()
        self._closed = False
        self._locks: list[weakref.finalize[Any, Any]] = []
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        tokens = self.geometry.total_tokens

        def allocate(elements: int) -> torch.Tensor:
            if pinned:
                tensor, unlock = page_locked(elements, self._dtype, self)
                self._locks.append(unlock)
                return tensor
            try:
                return torch.empty(elements, dtype=self._dtype, device=device)
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    f"{device} has no room for a pool of {capacity_bytes:,} bytes; lower device.capacity"
                ) from error

        # Workers write to it, and outside the caller's inference mode an inference tensor cannot be written to.
        with torch.inference_mode(mode=False):
            self._flat = [
                (
                    allocate(tokens * len(group.members) * group.kv_heads * group.key_dim),
                    allocate(tokens * len(group.members) * group.kv_heads * group.value_dim),
                )
                for group in layout.groups
            ]
        self._pools = [self._shape(group, *flat) for group, flat in enumerate(self._flat)]
        self._bits = [bits_of(pool) for pools in self._pools for pool in pools] if self.on_cpu else []

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
        segment, begin = divmod(
            self._check_run(run, first_token, tokens), self.slots_per_segment * self.layout.block_size
        )
        group, member = self.layout.group_of[layer]
        keys, values = (pool[segment, member].flatten(1, 2)[:, begin : begin + tokens] for pool in self._pools[group])
        return keys, values

    def memory(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tensors that the addresses of ``line`` point into; whoever uses an address keeps them."""
        if self._closed:
            raise ClosedError(f"the {self.tier.label} pool is closed")
        return self._flat[group]

    def line(self, group: int, run: "Run", first_token: int, tokens: int, position: int) -> tuple[int, ...]:
        """Return a line of ``tierkv.kernels.runs.Runs.table`` for tokens of a run, for all layers of a group.

        Args:
            group: layer group.
            run: adjacent slots of one segment.
            first_token: offset into the run.
            tokens: how many.
            position: of the first one in its sequence.

        Raises:
            ValueError: the run leaves its segment or the pool, or the tokens leave the run.
            ClosedError: the store is closed.
        """
        begin = self._check_run(run, first_token, tokens)
        segment, token = divmod(begin, self.slots_per_segment * self.layout.block_size)
        addresses = [
            pool.data_ptr() + (segment * pool.stride(0) + token * pool.stride(4)) * pool.element_size()
            for pool in self._pools[group]
        ]
        keys, values = self._pools[group]
        return (*addresses, keys.stride(1), values.stride(1), keys.stride(2), values.stride(2), tokens, position)

    def write(self, layer: int, run: "Run", keys: torch.Tensor, values: torch.Tensor, first_token: int = 0) -> None:
        """Copy tokens into a run; see ``BlockStore.write``."""
        own_keys, own_values = self._views_like(layer, run, keys, values, first_token)
        own_keys.copy_(keys)
        own_values.copy_(values)

    def read(self, layer: int, run: "Run", keys: torch.Tensor, values: torch.Tensor, first_token: int = 0) -> None:
        """Copy tokens out of a run; see ``BlockStore.read``."""
        own_keys, own_values = self._views_like(layer, run, keys, values, first_token)
        keys.copy_(own_keys)
        values.copy_(own_values)

    def block_views(self, slot: int) -> list[torch.Tensor]:
        """Return the slot's whole block: per group K, then V, each ``[layer, kv_head, token, dim]``."""
        self._check_slots(slot, 1)
        segment, at = divmod(slot, self.slots_per_segment)
        return [pool[segment, :, :, at] for pools in self._pools for pool in pools]

    def block_bits(self, slot: int) -> "list[Bits]":
        """Return ``block_views`` as arrays of bit patterns, at a tenth of the cost. Only where ``on_cpu``."""
        self._check_slots(slot, 1)
        segment, at = divmod(slot, self.slots_per_segment)
        return [bits[segment, :, :, at] for bits in self._bits]

    def fault_in(self, slot: int) -> None:
        """Have the operating system hand out the memory of a slot's segment at once, which is faster than page by page.

        For whoever is about to fill whole segments of plain memory; does nothing for a segment that it was done for, or
        where the system cannot. Any thread.
        """
        segment = slot // self.slots_per_segment
        if segment in self._faulted_in or not self.on_cpu or self.pinned:
            return
        self._faulted_in.add(segment)
        for pools in self._pools:
            for pool in pools:
                one = pool[segment]
                fault_in(one.data_ptr(), one.nbytes)

    @property
    def on_cpu(self) -> bool:
        """Whether the memory can be touched without a GPU."""
        return self.device.type == "cpu"

    def copy_pairs(self, slot: int, other: "SlabStore", other_slot: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return ``(destination, source)`` views that copy this store's block at ``slot`` to ``other``'s.

        Two pairs a layer group (K, V), each all layers of the group at once.
        """
        if other.layout != self.layout:
            raise ValueError("blocks can only be copied between pools of one layout")
        return list(zip(other.block_views(other_slot), self.block_views(slot), strict=True))

    def clear(self, slot: int) -> None:
        """Set a block to zero, for slots whose unwritten positions may be read."""
        for view in self.block_views(slot):
            view.zero_()

    def discard(self, slot: int) -> None:
        """Do nothing: memory is reused as it is; the manager never reads a slot it has not filled."""

    def set_scratch(self, tokens: int) -> int:
        """Lend room for ``tokens`` tokens of one layer at the end of every group; return the slots that remain.

        The caller guarantees that slots from the returned number on are empty; they are refused until the scratch
        shrinks again.

        Raises:
            CapacityError: the whole slab is smaller.
        """
        if tokens > self.geometry.scratch_limit:
            raise CapacityError(f"the {self.tier.label} pool is smaller than scratch for {tokens:,} tokens")
        self._scratch_tokens = tokens
        self.usable_slots = self.geometry.num_slots(tokens)
        return self.usable_slots

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
        """Release the memory once nothing refers to it any more. Idempotent.

        Copies out of and into page-locked memory must be complete.
        """
        self._closed = True
        # Before the memory can go: the driver must not hold pages that belong to somebody else by then.
        for unlock in self._locks:
            unlock()
        self._flat = []
        self._pools = []
        self._bits = []

    def _check_slots(self, slot: int, count: int) -> None:
        if self._closed:
            raise ClosedError(f"the {self.tier.label} pool is closed")
        if count < 1 or slot < 0 or slot + count > self.usable_slots:
            raise ValueError(
                f"slots {slot} to {slot + count - 1} leave the {self.usable_slots} usable ones of the pool"
            )

    def _check_run(self, run: "Run", first_token: int, tokens: int) -> int:
        """Return where the tokens begin, counted in tokens from the first slot of the pool."""
        size, width = self.layout.block_size, self.slots_per_segment
        self._check_slots(run.slot, run.length)
        if run.slot % width + run.length > width:
            raise ValueError(f"{run} leaves its segment of {width} slots")
        if first_token < 0 or first_token + tokens > run.length * size:
            raise ValueError(f"{tokens} tokens from token {first_token} on leave {run} of blocks of {size}")
        return run.slot * size + first_token

    def _views_like(
        self, layer: int, run: "Run", keys: torch.Tensor, values: torch.Tensor, first_token: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pool's views for ``keys`` and ``values``; ``copy_`` alone would broadcast and convert."""
        own_keys, own_values = self.views(layer, run, first_token, keys.shape[1])
        shapes, own_shapes = (keys.shape, values.shape), (own_keys.shape, own_values.shape)
        if shapes != own_shapes:
            wanted, got = ([list(shape) for shape in pair] for pair in (own_shapes, shapes))
            raise ValueError(f"layer {layer} takes K and V of {wanted}, not {got}")
        if keys.dtype != self._dtype or values.dtype != self._dtype:
            raise ValueError(f"the store keeps {self._dtype}, not {keys.dtype} and {values.dtype}")
        return own_keys, own_values
