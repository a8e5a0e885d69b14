"""The page and the table of a long-context run."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tierkv.benchmarks.longcontext_rows import Row
from tierkv.benchmarks.longcontext_settings import LOSSY, REFERENCE, is_tiered
from tierkv.benchmarks.longcontext_summary import Spread, by, cells, describe, mean_score, mismatches, unchecked
from tierkv.charts import Chart, Number, heat_map, line_chart
from tierkv.charts_data import Cell
from tierkv.charts_units import Format, format_tokens, format_value
from tierkv.page import Page

_LISTED = 20
Result = Mapping[str, Any]


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows as a table: what is a mapping becomes a column a key, token ids are left out."""
    flat = [_flat(row) for row in rows]
    names = dict.fromkeys(name for row in flat for name in row)
    columns = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(flat)
    beside = path.with_name(f".{path.name}")
    try:
        beside.write_text(text.getvalue(), encoding="utf-8", newline="")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def make_page(result: Result, rows: Sequence[Row]) -> Page:
    """Return the page of a run, finished or not."""
    page = Page(
        f"Long context: {result['model']}, {result['dtype']}",
        lead=" ".join(headline(result, rows)),
        footer=f"tierkv {result['versions']['tierkv']}, tierkv bench longcontext",
    )
    page.facts(_facts(result))
    if not rows:
        page.section("Nothing was measured", "The run ended before its first row.")
    else:
        found = cells(rows)
        _memory(page, found)
        _speed(page, found)
        _answers(page, rows)
        _tables(page, found, rows)
    _what_is_missing(page, rows, result)
    page.section("How to reproduce", _HONESTY)
    page.note("command", result["command"])
    return page


_HONESTY = (
    "Every cache runs at every length in a process of its own, on one conversation at a time, greedily, after a short "
    "untimed warm-up. Times are medians over all tasks and samples of a length, with the least and the largest as a band. "
    "The time to the first token holds the whole prefill. Peak resident memory is the process's, model included; KV in "
    "memory is what the cache itself held. tierkv's disk tier was written in the same run, so its file may still be in "
    "the page cache: its reads are then memory copies, not SSD reads. tierkv begins every conversation without knowing "
    "any prefix, except in the task system_prompt.\n\n"
    "Tasks are generated from a seed, out of Python's own documentation; those after RULER are RULER-style, not RULER."
)


def headline(result: Result, rows: Sequence[Row]) -> list[str]:
    """Return what the run came to, in two to four sentences made from its rows."""
    said = []
    wrong = mismatches(rows, must_match=result["must_match"])
    compared = [row for row in rows if row["exact"] and row["agreement"] is not None]
    if wrong:
        said.append(f"{len(wrong)} of {len(compared)} answers of exact caches are not {REFERENCE}'s.")
    elif compared and result["must_match"]:
        said.append(f"Every exact cache gave {REFERENCE}'s tokens in all {len(compared)} answers compared.")
    elif compared:
        mean = sum(row["agreement"] for row in compared) / len(compared)
        said.append(f"In {result['dtype']} exact caches agree with {REFERENCE} on {mean:.1%} of tokens.")
    if lossy := [row for row in rows if row["cache"] == LOSSY and row["agreement"] is not None]:
        mean = sum(row["agreement"] for row in lossy) / len(lossy)
        said.append(f"The lossy {LOSSY} cache agrees on {mean:.1%}.")
    said += _against(rows)
    if errors := sum(row["error"] is not None for row in rows):
        said.append(f"{errors} rows are errors.")
    if result["missing"]:
        said.append(f"The run is not finished: {result['missing']} rows are missing.")
    return said


