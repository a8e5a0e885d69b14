"""The page and the table of a long-context run."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tierkv.benchmarks.longcontext_headline import headline
from tierkv.benchmarks.longcontext_rows import Row
from tierkv.benchmarks.longcontext_settings import LOSSY
from tierkv.benchmarks.longcontext_summary import (
    Spread,
    by,
    cells,
    describe,
    mean_score,
    mismatches,
    unchecked,
)
from tierkv.benchmarks.longcontext_tables import add_tables
from tierkv.benchmarks.longcontext_trace import timeline_rows
from tierkv.charts import Chart, Number, heat_map, line_chart, timeline
from tierkv.charts_data import Cell
from tierkv.charts_units import Format, format_tokens, format_value
from tierkv.page import Page

_LISTED: Final = 20
NEEDLE: Final = "needle"
"""The task whose depths are shown, where it was run."""
_HONESTY: Final = (
    "Every cache runs at every length in a process of its own, on one conversation at a time, greedily, after a "
    "short untimed warm-up. Times are medians over all tasks and samples of a length, with the least and the "
    "largest as a band. The time to the first token holds the whole prefill; prompts with a known prefix are not in "
    "it. Peak resident memory is the process's, model included; KV in memory is what the cache itself held. "
    "tierkv's disk tier was written in the same run, so its file may still be in the page cache: its reads are then "
    "memory copies, not SSD reads. tierkv begins every conversation without knowing any prefix, except in the task "
    "system_prompt.\n\n"
    "Tasks are generated from a seed, out of Python's own documentation; those after RULER are RULER-style, not "
    "RULER."
)

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


def make_page(result: Result, rows: Sequence[Row], trace: Mapping[str, Any] | None = None) -> Page:
    """Return the page of a run, finished or not, with the timeline of a token where there is a trace."""
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
        if trace is not None:
            _token(page, trace)
        add_tables(page, found, rows)
    _what_is_missing(page, rows, result)
    page.section("How to reproduce", _HONESTY)
    page.note("command", result["command"])
    return page


def _facts(result: Result) -> dict[str, Cell]:
    machine = result["machine"]
    load = machine.get("load_average")
    return {
        "model": f"{result['model']}, {result['dtype']}, on {result['device']}",
        "machine": f"{machine['processor']}, {machine['cores']} cores, {format_value(machine['memory_bytes'], 'bytes')}",
        "load when it began": f"{load[0]:.1f} ready to run on {machine['cores']} cores" if load else "not known",
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
            value_label="score", value_format="percent", ends=(0, 1),
        ),
        caption="Mean over all lengths and samples. Exact caches have the same scores where their tokens are the same.",
    )  # fmt: skip
    deep = {row["task"] for row in rows if row["depth"] is not None}
    needle = next((task for task in (NEEDLE, *tasks) if task in deep), None)
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
        value_label="score", x_format="tokens", y_format="percent", value_format="percent", ends=(0, 1),
    )  # fmt: skip


def _token(page: Page, trace: Mapping[str, Any]) -> None:
    about = trace["otherData"]
    page.section("One token")
    page.plot(
        timeline(f"What one decoded token of {about['cache']} is made of", timeline_rows(trace)),
        caption=f"With {about['tokens before']:,} tokens before it: computing, waits for copies, and the copies of every "
        "thread. Measured once, with the watching's own cost in it.",
    )


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
            ["cache", "tokens", "task", "sample", "error"], shown[:_LISTED], caption=f"Rows that failed: {len(failed)}."
        )
    if result["left_out"]:
        page.table(["left out", "reason"], [[one["cache"], one["reason"]] for one in result["left_out"]])


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name == "tokens":
            continue
        if isinstance(value, Mapping):
            flat |= {f"{name}.{key}": one for key, one in _flat(value).items()}
        elif isinstance(value, list):
            flat[name] = " ".join(map(str, value))
        else:
            flat[name] = "" if value is None else value
    return flat
