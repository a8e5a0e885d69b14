"""The process that a command line runs in: its standard streams, its signals, and libraries that keep quiet."""

import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

INTERRUPTED: Final = 128 + signal.SIGINT
TERMINATED: Final = 128 + signal.SIGTERM


class Interrupted(KeyboardInterrupt):
    """SIGINT arrived: Ctrl-C. A class of our own, as Python ends by other rules once it saw a plain KeyboardInterrupt."""


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. Unwinds like Ctrl-C, so that spill files and threads are cleaned up."""


_STOPS: Final = {
    signal.SIGINT: (Interrupted, "interrupted", INTERRUPTED),
    signal.SIGTERM: (Terminated, "terminated", TERMINATED),
}


class _Signals:
    """What signals do to this process; a signal belongs to nothing smaller.

    Attributes:
        arrived: the exception of the first that came, or None.
        at_once: whether the process ends where it stands, as there is nothing to clean up.
        ignored: those that the process was started to ignore, as a shell does with SIGINT for a job in the background.
    """

    def __init__(self) -> None:
        self.arrived: type[KeyboardInterrupt] | None = None
        self.at_once = True
        self.ignored: set[int] = set()

    def install(self) -> None:
        self.ignored = {number for number in _STOPS if signal.getsignal(number) is signal.SIG_IGN}
        for number in _STOPS:
            signal.signal(number, self.handle)

    def handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if number in self.ignored:
            return
        stop, word, code = _STOPS[signal.Signals(number)]
        if self.at_once:
            with suppress(OSError):
                os.write(2, f"{word}\n".encode())
            os._exit(code)
        self.arrived = self.arrived or stop
        raise stop


_signals: Final = _Signals()


class Stderr:
    """Standard error as it is at the moment, for progress: where it cannot be written to, the work goes on."""

    def write(self, text: str) -> int:
        """Write, or not."""
        with suppress(OSError, ValueError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, or not."""
        with suppress(OSError, ValueError):
            sys.stderr.flush()

    def __getattr__(self, name: str) -> Any:
        """Answer whatever else is asked as the stream does."""
        return getattr(sys.stderr, name)


def prepare_process() -> None:
    """Set up a process that is the command line: streams, quiet libraries, tidy warnings, signals that clean up."""
    _open_closed_streams()
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
    _signals.install()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal may not know every letter


def stop_that_came() -> KeyboardInterrupt | None:
    """Return the signal that told this process to stop, as an exception, or None where none came."""
    return None if _signals.arrived is None else _signals.arrived()


def stop_if_told() -> None:
    """Raise what a signal raised before, where a library caught it: imports and callbacks do."""
    if (stop := stop_that_came()) is not None:
        raise stop


@contextmanager
def unwind_on_signals() -> Iterator[None]:
    """Let a signal raise while a command runs, so that it gives back all it has; before and after, just end."""
    with _set_at_once(at_once=False):
        yield


@contextmanager
def nothing_to_clean_up() -> Iterator[None]:
    """Let a signal just end the process while modules load: they swallow an exception, or C++ aborts on it."""
    with _set_at_once(at_once=True):
        yield


@contextmanager
def _set_at_once(*, at_once: bool) -> Iterator[None]:
    before, _signals.at_once = _signals.at_once, at_once
    try:
        yield
    finally:
        _signals.at_once = before


def _open_closed_streams() -> None:
    """Put /dev/null where a standard stream was closed, before some file or socket gets its number."""
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:  # in the order of their numbers: a file gets the lowest that is free
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - open while we run
