"""Runs inside a Triton kernel: which run a token is in, and where it lies."""

import torch
import triton
import triton.language as tl

from tierkv.kernels.runs import Column, Runs

COLUMNS = tl.constexpr(len(Column))
KEYS = tl.constexpr(int(Column.KEYS))
VALUES = tl.constexpr(int(Column.VALUES))
KEY_LAYER_STRIDE = tl.constexpr(int(Column.KEY_LAYER_STRIDE))
VALUE_LAYER_STRIDE = tl.constexpr(int(Column.VALUE_LAYER_STRIDE))
KEY_HEAD_STRIDE = tl.constexpr(int(Column.KEY_HEAD_STRIDE))
VALUE_HEAD_STRIDE = tl.constexpr(int(Column.VALUE_HEAD_STRIDE))
POSITION = tl.constexpr(int(Column.POSITION))

# Entries compared at a time when a run is searched: one load for a row of so many runs, two for its square.
SEARCH_WIDTH = tl.constexpr(128)


def token_starts(runs: Runs) -> torch.Tensor:
    """Count the tokens before each run, over all rows: int64 ``[runs + 1]`` on the table's device, without a wait.

    All layers that share the table share these: where the runs carry them, nothing is launched.
    """
    if runs.starts is not None:
        return runs.starts
    starts = torch.zeros(runs.table.shape[0] + 1, dtype=torch.int64, device=runs.table.device)
    torch.cumsum(runs.table[:, Column.TOKENS], dim=0, out=starts[1:])
    return starts


@triton.jit
def last_at_most(
    column: tl.tensor, stride: tl.constexpr, first: tl.tensor, last: tl.tensor, value: tl.tensor
) -> tl.tensor:
    """Return the last of the sorted entries ``first`` to ``last`` (exclusive) that is at most ``value``, else ``first``.

    Compares many entries at a time, since a load that waits for another one costs as much as all that go together.
    """
    lanes = tl.arange(0, SEARCH_WIDTH)
    found = first
    step = last - first
    while step > 1:
        step = tl.cdiv(step, SEARCH_WIDTH)
        at = found + lanes * step
        entries = tl.load(column + at * stride, mask=at < last, other=1 << 62)
        found += tl.maximum(tl.sum((entries <= value).to(tl.int32), 0) - 1, 0) * step
    return found


@triton.jit
def tokens_before(
    table: tl.tensor, starts: tl.tensor, first: tl.tensor, last: tl.tensor, position: tl.tensor
) -> tl.tensor:
    """Count the tokens of a row (its runs are ``first`` to ``last``) that stand before ``position``."""
    run = last_at_most(table + POSITION, COLUMNS, first, last, position)
    filled = first < last
    begin = tl.load(starts + run)
    end = tl.load(starts + run + 1, mask=filled, other=0)
    offset = position - tl.load(table + run * COLUMNS + POSITION, mask=filled, other=0)
    inside = tl.minimum(tl.maximum(offset, 0), end - begin)
    return tl.where(filled, begin - tl.load(starts + first) + inside, 0)


@triton.jit
def memory_of(
    line: tl.tensor,
    address: tl.constexpr,
    layer_stride: tl.constexpr,
    head_stride: tl.constexpr,
    member: tl.tensor,
    head: tl.tensor,
    element: tl.constexpr,
    aligned: tl.constexpr,
) -> tl.tensor:
    """Return where a run's K or V of one layer and head begins; ``line`` is the run's line, then come its columns."""
    begin = tl.load(line + address).to(tl.pointer_type(element))
    begin += member * tl.load(line + layer_stride) + head * tl.load(line + head_stride)
    return tl.multiple_of(begin, aligned)
