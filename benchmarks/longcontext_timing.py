"""When the tokens of an answer came, and what that comes to."""

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np


class Clock:
    """A streamer that notes when each token came."""

    def __init__(self) -> None:
        """Begin now, until ``begin`` says otherwise."""
        self.began = time.perf_counter()
        self.times: list[float] = []
        self._prompt_seen = False

    def begin(self) -> None:
        """Start the clock."""
        self.began = time.perf_counter()

    def put(self, _: Any) -> None:
        """Take what ``generate`` hands out: the prompt first, then token by token."""
        if self._prompt_seen:
            self.times.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        """Do nothing."""


def times_of(clocks: Sequence[Clock]) -> dict[str, Any]:
    """Return the times of the answers of one conversation.

    ``ttft_seconds`` is of the first answer; those of all answers are ``ttft_seconds_all``. What is told of single tokens
    leaves out the first of each answer, and is None where there are no others.
    """
    first = [clock.times[0] - clock.began for clock in clocks if clock.times]
    gaps = [later - earlier for clock in clocks for earlier, later in pairwise(clock.times)]
    p50, p99 = (float(np.percentile(gaps, at)) if gaps else None for at in (50, 99))
    return {
        "ttft_seconds": round(first[0], 6) if first else None,
        "ttft_seconds_all": [round(seconds, 6) for seconds in first],
        "inter_token_seconds": {"p50": _rounded(p50), "p99": _rounded(p99)},
        "tokens_per_second": round(len(gaps) / sum(gaps), 4) if gaps and sum(gaps) else None,
        "new_tokens": sum(len(clock.times) for clock in clocks),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
