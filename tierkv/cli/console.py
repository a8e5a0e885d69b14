"""What every command shares: where output goes, and how an error becomes one line and an exit code.

    stdout   the result: a readable table, or with ``--json`` exactly one JSON object
    stderr   progress, warnings, and one line ``error: ...``
    exit     0 done · 1 failed · 2 bad usage or bad input · 130 interrupted · 143 terminated

A command raises; it never prints an error or exits by itself. ``CommandGroup`` is the only place that catches.
"""

import errno
import json
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

import typer
from rich.console import Console
from typer.core import TyperGroup

from tierkv.errors import CapacityError, ConfigError, TierKVError, UnsafeCall, UnsupportedModel

FAILED: Final = 1
BAD_INPUT: Final = 2
INTERRUPTED: Final = 128 + signal.SIGINT
TERMINATED: Final = 128 + signal.SIGTERM

# Markup and emoji codes are off: prompts, answers and paths are printed as they are.
out: Final = Console(highlight=False, markup=False, emoji=False)
"""Standard output, for readable results."""
err: Final = Console(stderr=True, highlight=False, markup=False, emoji=False)
"""Standard error, for progress."""

_INPUT_ERRORS: Final = (ConfigError, UnsupportedModel, UnsafeCall, CapacityError)
_HF_PACKAGES: Final = {"transformers", "accelerate", "gguf", "safetensors", "tokenizers", "huggingface_hub"}


class BadInput(Exception):
    """What the user gave cannot be used; the message says what is wrong and what to give instead. Exit code 2."""


class Failed(Exception):
    """The command ran and did not reach its goal; the message says how. Exit code 1."""


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. Unwinds like Ctrl-C, so that spill files and threads are cleaned up."""


class CommandGroup(TyperGroup):
    """A group of commands whose errors end as one line on stderr and an exit code."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command line. Errors of usage that typer finds before a command runs end up here."""
        standalone = kwargs.get("standalone_mode", True)
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False}) or 0
        except Exception as error:
            if not hasattr(error, "format_message"):
                raise
            code = report(error)
        if standalone:
            sys.exit(code)
        return code

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command and report what it raises."""
        try:
            super().invoke(ctx)
            # Here, not at the interpreter's exit: a reader that is gone is then handled like one that goes midway.
            sys.stdout.flush()
        except typer.Exit:
            raise
        except (Exception, KeyboardInterrupt) as error:
            code = report(error)
            if code is None:
                raise
            raise typer.Exit(code) from None


def report(error: BaseException) -> int | None:
    """Print the line that an error deserves and return its exit code; None where it is a bug and needs a traceback."""
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
        _error(str(error) or "out of memory")
        return FAILED
    return None


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


def prepare_process() -> None:
    """Set up a process that is the command line: quiet libraries, tidy warnings, SIGTERM that cleans up."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with it closed
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open while we run
    # Read when these libraries are imported, which happens later. Progress is ours to show.
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    if not sys.warnoptions:  # python -W and PYTHONWARNINGS win
        warnings.simplefilter("ignore")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logging.addLevelName(logging.WARNING, "warning")
    logging.getLogger("tierkv").addHandler(handler)
    signal.signal(signal.SIGTERM, _terminate)
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may not know every letter


def _terminate(_number: int, _frame: FrameType | None) -> None:
    raise Terminated


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
