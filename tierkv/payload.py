"""The payload of a stored block: its KV in one canonical order, whatever order memory uses.

    [layer, K | V, kv_head, token, dim], little-endian, all cached layers one after another

So a record can be read by any version and any pool. Bit patterns are moved, not numbers: a NaN keeps its payload.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from tierkv.storage.spill import SAME_SIZE
from tierkv.tier import Tier

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierkv.block_table import Block
    from tierkv.layout import BlockLayout
    from tierkv.stores import Stores

WHOLE: Final = slice(None)


class Piece(NamedTuple):
    """Tokens of a block in memory, on their way into a payload or another block."""

    block: "Block"
    into: slice = WHOLE
    """Where they go."""
    tokens: slice = WHOLE
    """Where they lie in the block."""


def empty_views(layout: "BlockLayout") -> list[torch.Tensor]:
    """Return room for one block outside of any pool: per group K, then V, each ``[layer, kv_head, token, dim]``."""
    views = []
    for group in layout.groups:
        lead = (len(group.members), group.kv_heads, layout.block_size)
        views += [
            torch.empty((*lead, dim), dtype=getattr(torch, layout.dtype)) for dim in (group.key_dim, group.value_dim)
        ]
    return views


def unpack(
    layout: "BlockLayout",
    payload: memoryview,
    views: Sequence[torch.Tensor],
    into: slice = WHOLE,
    tokens: slice = WHOLE,
) -> None:
    """Copy tokens of a payload into a block.

    Args:
        layout: of both.
        payload: ``layout.block_bytes`` bytes.
        views: the block, as ``SlabStore.block_views`` or ``empty_views`` return it; on any device.
        into: which of its tokens.
        tokens: which tokens of the payload, as many.
    """
    for view, part in _parts(layout, payload, views):
        target = view[:, :, into]
        if target.device.type == "cpu":
            np.copyto(target.view(SAME_SIZE[layout.dtype_bytes][0]).numpy(), part[:, :, tokens])
        else:
            source = torch.from_numpy(np.ascontiguousarray(part[:, :, tokens])).view(target.dtype)
            target.copy_(source)
    if views[0].device.type == "cuda":
        torch.cuda.current_stream(views[0].device).synchronize()


def pack(layout: "BlockLayout", stores: "Stores", pieces: "Sequence[Piece]") -> bytearray:
    """Return the payload that pieces of blocks make up, each from the highest tier that holds it.

    Raises:
        RecordError: a block lies on disk only and cannot be read.
    """
    payload = bytearray(layout.block_bytes)
    for piece in pieces:
        for view, part in _parts(layout, memoryview(payload), block_views(layout, stores, piece.block)):
            source = view[:, :, piece.tokens].detach().cpu().view(SAME_SIZE[layout.dtype_bytes][0])
            np.copyto(part[:, :, piece.into], source.numpy())
    return payload


def block_views(layout: "BlockLayout", stores: "Stores", block: "Block") -> list[torch.Tensor]:
    """Return a block as it lies in memory, or a copy of one that lies on disk; see ``empty_views`` for the shapes.

    Raises:
        RecordError: it lies on disk only and cannot be read.
    """
    tier, slot = block.tier, block.slots[block.tier]
    if tier is not Tier.DISK:
        return stores.slab(tier).block_views(slot)
    views = empty_views(layout)
    stores.load_block(slot, views)
    return views


def _parts(
    layout: "BlockLayout", payload: memoryview, views: Sequence[torch.Tensor]
) -> "Iterator[tuple[torch.Tensor, NDArray[np.generic]]]":
    """Yield views of some layers, with the same of the payload: ``[layer, kv_head, token, dim]`` bit patterns each."""
    flat = np.frombuffer(payload, dtype=SAME_SIZE[layout.dtype_bytes][1])
    size = layout.block_size
    group = layout.groups[0]
    if len(layout.groups) == 1 and group.key_dim == group.value_dim:
        both = flat.reshape(len(group.members), 2, group.kv_heads, size, group.key_dim)
        yield views[0], both[:, 0]
        yield views[1], both[:, 1]
        return
    begin = 0
    for layer, (index, member) in enumerate(layout.group_of):
        spec = layout.layers[layer]
        for view, dim in ((views[2 * index], spec.key_dim), (views[2 * index + 1], spec.value_dim)):
            count = spec.kv_heads * size * dim
            shape = (1, spec.kv_heads, size, dim)
            yield view[member : member + 1], flat[begin : begin + count].reshape(shape)
            begin += count
