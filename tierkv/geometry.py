"""PoolGeometry: how many slots a pool of so many bytes has, and what scratch at its end costs. Pure arithmetic."""

from dataclasses import dataclass

from tierkv.layout import SEGMENT_TOKENS, BlockLayout

MIN_SEGMENTS = 8
"""A small pool has smaller segments, so that scratch, which takes whole segments, does not eat it."""


@dataclass(frozen=True)
class PoolGeometry:
    """The shape of a slab of ``capacity_bytes`` for blocks of one layout.

    Every layer group has one flat K and one flat V tensor, in proportion, so that the same ``total_tokens`` fit in
    each. Slots are numbered from the bottom; scratch is lent from the top.
    """

    layout: BlockLayout
    capacity_bytes: int

    @property
    def total_tokens(self) -> int:
        """Tokens, in all layers, that the bytes hold."""
        return self.capacity_bytes // self.layout.token_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the flat tensors; at most ``capacity_bytes``."""
        return self.total_tokens * self.layout.token_bytes

    @property
    def scratch_limit(self) -> int:
        """The most tokens of one layer that can be lent."""
        return self.total_tokens * min(len(group.members) for group in self.layout.groups)

    @property
    def slots_per_segment(self) -> int:
        """Neighbouring slots that form one dense matrix per head."""
        size = self.layout.block_size
        slots = max(1, SEGMENT_TOKENS // size)
        while slots > 1 and self.total_tokens // (slots * size) < MIN_SEGMENTS:
            slots //= 2
        return slots

    def num_slots(self, scratch_tokens: int = 0) -> int:
        """Return the slots that remain when every group lends room for ``scratch_tokens`` tokens of one layer."""
        per_segment = self.slots_per_segment
        segments = min(
            (self.total_tokens * len(group.members) - scratch_tokens)
            // (len(group.members) * per_segment * self.layout.block_size)
            for group in self.layout.groups
        )
        return max(0, segments) * per_segment
