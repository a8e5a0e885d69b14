"""What the Triton kernels are tested with: runs in memory, and the same tokens as dense tensors.

K and V are written with plain indexing into two pools full of NaN, and kept as dense tensors beside them: nothing here
is shared with the kernels but the meaning of ``Runs``.
"""

from dataclasses import dataclass

import torch

from tierkv.kernels import reference
from tierkv.kernels.runs import Runs

MEMBERS = 3


@dataclass(frozen=True)
class Case:
    """What to attend to, and from where.

    Attributes:
        name: of the case.
        rows: tokens of each row.
        lengths: of the runs, in turn; the last run of a row is cut.
        start: position of the first query; None for the end of the longest row.
        origin: position of each row's first token.
        gap: positions left out after the first run of each row.
    """

    name: str
    rows: tuple[int, ...] = (100,)
    lengths: tuple[int, ...] = (64,)
    kv_heads: int = 2
    group: int = 2
    queries: int = 1
    key_dim: int = 64
    value_dim: int = 64
    dtype: torch.dtype = torch.float32
    start: int | None = None
    window: int | None = None
    softcap: float | None = None
    splits: int | None = 1
    origin: int = 0
    gap: int = 0
    key_size: float = 1.0

    def __str__(self) -> str:
        return self.name


class Scenario:
    """A case in memory.

    Attributes:
        query: ``[rows, heads, queries, key_dim]``, a transposed view as models make it.
        keys: dense ``[rows, kv_heads, tokens, key_dim]``; values likewise; zero where a row has no token.
        positions: int64 ``[rows, tokens]``, -1 where a row has no token.
        runs: the same tokens in the pools.
        spans: per row, its runs as (pool, segment, first token, tokens, row's tokens before it).
    """

    def __init__(self, case: Case, device: torch.device, *, seed: int = 0, member: int = 1) -> None:
        self.case, self.member = case, member
        generator = torch.Generator().manual_seed(seed)
        most = max(case.rows)
        lead = (len(case.rows), case.kv_heads, most)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(case.dtype).to(device)

        heads = case.kv_heads * case.group
        self.query = draw(len(case.rows), case.queries, heads, case.key_dim).transpose(1, 2)
        self.keys, self.values = draw(*lead, case.key_dim), draw(*lead, case.value_dim)
        self.keys *= case.key_size
        self.positions = torch.full((len(case.rows), most), -1, device=device)
        self.spans: list[list[tuple[int, int, int, int, int]]] = []
        segments = self._cut()
        room = max(case.lengths) + 8
        shape = (max(1, segments), MEMBERS, case.kv_heads, room)
        nan = float("nan")
        self.pools = [
            tuple(torch.full((*shape, dim), nan, dtype=case.dtype, device=device) for dim in dims)
            for dims in [(case.key_dim, case.value_dim)] * 2
        ]
        table, row_starts = [], [0]
        for row, spans in enumerate(self.spans):
            position = case.origin
            for pool, segment, first, count, before in spans:
                at = (segment, member, slice(None), slice(first, first + count))
                for memory, dense in zip(self.pools[pool], (self.keys, self.values), strict=True):
                    memory[at] = dense[row, :, before : before + count]
                self.positions[row, before : before + count] = position + torch.arange(count, device=device)
                addresses = [memory[segment, 0, 0, first].data_ptr() for memory in self.pools[pool]]
                strides = [memory.stride(axis) for axis in (1, 2) for memory in self.pools[pool]]
                table.append([*addresses, *strides, count, position])
                position += count + (case.gap if before == 0 else 0)
            row_starts.append(len(table))
            count = case.rows[row]
            self.keys[row, :, count:] = 0
            self.values[row, :, count:] = 0
        self.runs = Runs(
            table=torch.tensor(table, dtype=torch.int64).reshape(-1, 8).to(device),
            row_starts=torch.tensor(row_starts, dtype=torch.int64).to(device),
            most_tokens=most,
            members=MEMBERS,
            kv_heads=case.kv_heads,
            key_dim=case.key_dim,
            value_dim=case.value_dim,
            dtype=case.dtype,
            memory=tuple(memory for pools in self.pools for memory in pools),
        )

    def _cut(self) -> int:
        """Cut rows into runs, the pools in turn, each beginning somewhere in a segment of its own."""
        segment = 0
        for tokens in self.case.rows:
            spans: list[tuple[int, int, int, int, int]] = []
            before = 0
            while before < tokens:
                count = min(self.case.lengths[len(spans) % len(self.case.lengths)], tokens - before)
                spans.append((segment % 2, segment, 5 * segment % 8, count, before))
                before += count
                segment += 1
            self.spans.append(spans)
        return segment

    @property
    def start(self) -> int:
        """Position of the first query; by default the last query stands at the longest row's last token."""
        if self.case.start is not None:
            return self.case.start
        return max(0, int(self.positions.max()) + 1 - self.case.queries) if max(self.case.rows) else 0

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the reference computes in float64."""
        return reference.attention(
            self.query.double(),
            self.keys.double(),
            self.values.double(),
            self.positions,
            start=self.start,
            scale=self.case.key_dim**-0.5,
            window=self.case.window,
            softcap=self.case.softcap,
        )
