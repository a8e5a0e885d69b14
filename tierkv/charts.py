"""Charts as data: what is to be drawn, what it says in words, and the same numbers as a table.

    chart = line_chart("Decoding", "context", "per token", {"stream": [(4096, 0.012), (8192, 0.02)]},
                       x_format="tokens", y_format="seconds", x_log=True)
    page.plot(chart, caption="The CPU wins beyond 8k.")

Nothing is drawn here, and no library loaded: ``tierkv.charts_draw`` does that when a page is written. What cannot be
drawn (no number, infinite, at or below zero on a logarithmic axis) is left out of the picture, stays in the table, and
is counted in the chart's notes. None is a value that is not there: a gap, and nothing to tell.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from tierkv.charts_data import Axis, Band, Bars, Cell, Chart, Drawing, Heat, Lines, Number, Series, Spans, number_cell
from tierkv.charts_notes import Refused, label_of, number_of, shorten, spoken, wide_rows, words_of
from tierkv.charts_units import Format, check_format, format_value, plain

__all__ = ["Chart", "Number", "bar_chart", "heat_map", "line_chart", "stacked_bars", "timeline"]

MOST_ROWS: Final = 2_000
"""Rows of the table under a chart, at most; a note says when there would be more."""
MOST_SPANS: Final = 3_000
"""Intervals that a timeline draws, at most; a note says when there are more."""


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Iterable[tuple[float | None, float | None]]],
    *,
    x_log: bool = False,
    y_log: bool = False,
    x_format: Format = "number",
    y_format: Format = "number",
    marks: Iterable[tuple[float, str]] = (),
    bands: Mapping[str, Iterable[tuple[float, float, float]]] | None = None,
) -> Chart:
    """Return a chart of lines, each with a colour, a marker and a dash of its own.

    Args:
        title: its heading.
        x_label: what x is.
        y_label: what y is.
        series: points by the name of their line, joined in the order in which they come.
        x_log: whether x is logarithmic.
        y_log: whether y is.
        x_format: what the numbers of x are; shares (``percent``) go from 0 to 1.
        y_format: those of y.
        marks: values of x where a vertical line stands, with its words.
        bands: areas as (x, low, high); one named like a line has its colour.

    Raises:
        ValueError: a format is not known.
    """
    x, y = _axis(x_label, x_format, log=x_log), _axis(y_label, y_format, log=y_log)
    refused = Refused()
    given = {plain(name): [(number_of(a), number_of(b)) for a, b in points] for name, points in series.items()}
    areas = {
        plain(name): [(number_of(a), number_of(b), number_of(c)) for a, b, c in points]
        for name, points in (bands or {}).items()
    }
    lines = [
        Series(name, tuple((refused.check(a, log=x_log), refused.check(b, log=y_log)) for a, b in points))
        for name, points in given.items()
    ]
    drawn_bands = [
        Band(name, tuple(
            (refused.check(a, log=x_log), refused.check(b, log=y_log), refused.check(c, log=y_log)) for a, b, c in points
        ))
        for name, points in areas.items()
    ]  # fmt: skip
    placed = [(refused.check(number_of(at), log=x_log), plain(words)) for at, words in marks]
    drawing = Lines(x, y, tuple(lines), tuple(drawn_bands), tuple(one for one in placed if one[0] == one[0]))
    points = [(a, b) for line in lines for a, b in line.points if a == a and b == b]
    columns, rows = wide_rows(
        x.label,
        y.label,
        given,
        areas,
        lambda value: number_cell(value, x_format),
        lambda value: number_cell(value, y_format),
    )
    alt = f"Line chart: {plain(title)}. {y.label} against {x.label} for {spoken(list(given))}."
    if points:
        low, high = min(b for _, b in points), max(b for _, b in points)
        alt += f" {y.label} from {format_value(low, y_format)} to {format_value(high, y_format)}."
    return _chart(title, alt, drawing if points else None, columns, rows, refused.notes())


def bar_chart(title: str, y_label: str, values: Mapping[str, float | None], *, y_format: Format = "number") -> Chart:
    """Return a chart of one bar a name, with its value at its end. Bars lie, so that their names can be read.

    Raises:
        ValueError: the format is not known.
    """
    axis, refused = _axis(y_label, y_format), Refused()
    given = {plain(name): number_of(value) for name, value in values.items()}
    drawn = tuple((refused.check(value),) for value in given.values())
    drawing = Bars(axis, tuple(given), ("",), drawn)
    rows = [(name, number_cell(value, y_format)) for name, value in given.items()]
    said = (f"{name} {words_of(value, y_format)}" for name, value in given.items())
    alt = f"Bar chart: {plain(title)}. {axis.label}: {spoken(list(said))}."
    some = any(value == value for (value,) in drawn)
    return _chart(title, alt, drawing if some else None, ["", axis.label], rows, refused.notes())


def stacked_bars(
    title: str, y_label: str, bars: Mapping[str, Mapping[str, float | None]], *, y_format: Format = "number"
) -> Chart:
    """Return a chart of bars that consist of parts, each part with a colour of its own and the sum at the end.

    Args:
        title: its heading.
        y_label: what the values are.
        bars: by name, the parts of each; parts that a bar has not, it does without. Parts below zero are not drawn.
        y_format: what the values are.

    Raises:
        ValueError: the format is not known.
    """
    axis, refused = _axis(y_label, y_format), Refused()
    given = {plain(bar): {plain(part): number_of(v) for part, v in parts.items()} for bar, parts in bars.items()}
    parts = list(dict.fromkeys(part for values in given.values() for part in values))
    drawn = tuple(tuple(refused.check(values.get(part), positive=True) for part in parts) for values in given.values())
    rows = [(bar, *(number_cell(values.get(part), y_format) for part in parts)) for bar, values in given.items()]
    totals = [
        f"{bar} {format_value(sum(v for v in row if v == v), y_format)}" for bar, row in zip(given, drawn, strict=True)
    ]
    alt = f"Stacked bars: {plain(title)}. {axis.label} made of {spoken(parts)}; together: {spoken(totals)}."
    drawing = Bars(axis, tuple(given), tuple(parts), drawn)
    some = any(value == value for row in drawn for value in row)
    return _chart(title, alt, drawing if some else None, ["", *parts], rows, refused.notes())


def heat_map(
    title: str,
    x_label: str,
    y_label: str,
    xs: Sequence[float | str],
    ys: Sequence[float | str],
    values: Sequence[Sequence[float | None]],
    *,
    value_label: str = "value",
    x_format: Format = "number",
    y_format: Format = "number",
    value_format: Format = "number",
    value_log: bool = False,
    ends: tuple[float, float] | None = None,
) -> Chart:
    """Return a chart of one coloured field for each pair of x and y.

    Args:
        title: its heading.
        x_label: what x is.
        y_label: what y is.
        xs: the columns from left to right.
        ys: the rows from the bottom up.
        values: one row for each y with one value for each x.
        value_label: what the values are.
        x_format: what numbers of x are; names stay as they are.
        y_format: those of y.
        value_format: what the values are.
        value_log: whether colours go by the values' logarithm.
        ends: values that the colours begin and end with, so that maps can be compared; values beyond them move them. None:
            the smallest and the largest.

    Raises:
        ValueError: the values do not fit xs and ys, a format is not known, or the ends are not two numbers, the smaller
            first, above zero where colours go by the logarithm.
    """
    if ends is not None and not (math.isfinite(ends[0]) and math.isfinite(ends[1]) and ends[0] < ends[1]):
        raise ValueError(
            f"a heat map's colours cannot go from {ends[0]} to {ends[1]}; give two numbers, the smaller first"
        )
    if ends is not None and value_log and ends[0] <= 0:
        raise ValueError(f"colours by the logarithm cannot begin at {ends[0]}; give a number above zero")
    if len(values) != len(ys) or any(len(row) != len(xs) for row in values):
        shape = f"{len(values)} rows of {spoken(sorted({str(len(row)) for row in values}) or ['no'])} values"
        raise ValueError(
            f"a heat map of {len(xs)} xs and {len(ys)} ys has {len(ys)} rows of {len(xs)} values; given: {shape}"
        )
    x, y, value = _axis(x_label, x_format), _axis(y_label, y_format), _axis(value_label, value_format, log=value_log)
    refused = Refused()
    across, up = [label_of(one, x_format) for one in xs], [label_of(one, y_format) for one in ys]
    given = [[number_of(one) for one in row] for row in values]
    drawn = tuple(tuple(refused.check(one, log=value_log) for one in row) for row in given)
    columns = [f"{y.label} \\ {x.label}", *across]
    rows = [(name, *(number_cell(one, value_format) for one in row)) for name, row in zip(up, given, strict=True)]
    known = [one for row in drawn for one in row if one == one]
    alt = f"Heat map: {plain(title)}. {value.label} for {len(xs)} values of {x.label} and {len(ys)} of {y.label}."
    if known:
        alt += f" From {format_value(min(known), value_format)} to {format_value(max(known), value_format)}."
    drawing = Heat(x, y, value, tuple(across), tuple(up), drawn, ends)
    return _chart(title, alt, drawing if known else None, columns, rows, refused.notes("Fields"))


def timeline(title: str, rows: Mapping[str, Iterable[tuple[float, float, str]]]) -> Chart:
    """Return a chart of what was busy when: a row for each wire or unit, with intervals (start, end, label) in seconds.

    Intervals that end before they begin are not drawn.
    """
    refused = Refused()
    drawn: dict[str, list[tuple[float, float, str]]] = {}
    table: list[tuple[Cell, ...]] = []
    for name, spans in rows.items():
        kept = drawn.setdefault(plain(name), [])
        for start, end, label in spans:
            first, last, words = number_of(start), number_of(end), plain(label)
            table.append((plain(name), number_cell(first, "seconds"), number_cell(last, "seconds"), words))
            interval = refused.interval(first, last)
            if interval is not None:
                kept.append((*interval, words))
    total = sum(map(len, drawn.values()))
    notes = refused.notes("Intervals")
    if total > MOST_SPANS:
        kept_rows, notes = (
            shorten(drawn, MOST_SPANS),
            [*notes, f"Drawn are the first {MOST_SPANS:,} of {total:,} intervals."],
        )
    else:
        kept_rows = drawn
    alt = f"Timeline: {plain(title)}. {total:,} intervals in {len(drawn)} rows: {spoken(list(drawn))}."
    drawing = Spans(tuple((name, tuple(spans)) for name, spans in kept_rows.items()))
    return _chart(title, alt, drawing if total else None, ["row", "start", "end", "what"], table, notes)


def _axis(label: str, kind: Format, *, log: bool = False) -> Axis:
    check_format(kind)
    return Axis(plain(label), kind, log)


def _chart(
    title: str,
    alt: str,
    drawing: Drawing | None,
    columns: Sequence[str],
    rows: Sequence[tuple[Cell, ...]],
    notes: Sequence[str],
) -> Chart:
    if len(rows) > MOST_ROWS:
        notes = [*notes, f"The table shows the first {MOST_ROWS:,} of {len(rows):,} rows."]
    return Chart(plain(title), plain(alt), drawing, tuple(columns), tuple(rows[:MOST_ROWS]), tuple(notes))
