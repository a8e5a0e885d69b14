"""What the rows of a long-context run come to: scores, medians with their spread, and where an exact cache was not exact."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tierkv.benchmarks.longcontext_rows import Row
from tierkv.benchmarks.longcontext_settings import REFERENCE, is_exact
from tierkv.benchmarks.longcontext_wires import sums


@dataclass(frozen=True, slots=True)
class Spread:
    """Some numbers: their median, the least and the largest."""

    median: float
    least: float
    most: float


def spread_of(values: Iterable[float | None]) -> Spread | None:
    """Return the spread of the numbers that are there; None where there are none."""
    known = [value for value in values if value is not None]
    return Spread(statistics.median(known), min(known), max(known)) if known else None


def mismatches(rows: Iterable[Row], *, must_match: bool) -> list[Row]:
    """Return the rows of exact caches whose tokens are not the reference's, in a dtype in which they have to be."""
    return [row for row in rows if must_match and is_exact(row["cache"]) and row["first_difference"] is not None]


def unchecked(rows: Iterable[Row]) -> int:
    """Count the rows of other caches than the reference that had nothing to be compared with, or failed."""
    return sum(row["cache"] != REFERENCE and row["agreement"] is None for row in rows)


def by(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows that have the same values of some keys, together."""
    found: defaultdict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[tuple(row[name] for name in names)].append(row)
    return dict(found)


def mean_score(rows: Sequence[Row]) -> float | None:
    """Return the mean of the scores that are there."""
    known = [row["score"] for row in rows if row["score"] is not None]
    return statistics.fmean(known) if known else None


def in_memory(row: Row) -> int | None:
    """Return the bytes of KV that a cache held in memory at most, device and host together."""
    peaks = row["tier_peak_bytes"]
    return None if peaks is None else int(peaks["device"] + peaks["host"])


def scores(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Return mean scores by task, cache and length."""
    found: dict[str, dict[str, dict[str, float | None]]] = {}
    for (task, cache, length), some in by(rows, "task", "cache", "length").items():
        score = mean_score(some)
        found.setdefault(task, {}).setdefault(cache, {})[str(length)] = None if score is None else round(score, 6)
    return found


def reused(rows: Iterable[Row]) -> list[Row]:
    """Return the rows whose prompt began with a prefix that the cache knew from the conversation before."""
    return [row for row in rows if row["prefix_tokens"]]


MEASURES: Mapping[str, Callable[[Row], float | None]] = {
    # Of prompts that were computed whole: a prefix that was known already is another thing; see ``reused``.
    "ttft_seconds": lambda row: None if row["prefix_tokens"] else row["ttft_seconds"],
    "tokens_per_second": lambda row: row["tokens_per_second"],
    "inter_token_p50_seconds": lambda row: (row["inter_token_seconds"] or {}).get("p50"),
    "inter_token_p99_seconds": lambda row: (row["inter_token_seconds"] or {}).get("p99"),
    "peak_rss_bytes": lambda row: None if row["error"] else row["peak_rss_bytes"],
    "kv_in_memory_bytes": in_memory,
    "stall_seconds": lambda row: row["stall_seconds"],
}
"""What is told of a cache at a length: a number of each row, of which the spread is told."""


def cells(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return what each cache came to at each length, over all tasks and samples; of wires it is the sum."""
    found = []
    for (length, cache), some in by(rows, "length", "cache").items():
        cell: dict[str, Any] = {"cache": cache, "length": length, "rows": len(some)}
        cell["errors"] = sum(row["error"] is not None for row in some)
        cell["score"] = mean_score(some)
        agreed = [row["agreement"] for row in some if row["agreement"] is not None]
        cell["agreement"] = statistics.fmean(agreed) if agreed else None
        for name, of in MEASURES.items():
            cell[name] = spread_of(of(row) for row in some)
        cell["wires"] = sums([row["wires"] for row in some if row.get("wires")])
        found.append(cell)
    return found


def describe(row: Row) -> str:
    """Say which row it is, and where its tokens begin to differ."""
    where = f"{row['cache']}, {row['task']} at {row['length']:,} tokens, sample {row['sample']}"
    return where if row["first_difference"] is None else f"{where}: token {row['first_difference']} is the first"
