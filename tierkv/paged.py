"""PagedReader: attention over blocks where they lie, and over cold ones as they arrive. The paged read path.

No layer is ever assembled. What attention can read in place (the device pool, and on a CPU the host pool too) is attended
in one launch over its runs. Blocks in host memory may be attended by the CPU meanwhile, where they lie. What lies below
comes chunk by chunk through a ring of scratch buffers, fetched ahead of need through all layers of the step. Partial
results are merged by their log-sum-exp. So a context may exceed the device by any factor: the scratch is as large as a
chunk, not as a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tierkv.block_table import Extent
from tierkv.cold_reads import ColdReads
from tierkv.fetch import Fetcher, Piece, clip
from tierkv.layout import BlockLayout
from tierkv.moves import Step
from tierkv.run_tables import Dense, runs_in_pools, runs_in_tensors
from tierkv.scratch import Scratch
from tierkv.tier import Run, Tier

if TYPE_CHECKING:
    import torch

    from tierkv.kernels.runs import Runs
    from tierkv.stores import Stores

MOST_PARTS: Final = 8
"""Partial results that are kept before they are merged, where there are few queries ..."""
FEW_QUERIES: Final = 64
"""... that is so many. A long prompt's are as large as its whole output, and lie outside all budgets."""

Part = tuple["torch.Tensor", "torch.Tensor"]


@dataclass
class _Plan:
    """What the layers of one window read in this step, wherever in the model they are.

    Attributes:
        in_place: per row, what attention on the device reads where it lies.
        by_cpu: per row, what the CPU attends to in host memory.
        chunks: what arrives together: pieces of at most one buffer, as ``(row, extent)``.
        runs: the tables of ``in_place`` and ``by_cpu``, by layer group and whether the CPU reads them.
        arriving: the tables of chunks, by layer group, chunk and buffer.
    """

    in_place: list[list[Extent]]
    by_cpu: list[list[Extent]]
    chunks: list[list[tuple[int, Extent]]]
    runs: "dict[tuple[int, bool], Runs]" = field(default_factory=dict)
    arriving: "dict[tuple[int, int, int], Runs]" = field(default_factory=dict)


