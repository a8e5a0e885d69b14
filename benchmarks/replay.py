"""How many blocks each eviction rule would have found again: traces replayed against the rules, without any KV.

Simulated, but by the rules that run: a store with a capacity in bytes keeps its book with ``tierkv.eviction`` as every
store does. For each request the leading run of blocks that are there is found and touched, last block first; the blocks
behind it are inserted as a chain. Before each, victims go until there is room; where none may go, the rest isn't kept.
Blocks are full: what is left over at the end of a prompt is never stored. Answers are stored when they come back as
part of the next prompt.
"""

import heapq
from array import array
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from tierkv.eviction import Entry, MemoryLedger, make_policy
from tierkv.traces import BLOCK_TOKENS, Request

BLOCK_BYTES: Final = BLOCK_TOKENS * 128 * 1024
"""Of one block: Llama-3.1-8B in bfloat16, 128 KiB a token. All blocks are equal, so hit ratios don't depend on it."""
HALF_ATTENTION: Final = 30_500
"""Position at which a token's attention costs as much as all else it costs: 2 * 8.0e9 operations through the weights of
Llama-3.1-8B, and 4 * 32 layers * 4,096 for each token before it."""
BELADY: Final = "belady"


@dataclass
class Trace:
    """The blocks of all requests, numbered so that equal numbers mean equal tokens from the start of the prompt.

    Attributes:
        requests: the block numbers of each request, in order.
        parents: by block number, the block before it; -1 for a first one.
        depths: by block number, how many blocks come before it.
        input_tokens: of all requests.
    """

    requests: "list[array[int]]" = field(default_factory=list)
    parents: "array[int]" = field(default_factory=lambda: array("q"))
    depths: "array[int]" = field(default_factory=lambda: array("q"))
    input_tokens: int = 0

    @property
    def lookups(self) -> int:
        """Full blocks of all requests: N."""
        return sum(map(len, self.requests))

    @property
    def unique(self) -> int:
        """Different ones among them: U. A store of that many never evicts."""
        return len(self.parents)

    def facts(self) -> dict[str, Any]:
        """Return what a record says of it. ``ceiling`` is the hit ratio of a store without bounds, (N - U) / N."""
        lookups = self.lookups
        return {
            "requests": len(self.requests),
            "input_tokens": self.input_tokens,
            "block_lookups": lookups,
            "unique_blocks": self.unique,
            "unique_bytes": self.unique * BLOCK_BYTES,
            "ceiling": _share(lookups - self.unique, lookups),
        }


