"""What every command shares: where output goes, and how an error becomes one line and an exit code.

    stdout   the result: a readable table, or with ``--json`` exactly one JSON object
    stderr   progress, warnings, and one line ``error: ...``
    exit     0 done · 1 failed · 2 bad usage or bad input · 130 interrupted · 143 terminated

A command raises; it never prints an error or exits by itself. ``CommandGroup`` is the only place that catches.
"""

import errno
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import IO, Any, Final, cast

import typer
from rich.console import Console
from typer.core import TyperGroup

from tierkv.cli.process import (
    INTERRUPTED,
    TERMINATED,
    Stderr,
    Terminated,
    stop_if_told,
    stop_that_came,
    unwind_on_signals,
)
from tierkv.errors import CapacityError, ConfigError, TierKVError, UnsafeCall, UnsupportedModel

FAILED: Final = 1
BAD_INPUT: Final = 2

# Markup and emoji codes are off: prompts, answers and paths are printed as they are.
out: Final = Console(highlight=False, markup=False, emoji=False)
"""Standard output, for readable results."""
err: Final = Console(file=cast("IO[str]", Stderr()), highlight=False, markup=False, emoji=False)
"""Standard error, for progress."""

_INPUT_ERRORS: Final = (ConfigError, UnsupportedModel, UnsafeCall, CapacityError)
_HF_PACKAGES: Final = {"transformers", "accelerate", "gguf", "safetensors", "tokenizers", "huggingface_hub"}


class BadInput(Exception):
    """What the user gave cannot be used; the message says what is wrong and what to give instead. Exit code 2."""


class Failed(Exception):
    """The command ran and did not reach its goal; the message says how. Exit code 1."""


class CommandGroup(TyperGroup):
    """A group of commands whose errors end as one line on stderr and an exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command line. Errors of usage that typer finds before a command runs end up here."""
        standalone = kwargs.get("standalone_mode", True)
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False}) or 0
        except Exception as error:
            code = report(error)
            if code is None:
                raise
        if standalone:
            sys.exit(code)
        return code

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command and report what it raises."""
        try:
            with unwind_on_signals():
                super().invoke(ctx)
                # Here, not at the interpreter's exit: a reader that is gone is then handled like one that goes midway.
                sys.stdout.flush()
                stop_if_told()
        except typer.Exit:
            raise
        except (Exception, KeyboardInterrupt) as error:
            code = report(error)
            if code is None:
                raise
            raise typer.Exit(code) from None


def report(error: BaseException) -> int | None:
    """Print the line that an error deserves and return its exit code; None where it is a bug and needs a traceback."""
    # A library may have turned the signal into an error of its own: transformers does, while it imports.
    error = stop_that_came() or error
    if isinstance(error, KeyboardInterrupt):
        terminated = isinstance(error, Terminated)
        _line("terminated" if terminated else "interrupted")
        return TERMINATED if terminated else INTERRUPTED
    if isinstance(error, BrokenPipeError) or (isinstance(error, OSError) and error.errno == errno.EPIPE):
        _abandon_stdout()
        return FAILED
    if hasattr(error, "format_message"):  # typer's own errors; their classes have no public names
        context = getattr(error, "ctx", None)
        advice = f" (see: {context.command_path} --help)" if context else ""
        _error(f"{str(error.format_message()).rstrip('.')}{advice}")
        return BAD_INPUT
    if isinstance(error, ModuleNotFoundError) and error.name in _HF_PACKAGES:
        _error(f'this command needs the package {error.name}; install the extra with pip install -e ".[hf]"')
        return BAD_INPUT
    if isinstance(error, (BadInput, *_INPUT_ERRORS)):
        _error(str(error))
        return BAD_INPUT
    if isinstance(error, Failed | TierKVError | OSError) or _out_of_memory(error):
        _error(_failure(error) or "out of memory")
        return FAILED
    return None


def _failure(error: BaseException) -> str:
    if not isinstance(error, OSError) or isinstance(error, TierKVError) or not error.strerror:
        return str(error)
    if error.filename is None:  # standard output has no name, and whatever else we write to has one
        return f"the output cannot be written: {error.strerror}; send standard output somewhere else"
    return f"{error.filename}: {error.strerror}"


def _out_of_memory(error: BaseException) -> bool:
    # torch's own class is not named, as that would load torch; without a GPU it raises a plain RuntimeError.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )


@contextmanager
def reserve_stdout(as_json: bool) -> Iterator[None]:
    """Keep what libraries print out of standard output, which belongs to the one JSON object."""
    if not as_json:
        yield
        return
    with redirect_stdout(sys.stderr):
        yield


def print_json(result: Mapping[str, Any]) -> None:
    """Print the one JSON object of a command."""
    # Serialised first: what is not JSON must fail before anything is printed.
    text = json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write(text + "\n")


def check_savable(path: str | None, option: str) -> None:
    """Find out before a long run whether its result can be kept.

    Raises:
        BadInput: it cannot.
    """
    if path is None:
        return
    if not path:
        raise BadInput(f"{option} is empty; give the name of a file that can be written")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise BadInput(f"{option} {path!a}: its name is not UTF-8; give another") from None
    try:
        target = Path(path).resolve(strict=False)  # written whole, so what a link names is replaced, not the link
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, "Is a directory")
        if target.exists() and not target.is_file():
            raise BadInput(f"{option} {path}: Is no regular file; give the name of a file that can be written")
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = _beside(target)
        beside.touch()
        beside.unlink()
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError in Python 3.11
        why = error.strerror if isinstance(error, OSError) else "Its links go round in circles"
        raise BadInput(f"{option} {path}: {why}; give the name of a file that can be written") from None


def save_json(path: str, result: Mapping[str, Any]) -> None:
    """Write the JSON object of a command to a file, whole or not at all; ask ``check_savable`` before."""
    save_text(path, json.dumps(result, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def save_text(path: str, text: str) -> None:
    """Write a file, whole or not at all; ask ``check_savable`` before."""
    target = Path(path).resolve()
    beside = _beside(target)
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}")


def _error(message: str) -> None:
    _line("error: " + " ".join(message.split()))


def _line(text: str) -> None:
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{text}\n")


def _abandon_stdout() -> None:
    """Nobody reads standard output any more: let the interpreter's last flush go nowhere, without a complaint."""
    with suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
