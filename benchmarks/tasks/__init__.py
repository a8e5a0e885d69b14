"""Long-context tasks, made offline from a seed and sized to a length in the model's own tokens.

make_samples("needle", tokenizer, 8192, count=5, seed=0)   ->  five prompts of at most 8,192 tokens, with their answers
load_jsonl("mine.jsonl", tokenizer)                        ->  a user's own prompts and answers
sample.score(output)                                       ->  0 to 1
prompt_ids(tokenizer, sample.prompt)                       ->  the ids that were counted

A chat has further ``turns``; ``prompt_ids`` takes what was said before as ``history``. Its score is that of all the answers of
the model, joined.
"""

from tierkv.benchmarks.tasks.own import load_jsonl
from tierkv.benchmarks.tasks.registry import TASKS, make_samples
from tierkv.benchmarks.tasks.sample import Sample
from tierkv.benchmarks.tasks.sizing import prompt_ids
from tierkv.benchmarks.tasks.task import Task

__all__ = ["TASKS", "Sample", "Task", "load_jsonl", "make_samples", "prompt_ids"]
