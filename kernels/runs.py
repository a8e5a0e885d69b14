"""Runs: where K and V lie, as dense runs of tokens. What every kernel here is given instead of a tensor.

A run is some tokens of one sequence that lie next to each other: for every KV head a dense ``[tokens, dim]`` matrix. Runs
may lie in different pools or buffers, so one launch reads device memory, staged copies and (on a CPU) host memory alike,
without a copy. All layers of a group share one table: layer ``member`` lies ``member`` strides further.
"""

from dataclasses import dataclass, field
from enum import IntEnum

import torch


class Column(IntEnum):
    """The columns of ``Runs.table``. Addresses are in bytes, strides in elements of the pool's dtype."""

    KEYS = 0
    VALUES = 1
    KEY_LAYER_STRIDE = 2
    VALUE_LAYER_STRIDE = 3
    KEY_HEAD_STRIDE = 4
    VALUE_HEAD_STRIDE = 5
    TOKENS = 6
    POSITION = 7


@dataclass(frozen=True, eq=False)
class Runs:
    """The tokens of some sequences, in order of position within each row.

    Attributes:
        table: int64 ``[runs, 8]``, one run a line, see ``Column``; on the device that reads it.
        row_starts: int64 ``[rows + 1]``: row ``r`` has the runs ``row_starts[r]`` to ``row_starts[r + 1]``; same device.
        most_tokens: tokens of the longest row.
        members: layers that share the table.
        kv_heads: heads of K and V.
        key_dim: numbers of a head's key.
        value_dim: numbers of a head's value.
        dtype: of K and V.
        starts: int64 ``[runs + 1]``: tokens before each run, over all rows, and all tokens; same device. May be left out
            where the CPU reads the table.
        memory: the tensors that the addresses point into, kept alive as long as the table.
    """

    table: torch.Tensor
    row_starts: torch.Tensor
    most_tokens: int
    members: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    starts: torch.Tensor | None = None
    memory: tuple[torch.Tensor, ...] = field(default=(), repr=False)

    @property
    def rows(self) -> int:
        """Sequences."""
        return self.row_starts.numel() - 1
