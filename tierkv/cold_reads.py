"""ColdReads: how a step reads blocks in host memory, and how far ahead cold ones are fetched, as the cost model says.

Where the device is a GPU, both ways of reading host memory are exact and either may be the faster: through the wire, at
each token anew, or by the CPU where the bytes lie. What decides are bandwidths of the machine (``tierkv.bandwidths``), the
model's weights, and how much lies where. So it is asked before every step.
"""

import math
from collections.abc import Mapping
from typing import Final, Literal

from tierkv.capacity import CHUNK_TOKENS
from tierkv.cost import CostModel, Costs
from tierkv.layout import BlockLayout
from tierkv.tier import Tier, Wire

HostIsRead = Literal["in place", "by the CPU", "streamed"]
LAYERS_AHEAD: Final = 2
"""Where nothing was measured: on a CPU, and where nothing is streamed from host memory."""
MOST_LAYERS_AHEAD: Final = 4
_UP: Final = Wire(Tier.HOST, Tier.DEVICE)


class ColdReads:
    """The choices of one engine. Any thread."""

    def __init__(
        self,
        host_is_read: HostIsRead,
        layout: BlockLayout,
        costs: Costs | None = None,
    ) -> None:
        """Make the choices of an engine.

        Args:
            host_is_read: what the configuration says, see ``Stores.host_is_read``. What is to be streamed the CPU attends
                to all the same where ``costs`` say that this is faster.
            layout: of its blocks.
            costs: what ``bandwidths.measure`` found; None where nothing was measured. Without a rate of the CPU in them
                there is no choice, and they only say how far ahead to fetch.
        """
        self.host_is_read = host_is_read
        self._model = None
        if costs is not None:
            self._model = CostModel(costs, len(layout.layers), layout.block_bytes, layout.block_size)

    @property
    def has_choice(self) -> bool:
        """Whether ``by_cpu`` is to be asked; otherwise ``host_is_read`` says it all."""
        if self._model is None or self.host_is_read != "streamed":
            return False
        return Tier.HOST in self._model.costs.kv_bytes_per_second

    def by_cpu(self, kv_bytes: Mapping[Tier, float], rows: int, tokens: int) -> bool:
        """Return whether the CPU shall attend to what lies in host memory, in one step of an engine that has the choice.

        Args:
            kv_bytes: that the step reads, by tier, all rows and layers together.
            rows: sequences.
            tokens: new ones of every row. The CPU's arithmetic grows with them and a copy does not, so that more than one
                are always streamed.
        """
        if self._model is None or tokens > 1 or not kv_bytes.get(Tier.HOST):
            return False
        # What lies on disk is copied either way, and what it costs is not known here.
        here = {**kv_bytes, Tier.DISK: 0.0}
        computed, streamed = (self._model.decode(here, rows=rows, read=read) for read in ("compute", "stream"))
        return computed.seconds < streamed.seconds

    def layers_ahead(self, configured: int | Literal["auto"]) -> int:
        """Return how many layers to fetch ahead.

        The ring takes in what the wire brings while a layer computes: more would lie there unused, and with less the
        wire stands still.

        Args:
            configured: ``transfer.layers_ahead``.
        """
        if configured != "auto":
            return configured
        if self._model is None:
            return LAYERS_AHEAD
        model = self._model
        chunk_bytes = CHUNK_TOKENS * model.block_bytes / model.block_size / model.layers
        chunk_seconds = model.costs.wires[_UP].seconds(chunk_bytes, 2)
        return max(1, min(MOST_LAYERS_AHEAD, math.ceil(model.costs.step_seconds / model.layers / chunk_seconds)))

    def describe(self) -> str:
        """Say in one sentence how blocks in host memory are read."""
        if self.host_is_read != "streamed":
            return f"blocks in host memory are read {self.host_is_read}"
        if self._model is None:
            return "blocks in host memory are streamed"
        costs = self._model.costs
        wire = f"{costs.wires[_UP].bytes_per_second / 1e9:.1f} GB/s"
        if Tier.HOST not in costs.kv_bytes_per_second:
            return f"blocks in host memory are streamed, at {wire}"
        return (
            f"blocks in host memory are streamed, at {wire}, or attended to by the CPU, at "
            f"{costs.kv_bytes_per_second[Tier.HOST] / 1e9:.1f} GB/s and {costs.hop_seconds * 1e6:.0f} us a layer, whatever is "
            f"faster for a step"
        )
