"""A task: a way to write samples, and how they are made of an exact length."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tierkv.benchmarks.tasks.sample import Ask, Draft, Kind, Match, Sample, Write
from tierkv.benchmarks.tasks.sizing import fit, prompt_ids
from tierkv.errors import ConfigError

Counter = Callable[[int], int]
"""Counts the tokens of a sample with so much filler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One kind of samples.

    Attributes:
        name: its name.
        title: what it is, in one line.
        kind: what it asks of a model.
        max_new_tokens: tokens that an answer may take; in a chat, each answer.
        write: writes a sample.
        least: units of filler that the shortest sample has.
        match: how outputs are scored.
        same_filler: whether all samples have the same filler.
    """

    name: str
    title: str
    kind: Kind
    max_new_tokens: int
    write: Write
    least: int = 0
    match: Match = "all"
    same_filler: bool = False

    def make(self, tokenizer: Any, length: int, count: int, seed: int) -> list[Sample]:
        """Make samples; arguments and errors are those of ``make_samples``."""
        _check(length, count, seed)
        asks = [Ask(self.name, index, count, length, seed) for index in range(count)]
        counters = [self._counter(tokenizer, ask) for ask in asks]
        shortest = max(tokens(self.least) for tokens in counters)
        if shortest > length:
            least = self._least_length(tokenizer, asks, shortest)
            raise ConfigError(
                f"{length:,} tokens are too short for the task {self.name}: with this tokenizer it needs at least {least:,}"
            )
        amounts = self._amounts(counters, length)
        return [
            self._sample(tokenizer, ask, amount, tokens(amount))
            for ask, amount, tokens in zip(asks, amounts, counters, strict=True)
        ]

    def _amounts(self, counters: Sequence[Counter], length: int) -> list[int]:
        """Return how much filler each sample has."""
        if self.same_filler:
            amount = fit(counters[0], length, self.least)
            while amount > self.least and any(tokens(amount) > length for tokens in counters):
                amount -= 1
            return [amount] * len(counters)
        amounts: list[int] = []
        for tokens in counters:
            amounts.append(fit(tokens, length, self.least, amounts[-1] if amounts else None))
        return amounts

    def _least_length(self, tokenizer: Any, asks: Sequence[Ask], length: int) -> int:
        """Return the least length that holds every sample without filler; a longer one may have more that must be there."""
        while True:
            counters = [self._counter(tokenizer, replace(ask, length=length)) for ask in asks]
            shortest = max(tokens(self.least) for tokens in counters)
            if shortest <= length:
                return length
            length = shortest

    def _counter(self, tokenizer: Any, ask: Ask) -> Counter:
        @cache
        def tokens(amount: int) -> int:
            return len(prompt_ids(tokenizer, self._draft(tokenizer, ask, amount).prompt))

        return tokens

    def _draft(self, tokenizer: Any, ask: Ask, amount: int) -> Draft:
        """Write a sample. A model that only continues texts is given the beginning of an answer to continue."""
        draft = self.write(ask, amount)
        if getattr(tokenizer, "chat_template", None):
            return draft
        return replace(
            draft, prompt=f"{draft.prompt}\nAnswer:", turns=tuple(f"{turn}\nAnswer:" for turn in draft.turns)
        )

    def _sample(self, tokenizer: Any, ask: Ask, amount: int, tokens: int) -> Sample:
        draft = self._draft(tokenizer, ask, amount)
        return Sample(
            task=self.name,
            index=ask.index,
            length=ask.length,
            prompt=draft.prompt,
            turns=draft.turns,
            answers=draft.answers,
            depth=draft.depth,
            prompt_tokens=tokens,
            match=self.match,
        )


def _check(length: int, count: int, seed: int) -> None:
    for name, value, what in (("length", length, "tokens"), ("count", count, "samples")):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} {value!r} is not a number of {what}; give a whole number from 1 on")
    if type(seed) is not int:
        raise ConfigError(f"seed {seed!r} is not a whole number; give one")
