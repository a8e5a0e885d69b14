"""What becomes of the data of a chart before it is drawn: numbers that cannot be drawn, tables, enumerations."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from tierkv.charts_ticks import LARGEST
from tierkv.charts_units import MISSING, Format, format_value, plain

T = TypeVar("T")
Value = float | None

MOST_SPOKEN: Final = 8
"""Names that an enumeration lists before it only counts."""

_NAN: Final = float("nan")


def number_of(value: float | None) -> float | None:
    """Return a number as a float, infinite where it is too large for one; None stays None."""
    if value is None:
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def label_of(value: float | str, kind: Format) -> str:
    """Return the words of a column or row: a number in its unit, a name as it is."""
    return plain(value) if isinstance(value, str) else words_of(number_of(value), kind)


def words_of(value: float | None, kind: Format) -> str:
    """Return a number in its unit, or what stands for one that is not there."""
    return MISSING if value is None else format_value(value, kind)


class Refused:
    """Numbers that a chart cannot draw, counted by the reason."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def check(self, value: float | None, *, log: bool = False, positive: bool = False) -> float:
        """Return the value, or not a number where it cannot be drawn; that is counted.

        Args:
            value: to be drawn; None, which is left out on purpose, does not count.
            log: whether its axis is logarithmic.
            positive: whether it must be at least 0.
        """
        if value is None:
            return _NAN
        if math.isnan(value):
            return self._refuse("not a number")
        if abs(value) > LARGEST:
            return self._refuse("infinite or nearly so")
        if log and value < 1 / LARGEST:
            return self._refuse("at or below zero on a logarithmic axis")
        if positive and value < 0:
            return self._refuse("below zero")
        return value

    def interval(self, start: float | None, end: float | None) -> tuple[float, float] | None:
        """Return an interval that can be drawn, or None, counted, where it cannot."""
        first, last = self.check(start), self.check(end)
        if math.isnan(first) or math.isnan(last):
            return None
        if first > last:
            self._refuse("ending before they begin")
            return None
        return first, last

    def notes(self, what: str = "Values") -> list[str]:
        """Return the sentence that says what was not drawn, if anything was not."""
        if not self._counts:
            return []
        reasons = ", ".join(f"{count:,} ({reason})" for reason, count in self._counts.items())
        return [f"{what} not drawn: {reasons}."]

    def _refuse(self, reason: str) -> float:
        self._counts[reason] += 1
        return _NAN


def spoken(names: Sequence[str]) -> str:
    """Return names as one says them: ``"a, b and c"``; of many, the first and how many more."""
    names = [name or "one" for name in names]
    if not names:
        return "nothing"
    if len(names) > MOST_SPOKEN:
        return f"{', '.join(names[:MOST_SPOKEN])} and {len(names) - MOST_SPOKEN:,} more"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def shorten(rows: Mapping[str, Sequence[T]], most: int) -> dict[str, list[T]]:
    """Return the first items of every row, ``most`` of them together; rows that stay empty remain."""
    kept: dict[str, list[T]] = {}
    for name, items in rows.items():
        kept[name] = list(items[:most])
        most -= len(kept[name])
    return kept


def wide_rows(
    x_label: str,
    y_label: str,
    series: Mapping[str, Sequence[tuple[Value, Value]]],
    bands: Mapping[str, Sequence[tuple[Value, Value, Value]]],
    x_cell: Callable[[Value], object],
    y_cell: Callable[[Value], object],
) -> tuple[list[str], list[tuple[object, ...]]]:
    """Return the columns and rows of a line chart's table.

    One row for each x with a column for each line, and two for each band; where a line comes back to an x, that would
    lose points: then one row for each point.
    """
    columns: dict[str, dict[Value, Value]] = {name or y_label: dict(points) for name, points in series.items()}
    for name, points in bands.items():
        columns[f"{name}, low"] = {x: low for x, low, _ in points}
        columns[f"{name}, high"] = {x: high for x, _, high in points}
    points_in = sum(map(len, series.values())) + 2 * sum(map(len, bands.values()))
    if points_in == sum(map(len, columns.values())):
        xs = sorted({x for column in columns.values() for x in column}, key=_last_if_none)
        rows = [(x_cell(x), *(y_cell(at[x]) if x in at else None for at in columns.values())) for x in xs]
        return [x_label, *columns], rows
    long: list[tuple[object, ...]] = [
        (name, x_cell(x), y_cell(y)) for name, points in series.items() for x, y in points
    ]
    for name, area in bands.items():
        long += [
            (f"{name}, {end}", x_cell(x), y_cell(y))
            for x, low, high in area
            for end, y in (("low", low), ("high", high))
        ]
    return ["line", x_label, y_label], long


def _last_if_none(value: Value) -> tuple[bool, float]:
    return (True, 0.0) if value is None or math.isnan(value) else (False, value)
