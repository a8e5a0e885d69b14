"""Tasks whose answer is spread over the whole text: follow a variable, find the words that come most often.

Source: Hsieh et al., "RULER: what's the real context size of your long-context language models?" (2024). Structure and
scoring are RULER's, the words are our own: "RULER-style", and not to be compared with its published scores.
"""

import random
import string
from collections.abc import Sequence
from itertools import pairwise
from math import pi
from typing import Final

from tierkv.benchmarks.tasks.names import letters, words
from tierkv.benchmarks.tasks.sample import Ask, Draft
from tierkv.benchmarks.tasks.text import NOISE, insert, noise

HOPS: Final = 4
COMMON: Final = 10
"""Words that come most often, all of which are asked for."""
LEAST_CODED: Final = 80
"""Coded words that are needed for the second, third and fourth most frequent to be told from the fifth."""

_EXAMPLE_FROM: Final = 1024
"""Length in tokens from which on a solved example comes first; in a shorter prompt it would leave no room."""
_LONG_FROM: Final = 4096
"""Length in tokens from which on words repeat as often as in RULER's full setting."""


def variable_tracking(ask: Ask, sentences: int) -> Draft:
    """Write a chain of assignments into noise, and ask for every variable that has its value (RULER's ``vt``)."""
    draw = ask.draw()
    value = str(draw.randrange(20_000, 100_000))
    names = letters(draw, HOPS + 1, 5, string.ascii_uppercase)
    parts = [_TRACK, *_chain(names, value, sorted(draw.random() for _ in names), sentences)]
    if ask.length >= _EXAMPLE_FROM:
        # Names of three letters, and a value that no other chain has.
        shown = letters(draw, HOPS + 1, 3, string.ascii_uppercase)
        example = _chain(shown, "12345", (0.1, 0.3, 0.5, 0.7, 0.9), 2 * len(NOISE))
        parts = [_TRACK, *example, _listing(shown), *parts]
    return Draft(prompt="\n\n".join(parts), answers=tuple(names))


_TRACK: Final = "Assignments to variables are hidden in the text below. Follow them from one to the next."


def _chain(names: Sequence[str], value: str, places: Sequence[float], sentences: int) -> tuple[str, str]:
    """Return a text in which the first name gets a value and every other one that of the name before, and a question."""
    given = [f"VAR {names[0]} = {value}."]
    given += [f"VAR {name} = VAR {before}." for before, name in pairwise(names)]
    text = insert(noise(sentences), list(zip(places, given, strict=True)), anywhere=True)
    return text, f"Which {len(names)} variables have the value {value} in the text above? List their names."


def _listing(names: Sequence[str]) -> str:
    return f"They are: {', '.join(names)}."


def common_words(ask: Ask, uncommon: int) -> Draft:
    """Write a numbered list of words, ten of which come more often than all others, and ask for them (RULER's ``cwe``)."""
    draw = ask.draw()
    often, seldom, more = (30, 3, 30) if ask.length >= _LONG_FROM else (6, 1, 10)
    common, others = words(draw, 2 * COMMON, more + uncommon)
    asked, shown = common[:COMMON], common[COMMON:]
    parts = []
    if ask.length >= _EXAMPLE_FROM:
        example = _numbered(draw, shown, others[:more], *((10, 3) if ask.length >= _LONG_FROM else (3, 1)))
        parts = [_LISTED, example, _MOST_COMMON, _listing(shown)]
    parts += [_LISTED, _numbered(draw, asked, others[more:], often, seldom), _MOST_COMMON]
    return Draft(prompt="\n\n".join(parts), answers=tuple(asked))


_LISTED: Final = "Below is a numbered list of words. Some of them come much more often than the others."
_MOST_COMMON: Final = f"Which are the {COMMON} words that come most often in this list?"


def _numbered(draw: random.Random, common: Sequence[str], others: Sequence[str], often: int, seldom: int) -> str:
    every = [*common] * often + [*others] * seldom
    draw.shuffle(every)
    return " ".join(f"{at}. {word}" for at, word in enumerate(every, 1))


def frequent_words(ask: Ask, coded: int) -> Draft:
    """Write a text of made-up words with frequencies after Zipf's law, and ask for the three most frequent.

    RULER's ``fwe``: the k-th word comes in ``coded * k**-2 / zeta(2)`` places. Dots stand for the first one, which isn't
    asked for.
    """
    draw = ask.draw()
    vocabulary = letters(draw, max(COMMON, ask.length // 50), 6)
    total = pi**2 / 6
    every: list[str] = []
    for rank, word in enumerate(vocabulary, 1):
        every += ["..." if rank == 1 else word] * int(coded / (rank**2 * total))
    draw.shuffle(every)
    begin = "Below is a text in a secret code, in which some words come more often than others. Dots mean nothing."
    end = "Which are the three words that come most often in the coded text above?"
    return Draft(prompt=f"{begin}\n\n{' '.join(every)}\n\n{end}", answers=tuple(vocabulary[1:4]))
