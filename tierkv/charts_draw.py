"""Charts, drawn: each becomes a matplotlib figure of its own, and that SVG. Importing this loads matplotlib.

    draw(chart, "fig1")  ->  Picture: the SVG, and the keys to its colours as pairs of SVG and words

Margins follow from the length of the words, not from how a font is drawn here: the page has another font.
"""

import math
from dataclasses import dataclass
from typing import Final

from matplotlib.patches import Rectangle

from tierkv.charts_data import Axis, Bars, Chart, Heat, Lines, Spans
from tierkv.charts_parts import (
    SMALL,
    WIDTH,
    box_key,
    every_which,
    frame,
    inner_width,
    line_key,
    make_box,
    make_line,
    set_rows,
    set_x,
    widest,
    write_inside,
    x_ticks,
)
from tierkv.charts_svg import MUTED, ON_LIGHT, PAPER, RULE, SERIES, drawing, svg
from tierkv.charts_ticks import limits, tick_labels, ticks
from tierkv.charts_units import fit, format_value, width_of

_WIDEST_NAME: Final = 220.0
_MOST_MARKERS: Final = 60
_MOST_LEVELS: Final = 5
# Cividis, from its own table: the same order of brightness for every kind of colour vision, on paper too.
_RAMP: Final = (
    "#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart as it goes into a page.

    Attributes:
        svg: the chart.
        keys: what its colours mean: a small SVG and the words, in the order of drawing.
        ramp: colours from the lowest to the highest value, the words at both ends, and what the values are.
    """

    svg: str
    keys: tuple[tuple[str, str], ...] = ()
    ramp: tuple[tuple[str, ...], str, str, str] | None = None


def draw(chart: Chart, prefix: str) -> Picture | None:
    """Return a chart's picture, or None where it has nothing to draw.

    Args:
        chart: what to draw.
        prefix: of the ids in the picture; unique in the page.
    """
    with drawing():
        match chart.drawing:
            case Lines() as lines:
                return _lines(lines, chart.alt, prefix)
            case Bars() as bars:
                return _bars(bars, chart.alt, prefix)
            case Heat() as heat:
                return _heat(heat, chart.alt, prefix)
            case Spans() as spans:
                return _spans(spans, chart.alt, prefix)
            case None:
                return None


def _lines(lines: Lines, alt: str, prefix: str) -> Picture:
    xs = [x for one in lines.series for x, _ in one.points] + [x for band in lines.bands for x, _, _ in band.points]
    ys = [y for one in lines.series for _, y in one.points]
    ys += [y for band in lines.bands for _, *both in band.points for y in both]
    xs += [x for x, _ in lines.marks]
    xs, ys = [x for x in xs if x == x], [y for y in ys if y == y]
    x_limits = limits(xs, log=lines.x.log, from_zero=False)
    y_limits = limits(ys, log=lines.y.log, from_zero=True)
    y_ticks = ticks(*y_limits, lines.y.format, log=lines.y.log)
    y_words = tick_labels(y_ticks, lines.y.format, log=lines.y.log)
    left = 16 + widest(y_words)
    levels = min(_MOST_LEVELS, len(lines.marks))
    figure, ax = frame(
        340 + 16 * levels,
        left=left,
        right=max(26.0, widest(x_ticks(lines.x, x_limits, xs)[1]) / 2),
        top=30 + 16 * levels,
        bottom=46,
    )
    for axis, scale in (("x", lines.x), ("y", lines.y)):
        if scale.log:
            ax.set(**{f"{axis}scale": "log"})
    set_x(ax, lines.x, x_limits, xs)
    ax.set_yticks(y_ticks, y_words)
    ax.set_ylim(*y_limits)
    ax.grid(axis="y", color=RULE, linewidth=1)
    ax.text(4, 340 + 16 * levels - 14, fit(lines.y.label, WIDTH - 20), transform=None, color=MUTED)
    slots = {one.name: index for index, one in enumerate(lines.series)}
    for band in lines.bands:
        slot = slots.setdefault(band.name, len(slots))
        at, low, high = zip(*band.points, strict=True) if band.points else ((), (), ())
        ax.fill_between(at, low, high, color=SERIES[slot % len(SERIES)], alpha=0.18, linewidth=0)
    texts = {}
    for index, one in enumerate(lines.series):
        line = make_line(index, [x for x, _ in one.points], [y for _, y in one.points])
        ax.add_line(line)
        if len(one.points) > _MOST_MARKERS:
            line.set_marker("")
        known = [(x, y) for x, y in one.points if x == x and y == y]
        line.set_gid(f"line-{index}")
        texts[f"line-{index}"] = [
            f"{one.name}: {format_value(y, lines.y.format)} at {format_value(x, lines.x.format)}" for x, y in known
        ]
    for number, (x, words) in enumerate(lines.marks):
        ax.axvline(x, color=MUTED, linewidth=1, dashes=(3, 3))
        share = ax.transAxes.inverted().transform(ax.transData.transform((x, y_limits[0])))[0]
        side, room = "right" if share > 0.5 else "left", max(share, 1 - share) * inner_width(ax)
        shift = (5 if side == "left" else -5, 6 + 16 * (number % _MOST_LEVELS))
        ax.annotate(
            fit(words, room), (share, 1), shift, "axes fraction", "offset points", ha=side, color=MUTED, fontsize=11
        )
    shown = len(slots) > 1 or [one.name for one in lines.series] != [lines.y.label]
    lines_of = {one.name for one in lines.series}
    keys = [(name, line_key(slot, f"{prefix}-key{slot}", with_line=name in lines_of)) for name, slot in slots.items()]
    picture = svg(figure, prefix=prefix, alt=alt, points=texts)
    return Picture(picture, tuple((key, name) for name, key in keys if name) if shown else ())


def _bars(bars: Bars, alt: str, prefix: str) -> Picture:
    totals = [[value for value in row if value == value] for row in bars.values]
    sums = [sum(row) for row in totals]
    low, high = limits([0.0, *sums], log=False, from_zero=True)
    names = [fit(name, _WIDEST_NAME) for name in bars.bars]
    ends = [format_value(total, bars.axis.format) if row else "n/a" for total, row in zip(sums, totals, strict=True)]
    left = 18 + widest(names)
    right = 20 + widest(ends)
    height = 58 + 34 * len(names)
    figure, ax = frame(height, left=left, right=right, top=6, bottom=46)
    set_x(ax, bars.axis, (low, high))
    set_rows(ax, names)
    per_unit = (WIDTH - left - right) / (high - low)
    titles = {}
    for row, values in enumerate(bars.values):
        begin = 0.0
        for part, value in enumerate(values):
            if value != value:
                continue
            gid, words = f"bar-{row}-{part}", format_value(value, bars.axis.format)
            ax.add_patch(make_box(part, begin, row - 0.36, value, 0.72, gid))
            titles[gid] = ": ".join(filter(None, (bars.bars[row], bars.parts[part], words)))
            if len(bars.parts) > 1 and value * per_unit > SMALL * width_of(words) + 6:
                write_inside(ax, begin + value / 2, row, words, part)
            begin += value
        ax.annotate(ends[row], (max(begin, 0.0), row), (6, 0), textcoords="offset points", va="center", fontsize=12)
    keys = [(box_key(part, f"{prefix}-key{part}"), name) for part, name in enumerate(bars.parts)]
    many = len(bars.parts) > 1 or bars.parts != ("",)
    return Picture(svg(figure, prefix=prefix, alt=alt, titles=titles), tuple(keys) if many else ())


def _heat(heat: Heat, alt: str, prefix: str) -> Picture:
    known = [*(heat.ends or ()), *(value for row in heat.values for value in row if value == value)]
    low, high = min(known), max(known)
    place = math.log if heat.value.log else float
    span = place(high) - place(low)
    names = [fit(name, _WIDEST_NAME) for name in heat.ys]
    left = 18 + widest(names)
    cell_width = (WIDTH - left - 20) / len(heat.xs)
    cell_height = max(8.0, min(34.0, 560 / len(heat.ys)))
    height = 82 + cell_height * len(heat.ys)
    figure, ax = frame(height, left=left, right=20, top=30, bottom=46)
    ax.set_xlim(-0.5, len(heat.xs) - 0.5)
    ax.set_ylim(-0.5, len(heat.ys) - 0.5)
    xs = [fit(name, max(cell_width - 10, _WIDEST_NAME / 2)) for name in heat.xs]
    every_x = every_which(xs, cell_width)
    every_y = max(1, math.ceil(16 / cell_height))
    ax.set_xticks(range(0, len(xs), every_x), xs[::every_x])
    ax.set_yticks(range(0, len(names), every_y), names[::every_y])
    ax.set_xlabel(fit(heat.x.label, inner_width(ax)), color=MUTED)
    ax.text(4, height - 14, fit(heat.y.label, WIDTH - 20), transform=None, color=MUTED)
    titles = {}
    for row, values in enumerate(heat.values):
        for column, value in enumerate(values):
            words, gid = format_value(value, heat.value.format), f"field-{row}-{column}"
            titles[gid] = f"{heat.xs[column]}, {heat.ys[row]}: {words}"
            level = (place(value) - place(low)) / span if span and value == value else 0.5
            step = min(len(_RAMP) - 1, int(level * len(_RAMP)))
            colour = _RAMP[step] if value == value else "none"
            field = Rectangle((column - 0.5, row - 0.5), 1, 1, facecolor=colour, edgecolor=PAPER, linewidth=1, gid=gid)
            ax.add_patch(field)
            if SMALL * width_of(words) + 6 < cell_width and cell_height >= 16:
                ink = MUTED if value != value else ON_LIGHT if step > 4 else "#ffffff"
                ax.text(column, row, words, ha="center", va="center", color=ink, fontsize=11)
    ends = [format_value(one, heat.value.format) for one in (low, high)]
    return Picture(svg(figure, prefix=prefix, alt=alt, titles=titles), ramp=(_RAMP, ends[0], ends[1], heat.value.label))


def _spans(spans: Spans, alt: str, prefix: str) -> Picture:
    every = [one for _, row in spans.rows for one in row]
    begin, end = min(start for start, _, _ in every), max(last for _, last, _ in every)
    margin = (end - begin) * 0.02 or 0.5
    low, high = (0.0 if begin >= 0 and begin < (end - begin) / 2 else begin - margin), end + margin
    labels = list(dict.fromkeys(label for _, _, label in every))
    by_label = len(labels) <= len(SERIES)
    names = [fit(name, _WIDEST_NAME) for name, _ in spans.rows]
    left = 18 + widest(names)
    figure, ax = frame(58 + 30 * len(names), left=left, right=24, top=6, bottom=46)
    set_x(ax, Axis("time", "seconds"), (low, high))
    set_rows(ax, names)
    per_second = (WIDTH - left - 24) / (high - low)
    thinnest = 1.5 / per_second  # what takes no time is still to be seen
    titles = {}
    for row, (name, intervals) in enumerate(spans.rows):
        for number, (start, last, label) in enumerate(intervals):
            slot, gid = labels.index(label) if by_label else row, f"span-{row}-{number}"
            box = make_box(slot, start, row - 0.36, max(last - start, thinnest), 0.72, gid)
            if last - start < 3 * thinnest:
                box.set_linewidth(0)  # or the edge would cover it
            ax.add_patch(box)
            times = f"{format_value(start, 'seconds')} to {format_value(last, 'seconds')}"
            titles[gid] = f"{name}, {label}: {times} ({format_value(last - start, 'seconds')})"
            if label and (last - start) * per_second > SMALL * width_of(label) + 6:
                write_inside(ax, (start + last) / 2, row, label, slot)
    shown = by_label and len(labels) > 1
    keys = [(box_key(slot, f"{prefix}-key{slot}"), label) for slot, label in enumerate(labels)] if shown else []
    return Picture(svg(figure, prefix=prefix, alt=alt, titles=titles), tuple(keys))
