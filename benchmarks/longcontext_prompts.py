"""The samples of a run, as the ids that a model reads: sized so that prompt, further turns and all answers fit a length."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tierkv.benchmarks.longcontext_settings import JSONL
from tierkv.benchmarks.tasks import TASKS, load_jsonl, make_samples, prompt_ids
from tierkv.errors import ConfigError

JSONL_NEW_TOKENS: Final = 64
"""The most tokens of an answer to a prompt of the user's own file, where nothing else is said."""
_TRIES: Final = 5
_MARK: Final = "\u241f answer \u241f"


@dataclass(frozen=True)
class Item:
    """One row to be: a conversation and what is expected of it.

    Attributes:
        task: its name.
        sample: its number within the task and length.
        source: of the tasks' ``Sample``.
        ids: of the prompt.
        turns: ids that follow each answer but the last: what ends it, and the user's next turn.
        new_tokens: the most of each answer.
    """

    task: str
    sample: int
    source: Any
    ids: tuple[int, ...]
    turns: tuple[tuple[int, ...], ...]
    new_tokens: int

    @property
    def tokens(self) -> int:
        """The most tokens that the conversation comes to."""
        return len(self.ids) + sum(map(len, self.turns)) + self.new_tokens * (1 + len(self.turns))

    @property
    def depth(self) -> float | None:
        """Where in the prompt the answer lies, 0 to 1."""
        depth = self.source.depth
        return None if depth is None else round(float(depth), 6)


class Prompts:
    """Makes the items of any length."""

    def __init__(self, tokenizer: Any, tasks: Sequence[str], samples: int, seed: int, most_new: int | None) -> None:
        """Read the user's files.

        Args:
            tokenizer: the model's.
            tasks: names of tasks, and of files.
            samples: of each task.
            seed: of the samples.
            most_new: the most tokens of an answer; None leaves it to the task.

        Raises:
            ConfigError: a file cannot be read.
        """
        self._tokenizer = tokenizer
        self._tasks = tasks
        self._samples = samples
        self._seed = seed
        self._most_new = most_new
        self._files = {task: self._of_file(task) for task in tasks if task.endswith(JSONL)}

    def items(self, lengths: Sequence[int]) -> dict[int, list[Item]]:
        """Return the items of every length. A prompt of a file belongs to the shortest length that holds it.

        Raises:
            ConfigError: a length is too short for a task, or the longest for a prompt of a file.
        """
        return {length: self.of(length, lengths) for length in lengths}

    def of(self, length: int, lengths: Sequence[int]) -> list[Item]:
        """Return the items of one length of several."""
        items: list[Item] = []
        for task in self._tasks:
            items += self._sized(task, length) if task not in self._files else self._held(task, length, lengths)
        return items

    def _held(self, task: str, length: int, lengths: Sequence[int]) -> list[Item]:
        longest = max(self._files[task], key=lambda item: item.tokens)
        if longest.tokens > max(lengths):
            raise ConfigError(
                f"{task}: prompt {longest.sample + 1} comes to {longest.tokens:,} tokens with its answer, and the longest of "
                f"--lengths is {max(lengths):,}; add a length of at least {longest.tokens:,}"
            )
        return [
            item
            for item in self._files[task]
            if length == min(one for one in lengths if one >= item.tokens)
        ]  # fmt: skip

    def _of_file(self, task: str) -> list[Item]:
        new = self._most_new or JSONL_NEW_TOKENS
        return [self._item(task, number, sample, new) for number, sample in enumerate(load_jsonl(task))]

    def _sized(self, task: str, length: int) -> list[Item]:
        """Return items whose conversations come to at most ``length`` tokens, as near to it as the task allows."""
        most = TASKS[task].max_new_tokens
        new = most if self._most_new is None else min(most, self._most_new)
        asked = length - new
        for _ in range(_TRIES):
            if asked < 1:
                break
            try:
                samples = make_samples(task, self._tokenizer, asked, self._samples, self._seed)
            except ConfigError as error:
                raise ConfigError(
                    f"{task} at {length:,} tokens, of which the prompt may take {asked:,}: {error}; for answers and further "
                    f"turns add {length - asked:,}"
                ) from None
            items = [self._item(task, number, sample, new) for number, sample in enumerate(samples)]
            excess = max(item.tokens for item in items) - length
            if excess <= 0:
                return items
            asked -= excess
        raise ConfigError(f"{task}: {length:,} tokens are too few for its answers and turns; give longer --lengths")

    def _item(self, task: str, number: int, sample: Any, new: int) -> Item:
        turns = tuple(self._continue(turn) for turn in sample.turns)
        return Item(task, number, sample, tuple(prompt_ids(self._tokenizer, sample.prompt)), turns, new)

    def _continue(self, turn: str) -> tuple[int, ...]:
        """Return the ids between an answer and the next one: the answer's end as the template has it, and the turn."""
        text = f"\n{turn}"
        if getattr(self._tokenizer, "chat_template", None):
            whole = self._tokenizer.apply_chat_template(
                [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "content": _MARK},
                    {"role": "user", "content": turn},
                ],
                add_generation_prompt=True,
                tokenize=False,
            )
            if _MARK in whole:  # some templates change what they are given; the plain text then has to do
                text = whole.rpartition(_MARK)[2]
        return tuple(map(int, self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]))


def describe(items: Mapping[int, Sequence[Item]]) -> dict[str, list[dict[str, Any]]]:
    """Return, by length, which rows there will be, as JSON."""
    return {
        str(length): [
            {"task": item.task, "sample": item.sample, "depth": item.depth, "prompt_tokens": len(item.ids)}
            for item in some
        ]
        for length, some in items.items()
    }