def compile_trace(requests: Iterable[Request]) -> Trace:
    """Number the full blocks of a trace. Ids are chained here, so it does not matter whether they were in the file."""
    trace = Trace()
    numbers: dict[tuple[int, int], int] = {}
    for request in requests:
        blocks = array("q")
        parent = -1
        for depth, one in enumerate(request.hash_ids[: request.input_tokens // BLOCK_TOKENS]):
            number = numbers.setdefault((parent, one), len(numbers))
            if number == len(trace.parents):
                trace.parents.append(parent)
                trace.depths.append(depth)
            blocks.append(number)
            parent = number
        trace.requests.append(blocks)
        trace.input_tokens += request.input_tokens
    return trace


@dataclass
class Outcome:
    """What one rule came to at one capacity.

    Attributes:
        policy: its name.
        capacity_bytes: that the store had.
        block_hits: full blocks that were found.
        evictions: blocks that went.
        block_hit_ratio: of all full blocks.
        token_hit_ratio: tokens in them, of all tokens of all prompts.
        compute_hit_ratio: what computing them would have cost, of what all full blocks cost: a block at position p costs
            ``1 + p / HALF_ATTENTION``.
    """

    policy: str
    capacity_bytes: int
    block_hits: int = 0
    evictions: int = 0
    block_hit_ratio: float = 0.0
    token_hit_ratio: float = 0.0
    compute_hit_ratio: float = 0.0

    def row(self) -> dict[str, Any]:
        """Return it for a record."""
        return asdict(self)


def replay(trace: Trace, policy: str, capacity_bytes: int, advance: Callable[[int], None] = lambda _: None) -> Outcome:
    """Replay a trace against one rule.

    Args:
        trace: what is asked for.
        policy: a name that ``make_policy`` knows, or ``BELADY``.
        capacity_bytes: of the store.
        advance: told now and then how many more requests are done.

    Raises:
        ValueError: there is no such rule.
    """
    outcome = Outcome(policy, capacity_bytes)
    run = _belady if policy == BELADY else _rule
    found = run(trace, outcome, capacity_bytes, advance)
    cost_found = cost = 0.0
    for blocks, hits in zip(trace.requests, found, strict=True):
        outcome.block_hits += hits
        cost_found += _cost_of(hits)
        cost += _cost_of(len(blocks))
    outcome.block_hit_ratio = _share(outcome.block_hits, trace.lookups)
    outcome.token_hit_ratio = _share(outcome.block_hits * BLOCK_TOKENS, trace.input_tokens)
    outcome.compute_hit_ratio = _share(cost_found, cost)
    return outcome


def _rule(trace: Trace, outcome: Outcome, capacity_bytes: int, advance: Callable[[int], None]) -> list[int]:
    """Return how many leading blocks of each request a store with this rule finds."""
    policy, ledger = make_policy(outcome.policy), MemoryLedger()
    keys = [number.to_bytes(8, "big") for number in range(trace.unique)]
    costs = [_cost_of(depth + 1) - _cost_of(depth) for depth in range(max(trace.depths, default=-1) + 1)]
    room = capacity_bytes
    tail: bytes | None = None

    def may_go(entry: Entry) -> bool:
        return entry.key != tail  # the chain being inserted: all before its last block have children

    found = []
    for blocks in _counted(trace.requests, advance):
        run = []
        for number in blocks:
            entry = ledger.find(keys[number])
            if entry is None or not entry.stored:
                break
            run.append(entry)
        for entry in reversed(run):
            policy.touch(ledger, entry)
        found.append(len(run))
        tail = run[-1].key if run else None
        for number in blocks[len(run) :]:
            while room < BLOCK_BYTES and (victim := policy.victim(ledger, may_go)) is not None:
                policy.evicted(ledger, victim)
                room += victim.num_bytes
                outcome.evictions += 1
            if room < BLOCK_BYTES:
                break
            policy.insert(ledger, Entry(keys[number], tail, BLOCK_BYTES, costs[trace.depths[number]]))
            room -= BLOCK_BYTES
            tail = keys[number]
    return found


def _belady(trace: Trace, outcome: Outcome, capacity_bytes: int, advance: Callable[[int], None]) -> list[int]:
    """Return how many leading blocks of each request are found by a store that knows the future.

    Belady, "A study of replacement algorithms for a virtual-storage computer", 1966: what is asked for the latest goes
    first; here the deepest among equals, and what is never asked for again is not kept at all. As whoever asks for a
    block asks for its parents too, this never takes a parent before its children. Room is counted between requests, so
    no rule above finds more blocks.
    """
    never = len(trace.requests)
    next_of = array("q", [never]) * trace.unique
    coming = [array("q")] * never
    for index in range(never - 1, -1, -1):
        blocks = trace.requests[index]
        coming[index] = array("q", [next_of[number] for number in blocks])
        for number in blocks:
            next_of[number] = index
    kept = bytearray(trace.unique)
    since = array("q", [never]) * trace.unique  # the request at which it came; one that goes at once was never in
    count, limit = 0, capacity_bytes // BLOCK_BYTES
    latest: list[tuple[int, int, int]] = []  # (-next request, -depth, block); out of date where next_of says otherwise
    found = []
    for index, blocks in enumerate(_counted(trace.requests, advance)):
        hits = 0
        while hits < len(blocks) and kept[blocks[hits]]:
            hits += 1
        found.append(hits)
        for number, then in zip(blocks, coming[index], strict=True):
            next_of[number] = then
            keep = then < never
            count += keep - kept[number]
            outcome.evictions += kept[number] > keep
            if keep and not kept[number]:
                since[number] = index
            kept[number] = keep
            if keep:
                heapq.heappush(latest, (-then, -trace.depths[number], number))
        while count > limit:
            then, _, number = heapq.heappop(latest)
            if kept[number] and next_of[number] == -then:
                kept[number] = 0
                count -= 1
                outcome.evictions += since[number] < index
    return found


def _counted(requests: "list[array[int]]", advance: Callable[[int], None]) -> "Iterable[array[int]]":
    """Yield the requests and tell after every hundredth part of them."""
    step = max(1, len(requests) // 100)
    for index, blocks in enumerate(requests, 1):
        yield blocks
        if index % step == 0:
            advance(step)
    advance(len(requests) % step)


def _cost_of(blocks: int) -> float:
    """Return what computing so many leading blocks costs; 1 is a block without attention."""
    return blocks + blocks * blocks * BLOCK_TOKENS / (2 * HALF_ATTENTION)


def _share(part: float, whole: float) -> float:
    return round(part / whole, 6) if whole else 0.0
