"""The payload of a stored block: its KV in one canonical order, whatever order memory uses.

    [layer, K | V, kv_head, token, dim], little-endian, all cached layers one after another

So a record can be read by any version and any pool. Bit patterns are moved, not numbers: a NaN keeps its payload.
"""

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from tierkv.storage.bits import SAME_SIZE, bits_of
from tierkv.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierkv.block_table import Block
    from tierkv.layout import BlockLayout
    from tierkv.storage.bits import Bits
    from tierkv.stores import Stores

WHOLE: Final = slice(None)


class Piece(NamedTuple):
    """Tokens of a block in memory, on their way into a payload or another block."""

    block: "Block"
    into: slice = WHOLE
    """Where they go."""
    tokens: slice = WHOLE
    """Where they lie in the block."""


def empty_block(layout: "BlockLayout") -> "list[Bits]":
    """Return room for one block outside of any pool: per group K, then V, each ``[layer, kv_head, token, dim]``."""
    bits: list[Bits] = []
    for group in layout.groups:
        lead = (len(group.members), group.kv_heads, layout.block_size)
        dtype = SAME_SIZE[layout.dtype_bytes][1]
        bits += [np.empty((*lead, dim), dtype) for dim in (group.key_dim, group.value_dim)]
    return bits


def block_of(layout: "BlockLayout", stores: "Stores", block: "Block") -> "list[Bits]":
    """Return a block as it lies in the CPU's memory, or a copy of one that lies elsewhere; shapes as in ``empty_block``.

    Raises:
        RecordError: it lies on disk only and cannot be read.
    """
    tier, slot = block.tier, block.slots[block.tier]
    if tier is Tier.DISK:
        bits = empty_block(layout)
        stores.load_block(slot, _tensors(layout, bits))
        return bits
    slab = stores.slab(tier)
    return slab.block_bits(slot) if slab.on_cpu else [bits_of(view.cpu()) for view in slab.block_views(slot)]


def put_block(layout: "BlockLayout", stores: "Stores", tier: Tier, slot: int, bits: "list[Bits]") -> None:
    """Copy a block from the CPU's memory to its slot in a tier. Returns when the bytes are there.

    Raises:
        StoreFull: the disk tier took no more.
    """
    if tier is Tier.DISK:
        stores.save_block(_tensors(layout, bits), slot)
        return
    views = stores.slab(tier).block_views(slot)
    for view, source in zip(views, _tensors(layout, bits), strict=True):
        view.copy_(source)
    if views[0].device.type == "cuda":
        torch.cuda.current_stream(views[0].device).synchronize()


def unpack(
    layout: "BlockLayout",
    payload: memoryview,
    bits: "Sequence[Bits]",
    into: slice = WHOLE,
    tokens: slice = WHOLE,
) -> None:
    """Copy tokens of a payload into a block.

    Args:
        layout: of both.
        payload: ``layout.block_bytes`` bytes.
        bits: the block, as ``SlabStore.block_bits`` or ``empty_block`` return it.
        into: which of its tokens.
        tokens: which tokens of the payload, as many.
    """
    for own, part in _parts(layout, payload, bits):
        np.copyto(own[:, :, into], part[:, :, tokens])


def pack(layout: "BlockLayout", stores: "Stores", pieces: "Sequence[Piece]") -> bytearray:
    """Return the payload that pieces of blocks make up, each from the highest tier that holds it.

    Raises:
        RecordError: a block lies on disk only and cannot be read.
    """
    payload = bytearray(layout.block_bytes)
    for piece in pieces:
        for own, part in _parts(layout, memoryview(payload), block_of(layout, stores, piece.block)):
            np.copyto(part[:, :, piece.into], own[:, :, piece.tokens])
    return payload


def _tensors(layout: "BlockLayout", bits: "Sequence[Bits]") -> list[torch.Tensor]:
    return [torch.from_numpy(one).view(getattr(torch, layout.dtype)) for one in bits]


def _parts(layout: "BlockLayout", payload: memoryview, bits: "Sequence[Bits]") -> "Iterator[tuple[Bits, Bits]]":
    """Yield some layers of a block, with the same of the payload: ``[layer, kv_head, token, dim]`` each."""
    flat = np.frombuffer(payload, dtype=SAME_SIZE[layout.dtype_bytes][1])
    size = layout.block_size
    group = layout.groups[0]
    if len(layout.groups) == 1 and group.key_dim == group.value_dim:
        both = flat.reshape(len(group.members), 2, group.kv_heads, size, group.key_dim)
        yield bits[0], both[:, 0]
        yield bits[1], both[:, 1]
        return
    begin = 0
    for layer, (index, member) in enumerate(layout.group_of):
        spec = layout.layers[layer]
        for own, dim in ((bits[2 * index], spec.key_dim), (bits[2 * index + 1], spec.value_dim)):
            count = spec.kv_heads * size * dim
            shape = (1, spec.kv_heads, size, dim)
            yield own[member : member + 1], flat[begin : begin + count].reshape(shape)
            begin += count
