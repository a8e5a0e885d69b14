"""Filler: Python's own documentation as real text, sentences of nothing as noise, and needles put into either.

The documentation comes with Python (``pydoc_data.topics``), so it needs no download; its topics repeat each other, and
here every paragraph is kept once. Which text it is depends on the version of Python.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Final

from tierkv.errors import ConfigError

NOISE: Final = (
    "The river is wide.",
    "The hills are steep.",
    "The wind is cold.",
    "On and on we walk.",
    "By night we are home.",
)
"""Sentences that say nothing, repeated as filler."""

_PIECE: Final = re.compile(r"\S+\s*")
# The last word of a sentence: letters, a full stop, perhaps a quote or a bracket; none of "e.g.", "3." and "...".
_SENTENCE_END: Final = re.compile(r"""[A-Za-z)"\]]{3,}[.?!]["')]?\s+""")
_TABLE: Final = re.compile(r"^ *\+[-=]{3,}|^ *\|=", re.MULTILINE)
_UNDERLINE: Final = re.compile(r"""[*=\-~^"+]{3,}""")


@dataclass(frozen=True, slots=True)
class Section:
    """A topic of the documentation.

    Attributes:
        title: its heading.
        paragraphs: what it says, as it is laid out there; each paragraph is in one section only.
    """

    title: str
    paragraphs: tuple[str, ...]


@cache
def sections() -> tuple[Section, ...]:
    """Return the documentation, section by section.

    Raises:
        ConfigError: this Python came without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        advice = "install the full standard library (on Debian: libpython3-stdlib), or take a task that needs none, as passkey"
        raise ConfigError(f"this Python came without its documentation, pydoc_data.topics; {advice}") from None
    titles = {_split(text)[0] for text in topics.values()}
    seen, found = set(titles), {}
    # Short topics first: the long ones are chapters that repeat them.
    for name in sorted(topics, key=lambda name: (len(topics[name]), name)):
        title, paragraphs = _split(topics[name])
        kept = []
        for paragraph in paragraphs:
            key = _UNDERLINE.sub("", paragraph).strip()
            if key not in seen and not _TABLE.search(paragraph):  # a drawn table is mostly lines
                kept.append(paragraph)
                seen.add(key)
        if kept:
            found[name] = Section(title, tuple(kept))
    return tuple(found[name] for name in sorted(found))


def _split(text: str) -> tuple[str, list[str]]:
    """Split a topic into its title and its paragraphs."""
    paragraphs = [part for part in re.split(r"\n\s*\n", text.strip("\n")) if part.strip()]
    lines = paragraphs[0].splitlines()
    if len(lines) > 1 and _UNDERLINE.fullmatch(lines[1]):
        rest = "\n".join(lines[2:])
        return lines[0].strip(), [rest, *paragraphs[1:]] if rest.strip() else paragraphs[1:]
    return lines[0].strip(), paragraphs[1:]


def render(title: str, paragraphs: Sequence[str]) -> str:
    """Return a section as text, with a heading that begins with ``##``."""
    return "\n\n".join((f"## {title}", *paragraphs, ""))


def pieces(text: str) -> list[str]:
    """Return a text word by word, with what is between a word and the next; joined, they are the text."""
    return _PIECE.findall(text)


@cache
def _documentation() -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the words of all sections, and where the sections begin."""
    parts = [pieces(render(section.title, section.paragraphs)) for section in sections()]
    starts = accumulate((len(part) for part in parts[:-1]), initial=0)
    return tuple(word for part in parts for word in part), tuple(starts)


def section_starts() -> int:
    """Return how many places there are from which ``documentation`` can begin."""
    return len(_documentation()[1])


def documentation(words: int, start: int) -> list[str]:
    """Return words of the documentation, as ``pieces`` does.

    Args:
        words: how many; where the documentation ends, it begins again.
        start: with which section to begin, from 0.
    """
    every, starts = _documentation()
    begin = starts[start]
    rest = every[begin : begin + words]
    whole, left = divmod(words - len(rest), len(every))
    return [*rest, *every * whole, *every[:left]]


def noise(sentences: int) -> list[str]:
    """Return sentences of noise, each with what is after it: a line has every one of them once."""
    return [NOISE[at % len(NOISE)] + ("\n" if at % len(NOISE) == len(NOISE) - 1 else " ") for at in range(sentences)]


def insert(filler: Sequence[str], needles: Sequence[tuple[float, str]], *, anywhere: bool = False) -> str:
    """Return filler with sentences put into it.

    Args:
        filler: pieces of text that are joined.
        needles: for each sentence its depth, 0 to 1, and itself. Those of equal depth keep their order.
        anywhere: between any two pieces; otherwise only where a sentence or a paragraph ends.
    """
    ends = list(accumulate(map(len, filler), initial=0))
    places = [at for at in range(len(filler) + 1) if anywhere or at in (0, len(filler)) or _ends(filler[at - 1])]
    letters = [ends[at] for at in places]
    inserted: dict[int, list[str]] = {}
    for depth, needle in sorted(needles, key=lambda pair: pair[0]):
        inserted.setdefault(places[_nearest(letters, depth * ends[-1])], []).append(needle)
    parts = []
    for at in range(len(filler) + 1):
        for needle in inserted.get(at, ()):
            begun = at > 0 and not filler[at - 1].endswith((" ", "\n"))  # a text that was cut after a word
            parts.append(f" {needle} " if begun else f"{needle} ")
        parts.append(filler[at] if at < len(filler) else "")
    return "".join(parts).strip()


def _ends(piece: str) -> bool:
    """Whether a sentence or a paragraph ends with a piece."""
    return "\n\n" in piece or _SENTENCE_END.search(piece) is not None


def _nearest(places: Sequence[int], wanted: float) -> int:
    """Return which of rising numbers is nearest to one."""
    after = min(bisect_left(places, wanted), len(places) - 1)
    before = max(after - 1, 0)
    return before if wanted - places[before] < places[after] - wanted else after
