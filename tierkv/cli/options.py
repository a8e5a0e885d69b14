"""Reading options: lists, sizes and folders as people write them, with one line for what cannot be read."""

import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tierkv.cli.console import BadInput
from tierkv.errors import ConfigError
from tierkv.sizes import parse_size


def command_line() -> str:
    """Return the command that runs, for a record."""
    return shlex.join(["tierkv", *sys.argv[1:]])


def parts(text: str) -> list[str]:
    """Return what commas separate."""
    return [part.strip() for part in text.split(",")]


def known(text: str, legal: Sequence[str], option: str) -> list[str]:
    """Return the names in a list, each once.

    Raises:
        BadInput: one is not legal.
    """
    found = parts(text)
    for part in found:
        one_of(part, legal, option)
    return list(dict.fromkeys(found))


def one_of(text: str, legal: Sequence[str], option: str) -> str:
    """Return a name.

    Raises:
        BadInput: it is not legal.
    """
    if text not in legal:
        raise BadInput(f"{option}: {text!r} is not known (legal: {', '.join(legal)})")
    return text


def tokens(text: str, option: str) -> int:
    """Return a number of tokens.

    Raises:
        BadInput: it is none.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= 7) or not 1 <= int(text) <= 1_000_000:
        raise BadInput(f"{option}: {text!r} is not a number of tokens (legal: whole numbers from 1 to 1,000,000)")
    return int(text)


def size_bytes(text: str, option: str) -> int:
    """Return the bytes of a size that does not depend on the machine.

    Raises:
        BadInput: it is none, or a share.
    """
    try:
        size = parse_size(text)
    except ConfigError as error:
        raise BadInput(f"{option}: {error}") from None
    if size.percent is not None:
        raise BadInput(f"{option}: {text!r} is a share of what is free (legal here: 512MiB, 1.5GiB, 2GB, or bytes)")
    return size.size_bytes


@contextmanager
def scratch_folder(parent: str | None, option: str = "--disk-path") -> Iterator[Path]:
    """Give a folder for disk tiers, gone afterwards; ``option`` is where its parent was named.

    Raises:
        BadInput: it cannot be made.
    """
    try:
        if parent is not None:
            Path(parent).mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="tierkv-bench-", dir=parent)
    except OSError as error:
        raise BadInput(f"{option} {parent}: {error.strerror}; give a folder that can be written to") from None
    with folder as name:
        yield Path(name)
