"""What a simulation counts while it runs, and what it says in the end."""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from tierkv.simulate_times import Times
from tierkv.tier import Tier, Wire


@dataclass
class Counts:
    """Everything that is counted.

    Attributes:
        requests: answered.
        sessions: of which the last turn was answered.
        refused: requests that could not be answered, by the reason.
        prompt_tokens: of all that were answered.
        output_tokens: that were made.
        found_tokens: of prompts, by the tier in which they were found.
        findable_tokens: of prompts, that tiers without bounds would have held.
        homes: blocks that were given a place.
        moves: copies of blocks that the manager asked for.
        shares: blocks that a sequence began with.
        publishes: blocks that were named.
        evictions: named blocks that were forgotten, in memory or on disk.
        waits: how often a step waited for room.
        stall_seconds: of that.
        restore_seconds: in which prefixes were read from disk, and nothing else was done.
        ttft: from the arrival of a request to its first token.
        service: the same from when its turn came.
        inter_token: between two tokens of an answer.
        peak_blocks: the most slots in use, by tier.
    """

    requests: int = 0
    sessions: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    output_tokens: int = 0
    found_tokens: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    findable_tokens: int = 0
    homes: int = 0
    moves: int = 0
    shares: int = 0
    publishes: int = 0
    evictions: int = 0
    waits: int = 0
    stall_seconds: float = 0.0
    restore_seconds: float = 0.0
    ttft: Times = field(default_factory=Times)
    service: Times = field(default_factory=Times)
    inter_token: Times = field(default_factory=Times)
    peak_blocks: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))

    @property
    def block_operations(self) -> int:
        """Homes given, moves, shares, publishes and evictions together."""
        return self.homes + self.moves + self.shares + self.publishes + self.evictions


class HeldSessions:
    """Counts the sessions all of whose blocks are somewhere in the tiers.

    A block goes before the one that it continues. So a session is held as long as its last named block is.

    Attributes:
        most: the most at a time.
    """

    def __init__(self) -> None:
        """Hold none."""
        self.most = 0
        self._session_of: dict[bytes, Hashable] = {}
        self._last_of: dict[Hashable, bytes] = {}

    def hold(self, session: Hashable, key: bytes) -> None:
        """A session's last named block is this one from now on."""
        if (before := self._last_of.get(session)) is not None:
            del self._session_of[before]
        if (other := self._session_of.get(key)) is not None:
            del self._last_of[other]  # it had nothing of its own
        self._last_of[session], self._session_of[key] = key, session
        self.most = max(self.most, len(self._last_of))

    def lose(self, key: bytes) -> None:
        """A block is nowhere any more."""
        if (session := self._session_of.pop(key, None)) is not None:
            del self._last_of[session]


@dataclass(frozen=True)
class Outcome:
    """What a simulation came to.

    Attributes:
        counts: all counters.
        virtual_seconds: from the begin to the last answer.
        wall_seconds: that simulating it took.
        block_bytes: of a block.
        moved_blocks: over each wire, for any reason.
        streamed_bytes: that attention fetched over each wire.
        busy_seconds: of each wire.
        sessions_held: the most sessions all of whose blocks were somewhere in the tiers.
        peak_store_blocks: the most blocks in the prefix store.
        shed_blocks: that should have been written to it and were not.
    """

    counts: Counts
    virtual_seconds: float
    wall_seconds: float
    block_bytes: int
    moved_blocks: dict[Wire, int]
    streamed_bytes: dict[Wire, int]
    busy_seconds: dict[Wire, float]
    sessions_held: int
    peak_store_blocks: int
    shed_blocks: int

    def record(self) -> dict[str, Any]:
        """Return it as JSON values; only ``wall_seconds`` differs between two runs of the same thing."""
        counts, seconds = self.counts, self.virtual_seconds
        found = {tier.label: _share(counts.found_tokens[tier], counts.prompt_tokens) for tier in Tier}
        found["total"] = _share(sum(counts.found_tokens.values()), counts.prompt_tokens)
        found["ceiling"] = _share(counts.findable_tokens, counts.prompt_tokens)
        wires = sorted({*self.moved_blocks, *self.busy_seconds})
        return {
            "requests": counts.requests,
            "sessions": counts.sessions,
            "refused": {"requests": counts.refused.total(), "reasons": dict(counts.refused.most_common(5))},
            "prompt_tokens": counts.prompt_tokens,
            "output_tokens": counts.output_tokens,
            "hit_ratio": found,
            "ttft_seconds": counts.ttft.percentiles(),
            "ttft_service_seconds": counts.service.percentiles(),
            "inter_token_seconds": counts.inter_token.percentiles(),
            "tokens_per_second": _round(counts.output_tokens / seconds) if seconds else None,
            "requests_per_second": _round(counts.requests / seconds) if seconds else None,
            "stall_seconds": {
                "total": _round(counts.stall_seconds),
                "per_token": _round(counts.stall_seconds / max(1, counts.output_tokens)),
                "waits": counts.waits,
            },
            "restore_seconds": _round(counts.restore_seconds),
            "bytes_moved": {wire.label: self.moved_blocks.get(wire, 0) * self.block_bytes for wire in wires},
            "blocks_moved": {wire.label: self.moved_blocks.get(wire, 0) for wire in wires},
            "bytes_streamed": {wire.label: self.streamed_bytes.get(wire, 0) for wire in wires},
            "wire_busy": {wire.label: _share(self.busy_seconds.get(wire, 0.0), seconds) for wire in wires},
            "peak_blocks": {tier.label: counts.peak_blocks[tier] for tier in Tier} | {"store": self.peak_store_blocks},
            "sessions_held": self.sessions_held,
            "shed_blocks": self.shed_blocks,
            "block_operations": counts.block_operations,
            "block_bytes": self.block_bytes,
            "virtual_seconds": _round(seconds),
            "wall_seconds": round(self.wall_seconds, 3),
        }


def _share(part: float, whole: float) -> float:
    return round(part / whole, 6) if whole else 0.0


def _round(value: float) -> float:
    return float(f"{value:.6g}")
