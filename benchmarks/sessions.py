"""How many conversations one device budget holds: reserved in one piece, in blocks, with shared prefixes, and in tiers.

A layout *holds* n conversations when the first n of the mix are prefilled, then each completes a turn in round robin
without being refused, and the p90 turn time stays within ``BOUND`` times that of ``paged`` at its own capacity.

    contiguous  every conversation reserves its longest context, as static allocation does: budget // bytes. Its tokens and
                turn times are those of ``DynamicCache`` (whose bytes are counted as if they were reserved)
    paged       tierkv with a device tier only, nothing shared
    shared      the same, with equal prefixes shared
    tiered      the same device budget, with host memory and disk below

Turns take their time one after the other, layout after layout, so a machine that slows down meanwhile blurs the bound; a
round that breaks it is therefore repeated once, and both are kept.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tierkv
from tierkv.benchmarks.sessions_footprint import footprint_of
from tierkv.benchmarks.sessions_mix import Session
from tierkv.benchmarks.sessions_outcome import Outcome, Round, p90
from tierkv.benchmarks.sessions_run import Advance, Conversations, Reference, generate, reference_of
from tierkv.config import load_config
from tierkv.errors import CapacityError
from tierkv.integrations.hf_compat import block_layout

LAYOUTS: Final = ("contiguous", "paged", "shared", "tiered")
BOUND: Final = 2.0
"""How many times paged's p90 the p90 turn time may be."""
PAGED_ROUNDS: Final = 3
"""Rounds of the layout that all others are compared with; the median of their p90 counts."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Budgets:
    """Bytes of every layout's tiers.

    Attributes:
        device: the one device budget.
        host: of ``tiered``.
        disk: of ``tiered``.
        folder: where its disk tier lies.
    """

    device: int
    host: int
    disk: int
    folder: Path

    def config(self, layout: str) -> tierkv.CacheConfig:
        """Return the configuration of an engine; the user's environment has no say."""
        tiered = layout == "tiered"
        return load_config(
            {
                "device": {"capacity": self.device},
                "host": {"capacity": self.host if tiered else 0},
                "disk": {"capacity": self.disk if tiered else 0, "path": str(self.folder)},
                "prefix": {"share": layout != "paged"},
            },
            environ={},
        )


def token_bytes(model: Any) -> int:
    """Return the bytes of K and V of one token, in all layers that are cached."""
    layout, _ = block_layout(model, tierkv.CacheConfig().block_size)
    return layout.token_bytes


def check_budgets(model: Any, budgets: Budgets) -> None:
    """Find out whether engines can be made of the budgets, before anything takes long.

    Raises:
        ConfigError: they cannot; the message says what would do.
    """
    for layout in ("paged", "tiered"):
        tierkv.attach(model, budgets.config(layout)).close()


def run_references(model: Any, sessions: Sequence[Session], new_tokens: int, advance: Advance) -> list[Reference]:
    """Run every conversation on the stock cache; call ``advance`` after each."""
    found = []
    generate(model, sessions[0].prompt[:64], 2, None)  # warm up
    for session in sessions:
        found.append(reference_of(model, session, new_tokens))
        advance()
    return found


