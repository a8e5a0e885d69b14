"""What long-context tasks ask: every answer is in the text, where and as often as the task says."""

import json
import re
import sys
from collections import Counter

import pytest

from tierkv.benchmarks.tasks import TASKS, make_samples
from tierkv.benchmarks.tasks.facts import KINDS, facts
from tierkv.benchmarks.tasks.text import NOISE, insert, noise, sections
from tierkv.errors import ConfigError

NEEDLES = ("needle", "niah_multikey", "niah_multivalue", "niah_multiquery")


class Chat:
    """A tokenizer to which every word is a token, with a chat template, which adds some for a message and the answer."""

    chat_template = "{{ yes }}"

    def apply_chat_template(self, messages, **_):
        ids = [word for m in messages for word in ["<", m["role"], *m["content"].split(), ">"]]
        return {"input_ids": [*ids, "<", "assistant"]}


@pytest.mark.parametrize("task", sorted(set(TASKS) - {"common_words", "frequent_words"}))
def test_every_answer_is_in_the_text_and_not_in_the_question(task):
    for sample in make_samples(task, Chat(), 2000, 12, seed=3):
        parts = sample.prompt.split("\n\n")
        text, question = "\n\n".join(parts[:-1]), parts[-1]
        if sample.match == "any":
            assert any(answer in text for answer in sample.answers)
        else:
            assert all(answer in text for answer in sample.answers)
        asked = " ".join([question, *sample.turns]).casefold()
        assert not [answer for answer in sample.answers if answer.casefold() in asked]


@pytest.mark.parametrize("task", [*NEEDLES, "chat", "system_prompt"])
def test_what_is_hidden_is_there_once(task):
    for sample in make_samples(task, Chat(), 1500, 4, seed=9):
        found = re.findall(r"(?:numbers? of|code of|number of) ([a-z]+-[a-z]+) is (\d{7})\.", sample.prompt)
        values = [value for _, value in found]
        assert set(sample.answers) <= set(values)
        assert len(set(values)) == len(values)
        assert all(sample.prompt.count(value) == 1 for value in values)
        keys = {key for key, _ in found}
        assert len(keys) == (1 if task == "niah_multivalue" else len(found))
    wanted = {
        "needle": 1,
        "niah_multikey": 1,
        "niah_multivalue": 4,
        "niah_multiquery": 4,
        "chat": 3,
        "system_prompt": 1,
    }
    assert len(sample.answers) == wanted[task]


@pytest.mark.parametrize(("task", "hidden"), [("needle", 1), ("niah_multikey", 4)])
def test_the_key_that_is_asked_for_has_the_answer(task, hidden):
    for sample in make_samples(task, Chat(), 1000, 5, seed=2):
        pairs = dict(re.findall(r"One of the magic numbers of (\S+) is (\d+)\.", sample.prompt))
        asked = find(r"What is the magic number of (\S+) in", sample.prompt)
        assert len(pairs) == hidden
        assert sample.answers == (pairs[asked],)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("length", [2000, 8000])
def test_needles_lie_at_their_depth(count, length):
    samples = make_samples("needle", Chat(), length, count, seed=4)
    assert [sample.depth for sample in samples] == ([0.5] if count == 1 else [0, 0.25, 0.5, 0.75, 1])
    for sample in samples:
        assert where(sample, sample.answers[0]) == pytest.approx(sample.depth, abs=0.04)


@pytest.mark.parametrize("task", ["niah_multikey", "passkey", "kv_retrieval", "system_prompt", "doc_qa"])
def test_other_depths_are_those_of_the_answer(task):
    for sample in make_samples(task, Chat(), 6000, 8, seed=6):
        assert sample.depth is not None
        assert 0 <= sample.depth <= 1
        if task == "doc_qa":
            answer = max(find(r'"(.*)"|`(.*)`', sample.prompt.splitlines()[-1]).split("____"), key=len)
            text = " ".join(sample.prompt.split())
            assert text.find(answer) / len(text) == pytest.approx(sample.depth, abs=0.12)  # somewhere in an excerpt
        else:
            assert where(sample, sample.answers[0]) == pytest.approx(sample.depth, abs=0.04)


def find(pattern, text):
    """Return what the first group that matched holds, which must be there."""
    found = re.search(pattern, text)
    assert found is not None, text[-300:]
    return next(group for group in found.groups() if group is not None)


def where(sample, needle):
    """Return the depth of a needle in the text between the instruction and the question."""
    text = sample.prompt.partition("\n\n")[2].rpartition("\n\n")[0]
    return text.index(needle) / max(len(text) - len(needle) - 50, 1)


def test_needles_come_after_whole_sentences():
    for sample in make_samples("needle", Chat(), 4000, 9, seed=1)[1:-1]:
        before = sample.prompt.partition("One of the magic numbers of")[0]
        assert re.search(r"([.?!][\"')]?\s+|\n\n *)$", before), before[-60:]


def test_needles_of_equal_depth_keep_their_order():
    assert insert(["One. ", "Two."], [(0, "A."), (0, "B."), (1, "C.")]) == "A. B. One. Two. C."
    assert insert([], [(0.7, "A.")]) == "A."
    assert insert(noise(5), []) == " ".join(NOISE)


