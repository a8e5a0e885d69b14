"""LayerReader: the full K and V of one layer, with the cold parts fetched layers ahead. The gathered read path.

While a layer computes, the cold tokens of the next layers are copied straight to their final places in a ring of scratch
buffers; when a layer's turn comes, its resident tokens and the new ones are added and the buffer is the tensor that
attention reads. Nothing is copied twice, and the result is laid out exactly as ``torch.cat`` would have laid it out, so
attention gives bit-identical logits.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tierkv.block_table import Extent
from tierkv.fetch import Fetcher, Piece, clip
from tierkv.layout import BlockLayout
from tierkv.moves import Step
from tierkv.scratch import Scratch
from tierkv.tier import Tier

if TYPE_CHECKING:
    import torch

    from tierkv.storage.slab import SlabStore
    from tierkv.stores import Stores


class LayerReader:
    """Gathers layers of one step at a time. Called by the thread that runs the model."""

    def __init__(self, layout: BlockLayout, device: "SlabStore", scratch: Scratch, fetcher: Fetcher) -> None:
        """Make a reader over an engine's stores.

        Args:
            layout: the block layout of all stores.
            device: the device pool.
            scratch: the buffers in which layers are assembled.
            fetcher: brings cold tokens into them.
        """
        self._layout = layout
        self._device = device
        self._scratch = scratch
        self._fetcher = fetcher
        self._step: Step | None = None
        self._next = 0  # the first layer whose fetch was not submitted yet

    def begin(self, step: Step) -> None:
        """Start fetching the cold tokens of the first layers of ``step``."""
        self._step = step
        self._next = 0
        self._fetch_through(self._scratch.num_buffers - 1)

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
            for extent in clip(extents, first, step.start):
                if extent.tier is Tier.DEVICE:
                    at = slice(extent.start - first, extent.stop - first)
                    self._device.read(
                        layer, extent.run, all_keys[row, :, at], all_values[row, :, at], extent.first_token
                    )
        all_keys[:, :, past:].copy_(keys)
        all_values[:, :, past:].copy_(values)
        self._fetcher.order(layer)
        # Every earlier layer's attention has been enqueued by now, so their buffers may be filled again.
        self._fetch_through(layer + self._scratch.num_buffers - 1)
        return all_keys, all_values

    def end(self, step: Step) -> None:
        """Wait for fetches of ``step`` that nobody collected; needed before its slots may be given up.

        Raises:
            TransferTimeout: one did not end in time: its slots are still being read. ``end`` can be tried again.
        """
        if self._step is step:
            self._fetcher.settle()
            self._step = None

    def _first_token(self, layer: int) -> int:
        assert self._step is not None
        window = self._layout.layers[layer].window
        return 0 if window is None else max(0, self._step.start - window + 1)

    def _buffer(self, layer: int, rows: int) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return the K and V views of the layer's scratch buffer, shaped for this step."""
        assert self._step is not None
        spec = self._layout.layers[layer]
        total = self._step.stop - self._first_token(layer)

        def view(flat: "torch.Tensor", dim: int) -> "torch.Tensor":
            return flat[: rows * spec.kv_heads * total * dim].view(rows, spec.kv_heads, total, dim)

        flat_keys, flat_values = self._scratch.buffer(layer, self._ring_index(layer))
        return view(flat_keys, spec.key_dim), view(flat_values, spec.value_dim)

    def _ring_index(self, layer: int) -> int:
        return self._layout.group_of[layer][1]

    def _fetch_through(self, last: int) -> None:
        """Submit the fetches of all layers up to ``last`` that were not submitted yet."""
        end = min(last + 1, len(self._layout.layers))
        while self._next < end:
            layer = self._next
            self._next += 1
            self._fetcher.submit(layer, layer, self._ring_index(layer), self._cold_pieces(layer))

    def _cold_pieces(self, layer: int) -> list[Piece]:
        step = self._step
        assert step is not None
        first = self._first_token(layer)
        pieces = []
        for row, extents in enumerate(step.reads):
            cold = [extent for extent in clip(extents, first, step.start) if extent.tier is not Tier.DEVICE]
            if not cold:
                continue
            all_keys, all_values = self._buffer(layer, len(step.tables))
            for extent in cold:
                at = slice(extent.start - first, extent.stop - first)
                pieces.append(Piece(extent, all_keys[row, :, at], all_values[row, :, at]))
        return pieces


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
    keys = torch.empty((len(rows), spec.kv_heads, length, spec.key_dim), dtype=dtype, device="cpu")
    values = torch.empty((len(rows), spec.kv_heads, length, spec.value_dim), dtype=dtype, device="cpu")
    for row, extents in enumerate(rows):
        for extent in extents:
            at = slice(extent.start, extent.stop)
            store = stores.disk_store if extent.tier is Tier.DISK else stores.slab(extent.tier)
            store.read(layer, extent.run, keys[row, :, at], values[row, :, at], extent.first_token)
    return keys.to(stores.device.device), values.to(stores.device.device)
