"""The page that ``tierkv tune --report`` writes: what was chosen and why, and what the cost model says of this machine."""

from collections.abc import Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, Any, Final

import tierkv
from tierkv.charts import Number, bar_chart, line_chart
from tierkv.cli import options
from tierkv.fit import DecodePoint
from tierkv.page import Page
from tierkv.sizes import show
from tierkv.tier import Tier

if TYPE_CHECKING:
    from tierkv.fit import Fit

_POINTS: Final = 8


def write_report(path: str, result: Mapping[str, Any], fitted: "Fit", token_bytes: int, day: date) -> None:
    """Write the page.

    Args:
        path: of the file.
        result: what the command reports.
        fitted: the parameters of this machine and model.
        token_bytes: KV of one token.
        day: for the last line of the page.

    Raises:
        ConfigError: the file cannot be written.
    """
    machine = result["machine"]
    page = Page(
        f"tierkv tune: {result['model']} on {machine['accelerator'] or machine['processor']}",
        lead=_lead(result),
        footer=f"tierkv {tierkv.__version__}, {day.isoformat()}",
    )
    goal = result["goal"]
    page.facts(
        {
            "model": f"{result['model']} in {result['dtype']} on {result['device']}",
            "goal": f"{goal['sessions']:,} x {goal['context']:,} tokens",
            "machine": f"{machine['processor']}, {machine['cores']} cores, {machine['accelerator'] or 'no GPU'}",
            "disk": f"{result['file_system']}; a plain read gave {Number(result['raw_read_bytes_per_second'], 'bytes_per_second')}",
            "software": f"tierkv {machine['tierkv']}, torch {machine['torch']}, transformers {machine['transformers']}",
        }
    )
    page.section("What was chosen")
    page.table(
        ["key", "value", "why"],
        [[key, show(value), result["reasons"][key]] for key, value in result["config"].items()],
        align="lrl",
    )
    _predicted(page, result)
    _contests(page, result["contests"])
    _model(page, result, fitted, token_bytes)
    page.note("reproduce", options.command_line())
    page.write(path)


def _lead(result: Mapping[str, Any]) -> str:
    if all(contest["chosen"] == contest["rows"][0]["value"] for contest in result["contests"] if "rows" in contest):
        return "No other value than those that were there takes clearly less time on this machine."
    if not result["verified"]:
        start, tuned = (result["predicted"][name] for name in ("start", "tuned"))
        parts = [f"{what} {_ratio(tuned[what] / seconds)}" for what, seconds in start.items()]
        return f"Against where it started, the model predicts: {'; '.join(parts)}."
    parts = [f"{row['what']} {_ratio(row['ratio'])}" for row in result["verified"]]
    return f"Against where it started, measured: {'; '.join(parts)}."


def _ratio(ratio: float) -> str:
    if abs(ratio - 1) < 0.02:
        return "takes as long"
    return f"takes {abs(ratio - 1):.0%} {'less' if ratio < 1 else 'more'} time"


def _predicted(page: Page, result: Mapping[str, Any]) -> None:
    page.section("Before and after")
    measured = {row["what"]: row for row in result["verified"] or ()}
    rows: list[list[Any]] = []
    bars: dict[str, float | None] = {}
    for what, seconds in result["predicted"]["start"].items():
        row = measured.get(what)
        found = [row[name]["measured_seconds"] if row else None for name in ("start", "tuned")]
        times = (seconds, result["predicted"]["tuned"][what], *found)
        rows.append([what, *(None if one is None else Number(one, "seconds") for one in times)])
        bars |= {f"{what}, {name}": one for name, one in zip(("start", "tuned"), found if row else times, strict=False)}
    page.table(["what", "start, predicted", "tuned, predicted", "start, measured", "tuned, measured"], rows)
    how = "Measured in turns." if measured else "Predicted by the cost model; --verify measures."
    page.plot(bar_chart("Time before and after", "seconds", bars, y_format="seconds"), caption=how)


def _contests(page: Page, contests: Sequence[Mapping[str, Any]]) -> None:
    page.section(
        "Contests",
        "Values that met on this machine. Another value than the one that was there is chosen only where it takes clearly less "
        "time, twice, and spoils nothing.",
    )
    for contest in contests:
        if "rows" not in contest:
            page.facts({contest["key"]: f"not held: {contest['left_out']}"})
            continue
        wheres = list(contest["rows"][0]["decode_seconds"])
        restores = "restore_seconds" in contest["rows"][0]
        columns = [
            contest["key"],
            *(f"a token, KV on {where}" for where in wheres),
            *(["a restore"] if restores else []),
        ]
        page.table(
            columns,
            [
                [
                    f"{row['value']}{' (chosen)' if row['value'] == contest['chosen'] else ''}",
                    *(Number(row["decode_seconds"][where], "seconds") for where in wheres),
                    *([Number(row["restore_seconds"], "seconds")] if restores else []),
                ]
                for row in contest["rows"]
            ],
        )


def _model(page: Page, result: Mapping[str, Any], fitted: "Fit", token_bytes: int) -> None:
    page.section("The cost model of this machine")
    errors = result["fit_errors"]
    page.table(
        ["points", "median error", "worst error"],
        [[kind, Number(one["median"], "percent"), Number(one["worst"], "percent")] for kind, one in errors.items()],
        caption="How far the fitted model is from the points that it was fitted to.",
    )
    longest = result["goal"]["context"]
    contexts = [longest * number // _POINTS for number in range(1, _POINTS + 1)]
    block_bytes = int(result["config"]["block_size"]) * token_bytes
    lines = {}
    for tier in Tier:
        if tier is Tier.HOST and tier not in fitted.costs.kv_bytes_per_second:
            continue
        lines[f"a quarter on the device, the rest on {tier.label}" if tier else "all on the device"] = [
            (float(context), fitted.seconds(DecodePoint(_lying(context * token_bytes, tier), block_bytes, 0.0)))
            for context in contexts
        ]
    page.plot(
        line_chart("A decoded token", "tokens in the past", "seconds", lines, x_format="tokens", y_format="seconds"),
        caption="What the model says a token takes, by where its KV lies.",
    )


def _lying(num_bytes: int, tier: Tier) -> dict[Tier, int]:
    return {Tier.DEVICE: num_bytes} if tier is Tier.DEVICE else {Tier.DEVICE: num_bytes // 4, tier: num_bytes * 3 // 4}
