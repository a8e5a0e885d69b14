"""Virtual time: a clock, wires on which blocks queue, and the executor that carries out a manager's moves on them.

Nothing is copied and nobody waits: a wire says when a block will have arrived, and the clock jumps there. Each wire takes
one block after another, in the order in which they were handed over, for as long as the cost model says. A block from the
device to the disk, or back, takes two wires in turn: the second one knows of it when the first is done with it.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from tierkv.cost import CostModel
from tierkv.tier import Tier, Wire

if TYPE_CHECKING:
    from tierkv.manager import TierManager
    from tierkv.moves import Move

_MEMORY: Final = (Tier.DEVICE, Tier.HOST)


class _Server:
    """One wire: what it was given, and when it is free."""

    __slots__ = ("busy_seconds", "free_at", "num_blocks", "streamed_bytes", "wire")

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.free_at = self.busy_seconds = 0.0
        self.num_blocks = self.streamed_bytes = 0


_Hop = tuple[_Server, float]
"""A wire, and the seconds that it takes for one block."""


class VirtualWires:
    """The clock and all wires of a machine. Not thread-safe.

    Attributes:
        now: seconds since the begin; never goes back.
    """

    def __init__(self, cost: CostModel) -> None:
        """Make idle wires at time 0."""
        self.now = 0.0
        self._cost = cost
        self._servers: dict[Wire, _Server] = {}
        self._routes: dict[Wire, tuple[_Hop, ...]] = {}
        self._events: list[tuple[float, int, tuple[_Hop, ...], Callable[[], object]]] = []
        self._num_events = 0

    @property
    def next_event(self) -> float | None:
        """When a wire will be done with a block the next time; None while all are idle."""
        return self._events[0][0] if self._events else None

    @property
    def num_blocks(self) -> dict[Wire, int]:
        """Blocks that each wire was given."""
        return {wire: server.num_blocks for wire, server in self._servers.items() if server.num_blocks}

    @property
    def streamed_bytes(self) -> dict[Wire, int]:
        """Bytes that attention fetched over each wire, without moving a block."""
        return {wire: server.streamed_bytes for wire, server in self._servers.items() if server.streamed_bytes}

    @property
    def busy_seconds(self) -> dict[Wire, float]:
        """How long each wire has been, or will have been, at work on all of that."""
        return {wire: server.busy_seconds for wire, server in self._servers.items() if server.busy_seconds}

    def route(self, wire: Wire) -> list[tuple[Wire, float]]:
        """Return the wires that one block takes from one tier to another, or to another place in the same one.

        Each comes with the seconds that it takes for one block.

        Without a wire of their own device and host are one memory, in which a copy is a read and a write.

        Raises:
            ValueError: nothing connects the two here.
        """
        return [(server.wire, seconds) for server, seconds in self._route(wire)]

    def send(self, wire: Wire, arrived: Callable[[], object]) -> None:
        """Hand one block over; ``arrived`` is called when the clock comes to its arrival.

        Raises:
            ValueError: nothing connects the two tiers.
        """
        self._start(self._routes.get(wire) or self._route(wire), arrived)

    def load(self, tier: Tier, arrived: Callable[[], object]) -> None:
        """Read one block of the prefix store into ``tier``; like ``send``, at the rate at which records are read.

        Raises:
            ValueError: nothing connects the disk and the tier.
        """
        (server, seconds), *rest = self._route(Wire(Tier.DISK, tier))
        rate = self._cost.costs.stored_bytes_per_second
        if rate is not None:
            seconds = self._cost.block_bytes / rate
        self._start(((server, seconds), *rest), arrived)

    def stream(self, wire: Wire, num_bytes: float, seconds: float) -> float:
        """Take a wire for bytes that attention reads; return how long they wait for what was handed over before.

        Args:
            wire: of the machine.
            num_bytes: that are read over it.
            seconds: that it is at work on them.
        """
        server = self._server(wire)
        begin = max(self.now, server.free_at)
        server.free_at = begin + seconds
        server.busy_seconds += seconds
        server.streamed_bytes += round(num_bytes)
        return begin - self.now

    def run_to(self, time: float) -> None:
        """Let the clock go on to ``time``; what arrives until then, arrives."""
        while self._events and self._events[0][0] <= time:
            self._next()
        self.now = max(self.now, time)

    def run_until(self, done: Callable[[], bool]) -> None:
        """Let the clock go on from one arrival to the next until ``done``.

        Raises:
            RuntimeError: nothing is under way any more, and it is not.
        """
        while not done():
            if not self._events:
                raise RuntimeError("nothing is under way that could be waited for")
            self._next()

    def _next(self) -> None:
        time, _, rest, arrived = heapq.heappop(self._events)
        self.now = max(self.now, time)
        if rest:
            self._start(rest, arrived)
        else:
            arrived()

    def _start(self, hops: tuple[_Hop, ...], arrived: Callable[[], object]) -> None:
        # Those that were handed over before are served before, so when this one's turn comes is known already.
        server, seconds = hops[0]
        end = server.free_at = max(self.now, server.free_at) + seconds
        server.num_blocks += 1
        server.busy_seconds += seconds
        self._num_events += 1
        heapq.heappush(self._events, (end, self._num_events, hops[1:], arrived))

    def _server(self, wire: Wire) -> _Server:
        if wire not in self._servers:
            self._servers[wire] = _Server(wire)
        return self._servers[wire]

    def _route(self, wire: Wire) -> tuple[_Hop, ...]:
        if wire not in self._routes:
            self._routes[wire] = tuple((self._server(hop), self._seconds(hop)) for hop in self._hops(wire))
        return self._routes[wire]

    def _hops(self, wire: Wire) -> Sequence[Wire]:
        source, destination = wire
        if wire in self._cost.costs.wires or (source in _MEMORY and destination in _MEMORY):
            return [wire]
        if Tier.HOST not in wire or source is destination:
            return [*self._hops(Wire(source, Tier.HOST)), *self._hops(Wire(Tier.HOST, destination))]
        # Of two memories that are one, either is as good.
        other = Wire(
            Tier.DEVICE if source is Tier.HOST else source, Tier.DEVICE if destination is Tier.HOST else destination
        )
        if not connected_by_wire(self._cost) and other in self._cost.costs.wires:
            return [other]
        self._cost.move(wire, 1)  # says what is missing
        raise ValueError(f"nothing moves {wire.label} here")

    def _seconds(self, wire: Wire) -> float:
        if wire in self._cost.costs.wires:
            return self._cost.move(wire, 1)
        rates = self._cost.costs.kv_bytes_per_second
        return 2 * self._cost.block_bytes / min(rates.get(tier, rates[Tier.DEVICE]) for tier in wire)


class VirtualMover:
    """Carries out a manager's moves on virtual wires. A move ends when the clock comes to its arrival."""

    def __init__(self, manager: "TierManager", wires: VirtualWires) -> None:
        """Move blocks of ``manager``."""
        self._manager = manager
        self._wires = wires
        self._arrived: deque[Move] = deque()
        self._in_flight = 0

    def submit(self, moves: "Sequence[Move]") -> None:
        """Hand moves over to their wires.

        Raises:
            ValueError: nothing connects the two tiers of one.
        """
        for move in moves:
            self._wires.send(move.wire, partial(self._arrive, move))
            self._in_flight += 1

    def reap(self) -> None:
        """Report the moves that arrived to the manager, in the order of their arrival."""
        while self._arrived:
            self._manager.complete(self._arrived.popleft())

    def wait(self) -> None:
        """Let the clock go on until every move in flight has arrived."""
        self._wires.run_until(lambda: not self._in_flight)

    def _arrive(self, move: "Move") -> None:
        self._in_flight -= 1
        self._arrived.append(move)


def connected_by_wire(cost: CostModel) -> bool:
    """Return whether device and host are two memories; otherwise the device's memory is RAM."""
    return Wire(Tier.HOST, Tier.DEVICE) in cost.costs.wires
