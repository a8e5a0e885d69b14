"""A chart as a picture of its own, for a report or a README: title, keys and colours included, dark where its reader is."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from tierkv.charts_data import Chart
from tierkv.charts_draw import Picture, draw
from tierkv.charts_parts import WIDTH
from tierkv.charts_svg import palette
from tierkv.charts_units import address, fit, width_of

_MARGIN: Final = 16
_TITLE: Final = 34
_LINE: Final = 22
_FONTS: Final = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'Liberation Sans', sans-serif"
_SIZE: Final = re.compile(r'width="([\d.]+)" height="([\d.]+)"')


def as_file(chart: Chart) -> str | None:
    """Return the text of an SVG file, or None where there is nothing to draw.

    The key of a heat map, its range of colours, is given by the words at both ends.
    """
    picture = draw(chart, "plot")
    if picture is None:
        return None
    keys, bottom = _keys(picture)
    body, height = _placed(picture.svg, _MARGIN, bottom)
    height += bottom + _MARGIN / 2
    width = WIDTH + 2 * _MARGIN
    title = fit(chart.title, WIDTH * 12 / 17)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:g}" width="{width}" height="{height:g}" '
        f'role="img" aria-label="{escape(chart.alt, {chr(34): "&quot;"})}">\n'
        f"<style>{palette()}\ntext {{ font-family: {_FONTS}; font-size: 12px; fill: var(--ink); }}\n"
        f"* {{ stroke-linejoin: round; }}</style>\n"
        f'<rect width="100%" height="100%" fill="var(--paper)"/>\n'
        f'<text x="{_MARGIN}" y="{_TITLE - 8}" style="font-size: 17px; font-weight: 600">{escape(title)}</text>\n'
        f"{keys}\n{body}\n</svg>\n"
    )


def write_files(folder: Path, charts: Mapping[int, Chart]) -> list[Path]:
    """Write charts to ``NUMBER-TITLE.svg`` in a folder, which is made, in place of those that were there; return the files.

    Raises:
        OSError: a file cannot be written.
    """
    folder.mkdir(exist_ok=True)
    for old in folder.glob("[0-9][0-9]-*.svg"):
        old.unlink()
    written = []
    for number, chart in charts.items():
        if text := as_file(chart):
            written.append(folder / f"{number:02}-{address(chart.title)}.svg")
            written[-1].write_text(text, encoding="utf-8")
    return written


def _keys(picture: Picture) -> tuple[str, float]:
    """Return what the colours mean, in lines, and where the last of them ends."""
    parts, x, y = [], float(_MARGIN), float(_TITLE)
    for key, words in picture.keys:
        drawn, shown = _width(key), fit(words, WIDTH - 60)
        taken = drawn + 8 + width_of(shown) + 20
        if x > _MARGIN and x + taken > WIDTH + _MARGIN:
            x, y = float(_MARGIN), y + _LINE
        parts += [_placed(key, x, y + 4)[0], f'<text x="{x + drawn + 8:g}" y="{y + 14:g}">{escape(shown)}</text>']
        x += taken
    if picture.ramp is not None:
        colours, low, high, label = picture.ramp
        words = f"{label}: {low}"
        parts.append(f'<text x="{_MARGIN}" y="{y + 14:g}">{escape(words)}</text>')
        x = _MARGIN + width_of(words) + 8
        for colour in colours:
            parts.append(f'<rect x="{x:g}" y="{y + 4:g}" width="18" height="12" fill="{colour}"/>')
            x += 18
        parts.append(f'<text x="{x + 8:g}" y="{y + 14:g}">{escape(high)}</text>')
    return "\n".join(parts), y + (_LINE if parts else 0)


def _placed(svg: str, x: float, y: float) -> tuple[str, float]:
    """Return a picture as a part of another, its upper left corner there, and its height."""
    size = _SIZE.search(svg)
    return svg.replace("<svg ", f'<svg x="{x:g}" y="{y:g}" ', 1), float(size[2]) if size else 0.0


def _width(svg: str) -> float:
    size = _SIZE.search(svg)
    return float(size[1]) if size else 0.0
