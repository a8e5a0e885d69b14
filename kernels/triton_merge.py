"""Merge partial attention results on CUDA (Ye et al., FlashInfer, section 2.2; Milakov and Gimelshein 2018)."""

import math

import torch
import triton
import triton.language as tl

from tierkv.kernels.triton_launch import Launch, check_dense, check_device, require

# Parts loaded at a time: loads that do not wait for each other.
MOST_TILE_PARTS = 16

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))


@triton.jit(do_not_specialize=["parts", "heads"])
def _merge(
    outs: tl.tensor,
    lses: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    parts: tl.tensor,
    heads: tl.tensor,
    out_stride: tl.tensor,
    lse_stride: tl.tensor,
    dim: tl.constexpr,
    block: tl.constexpr,
    tile_parts: tl.constexpr,
    has_sinks: tl.constexpr,
) -> None:
    """Merge the parts of one (row, query, head)."""
    at = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, block)
    peak = float("-inf")
    total = 0.0
    if has_sinks:
        # A partial result of output 0. It is the level that the others are compared with first.
        peak = tl.load(sinks + at % heads)
        total = tl.where(peak == float("-inf"), 0.0, 1.0)
    sums = tl.zeros([block], tl.float32)
    for first in range(0, parts, tile_parts):
        part = (first + tl.arange(0, tile_parts)).to(tl.int64)
        scores = tl.load(lses + part * lse_stride + at, mask=part < parts, other=float("-inf"))
        # What saw nothing weighs nothing, whatever its output holds.
        weighs = scores > float("-inf")
        rows = tl.load(
            outs + (part * out_stride)[:, None] + at * dim + lanes[None, :],
            mask=weighs[:, None] & (lanes < dim)[None, :],
            other=0.0,
        )
        peak_now = tl.maximum(peak, tl.max(scores, 0))
        level = tl.where(peak_now == float("-inf"), 0.0, peak_now)
        # The difference is exact where it matters; scaled to base two before it, large scores would lose digits.
        weights = tl.exp2((scores - level) * LOG2_E)
        rescale = tl.exp2((peak - level) * LOG2_E)
        total = total * rescale + tl.sum(weights, 0)
        sums = sums * rescale + tl.sum(rows * weights[:, None], 0)
        peak = peak_now
    some = tl.where(total > 0, total, 1.0)
    tl.store(lse + at, tl.where(total > 0, peak + tl.log2(some) * LN_2, float("-inf")))
    tl.store(out + at * dim + lanes, sums / some, mask=lanes < dim)


def merge(
    outs: torch.Tensor, lses: torch.Tensor, sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention over disjoint sets of tokens; see ``reference.merge``.

    Args:
        outs: float32 ``[parts, rows, queries, query_heads, value_dim]``, each part contiguous.
        lses: float32 ``[parts, rows, queries, query_heads]``, each part contiguous; -inf where a part saw nothing.
        sinks: a score ``[query_heads]`` that takes part in the softmax, once, and contributes nothing to the output.

    Returns:
        float32 output ``[rows, queries, query_heads, value_dim]`` and log-sum-exp ``[rows, queries, query_heads]``.

    Raises:
        ValueError: an argument that the kernel cannot take.
    """
    check_device(_merge, outs.device)
    launch, out, lse = plan(outs, lses, sinks)
    launch.run()
    return out, lse


def plan(
    outs: torch.Tensor, lses: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    """Check the arguments of ``merge`` and return the launch with its results."""
    require(outs.ndim == 5, f"outs must be [parts, rows, queries, query_heads, value_dim], not {list(outs.shape)}")
    parts, rows, queries, heads, dim = outs.shape
    require(parts > 0, "there must be at least one part")
    check_dense("outs", outs, (parts, rows, queries, heads, dim), torch.float32, outs.device)
    check_dense("lses", lses, (parts, rows, queries, heads), torch.float32, outs.device)
    require(outs[0].is_contiguous() and lses[0].is_contiguous(), "each part of outs and lses must be contiguous")
    if sinks is not None:
        check_dense("sinks", sinks, (heads,), sinks.dtype, outs.device)
        sinks = sinks.to(torch.float32)
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    block = triton.next_power_of_2(dim)
    tile_parts = min(MOST_TILE_PARTS, triton.next_power_of_2(parts))
    arguments = {
        "outs": outs,
        "lses": lses,
        "sinks": lses if sinks is None else sinks,  # something that the kernel does not look at
        "out": out,
        "lse": lse,
        "parts": parts,
        "heads": heads,
        "out_stride": outs.stride(0),
        "lse_stride": lses.stride(0),
        "dim": dim,
        "block": block,
        "tile_parts": tile_parts,
        "has_sinks": sinks is not None,
    }
    warps = 4 if block * tile_parts >= 1024 else 1
    return Launch(_merge, (rows * queries * heads,), arguments, outs.device, warps), out, lse
