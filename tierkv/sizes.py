"""Sizes as people write and read them, and how much memory is free.

parse_size("1.5GiB")  ->  Size: an exact number of bytes, or a share of what will turn out to be free
free_memory()         ->  bytes that can be taken before the machine or a cgroup limit is hit
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Final

import psutil

from tierkv.errors import ConfigError

LEGAL_SIZES: Final = '"512MiB", "1.5GiB", "2GB", a whole number of bytes, or "40%" of what is free'
"""The legal spellings, as every message about a size states them."""

_UNITS: Final = {
    "TiB": 2**40, "TB": 10**12, "GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6,
    "KiB": 2**10, "kB": 10**3, "KB": 10**3, "B": 1,
}  # fmt: skip
_SPELLING: Final = re.compile(r"(\d{1,99}(?:\.\d{1,9})?) ?([A-Za-z]+|%)?", re.ASCII)
_LARGEST: Final = 2**63 - 1
_TOO_LARGE: Final = f"too large; the largest size is {_LARGEST} bytes"
# Files of a cgroup with its limits and its usage, and the line of memory.stat with the page cache that can be dropped.
_V2_FILES: Final = (["memory.max", "memory.high"], "memory.current", "inactive_file")
_V1_FILES: Final = (["memory.limit_in_bytes"], "memory.usage_in_bytes", "total_inactive_file")


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes, or a percentage of bytes that are not known yet.

    Attributes:
        size_bytes: the size, or 0 where it is a percentage.
        percent: a percentage from 0 to 100, or None where the size is a number of bytes.
    """

    size_bytes: int = 0
    percent: Decimal | None = None

    def __post_init__(self) -> None:
        if self.percent is not None and not (self.size_bytes == 0 and 0 <= self.percent <= 100):
            raise ConfigError(f"{self.percent}% is not a size: a percentage goes from 0 to 100")
        if not 0 <= self.size_bytes <= _LARGEST:
            raise ConfigError(f"{self.size_bytes} bytes is not a size: it goes from 0 to 2^63 - 1")

    @property
    def is_zero(self) -> bool:
        """Whether the size is nothing, however much is free."""
        return self.size_bytes == 0 and not self.percent

    def resolve(self, free_bytes: int) -> int:
        """Return the size in bytes where ``free_bytes`` are free; a percentage is rounded down."""
        if self.percent is None:
            return self.size_bytes
        numerator, denominator = self.percent.as_integer_ratio()
        return free_bytes * numerator // (denominator * 100)

    def __str__(self) -> str:
        """Return the shortest exact spelling, which ``parse_size`` reads back to an equal size."""
        if self.percent is not None:
            return f"{self.percent:f}%"
        for unit, unit_bytes in _UNITS.items():
            hundredths, rest = divmod(self.size_bytes * 100, unit_bytes)
            if rest == 0 and hundredths >= 100:
                return _decimal(hundredths) + unit
        return "0B"


def parse_size(value: int | str | Size) -> Size:
    """Read a size: ``"512MiB"``, ``"1.5GiB"``, ``"2GB"`` (decimal), a whole number of bytes, or ``"40%"``.

    A fraction of a unit is rounded down to whole bytes. Units are case-sensitive: ``"2gb"`` may mean bits.

    Raises:
        ConfigError: the value is none of these; the message lists the legal spellings.
    """
    if isinstance(value, Size):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        if value > _LARGEST:
            raise ConfigError(f"{show(value)} is {_TOO_LARGE} (legal: {LEGAL_SIZES})")
        return Size(value)
    if isinstance(value, float):
        written = "a whole number of bytes has no point and no exponent"
        raise ConfigError(f"{show(value)} is not a size: {written} (legal: {LEGAL_SIZES})")
    match = _SPELLING.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f"{show(value)} is not a size (legal: {LEGAL_SIZES})")
    number, unit = match[1], match[2] or "B"
    if unit == "%":
        if Decimal(number) > 100:
            raise ConfigError(f"{show(value)} is not a size: a percentage goes from 0 to 100 (legal: {LEGAL_SIZES})")
        return Size(percent=Decimal(number))
    if unit not in _UNITS:
        raise ConfigError(f"{show(value)} is not a size{_hint(number, unit)} (legal: {LEGAL_SIZES})")
    if unit == "B" and "." in number:
        raise ConfigError(f"{show(value)} is not a size: bytes are whole (legal: {LEGAL_SIZES})")
    size_bytes = int(Fraction(number) * _UNITS[unit])
    if size_bytes > _LARGEST:
        raise ConfigError(f"{show(value)} is {_TOO_LARGE} (legal: {LEGAL_SIZES})")
    return Size(size_bytes)


