"""A user's own prompts and answers, from a file of JSON lines."""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tierkv.benchmarks.tasks.sample import Match, Sample
from tierkv.benchmarks.tasks.sizing import prompt_ids
from tierkv.errors import ConfigError

LEGAL: Final = 'legal: {"prompt": "...", "answers": ["...", ...]}'
"""How a line looks, as every message about one says."""


def _text(value: str) -> str:
    """Check a text."""
    if not value.strip():
        raise ValueError("is empty")
    if any("\ud800" <= letter <= "\udfff" for letter in value):  # JSON can spell half of a character
        raise ValueError("is not Unicode text: it has half of a surrogate pair")
    return value


def _listed(value: object) -> object:
    """Take one answer for a list of one."""
    return [value] if isinstance(value, str) else value


_Text = Annotated[str, AfterValidator(_text)]


class _Line(BaseModel):
    """One line of the file; other names are passed over."""

    model_config = ConfigDict(strict=True)

    prompt: _Text
    answers: Annotated[list[_Text], BeforeValidator(_listed), Field(min_length=1)]
    turns: list[_Text] = []
    match: Match = "all"


def load_jsonl(path: str | Path, tokenizer: Any = None) -> list[Sample]:
    """Read samples from a file with one JSON object a line; empty lines are passed over.

    ``prompt`` and ``answers`` must be there. ``turns``, what the user says next, and ``match``, ``"all"`` or ``"any"`` of the
    answers, may be. The task has the name of the file without its ending.

    Args:
        path: the file, UTF-8.
        tokenizer: what counts the tokens of the prompts; without one they stay uncounted, and are 0.

    Raises:
        ConfigError: the file cannot be read or has no samples, or a line is wrong; the message says which and why.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start} is not); save it as UTF-8") from None
    except (OSError, ValueError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read: {why}; give the path of a file of JSON lines") from None
    samples: list[Sample] = []
    # Not splitlines: JSON strings may hold separators that it splits at.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            read = _read(line)
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        tokens = len(prompt_ids(tokenizer, read.prompt)) if tokenizer is not None else 0
        samples.append(
            Sample(
                task=Path(path).stem,
                index=len(samples),
                length=tokens,
                prompt=read.prompt,
                turns=tuple(read.turns),
                answers=tuple(read.answers),
                prompt_tokens=tokens,
                match=read.match,
            )
        )
    if not samples:
        raise ConfigError(f"{path}: no samples in it; give one JSON object a line ({LEGAL})")
    return samples


def _read(line: str) -> _Line:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else "too deep or too long a number"
        raise ConfigError(f"not JSON: {why} ({LEGAL})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"a {type(value).__name__}, not an object ({LEGAL})")
    try:
        return _Line.model_validate(value)
    except ValidationError as error:
        raise ConfigError(f"{_describe(error, value)} ({LEGAL})") from None


def _describe(error: ValidationError, value: Mapping[str, Any]) -> str:
    """Return the first thing that is wrong with a line."""
    first = error.errors()[0]
    name, *rest = first["loc"]
    if first["type"] == "missing":
        unknown = [other for other in value if other not in _Line.model_fields]
        near = get_close_matches(str(name), unknown, 1, 0.5)
        return f'there is no "{name}"' + (f'; is it what "{near[0]}" is meant to be?' if near else "")
    place = f'"{name}"' + "".join(f", entry {int(at) + 1}" for at in rest if isinstance(at, int))
    if first["type"] == "value_error":
        return f"{place} {first['ctx']['error']}"
    if first["type"] == "too_short":
        return f"{place} has no entries"
    return f"{place}: {first['msg'][:1].lower()}{first['msg'][1:]}"
