"""Pack whole blocks for a move between tiers on CUDA: from a pool's slots to one contiguous buffer, and back.

A block's layers and heads lie apart in a pool. Packed, several blocks cross the bus as one contiguous copy.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from tierkv.kernels.triton_launch import BITS_OF_SIZE, Launch, check_dense, check_device, require

# Numbers that a program copies; 4 KiB of bfloat16.
MOST_TILE = 2048


@triton.jit(do_not_specialize=["slots_per_segment"])
def _copy_blocks(
    pool: tl.tensor,
    slots: tl.tensor,
    staging: tl.tensor,
    slots_per_segment: tl.tensor,
    segment_stride: tl.tensor,
    layer_stride: tl.tensor,
    head_stride: tl.tensor,
    slot_stride: tl.tensor,
    heads: tl.constexpr,
    piece: tl.constexpr,
    tile: tl.constexpr,
    into_pool: tl.constexpr,
) -> None:
    """Copy a tile of one piece: the tokens of one head of one layer of one block, which lie densely."""
    at = tl.program_id(0) * tile + tl.arange(0, tile)
    layer = tl.program_id(1).to(tl.int64) // heads
    head = tl.program_id(1).to(tl.int64) % heads
    block = tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + block)
    pool += slot // slots_per_segment * segment_stride + slot % slots_per_segment * slot_stride
    pool += layer * layer_stride + head * head_stride
    staging += (block * tl.num_programs(1) + tl.program_id(1)) * piece
    if into_pool:
        tl.store(pool + at, tl.load(staging + at, mask=at < piece), mask=at < piece)
    else:
        tl.store(staging + at, tl.load(pool + at, mask=at < piece), mask=at < piece)


def pack_blocks(pool: torch.Tensor, slots: Sequence[int], staging: torch.Tensor) -> None:
    """Copy whole blocks, all their layers, out of a pool into a contiguous buffer, in one launch.

    Args:
        pool: K or V of a group, ``[segment, layer, kv_head, slot in segment, token, dim]``; token and dim lie densely.
        slots: of the blocks, counted over all segments; not empty.
        staging: filled; ``[blocks, layer, kv_head, token, dim]``, contiguous, the pool's dtype and device.

    Raises:
        ValueError: an argument that the kernel cannot take.
    """
    check_device(_copy_blocks, pool.device)
    plan(pool, slots, staging, into_pool=False).run()


def unpack_blocks(staging: torch.Tensor, slots: Sequence[int], pool: torch.Tensor) -> None:
    """Copy whole blocks from a contiguous buffer into slots of a pool; the other direction of ``pack_blocks``.

    Raises:
        ValueError: an argument that the kernel cannot take; also a slot named twice.
    """
    check_device(_copy_blocks, pool.device)
    require(len(set(slots)) == len(slots), f"a slot takes one block, and these name one twice: {list(slots)}")
    plan(pool, slots, staging, into_pool=True).run()


def plan(pool: torch.Tensor, slots: Sequence[int], staging: torch.Tensor, *, into_pool: bool) -> Launch:
    """Check the arguments of ``pack_blocks`` or ``unpack_blocks`` and return the launch."""
    require(pool.ndim == 6, f"pool must be [segment, layer, kv_head, slot, token, dim], not {list(pool.shape)}")
    segments, layers, heads, slots_per_segment, tokens, dim = pool.shape
    require(
        pool.stride(5) == 1 and pool.stride(4) == dim, f"token and dim of pool must be dense, not {pool.stride()[4:]}"
    )
    check_dense("staging", staging, (len(slots), layers, heads, tokens, dim), pool.dtype, pool.device)
    require(staging.is_contiguous(), "staging must be contiguous")
    wrong = [slot for slot in slots if not 0 <= slot < segments * slots_per_segment]
    require(not wrong, f"slots must be 0 to {segments * slots_per_segment - 1}, not {wrong}")
    require(pool.dtype.itemsize in BITS_OF_SIZE, f"numbers of 1, 2, 4 or 8 bytes can be copied, not {pool.dtype}")
    bits = BITS_OF_SIZE[pool.dtype.itemsize]
    piece = tokens * dim
    tile = min(MOST_TILE, triton.next_power_of_2(piece))
    arguments = {
        "pool": pool.view(bits),
        # Made on the host and sent without a wait: the driver copies so few bytes before it returns.
        "slots": torch.tensor(slots, dtype=torch.int64).to(pool.device, non_blocking=True),
        "staging": staging.view(bits),
        "slots_per_segment": slots_per_segment,
        "segment_stride": pool.stride(0),
        "layer_stride": pool.stride(1),
        "head_stride": pool.stride(2),
        "slot_stride": pool.stride(3),
        "heads": heads,
        "piece": piece,
        "tile": tile,
        "into_pool": into_pool,
    }
    return Launch(_copy_blocks, (triton.cdiv(piece, tile), layers * heads, len(slots)), arguments, pool.device)
