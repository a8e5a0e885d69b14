"""Tasks about a real document, Python's documentation: questions about it, a chat about it, a system prompt made of it.

Sources: for ``doc_qa`` the question answering of RULER (Hsieh et al., 2024), a paragraph with the answer among others that
have none, with questions made from the text (``facts``); for ``chat`` the multi-round setting of vLLM's and SGLang's
multi-turn benchmarks; for ``system_prompt`` the shared-prefix setting of SGLang's RadixAttention (Zheng et al., 2024).
"""

import random
from functools import lru_cache
from itertools import accumulate
from typing import Final

from tierkv.benchmarks.tasks.facts import Fact, facts
from tierkv.benchmarks.tasks.names import keys, numbers
from tierkv.benchmarks.tasks.sample import Ask, Draft
from tierkv.benchmarks.tasks.text import documentation, insert, pieces, render, section_starts, sections

CHAT_TURNS: Final = 3
MOST_FACTS: Final = 16
"""Facts that a system prompt has, at most."""

_EXCERPT_WORDS: Final = (40, 400)
"""The fewest and the most words of an excerpt, but for a paragraph that has more."""


def doc_qa(ask: Ask, words: int) -> Draft:
    """Write excerpts of many sections of the documentation, and ask something that one of them answers.

    After RULER's question answering; the questions are made from the text itself.
    """
    draw = ask.draw()
    fact, where = _choose(ask), draw.random()
    least, most = _EXCERPT_WORDS
    size = min(max(ask.length // 8, least), most)
    gold, added = _excerpt(fact, min(size, words))
    others = _others(draw, fact.section, size, words - added)
    # Between two excerpts, where the wanted depth is nearest.
    begins = list(accumulate(map(len, others), initial=0))
    at = min(range(len(begins)), key=lambda number: abs(begins[number] - where * begins[-1]))
    texts = ["".join(part).strip() for part in others]
    text = "\n\n".join([*texts[:at], gold.strip(), *texts[at:]])
    begin = "Below are excerpts of the documentation of Python. Each begins with ## and the title of its section."
    depth = begins[at] / begins[-1] if begins[-1] else 0.5
    return Draft(prompt=f"{begin}\n\n{text}\n\n{fact.question}", answers=fact.answers, depth=depth)


def _choose(ask: Ask) -> Fact:
    """Return the fact that a sample asks for: of each kind in turn, and none twice while there are others of its kind."""
    pools = [list(pool) for pool in facts().values() if pool]
    pool = pools[ask.index % len(pools)]
    ask.draw_common().shuffle(pool)
    return pool[ask.index // len(pools) % len(pool)]


def _excerpt(fact: Fact, words: int) -> tuple[str, int]:
    """Return the paragraphs of a fact with some before and after them, and how many words these have."""
    section = sections()[fact.section]
    sizes = [len(part.split()) for part in section.paragraphs]
    begin, end = fact.paragraphs
    added, grows = 0, True
    while grows:
        grows = False
        if end < len(sizes) and added + sizes[end] <= words:
            added, end, grows = added + sizes[end], end + 1, True
        if begin > 0 and added + sizes[begin - 1] <= words:
            added, begin, grows = added + sizes[begin - 1], begin - 1, True
    return render(section.title, section.paragraphs[begin:end]), added


def _others(draw: random.Random, without: int, size: int, words: int) -> list[list[str]]:
    """Return excerpts of other sections in random order, again from the first where they run out, of so many words."""
    every = [part for number, part in _excerpts(size) if number != without]
    draw.shuffle(every)
    found: list[list[str]] = []
    while words > 0:
        part = every[len(found) % len(every)][:words]
        found.append(list(part))
        words -= len(part)
    return found


@lru_cache(maxsize=2)  # every size has all of the text
def _excerpts(size: int) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Return all sections in parts of whole paragraphs that have about so many words, each with its section's number."""
    found = []
    for number, section in enumerate(sections()):
        part: list[str] = []
        for paragraph in section.paragraphs:
            if part and sum(len(text.split()) for text in (*part, paragraph)) > size:
                found.append((number, tuple(pieces(render(section.title, part)))))
                part = []
            part.append(paragraph)
        found.append((number, tuple(pieces(render(section.title, part)))))
    return tuple(found)


def chat(ask: Ask, words: int) -> Draft:
    """Write a document with three notes in it, and ask for one of them in each of three turns.

    After the multi-turn benchmarks of vLLM and SGLang. The document is in the first turn, whose length is what counts:
    answers and further questions come on top.
    """
    draw = ask.draw()
    notes = list(zip(_WHAT, keys(draw, CHAT_TURNS), numbers(draw, CHAT_TURNS), strict=True))
    depths = [(at + draw.random()) / CHAT_TURNS for at in range(CHAT_TURNS)]
    filler = documentation(words, draw.randrange(section_starts()))
    text = insert(filler, [(depth, _note(*note)) for depth, note in zip(depths, notes, strict=True)])
    draw.shuffle(notes)
    questions = [f"What is {what} of {key}? Answer with the number only." for what, key, _ in notes]
    begin = "Here is a document with some notes in it. I have questions about the notes."
    return Draft(
        prompt=f"{begin}\n\n{text}\n\n{questions[0]}",
        turns=tuple(questions[1:]),
        answers=tuple(value for _, _, value in notes),
    )


_WHAT: Final = ("the door code", "the phone number", "the invoice number")


def _note(what: str, key: str, value: str) -> str:
    return f"Note: {what} of {key} is {value}."


def system_prompt(ask: Ask, words: int) -> Draft:
    """Write a conversation that begins as all others of the call do: a long system prompt, then a short question of its own.

    After SGLang's shared-prefix benchmarks. The system prompt is documentation with facts in it, and one conversation after
    the other asks for the next of them.
    """
    common = ask.draw_common()
    count = min(max(ask.length // 128, 1), MOST_FACTS)
    names, values = keys(common, MOST_FACTS)[:count], numbers(common, MOST_FACTS)[:count]
    depths = [(at + common.random()) / count for at in range(count)]
    filler = documentation(words, common.randrange(section_starts()))
    found = zip(depths, names, values, strict=True)
    text = insert(filler, [(depth, _note(_WHAT[0], name, value)) for depth, name, value in found])
    at = ask.index % count
    begin = "You are the assistant of a company. Answer from the handbook below, shortly."
    question = f"Conversation {ask.index + 1}. {_GREETINGS[ask.index % len(_GREETINGS)]}"
    end = f"{question} What is {_WHAT[0]} of {names[at]}?"
    return Draft(prompt=f"{begin}\n\n{text}\n\n{end}", answers=(values[at],), depth=depths[at])


_GREETINGS: Final = ("Hello.", "Good morning.", "A quick question.", "I'm at the door.", "Sorry to bother you.")
