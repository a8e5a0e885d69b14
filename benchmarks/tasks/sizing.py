"""Exact lengths: how many tokens a prompt has, and the search for the filler that comes nearest to a length.

A text with one more word doesn't always have more tokens, since tokens span words. So the search looks for *a* largest
amount that fits, and what it returns was counted, not estimated.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

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
        raise ConfigError(
            f"the model's chat template cannot be used ({error}); take an instruction-tuned model"
        ) from None
    return list(encoded["input_ids"])


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
