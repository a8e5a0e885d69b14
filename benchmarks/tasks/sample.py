"""What a task is made of: a sample with its scoring, what a sample is asked for, and the draft that is sized.

Ask     which sample, how long, which seed  ->  the only source of random numbers
Draft   its text with a given amount of filler
Sample  the draft that came nearest to the length, with its exact number of tokens
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["retrieval", "aggregation", "qa", "chat"]
"""What a task asks of a model: find, collect, answer about a text, or talk about one."""
Match = Literal["all", "any"]
"""How an output is scored: the share of answers that are in it, or whether one of them is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One prompt with its answers.

    Attributes:
        task: name of the task.
        index: which sample of the task, from 0.
        length: tokens that were asked for; of a user's own sample, what it has.
        prompt: what the user says first.
        turns: what the user says next, after each answer of the model; none outside chats.
        answers: what a right output holds.
        depth: where in the filler the needle lies, 0 at its beginning and 1 at its end; None where there is no single one.
        prompt_tokens: exact tokens of ``prompt`` with the model's own tokenizer and, if it has one, its chat template;
            of a user's own sample that was read without a tokenizer, 0.
        match: how ``score`` counts.
    """

    task: str
    index: int
    length: int
    prompt: str
    turns: tuple[str, ...] = ()
    answers: tuple[str, ...]
    depth: float | None = None
    prompt_tokens: int
    match: Match = "all"

    def score(self, output: str) -> float:
        """Return how much of the answers an output holds, 0 to 1; upper and lower case are the same.

        The scoring of RULER: the share of answers that occur in the output or, where one is enough, whether any does.

        Args:
            output: what the model said; in a chat, all its answers, one after the other.
        """
        said = output.casefold()
        found = [answer.casefold() in said for answer in self.answers]
        return float(any(found)) if self.match == "any" else sum(found) / len(found)


@dataclass(frozen=True, slots=True)
class Ask:
    """What one sample is asked for.

    Attributes:
        task: name of the task.
        index: which sample, from 0.
        count: how many there are.
        length: most tokens of the prompt.
        seed: of the random numbers.
    """

    task: str
    index: int
    count: int
    length: int
    seed: int

    def draw(self) -> random.Random:
        """Return this sample's random numbers, from the beginning.

        They don't depend on the length, so that longer samples ask the same question of more text.
        """
        return random.Random(f"{self.task}/{self.seed}/{self.index}")  # a string: the same in every process

    def draw_common(self) -> random.Random:
        """Return random numbers that all samples have in common, from the beginning."""
        return random.Random(f"{self.task}/{self.seed}")

    @property
    def grid_depth(self) -> float:
        """Depth of this sample when all of them are spread evenly; in the middle where there is only one."""
        return self.index / (self.count - 1) if self.count > 1 else 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """The text of a sample with some amount of filler; fields as in ``Sample``."""

    prompt: str
    answers: tuple[str, ...]
    turns: tuple[str, ...] = ()
    depth: float | None = None


Write = Callable[[Ask, int], Draft]
"""Writes a sample with so many units of filler. More units make a longer text; the same arguments make the same."""