def _against(rows: Sequence[Row]) -> list[str]:
    """Compare tierkv with the reference at the longest length that both have."""
    found = {(cell["cache"], cell["length"]): cell for cell in cells(rows)}
    for length in sorted({length for _, length in found}, reverse=True):
        own = next((cell for (cache, at), cell in found.items() if at == length and is_tiered(cache)), None)
        reference = found.get((REFERENCE, length))
        if own is None or reference is None or not (own["ttft_seconds"] and reference["ttft_seconds"]):
            continue
        said = []
        kept, whole = own["kv_in_memory_bytes"], reference["kv_in_memory_bytes"]
        if kept and whole:
            said.append(
                f"At {format_tokens(length)} tokens {own['cache']} held {format_value(kept.median, 'bytes')} in memory where "
                f"{REFERENCE} held {format_value(whole.median, 'bytes')} of KV."
            )
        speeds = own["tokens_per_second"], reference["tokens_per_second"]
        if all(speeds):
            said.append(
                f"It made {speeds[0].median:.1f} tokens a second ({REFERENCE}: {speeds[1].median:.1f}) and its first token "
                f"took {format_value(own['ttft_seconds'].median, 'seconds')} "
                f"({format_value(reference['ttft_seconds'].median, 'seconds')})."
            )
        return said
    return []


def _facts(result: Result) -> dict[str, Cell]:
    machine = result["machine"]
    return {
        "model": f"{result['model']}, {result['dtype']}, on {result['device']}",
        "machine": f"{machine['processor']}, {machine['cores']} cores, {format_value(machine['memory_bytes'], 'bytes')}",
        "accelerator": machine["accelerator"] or "none",
        "file system of disk tiers": result["file_system"],
        "versions": ", ".join(f"{name} {number}" for name, number in result["versions"].items()),
        "tasks": ", ".join(result["tasks"]),
        "lengths": ", ".join(format_tokens(length) for length in result["lengths"]),
        "caches": ", ".join(name + (" (lossy)" if name == LOSSY else "") for name in result["caches"]),
        "samples": f"{result['samples']} of each task at each length, seed {result['seed']}",
        "KV of a token": Number(result["kv_bytes_per_token"], "bytes"),
        "rows": f"{result['rows']:,} of {result['rows'] + result['missing']:,}",
    }


def _line(title: str, label: str, found: Sequence[Mapping[str, Any]], name: str, kind: Format) -> Chart:
    series: dict[str, list[tuple[float, float | None]]] = {}
    bands: dict[str, list[tuple[float, float, float]]] = {}
    for cell in sorted(found, key=lambda one: one["length"]):
        spread: Spread | None = cell[name]
        series.setdefault(cell["cache"], []).append((cell["length"], spread.median if spread else None))
        if spread and spread.least < spread.most:
            bands.setdefault(cell["cache"], []).append((cell["length"], spread.least, spread.most))
    return line_chart(
        title, "context in tokens", label, series, x_log=True, x_format="tokens", y_format=kind, bands=bands
    )


def _memory(page: Page, found: Sequence[Mapping[str, Any]]) -> None:
    page.section("Memory")
    page.plot(
        _line("KV in memory against context", "KV in memory", found, "kv_in_memory_bytes", "bytes"),
        caption="What each cache held in device and host memory at most; tierkv's buffers included, its disk tier not.",
    )
    page.plot(
        _line("Peak resident memory against context", "resident memory", found, "peak_rss_bytes", "bytes"),
        caption="Of the whole process, model and prefill included.",
    )


def _speed(page: Page, found: Sequence[Mapping[str, Any]]) -> None:
    page.section("Speed")
    page.plot(
        _line("Time to the first token against context", "first token", found, "ttft_seconds", "seconds"),
        caption="From the call of generate; lower is better. Bands: the least and the largest.",
    )
    page.plot(
        _line("Tokens per second against context", "tokens per second", found, "tokens_per_second", "number"),
        caption="Decoded tokens after the first; higher is better.",
    )


