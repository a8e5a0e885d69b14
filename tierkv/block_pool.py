"""BlockPool: the slots of one tier, handed out so that consecutive blocks lie side by side.

A slot is freed when its last reference goes. The owner (a block that lies there) holds one; every copy that still
reads the slot holds another, so a slot can never be reused under a copy that is under way.

The free slots of a segment are a bit mask: finding a neighbour, a whole free segment or the lowest free slot takes
constant time, and a pool of millions of slots costs memory only for the segments that were touched.
"""

from tierkv.errors import CapacityError


class BlockPool:
    """Fixed-size slots with reference counts and run-preferring allocation. Not thread-safe; knows no bytes."""

    def __init__(self, num_slots: int, slots_per_segment: int = 1) -> None:
        """Make a pool of ``num_slots`` free slots, ``slots_per_segment`` of which are neighbours."""
        if num_slots < 0 or slots_per_segment < 1:
            raise ValueError(
                f"a pool needs num_slots >= 0 and slots_per_segment >= 1, not {num_slots}, {slots_per_segment}"
            )
        self.slots_per_segment = slots_per_segment
        self._all = (1 << slots_per_segment) - 1  # the mask of a segment that is entirely free
        self._limit = 0
        self._references: dict[int, int] = {}
        self._masks: dict[int, int] = {}  # free slots of every touched segment, those above the limit included
        self._whole: dict[int, None] = {}  # touched segments that are entirely free, in order of return
        self._partial: dict[int, None] = {}  # segments with some free and some used slots
        self._fresh = 0  # segments from here on were never touched
        self._used_below = 0
        self._frozen = False
        self.resize(num_slots)

    @property
    def num_slots(self) -> int:
        """Slots that may be handed out."""
        return self._limit

    @property
    def used(self) -> int:
        """Slots that are referenced, those above a lowered limit included."""
        return len(self._references)

    @property
    def free(self) -> int:
        """Slots that can be handed out now."""
        return 0 if self._frozen else self._limit - self._used_below

    @property
    def frozen(self) -> bool:
        """Whether the medium failed, so that nothing more is handed out."""
        return self._frozen

    @property
    def touched(self) -> int:
        """Slots of all segments that were ever used."""
        return self._fresh * self.slots_per_segment

    def references(self, slot: int) -> int:
        """Return how many references the slot has; 0 when it is free."""
        return self._references.get(slot, 0)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Hand out ``count`` slots, in runs as long as possible.

        Args:
            count: how many.
            after: the slot of the preceding block of the sequence: its right neighbour is taken first when it is
                free and in the same segment. A sequence that begins gets a whole segment while there is one.

        Raises:
            CapacityError: fewer than ``count`` slots are free; nothing was handed out.
        """
        if count > self.free:
            raise CapacityError(f"{count} slots were asked for and {self.free} of {self._limit} are free")
        slots: list[int] = []
        previous = after
        for _ in range(count):
            previous = self._take(previous)
            slots.append(previous)
        return slots

    def retain(self, slot: int) -> None:
        """Add a reference to a slot in use."""
        if slot not in self._references:
            raise ValueError(f"slot {slot} is free and cannot be retained")
        self._references[slot] += 1

    def release(self, slot: int) -> bool:
        """Drop a reference; return whether the slot is free now.

        Raises:
            ValueError: the slot is already free (released twice).
        """
        count = self._references.get(slot, 0)
        if count == 0:
            raise ValueError(f"slot {slot} was released twice")
        if count > 1:
            self._references[slot] = count - 1
            return False
        del self._references[slot]
        if slot < self._limit:
            self._used_below -= 1
        segment, bit = divmod(slot, self.slots_per_segment)
        self._masks[segment] |= 1 << bit
        self._file(segment)
        return True

    def resize(self, num_slots: int) -> None:
        """Change how many slots may be handed out. Slots in use above a lowered limit stay valid until released."""
        self._limit = num_slots
        self._used_below = sum(slot < num_slots for slot in self._references)
        for segment in self._masks:
            self._file(segment)

    def used_from(self, slot: int) -> list[int]:
        """Return the referenced slots at or above ``slot``, ascending."""
        return sorted(used for used in self._references if used >= slot)

    def freeze(self) -> None:
        """Hand out nothing more (the medium failed); slots in use stay valid."""
        self._frozen = True

    def _take(self, previous: int | None) -> int:
        size = self.slots_per_segment
        if previous is not None and (previous + 1) % size and self._is_free(previous + 1):
            slot = previous + 1
        elif self._whole:  # before fresh ones: memory that was never touched stays untouched
            slot = next(iter(self._whole)) * size
        elif self._fresh * size + size <= self._limit or self._fresh * size < self._limit:
            slot = self._fresh * size
        else:
            segment = next(iter(self._partial))
            slot = segment * size + self._lowest(self._usable(segment))
        segment, bit = divmod(slot, size)
        while self._fresh <= segment:
            self._masks[self._fresh] = self._all
            self._file(self._fresh)
            self._fresh += 1
        self._masks[segment] &= ~(1 << bit)
        self._references[slot] = 1
        self._used_below += 1
        self._file(segment)
        return slot

    def _is_free(self, slot: int) -> bool:
        segment, bit = divmod(slot, self.slots_per_segment)
        return slot < self._limit and segment < self._fresh and bool(self._masks[segment] >> bit & 1)

    def _usable(self, segment: int) -> int:
        """Return the mask of free slots of a segment that lie below the limit."""
        below = max(0, min(self.slots_per_segment, self._limit - segment * self.slots_per_segment))
        return self._masks[segment] & ((1 << below) - 1)

    def _file(self, segment: int) -> None:
        size = self.slots_per_segment
        # Only the last segment can reach beyond the limit.
        usable = self._masks[segment] if (segment + 1) * size <= self._limit else self._usable(segment)
        self._whole.pop(segment, None)
        if usable == self._all:
            self._partial.pop(segment, None)
            self._whole[segment] = None
        elif usable:
            self._partial[segment] = None
        else:
            self._partial.pop(segment, None)

    @staticmethod
    def _lowest(mask: int) -> int:
        return (mask & -mask).bit_length() - 1
