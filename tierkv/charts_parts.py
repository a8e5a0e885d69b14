"""What every picture of a chart is made of: a frame, a lower axis, lines and boxes in their looks, and the keys to them."""

import math
from collections.abc import Sequence
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from tierkv.charts_data import Axis
from tierkv.charts_svg import INK, MUTED, ON_LIGHT, ON_STRONG, PAPER, RULE, SERIES, svg
from tierkv.charts_ticks import tick_labels, ticks
from tierkv.charts_units import fit, width_of

WIDTH: Final = 736
"""Units of a picture's width; a page that is as wide shows letters at their own size."""
SMALL: Final = 11 / 12
"""Size of the letters inside boxes and fields, of the usual one."""

_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")
_DASHES: Final[tuple[Any, ...]] = ("-", (0, (6, 2)), (0, (2, 2)), (0, (8, 2, 2, 2)))


def frame(height: float, *, left: float, right: float, top: float, bottom: float) -> tuple[Figure, Axes]:
    """Return a figure of the usual width, and its axes inside the margins. One unit is one point."""
    figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72)
    left, right = min(left, WIDTH / 2), min(right, WIDTH / 4)
    inner = ((left / WIDTH), bottom / height, 1 - (left + right) / WIDTH, 1 - (top + bottom) / height)
    ax = figure.add_axes(inner)
    figure.patch.set_visible(False)
    ax.patch.set_visible(False)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.set_axisbelow(True)
    ax.tick_params(length=0, pad=7)
    return figure, ax


def x_ticks(axis: Axis, ends: tuple[float, float], values: Sequence[float]) -> tuple[list[float], list[str]]:
    """Return the numbers of a lower axis, and the words at them."""
    at = ticks(*ends, axis.format, log=axis.log, values=values)
    return at, tick_labels(at, axis.format, log=axis.log)


def set_x(ax: Axes, axis: Axis, ends: tuple[float, float], values: Sequence[float] = ()) -> None:
    """Give the lower axis its ends, its numbers, as many as have room, and its words."""
    at, words = x_ticks(axis, ends, values)
    every = every_which(words, inner_width(ax) / max(1, len(words)))
    ax.set_xticks(at[::every], words[::every])
    ax.xaxis.minorticks_off()
    ax.yaxis.minorticks_off()
    ax.set_xlim(*ends)
    ax.set_xlabel(fit(axis.label, inner_width(ax)), color=MUTED)


def set_rows(ax: Axes, names: Sequence[str]) -> None:
    """Give the axis on the left one name a row, from the top down, and the lower axis its grid."""
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(axis="y", labelcolor=INK)
    ax.grid(axis="x", color=RULE, linewidth=1)


def inner_width(ax: Axes) -> float:
    """Return how wide the part inside the margins is."""
    return WIDTH * ax.get_position().width


def every_which(words: Sequence[str], room: float) -> int:
    """Return which of the words at an axis are written where each has so much room: 1 for all, 2 for every second."""
    return max(1, math.ceil((widest(words) + 10) / room))


def widest(words: Sequence[str]) -> float:
    """Return the width of the widest words."""
    return max(map(width_of, words), default=0.0)


def make_line(slot: int, xs: Sequence[float], ys: Sequence[float]) -> Line2D:
    """Return a line in the looks of a slot: colour, dash and marker."""
    return Line2D(
        xs,
        ys,
        color=SERIES[slot % len(SERIES)],
        linestyle=_DASHES[slot % len(_DASHES)],
        linewidth=2,
        marker=_MARKERS[slot % len(_MARKERS)],
        markersize=7,
        markeredgecolor=PAPER,
        markeredgewidth=1,
    )


def make_box(slot: int, x: float, y: float, width: float, height: float, gid: str | None = None) -> Rectangle:
    """Return a box in the colour of a slot."""
    return Rectangle((x, y), width, height, facecolor=SERIES[slot % len(SERIES)], edgecolor=PAPER, linewidth=1, gid=gid)


def write_inside(ax: Axes, x: float, y: float, words: str, slot: int) -> None:
    """Write into the middle of a box of a slot."""
    ink = ON_STRONG if slot % len(SERIES) in (0, len(SERIES) - 1) else ON_LIGHT
    ax.text(x, y, words, ha="center", va="center", color=ink, fontsize=11)


def _key(width: float, artist: Line2D | Rectangle, prefix: str) -> str:
    figure = Figure(figsize=(width / 72, 12 / 72), dpi=72)
    figure.patch.set_visible(False)
    artist.set_transform(None)
    figure.add_artist(artist)
    return svg(figure, prefix=prefix)


def line_key(slot: int, prefix: str, *, with_line: bool) -> str:
    """Return the small picture that stands for a line, or for an area without one."""
    if not with_line:
        return box_key(slot, prefix)
    line = make_line(slot, [0, 17, 34], [6, 6, 6])
    line.set_markevery([1])
    return _key(34, line, prefix)


def box_key(slot: int, prefix: str) -> str:
    """Return the small picture that stands for the boxes of a slot."""
    return _key(12, make_box(slot, 0, 0, 12, 12), prefix)
