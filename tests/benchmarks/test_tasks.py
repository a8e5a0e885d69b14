"""Long-context tasks: exact lengths, scores, bad input, and the same samples in every process."""

import hashlib
import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.benchmarks.tasks import TASKS, Sample, make_samples, prompt_ids
from tierkv.benchmarks.tasks.sizing import fit
from tierkv.errors import ConfigError


class Words:
    """A tokenizer to which every word is a token."""

    chat_template: str | None = None

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
    from tierkv.integrations.hf_load import load_model

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
    shared = min(
        next(at for at, (one, two) in enumerate(zip(ids[0], each, strict=False)) if one != two) for each in ids[1:]
    )
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
@settings(max_examples=25)
def test_any_length(task, length, count, seed):
    try:
        samples = make_samples(task, Words(), length, count, seed)
    except ConfigError as short:
        least = int(str(short).rpartition("at least ")[2].replace(",", ""))
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
    counted: Counter[int] = Counter()

    def tokens(amount):
        counted[amount] += 1
        return sums[amount]

    found = fit(tokens, limit, 0, guess)
    assert sums[found] <= limit
    assert found == 16 * limit - 1 or sums[found + 1] > limit
    assert len(counted) < 60


# -- the same and not the same ----------------------------------------------------------------------------------------

DIGEST = """
import hashlib
from tierkv.benchmarks.tasks import TASKS, make_samples

class Words:
    chat_template = None
    def __call__(self, text, **_):
        return {"input_ids": text.split()}

every = [sample for task in TASKS for sample in make_samples(task, Words(), 1000, 2, seed=7)]
print(hashlib.sha256(repr(every).encode()).hexdigest())
"""


def test_every_process_makes_the_same_samples():
    found = set()
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        command = [sys.executable, "-c", DIGEST]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.add(done.stdout.strip())
    # In another order, so that no sample depends on those that were made before it.
    made = {task: make_samples(task, Words(), 1000, 2, seed=7) for task in reversed(list(TASKS))}
    every = [sample for task in TASKS for sample in made[task]]
    assert found == {hashlib.sha256(repr(every).encode()).hexdigest()}


@pytest.mark.parametrize("task", TASKS)
def test_seeds_and_samples_differ(task):
    one, other = (make_samples(task, Words(), 800, 4, seed) for seed in (0, 1))
    assert len({sample.prompt for sample in (*one, *other)}) == 8
    assert one == make_samples(task, Words(), 800, 4, 0)


@pytest.mark.parametrize("task", sorted(set(TASKS) - {"needle", "system_prompt"}))
def test_more_samples_begin_with_the_same_ones(task):
    assert make_samples(task, Words(), 800, 6, 0)[:2] == make_samples(task, Words(), 800, 2, 0)


@pytest.mark.parametrize("task", sorted(set(TASKS) - {"system_prompt"}))
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
