"""The samples of a long-context run fit their lengths, turns and answers included."""

import json

import pytest

from tests.cli.commands import byte_tokenizer
from tierkv.benchmarks.longcontext_prompts import Prompts
from tierkv.benchmarks.tasks import prompt_ids
from tierkv.errors import ConfigError


def test_prompts_turns_and_answers_fit_a_length_and_fill_it():
    tokenizer = byte_tokenizer()
    prompts = Prompts(tokenizer, ["needle", "chat"], 3, 0, None)
    for item in prompts.of(900, [900]):
        assert 0.9 * 900 <= item.tokens <= 900
        assert item.tokens == len(item.ids) + sum(map(len, item.turns)) + (1 + len(item.turns)) * item.new_tokens
        assert list(item.ids) == prompt_ids(tokenizer, item.source.prompt)
    chat = [item for item in prompts.of(900, [900]) if item.task == "chat"]
    assert [len(item.turns) for item in chat] == [2, 2, 2]
    # What follows an answer ends it as the template does, and is the user's next turn.
    text = tokenizer.decode(chat[0].turns[0])
    assert text == f"\n[user] {chat[0].source.turns[0]}\n[assistant] "


def test_without_a_template_turns_follow_as_text():
    tokenizer = byte_tokenizer(None)
    item = Prompts(tokenizer, ["chat"], 1, 0, 5).of(900, [900])[0]
    assert item.new_tokens == 5
    assert tokenizer.decode(item.turns[0]) == f"\n{item.source.turns[0]}"


def test_a_file_of_prompts_is_dealt_to_the_shortest_lengths(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"prompt": "a" * size, "answers": ["b"]}) + "\n" for size in (10, 300, 20)))
    prompts = Prompts(byte_tokenizer(), [str(file)], 1, 0, 8)
    found = prompts.items([128, 512])
    assert {length: [item.sample for item in items] for length, items in found.items()} == {128: [0, 2], 512: [1]}
    with pytest.raises(ConfigError, match=r"prompt 2 comes to .* add a length of at least"):
        prompts.items([128, 256])


def test_a_length_that_is_too_short_says_what_would_do():
    prompts = Prompts(byte_tokenizer(), ["needle"], 1, 0, None)
    with pytest.raises(ConfigError, match=r"needle at 64 tokens.*at least .*for answers and further turns add 32"):
        prompts.of(64, [64])
    with pytest.raises(ConfigError, match="20 tokens are too few"):
        prompts.of(20, [20])
