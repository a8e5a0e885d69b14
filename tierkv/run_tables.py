"""Tables of runs: how block tables become what the attention kernels are given."""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tierkv.block_table import Extent

if TYPE_CHECKING:
    import torch

    from tierkv.kernels.runs import Runs
    from tierkv.stores import Stores

Dense = tuple["torch.Tensor", "torch.Tensor", int]
"""K ``[kv_heads, tokens, key_dim]`` and V of tokens, dense in the last two dimensions, and the first one's position."""


def runs_in_pools(stores: "Stores", group: int, rows: Sequence[Sequence[Extent]], *, on_cpu: bool = False) -> "Runs":
    """Return the table of tokens that are read where they lie in the memory tiers.

    Args:
        stores: whose pools they are in.
        group: layer group; all its layers share the table.
        rows: per row, extents in order of position.
        on_cpu: whether the CPU reads the table, whatever the device is.
    """
    lines = [
        [stores.slab(e.tier).line(group, e.run, e.first_token, e.stop - e.start, e.start) for e in extents]
        for extents in rows
    ]
    # A close in another thread must not free what a kernel reads.
    tiers = {extent.tier for extents in rows for extent in extents}
    memory = tuple(tensor for tier in tiers for tensor in stores.slab(tier).memory(group))
    return _runs(stores, group, lines, memory, on_cpu=on_cpu)


def runs_in_tensors(stores: "Stores", group: int, rows: Sequence[Sequence[Dense]]) -> "Runs":
    """Return the table of one layer's tokens in tensors of their own; the table keeps them alive.

    Args:
        stores: of the engine, for its device.
        group: layer group of the layer.
        rows: per row, in order of position.
    """
    lines = [
        [
            (keys.data_ptr(), values.data_ptr(), 0, 0, keys.stride(0), values.stride(0), keys.shape[1], position)
            for keys, values, position in row
        ]
        for row in rows
    ]
    memory = tuple(tensor for row in rows for keys, values, _ in row for tensor in (keys, values))
    return _runs(stores, group, lines, memory)


def _runs(
    stores: "Stores",
    group: int,
    lines: Sequence[Sequence[tuple[int, ...]]],
    memory: "tuple[torch.Tensor, ...]" = (),
    *,
    on_cpu: bool = False,
) -> "Runs":
    import torch

    from tierkv.kernels.runs import Column, Runs

    spec = stores.layout.groups[group]
    flat = [line for row in lines for line in row]
    row_starts = [0, *itertools.accumulate(map(len, lines))]
    starts = [0, *itertools.accumulate(line[Column.TOKENS] for line in flat)]
    # One tensor, so that a GPU gets all of it in one small copy that nothing waits for.
    numbers = torch.tensor([*itertools.chain(*flat), *row_starts, *starts], dtype=torch.int64, device="cpu")
    if not on_cpu:
        numbers = numbers.to(stores.device.device, non_blocking=True)
    after_table = len(flat) * len(Column)
    after_rows = after_table + len(row_starts)
    return Runs(
        table=numbers[:after_table].view(-1, len(Column)),
        row_starts=numbers[after_table:after_rows],
        starts=numbers[after_rows:],
        most_tokens=max(starts[end] - starts[begin] for begin, end in itertools.pairwise(row_starts)),
        members=len(spec.members),
        kv_heads=spec.kv_heads,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        dtype=getattr(torch, stores.layout.dtype),
        memory=memory,
    )
