"""What a chart consists of: what is drawn, its numbers as a table, and what it says in words."""

from dataclasses import dataclass

from tierkv.charts_units import Format, format_value

Cell = object
"""What a cell of a table may be: text, a number, ``Number``, a truth value, or None for nothing."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number that a table shows in its unit and keeps exactly."""

    value: float
    format: Format = "number"

    def __str__(self) -> str:
        """Return it as people read it."""
        return format_value(self.value, self.format)


def number_cell(value: float | None, kind: Format) -> Number | None:
    """Return the cell of a number that may not be there."""
    return None if value is None else Number(value, kind)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: its words, what its numbers are, and whether it is logarithmic."""

    label: str
    format: Format = "number"
    log: bool = False


@dataclass(frozen=True, slots=True)
class Series:
    """One line: points in the order in which they are joined. A point that is not a number interrupts it."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Band:
    """An area between two lines, as (x, low, high)."""

    name: str
    points: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, slots=True)
class Lines:
    """What a line chart draws."""

    x: Axis
    y: Axis
    series: tuple[Series, ...]
    bands: tuple[Band, ...]
    marks: tuple[tuple[float, str], ...]


@dataclass(frozen=True, slots=True)
class Bars:
    """What a bar chart draws: for each bar one value a part, not a number where it has none."""

    axis: Axis
    bars: tuple[str, ...]
    parts: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Heat:
    """What a heat map draws: a row of values for each y, from the bottom up, one value for each x."""

    x: Axis
    y: Axis
    value: Axis
    xs: tuple[str, ...]
    ys: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]
    ends: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Spans:
    """What a timeline draws: rows from the top down, each with (start, end, label) in seconds."""

    rows: tuple[tuple[str, tuple[tuple[float, float, str], ...]], ...]


Drawing = Lines | Bars | Heat | Spans
"""What can be drawn."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart.

    Attributes:
        title: its heading.
        alt: what it shows, for those who cannot see it.
        drawing: what is drawn, or None where there is nothing that can be.
        columns: of its table.
        rows: of its table.
        notes: what the picture or the table leaves out, a sentence each.
    """

    title: str
    alt: str
    drawing: Drawing | None
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
