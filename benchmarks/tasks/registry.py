"""All tasks by name, and samples of one of them."""

from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final

from tierkv.benchmarks.tasks import aggregation, documents, retrieval
from tierkv.benchmarks.tasks.sample import Sample
from tierkv.benchmarks.tasks.task import Task
from tierkv.config_messages import either
from tierkv.errors import ConfigError

_ALL: Final = (
    Task(
        name="needle",
        title="needle in a haystack: one number in real text, at depths from its beginning to its end",
        kind="retrieval",
        max_new_tokens=32,
        write=retrieval.needle,
    ),
    Task(
        name="niah_multikey",
        title="RULER-style: four needles with a key each, one of them asked for",
        kind="retrieval",
        max_new_tokens=128,
        write=retrieval.multikey,
    ),
    Task(
        name="niah_multivalue",
        title="RULER-style: four needles of one key, all of them asked for",
        kind="retrieval",
        max_new_tokens=128,
        write=retrieval.multivalue,
    ),
    Task(
        name="niah_multiquery",
        title="RULER-style: four needles with a key each, all of them asked for",
        kind="retrieval",
        max_new_tokens=128,
        write=retrieval.multiquery,
    ),
    Task(
        name="variable_tracking",
        title="RULER-style: every variable of a chain of assignments",
        kind="aggregation",
        max_new_tokens=96,
        write=aggregation.variable_tracking,
    ),
    Task(
        name="common_words",
        title="RULER-style: the ten most common words of a list",
        kind="aggregation",
        max_new_tokens=120,
        write=aggregation.common_words,
    ),
    Task(
        name="frequent_words",
        title="RULER-style: the three most frequent words of a coded text",
        kind="aggregation",
        max_new_tokens=50,
        write=aggregation.frequent_words,
        least=aggregation.LEAST_CODED,
    ),
    Task(
        name="passkey",
        title="a pass key in sentences that say nothing",
        kind="retrieval",
        max_new_tokens=16,
        write=retrieval.passkey,
    ),
    Task(
        name="kv_retrieval",
        title="the value of one key in a JSON object of UUIDs",
        kind="retrieval",
        max_new_tokens=96,
        write=retrieval.kv_retrieval,
        least=1,
    ),
    Task(
        name="doc_qa",
        title="questions about Python's documentation",
        kind="qa",
        max_new_tokens=32,
        write=documents.doc_qa,
        match="any",
    ),
    Task(
        name="chat",
        title="a chat of three turns about one document",
        kind="chat",
        max_new_tokens=32,
        write=documents.chat,
    ),
    Task(
        name="system_prompt",
        title="many conversations with one long system prompt",
        kind="chat",
        max_new_tokens=32,
        write=documents.system_prompt,
        same_filler=True,
    ),
)
TASKS: Final[Mapping[str, Task]] = MappingProxyType({task.name: task for task in _ALL})
"""The tasks by name. What is RULER-style keeps RULER's structure and scoring, not its words, and says so in its title."""


def make_samples(task: str, tokenizer: Any, length: int, count: int, seed: int) -> list[Sample]:
    """Make the samples of a task, each as near to a length as its filler allows and never longer.

    The same arguments make the same samples, in any process. At another length a sample asks the same of more or less text;
    with another ``count`` the samples that both have are the same. Exceptions: ``needle`` spreads its depths over ``count``,
    ``system_prompt`` has more facts in a longer text, and its filler is what fits all samples. The documentation that fills
    most tasks is that of the Python at hand.

    Args:
        task: a name of ``TASKS``.
        tokenizer: the model's tokenizer, with whose chat template, if it has one, prompts are counted.
        length: most tokens of a prompt; of a chat, of its first turn. Answers come on top.
        count: how many samples.
        seed: of the random numbers.

    Raises:
        ConfigError: there is no such task, or it needs more than ``length`` tokens; the message says how many.
    """
    if task not in TASKS:
        near = get_close_matches(task, TASKS, 3, 0.5)
        advice = f"did you mean {either(near)}?" if near else f"known: {', '.join(TASKS)}"
        raise ConfigError(f"unknown task {task!r} ({advice})")
    return TASKS[task].make(tokenizer, length, count, seed)