class PagedReader:
    """Attends layer by layer within one step at a time. Called by the thread that runs the model.

    Attributes:
        cpu_attended: whether the CPU attended to blocks in host memory in this step, or else in the last.
    """

    def __init__(
        self,
        layout: BlockLayout,
        stores: "Stores",
        scratch: Scratch,
        fetcher: Fetcher,
        cold_reads: ColdReads,
    ) -> None:
        """Make a reader over an engine's stores.

        Args:
            layout: the block layout of all stores.
            stores: whose memory is read in place where the device can.
            scratch: the ring that cold tokens pass through.
            fetcher: brings them there.
            cold_reads: says how blocks in host memory are read in a step.
        """
        self._layout = layout
        self._stores = stores
        self._scratch = scratch
        self._fetcher = fetcher
        self._cold_reads = cold_reads
        self._in_place = {Tier.DEVICE, Tier.HOST} if cold_reads.host_is_read == "in place" else {Tier.DEVICE}
        self._by_cpu: set[Tier] = set()
        self.cpu_attended = False
        self._step: Step | None = None
        self._first_seen: Sequence[int] = ()
        self._own_in_place = False
        self._plans: dict[int | None, _Plan] = {}
        self._new: dict[int, Runs] = {}
        self._units: list[tuple[int, int]] = []  # (layer, chunk), in the order in which attention needs them
        self._first_unit: list[int] = []  # of each layer
        self._next = 0  # the first unit whose fetch was not submitted yet

    def begin(self, step: Step, first_seen: Sequence[int]) -> None:
        """Start fetching the first cold chunks of ``step``.

        Args:
            step: whose tokens are about to be computed.
            first_seen: per row, the position of the first token that is not padding.
        """
        self._step, self._first_seen = step, first_seen
        self._by_cpu = {Tier.HOST} if self._asks_cpu(step) else set()
        self.cpu_attended = False
        self._plans, self._new = {}, {}
        # What this step writes is read back from the pool where it is written there at once.
        self._own_in_place = all(extent.tier is Tier.DEVICE for extents in step.writes for extent in extents)
        self._units, self._first_unit, self._next = [], [], 0
        if step.start:
            for layer in range(len(self._layout.layers)):
                self._first_unit.append(len(self._units))
                self._units += [(layer, chunk) for chunk in range(len(self._plan(layer).chunks))]
            self._fetch_through(self._scratch.num_buffers - 1)

    def append(self, layer: int, keys: "torch.Tensor", values: "torch.Tensor") -> bool:
        """Write a layer's new tokens where they live, if that is the device; return whether it is.

        Args:
            layer: position in the layout.
            keys: ``[rows, kv_heads, tokens, key_dim]``.
            values: ``[rows, kv_heads, tokens, value_dim]``.
        """
        from tierkv.kernels import dispatch

        if not self._own_in_place:
            return False
        assert self._step is not None
        group, member = self._layout.group_of[layer]
        if group not in self._new:
            self._new[group] = runs_in_pools(self._stores, group, self._step.writes)
        dispatch.append(keys, values, self._new[group], member)
        return True

    def attend(
        self,
        layer: int,
        query: "torch.Tensor",
        keys: "torch.Tensor",
        values: "torch.Tensor",
        *,
        scale: float,
        softcap: float | None = None,
        sinks: "torch.Tensor | None" = None,
    ) -> "torch.Tensor":
        """Return attention of the step's new tokens over all that each of them sees.

        Args:
            layer: position in the layout; each layer of a step once, in order, after its tokens were written.
            query: ``[rows, query_heads, tokens, key_dim]``.
            keys: the new tokens' keys ``[rows, kv_heads, tokens, key_dim]``.
            values: ``[rows, kv_heads, tokens, value_dim]``.
            scale: factor of the scores.
            softcap: limit of the scores, or None.
            sinks: a score ``[query_heads]`` that takes part in the softmax alone, or None.

        Returns:
            ``[rows, tokens, query_heads, value_dim]``, contiguous, of the query's dtype.

        Raises:
            RecordError: a cold slice cannot be read back.
            TransferTimeout: a fetch did not finish in time.
        """
        from tierkv.kernels import dispatch

        step = self._step
        assert step is not None, "attend outside a step"
        plan = self._plan(layer)
        group, member = self._layout.group_of[layer]
        window = self._layout.layers[layer].window

        def attention(runs: "Runs", member: int) -> Part:
            return dispatch.attention(
                query, runs, member, start=step.start, scale=scale, window=window, softcap=softcap
            )

        # Taken before the device has more to do, which the copy would wait for.
        query_there = query.cpu() if any(plan.by_cpu) else query
        parts = [attention(self._runs_of(plan, group), member)]
        if any(plan.by_cpu):
            self.cpu_attended = True
            part = dispatch.attention(
                query_there, self._runs_of(plan, group, by_cpu=True), member,
                start=step.start, scale=scale, window=window, softcap=softcap,
            )  # fmt: skip
            parts.append((part[0].to(query.device, non_blocking=True), part[1].to(query.device, non_blocking=True)))
        if not self._own_in_place:
            parts.append(attention(self._runs_of_new(group, keys, values), 0))
        for chunk in range(len(plan.chunks)):
            unit = self._first_unit[layer] + chunk
            self._fetch_through(unit)
            self._fetcher.order(unit)
            if len(parts) == (MOST_PARTS if query.shape[2] <= FEW_QUERIES else 2):
                parts = [dispatch.merge(parts)]
            parts.append(attention(self._runs_of_chunk(layer, chunk, unit), 0))
            # Its reader has been enqueued, so the buffer may be filled again.
            self._fetch_through(unit + self._scratch.num_buffers)
        out, _ = dispatch.merge(parts, sinks)
        return out.to(query.dtype)

    def end(self, step: Step) -> None:
        """Wait for fetches of ``step`` that nobody collected; needed before its slots may be given up.

        Raises:
            TransferTimeout: one did not end in time: its slots are still being read. ``end`` can be tried again.
        """
        if self._step is step:
            self._fetcher.settle()
            self._step = None
            self._plans, self._new = {}, {}  # they keep scratch alive

    # -- what is read -----------------------------------------------------------------------------------------------

    def _plan(self, layer: int) -> _Plan:
        window = self._layout.layers[layer].window
        if window not in self._plans:
            self._plans[window] = self._make_plan(window)
        return self._plans[window]

    def _make_plan(self, window: int | None) -> _Plan:
        step = self._step
        assert step is not None
        first = 0 if window is None else max(0, step.start - window + 1)
        plan = _Plan([], [], [])
        room = 0
        for row, extents in enumerate(step.reads):
            seen = clip(extents, max(first, self._first_seen[row]), step.start)
            plan.in_place.append([extent for extent in seen if extent.tier in self._in_place])
            plan.by_cpu.append([extent for extent in seen if extent.tier in self._by_cpu])
            for extent in seen:
                if extent.tier in self._in_place or extent.tier in self._by_cpu:
                    continue
                for piece in self._cut(extent):
                    tokens = piece.stop - piece.start
                    if tokens > room:
                        plan.chunks.append([])
                        room = self._scratch.buffer_tokens
                    plan.chunks[-1].append((row, piece))
                    room -= tokens
            if self._own_in_place:
                plan.in_place[row] += clip(step.writes[row], max(first, self._first_seen[row]), step.stop)
        return plan

    def _asks_cpu(self, step: Step) -> bool:
        """Return whether the CPU shall attend to what lies in host memory."""
        if not self._cold_reads.has_choice:
            return self._cold_reads.host_is_read == "by the CPU"
        tokens = dict.fromkeys(Tier, 0)
        for extents in step.reads:
            for extent in extents:
                tokens[extent.tier] += extent.stop - extent.start
        # What a window leaves out is counted too, for either way of reading.
        kv_bytes = {tier: number * self._layout.token_bytes for tier, number in tokens.items()}
        return self._cold_reads.by_cpu(kv_bytes, len(step.reads), step.count)

    def _cut(self, extent: Extent) -> list[Extent]:
        """Cut an extent at block boundaries into pieces that fit a buffer."""
        size = self._layout.block_size
        most = max(1, self._scratch.buffer_tokens // size) * size
        pieces, start = [], extent.start
        while start < extent.stop:
            offset = extent.first_token + start - extent.start
            block = offset // size
            stop = min(extent.stop, start + most - offset % size)
            run = Run(extent.run.slot + block, -(-(offset + stop - start) // size) - block)
            pieces.append(Extent(extent.tier, run, offset - block * size, start, stop))
            start = stop
        return pieces

    def _fetch_through(self, last: int) -> None:
        """Submit the fetches of all units up to ``last`` that were not submitted yet."""
        end = min(last + 1, len(self._units))
        while self._next < end:
            unit = self._next
            self._next += 1
            layer, chunk = self._units[unit]
            extents = [extent for _, extent in self._plan(layer).chunks[chunk]]
            views = self._scratch.pieces(layer, unit, [extent.stop - extent.start for extent in extents])
            self._fetcher.submit(unit, layer, unit, [Piece(e, *view) for e, view in zip(extents, views, strict=True)])

    # -- tables -----------------------------------------------------------------------------------------------------

    def _runs_of(self, plan: _Plan, group: int, *, by_cpu: bool = False) -> "Runs":
        """Return the table of what the device, or the CPU, reads where it lies. All layers of a group share it."""
        key = group, by_cpu
        if key not in plan.runs:
            rows = plan.by_cpu if by_cpu else plan.in_place
            plan.runs[key] = runs_in_pools(self._stores, group, rows, on_cpu=by_cpu)
        return plan.runs[key]

    def _runs_of_chunk(self, layer: int, chunk: int, unit: int) -> "Runs":
        """Return the table of a chunk in its buffer. Layers of a group share it: their buffers are the same memory."""
        plan = self._plan(layer)
        group, _ = self._layout.group_of[layer]
        key = group, chunk, unit % self._scratch.num_buffers
        if key not in plan.arriving:
            pieces = plan.chunks[chunk]
            views = self._scratch.pieces(layer, unit, [extent.stop - extent.start for _, extent in pieces])
            rows: list[list[Dense]] = [[] for _ in plan.in_place]
            for (row, extent), (keys, values) in zip(pieces, views, strict=True):
                rows[row].append((keys, values, extent.start))
            plan.arriving[key] = runs_in_tensors(self._stores, group, rows)
        return plan.arriving[key]

    def _runs_of_new(self, group: int, keys: "torch.Tensor", values: "torch.Tensor") -> "Runs":
        """Return the table of the new tokens as they were handed over, less the padding."""
        step = self._step
        assert step is not None
        keys, values = keys.contiguous(), values.contiguous()
        rows = []
        for row in range(keys.shape[0]):
            skip = min(step.count, max(0, self._first_seen[row] - step.start))
            rows.append([(keys[row, :, skip:], values[row, :, skip:], step.start + skip)])
        return runs_in_tensors(self._stores, group, rows)