def _answers(page: Page, rows: Sequence[Row]) -> None:
    page.section("Answers", "A score is the share of what was asked for that the answer holds.")
    tasks, caches = list(dict.fromkeys(row["task"] for row in rows)), list(dict.fromkeys(row["cache"] for row in rows))
    grouped = by(rows, "task", "cache")
    page.plot(
        heat_map(
            "Score by task", "cache", "task", caches, tasks,
            [[mean_score(grouped.get((task, cache), ())) for cache in caches] for task in tasks],
            value_label="score", value_format="percent",
        ),
        caption="Mean over all lengths and samples. Exact caches have the same scores where their tokens are the same.",
    )  # fmt: skip
    needle = next((task for task in tasks if any(row["depth"] is not None for row in by(rows, "task")[task,])), None)
    for cache in caches if needle else ():
        some = [row for row in grouped.get((needle, cache), ()) if row["depth"] is not None]
        if some:
            page.plot(_needle(str(needle), cache, some), caption="Each field: the mean score of the samples there.")


def _needle(task: str, cache: str, rows: Sequence[Row]) -> Chart:
    lengths, depths = sorted({row["length"] for row in rows}), sorted({row["depth"] for row in rows})
    grouped = by(rows, "depth", "length")
    return heat_map(
        f"{task}: score with {cache}", "context in tokens", "depth", lengths, depths,
        [[mean_score(grouped.get((depth, length), ())) for length in lengths] for depth in depths],
        value_label="score", x_format="tokens", y_format="percent", value_format="percent",
    )  # fmt: skip


def _tables(page: Page, found: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> None:
    page.section("All figures")
    kinds: dict[str, Format] = {
        "ttft_seconds": "seconds", "tokens_per_second": "number", "inter_token_p50_seconds": "seconds",
        "inter_token_p99_seconds": "seconds", "kv_in_memory_bytes": "bytes", "peak_rss_bytes": "bytes",
        "stall_seconds": "seconds",
    }  # fmt: skip
    heads = ("cache", "tokens", "rows", "errors", "score", "agreement", "first token", "tokens/s", "token p50",
             "token p99", "KV in memory", "resident", "waited")  # fmt: skip
    table = []
    for cell in found:
        spreads = (cell[name] for name in kinds)
        figures = [Number(one.median, kind) if one else None for one, kind in zip(spreads, kinds.values(), strict=True)]
        shares = [None if cell[name] is None else Number(cell[name], "percent") for name in ("score", "agreement")]
        table.append((cell["cache"], format_tokens(cell["length"]), cell["rows"], cell["errors"], *shares, *figures))
    page.table(heads, table, caption="Medians over tasks and samples.")
    tiers = [
        (row["cache"], format_tokens(row["length"]), row["task"], row["sample"], row["read_path"], row["block_size"],
         *(Number(row["tier_peak_bytes"][tier], "bytes") for tier in ("device", "host", "disk")),
         Number(sum(row["moved_bytes"].values()), "bytes"), row["prefix_tokens"])
        for row in rows if row["moved_bytes"] is not None and row["sample"] == 0
    ]  # fmt: skip
    if tiers:
        names = (
            "cache",
            "tokens",
            "task",
            "sample",
            "reads",
            "block",
            "device",
            "host",
            "disk",
            "moved",
            "reused tokens",
        )
        page.table(names, tiers, caption="tierkv's tiers at their fullest, of the first sample of each task.")


def _what_is_missing(page: Page, rows: Sequence[Row], result: Result) -> None:
    wrong = mismatches(rows, must_match=result["must_match"])
    failed = [row for row in rows if row["error"]]
    if not (wrong or failed or result["left_out"] or unchecked(rows)):
        return
    page.section("What went wrong, and what was left out")
    if wrong:
        page.table(["not exact"], [[describe(row)] for row in wrong[:_LISTED]])
    if failed:
        shown = [
            [row["cache"], format_tokens(row["length"]), row["task"], row["sample"], row["error"]] for row in failed
        ]
        page.table(
            ["cache", "tokens", "task", "sample", "error"], shown[:_LISTED], caption=f"{len(failed)} rows failed."
        )
    if result["left_out"]:
        page.table(["left out", "reason"], [[one["cache"], one["reason"]] for one in result["left_out"]])


def _flat(row: Row) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name == "tokens":
            continue
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": one for key, one in value.items()}
        elif isinstance(value, list):
            flat[name] = " ".join(map(str, value))
        else:
            flat[name] = "" if value is None else value
    return flat
