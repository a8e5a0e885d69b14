"""Questions about the documentation whose answers can be checked: made by templates from what a parser finds in it.

section     which section has this sentence                     -> its title
statement   of which statement does the text say this           -> its keyword
method      which method is described so                        -> its name
grammar     which rule of the grammar is defined so             -> its name
version     in which version of Python came this change         -> the version
word        which word is missing in this sentence              -> the word
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Final

from tierkv.benchmarks.tasks.text import Section, sections

KINDS: Final = ("section", "statement", "method", "grammar", "version", "word")
"""What is asked for."""

_STATEMENT: Final = re.compile(r'The "(\w+)" statement')
_SIGNATURE: Final = re.compile(r"(?:[a-z]+ )?([\w.]+)\([^\n]*\)")
_RULE: Final = re.compile(r" *(\w+) +::= +(\S.*\S)")
_CHANGE: Final = re.compile(r"(?:Changed|New|Added|Deprecated) in version (\d+\.\d+)(?:\.\d+)?: +(.+)", re.DOTALL)
_SENTENCE: Final = re.compile(r"(?<=[.?!])\s+(?=[A-Z\"])")
_CODE: Final = re.compile(r"::=|>>>|^\S+\(.*\)$|^ *[|+]|[=<>]{2}|^ *[-*] ", re.MULTILINE)
_WORD: Final = re.compile(r"(?<![\w.\"'*-])[a-z]{6,}(?![\w\"'*(=-])")
_LETTERS: Final = (50, 220)
"""The fewest and the most letters of a sentence that is quoted."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A question with its answers.

    Attributes:
        kind: one of ``KINDS``.
        section: which section of ``sections()`` answers it.
        paragraphs: its first paragraph and the one after its last, within the section.
        question: what is asked.
        answers: ways to say what is right, each of which occurs in the section.
    """

    kind: str
    section: int
    paragraphs: tuple[int, int]
    question: str
    answers: tuple[str, ...]


@cache
def facts() -> dict[str, tuple[Fact, ...]]:
    """Return all questions, by what is asked for. Each has its answer in one place of the documentation only."""
    every: list[Fact] = []
    for at, section in enumerate(sections()):
        every += [*_rules(at, section), *_methods(at, section), *_changes(at, section), *_sentences(at, section)]
    asked = Counter(fact.question for fact in every)
    once = [fact for fact in every if asked[fact.question] == 1 and not _is_given_away(fact)]
    return {kind: tuple(fact for fact in once if fact.kind == kind) for kind in KINDS}


def _is_given_away(fact: Fact) -> bool:
    question = fact.question.casefold()
    return any(answer.casefold() in question for answer in fact.answers)


def _rules(at: int, section: Section) -> Iterator[Fact]:
    for number, paragraph in enumerate(section.paragraphs):
        lines = paragraph.splitlines()
        for line, after in zip(lines, [*lines[1:], ""], strict=True):
            rule = _RULE.fullmatch(line)
            # A definition that goes on in the next line would be quoted in part.
            if rule and len(rule[1]) >= 5 and len(rule[2]) >= 12 and (not after.strip() or "::=" in after):
                question = f"Which rule of the grammar is defined as `{rule[2]}`? Answer with the name of the rule."
                yield Fact("grammar", at, (number, number + 1), question, (rule[1],))


def _methods(at: int, section: Section) -> Iterator[Fact]:
    for number, (paragraph, after) in enumerate(pairwise(section.paragraphs)):
        signature = _SIGNATURE.fullmatch(paragraph.strip())
        described = _split(after) if after.startswith(" ") else []
        if signature and described and _is_quotable(described[0]):
            full, name = signature[1], signature[1].rpartition(".")[2]
            question = f'Which method or function is described with "{described[0]}"? Answer with its name.'
            if len(name) >= 4:
                yield Fact("method", at, (number, number + 2), question, tuple(dict.fromkeys((name, full))))


def _changes(at: int, section: Section) -> Iterator[Fact]:
    for number, paragraph in enumerate(section.paragraphs):
        change = _CHANGE.fullmatch(paragraph.strip())
        sentence = _split(change[2])[0] if change else ""
        # 3.1 would be found in an output that says 3.10.
        if change and change[1] != "3.1" and _is_quotable(sentence):
            question = f'Which version of Python made this change: "{sentence}"? Answer with the version number.'
            yield Fact("version", at, (number, number + 1), question, (change[1],))


def _sentences(at: int, section: Section) -> Iterator[Fact]:
    """Yield the questions about a sentence: its section, the statement that it speaks of, a word of it."""
    titled = sum(section.title in other.title for other in sections()) == 1
    statement = _STATEMENT.fullmatch(section.title)
    for number, paragraph in enumerate(section.paragraphs):
        place = (number, number + 1)
        if _CODE.search(paragraph):
            continue
        for sentence in filter(_is_quotable, _split(paragraph)):
            if titled:
                question = f'Which section has the sentence "{sentence}"? Answer with the title of the section.'
                titles = dict.fromkeys((section.title, section.title.replace('"', "")))
                yield Fact("section", at, place, question, tuple(titles))
            if statement and len(statement[1]) >= 5 and f'"{statement[1]}" statement' in sentence:
                blank = re.sub(rf"\b{statement[1]}\b", "____", sentence)
                question = f'Of which statement does the text say "{blank}"? Answer with its keyword.'
                yield Fact("statement", at, place, question, (statement[1],))
            words = Counter(_WORD.findall(sentence))
            word = max(words, key=len, default="")
            if word and sentence.count(word) == 1:
                question = f'Which word is missing in this sentence of the text: "{sentence.replace(word, "____")}"?'
                yield Fact("word", at, place, f"{question} Answer with the word.", (word,))


def _split(paragraph: str) -> list[str]:
    """Return the sentences of a paragraph, each on one line."""
    return _SENTENCE.split(" ".join(paragraph.split()))


def _is_quotable(sentence: str) -> bool:
    """Whether a question can quote a sentence: it is whole, neither too short nor too long, and there is no other like it."""
    ends = sentence.endswith((".", "?", "!")) and not sentence.endswith(("e.g.", "i.e."))
    least, most = _LETTERS
    joined = re.search(r"\w- ", sentence)  # a word that was broken at its hyphen
    fits = least <= len(sentence) <= most and sentence[0].isupper() and ends and not joined
    return fits and _whole().count(sentence) == 1


@cache
def _whole() -> str:
    """Return the documentation with one space between words."""
    return " ".join(word for section in sections() for part in section.paragraphs for word in part.split())
