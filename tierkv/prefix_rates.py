"""Rates: whether reading KV is faster than computing it, from what was measured in this process."""

import time
from collections.abc import Callable
from typing import Final

_NEWEST: Final = 0.3
"""Weight of the newest measurement."""
_TRY_AGAIN_SECONDS: Final = 60.0
"""A medium that was slow may have been busy: after this long it is tried again."""


class Rates:
    """Seconds a token of prefill, and seconds a byte of restoring; both smoothed."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Know nothing yet."""
        self.seconds_per_token: float | None = None
        self.seconds_per_byte: float | None = None
        self._now = now
        self._measured_at = now()

    def computed(self, tokens: int, seconds: float) -> None:
        """Note a prefill of so many tokens, summed over rows."""
        self.seconds_per_token = _smooth(self.seconds_per_token, seconds / tokens)

    def loaded(self, num_bytes: int, seconds: float) -> None:
        """Note a restore of so many bytes."""
        if num_bytes:
            self.seconds_per_byte = _smooth(self.seconds_per_byte, seconds / num_bytes)
            self._measured_at = self._now()

    def loading_pays(self, num_bytes: int, tokens: int) -> bool:
        """Whether to read ``num_bytes`` rather than to compute ``tokens``; where one is unknown, to read."""
        if self.seconds_per_token is None or self.seconds_per_byte is None:
            return True
        if self._now() - self._measured_at > _TRY_AGAIN_SECONDS:
            return True
        return num_bytes * self.seconds_per_byte < tokens * self.seconds_per_token


def _smooth(before: float | None, new: float) -> float:
    return new if before is None else (1 - _NEWEST) * before + _NEWEST * new
