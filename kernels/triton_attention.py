"""Attention over runs on CUDA: checks, tilings and the launch of ``triton_attend``.

One kernel serves decode, where the context is split over the device and the parts are merged, and prefill, where there
are tiles of queries enough.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton

from tierkv.kernels.runs import Runs
from tierkv.kernels.triton_attend import attend
from tierkv.kernels.triton_launch import Launch, alignment, check_dense, check_device, check_runs, require
from tierkv.kernels.triton_merge import merge
from tierkv.kernels.triton_runs import token_starts

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_DIM = 256

# A split of fewer tokens than this costs more in merging than it gains.
LEAST_SPLIT_TOKENS = 256
# Programs that one multiprocessor runs side by side, and needs to keep its memory pipe full.
PROGRAMS_A_MULTIPROCESSOR = 2


@dataclass(frozen=True)
class Tiling:
    """How much one program works on at a time: rows of queries, tokens; and what of the device it takes."""

    rows: int
    tokens: int
    warps: int
    stages: int
    most_registers: int | None = None


def choose_tiling(packed: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> Tiling:
    """Choose a tiling for ``packed`` rows (queries times heads of a group).

    Bounds: no register spills on sm_80, sm_90 or sm_100, and shared memory that their smaller relatives have too.
    """
    wide = max(_block(key_dim), _block(value_dim)) > 128
    if dtype == torch.float32:
        # IEEE products run on the ordinary units, with both factors in registers.
        return Tiling(16, 16 if wide else 32, warps=8, stages=2, most_registers=255 if wide else 128)
    rows = max(16, triton.next_power_of_2(packed))
    if rows <= 32:
        return Tiling(rows, 32 if wide else 64, warps=4, stages=3, most_registers=208 if wide else None)
    if wide:
        return Tiling(64, 32, warps=8, stages=2)
    if rows == 64:
        return Tiling(64, 32, warps=4, stages=3, most_registers=208)
    return Tiling(128, 64, warps=8, stages=2)


def unsupported(dtype: torch.dtype, key_dim: int, value_dim: int) -> str:
    """Return why there is no kernel for K and V of this kind; empty where there is."""
    if dtype not in DTYPES:
        return f"K and V must be bfloat16, float16 or float32, not {dtype}"
    if not (0 < key_dim <= MOST_DIM and 0 < value_dim <= MOST_DIM):
        return f"key_dim and value_dim must be 1 to {MOST_DIM}, not {key_dim} and {value_dim}"
    return ""


def attention(
    query: torch.Tensor,
    runs: Runs,
    member: int,
    *,
    start: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    starts: torch.Tensor | None = None,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the tokens of runs; see ``reference.attention`` for what is computed.

    Scores, softmax and sums are float32. The weights are rounded to the dtype of V before they are multiplied with it.
    Every address in the table must be a multiple of ``alignment(dim, dtype)`` bytes, and every stride of ``dim``.

    Args:
        query: ``[rows, query_heads, queries, key_dim]`` of the runs' dtype (bfloat16, float16 or float32), any strides
            but a dense last dimension; query ``i`` stands at position ``start + i``.
        runs: K and V; ``query_heads`` is a multiple of ``kv_heads``.
        member: which of the layers that share the table.
        start: position of the first query, the same in all rows.
        scale: factor of the scores.
        window: tokens that a query sees, itself included; None for all.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        starts: what ``token_starts(runs)`` returned, where that is kept; None for ``runs.starts``, or to make it here.
        splits: parts the context is split in; None for as many as fill the device.

    Returns:
        float32 output ``[rows, queries, query_heads, value_dim]`` and log-sum-exp ``[rows, queries, query_heads]``. A
        query that sees nothing has output 0 and log-sum-exp -inf. With several splits, their partial results take
        ``splits`` times the bytes of these until the call's kernels have run.

    Raises:
        ValueError: an argument that the kernel cannot take.
    """
    starts = token_starts(runs) if starts is None else starts
    check_device(attend, runs.table.device)
    launch, out, lse = plan(
        query, runs, member, start=start, scale=scale, window=window, softcap=softcap, starts=starts, splits=splits
    )
    launch.run()
    return (out[0], lse[0]) if out.shape[0] == 1 else merge(out, lse)


