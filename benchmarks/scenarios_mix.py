"""The five kinds of conversations that paging pays for, each as a fixed list: real text, lengths drawn once, seed 0.

Every conversation reads its own part of the text, so that nothing is common but a system prompt where one is meant. The text
stands for what users and models said: in the history of a conversation of several turns it stands for the answers too.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

from tierkv.benchmarks.sessions_mix import MESSAGE, MixPlan, Session

TURN: Final = (150, 250)
"""The fewest and the most tokens that a turn adds to a conversation, its message and its answer together."""


@dataclass(frozen=True)
class Scenario:
    """One kind of conversations; all lengths in tokens.

    Attributes:
        title: what a table calls it.
        count: conversations.
        shortest: the least that a prompt has of its own; of a conversation of several turns, what a turn adds.
        longest: the most.
        system: length of the system prompt that all begin with; 0 where there is none.
        turns: of a conversation of several turns, those that are measured, the last one last; empty for others.
        answer: length of every answer.
        seed: of the random numbers.
    """

    title: str
    count: int
    shortest: int
    longest: int
    system: int = 0
    turns: tuple[int, ...] = ()
    answer: int = 8
    seed: int = 0

    @property
    def context(self) -> int:
        """The most tokens that a conversation can come to."""
        history = self.longest * (self.turns[-1] - 1) if self.turns else self.longest
        return self.system + history + MESSAGE[1] + self.answer

    @property
    def num_moments(self) -> int:
        """How often it is measured."""
        return len(self.turns) or 1

    def describe(self) -> dict[str, Any]:
        """Return what a record says of it."""
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """What ``bench scenarios`` measures.

    Attributes:
        scenarios: by name.
        mixed: the load of ``bench sessions``, or one scaled down.
        reserved_sessions: the mixed load's device budget is what so many conversations of it reserve.
        context: what is reserved for each conversation of a scenario, in tokens.
        slots: the scenarios' device budget is what so many reservations take.
        decode_contexts: past lengths at which a token is timed with the cache.
        recompute_lengths: lengths at which one is timed without.
        rounds: timed repeats of the former.
        recompute_rounds: timed repeats of the latter.
        fragments: the factor of the essay's lengths at which fragmentation is tried.
    """

    scenarios: dict[str, Scenario]
    mixed: MixPlan
    reserved_sessions: int = 5
    context: int = 6144
    slots: int = 2
    decode_contexts: tuple[int, ...] = (512, 1024, 2048, 4096, 6144, 8000)
    recompute_lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    rounds: int = 9
    recompute_rounds: int = 3
    fragments: float = 1.0

    @property
    def least_context(self) -> int:
        """The smallest reservation that holds every conversation of the scenarios."""
        return max((one.context for one in self.scenarios.values()), default=1)


FULL: Final = Plan(
    scenarios={
        "short_chats": Scenario("short chats", count=32, shortest=60, longest=400),
        "long_documents": Scenario("long documents", count=5, shortest=4001, longest=6000),
        "many_concurrent": Scenario("many at once", count=56, shortest=100, longest=600),
        "multi_turn": Scenario("multi-turn", count=8, shortest=TURN[0], longest=TURN[1], turns=(2, 4, 8)),
        "shared_prefix": Scenario("shared prefix", count=20, shortest=60, longest=300, system=1000),
    },
    mixed=MixPlan(),
)
"""The lengths and numbers of the table that this measures."""

QUICK: Final = Plan(
    scenarios={
        "short_chats": Scenario("short chats", count=6, shortest=30, longest=100, answer=4),
        "long_documents": Scenario("long documents", count=3, shortest=700, longest=1000, answer=4),
        "many_concurrent": Scenario("many at once", count=14, shortest=80, longest=190, answer=4),
        "multi_turn": Scenario("multi-turn", count=4, shortest=80, longest=120, turns=(2, 4, 8), answer=4),
        "shared_prefix": Scenario("shared prefix", count=6, shortest=30, longest=80, system=256, answer=4),
    },
    mixed=MixPlan(count=8, shortest=125, longest=1024, system=250, answer=4),
    reserved_sessions=3,
    context=1088,
    decode_contexts=(512, 1024, 2048, 4096),
    recompute_lengths=(128, 256, 512),
    fragments=1 / 8,
)
"""Fewer and shorter ones: they show that all works, not what the table's rows come to."""


def moments(text: Sequence[int], scenario: Scenario) -> dict[int, list[Session]]:
    """Return the conversations of a scenario by the turn at which they are; 1 where turns are not counted.

    A conversation at a later turn begins with what it was at an earlier one.

    Args:
        text: token ids of a long text; read on from the front where it is shorter than all conversations together.
        scenario: what they look like.

    Raises:
        ValueError: the text is shorter than the system prompt, or the scenario leaves a prompt no token.
    """
    if len(text) <= scenario.system or not 1 <= scenario.shortest <= scenario.longest or scenario.count < 1:
        raise ValueError("a text longer than the system prompt, and a prompt of a token or more, are needed")
    draw = random.Random(scenario.seed)
    read = _reader(text, scenario.system)
    system = tuple(text[: scenario.system])
    if not scenario.turns:
        return {1: [_session(system, read, draw, scenario) for _ in range(scenario.count)]}
    found: dict[int, list[Session]] = {turn: [] for turn in scenario.turns}
    for _ in range(scenario.count):
        history = system
        for turn in range(1, scenario.turns[-1] + 1):
            said = read(draw.randint(scenario.shortest, scenario.longest))
            if turn in found:
                message = said[: draw.randint(*MESSAGE)]  # the rest of what the turn adds is its answer
                found[turn].append(Session(history, message, bool(system)))
            history += said
    return found


def common_tokens(sessions: Sequence[Session]) -> int:
    """Return how many tokens of all prompts are there again at the beginning of others, block limits aside.

    It is the most that sharing beginnings could save: all tokens, less those of a tree in which each beginning is once.
    """
    prompts = sorted(session.prompt for session in sessions)
    # In this order, of all earlier prompts the one before has the longest beginning in common with a prompt.
    return sum(_common(before, prompt) for before, prompt in pairwise(prompts))


def _session(
    system: tuple[int, ...], read: Callable[[int], tuple[int, ...]], draw: random.Random, scenario: Scenario
) -> Session:
    own = read(draw.randint(scenario.shortest, scenario.longest))
    return Session(system + own, read(draw.randint(*MESSAGE)), bool(system))


def _reader(text: Sequence[int], begin: int) -> Callable[[int], tuple[int, ...]]:
    at = begin

    def read(count: int) -> tuple[int, ...]:
        nonlocal at
        ids = tuple(text[(at + offset) % len(text)] for offset in range(count))
        at += count
        return ids

    return read


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count
