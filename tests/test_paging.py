"""What is said for paging, run: the same script on a contiguous allocator and on the paged pool.

`FirstFit` is the thing compared with, written here and used nowhere else.
"""

import pytest

from tierkv.errors import CapacityError
from tierkv.manager import TierManager
from tierkv.moves import Room, Step
from tierkv.placement import Keep
from tierkv.tier import Tier


class FirstFit:
    """Contiguous memory: every request is one interval of tokens, in the lowest gap that holds it."""

    def __init__(self, tokens):
        self.tokens = tokens
        self.requests = {}  # name -> (begin, end)

    @property
    def gaps(self):
        taken = sorted([*self.requests.values(), (self.tokens, self.tokens)])
        begins = [0, *(end for _, end in taken)]
        return [(begin, end) for begin, (end, _) in zip(begins, taken, strict=False) if end > begin]

    @property
    def free(self):
        return sum(end - begin for begin, end in self.gaps)

    def place(self, name, tokens):
        for begin, end in self.gaps:
            if end - begin >= tokens:
                self.requests[name] = (begin, begin + tokens)
                return True
        return False

    def grow(self, name, tokens):
        begin, end = self.requests[name]
        fits = any(gap == end and stop >= begin + tokens for gap, stop in self.gaps)
        if fits:
            self.requests[name] = (begin, begin + tokens)
        return fits

    def end(self, name):
        del self.requests[name]


class Paged:
    """The same three verbs over a TierManager that has a device tier only, unless told otherwise."""

    def __init__(self, tokens, block_size=32, host_tokens=0):
        slots = {Tier.DEVICE: tokens // block_size, Tier.HOST: host_tokens // block_size}
        self.manager = TierManager(block_size, slots, {Tier.DEVICE: 512 // block_size}, Keep(first=1, recent=4))
        self.pool = self.manager.pools[Tier.DEVICE]
        self.tables = {}

    @property
    def free(self):
        return self.pool.free * self.manager.block_size

    def place(self, name, tokens):
        self.tables[name] = self.manager.open()
        return self.grow(name, tokens)

    def grow(self, name, tokens):
        table = self.tables[name]
        try:
            while isinstance(outcome := self.manager.begin([table], tokens - table.length), Room):
                assert outcome.moves
                for move in outcome.moves:
                    self.manager.complete(move)
        except CapacityError:
            return False
        assert isinstance(outcome, Step)
        self.manager.commit(outcome)
        return True

    def end(self, name):
        self.manager.release(self.tables.pop(name))

    def slots(self, name):
        return [block.slots.get(Tier.DEVICE) for block in self.tables[name].blocks]


def play(memory):
    """[A 4096] [B 2048] [C 4096] [free]; then A ends."""
    assert memory.place("A", 4096)
    assert memory.place("B", 2048)
    assert memory.place("C", 4096)
    memory.end("A")


@pytest.mark.parametrize(
    ("free_at_the_end", "wanted"),
    [
        (2048, 6144),  # the example's memory, and all that is free in it
        (2048, 4097),  # one token more than the largest gap
        (4096, 8192),  # the example's D, in a memory with so much free in total
    ],
)
def test_external_fragmentation(free_at_the_end, wanted):
    tokens = 4096 + 2048 + 4096 + free_at_the_end
    contiguous, paged = FirstFit(tokens), Paged(tokens)
    play(contiguous)
    play(paged)
    assert contiguous.gaps == [(0, 4096), (10240, tokens)]
    assert contiguous.free == paged.free == 4096 + free_at_the_end >= wanted

    assert not contiguous.place("D", wanted)

    before = paged.slots("B") + paged.slots("C")
    assert paged.place("D", wanted)
    assert paged.slots("B") + paged.slots("C") == before  # nobody was moved: paging, not compaction
    assert len({*before, *paged.slots("D")}) == len(before) + len(paged.slots("D"))
    assert None not in paged.slots("D")
    # Logically contiguous, physically scattered: D lies around the others.
    assert min(paged.slots("D")) < min(before)
    assert max(paged.slots("D")) > max(before)


def test_more_than_is_free_in_total_is_refused_and_changes_nothing_until_a_tier_below_takes_the_idle():
    """The example's own numbers, 8192 into 4096 + 2048, cannot be placed on one tier by anybody."""
    paged, tiered = Paged(12_288), Paged(12_288, host_tokens=2048)
    play(paged)
    play(tiered)
    assert paged.free == 6144
    before = paged.slots("B") + paged.slots("C")
    assert not paged.place("D", 8192)
    assert paged.free == 6144
    assert paged.slots("B") + paged.slots("C") == before

    assert tiered.place("D", 8192)
    assert None not in tiered.slots("D")
    assert tiered.slots("B") == [None] * 64  # idle for the longest time, swapped out whole
    assert None not in tiered.slots("C")


def test_after_everything_ends_the_pool_is_whole():
    paged = Paged(14_336)
    play(paged)
    assert paged.place("D", 8192)
    for name in "BCD":
        paged.end(name)
    assert paged.free == 14_336
    assert paged.place("E", 14_336)


@pytest.mark.parametrize("block_size", [16, 32])
def test_pre_allocation_wastes_87_percent_and_paging_less_than_a_block(block_size):
    slot, request = 4096, 500
    contiguous = FirstFit(slot)
    assert contiguous.place("request", slot)
    wasted = (slot - request) / slot
    assert int(100 * wasted) == 87

    paged = Paged(slot, block_size)
    paged.place("request", 1)
    for length in range(2, request + 1):
        assert paged.grow("request", length)
        waste = slot - paged.free - length
        assert 0 <= waste < block_size
    assert slot - paged.free - request == 12  # 512 places for 500 tokens, with blocks of 16 and of 32
    assert paged.place("another seven", 7 * 500)  # where there was one slot of 4096


def test_a_request_that_grows_beyond_what_was_foreseen():
    """Allocated as needed, contiguous memory is full beside the request; a page need not be beside it."""
    contiguous, paged = FirstFit(8192), Paged(8192)
    for memory in (contiguous, paged):
        assert memory.place("B", 500)
        assert memory.place("neighbour", 500)
        assert memory.free > 4000
    assert not contiguous.grow("B", 4000)
    assert paged.grow("B", 4000)
    assert contiguous.grow("neighbour", 4000)  # nobody is beside this one


def test_one_system_prompt_for_ten_requests_lies_in_memory_once():
    paged = Paged(16_384)
    assert paged.place("system", 1024)
    for request in range(10):
        paged.tables[request] = paged.manager.fork(paged.tables["system"])
        assert paged.grow(request, 1024 + 64)
    used = 16_384 - paged.free
    assert used == 1024 + 10 * 64
    assert 11 * 1024 + 10 * 64 - used == 10 * 1024  # tokens saved against a copy for everybody
    shared = paged.slots("system")
    assert all(paged.slots(request)[:32] == shared for request in range(10))
    paged.end("system")
    assert 16_384 - paged.free == used  # the others still hold it
