"""The tiered layout with one round in which all conversations are open, instead of one at each number of them."""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

import tierkv
from tierkv.benchmarks.sessions import Say, conclude, take_turns, too_slow
from tierkv.benchmarks.sessions_footprint import footprint_of
from tierkv.benchmarks.sessions_mix import Session
from tierkv.benchmarks.sessions_outcome import Outcome
from tierkv.benchmarks.sessions_run import Advance, Conversations, Reference
from tierkv.errors import CapacityError


def tiered_at_once(
    model: Any,
    config: tierkv.CacheConfig,
    sessions: Sequence[Session],
    references: Sequence[Reference],
    new_tokens: int,
    *,
    bound: float,
    advance: Advance = lambda: None,
    say: Say = lambda _: None,
) -> Outcome:
    """Open all conversations, or as many as there is room for, and only then let all take turns.

    Where turns take too long, the most conversations that keep within the bound are looked for by halving. That is what
    ``tiered`` finds, in fewer rounds, as long as more conversations never make turns faster.

    Args:
        model: tierkv must not be attached to it.
        config: of the engine.
        sessions: the mix.
        references: what they should answer.
        new_tokens: of every answer.
        bound: the largest p90 turn time, in seconds.
        advance: called after every prefill and every turn.
        say: told the p90 at each number of conversations.
    """
    outcome = Outcome()
    with tierkv.attach(model, config) as engine:
        talks = Conversations(engine, sessions, references, new_tokens, advance)
        with closing(talks):
            _resize(talks, outcome, len(sessions))
            low, high = 0, len(talks.caches)  # so many are held, and no more than that can be
            count = high
            while count > low:
                _resize(talks, outcome, count)
                try:
                    if not outcome.rounds:
                        talks.warm_up()
                    held = take_turns(talks, outcome, bound)
                    say(f"{count} conversations: p90 {outcome.rounds[-1].p90:.2f} s")
                    if not held:
                        outcome.refused = too_slow(bound)
                except CapacityError as error:  # prompts fit, and their turns do not
                    held, outcome.refused = False, str(error)
                low, high = (count, high) if held else (low, count - 1)
                count = (low + high + 1) // 2
            _resize(talks, outcome, outcome.held)
            if talks.caches:
                outcome.footprint = footprint_of(engine, talks.tables)
        conclude(talks, outcome)
    return outcome


def _resize(talks: Conversations, outcome: Outcome, count: int) -> None:
    """Open or end conversations until so many are open, or one is refused."""
    while len(talks.caches) > count:
        talks.close_last()
    try:
        while len(talks.caches) < count:
            talks.open_next()
    except CapacityError as error:
        outcome.refused = str(error)
