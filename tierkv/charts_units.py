"""Numbers and text as a chart shows them: units, and characters that every format can hold.

format_value(0.0123, "seconds")  ->  "12.3 ms"
format_value(131072, "tokens")   ->  "128k"
scale_of("bytes", 3 * 2**30)     ->  (2**30, "GiB"): what all numbers of one axis are counted in
"""

import math
import re
import unicodedata
from typing import Any, Final, Literal, get_args

from tierkv.sizes import format_bytes

Format = Literal["bytes", "bytes_per_second", "tokens", "seconds", "percent", "number"]
"""What a number is. ``percent`` is for shares, 0 to 1; tokens are counted in 1,024s."""

MISSING: Final = "n/a"
"""What stands for a value that is not there, or not a number."""

_BINARY: Final = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_SCALES: Final[dict[str, tuple[tuple[float, str], ...]]] = {
    "bytes": _BINARY,
    "bytes_per_second": tuple((scale, f"{unit}/s") for scale, unit in _BINARY),
    "tokens": ((2.0**20, "M"), (2.0**10, "k"), (1.0, "")),
    "seconds": ((1.0, " s"), (1e-3, " ms"), (1e-6, " µs"), (1e-9, " ns")),
    "percent": ((0.01, "%"),),
    "number": ((1.0, ""),),
}
# Of letters at the usual size, in the widest of the fonts that a page may find.
_WIDTHS: Final = ((4.2, " ijlI.,:;'|!()[]/"), (7.7, "0123456789"), (12.2, "mMW…%@"), (10.4, "wGOQ"))
_EXPONENT_FROM: Final = 1e15
_EXPONENT_BELOW: Final = 1e-4
_BYTES_BELOW: Final = 2.0**80


def check_format(name: str) -> None:
    """Refuse a name that is no format.

    Raises:
        ValueError: it is none; the message lists the legal ones.
    """
    if name not in get_args(Format):
        raise ValueError(f"{name!r} is no format of numbers (legal: {', '.join(get_args(Format))})")


def format_value(value: float, kind: Format) -> str:
    """Return a number in the unit that suits it, rounded to three or four digits; whole numbers are exact."""
    if math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value < 0:
        text = format_value(-value, kind)
        return f"-{text}" if any(c in "123456789" for c in text) else text  # never "-0B"
    if kind in ("bytes", "bytes_per_second"):
        text = format_bytes(round(value)) if value < _BYTES_BELOW else f"{value / 2**40:.3g}TiB"
        return text + ("/s" if kind == "bytes_per_second" else "")
    if kind == "tokens":
        return format_tokens(value)
    if kind == "seconds":
        return format_seconds(value)
    return f"{_digits(value * 100, 3)}%" if kind == "percent" else format_number(value)


def format_seconds(seconds: float) -> str:
    """Return a time of at least 0 in seconds, ms, µs or ns, with three digits: ``"4.56 ms"``."""
    if not seconds:
        return "0 s"
    rounded = float(f"{seconds:.3g}")  # first, or 999.9 ms would become 1,000 ms
    scale, unit = scale_of("seconds", rounded)
    return _digits(rounded / scale, 3) + unit


def format_tokens(tokens: float) -> str:
    """Return a number of tokens: ``"4k"`` is 4,096, ``"1M"`` 1,048,576; what is no multiple of 512 is written out."""
    for scale, unit in _SCALES["tokens"][:-1]:
        halves = 2 * tokens / scale
        if halves >= 2 and halves.is_integer() and tokens < _EXPONENT_FROM:
            return f"{halves / 2:,.1f}".removesuffix(".0") + unit
    return format_number(tokens)


def format_number(number: float) -> str:
    """Return a number with separators: whole numbers as they are, others with four digits."""
    if float(number).is_integer() and abs(number) < _EXPONENT_FROM:
        return f"{int(number):,}"
    return _digits(number, 4)


def scale_of(kind: Format, largest: float) -> tuple[float, str]:
    """Return the unit in which numbers up to ``largest`` are counted: its size, and its name as it follows a number."""
    scales = _SCALES[kind]
    return next((one for one in scales if abs(largest) >= one[0]), scales[-1])


def format_on_axis(value: float, kind: Format, unit: tuple[float, str]) -> str:
    """Return a number of an axis whose numbers are all counted in one unit."""
    if not value and kind != "percent":
        return "0"
    return _digits(value / unit[0], 6) + unit[1]


def plain(text: Any) -> str:
    """Return text on one line, without characters that HTML, XML or UTF-8 cannot hold."""
    return " ".join(storable(str(text)).split())


def storable(text: str) -> str:
    """Return text with a replacement character for what HTML, XML or UTF-8 cannot hold."""
    return "".join(
        c if c in "\n\t" or _is_storable(ord(c)) else " " if c in "\r\v\f" else "\N{REPLACEMENT CHARACTER}"
        for c in text
    )


def address(title: str) -> str:
    """Return a title as a part of an address or of the name of a file."""
    return re.sub(r"[^a-z0-9]+", "-", plain(title).lower()).strip("-")[:40].rstrip("-")


def width_of(text: str) -> float:
    """Return how wide text is at most in the usual size of a chart, in its units, whatever font the page has."""
    return sum(_width(c) for c in text)


def fit(text: str, width: float) -> str:
    """Return text cut to a width, with an ellipsis where something is missing."""
    if width_of(text) <= width:
        return text
    while text and width_of(text) + _width("…") > width:
        text = text[:-1]
    return f"{text.rstrip()}…"


def _width(c: str) -> float:
    if unicodedata.east_asian_width(c) in "WF":
        return 12.5
    return next((width for width, letters in _WIDTHS if c in letters), 9.0 if c.isupper() else 7.4)


def _is_storable(code: int) -> bool:
    control = code < 0x20 or 0x7F <= code < 0xA0
    surrogate = 0xD800 <= code < 0xE000
    return not (control or surrogate or 0xFDD0 <= code < 0xFDF0 or code & 0xFFFE == 0xFFFE)


def _digits(number: float, digits: int) -> str:
    """Return a number with so many digits that count, zeros at the end left out, an exponent only where it must be."""
    size = abs(number)
    if size and not _EXPONENT_BELOW <= size < _EXPONENT_FROM:
        return f"{number:.{digits}g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(size))) if size else 0
    text = f"{number:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
