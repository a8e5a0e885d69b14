"""Speed: how long forwards take in virtual time, with what they read from below the device."""

from collections.abc import Mapping
from typing import Final

from tierkv.cost import CostModel, Read
from tierkv.tier import Tier, Wire
from tierkv.virtual import VirtualWires, connected_by_wire

_BELOW: Final = (Tier.HOST, Tier.DISK)


class Speed:
    """The cost model, asked about blocks that lie here and there."""

    def __init__(self, cost: CostModel, wires: VirtualWires, read: Read) -> None:
        """Time forwards by ``cost``; what they copy occupies ``wires``.

        Args:
            cost: the model.
            wires: of the machine.
            read: how blocks in host memory are read.
        """
        self._cost = cost
        self._wires = wires
        self._read = read
        self._token_bytes = cost.block_bytes / cost.block_size
        self._one_memory = not connected_by_wire(cost)

    def token(self, tokens: float, cold: Mapping[Tier, float], rows: int) -> float:
        """Return the seconds of one decoded token of every row.

        Args:
            tokens: that all rows together read.
            cold: blocks among them that lie below the device, by tier.
            rows: sequences.
        """
        num_bytes = {tier: cold.get(tier, 0.0) * self._cost.block_bytes for tier in _BELOW}
        num_bytes[Tier.DEVICE] = max(0.0, tokens * self._token_bytes - sum(num_bytes.values()))
        if self._one_memory:
            num_bytes[Tier.DEVICE] += num_bytes.pop(Tier.HOST)
        return self._cost.decode(num_bytes, rows=rows, read=self._read).seconds

    def prompt(self, tokens: int, past: int, cold: Mapping[Tier, float], below: Mapping[Tier, int]) -> float:
        """Return the seconds of a prefill.

        Copies run while layers compute, as far as the machine lets them; those of one layer never hide.

        Args:
            tokens: that are computed.
            past: tokens before them.
            cold: blocks of these that lie below the device, by tier.
            below: new blocks whose home is below the device, by tier.
        """
        computing = self._cost.prefill(tokens, past).seconds
        up = sum(
            count * self._slowest(Wire(tier, Tier.DEVICE)) for tier, count in cold.items() if self._is_copied(tier)
        )
        down = sum(count * self._slowest(Wire(Tier.DEVICE, tier)) for tier, count in below.items())
        hidden = self._cost.costs.overlap * computing
        return computing + max(max(one - hidden, one / self._cost.layers) for one in (up, down))

    def stream(self, cold: Mapping[Tier, float], times: int) -> float:
        """Occupy the wires over which cold blocks are read so many times; return how long the first has to wait."""
        delay = 0.0
        for tier, count in cold.items():
            if count and self._is_copied(tier):
                for wire, seconds in self._wires.route(Wire(tier, Tier.DEVICE)):
                    num_bytes = count * self._cost.block_bytes * times
                    delay = max(delay, self._wires.stream(wire, num_bytes, count * seconds * times))
        return delay

    def settle(self, below: Mapping[Tier, int]) -> None:
        """Send new blocks to their homes below the device."""
        for tier, count in below.items():
            for _ in range(count):
                self._wires.send(Wire(Tier.DEVICE, tier), lambda: None)

    def _is_copied(self, tier: Tier) -> bool:
        return tier is Tier.DISK or not (self._one_memory or self._read == "compute")

    def _slowest(self, wire: Wire) -> float:
        """Return the seconds a block takes where several are on their way, each on another hop."""
        return max(seconds for _, seconds in self._wires.route(wire))
