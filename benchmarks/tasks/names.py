"""Things to hide and to ask for: keys of two words, numbers, UUIDs, and words; drawn so that none comes twice."""

import random
import re
import string
import uuid
from collections.abc import Iterable
from functools import cache
from itertools import product
from typing import Final

from tierkv.benchmarks.tasks.text import sections

_ADJECTIVES: Final = (  # noqa: SIM905 - a list would take a line a word
    "amber ancient bitter brave bright broad bronze busy calm clever copper crimson curious dusty eager early faint "
    "famous fierce frozen gentle gilded golden happy hasty hidden hollow humble icy jolly lively lonely loud lucky mellow "
    "misty modest narrow nimble patient pale polite proud quiet rapid rusty scarlet secret shiny silent silver simple "
    "sleepy smooth solid stormy sturdy sunny swift tidy velvet violet wooden"
).split()
_NOUNS: Final = (  # noqa: SIM905 - a list would take a line a word
    "anchor anvil apron badger barrel basket beacon beaver bottle bridge bucket candle canyon carpet castle cellar cherry "
    "cobbler comet cottage cradle falcon feather fiddle garden glacier goblet hammer harbor hazel helmet heron island "
    "kettle ladder lantern lizard magnet mantle maple meadow mirror mitten needle orchard otter oyster pebble pepper "
    "pigeon pillow pocket puzzle quarry rabbit raven saddle salmon shovel spider teapot thimble tunnel turnip walnut "
    "window"
).split()
_SYLLABLES: Final = [first + second for first in "bdfgklmnprstvz" for second in ("a", "e", "i", "o", "u", "ai", "or")]


def keys(draw: random.Random, count: int) -> list[str]:
    """Return keys such as ``amber-falcon``, no two alike."""
    every = [f"{adjective}-{noun}" for adjective, noun in product(_ADJECTIVES, _NOUNS)]
    return draw.sample(every, count)


def numbers(draw: random.Random, count: int, digits: int = 7) -> list[str]:
    """Return whole numbers of so many digits, no two alike, none of which the documentation has."""
    found: dict[str, None] = {}  # keeps the order in which they were drawn
    taken = _documented_numbers()
    while len(found) < count:
        number = str(draw.randrange(10 ** (digits - 1), 10**digits))
        if not any(number in other for other in taken):
            found[number] = None
    return list(found)


def uuids(draw: random.Random, count: int) -> list[str]:
    """Return random UUIDs, no two alike."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[str(uuid.UUID(int=draw.getrandbits(128), version=4))] = None
    return list(found)


def letters(draw: random.Random, count: int, length: int, alphabet: str = string.ascii_lowercase) -> list[str]:
    """Return strings of random letters, no two alike."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(draw.choices(alphabet, k=length))] = None
    return list(found)


def words(draw: random.Random, common: int, others: int) -> tuple[list[str], list[str]]:
    """Return two lists of words, no two alike.

    Those of the first list are in no other word of either, so that an output which holds one of them means that one. Made-up
    words follow where English ones run out.
    """
    pool = list(_vocabulary())
    draw.shuffle(pool)
    wanted = common + others
    # Some are left out for being a part of another: more are made than are wanted.
    made: dict[str, None] = dict.fromkeys(pool)
    while len(made) < wanted:
        made["".join(draw.choices(_SYLLABLES, k=4))] = None
    every = list(made)
    first: list[str] = []
    for word in every:
        if len(first) == common:
            break
        if not _within(word, every):
            first.append(word)
    chosen = set(first)
    return first, [word for word in every if word not in chosen][:others]


def _within(word: str, others: Iterable[str]) -> bool:
    """Whether a word is a part of another one."""
    return any(word in other and word != other for other in others)


@cache
def _vocabulary() -> tuple[str, ...]:
    """Return the words of the documentation that have five to twelve letters, all lower case."""
    text = "\n".join(paragraph for section in sections() for paragraph in section.paragraphs)
    return tuple(sorted(set(re.findall(r"\b(?<![\w.\"'*_])[a-z]{5,12}\b(?![\w\"'*_(=])", text))))


@cache
def _documented_numbers() -> tuple[str, ...]:
    """Return the numbers of the documentation that are as long as those that are drawn."""
    text = "\n".join(paragraph for section in sections() for paragraph in section.paragraphs)
    return tuple(sorted(set(re.findall(r"\d{4,}", text))))
