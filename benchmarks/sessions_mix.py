"""The fixed mix of conversations that ``bench sessions`` is asked about: real text, lengths drawn once, seed 0.

Prompt lengths are drawn uniformly: it is the least favourable of the usual choices for whoever does not reserve (a mix
with more short prompts would fit more often). Every conversation reads its own part of the text, so that only the system
prompt is common, and nothing else is shared by accident.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

SYSTEM_EVERY: Final = 5
"""Conversations 0, 5, 10 ... begin with the system prompt."""
MESSAGE: Final = (20, 60)
"""The fewest and the most tokens of a user's message."""


@dataclass(frozen=True)
class MixPlan:
    """What the conversations look like; all lengths in tokens.

    Attributes:
        count: conversations in the mix.
        shortest: the least that a prompt has of its own text.
        longest: the most that a prompt has, system prompt included.
        system: length of the system prompt.
        answer: length of every answer.
        seed: of the random numbers.
    """

    count: int = 16
    shortest: int = 500
    longest: int = 4096
    system: int = 1000
    answer: int = 16
    seed: int = 0

    @property
    def context(self) -> int:
        """The most tokens that a conversation can come to: what a static allocation reserves for each."""
        return self.longest + MESSAGE[1] + self.answer


@dataclass(frozen=True)
class Session:
    """One conversation: what it holds when it is prefilled, and the turn that it then takes.

    Attributes:
        prompt: ids of the history, system prompt included.
        message: ids of the user's next message.
        has_system: whether it begins with the common system prompt.
    """

    prompt: tuple[int, ...]
    message: tuple[int, ...]
    has_system: bool

    @property
    def turn(self) -> tuple[int, ...]:
        """All ids that its turn passes to ``generate``."""
        return self.prompt + self.message


def make_mix(text: Sequence[int], plan: MixPlan) -> list[Session]:
    """Return the conversations of a plan.

    Args:
        text: token ids of a long text; read on from the front where it is shorter than all conversations together.
        plan: what they look like.

    Raises:
        ValueError: the text is shorter than the system prompt, or the plan leaves a prompt no room.
    """
    if len(text) <= plan.system or plan.shortest + plan.system > plan.longest or plan.shortest < 1:
        raise ValueError("a text longer than the system prompt, and room for it and a prompt of its own, are needed")
    draw = random.Random(plan.seed)
    at = plan.system

    def read(count: int) -> tuple[int, ...]:
        nonlocal at
        ids = tuple(text[(at + offset) % len(text)] for offset in range(count))
        at += count
        return ids

    system = tuple(text[: plan.system])
    sessions = []
    for index in range(plan.count):
        has_system = index % SYSTEM_EVERY == 0
        begin = system if has_system else ()
        length = draw.randint(plan.shortest + len(begin), plan.longest)
        message = draw.randint(*MESSAGE)
        sessions.append(Session(begin + read(length - len(begin)), read(message), has_system))
    return sessions


def describe(plan: MixPlan, sessions: Sequence[Session]) -> dict[str, Any]:
    """Return what a record says of the mix."""
    return {
        "prompt_tokens": [len(session.prompt) for session in sessions],
        "message_tokens": [len(session.message) for session in sessions],
        "answer_tokens": plan.answer,
        "shortest": plan.shortest,
        "longest": plan.longest,
        "lengths": "uniform",
        "system_tokens": plan.system,
        "system_share": 1 / SYSTEM_EVERY,
        "system_sessions": [index for index, session in enumerate(sessions) if session.has_system],
        "text": "pydoc_data.topics, each conversation its own part",
        "seed": plan.seed,
    }


def document_ids(tokenizer: Any) -> list[int]:
    """Return the ids of Python's own documentation.

    Raises:
        ImportError: this Python came without it.
    """
    from pydoc_data.topics import topics

    # Piece by piece: as one text it is longer than any model takes, of which tokenizers warn.
    texts = ["\n\n".join((topics[name].strip("\n"), "")) for name in sorted(topics)]
    return [token for ids in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] for token in ids]
