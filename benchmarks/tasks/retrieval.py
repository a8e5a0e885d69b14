"""Tasks that hide something in a long text and ask for it.

Sources: G. Kamradt, "Needle in a haystack" (2023); Hsieh et al., "RULER: what's the real context size of your long-context
language models?" (2024), whose structure and scoring the ``niah_`` tasks keep, with other words and another haystack:
"RULER-style", and not to be compared with its published scores; Mohtashami and Jaggi, "Landmark attention" (2023), for
the passkey; Liu et al., "Lost in the middle" (2023), and Zhang et al., "InfiniteBench" (2024), for key-value retrieval.
"""

import json
import random
from collections.abc import Sequence
from typing import Final

from tierkv.benchmarks.tasks.names import keys, numbers, uuids
from tierkv.benchmarks.tasks.sample import Ask, Draft
from tierkv.benchmarks.tasks.text import documentation, insert, noise, section_starts

DEPTHS: Final = 40
"""Places, evenly spread over the haystack, of which RULER draws those of its needles, none twice."""

_HIDDEN: Final = "Magic numbers are hidden in the text below. Remember them: you will be asked for them at the end."


def needle(ask: Ask, words: int) -> Draft:
    """Write a needle in a haystack: one sentence with a number in real text, the depth going from 0 to 1 over the samples.

    After Kamradt, with a number that can be looked for in place of a judge; as RULER's second single needle.
    """
    draw = ask.draw()
    (key,), (value,) = keys(draw, 1), numbers(draw, 1)
    depth = ask.grid_depth
    return _haystack(draw, words, [(depth, key, value)], [key], depth)


def multikey(ask: Ask, words: int) -> Draft:
    """Write four needles with a key each, and ask for one of them (RULER's first multi-key task)."""
    draw = ask.draw()
    found = list(zip(_depths(draw, 4), keys(draw, 4), numbers(draw, 4), strict=True))
    depth, key, _ = found[0]
    draw.shuffle(found)
    return _haystack(draw, words, found, [key], depth)


def multivalue(ask: Ask, words: int) -> Draft:
    """Write four needles of one key, and ask for all its values (RULER's multi-value task)."""
    draw = ask.draw()
    (key,) = keys(draw, 1)
    return _haystack(draw, words, [(depth, key, value) for depth, value in _valued(draw)], [key], None)


def multiquery(ask: Ask, words: int) -> Draft:
    """Write four needles with a key each, and ask for all of them (RULER's multi-query task)."""
    draw = ask.draw()
    names = keys(draw, 4)
    found = [(depth, key, value) for key, (depth, value) in zip(names, _valued(draw), strict=True)]
    return _haystack(draw, words, found, names, None)


def passkey(ask: Ask, sentences: int) -> Draft:
    """Write a pass key that lies at a random depth of sentences which say nothing (Mohtashami and Jaggi)."""
    draw = ask.draw()
    depth = draw.random()
    key = str(draw.randrange(10_000, 100_000))
    hidden = f"The pass key is {key}. Remember it. {key} is the pass key."
    text = insert(noise(sentences), [(depth, hidden)])
    begin = "There is one important piece of information in a lot of irrelevant text. Find it and remember it."
    end = "What is the pass key? Answer with the number only."
    return Draft(prompt=f"{begin}\n\n{text}\n\n{end}", answers=(key,), depth=depth)


def kv_retrieval(ask: Ask, pairs: int) -> Draft:
    """Write a JSON object of random UUIDs, and ask for the value of one key at a random depth (Liu et al.)."""
    draw = ask.draw()
    where = draw.random()
    key, value, *others = uuids(draw, 2 * pairs)
    every = list(zip(others[::2], others[1::2], strict=True))
    at = min(int(where * pairs), pairs - 1)
    every.insert(at, (key, value))
    begin = "This JSON object maps keys to values."
    end = f'What is the value of the key "{key}" in this JSON object? Answer with the value only.'
    text = json.dumps(dict(every), indent=0)
    depth = at / (pairs - 1) if pairs > 1 else 0.5
    return Draft(prompt=f"{begin}\n\n{text}\n\n{end}", answers=(value,), depth=depth)


def _depths(draw: random.Random, count: int) -> list[float]:
    return [at / (DEPTHS - 1) for at in draw.sample(range(DEPTHS), count)]


def _valued(draw: random.Random) -> list[tuple[float, str]]:
    return list(zip(_depths(draw, 4), numbers(draw, 4), strict=True))


def _haystack(
    draw: random.Random, words: int, found: Sequence[tuple[float, str, str]], asked: Sequence[str], depth: float | None
) -> Draft:
    """Write needles of depth, key and value into documentation, and ask for all values of some keys."""
    filler = documentation(words, draw.randrange(section_starts()))
    text = insert(filler, [(at, f"One of the magic numbers of {key} is {value}.") for at, key, value in found])
    answers = tuple(value for wanted in asked for _, key, value in found if key == wanted)
    if len(answers) == 1:
        end = f"What is the magic number of {asked[0]} in the text above? Answer with the number only."
    else:
        names = " and ".join(filter(None, [", ".join(asked[:-1]), asked[-1]]))
        end = f"What are all the magic numbers of {names} in the text above? Answer with the numbers only."
    return Draft(prompt=f"{_HIDDEN}\n\n{text}\n\n{end}", answers=answers, depth=depth)
