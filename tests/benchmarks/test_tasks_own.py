"""A user's own prompts: what a file of JSON lines may hold, and what is said of one that cannot be read."""

import json
import os

import pytest

from tierkv.benchmarks.tasks import load_jsonl
from tierkv.errors import ConfigError

GOOD = {"prompt": "What is 6 x 7?", "answers": ["42"]}


class Letters:
    """A tokenizer to which every letter is a token."""

    chat_template = None

    def __call__(self, text, **_):
        return {"input_ids": list(text)}


def written(folder, *lines, name="mine.jsonl"):
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_samples_of_a_file(tmp_path):
    more = {"prompt": "One\u2028or two?", "answers": "two", "match": "any", "turns": ["Why?"], "source": "a book"}
    path = written(tmp_path, "\ufeff" + json.dumps(GOOD), "", json.dumps(more, ensure_ascii=False), "  ")
    first, second = load_jsonl(path, Letters())
    assert (first.task, first.index, first.prompt, first.answers) == ("mine", 0, GOOD["prompt"], ("42",))
    assert (first.match, first.turns, first.depth) == ("all", (), None)
    assert first.prompt_tokens == first.length == len(GOOD["prompt"])
    assert (second.index, second.prompt, second.answers) == (1, "One\u2028or two?", ("two",))
    assert (second.match, second.turns) == ("any", ("Why?",))
    assert first.score("It is 42.") == 1
    assert second.score("") == 0
    assert [sample.prompt_tokens for sample in load_jsonl(str(path))] == [0, 0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", ["not JSON"]),
        ("[" * 100_000, ["not JSON"]),
        ("[1]", ["a list, not an object"]),
        ({"answers": ["a"]}, ['there is no "prompt"']),
        ({"prompt": "p", "answer": ["a"]}, ['there is no "answers"', '"answer"']),
        ({"prompt": 5, "answers": ["a"]}, ['"prompt"', "string"]),
        ({"prompt": " ", "answers": ["a"]}, ['"prompt" is empty']),
        ({"prompt": "p", "answers": []}, ['"answers" has no entries']),
        ({"prompt": "p", "answers": ["a", ""]}, ['"answers", entry 2 is empty']),
        ({"prompt": "p", "answers": ["a", 7]}, ['"answers", entry 2', "string"]),
        ({"prompt": "p", "answers": None}, ['"answers"', "list"]),
        ({"prompt": "p", "answers": ["a"], "match": "some"}, ['"match"', "'all' or 'any'"]),
        ({"prompt": "p", "answers": ["a"], "turns": "more"}, ['"turns"', "list"]),
        ('{"prompt": "\\ud800", "answers": ["a"]}', ['"prompt"', "surrogate"]),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(tmp_path, line, words):
    with pytest.raises(ConfigError) as error:
        load_jsonl(written(tmp_path, GOOD, "", line))
    said = str(error.value)
    assert "mine.jsonl, line 3: " in said
    assert "legal: {" in said
    assert "\n" not in said
    assert len(said) < 400
    assert all(word in said for word in words), said


def test_bad_files(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_jsonl(tmp_path)
    with pytest.raises(ConfigError, match="no samples"):
        load_jsonl(written(tmp_path, "", " "))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_jsonl("a\0b")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(ConfigError, match="not UTF-8 text \\(byte 12"):
        load_jsonl(tmp_path / "latin.jsonl")
    if os.geteuid() != 0:
        (tmp_path / "latin.jsonl").chmod(0)
        with pytest.raises(ConfigError, match="Permission denied"):
            load_jsonl(tmp_path / "latin.jsonl")