def plan(
    query: torch.Tensor,
    runs: Runs,
    member: int,
    *,
    start: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    starts: torch.Tensor,
    splits: int | None,
) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    """Check the arguments of ``attention`` and return the launch with its results, one of each split first."""
    _check(query, runs, member, start=start, window=window, softcap=softcap, splits=splits, starts=starts)
    rows, query_heads, queries, _ = query.shape
    group = query_heads // runs.kv_heads
    tiling = choose_tiling(queries * group, runs.key_dim, runs.value_dim, runs.dtype)
    tiles = triton.cdiv(queries * group, tiling.rows)
    if splits is None:
        seen = runs.most_tokens if window is None else min(runs.most_tokens, window + queries - 1)
        splits = choose_splits(rows * runs.kv_heads * tiles, seen, _multiprocessors(query.device))
    out = query.new_empty((splits, rows, queries, query_heads, runs.value_dim), dtype=torch.float32)
    lse = query.new_empty((splits, rows, queries, query_heads), dtype=torch.float32)
    arguments = {
        "query": query,
        "table": runs.table,
        "row_starts": runs.row_starts,
        "starts": starts,
        "out": out,
        "lse": lse,
        "member": member,
        "start": start,
        "scale": scale,
        "window": window or 0,
        "softcap": softcap or 0.0,
        "splits": splits,
        "queries": queries,
        "row_stride": query.stride(0),
        "head_stride": query.stride(1),
        "query_stride": query.stride(2),
        "group": group,
        "key_dim": runs.key_dim,
        "value_dim": runs.value_dim,
        "key_block": _block(runs.key_dim),
        "value_block": _block(runs.value_dim),
        "key_aligned": alignment(runs.key_dim, runs.dtype),
        "value_aligned": alignment(runs.value_dim, runs.dtype),
        "tile_rows": tiling.rows,
        "tile_tokens": tiling.tokens,
        "has_window": window is not None,
        "has_softcap": softcap is not None,
    }
    grid = (tiles * splits, runs.kv_heads, rows)
    device = query.device
    return Launch(attend, grid, arguments, device, tiling.warps, tiling.stages, tiling.most_registers), out, lse


def choose_splits(programs: int, tokens: int, processors: int) -> int:
    """Return how many parts fill a device when one part of everything takes ``programs`` programs."""
    wanted = processors * PROGRAMS_A_MULTIPROCESSOR // max(1, programs)
    return max(1, min(wanted, -(-tokens // LEAST_SPLIT_TOKENS)))


@cache
def _multiprocessors(device: torch.device) -> int:
    """Count what runs programs; one where Triton interprets them."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _block(dim: int) -> int:
    """Return the lanes that hold ``dim`` numbers: a power of two, and what ``tl.dot`` takes at least."""
    return max(16, 1 << (dim - 1).bit_length())


def _check(
    query: torch.Tensor,
    runs: Runs,
    member: int,
    *,
    start: int,
    window: int | None,
    softcap: float | None,
    splits: int | None,
    starts: torch.Tensor,
) -> None:
    check_runs(runs, member, starts)
    require(query.ndim == 4, f"query must be [rows, query_heads, queries, key_dim], not {list(query.shape)}")
    reason = unsupported(runs.dtype, runs.key_dim, runs.value_dim)
    require(not reason, reason)
    heads, queries = query.shape[1:3]
    check_dense("query", query, (runs.rows, heads, queries, runs.key_dim), runs.dtype, runs.table.device)
    require(
        heads > 0 and heads % runs.kv_heads == 0,
        f"query heads must be a multiple of the {runs.kv_heads} KV heads, not {heads}",
    )
    require(0 <= start < 2**31 - queries, f"start must be 0 to 2**31 - queries, not {start}")
    require(window is None or 0 < window < 2**31, f"window must be at least 1 token, or None, not {window}")
    require(softcap is None or softcap > 0, f"softcap must be positive, or None, not {softcap}")
    require(splits is None or splits > 0, f"splits must be at least 1, or None, not {splits}")