def format_bytes(size_bytes: int) -> str:
    """Return a readable size, rounded down to two decimals of a binary unit: ``"3.99GiB"``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes >= _UNITS[unit]:
            return _decimal(size_bytes * 100 // _UNITS[unit]) + unit
    return f"{size_bytes}B"


def show(value: object, longest: int | None = 60) -> str:
    """Return a value as TOML spells it, on one line, cut to ``longest`` characters."""
    if isinstance(value, str | PurePath):
        text = toml_string(str(value))
    elif isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, Size):
        text = toml_string(str(value))
    else:
        text = " ".join(repr(value).split())
    return text if longest is None or len(text) <= longest else text[: longest - 3] + "..."


def toml_string(text: str) -> str:
    """Return a TOML basic string on one line. JSON's escapes are TOML's; what else does not print is escaped too."""
    escaped = json.dumps(text, ensure_ascii=False)
    return "".join(
        c if c.isprintable() else f"\\u{ord(c):04x}" if ord(c) < 2**16 else f"\\U{ord(c):08x}" for c in escaped
    )


def free_memory(root: Path = Path("/")) -> int:
    """Return how many bytes of RAM this process can still take.

    The smallest of what the machine has available and what each cgroup above this process, v1 or v2, leaves: its
    limit less its usage. Page cache that the kernel can drop (``inactive_file``) does not count as usage; otherwise
    reading a store through a memory map would look like running out of memory.

    Args:
        root: where ``proc`` and ``sys`` are looked for; tests pass a fake tree.
    """
    return min([int(psutil.virtual_memory().available), *_cgroup_rooms(root)])


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Yield the room below every cgroup memory limit that applies to this process."""
    mounts = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if not controllers:  # v2; with both versions mounted it lies in a folder of its own
            bases, (limits, usage, droppable) = [mounts, mounts / "unified"], _V2_FILES
        elif "memory" in controllers.split(","):
            bases, (limits, usage, droppable) = [mounts / "memory"], _V1_FILES
        else:
            continue
        # In a container the path may be the host's, which is not visible here: then the mount itself is ours.
        steps = [step for step in path.split("/") if step not in {"", ".", ".."}]
        for folder in (base.joinpath(*steps[:depth]) for base in bases for depth in range(len(steps) + 1)):
            bounds = [bound for name in limits if (bound := _number(_read(folder / name))) is not None]
            used = _number(_read(folder / usage))
            if bounds and used is not None:
                cached = re.search(rf"^{droppable} (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
                yield max(0, min(bounds) - max(0, used - int(cached[1] if cached else 0)))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):  # ValueError: a NUL in a path
        return ""


def _number(text: str) -> int | None:
    """Return the number in a cgroup file, or None where there is no file or no limit ("max")."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _decimal(hundredths: int) -> str:
    whole, rest = divmod(hundredths, 100)
    return f"{whole}.{rest:02}".rstrip("0").rstrip(".")


def _hint(number: str, unit: str) -> str:
    near = next((known for known in _UNITS if known.lower() in {unit.lower(), unit.lower() + "ib"}), None)
    return f', did you mean "{number}{near}"?' if near else ""
