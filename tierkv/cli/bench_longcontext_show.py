"""What ``tierkv bench longcontext`` shows: how far it is and how long it will take, and its result as a table."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from tierkv.charts_units import Format, format_tokens, format_value
from tierkv.cli.console import err, out
from tierkv.cli.process import stop_if_told

if TYPE_CHECKING:
    from tierkv.benchmarks.longcontext import Session

_DECODED: Final = 8
"""A decoded token takes about as long as so many tokens of a prompt: what the time left is estimated with."""


class Watch:
    """Shows a run on stderr: a bar with the time left on a terminal, elsewhere a line for each cache and length.

    Attributes:
        seconds: what the run took so far.
    """

    def __init__(self, session: "Session") -> None:
        """Watch a run that has not begun."""
        self._session = session
        self._began = time.perf_counter()
        self._left = sum(map(self._weight, session.missing))
        self._spent: dict[str, tuple[float, float]] = {}  # per cache: weight that is done, and seconds
        self._last = self._began
        self._said: set[str] = set()
        self._part: tuple[str, int, int] | None = None
        self._part_began = self._began
        self._bars = Progress(
            SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(),
            TimeElapsedColumn(), TextColumn("{task.fields[left]}", markup=False), console=err, transient=True,
        ) if err.is_terminal else None  # fmt: skip
        self._task = None if self._bars is None else self._bars.add_task("starting", total=self._left or 1, left="")

    @property
    def seconds(self) -> float:
        """What the run took so far."""
        return round(time.perf_counter() - self._began, 3)

    def on_part(self, cache: str, length: int, rows: int) -> None:
        """Take down that a cache begins at a length."""
        self._end_part()
        self._part, self._part_began = (cache, length, rows), time.perf_counter()
        self._update(f"{cache}, {format_tokens(length)} tokens")

    def on_row(self, row: dict[str, Any]) -> None:
        """Take down that a row is done."""
        now = time.perf_counter()
        weight = self._weight_of(row["length"], row["prompt_tokens"])
        done, seconds = self._spent.get(row["cache"], (0.0, 0.0))
        self._spent[row["cache"]] = done + weight, seconds + now - self._last
        self._last = now
        if self._bars is not None and self._task is not None:
            self._bars.advance(self._task, weight)
        self._update(f"{row['cache']}, {format_tokens(row['length'])} tokens, {row['task']} {row['sample'] + 1}")
        if row["error"] and row["error"] not in self._said:
            self._said.add(row["error"])
            self.say(f"{row['cache']}, {row['task']} at {row['length']:,} tokens: {row['error']}")

    def say(self, text: str) -> None:
        """Tell a detail."""
        (self._bars.console if self._bars is not None else err).print(f"  {text}", style="dim", soft_wrap=True)

    def seconds_left(self) -> float | None:
        """Estimate how long the rest takes, from what the rows of each cache have taken; None where nothing is known."""
        if not self._spent:
            return None
        whole = sum(done for done, _ in self._spent.values()), sum(seconds for _, seconds in self._spent.values())
        total = 0.0
        for key in self._session.missing:
            done, seconds = self._spent.get(key.cache, whole)
            total += self._weight(key) * seconds / done
        return total

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()
        if kind is None:
            self._end_part()

    def _end_part(self) -> None:
        if self._part is None:
            return
        cache, length, rows = self._part
        seconds, self._part = time.perf_counter() - self._part_began, None
        err.print(
            f"{cache}, {format_tokens(length)} tokens, {rows} rows: {seconds:.1f} s{self._left_words('; ')}",
            style="dim",
            soft_wrap=True,
        )

    def _update(self, text: str) -> None:
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, description=text, left=self._left_words(""))

    def _left_words(self, before: str) -> str:
        left = self.seconds_left()
        if left is None or not self._session.missing:
            return ""
        minutes = round(left / 60)
        words = (
            f"{minutes // 60} h {minutes % 60} min"
            if minutes >= 60
            else f"{minutes} min"
            if minutes
            else f"{left:.0f} s"
        )
        return f"{before}about {words} left"

    def _weight(self, key: Any) -> float:
        items = self._session.plan[key.length]
        tokens = next(one["prompt_tokens"] for one in items if (one["task"], one["sample"]) == (key.task, key.sample))
        return self._weight_of(key.length, tokens)

    @staticmethod
    def _weight_of(length: int, prompt_tokens: int) -> float:
        return prompt_tokens + _DECODED * max(1, length - prompt_tokens)


@contextmanager
def finish_the_row(watch: Watch) -> Iterator[threading.Event]:
    """Let the first Ctrl-C ask for an end after the row at hand, and give what says so; the second ends at once.

    The command still ends as interrupted ones do, once its result is out: the handler that was there is told, and what it
    raises is held back.
    """
    asked = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield asked
        return

    def stop(number: int, frame: FrameType | None) -> None:
        again = asked.is_set()
        try:
            before(number, frame)  # it knows whether this process ignores the signal
        except KeyboardInterrupt:
            asked.set()
            if again:
                raise
            watch.say("interrupted: the row at hand is finished and the page is written; Ctrl-C again ends at once")

    signal.signal(signal.SIGINT, stop)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
    if not asked.is_set():
        stop_if_told()


def show_result(result: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Print what each cache came to at each length."""
    from rich.table import Table

    from tierkv.benchmarks.longcontext_headline import headline
    from tierkv.benchmarks.longcontext_summary import cells

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("tokens", "cache", "score", "agrees", "first", "tokens/s", "KV", "resident", "errors"):
        table.add_column(name, justify="left" if name == "cache" else "right", no_wrap=True)
    kinds: dict[str, Format] = {
        "ttft_seconds": "seconds", "tokens_per_second": "number", "kv_in_memory_bytes": "bytes", "peak_rss_bytes": "bytes",
    }  # fmt: skip
    last = None
    for cell in cells(rows):
        figures = [format_value(cell[name].median, kind) if cell[name] else "" for name, kind in kinds.items()]
        shares = ["" if cell[name] is None else f"{cell[name]:.0%}" for name in ("score", "agreement")]
        length = format_tokens(cell["length"]) if cell["length"] != last else ""
        table.add_row(length, cell["cache"], *shares, *figures, str(cell["errors"]) if cell["errors"] else "")
        last = cell["length"]
    if rows:
        out.print(table)
    for sentence in headline(result, rows):
        out.print(sentence, soft_wrap=True)
    for one in result["left_out"]:
        out.print(f"left out: {one['cache']}, {one['reason']}", style="dim", soft_wrap=True)
    out.print(f"written: {result['report']}", soft_wrap=True)
