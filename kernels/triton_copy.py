"""Append to runs and gather from them on CUDA: copies of bits between runs and dense tensors."""

import torch
import triton
import triton.language as tl

from tierkv.kernels.runs import Runs
from tierkv.kernels.triton_launch import (
    BITS_OF_SIZE,
    Launch,
    alignment,
    check_dense,
    check_device,
    check_runs,
    require,
)
from tierkv.kernels.triton_runs import (
    COLUMNS,
    KEY_HEAD_STRIDE,
    KEY_LAYER_STRIDE,
    KEYS,
    VALUE_HEAD_STRIDE,
    VALUE_LAYER_STRIDE,
    VALUES,
    last_at_most,
    memory_of,
    token_starts,
)

# Tokens of one head that a program copies: enough bytes in flight, and still many programs for a short prompt.
MOST_TILE_TOKENS = 32


@triton.jit
def _copy_tile(
    run: tl.tensor,
    dense: tl.tensor,
    token_stride: tl.tensor,
    run_tokens: tl.tensor,
    dense_tokens: tl.tensor,
    held: tl.tensor,
    dim: tl.constexpr,
    block: tl.constexpr,
    into_runs: tl.constexpr,
) -> None:
    """Copy the tokens that are held between a run and a dense tensor."""
    lanes = tl.arange(0, block)
    mask = held[:, None] & (lanes < dim)[None, :]
    run_at = run + run_tokens[:, None] * dim + lanes[None, :]
    dense_at = dense + dense_tokens[:, None] * token_stride + lanes[None, :]
    if into_runs:
        tl.store(run_at, tl.load(dense_at, mask=mask), mask=mask)
    else:
        tl.store(dense_at, tl.load(run_at, mask=mask), mask=mask)


