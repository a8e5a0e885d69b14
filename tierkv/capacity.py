"""Capacity: does a call fit, and what is the smallest budget that would do? Pure arithmetic, asked before the prefill."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from tierkv.errors import CapacityError
from tierkv.geometry import PoolGeometry
from tierkv.layout import BlockLayout

CHUNK_TOKENS = 2048
"""Cold tokens of one layer that the paged path fetches at once where there is room: a few MiB, large enough for a wire."""

QUEUE_SHARE = 8
"""The queue of writes to disk takes at most this part of the RAM tier that it lies in."""


@dataclass(frozen=True, slots=True)
class ScratchPlan:
    """How the pools are divided for one call.

    Attributes:
        num_buffers: buffers of the ring: 1 + layers (or chunks of a layer) fetched ahead.
        buffer_tokens: tokens, summed over rows, in each.
        device_slots: blocks that remain for KV on the device.
        host_slots: blocks that remain for KV in the host pool, which lends the bounce buffers.
    """

    num_buffers: int
    buffer_tokens: int
    device_slots: int
    host_slots: int

    @property
    def scratch_tokens(self) -> int:
        """Tokens of one layer in all buffers."""
        return self.num_buffers * self.buffer_tokens


@dataclass(frozen=True, slots=True)
class _Call:
    """What is asked for: ``rows`` sequences of ``tokens`` tokens, beside blocks that others hold."""

    rows: int
    tokens: int
    held_elsewhere: int
    paged: bool
    least_buffer: int = 0

    def __str__(self) -> str:
        return f"{self.rows} sequence{'s' if self.rows > 1 else ''} of up to {self.tokens:,} tokens"


@dataclass(frozen=True, slots=True)
class Bounce:
    """The part of the host pool through which a GPU and the disk meet: pinned memory, counted like the rest of it.

    Attributes:
        host: geometry of the whole host pool. It lends as much scratch as the device pool does, for layers that are
            read from disk; whoever may fill a buffer of the device's scratch may fill the same one here.
        blocks: slots at its end through which whole blocks move.
    """

    host: PoolGeometry
    blocks: int

    def slots_left(self, scratch_tokens: int) -> int:
        """Return the host slots that remain for KV; negative where the pool cannot lend so much."""
        spare = self.host.scratch_limit - scratch_tokens
        return self.host.num_slots(scratch_tokens) - self.blocks if spare >= 0 else -1


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the tiers of one engine can hold.

    Attributes:
        layout: shape of the blocks.
        device: geometry of the device pool.
        host_slots: blocks the host tier can hold while nothing is lent.
        disk_slots: blocks the disk tier can hold.
        layers_ahead: layers to fetch ahead where there is room for their scratch.
        cold: whether any tier's blocks must be fetched before attention can read them.
        queue_limit: the most bytes that the queue of writes to disk may take out of the device budget; 0 where it lies
            in the host tier.
        queue_least: the least bytes of the same.
        bounce: what the host pool lends, where a GPU and the disk meet in it; None where nothing has to pass.
        disk_failed: the disk tier refused a write and counts for nothing any more.
    """

    layout: BlockLayout
    device: PoolGeometry
    host_slots: int
    disk_slots: int
    layers_ahead: int
    cold: bool = True
    queue_limit: int = 0
    queue_least: int = 0
    bounce: Bounce | None = None
    disk_failed: bool = False

    def plan(
        self, rows: int, tokens: int, held_elsewhere: int = 0, *, paged: bool = False, least_buffer: int = 0
    ) -> ScratchPlan:
        """Divide the device pool for ``rows`` sequences of up to ``tokens`` tokens.

        Args:
            rows: sequences.
            tokens: the longest they get, prompt included.
            held_elsewhere: blocks of other caches of the engine, which keep their room.
            paged: attention reads blocks where they lie, so that no buffer has to hold a layer.
            least_buffer: tokens that a buffer must hold for others.

        Raises:
            CapacityError: they cannot fit; the message names the smallest device budget that would do, or the room that
                is missing in the tiers below.
        """
        call = _Call(rows, tokens, held_elsewhere, paged, least_buffer)
        plan = self._try(self.device, call)
        if plan is not None:
            return plan
        _, least = self._buffers(call)[-1]
        if self._host_left(least) < 0:
            raise CapacityError(self._explain_bounce(call, least))
        raise CapacityError(self._explain(call, least))

    def _buffers(self, call: "_Call") -> list[tuple[int, int]]:
        """Return the ``(num_buffers, buffer_tokens)`` that would do, the best first and the smallest last."""
        return [(number, max(tokens, call.least_buffer)) for number, tokens in self._own_buffers(call)]

    def _own_buffers(self, call: "_Call") -> list[tuple[int, int]]:
        most = 1 + min(self.layers_ahead, len(self.layout.layers))
        if not call.paged:
            return [(number, call.rows * call.tokens) for number in range(most, 0, -1)]
        if not self.cold:
            return [(1, 0)]
        size = self.layout.block_size
        sizes = [min(max(CHUNK_TOKENS, size), call.rows * self.layout.blocks_for(call.tokens) * size)]
        while sizes[-1] > size:
            sizes.append(max(size, sizes[-1] // 2))
        return [(most, tokens) for tokens in sizes] + [(number, size) for number in range(most - 1, 0, -1)]

    def _try(self, device: PoolGeometry, call: "_Call") -> ScratchPlan | None:
        blocks = call.rows * self.layout.blocks_for(call.tokens) + call.held_elsewhere
        for num_buffers, buffer_tokens in self._buffers(call):
            scratch = num_buffers * buffer_tokens
            slots, host_slots = device.num_slots(scratch), self._host_left(scratch)
            if host_slots < 0:
                continue
            # Fetching ahead is a convenience: it never takes more than half of the device from the KV itself.
            if num_buffers > 1 and 2 * slots < device.num_slots():
                continue
            if slots >= self.least_slots(call.rows) and slots + host_slots + self.disk_slots >= blocks:
                return ScratchPlan(num_buffers, buffer_tokens, slots, host_slots)
        return None

    def _host_left(self, scratch_tokens: int) -> int:
        return self.host_slots if self.bounce is None else self.bounce.slots_left(scratch_tokens)

    @staticmethod
    def least_slots(rows: int) -> int:
        """Return the device slots without which no step can begin: a last block a row, and room for its private copy."""
        return 2 * rows

    def _explain(self, call: "_Call", least_scratch: int) -> str:
        size = self.layout.block_size
        kv = call.rows * self.layout.blocks_for(call.tokens) * self.layout.block_bytes
        high = _smallest(lambda budget: bool(self._try(PoolGeometry(self.layout, budget), call)))
        # A pool is divided into at least 8 segments, of which one may be lost, so a little more can hold less. From 8/7
        # of what suffices on everything does: go down from there to the size from which on everything suffices.
        needed = -(-(high * 8 // 7 + max(self.queue_limit, self.queue_least)) // 2**20) + 1
        step = max(1, needed // 4096)  # beyond some GiB the last MiB interests nobody
        while needed > step and self._try(self._pool((needed - step) * 2**20), call):
            needed -= step
        return (
            f"{call} need {_mib(kv)} of KV and {_mib(self.layout.scratch_bytes(1, least_scratch))} of device scratch; the tiers "
            f"hold {self.device.num_slots():,} blocks of {size} tokens on the device, {self.host_slots:,} in host memory "
            f"and {self.disk_slots:,} on disk ({_mib(self.layout.block_bytes)} each)"
            + (f", {call.held_elsewhere:,} of them taken by other caches" if call.held_elsewhere else "")
            + f'; the smallest device.capacity that suffices is "{needed}MiB" with the other tiers as they are'
            + ("" if self.disk_slots else self._disk_hint())
        )

    def _explain_bounce(self, call: "_Call", least_scratch: int) -> str:
        """The host pool is smaller than one layer that is read from disk through it, whatever the device holds."""
        assert self.bounce is not None
        bounce, layout = self.bounce, self.layout
        least = _smallest(
            lambda budget: replace(bounce, host=PoolGeometry(layout, budget)).slots_left(least_scratch) >= 0
        )
        return (
            f"{call} need {_mib(layout.scratch_bytes(1, least_scratch))} of pinned memory through which layers come from disk, and "
            f"the host pool has {_mib(bounce.host.allocated_bytes)} in all; give host.capacity for example "
            f'"{-(-least * 8 // 7 // 2**20) + 1}MiB", or set disk.capacity = 0'
        )

    def _pool(self, budget_bytes: int) -> PoolGeometry:
        return PoolGeometry(self.layout, budget_bytes - queue_bytes(budget_bytes, self.queue_limit, self.queue_least))

    def _disk_hint(self) -> str:
        return "; the disk tier failed, make room there" if self.disk_failed else " (or give disk.capacity some room)"


def queue_bytes(budget_bytes: int, queue_limit: int, queue_least: int = 0) -> int:
    """Return what the queues of writes to disk take out of the budget of the RAM tier that they lie in.

    Args:
        budget_bytes: of that tier.
        queue_limit: the most they may take.
        queue_least: without so much they could not take a single record, however small the tier is.
    """
    return max(queue_least, min(queue_limit, budget_bytes // QUEUE_SHARE))


def _smallest(fits: Callable[[int], bool]) -> int:
    """Return a budget in bytes that fits, of which one byte less does not."""
    low, high = 1, 2
    while not fits(high):
        low, high = high, high * 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:,.1f} KiB"
