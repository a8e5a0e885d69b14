"""LayerReader: the full K and V of one layer, with the cold parts fetched layers ahead.

The reader owns a ring of scratch buffers in the device tier. While a layer computes, the cold tokens of the next layers
are copied straight to their final places in their buffers; when a layer's turn comes, its resident tokens and the new
ones are added and the buffer is the tensor that attention reads. Nothing is copied twice, and the result is laid out
exactly as ``torch.cat`` would have laid it out, so attention gives bit-identical logits.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierkv.block_table import Extent
from tierkv.interrupts import deferred_interrupt
from tierkv.layout import BlockLayout
from tierkv.moves import Step
from tierkv.tier import Run, Tier, Wire
from tierkv.transfer import Copy, Ticket, TransferEngine

if TYPE_CHECKING:
    import torch

    from tierkv.stores import Stores


@dataclass(slots=True)
class _DiskRead:
    """Part of a layer that lies on disk, where in the scratch it belongs, and the pinned memory it passes through."""

    layer: int
    extent: Extent
    keys: "torch.Tensor"
    values: "torch.Tensor"
    through: "tuple[torch.Tensor, torch.Tensor] | None" = None


class LayerReader:
    """Gathers layers of one step at a time. Called by the thread that runs the model."""

    def __init__(
        self,
        layout: BlockLayout,
        stores: "Stores",
        transfers: TransferEngine,
        count_copies: Callable[[Sequence[Copy]], None],
        num_readers: int = 1,
    ) -> None:
        """Make a reader over an engine's stores.

        Args:
            layout: the block layout of all stores.
            stores: the device pool, whose tail is the scratch, and the stores below it.
            transfers: runs the fetches.
            count_copies: told of every batch of copies that is submitted.
            num_readers: disk reads of one layer that run at the same time.
        """
        self.stall_seconds = 0.0
        self._layout = layout
        self._stores = stores
        self._device = stores.device
        self._transfers = transfers
        self._count_copies = count_copies
        self._num_readers = num_readers
        self._num_buffers = 1
        self._buffer_tokens = 0
        self._step: Step | None = None
        self._fetched: dict[int, Ticket | None] = {}  # None: nothing of the layer is cold

    @property
    def scratch_tokens(self) -> int:
        """Tokens of one layer that all scratch buffers together hold."""
        return self._num_buffers * self._buffer_tokens

    def holds(self, tokens: int) -> bool:
        """Return whether a scratch buffer has room for ``tokens`` tokens, summed over rows."""
        return tokens <= self._buffer_tokens

    def use_buffers(self, num_buffers: int, buffer_tokens: int) -> None:
        """Divide the scratch of the pools into ``num_buffers`` buffers of ``buffer_tokens`` tokens."""
        self._num_buffers = num_buffers
        self._buffer_tokens = buffer_tokens

    def begin(self, step: Step) -> None:
        """Start fetching the cold tokens of the first layers of ``step``."""
        self._step = step
        self._fetched = {}
        self._fetch_through(self._num_buffers - 1)

    def gather(self, layer: int, keys: "torch.Tensor", values: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """Return all K and V of a layer, past and new.

        Args:
            layer: position in the layout; each layer of a step once, in order.
            keys: the new tokens' keys, ``[rows, kv_heads, tokens, key_dim]``.
            values: ``[rows, kv_heads, tokens, value_dim]``.

        Returns:
            Contiguous K ``[rows, kv_heads, total, key_dim]`` and V ``[rows, kv_heads, total, value_dim]``. They are
            scratch: overwritten when a later layer or step needs the buffer, never before this layer's attention,
            enqueued on the caller's stream, has read them. A windowed layer returns its last ``window - 1`` past
            tokens.

        Raises:
            RecordError: a cold slice cannot be read back.
            TransferTimeout: a fetch did not finish in time.
        """
        step = self._step
        assert step is not None, "gather outside a step"
        self._fetch_through(layer)
        all_keys, all_values = self._buffer(layer, keys.shape[0])
        first = self._first_token(layer)
        past = step.start - first
        for row, extents in enumerate(step.reads):
            for extent in _clip(extents, first, step.start):
                if extent.tier is Tier.DEVICE:
                    at = slice(extent.start - first, extent.stop - first)
                    self._device.read(
                        layer, extent.run, all_keys[row, :, at], all_values[row, :, at], extent.first_token
                    )
        all_keys[:, :, past:].copy_(keys)
        all_values[:, :, past:].copy_(values)
        self._await(layer)
        # Every earlier layer's attention has been enqueued by now, so their buffers may be filled again.
        self._fetch_through(layer + self._num_buffers - 1)
        return all_keys, all_values

    def end(self, step: Step) -> None:
        """Wait for fetches of ``step`` that nobody collected; needed before its slots may be given up.

        Raises:
            TransferTimeout: one did not end in time: its slots are still being read. ``end`` can be tried again.
        """
        if self._step is not step:
            return
        for ticket in filter(None, self._fetched.values()):
            self._transfers.settle(ticket)
        self._fetched, self._step = {}, None

    def _first_token(self, layer: int) -> int:
        assert self._step is not None
        window = self._layout.layers[layer].window
        return 0 if window is None else max(0, self._step.start - window + 1)

    def _buffer(self, layer: int, rows: int) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return the K and V views of the layer's scratch buffer, shaped for this step."""
        assert self._step is not None
        spec = self._layout.layers[layer]
        group, _ = self._layout.group_of[layer]
        total = self._step.stop - self._first_token(layer)

        def view(flat: "torch.Tensor", dim: int) -> "torch.Tensor":
            begin = self._ring_offset(layer) * spec.kv_heads * dim
            size = rows * spec.kv_heads * total * dim
            return flat[begin : begin + size].view(rows, spec.kv_heads, total, dim)

        flat_keys, flat_values = self._device.scratch_tensors(group)
        return view(flat_keys, spec.key_dim), view(flat_values, spec.value_dim)

    def _ring_offset(self, layer: int) -> int:
        """Return where the layer's buffer begins, in tokens of one layer."""
        return self._layout.group_of[layer][1] % self._num_buffers * self._buffer_tokens

    def _fetch_through(self, last: int) -> None:
        """Submit the fetches of all layers up to ``last`` that were not submitted yet."""
        begin = max(self._fetched, default=-1) + 1
        for layer in range(begin, min(last, len(self._layout.layers) - 1) + 1):
            copies = self._cold_copies(layer)
            if not copies:
                self._fetched[layer] = None
                continue
            with deferred_interrupt():  # a copy under way that nobody knows of could outlive its slots
                self._fetched[layer] = self._transfers.submit(copies)
            self._count_copies(copies)

    def _cold_copies(self, layer: int) -> list[Copy]:
        step = self._step
        assert step is not None
        first = self._first_token(layer)
        copies: list[Copy] = []
        reads: list[_DiskRead] = []
        for row, extents in enumerate(step.reads):
            cold = [extent for extent in _clip(extents, first, step.start) if extent.tier is not Tier.DEVICE]
            if not cold:
                continue
            all_keys, all_values = self._buffer(layer, len(step.tables))
            for extent in cold:
                at = slice(extent.start - first, extent.stop - first)
                keys, values = all_keys[row, :, at], all_values[row, :, at]
                if extent.tier is Tier.HOST:
                    pool = self._stores.slab(Tier.HOST)
                    sources = pool.views(layer, extent.run, extent.first_token, keys.shape[1])
                    num_bytes = keys.nbytes + values.nbytes
                    copies.append(
                        Copy(Wire(Tier.HOST, Tier.DEVICE), num_bytes, list(zip((keys, values), sources, strict=True)))
                    )
                else:
                    reads.append(_DiskRead(layer, extent, keys, values))
        if self._stores.bounce:
            self._bounce(layer, reads)
        share = -(-len(reads) // self._num_readers)  # spread over as many copies as there are readers
        return copies + [self._disk_copy(reads[begin : begin + share]) for begin in range(0, len(reads), share or 1)]

    def _bounce(self, layer: int, reads: "Sequence[_DiskRead]") -> None:
        """Let the reads of a layer pass through its buffer in the host pool, one packed behind the other."""
        begin = self._ring_offset(layer)
        group, _ = self._layout.group_of[layer]
        scratch = self._stores.slab(Tier.HOST).scratch_tensors(group)
        for read in reads:
            heads, tokens, _ = read.keys.shape
            keys, values = (
                flat[begin * heads * dim : (begin + tokens) * heads * dim].view(heads, tokens, dim)
                for flat, dim in zip(scratch, (read.keys.shape[2], read.values.shape[2]), strict=True)
            )
            read.through = keys, values
            begin += tokens

    def _disk_copy(self, reads: "Sequence[_DiskRead]") -> Copy:
        store = self._stores.disk_store
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for read in reads:
            if read.through:
                pairs += zip((read.keys, read.values), read.through, strict=True)

        def load() -> None:
            for read in reads:
                keys, values = read.through or (read.keys, read.values)
                store.read(read.layer, read.extent.run, keys, values, read.extent.first_token)

        num_bytes = sum(read.keys.nbytes + read.values.nbytes for read in reads)
        return Copy(Wire(Tier.DISK, Tier.DEVICE), num_bytes, pairs, load=load)

    def _await(self, layer: int) -> None:
        ticket = self._fetched[layer]
        if ticket is None:
            return
        began = time.perf_counter()
        self._transfers.order(ticket)
        self.stall_seconds += time.perf_counter() - began


def _clip(extents: Sequence[Extent], start: int, stop: int) -> Sequence[Extent]:
    """Return the parts of ``extents`` that lie between the positions ``start`` and ``stop``."""
    if not extents or (extents[0].start >= start and extents[-1].stop <= stop):
        return extents
    clipped = []
    for extent in extents:
        begin, end = max(extent.start, start), min(extent.stop, stop)
        if begin < end:
            first = extent.first_token + begin - extent.start
            clipped.append(Extent(extent.tier, Run(*extent.run), first, begin, end))
    return clipped


def read_committed(
    layout: BlockLayout, stores: "Stores", rows: Sequence[Sequence[Extent]], layer: int
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Return fresh CPU-or-device tensors with all committed K and V of a layer. Blocks; for inspection only.

    Args:
        layout: the block layout.
        stores: where the blocks lie.
        rows: per row, the extents of all its tokens.
        layer: position in the layout.

    Returns:
        K ``[rows, kv_heads, length, key_dim]`` and V ``[rows, kv_heads, length, value_dim]`` on the device.
    """
    import torch

    spec = layout.layers[layer]
    length = rows[0][-1].stop if rows and rows[0] else 0
    dtype = getattr(torch, layout.dtype)
    keys = torch.empty((len(rows), spec.kv_heads, length, spec.key_dim), dtype=dtype)
    values = torch.empty((len(rows), spec.kv_heads, length, spec.value_dim), dtype=dtype)
    for row, extents in enumerate(rows):
        for extent in extents:
            at = slice(extent.start, extent.stop)
            store = stores.disk_store if extent.tier is Tier.DISK else stores.slab(extent.tier)
            store.read(layer, extent.run, keys[row, :, at], values[row, :, at], extent.first_token)
    return keys.to(stores.device.device), values.to(stores.device.device)
