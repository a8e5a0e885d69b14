"""What every wire carried in a conversation, next to what this machine can do with plain copies of the same kind.

Loads no torch; ``longcontext_rates`` measures the machine.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Rates = dict[str, float | None]
"""Bytes a second by wire, as ``engine.stats()`` names it; None where that is not known."""


def wires_of(
    stats: Mapping[str, Any], before: Mapping[str, Any], rates: Mapping[str, float | None] | None
) -> dict[str, dict[str, float | None]]:
    """Return what each wire carried between two ``engine.stats()``, as dicts.

    Args:
        stats: the later.
        before: the earlier.
        rates: of the machine, by wire; None where they were not measured.

    Returns:
        By wire: ``bytes``, ``seconds`` (at least one copy was at work), ``bytes_per_second``,
        ``machine_bytes_per_second`` and ``share`` of it; None where something was not measured, or nothing moved.
    """
    found = {}
    for wire, moved in stats["moved_bytes"].items():
        num_bytes = moved - before["moved_bytes"].get(wire, 0)
        seconds = stats["moved_seconds"][wire]
        if seconds is not None:
            seconds = round(seconds - (before["moved_seconds"].get(wire) or 0.0), 6)
        machine = (rates or {}).get(wire)
        rate = num_bytes / seconds if num_bytes and seconds else None
        found[wire] = {
            "bytes": num_bytes,
            "seconds": seconds,
            "bytes_per_second": None if rate is None else round(rate),
            "machine_bytes_per_second": machine,
            "share": None if rate is None or not machine else round(rate / machine, 4),
        }
    return found


def sums(wires: Sequence[Mapping[str, Mapping[str, float | None]]]) -> dict[str, dict[str, float | None]]:
    """Return what the wires of several conversations come to; None where one of them does not know.

    The machine's rate is that of a run, and a resumed run has measured it again: it is weighed with the seconds.

    Args:
        wires: as ``wires_of`` makes them.
    """
    found: dict[str, dict[str, float | None]] = {}
    for wire in dict.fromkeys(name for one in wires for name in one):
        some = [one[wire] for one in wires if wire in one]
        num_bytes = sum(one["bytes"] or 0 for one in some)
        seconds = _sum(one["seconds"] for one in some)
        could = _sum(_product(one["seconds"], one["machine_bytes_per_second"]) for one in some)
        rate = num_bytes / seconds if num_bytes and seconds else None
        at_most = could / seconds if could and seconds else None
        found[wire] = {
            "bytes": num_bytes,
            "seconds": seconds,
            "bytes_per_second": rate,
            "machine_bytes_per_second": at_most,
            "share": None if rate is None or not at_most else rate / at_most,
        }
    return found


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def _product(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one * other
