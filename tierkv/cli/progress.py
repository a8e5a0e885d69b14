"""Progress: what a command is doing, on stderr.

A live line with a bar on a terminal. Elsewhere one line when a stage is done, and none for one that fails: there the
error is the only line.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from tierkv.cli.console import err
from tierkv.cli.process import stop_if_told


class Stage:
    """One stage that is running."""

    def __init__(self, bars: Bars | None, task: TaskID | None) -> None:
        """Report to a live bar, or to plain lines where there is none."""
        self._bars = bars
        self._task = task

    def say(self, text: str) -> None:
        """Tell a detail: what takes so long, or what was found."""
        (self._bars.console if self._bars else err).print(f"  {text}", style="dim", soft_wrap=True)

    def advance(self, count: int = 1) -> None:
        """Move the bar on."""
        if self._bars is not None and self._task is not None:
            self._bars.advance(self._task, count)


class Progress:
    """The stages of one command.

    Attributes:
        seconds: how long each finished stage took, by name.
    """

    def __init__(self) -> None:
        """Start with no stage."""
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, text: str, total: int | None = None) -> Iterator[Stage]:
        """Run a stage and note its time, also when it fails.

        Args:
            name: key in ``seconds``.
            text: what is done, in a few words.
            total: steps of a bar, or None where nobody knows.
        """
        began = time.perf_counter()
        try:
            if err.is_terminal:
                with _bars(counted=total is not None) as bars:
                    yield Stage(bars, bars.add_task(text, total=total))
            else:
                yield Stage(None, None)
        finally:
            self.seconds[name] = round(time.perf_counter() - began, 3)
        stop_if_told()
        err.print(f"{text}: {self.seconds[name]:.1f} s", style="dim", soft_wrap=True)


def _bars(*, counted: bool) -> Bars:
    columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
    if counted:
        columns += [BarColumn(), MofNCompleteColumn()]
    return Bars(*columns, TimeElapsedColumn(), console=err, transient=True)
