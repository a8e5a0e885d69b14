"""Axes: from where to where they go, and which numbers stand at them.

A library's own choice knows powers of ten; contexts and memory come in powers of two.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from tierkv.charts_units import Format, format_on_axis, format_value, scale_of

LARGEST: Final = 1e250
"""Sizes above this are not drawn: their differences would no longer be numbers."""

_MOST_EXACT: Final = 8
_BINARY: Final = ("bytes", "bytes_per_second", "tokens")


def limits(values: Sequence[float], *, log: bool, from_zero: bool) -> tuple[float, float]:
    """Return the ends of an axis that shows ``values``, all of which can be drawn; never two equal ones.

    Args:
        values: to be shown.
        log: whether the axis is logarithmic.
        from_zero: whether a linear axis begins at 0 where no value is negative.
    """
    if not values:
        return (1.0, 10.0) if log else (0.0, 1.0)
    low, high = min(values), max(values)
    if log:
        margin = (math.log10(high) - math.log10(low)) * 0.03 or 0.3
        return low / 10**margin, high * 10**margin
    margin = (high - low) * 0.03 or abs(high) * 0.5 or 0.5
    if from_zero and low >= 0:
        return 0.0, (high * 1.06 or 1.0)
    return low - margin, high + margin


def ticks(low: float, high: float, kind: Format, *, log: bool, values: Sequence[float] = ()) -> list[float]:
    """Return the numbers to write at an axis, some four to eight of them.

    Args:
        low: where the axis begins.
        high: where it ends.
        kind: what its numbers are.
        log: whether it is logarithmic.
        values: that it shows: on a logarithmic axis few of them are better ticks than round numbers.
    """
    if log:
        exact = sorted(set(values))
        apart = [b / a for a, b in pairwise(exact)]
        if 2 <= len(exact) <= _MOST_EXACT and min(apart) > (high / low) ** 0.08:
            return exact
        found = _log_ticks(low, high, 2 if kind in _BINARY else 10)
        if len(found) > 1:
            return found
    return _linear_ticks(low, high, kind)


def tick_labels(values: Sequence[float], kind: Format, *, log: bool) -> list[str]:
    """Return what is written at ticks; the numbers of a linear axis share one unit."""
    if log or not values:
        return [format_value(value, kind) for value in values]
    unit = scale_of(kind, max(values, key=abs))
    return [format_on_axis(value, kind, unit) for value in values]


def _linear_ticks(low: float, high: float, kind: Format) -> list[float]:
    scale = scale_of(kind, max(abs(low), abs(high)))[0]
    raw = (high - low) / 5 / scale
    if not raw > 0:
        return []
    if kind in _BINARY:
        step = 2.0 ** round(math.log2(raw)) * scale
        if kind == "tokens" or scale == 1:
            step = max(step, 1.0)  # there is no half a token or byte
    else:
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(factor for factor in (1, 2, 5, 10) if factor * power >= raw * 0.8) * power * scale
    if not step > 0:
        return []
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(number * step) for number in range(first, last + 1)] if last - first < 50 else []


def _log_ticks(low: float, high: float, base: int) -> list[float]:
    def log(value: float) -> float:
        return math.log(value, base)

    first, last = math.ceil(log(low) - 1e-9), math.floor(log(high) + 1e-9)
    if base == 10 and log(high) - log(low) < 2.5:
        factors: tuple[int, ...] = (1, 2, 5)
        candidates = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in factors]
    else:
        stride = max(1, math.ceil((last - first + 1) / _MOST_EXACT))
        candidates = [float(base) ** power for power in range(first, last + 1, stride)]
    return [value for value in candidates if low <= value <= high]
