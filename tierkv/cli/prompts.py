"""Where a prompt comes from, and the ids that a model reads."""

import sys
from pathlib import Path
from typing import IO, Any, Final

from tierkv.cli.console import BadInput

LONGEST_PROMPT: Final = 64 << 20
"""Bytes of a prompt that are read: more than any model takes, and an end for what has none, as /dev/zero."""


def read_prompt(text: str | None, file: str | None, stdin: str | None) -> str:
    """Return the prompt from the one source that was given.

    Args:
        text: the prompt itself, or ``-`` for standard input.
        file: the path of a UTF-8 file, or ``-`` for standard input.
        stdin: ``-`` where it was given as an argument of its own.

    Raises:
        BadInput: no source or several, or one that cannot be read or holds no text.
    """
    given = [value for value in (text, file, stdin) if value is not None]
    if len(given) != 1:
        how = "no prompt" if not given else "several prompts"
        raise BadInput(f"{how}: give exactly one of --prompt TEXT, --prompt-file FILE, or - for standard input")
    if stdin not in {None, "-"}:
        raise BadInput(f"unexpected argument {stdin!r}: a prompt is given as --prompt TEXT, and - reads standard input")
    if given[0] == "-":
        name, prompt = "standard input", _read("standard input", sys.stdin.buffer)
    elif file is not None:
        name, prompt = file, _read_file(file)
    else:
        name, prompt = "--prompt", given[0]
    if any("\ud800" <= letter <= "\udfff" for letter in prompt):  # bytes of the command line that are not UTF-8
        raise BadInput(f"{name}: the prompt is not UTF-8 text")
    if not prompt.strip():
        raise BadInput(f"{name}: the prompt is empty; give some text")
    return prompt


def _read_file(name: str) -> str:
    if not name:
        raise BadInput("--prompt-file has no name; give the path of a UTF-8 file, or - for standard input")
    try:
        with Path(name).expanduser().open("rb") as file:
            return _read(name, file)
    except FileNotFoundError:
        raise BadInput(f"{name}: no such file") from None
    except (OSError, ValueError, RuntimeError) as error:
        raise _unreadable(name, error) from None


def _unreadable(name: str, error: Exception) -> BadInput:
    return BadInput(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}")


def _read(name: str, file: IO[bytes]) -> str:
    try:
        data = file.read(LONGEST_PROMPT + 1)
    except OSError as error:
        raise _unreadable(name, error) from None
    if len(data) > LONGEST_PROMPT:
        raise BadInput(f"{name}: more than {LONGEST_PROMPT >> 20} MiB, which no model reads; give a shorter prompt")
    if b"\0" in data:
        raise BadInput(f"{name}: not a text file: it has a NUL byte at {data.index(0)}; give UTF-8 text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{name}: not UTF-8 text (byte {error.start} is not); save it as UTF-8") from None


def encode_prompt(tokenizer: Any, prompt: str, *, raw: bool = False, system: str | None = None) -> dict[str, Any]:
    """Return ``input_ids`` and ``attention_mask``, each ``[1, tokens]``, of a prompt.

    Args:
        tokenizer: the model's tokenizer.
        prompt: what the user says.
        raw: continue the text itself, without the chat template.
        system: the system message of a chat.

    Raises:
        BadInput: a system message for a model without a chat template, or a prompt that comes to no tokens.
    """
    if raw or not getattr(tokenizer, "chat_template", None):
        if system is not None:
            raise BadInput("--system needs a chat template, and this model's tokenizer has none")
        encoded = tokenizer(prompt, return_tensors="pt")
    else:
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": prompt})
        try:
            encoded = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        except ValueError as error:
            raise BadInput(f"the model's chat template cannot be used ({error}); try --raw") from None
        except Exception as error:
            # Templates refuse messages (a system message, for many models) with an exception of jinja2's own.
            if type(error).__module__.partition(".")[0] != "jinja2":
                raise
            raise BadInput(f"the model's chat template refuses these messages ({error}); try --raw") from None
    if encoded["input_ids"].shape[1] == 0:
        raise BadInput("the prompt comes to no tokens; give some text")
    return {name: encoded[name] for name in ("input_ids", "attention_mask") if name in encoded}


def check_tokens(tokens: Any, embeddings: Any) -> None:
    """Check that a model has an embedding for every token of a prompt.

    Args:
        tokens: ``[1, tokens]``, the ids.
        embeddings: what the model has for the tokens that it knows, a row each.

    Raises:
        BadInput: it has not, as with the tokenizer of another model.
    """
    known = embeddings.weight.shape[0]
    if (largest := int(tokens.max())) >= known:
        raise BadInput(
            f"the tokenizer made token {largest:,} of the prompt, and the model knows tokens 0 to {known - 1:,}; "
            "get tokenizer and weights of the same model"
        )


def check_length(config: Any, prompt_tokens: int, new_tokens: int | None, default: int) -> int:
    """Return how many tokens to make, after checking that they and the prompt fit the model.

    Args:
        config: the model's config.
        prompt_tokens: length of the prompt.
        new_tokens: what was asked for, or None for what fits, at most ``default``.
        default: see ``new_tokens``.

    Raises:
        BadInput: too many tokens; the message says what would fit.
    """
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return new_tokens or default
    if prompt_tokens >= limit:
        raise BadInput(
            f"the prompt has {prompt_tokens:,} tokens and the model's limit is {limit:,} with at least one new token; "
            f"shorten it to {limit - 1:,} tokens, about {100 * (limit - 1) // prompt_tokens}% of it"
        )
    room = limit - prompt_tokens
    if new_tokens is not None and new_tokens > room:
        shorter = f", or a prompt of at most {limit - new_tokens:,} tokens" if new_tokens < limit else ""
        raise BadInput(
            f"the prompt has {prompt_tokens:,} tokens, so of the model's limit of {limit:,} there is room for {room:,} "
            f"new ones, not {new_tokens:,}; use --max-new-tokens {room}{shorter}"
        )
    return new_tokens or min(default, room)