def contiguous(budgets: Budgets, reserved_bytes: int, references: Sequence[Reference]) -> Outcome:
    """Return what reserving ``reserved_bytes`` for each conversation comes to, with the stock run's turn times."""
    held = min(budgets.device // reserved_bytes, len(references))
    if not held:
        return Outcome(refused=f"one conversation reserves {reserved_bytes:,} bytes")
    taken = {"device": held * reserved_bytes, "host": 0, "disk": 0}
    refused = f"the budget has room for {held} times {reserved_bytes:,} bytes" if held < len(references) else ""
    return Outcome([Round(held, [one.seconds for one in references[:held]], taken)], refused, computed=held)


def on_device(
    model: Any,
    config: tierkv.CacheConfig,
    sessions: Sequence[Session],
    references: Sequence[Reference],
    new_tokens: int,
    *,
    bound: float | None,
    rounds: int = PAGED_ROUNDS,
    advance: Advance = lambda: None,
) -> Outcome:
    """Find out how many conversations an engine without lower tiers holds: open them until one is refused, then take turns.

    Args:
        model: tierkv must not be attached to it.
        config: of the engine.
        sessions: the mix.
        references: what they should answer.
        new_tokens: of every answer.
        bound: the largest p90 turn time, in seconds; None where this layout is the one to compare with.
        rounds: that are measured where there is no bound.
        advance: called after every prefill and every turn.
    """
    outcome = Outcome()
    with tierkv.attach(model, config) as engine:
        talks = Conversations(engine, sessions, references, new_tokens, advance)
        with closing(talks):
            while len(talks.caches) < len(sessions):
                try:
                    talks.open_next()
                except CapacityError as error:
                    outcome.refused = str(error)
                    break
            while talks.caches:
                try:
                    talks.warm_up()
                    if not take_turns(talks, outcome, bound, rounds):
                        outcome.refused = too_slow(bound)
                except CapacityError as error:  # prompts fit, and their turns do not
                    outcome.refused = str(error)
                if outcome.last is not None:
                    outcome.footprint = footprint_of(engine, talks.tables)
                    break
                talks.close_last()
        conclude(talks, outcome)
    return outcome


def tiered(
    model: Any,
    config: tierkv.CacheConfig,
    sessions: Sequence[Session],
    references: Sequence[Reference],
    new_tokens: int,
    *,
    bound: float,
    first: int = 1,
    threads: int = 0,
    advance: Advance = lambda: None,
    say: Say = lambda _: None,
) -> Outcome:
    """Open one conversation after the other and let all take turns each time, until one is refused or turns take too long.

    Args:
        model: tierkv must not be attached to it.
        config: of the engine.
        sessions: the mix.
        references: what they should answer.
        new_tokens: of every answer.
        bound: the largest p90 turn time, in seconds.
        first: conversations at the first round; fewer are opened without one.
        threads: of a last round in which so many generate at once; 0 for none.
        advance: called after every prefill and every turn.
        say: told the p90 at each number of conversations.
    """
    outcome = Outcome()
    with tierkv.attach(model, config) as engine:
        talks = Conversations(engine, sessions, references, new_tokens, advance)
        with closing(talks):
            try:
                while len(talks.caches) < len(sessions):
                    talks.open_next()
                    if len(talks.caches) < first:
                        continue
                    if not outcome.rounds:
                        talks.warm_up()
                    held = take_turns(talks, outcome, bound)
                    say(f"{len(talks.caches)} conversations: p90 {outcome.rounds[-1].p90:.2f} s")
                    if not held:
                        outcome.refused = too_slow(bound)
                        break
            except CapacityError as error:
                outcome.refused = str(error)
            while len(talks.caches) > outcome.held:
                talks.close_last()
            if threads and talks.caches:
                outcome.threads = _together(talks, threads)
        conclude(talks, outcome)
    return outcome


def take_turns(talks: Conversations, outcome: Outcome, bound: float | None, rounds: int = PAGED_ROUNDS) -> bool:
    """Measure; return whether it kept within the bound, at the second try at the latest."""
    for _ in range(rounds if bound is None else 2):
        seconds = talks.round()
        stats = talks.engine.stats()
        measured = Round(
            len(talks.caches),
            seconds,
            {name: tier.peak_bytes for name, tier in stats.tiers.items()},
            stats.prefix.saved_bytes,
            stats.moved_bytes,
            stats.counters.room_waits,
            stats.counters.stall_seconds,
        )
        measured.held = bound is None or measured.p90 <= bound
        outcome.rounds.append(measured)
        if measured.held and bound is not None:
            return True
    return bound is None


def too_slow(bound: float | None) -> str:
    """Return the words of a refusal for time."""
    return f"p90 turn time above {bound:.2f} s"


def _together(talks: Conversations, threads: int) -> dict[str, Any]:
    unequal = len(talks.unequal)
    found = talks.threaded_round(threads)
    return {
        "threads": threads,
        "sessions": len(talks.caches),
        "finish_seconds": [round(seconds, 4) for seconds in found.finished],
        "spread": round(found.spread, 4),
        "turn_seconds": [round(seconds, 4) for seconds in found.turn_seconds],
        "p90_turn_seconds": round(p90(found.turn_seconds), 4),
        "tokens_equal": len(talks.unequal) == unequal,
    }


def conclude(talks: Conversations, outcome: Outcome) -> None:
    """Note in an outcome what was computed, and which answers differed."""
    outcome.computed, outcome.copied, outcome.unequal = talks.computed, talks.copied, talks.unequal
