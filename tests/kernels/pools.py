"""K and V scattered over pools in runs, beside the same numbers as dense tensors."""

import random
from dataclasses import dataclass

import torch

from tierkv.kernels.runs import Runs


@dataclass
class Scattered:
    """The same tokens twice.

    Attributes:
        runs: where they lie in the pools; everything else in the pools is NaN.
        keys: for each member dense ``[rows, kv_heads, tokens, key_dim]``, NaN where a row has no such token.
        values: for each member ``[rows, kv_heads, tokens, value_dim]``.
        positions: int64 ``[rows, tokens]``, -1 where a row has no such token.
    """

    runs: Runs
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    positions: torch.Tensor


def scattered(
    lengths, *, kv_heads=2, key_dim=64, value_dim=64, dtype=torch.float32, block=16, longest_run=4, members=2, seed=0,
    first=None, scale=1.0,
):  # fmt: skip
    """Scatter rows of the given lengths over two pools, in runs of up to ``longest_run`` blocks and odd beginnings.

    Args:
        lengths: tokens of each row.
        first: per row, the position of its first token.
        scale: of the keys.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    first = first or [0] * len(lengths)
    total = max([start + length for start, length in zip(first, lengths, strict=True)] + [1])
    segment = block * longest_run
    segments = 2 + sum(-(-length // 1) for length in lengths) // segment + 3 * len(lengths) + sum(lengths) // block
    pools = []
    for _ in range(2):
        shape = segments, members, kv_heads, segment
        pools.append(
            (
                torch.full((*shape, key_dim), float("nan"), dtype=dtype),
                torch.full((*shape, value_dim), float("nan"), dtype=dtype),
            )
        )
    free = [list(range(segments)) for _ in pools]
    for segments_left in free:
        rng.shuffle(segments_left)

    def draw(dim, factor=1.0):
        shape = len(lengths), kv_heads, total, dim
        return [(factor * torch.randn(shape, generator=generator)).to(dtype) for _ in range(members)]

    keys, values = draw(key_dim, scale), draw(value_dim)
    positions = torch.full((len(lengths), total), -1)
    lines, starts = [], [0]
    for row, (start, length) in enumerate(zip(first, lengths, strict=True)):
        positions[row, start : start + length] = torch.arange(start, start + length)
        at = start
        while at < start + length:
            pool = rng.randrange(2)
            if not free[pool]:
                pool = 1 - pool
            where, offset = free[pool].pop(), rng.choice((0, 0, rng.randrange(block)))
            count = min(start + length - at, rng.randint(1, segment - offset))
            pool_keys, pool_values = pools[pool]
            for member in range(members):
                pool_keys[where, member, :, offset : offset + count] = keys[member][row, :, at : at + count]
                pool_values[where, member, :, offset : offset + count] = values[member][row, :, at : at + count]
            lines.append(
                [
                    pool_keys[where, 0, 0, offset].data_ptr(), pool_values[where, 0, 0, offset].data_ptr(),
                    pool_keys.stride(1), pool_values.stride(1), pool_keys.stride(2), pool_values.stride(2), count, at,
                ]
            )  # fmt: skip
            at += count
        starts.append(len(lines))
    absent = (positions < 0)[:, None, :, None]
    runs = Runs(
        table=torch.tensor(lines, dtype=torch.int64).view(-1, 8),
        row_starts=torch.tensor(starts, dtype=torch.int64),
        most_tokens=max([*lengths, 0]),
        members=members,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=dtype,
        memory=tuple(tensor for pool in pools for tensor in pool),
    )
    nan = float("nan")
    return Scattered(
        runs, [k.masked_fill(absent, nan) for k in keys], [v.masked_fill(absent, nan) for v in values], positions
    )
