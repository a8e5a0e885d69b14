"""What a layout came to: the rounds that were measured in it, and what a record says of them."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierkv.benchmarks.sessions_footprint import Footprint


@dataclass
class Round:
    """Every open conversation's turn, once.

    Attributes:
        sessions: conversations that were open.
        turn_seconds: of each.
        bytes: what the tiers took at the most so far, by tier.
        saved_bytes: of KV that would have been there twice without sharing.
        moved_bytes: over each wire since the engine was made.
        room_waits: times that a forward waited for blocks to move down, since then.
        stall_seconds: that forwards waited for cold blocks, since then.
        held: whether it kept within the bound.
    """

    sessions: int
    turn_seconds: list[float]
    bytes: dict[str, int] = field(default_factory=dict)
    saved_bytes: int = 0
    moved_bytes: dict[str, int] = field(default_factory=dict)
    room_waits: int = 0
    stall_seconds: float = 0.0
    held: bool = True

    @property
    def p90(self) -> float:
        """The turn time that nine of ten turns do not exceed, in seconds."""
        return p90(self.turn_seconds)

    def row(self) -> dict[str, Any]:
        """Return it for a record."""
        return {
            "sessions": self.sessions,
            "held": self.held,
            "p90_turn_seconds": round(self.p90, 4),
            "turn_seconds": [round(seconds, 4) for seconds in self.turn_seconds],
            "bytes": self.bytes,
            "saved_bytes": self.saved_bytes,
            "moved_bytes": self.moved_bytes,
            "room_waits": self.room_waits,
            "stall_seconds": round(self.stall_seconds, 3),
        }


@dataclass
class Outcome:
    """What one layout came to.

    Attributes:
        rounds: all that were measured, in order.
        refused: what ended the growth: the words of the refusal, or empty where nothing was refused.
        computed: prompts that a forward computed in this layout.
        copied: prompts whose K and V came from the stock run.
        unequal: ``(open conversations, conversation)`` of every answer that differed from the stock cache's.
        threads: of the concurrent round, where one was asked for.
        footprint: what the conversations that are held take between turns; None where none is, or nothing was allocated.
    """

    rounds: list[Round] = field(default_factory=list)
    refused: str = ""
    computed: int = 0
    copied: int = 0
    unequal: list[tuple[int, int]] = field(default_factory=list)
    threads: dict[str, Any] | None = None
    footprint: Footprint | None = None

    @property
    def last(self) -> Round | None:
        """The round with the most conversations that kept within the bound."""
        return max((one for one in self.rounds if one.held), key=lambda one: one.sessions, default=None)

    @property
    def held(self) -> int:
        """How many conversations the layout holds."""
        return self.last.sessions if self.last else 0

    @property
    def p90(self) -> float | None:
        """The p90 turn time at that many, in seconds: the median of the rounds that kept within the bound."""
        times = [one.p90 for one in self.rounds if one.held and one.sessions == self.held]
        return statistics.median(times) if times else None

    def row(self) -> dict[str, Any]:
        """Return it for a record."""
        return {
            "rounds": [one.row() for one in self.rounds],
            "refused": self.refused,
            "prompts_computed": self.computed,
            "prompts_copied": self.copied,
            "unequal_answers": [{"sessions": opened, "session": index} for opened, index in self.unequal],
        }


def p90(seconds: Sequence[float]) -> float:
    """Return the 90th percentile, interpolated between the times that there are."""
    return statistics.quantiles(seconds, n=10, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]


def figures(found: Mapping[str, Outcome]) -> dict[str, Any]:
    """Return what the record says of each layout at the most conversations that it held."""
    together = found["tiered"].threads
    bytes_of = {name: outcome.last.bytes if outcome.last else {} for name, outcome in found.items()}
    shared = found["shared"].last
    return {
        "sessions_held": {name: outcome.held for name, outcome in found.items()},
        "tokens_equal": not any(outcome.unequal for outcome in found.values())
        and (together is None or together["tokens_equal"]),
        "p90_turn_seconds": {
            name: None if outcome.p90 is None else round(outcome.p90, 4) for name, outcome in found.items()
        },
        "saved_bytes": shared.saved_bytes if shared else 0,
        "device_bytes": {name: taken.get("device", 0) for name, taken in bytes_of.items()},
        "ram_bytes": {name: taken.get("host", 0) for name, taken in bytes_of.items()},
        "disk_bytes": {name: taken.get("disk", 0) for name, taken in bytes_of.items()},
    }
