"""The Triton kernel of ``triton_attention``: one tile of queries, one split of the tokens that it sees.

The online softmax is Milakov and Gimelshein 2018 as arranged by Dao, FlashAttention-2 (2023); splitting the context is
Flash-Decoding (Dao, Haziza, Massa, Sizov 2023). The query heads that share a KV head are packed into the rows of one
tile (as FlashInfer does), so that K and V are read once for all of them.
"""

import math

import triton
import triton.language as tl

from tierkv.kernels.triton_runs import (
    COLUMNS,
    KEY_HEAD_STRIDE,
    KEY_LAYER_STRIDE,
    KEYS,
    POSITION,
    VALUE_HEAD_STRIDE,
    VALUE_LAYER_STRIDE,
    VALUES,
    last_at_most,
    memory_of,
    tokens_before,
)

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """Return tanh to two units in the last place; the exponential form alone loses its digits near zero."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    small = tl.exp2(tl.abs(x) * (-2 * LOG2_E))
    exponential = (1 - small) / (1 + small)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0, -exponential, exponential))


@triton.jit(do_not_specialize=["member", "start", "window", "splits", "queries"])
def attend(
    query: tl.tensor,
    table: tl.tensor,
    row_starts: tl.tensor,
    starts: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    member: tl.tensor,
    start: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    softcap: tl.tensor,
    splits: tl.tensor,
    queries: tl.tensor,
    row_stride: tl.tensor,
    head_stride: tl.tensor,
    query_stride: tl.tensor,
    group: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_block: tl.constexpr,
    value_block: tl.constexpr,
    key_aligned: tl.constexpr,
    value_aligned: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_tokens: tl.constexpr,
    has_window: tl.constexpr,
    has_softcap: tl.constexpr,
) -> None:
    """Attend for one tile of (query, head of the group) pairs to one split of the tokens that any of them sees."""
    element = query.dtype.element_ty
    # The last tile sees the most tokens; begun last it would run alone.
    tile = tl.num_programs(0) // splits - 1 - tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)

    packed = tile * tile_rows + tl.arange(0, tile_rows)
    asking = packed // group
    head = kv_head * group + packed % group
    exists = asking < queries
    own = start + asking
    key_lanes = tl.arange(0, key_block)
    value_lanes = tl.arange(0, value_block)
    token_lanes = tl.arange(0, tile_tokens)
    asked = query + row * row_stride + head[:, None].to(tl.int64) * head_stride
    asked += asking[:, None].to(tl.int64) * query_stride + key_lanes[None, :]
    q = tl.load(asked, mask=exists[:, None] & (key_lanes < key_dim)[None, :], other=0.0)

    # Tokens are counted from the row's first one. Only those that some query of this tile sees are loaded at all.
    first = tl.load(row_starts + row)
    last = tl.load(row_starts + row + 1)
    base = tl.load(starts + first)
    last_query = tl.minimum((tile * tile_rows + tile_rows - 1) // group, queries - 1)
    stop = tokens_before(table, starts, first, last, start + last_query + 1)
    if has_window:
        begin = tokens_before(table, starts, first, last, start + tile * tile_rows // group - window + 1)
    else:
        begin = 0
    share = tl.cdiv(tl.cdiv(stop - begin, splits), tile_tokens) * tile_tokens
    begin += split * share
    stop = tl.minimum(begin + share, stop)
    first_run = last_at_most(starts, 1, first, last, base + begin)
    last_run = last_at_most(starts, 1, first, last, base + stop - 1)
    end_run = tl.where(begin < stop, last_run + 1, first_run)

    peak = tl.full([tile_rows], float("-inf"), tl.float32)
    total = tl.zeros([tile_rows], tl.float32)
    sums = tl.zeros([tile_rows, value_block], tl.float32)
    for run in range(first_run, end_run):
        line = table + run * COLUMNS
        keys = memory_of(line, KEYS, KEY_LAYER_STRIDE, KEY_HEAD_STRIDE, member, kv_head, element, key_aligned)
        values = memory_of(line, VALUES, VALUE_LAYER_STRIDE, VALUE_HEAD_STRIDE, member, kv_head, element, value_aligned)
        position = tl.load(line + POSITION).to(tl.int32)
        run_begin = tl.load(starts + run) - base
        run_end = tl.load(starts + run + 1) - base
        token_begin = (tl.maximum(begin, run_begin) - run_begin).to(tl.int32)
        token_end = (tl.minimum(stop, run_end) - run_begin).to(tl.int32)
        for token in range(token_begin, token_end, tile_tokens):
            tokens = token + token_lanes
            held = tokens < token_end
            k = tl.load(
                keys + tokens[None, :] * key_dim + key_lanes[:, None],
                mask=held[None, :] & (key_lanes < key_dim)[:, None],
                other=0.0,
            )
            v = tl.load(
                values + tokens[:, None] * value_dim + value_lanes[None, :],
                mask=held[:, None] & (value_lanes < value_dim)[None, :],
                other=0.0,
            )
            scores = tl.dot(q, k, input_precision="ieee")
            if has_softcap:
                scores = softcap * LOG2_E * _tanh(scores * (scale / softcap))
            else:
                scores = scores * (scale * LOG2_E)
            positions = position + tokens
            visible = held[None, :] & (positions[None, :] <= own[:, None])
            if has_window:
                visible = visible & (positions[None, :] > own[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
            # A row that has seen nothing yet keeps a peak of -inf, from which nothing may be subtracted.
            peak_now = tl.maximum(peak, tl.max(scores, 1))
            level = tl.where(peak_now == float("-inf"), 0.0, peak_now)
            weights = tl.exp2(scores - level[:, None])
            rescale = tl.exp2(peak - level)
            total = total * rescale + tl.sum(weights, 1)
            sums = tl.dot(weights.to(element), v, sums * rescale[:, None], input_precision="ieee")
            peak = peak_now

    some = tl.where(total > 0, total, 1.0)
    heads = tl.num_programs(1) * group
    at = ((split * tl.num_programs(2) + row) * queries + asking) * heads + head
    tl.store(lse + at, tl.where(total > 0, (peak + tl.log2(some)) * LN_2, float("-inf")), mask=exists)
    tl.store(
        out + at[:, None] * value_dim + value_lanes[None, :],
        sums / some[:, None],
        mask=exists[:, None] & (value_lanes < value_dim)[None, :],
    )