@triton.jit
def _clear_tile(
    dense: tl.tensor,
    token_stride: tl.tensor,
    tokens: tl.tensor,
    held: tl.tensor,
    dim: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Set the tokens that are held to zero."""
    lanes = tl.arange(0, block)
    at = dense + tokens[:, None] * token_stride + lanes[None, :]
    tl.store(at, 0, mask=held[:, None] & (lanes < dim)[None, :])


@triton.jit(do_not_specialize=["member", "tokens"])
def _copy_tokens(
    table: tl.tensor,
    row_starts: tl.tensor,
    starts: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    member: tl.tensor,
    tokens: tl.tensor,
    key_row_stride: tl.tensor,
    key_head_stride: tl.tensor,
    key_token_stride: tl.tensor,
    value_row_stride: tl.tensor,
    value_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_block: tl.constexpr,
    value_block: tl.constexpr,
    key_aligned: tl.constexpr,
    value_aligned: tl.constexpr,
    tile_tokens: tl.constexpr,
    into_runs: tl.constexpr,
) -> None:
    """Copy one tile of a row's tokens, of one head: K and V."""
    element = keys.dtype.element_ty
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    keys += row * key_row_stride + head.to(tl.int64) * key_head_stride
    values += row * value_row_stride + head.to(tl.int64) * value_head_stride

    first = tl.load(row_starts + row)
    last = tl.load(row_starts + row + 1)
    base = tl.load(starts + first)
    count = tl.minimum(tl.load(starts + last) - base, tokens)
    begin = tl.program_id(0).to(tl.int64) * tile_tokens
    stop = tl.minimum(begin + tile_tokens, count)
    mine = begin + tl.arange(0, tile_tokens)
    first_run = last_at_most(starts, 1, first, last, base + begin)
    last_run = last_at_most(starts, 1, first, last, base + stop - 1)
    for run in range(first_run, tl.where(begin < stop, last_run + 1, first_run)):
        line = table + run * COLUMNS
        run_begin = tl.load(starts + run) - base
        held = (mine >= run_begin) & (mine < tl.minimum(tl.load(starts + run + 1) - base, stop))
        offsets = mine - run_begin
        source = memory_of(line, KEYS, KEY_LAYER_STRIDE, KEY_HEAD_STRIDE, member, head, element, key_aligned)
        _copy_tile(source, keys, key_token_stride, offsets, mine, held, key_dim, key_block, into_runs)
        source = memory_of(line, VALUES, VALUE_LAYER_STRIDE, VALUE_HEAD_STRIDE, member, head, element, value_aligned)
        _copy_tile(source, values, value_token_stride, offsets, mine, held, value_dim, value_block, into_runs)
    if not into_runs:
        missing = (mine >= count) & (mine < tokens)
        _clear_tile(keys, key_token_stride, mine, missing, key_dim, key_block)
        _clear_tile(values, value_token_stride, mine, missing, value_dim, value_block)


def append(
    keys: torch.Tensor,
    values: torch.Tensor,
    runs: Runs,
    member: int,
    *,
    starts: torch.Tensor | None = None,
) -> None:
    """Write new K and V into the tokens that ``runs`` names, in their order.

    Args:
        keys: ``[rows, kv_heads, tokens, key_dim]`` of the runs' dtype, any strides but a dense last dimension.
        values: ``[rows, kv_heads, tokens, value_dim]``, likewise.
        runs: where to; every row's runs hold ``tokens`` tokens, and no two name the same memory.
        member: which of the layers that share the table.
        starts: what ``token_starts(runs)`` returned, where that is kept; None for ``runs.starts``, or to make it here.

    Raises:
        ValueError: an argument that the kernel cannot take.
    """
    starts = token_starts(runs) if starts is None else starts
    check_device(_copy_tokens, runs.table.device)
    plan(keys, values, runs, member, starts, into_runs=True).run()


def gather(
    runs: Runs,
    member: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    starts: torch.Tensor | None = None,
) -> None:
    """Copy the tokens of runs into dense tensors, one after the other; zero follows where a row has fewer than others.

    Args:
        runs: where from.
        member: which of the layers that share the table.
        keys: filled; ``[rows, kv_heads, runs.most_tokens, key_dim]`` of the runs' dtype, any strides but a dense last
            dimension.
        values: filled; ``[rows, kv_heads, runs.most_tokens, value_dim]``, likewise.
        starts: what ``token_starts(runs)`` returned, where that is kept; None for ``runs.starts``, or to make it here.

    Raises:
        ValueError: an argument that the kernel cannot take.
    """
    starts = token_starts(runs) if starts is None else starts
    check_device(_copy_tokens, runs.table.device)
    plan(keys, values, runs, member, starts, into_runs=False).run()


def plan(
    keys: torch.Tensor, values: torch.Tensor, runs: Runs, member: int, starts: torch.Tensor, *, into_runs: bool
) -> Launch:
    """Check the arguments of ``append`` or ``gather`` and return the launch."""
    check_runs(runs, member, starts)
    lead = (runs.rows, runs.kv_heads, runs.most_tokens)
    device = runs.table.device
    check_dense("keys", keys, (*lead, runs.key_dim), runs.dtype, device)
    check_dense("values", values, (*lead, runs.value_dim), runs.dtype, device)
    require(runs.dtype.itemsize in BITS_OF_SIZE, f"numbers of 1, 2, 4 or 8 bytes can be copied, not {runs.dtype}")
    bits = BITS_OF_SIZE[runs.dtype.itemsize]
    tile_tokens = min(MOST_TILE_TOKENS, triton.next_power_of_2(max(1, runs.most_tokens)))
    arguments = {
        "table": runs.table,
        "row_starts": runs.row_starts,
        "starts": starts,
        "keys": keys.view(bits),
        "values": values.view(bits),
        "member": member,
        "tokens": runs.most_tokens,
        "key_row_stride": keys.stride(0),
        "key_head_stride": keys.stride(1),
        "key_token_stride": keys.stride(2),
        "value_row_stride": values.stride(0),
        "value_head_stride": values.stride(1),
        "value_token_stride": values.stride(2),
        "key_dim": runs.key_dim,
        "value_dim": runs.value_dim,
        "key_block": triton.next_power_of_2(runs.key_dim),
        "value_block": triton.next_power_of_2(runs.value_dim),
        "key_aligned": alignment(runs.key_dim, runs.dtype),
        "value_aligned": alignment(runs.value_dim, runs.dtype),
        "tile_tokens": tile_tokens,
        "into_runs": into_runs,
    }
    grid = (triton.cdiv(runs.most_tokens, tile_tokens), runs.kv_heads, runs.rows)
    return Launch(_copy_tokens, grid, arguments, device, 4 if tile_tokens >= 16 else 1, most_registers=128)
