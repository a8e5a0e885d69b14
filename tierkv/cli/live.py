"""The live view of a command's own engine, on stderr while it works: what ``tierkv top`` shows of other processes."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from tierkv.cli.console import err
from tierkv.errors import TierKVError

_LOOKS_PER_SECOND: Final = 4
_RATE_SECONDS: Final = 1.0
"""Rates are over at least so long: single tokens come and go."""


@contextmanager
def live_view(engine: Any, *, shown: bool) -> Iterator[None]:
    """Show an engine while the block runs; what was shown last stays.

    Args:
        engine: an open one with a ``name``.
        shown: False shows nothing. So does an stderr that is no terminal.
    """
    if not (shown and err.is_terminal):
        yield
        return
    from rich.live import Live

    view = _View(engine)
    with Live(get_renderable=view.render, console=err, refresh_per_second=_LOOKS_PER_SECOND, redirect_stdout=False):
        yield


class _View:
    """Looks at one engine of this process, again and again; called in the thread that draws."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._before: Any = None
        self._rates: dict[tuple[int, int], Any] = {}
        self._drawn: Any = ""

    def render(self) -> Any:
        """Return what is to be drawn now; what was drawn last, once the engine is closed."""
        from tierkv.cli.top_show import render
        from tierkv.watch import EngineSnapshot, Found, ProcessSnapshot, rates_between

        try:
            engines = [EngineSnapshot(1, self._engine.name, self._engine.stats())]
        except (TierKVError, RuntimeError):  # a forward may be changing what they are made of
            return self._drawn
        now = ProcessSnapshot(os.getpid(), 0.0, "", time.monotonic(), engines)
        if self._before is None:
            self._before = now
        elif now.taken - self._before.taken >= _RATE_SECONDS:
            self._rates, self._before = rates_between([self._before], [now]), now
        self._drawn = render(Found([now]), self._rates)
        return self._drawn
