"""Times: very many durations in little memory, for percentiles and means."""

import math
from typing import Final

_STEP: Final = math.log(1.01)


class Times:
    """Durations, each counted in a class that is 1 % wide: percentiles are off by half of that at most, means are exact.

    Attributes:
        count: durations.
        total: their sum, in seconds.
    """

    def __init__(self) -> None:
        """Hold none."""
        self.count = 0
        self.total = 0.0
        self._classes: dict[int, int] = {}
        self._zeros = 0

    def add(self, seconds: float, count: int = 1) -> None:
        """Add a duration, so many times.

        Raises:
            ValueError: it is negative.
        """
        if seconds < 0:
            raise ValueError(f"{seconds} s is no duration")
        self.count += count
        self.total += seconds * count
        if seconds == 0:
            self._zeros += count
            return
        index = math.floor(math.log(seconds) / _STEP)
        self._classes[index] = self._classes.get(index, 0) + count

    @property
    def mean(self) -> float | None:
        """The mean in seconds, or None of no durations."""
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """Return a duration that this share of all does not exceed (the nearest rank), or None of no durations."""
        if not self.count:
            return None
        rank = max(1, math.ceil(share * self.count)) - self._zeros
        if rank <= 0:
            return 0.0
        for index in sorted(self._classes):
            rank -= self._classes[index]
            if rank <= 0:
                return math.exp((index + 0.5) * _STEP)
        raise AssertionError("more durations were counted than classes hold")

    def percentiles(self) -> dict[str, float | None]:
        """Return what a report says: p50, p90, p99 and the mean, in seconds."""
        named = {f"p{percent}": self.quantile(percent / 100) for percent in (50, 90, 99)}
        return {
            name: None if value is None else float(f"{value:.6g}")
            for name, value in {**named, "mean": self.mean}.items()
        }
