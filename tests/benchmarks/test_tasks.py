"""Long-context tasks: exact lengths, answers that are there, scores, and the same samples in every process."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.benchmarks.tasks import TASKS, Sample, make_samples, prompt_ids
from tierkv.benchmarks.tasks.facts import KINDS, facts
from tierkv.benchmarks.tasks.sizing import fit
from tierkv.benchmarks.tasks.text import NOISE, insert, noise, sections
from tierkv.errors import ConfigError
from tierkv.integrations.hf_load import load_model

NEEDLES = ("needle", "niah_multikey", "niah_multivalue", "niah_multiquery")


class Words:
    """A tokenizer to which every word is a token."""

    chat_template = None

    def __call__(self, text, **_):
        return {"input_ids": text.split()}


class Chat(Words):
    """The same with a chat template, which adds three tokens a message and two for the answer."""

    chat_template = "{{ yes }}"

    def apply_chat_template(self, messages, **_):
        ids = [word for m in messages for word in ["<", m["role"], *m["content"].split(), ">"]]
        return {"input_ids": [*ids, "<", "assistant"]}


@pytest.fixture(scope="module")
def smollm2():
    try:
        return load_model("smollm2", dtype="float32", device="cpu")[1]
    except ConfigError as missing:
        pytest.skip(str(missing))


# -- lengths ----------------------------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [1024, 4096])
def test_a_real_tokenizer_counts_the_same(smollm2, task, length):
    for sample in make_samples(task, smollm2, length, 2, seed=1):
        messages = [{"role": "user", "content": sample.prompt}]
        ids = smollm2.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert sample.prompt_tokens == len(ids) <= length
        assert len(ids) >= 0.9 * length


@pytest.mark.model
def test_a_real_tokenizer_without_a_template_counts_the_same(smollm2, monkeypatch):
    monkeypatch.setattr(smollm2, "chat_template", None)
    for sample in make_samples("niah_multiquery", smollm2, 700, 2, seed=1):
        assert sample.prompt_tokens == len(smollm2(sample.prompt)["input_ids"])
        assert 690 <= sample.prompt_tokens <= 700


@pytest.mark.model
def test_system_prompts_share_their_tokens(smollm2):
    samples = make_samples("system_prompt", smollm2, 2048, 6, seed=0)
    ids = [prompt_ids(smollm2, sample.prompt) for sample in samples]
    shared = len(os.path.commonprefix(ids))
    assert shared > 0.95 * 2048
    assert len({tuple(each) for each in ids}) == 6


@pytest.mark.parametrize("tokenizer", [Words(), Chat()], ids=["plain", "chat"])
@pytest.mark.parametrize("task", TASKS)
def test_one_more_unit_of_filler_would_be_too_long(task, tokenizer):
    for sample in make_samples(task, tokenizer, 3000, 3, seed=5):
        assert sample.prompt_tokens == len(prompt_ids(tokenizer, sample.prompt))
        assert sample.length == 3000
        assert 2900 < sample.prompt_tokens <= 3000


@pytest.mark.parametrize("task", TASKS)
@given(length=st.integers(300, 6000), count=st.integers(1, 4), seed=st.integers(0, 2**40))
@settings(max_examples=12)
def test_any_length(task, length, count, seed):
    try:
        samples = make_samples(task, Words(), length, count, seed)
    except ConfigError as short:
        least = int(re.search(r"at least ([\d,]+)$", str(short))[1].replace(",", ""))
        assert length < least < 1000
        return
    assert [sample.index for sample in samples] == list(range(count))
    assert len({sample.prompt for sample in samples}) == count
    for sample in samples:
        assert 0.9 * length - 40 <= sample.prompt_tokens <= length
        assert sample.score("; ".join(sample.answers)) == 1
        assert sample.score("") == 0


@pytest.mark.parametrize("tokenizer", [Words(), Chat()], ids=["plain", "chat"])
@pytest.mark.parametrize("task", TASKS)
def test_the_least_length_is_the_least(task, tokenizer):
    with pytest.raises(ConfigError, match=rf"1 tokens are too short for the task {task}: .* needs at least") as short:
        make_samples(task, tokenizer, 1, 3, seed=0)
    assert "\n" not in str(short.value)
    least = int(str(short.value).rpartition(" ")[2].replace(",", ""))
    assert all(sample.prompt_tokens <= least for sample in make_samples(task, tokenizer, least, 3, seed=0))
    with pytest.raises(ConfigError, match=f"at least {least:,}"):
        make_samples(task, tokenizer, least - 1, 3, seed=0)


@given(
    weights=st.lists(st.integers(0, 9), min_size=1, max_size=60),
    limit=st.integers(1, 3000),
    guess=st.none() | st.integers(0, 5000),
)
def test_the_search_finds_the_largest_amount(weights, limit, guess):
    sums = [0]
    while len(sums) < 16 * limit + 2:
        sums.append(sums[-1] + weights[len(sums) % len(weights)])
    counted = Counter()

    def tokens(amount):
        counted[amount] += 1
        return sums[amount]

    found = fit(tokens, limit, 0, guess)
    assert sums[found] <= limit
    assert found == 16 * limit - 1 or sums[found + 1] > limit
    assert len(counted) < 60


# -- what is asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", set(TASKS) - {"common_words", "frequent_words"})
def test_every_answer_is_in_the_text_and_not_in_the_question(task):
    for sample in make_samples(task, Words(), 2000, 12, seed=3):
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
    for sample in make_samples(task, Words(), 1500, 4, seed=9):
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
    for sample in make_samples(task, Words(), 1000, 5, seed=2):
        pairs = dict(re.findall(r"One of the magic numbers of (\S+) is (\d+)\.", sample.prompt))
        asked = re.search(r"What is the magic number of (\S+) in", sample.prompt)[1]
        assert len(pairs) == hidden
        assert sample.answers == (pairs[asked],)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("length", [2000, 8000])
def test_needles_lie_at_their_depth(count, length):
    samples = make_samples("needle", Words(), length, count, seed=4)
    assert [sample.depth for sample in samples] == ([0.5] if count == 1 else [0, 0.25, 0.5, 0.75, 1])
    for sample in samples:
        assert where(sample, sample.answers[0]) == pytest.approx(sample.depth, abs=0.04)


@pytest.mark.parametrize("task", ["niah_multikey", "passkey", "kv_retrieval", "system_prompt", "doc_qa"])
def test_other_depths_are_those_of_the_answer(task):
    for sample in make_samples(task, Words(), 6000, 8, seed=6):
        assert 0 <= sample.depth <= 1
        if task == "doc_qa":
            quoted = re.search(r'"(.*)"|`(.*)`', sample.prompt.splitlines()[-1])
            answer = (quoted[1] or quoted[2]).split("____")[0]
            text = " ".join(sample.prompt.split())
            assert text.find(answer) / len(text) == pytest.approx(sample.depth, abs=0.12)  # somewhere in an excerpt
        else:
            assert where(sample, sample.answers[0]) == pytest.approx(sample.depth, abs=0.04)


def where(sample, needle):
    """Return the depth of a needle in the text between the instruction and the question."""
    text = sample.prompt.partition("\n\n")[2].rpartition("\n\n")[0]
    return text.index(needle) / max(len(text) - len(needle) - 50, 1)


def test_needles_come_after_whole_sentences():
    for sample in make_samples("needle", Words(), 4000, 9, seed=1)[1:-1]:
        before = sample.prompt.partition("One of the magic numbers of")[0]
        assert re.search(r"([.?!][\"')]?\s|\n\n *)$", before), before[-60:]


def test_needles_of_equal_depth_keep_their_order():
    assert insert(["One. ", "Two."], [(0, "A."), (0, "B."), (1, "C.")]) == "A. B. One. Two. C."
    assert insert([], [(0.7, "A.")]) == "A."
    assert insert(noise(5), []) == " ".join(NOISE)


def test_a_chain_of_variables_is_whole_and_in_order():
    for sample in make_samples("variable_tracking", Words(), 1500, 3, seed=8):
        text = sample.prompt.rpartition("Assignments to variables")[2]
        given = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text)
        names = [name for name, _ in given]
        assert tuple(names) == sample.answers
        assert [value for _, value in given[1:]] == names[:-1]
        assert f"have the value {given[0][1]} in" in text
        assert sample.score(" ".join(names[:2]).lower()) == pytest.approx(0.4)


@pytest.mark.parametrize(("length", "often", "seldom"), [(1024, 6, 1), (4096, 30, 3)])
def test_common_words_are_the_most_common(length, often, seldom):
    (sample,) = make_samples("common_words", Words(), length, 1, seed=0)
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
    (sample,) = make_samples("frequent_words", Words(), length, 1, seed=0)
    counts = Counter(sample.prompt.split("\n\n")[1].split())
    (dots, _), *ranked = counts.most_common()
    assert dots == "..."
    assert tuple(word for word, _ in ranked[:3]) == sample.answers
    assert len({count for _, count in ranked[:4]}) == 4
    assert ranked[0][1] == pytest.approx(counts["..."] / 4, abs=1)


def test_pairs_of_uuids_are_json_without_repeats():
    for sample in make_samples("kv_retrieval", Words(), 400, 3, seed=0):
        body = sample.prompt.split("\n\n")[1]
        pairs = json.loads(body, object_pairs_hook=list)
        entries = dict(pairs)
        assert len(entries) == len(pairs) == len(set(entries.values()))
        asked = re.search(r'of the key "(\S+)" in', sample.prompt)[1]
        assert sample.answers == (entries[asked],)


def test_a_system_prompt_is_the_same_in_every_conversation():
    samples = make_samples("system_prompt", Words(), 1500, 20, seed=0)
    assert len({sample.prompt.rpartition("\n\n")[0] for sample in samples}) == 1
    assert len({sample.prompt for sample in samples}) == 20
    for sample in samples:
        key = re.search(r"What is the door code of (\S+)\?", sample.prompt)[1]
        assert f"Note: the door code of {key} is {sample.answers[0]}." in sample.prompt


def test_a_chat_asks_for_each_of_its_notes():
    for sample in make_samples("chat", Chat(), 1500, 3, seed=0):
        questions = [sample.prompt.split("\n\n")[-1], *sample.turns]
        assert len(questions) == len(sample.answers) == 3
        for question, answer in zip(questions, sample.answers, strict=True):
            asked = re.fullmatch(r"What is (.*)\? Answer with the number only\.", question)[1]
            assert f"Note: {asked} is {answer}." in sample.prompt
        assert sample.score(f"{sample.answers[1]}. And it is {sample.answers[2]}") == pytest.approx(2 / 3)


# -- questions about the documentation --------------------------------------------------------------------------------


def test_questions_of_every_kind():
    assert tuple(facts()) == KINDS
    for kind, found in facts().items():
        assert len(found) >= 5, kind
        assert len({fact.question for fact in found}) == len(found)
    samples = make_samples("doc_qa", Words(), 800, 2 * len(KINDS), seed=0)
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
        quoted = re.search(r'"(.*)"|`(.*)`', fact.question)
        said = (quoted[1] or quoted[2]).replace("____", fact.answers[0])
        assert said in " ".join(text.split()), fact


def test_a_paragraph_is_in_one_section_only():
    paragraphs = [paragraph.strip() for section in sections() for paragraph in section.paragraphs]
    assert len(set(paragraphs)) == len(paragraphs)
    assert sum(map(len, paragraphs)) > 200_000


# -- the same and not the same ----------------------------------------------------------------------------------------

DIGEST = """
import hashlib, sys
from tests.benchmarks.test_tasks import digest
print(digest())
"""


def digest():
    every = [sample for task in TASKS for sample in make_samples(task, Words(), 1000, 2, seed=7)]
    return hashlib.sha256(repr(every).encode()).hexdigest()


def test_every_process_makes_the_same_samples():
    found = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", DIGEST], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout.strip())
    assert found == {digest()}


@pytest.mark.parametrize("task", TASKS)
def test_seeds_and_samples_differ(task):
    one, other = (make_samples(task, Words(), 800, 4, seed) for seed in (0, 1))
    assert len({sample.prompt for sample in (*one, *other)}) == 8
    assert one == make_samples(task, Words(), 800, 4, 0)


@pytest.mark.parametrize("task", set(TASKS) - {"needle"})
def test_more_samples_begin_with_the_same_ones(task):
    assert make_samples(task, Words(), 800, 6, 0)[:2] == make_samples(task, Words(), 800, 2, 0)


@pytest.mark.parametrize("task", set(TASKS) - {"system_prompt"})
def test_a_longer_text_asks_the_same(task):
    short, long = (make_samples(task, Words(), length, 2, 0) for length in (1100, 3000))
    assert [sample.answers for sample in short] == [sample.answers for sample in long]


# -- scores and bad input ---------------------------------------------------------------------------------------------


def test_scores():
    shared = {"task": "t", "index": 0, "length": 9, "prompt": "?", "answers": ("Amber", "42"), "prompt_tokens": 9}
    every, one = Sample(**shared), Sample(**shared, match="any")
    assert [every.score(said) for said in ("amber and 42.", "AMBER", "4", "")] == [1, 0.5, 0, 0]
    assert [one.score(said) for said in ("amber and 42.", "AMBER", "4", "")] == [1, 1, 0, 0]


@pytest.mark.parametrize("task", TASKS)
def test_tasks_say_what_they_are(task):
    found = TASKS[task]
    assert found.name == task
    assert found.kind in {"retrieval", "aggregation", "qa", "chat"}
    assert found.max_new_tokens > 0
    assert found.title
    assert "\n" not in found.title
    ruler = {
        "niah_multikey",
        "niah_multivalue",
        "niah_multiquery",
        "variable_tracking",
        "common_words",
        "frequent_words",
    }
    assert found.title.startswith("RULER-style") == (task in ruler)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("needel", Words(), 1000, 1, 0), ["'needel'", "did you mean needle?"]),
        (("multikey", Words(), 1000, 1, 0), ["niah_multikey"]),
        (("zzz", Words(), 1000, 1, 0), ["known: needle, ", "system_prompt"]),
        (("needle", Words(), 0, 1, 0), ["length 0", "from 1 on"]),
        (("needle", Words(), 1000, 0, 0), ["count 0", "from 1 on"]),
        (("needle", Words(), 1e3, 1, 0), ["length 1000.0"]),
        (("needle", Words(), 1000, 1, "a"), ["seed 'a'"]),
    ],
)  # fmt: skip
def test_bad_arguments(arguments, words):
    with pytest.raises(ConfigError) as error:
        make_samples(*arguments)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)


def test_a_template_that_refuses():
    class Refuses(Chat):
        def apply_chat_template(self, messages, **_):
            raise ValueError("no user messages")

    with pytest.raises(ConfigError, match=r"chat template cannot be used \(no user messages\)"):
        make_samples("needle", Refuses(), 1000, 1, 0)