def test_a_chain_of_variables_is_whole_and_in_order():
    for sample in make_samples("variable_tracking", Chat(), 1500, 3, seed=8):
        text = sample.prompt.rpartition("Assignments to variables")[2]
        given = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text)
        names = [name for name, _ in given]
        assert tuple(names) == sample.answers
        assert [value for _, value in given[1:]] == names[:-1]
        assert f"have the value {given[0][1]} in" in text
        assert sample.score(" ".join(names[:2]).lower()) == pytest.approx(0.4)


@pytest.mark.parametrize(("length", "often", "seldom"), [(1024, 6, 1), (4096, 30, 3)])
def test_common_words_are_the_most_common(length, often, seldom):
    (sample,) = make_samples("common_words", Chat(), length, 1, seed=0)
    listed = sample.prompt.rpartition("numbered list of words")[2]
    counts = Counter(re.findall(r"\d+\. ([a-z]+)", listed))
    top, rest = counts.most_common(10), counts.most_common()[10:]
    assert {word for word, _ in top} == set(sample.answers)
    assert {count for _, count in top} == {often}
    assert {count for _, count in rest} == {seldom}
    assert not [word for word in counts for answer in sample.answers if answer in word and answer != word]
    example = sample.prompt.rpartition("numbered list of words")[0]
    assert not set(re.findall(r"\d+\. ([a-z]+)", example)) & set(counts)


@pytest.mark.parametrize("length", [200, 500, 4000])
def test_frequent_words_are_the_most_frequent(length):
    (sample,) = make_samples("frequent_words", Chat(), length, 1, seed=0)
    counts = Counter(sample.prompt.split("\n\n")[1].split())
    (dots, _), *ranked = counts.most_common()
    assert dots == "..."
    assert tuple(word for word, _ in ranked[:3]) == sample.answers
    assert len({count for _, count in ranked[:4]}) == 4
    assert ranked[0][1] == pytest.approx(counts["..."] / 4, abs=1)


def test_pairs_of_uuids_are_json_without_repeats():
    for sample in make_samples("kv_retrieval", Chat(), 400, 3, seed=0):
        body = sample.prompt.split("\n\n")[1]
        pairs = json.loads(body, object_pairs_hook=list)
        entries = dict(pairs)
        assert len(entries) == len(pairs) == len(set(entries.values()))
        asked = find(r'of the key "(\S+)" in', sample.prompt)
        assert sample.answers == (entries[asked],)


def test_a_system_prompt_is_the_same_in_every_conversation():
    samples = make_samples("system_prompt", Chat(), 1500, 20, seed=0)
    assert len({sample.prompt.rpartition("\n\n")[0] for sample in samples}) == 1
    assert len({sample.prompt for sample in samples}) == 20
    for sample in samples:
        key = find(r"What is the door code of (\S+)\?", sample.prompt)
        assert f"Note: the door code of {key} is {sample.answers[0]}." in sample.prompt


def test_a_chat_asks_for_each_of_its_notes():
    for sample in make_samples("chat", Chat(), 1500, 3, seed=0):
        questions = [sample.prompt.split("\n\n")[-1], *sample.turns]
        assert len(questions) == len(sample.answers) == 3
        for question, answer in zip(questions, sample.answers, strict=True):
            asked = find(r"^What is (.*)\? Answer with the number only\.$", question)
            assert f"Note: {asked} is {answer}." in sample.prompt
        assert sample.score(f"{sample.answers[1]}. And it is {sample.answers[2]}") == pytest.approx(2 / 3)


# -- questions about the documentation --------------------------------------------------------------------------------


def test_questions_of_every_kind():
    assert tuple(facts()) == KINDS
    for kind, found in facts().items():
        assert len(found) >= 5, kind
        assert len({fact.question for fact in found}) == len(found)
    samples = make_samples("doc_qa", Chat(), 800, 2 * len(KINDS), seed=0)
    kinds = [
        next(kind for kind, every in facts().items() for fact in every if fact.question in sample.prompt)
        for sample in samples
    ]
    assert kinds == [*KINDS, *KINDS]
    assert all(sample.match == "any" for sample in samples)


def test_facts_are_those_of_their_section():
    for fact in (fact for every in facts().values() for fact in every):
        section, (begin, end) = sections()[fact.section], fact.paragraphs
        text = "\n\n".join((section.title, *section.paragraphs[begin:end]))
        assert any(answer in text for answer in fact.answers), fact
        said = find(r'"(.*)"|`(.*)`', fact.question).replace("____", fact.answers[0])
        assert said in " ".join(text.split()), fact


def test_a_paragraph_is_in_one_section_only():
    paragraphs = [paragraph.strip() for section in sections() for paragraph in section.paragraphs]
    assert len(set(paragraphs)) == len(paragraphs)
    assert sum(map(len, paragraphs)) > 200_000


def test_a_python_without_its_documentation(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    sections.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"without its documentation, pydoc_data\.topics; .*passkey"):
            sections()
        assert make_samples("passkey", Chat(), 500, 1, 0)
    finally:
        sections.cache_clear()
