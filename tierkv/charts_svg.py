"""From a matplotlib figure to SVG that lives inside a page: in its colours and fonts, beside others, the same each time.

    svg(figure, prefix="fig1", alt="Line chart: ...")  ->  '<svg class="chart" role="img" ...>'

Every colour below becomes a CSS variable (``--c1``, ``--ink`` ...) with the colour itself as its fallback, so that a page
in dark mode, or on paper, needs no other picture. Ids get the prefix, and only those that something refers to are kept.
"""

import io
import re
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree as ET

import matplotlib as mpl

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure

SERIES: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#9c8b00", "#5f6b76")
"""Okabe and Ito's colours, which every kind of colour vision tells apart, from the strongest on white to the weakest;
yellow is darkened, and black, which is for text, replaced by grey."""
INK: Final = "#1b2127"
MUTED: Final = "#5a6672"
RULE: Final = "#d8dee4"
PAPER: Final = "#fdfdfe"
ON_STRONG: Final = "#fffffe"
"""Text on the first and the last colour of a series; on the others it is ``ON_LIGHT``."""
ON_LIGHT: Final = "#111114"

_VARIABLES: Final = {
    **{colour: f"--c{number}" for number, colour in enumerate(SERIES, 1)},
    INK: "--ink",
    MUTED: "--muted",
    RULE: "--rule",
    PAPER: "--paper",
    ON_STRONG: "--on-strong",
}
_DARK: Final = {
    **dict(zip((f"--c{number}" for number in range(1, 9)), (
        "#3f9fe0", "#f0793a", "#25c196", "#dd95bd", "#f2b336", "#8fd0f7", "#e6d94a", "#9aa6b2"), strict=True)),
    "--ink": "#e4e8ec",
    "--muted": "#9ba7b3",
    "--rule": "#333c45",
    "--paper": "#14181c",
    "--on-strong": "#111114",
}  # fmt: skip
_SETTINGS: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tierkv",
    "text.parse_math": False,  # a $ in a path is a dollar
    "text.usetex": False,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.unicode_minus": False,
    "font.size": 12,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.linewidth": 1.0,
    "hatch.linewidth": 1.0,
}
_SVG: Final = "{http://www.w3.org/2000/svg}"
_HREF: Final = "{http://www.w3.org/1999/xlink}href"
_DROPPED: Final = {f"{_SVG}metadata", f"{_SVG}style"}
_COLOUR: Final = re.compile(r"#[0-9a-f]{6}\b")
_REFERENCE: Final = re.compile(r"url\(#([^)]+)\)")
_FONT_SIZE: Final = re.compile(r"font(?:-size)?: (?:[a-z0-9]+ )*?([\d.]+)px")


def palette() -> str:
    """Return the style sheet that gives the variables their values: those of the drawing, and others in dark mode."""

    def rule(values: Mapping[str, str]) -> str:
        return f":root {{ {' '.join(f'{name}: {colour};' for name, colour in values.items())} }}"

    light = {name: colour for colour, name in _VARIABLES.items()}
    return f"{rule(light)}\n@media screen and (prefers-color-scheme: dark) {{ {rule(_DARK)} }}"


@contextmanager
def drawing() -> "Iterator[None]":
    """Draw with our settings instead of the user's, and leave theirs as they were."""
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        # The browser has fonts for the letters that matplotlib's own font has not.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        warnings.filterwarnings("ignore", message="Matplotlib currently does not support")
        yield


def svg(
    figure: "Figure",
    *,
    prefix: str,
    alt: str = "",
    titles: Mapping[str, str] | None = None,
    points: Mapping[str, list[str]] | None = None,
) -> str:
    """Return a figure as SVG for a page. Call it within ``drawing()``.

    Args:
        figure: drawn with the colours above.
        prefix: of every id; unique in the page.
        alt: what it shows; without it the figure is an ornament.
        titles: what appears over the artist with a gid.
        points: what appears over each marker of the line with a gid.
    """
    written = io.BytesIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    root = ET.fromstring(written.getvalue())
    _clean(root)
    by_id = {one.get("id"): one for one in root.iter()}
    for gid, title in (titles or {}).items():
        _explain(by_id.get(gid), title)
    for gid, texts in (points or {}).items():
        uses = list(by_id[gid].iter(f"{_SVG}use")) if gid in by_id else []
        for use, text in zip(uses, texts, strict=False) if len(uses) == len(texts) else ():
            _explain(use, text)
    _rename(root, prefix)
    view = root.get("viewBox", "0 0 0 0")
    width, height = view.split()[2:]
    root.attrib.clear()
    root.attrib.update({"class": "chart", "viewBox": view, "width": width, "height": height})
    root.attrib.update({"role": "img", "aria-label": alt} if alt else {"aria-hidden": "true"})
    for one in root.iter():
        one.tag = one.tag.removeprefix(_SVG)
    return ET.tostring(root, encoding="unicode")


def _explain(element: "ET.Element | None", text: str) -> None:
    if element is not None:
        title = ET.Element(f"{_SVG}title")
        title.text = text
        element.insert(0, title)


def _clean(element: ET.Element) -> None:
    """Take out what concerns the whole page or a file, and the white space between elements; name the colours."""
    for child in list(element):
        if child.tag in _DROPPED or not isinstance(child.tag, str):
            element.remove(child)
            continue
        _clean(child)
        child.tail = None
    if element.tag not in (f"{_SVG}text", f"{_SVG}tspan"):
        element.text = None
    if "style" in element.attrib:
        element.set("style", _style(element.get("style", ""), is_text=element.tag.endswith(("text", "tspan"))))


def _style(style: str, *, is_text: bool) -> str:
    style = _COLOUR.sub(lambda match: _variable(match[0]), style)
    if not is_text:
        return style
    size = _FONT_SIZE.search(style)
    rules = [rule.strip() for rule in style.split(";") if rule.strip() and not rule.strip().startswith("font")]
    return "; ".join([f"font-size: {size[1]}px", *rules] if size else rules)


def _variable(colour: str) -> str:
    return f"var({_VARIABLES[colour]}, {colour})" if colour in _VARIABLES else colour


def _rename(root: ET.Element, prefix: str) -> None:
    """Number the ids that something refers to, and remove all others."""
    names: dict[str, str] = {}
    for element in root.iter():
        target = element.attrib.pop(_HREF, "")
        if target:
            element.set("href", f"#{names.setdefault(target.removeprefix('#'), f'{prefix}-{len(names) + 1}')}")
        for key, value in element.attrib.items():
            for name in _REFERENCE.findall(value):
                names.setdefault(name, f"{prefix}-{len(names) + 1}")
            element.set(key, _REFERENCE.sub(lambda match: f"url(#{names[match[1]]})", value))
    for element in root.iter():
        name = element.attrib.pop("id", "")
        if name in names:
            element.set("id", names[name])
