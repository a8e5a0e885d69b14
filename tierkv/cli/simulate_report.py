"""The page that ``tierkv simulate --report`` writes: what was found where, latencies, wires, and the curves of a sweep."""

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, Final

import tierkv
from tierkv.charts import bar_chart, heat_map, line_chart, stacked_bars
from tierkv.charts_units import Format, format_value
from tierkv.cli.simulate_show import facts, latency_rows, point_rows, setting, totals, wire_rows
from tierkv.page import Page

_TIERS: Final = ("device", "host", "disk")


def write_report(path: str, result: Mapping[str, Any], day: date) -> None:
    """Write the page.

    Args:
        path: of the file.
        result: the JSON object of the command.
        day: for the last line of the page.

    Raises:
        ConfigError: the file cannot be written.
    """
    page = Page(
        f"tierkv simulate: {result['model']} on {result['machine']}",
        lead=_lead(result),
        footer=f"tierkv {tierkv.__version__}, {day.isoformat()}",
    )
    page.facts(facts(result))
    if "points" in result:
        _sweep(page, result)
    else:
        _single(page, result)
    page.section(
        "How this was made",
        "Every decision, which block lies where and what moves next, is made by the code that runs in an engine. Only "
        "time is virtual: copies queue on wires, and forwards take what the figures of the hardware profile say. The time "
        "of a real run differs from it by the error of that model.",
    )
    page.note("reproduce", result["command"])
    page.write(path)


def _lead(result: Mapping[str, Any]) -> str:
    if "points" not in result:
        hits = result["hit_ratio"]
        return (
            f"{hits['total']:.1%} of all prompt tokens are found in the tiers, of {hits['ceiling']:.1%} without bounds. The first "
            f"token comes after {_seconds(result['ttft_seconds']['p50'])} in the median, the next ones every "
            f"{_seconds(result['inter_token_seconds']['p50'])}."
        )
    points = result["points"]
    keys = [one["key"] for one in result["sweep"]]
    best = min(points, key=lambda one: one["ttft_seconds"]["mean"] or float("inf"))
    values = " and ".join(f"{key} {setting(key, best[key])}" for key in keys)
    found = [one["hit_ratio"]["total"] for one in points]
    return (
        f"Over {len(points)} points, {min(found):.1%} to {max(found):.1%} of all prompt tokens are found in the tiers. The "
        f"first token comes soonest with {values}: after {_seconds(best['ttft_seconds']['mean'])} in the mean."
    )


def _single(page: Page, result: Mapping[str, Any]) -> None:
    page.section("What it comes to")
    page.facts(totals(result))
    hits = result["hit_ratio"]
    page.section("Where prompts were found")
    tiers = {name: hits[name] for name in _TIERS}
    bars = {"found": {**tiers, "computed": 1 - hits["total"]}}
    bars["without bounds"] = {"somewhere": hits["ceiling"], "computed": 1 - hits["ceiling"]}
    page.plot(
        stacked_bars("Prompt tokens by where they were found", "share of tokens", bars, y_format="percent"),
        caption="What tiers without bounds would have held is the ceiling; the rest is new text.",
    )
    page.section("Latency")
    columns, rows = latency_rows(result)
    page.table(list(columns), rows)
    times = {f"first token {name}": result["ttft_seconds"][name] for name in ("p50", "p90", "p99")}
    times |= {f"between tokens {name}": result["inter_token_seconds"][name] for name in ("p50", "p90", "p99")}
    page.plot(bar_chart("Latency", "time", times, y_format="seconds"))
    page.section("Wires")
    columns, rows = wire_rows(result)
    page.table(
        list(columns), rows, caption="Moved: whole blocks. Streamed: read over the wire by attention, at each token."
    )
    busy = {wire.replace("_to_", " → "): share for wire, share in result["wire_busy"].items()}
    page.plot(bar_chart("How busy each wire was", "share of the time", busy, y_format="percent"))


def _sweep(page: Page, result: Mapping[str, Any]) -> None:
    sweeps, points = result["sweep"], result["points"]
    page.section("All points")
    columns, rows = point_rows(result)
    page.table(list(columns), rows)
    measures: list[tuple[str, str, Format, Any]] = [
        ("Prompt tokens found", "share of tokens", "percent", lambda one: one["hit_ratio"]["total"]),
        ("Time to the first token, median", "time", "seconds", lambda one: one["ttft_seconds"]["p50"]),
        ("Time between tokens, mean", "time", "seconds", lambda one: one["inter_token_seconds"]["mean"]),
        ("Output", "tokens a second", "number", lambda one: one["tokens_per_second"]),
    ]
    if len(sweeps) == 1:
        _curves(page, sweeps[0], points, measures)
        return
    (across, xs), (up, ys) = ((one["key"], one["values"]) for one in sweeps)
    by_place = {(one[across], one[up]): one for one in points}
    page.section("Maps")
    for title, label, kind, of in measures:
        values = [[of(by_place[x, y]) for x in xs] for y in ys]
        page.plot(
            heat_map(
                title, across, up, [setting(across, x) for x in xs], [setting(up, y) for y in ys], values,
                value_label=label, value_format=kind,
            )
        )  # fmt: skip


def _curves(
    page: Page,
    sweep: Mapping[str, Any],
    points: Sequence[Mapping[str, Any]],
    measures: Sequence[tuple[str, str, Format, Any]],
) -> None:
    key = sweep["key"]
    page.section("Where prompts were found")
    bars = {setting(key, one[key]): {name: one["hit_ratio"][name] for name in _TIERS} for one in points}
    if key == "policy":
        page.plot(stacked_bars("Prompt tokens by where they were found", "share of tokens", bars, y_format="percent"))
        page.section("Compared")
        for title, label, kind, of in measures:
            page.plot(bar_chart(title, label, {str(one[key]): of(one) for one in points}, y_format=kind))
        return
    x_format: Format = "bytes" if key in _TIERS else "number"
    log = all(one[key] > 0 for one in points)
    lines = {name: [(one[key], one["hit_ratio"][name]) for one in points] for name in (*_TIERS, "total", "ceiling")}
    page.plot(
        line_chart(
            "Prompt tokens by where they were found", key, "share of tokens", lines, x_log=log, x_format=x_format,
            y_format="percent",
        ),
        caption="The ceiling is what tiers without bounds would have held.",
    )  # fmt: skip
    page.section("Latency and output")
    times = {
        f"first token {name}": [(one[key], one["ttft_seconds"][name]) for one in points]
        for name in ("p50", "p90", "p99")
    }
    page.plot(
        line_chart("Time to the first token", key, "time", times, x_log=log, x_format=x_format, y_format="seconds")
    )
    for title, label, kind, of in measures[2:]:
        line = {title: [(one[key], of(one)) for one in points]}
        page.plot(line_chart(title, key, label, line, x_log=log, x_format=x_format, y_format=kind))


def _seconds(value: float | None) -> str:
    return "no time" if value is None else format_value(value, "seconds")
