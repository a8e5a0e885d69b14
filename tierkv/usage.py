"""Usage: the bytes that each tier takes now, and the most it has taken."""

from typing import TYPE_CHECKING

from tierkv.tier import Tier

if TYPE_CHECKING:
    from tierkv.manager import TierManager
    from tierkv.scratch import Scratch
    from tierkv.stores import Stores


class Usage:
    """Counts what tierkv allocated: pools, scratch, queued writes and files.

    A GPU or pinned pool counts whole from the start. A pool in plain memory counts the segments that were ever used:
    the operating system hands out its pages when they are first written, and resident memory grows with them.
    """

    def __init__(self, stores: "Stores", manager: "TierManager", scratch: "Scratch") -> None:
        """Watch the stores of an engine."""
        self._stores = stores
        self._manager = manager
        self._scratch = scratch
        self._peak = dict.fromkeys(Tier, 0)

    def observe(self) -> None:
        """Note the present use, for the peak. Cheap; called once a forward."""
        for tier in Tier:
            self._peak[tier] = max(self._peak[tier], self._base(tier) + self._queue(tier, "peak_queued_bytes"))

    def now(self, tier: Tier) -> int:
        """Return the bytes taken now."""
        return self._base(tier) + self._queue(tier, "queued_bytes")

    def peak(self, tier: Tier) -> int:
        """Return the most bytes ever taken."""
        self.observe()
        return self._peak[tier]

    def _base(self, tier: Tier) -> int:
        if tier is Tier.DISK:
            return sum(store.allocated_bytes for store in (self._stores.disk, self._stores.prefix) if store is not None)
        slab = self._stores.device if tier is Tier.DEVICE else self._stores.host
        if slab is None:
            return 0
        if slab.pinned or not slab.on_cpu:
            return slab.allocated_bytes
        layout = self._stores.layout
        touched = self._manager.pools[tier].touched * layout.block_bytes
        if tier is Tier.DEVICE or self._stores.bounce:
            touched += layout.scratch_bytes(1, self._scratch.tokens)
        if tier is Tier.HOST and self._stores.bounce:
            touched += self._stores.bounce.blocks * layout.block_bytes
        return min(touched, slab.allocated_bytes)

    def _queue(self, tier: Tier, which: str) -> int:
        lender = Tier.HOST if self._stores.host else Tier.DEVICE
        if tier is not lender:
            return 0
        return sum(int(getattr(store, which, 0)) for store in (self._stores.disk, self._stores.prefix))
