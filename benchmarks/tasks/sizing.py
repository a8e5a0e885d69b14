"""Samples of an exact length: how many tokens a prompt has, and the search for the filler that comes nearest.

A text with one more word doesn't always have more tokens, since tokens span words. So the search looks for *a* largest
amount that fits, and what it returns was counted, not estimated.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from tierkv.benchmarks.tasks.sample import Ask, Draft, Sample, Task
from tierkv.errors import ConfigError

_MOST_FILLER: Final = 16
"""Units of filler a token, at most: an end for tokenizers that make nothing of it."""


def prompt_ids(tokenizer: Any, prompt: str, history: Sequence[Mapping[str, str]] = ()) -> list[int]:
    """Return the ids that a model reads when a user says ``prompt``.

    With a chat template: the messages before it, the prompt, and the beginning of the answer. Without: the texts of all of
    them, one after the other.

    Args:
        tokenizer: the model's tokenizer.
        prompt: what the user says.
        history: the messages before it, ``{"role": "user" or "assistant", "content": text}`` each.

    Raises:
        ConfigError: the chat template refuses the messages.
    """
    messages = [*history, {"role": "user", "content": prompt}]
    if not getattr(tokenizer, "chat_template", None):
        text = "\n".join(message["content"] for message in messages)
        return list(tokenizer(text, verbose=False)["input_ids"])
    try:
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, tokenizer_kwargs={"verbose": False}
        )
    except Exception as error:
        # Templates refuse messages with an exception of jinja2's own.
        if not isinstance(error, ValueError) and type(error).__module__.partition(".")[0] != "jinja2":
            raise
        raise ConfigError(f"the model's chat template cannot be used ({error}); take an instruction-tuned model") from None
    return list(encoded["input_ids"])


def make(task: Task, tokenizer: Any, length: int, count: int, seed: int) -> list[Sample]:
    """Make the samples of a task; see ``make_samples``."""
    for name, value, legal in (("length", length, "tokens"), ("count", count, "samples")):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} {value!r} is not a number of {legal}; give 1 or more")
    if type(seed) is not int:
        raise ConfigError(f"seed {seed!r} is not a whole number; give one")
    asks = [Ask(task.name, index, count, length, seed) for index in range(count)]
    counters = [_counter(task, tokenizer, ask) for ask in asks]
    shortest = max(tokens(task.least) for tokens in counters)
    if shortest > length:
        least = _least_length(task, tokenizer, asks, shortest)
        raise ConfigError(
            f"{length:,} tokens are too short for the task {task.name}: with this tokenizer it needs at least {least:,}"
        )
    amounts: list[int] = []
    for tokens in counters:
        guess = amounts[-1] if amounts else None
        if task.same_filler and guess is not None:
            amounts.append(guess)
        else:
            amounts.append(fit(tokens, length, task.least, guess))
    if task.same_filler:
        amounts = [_common(counters, length, amounts[0], task.least)] * count
    return [
        _sample(task, ask, _write(task, tokenizer, ask, amount), tokens(amount))
        for ask, amount, tokens in zip(asks, amounts, counters, strict=True)
    ]


def fit(tokens: Callable[[int], int], limit: int, least: int, guess: int | None = None) -> int:
    """Return an amount of filler that fits while one unit more doesn't.

    Args:
        tokens: returns the length of the text with so much filler.
        limit: the most that fits.
        least: an amount that fits.
        guess: an amount that may come near, which saves counting.
    """
    low, high = least, least + _MOST_FILLER * limit
    at = guess if guess is not None else least + max(1, (limit - tokens(least)) // 8)
    bracketed, step = False, 0
    while high - low > 1:
        at = min(max(at, low + 1), high - 1)
        if tokens(at) <= limit:
            low = at
        else:
            high, bracketed = at, True
        step += 1
        if step % 4 == 0 and bracketed:
            at = (low + high) // 2
        else:
            at = _estimate(tokens, limit, low, high if bracketed else None, least)
    return low


def _estimate(tokens: Callable[[int], int], limit: int, low: int, high: int | None, least: int) -> int:
    """Return where the limit lies on the line through two counted amounts."""
    if high is None:
        begin, end = least, low
    else:
        begin, end = low, high
    grown = tokens(end) - tokens(begin)
    if begin == end or grown <= 0:
        return 2 * end + 1
    # Rounded up while no amount was too much, so that the next one probably is.
    return begin + (limit - tokens(begin)) * (end - begin) // grown + (1 if high is None else 0)


def _common(counters: Sequence[Callable[[int], int]], limit: int, amount: int, least: int) -> int:
    """Return the largest amount, at most the given one, with which every sample fits."""
    while amount > least and any(tokens(amount) > limit for tokens in counters):
        amount -= 1
    return amount


def _least_length(task: Task, tokenizer: Any, asks: Sequence[Ask], length: int) -> int:
    """Return the least length at which every sample fits without filler; a longer one may hold more that must be there."""
    while True:
        longer = [Ask(ask.task, ask.index, ask.count, length, ask.seed) for ask in asks]
        shortest = max(_counter(task, tokenizer, ask)(task.least) for ask in longer)
        if shortest <= length:
            return length
        length = shortest


def _counter(task: Task, tokenizer: Any, ask: Ask) -> Callable[[int], int]:
    """Return a function that counts the tokens of a sample with so much filler, each amount once."""

    @cache
    def tokens(amount: int) -> int:
        return len(prompt_ids(tokenizer, _write(task, tokenizer, ask, amount).prompt))

    return tokens


def _write(task: Task, tokenizer: Any, ask: Ask, amount: int) -> Draft:
    """Write a sample. A model that only continues texts is given the beginning of an answer to continue."""
    draft = task.write(ask, amount)
    if getattr(tokenizer, "chat_template", None):
        return draft
    turns = tuple(f"{turn}\nAnswer:" for turn in draft.turns)
    return Draft(prompt=f"{draft.prompt}\nAnswer:", answers=draft.answers, turns=turns, depth=draft.depth)


def _sample(task: Task, ask: Ask, draft: Draft, tokens: int) -> Sample:
    return Sample(
        task=task.name,
        index=ask.index,
        length=ask.length,
        prompt=draft.prompt,
        turns=draft.turns,
        answers=draft.answers,
        depth=draft.depth,
        prompt_tokens=tokens,
        match=task.match,
    )
