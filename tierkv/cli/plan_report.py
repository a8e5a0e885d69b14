"""The page that ``tierkv plan --report`` writes: the plan's tables, and how it changes with the context."""

from collections.abc import Mapping
from datetime import date
from typing import TYPE_CHECKING, Any, Final

import tierkv
from tierkv.charts import bar_chart, line_chart, stacked_bars
from tierkv.cli import options
from tierkv.cli.plan_show import READS, facts, restore_sentence, session_rows, speed_rows, tier_rows
from tierkv.hardware import figures
from tierkv.page import Page
from tierkv.plan_speed import Setting, estimates, restore
from tierkv.tier import Tier

if TYPE_CHECKING:
    from tierkv.plan import Ask

_LEAST: Final = 1024
_POINTS: Final = 12


def write_report(path: str, ask: "Ask", result: Mapping[str, Any], day: date) -> None:
    """Write the page.

    Args:
        path: of the file.
        ask: what was planned.
        result: the plan.
        day: for the last line of the page.

    Raises:
        ConfigError: the file cannot be written.
    """
    where = f" on {result['profile']['title']}" if result["profile"] else ""
    page = Page(
        f"tierkv plan: {result['title']}{where}",
        lead=_lead(result),
        footer=f"tierkv {tierkv.__version__}, {day.isoformat()}",
    )
    page.facts(facts(result))
    _bytes(page, ask)
    if result["fits"] is not None:
        _tiers(page, result)
    if ask.profile is not None:
        _speed(page, ask, result)
    page.section("How this was made", " ".join(f"{note[:1].upper()}{note[1:]}." for note in result["notes"]))
    page.facts({"dimensions": result["source"]})
    if ask.profile is not None:
        page.table(
            ["figure", "value", "source"], figures(ask.profile), align="lrl",
            caption=f"What is assumed of {ask.profile.title}: peaks, and the shares of them that are reached.",
        )  # fmt: skip
    page.note("reproduce", options.command_line())
    page.write(path)


def _lead(result: Mapping[str, Any]) -> str:
    parts = [result["why"]]
    if result["fits"] is not None:
        parts.append("Everything fits." if result["fits"]["everything"] else "Not everything fits.")
    if result["advice"] is not None:
        parts.append(result["advice"]["sentence"])
    return " ".join(parts)


def _bytes(page: Page, ask: "Ask") -> None:
    page.section("What a request takes")
    true, formula = ask.architecture, ask.architecture.assume_mha()
    contexts = _contexts(ask.context)
    lines = {"as the model is": [(float(n), float(true.kv_bytes(n, ask.dtype))) for n in contexts]}
    if formula.kv_bytes(ask.context, ask.dtype) != true.kv_bytes(ask.context, ask.dtype):
        lines["multi-head formula"] = [(float(n), float(formula.kv_bytes(n, ask.dtype))) for n in contexts]
    chart = line_chart(
        "KV of one request", "tokens", "bytes", lines, x_log=True, y_log=True, x_format="tokens", y_format="bytes",
        marks=[(float(ask.context), "asked for")],
    )  # fmt: skip
    page.plot(chart, caption="What one sequence keeps. Layers with a window stop growing where it ends.")


def _tiers(page: Page, result: Mapping[str, Any]) -> None:
    page.section("What fits where")
    page.table(["tier", "budget", "blocks", "KV"], tier_rows(result))
    parts = {name: float(result["fits"][name]["bytes"]) for name in ("device", "host", "disk", "missing")}
    shown = {("no room" if name == "missing" else name): size for name, size in parts.items() if size}
    page.plot(
        stacked_bars("Where the batch lies", "bytes", {"the batch": shown}, y_format="bytes"),
        caption="The fastest tier is filled first; the most recent blocks of every sequence stay on the device.",
    )
    page.table(["sessions", "held", "how"], session_rows(result), caption="Sessions that the tiers hold.", align="lrl")


def _speed(page: Page, ask: "Ask", result: Mapping[str, Any]) -> None:
    sentence = restore_sentence(result)
    page.section("How fast", f"{sentence[:1].upper()}{sentence[1:]}.")
    rows = speed_rows(result)
    if rows:
        page.table(["cold KV", "first token", "a token", "tokens/s", "bottleneck"], rows, align="lrrrl")
        parts = {
            READS[name]: one["terms"]
            for name, one in result["estimates"].items()
            if READS[name] in {row[0] for row in rows}
        }
        page.plot(
            stacked_bars("What a decoded token is spent on", "seconds", parts, y_format="seconds"),
            caption="What is hidden behind something else is not in it.",
        )
    _curves(page, ask, result)
    gains = {
        one["change"].removeprefix("twice the "): one["gain"]
        for one in result["advice"]["options"]
        if one["gain"] is not None
    }
    if gains:
        page.section("What would help", result["advice"]["sentence"])
        page.plot(
            bar_chart("Gain in tokens a second", "times as fast", gains),
            caption="One thing doubled at a time; 1 is no gain.",
        )


def _curves(page: Page, ask: "Ask", result: Mapping[str, Any]) -> None:
    """Draw how the rates change with the context."""
    if ask.profile is None:
        return
    model = ask.architecture.assume_mha() if ask.assume_mha else ask.architecture
    budgets = {tier: result["budgets"][tier.label] for tier in Tier}
    rates: dict[str, list[tuple[float, float]]] = {}
    times: dict[str, list[tuple[float, float]]] = {}
    for tokens in _contexts(ask.context):
        setting = Setting(
            architecture=model, profile=ask.profile, layout=model.layout(ask.block_size, ask.dtype), budgets=budgets,
            context=tokens, batch=ask.batch, devices=ask.devices,
        )  # fmt: skip
        for name, one in estimates(setting).items():
            rates.setdefault(READS[name], []).append((float(tokens), one["tokens_per_second"]))
        found = restore(setting)
        times.setdefault("compute again", []).append((float(tokens), found["recompute_seconds"]))
        for tier, seconds in found["restore_seconds"].items():
            if seconds is not None:
                times.setdefault(f"restore from {tier}", []).append((float(tokens), seconds))
    page.plot(
        line_chart(
            "Tokens a second by context", "tokens of every sequence", "tokens/s", rates, x_log=True, y_log=True,
            x_format="tokens",
        ),
        caption=f"The whole batch of {ask.batch:,}, by how cold KV is read. A line falls where the tier above it is full.",
    )  # fmt: skip
    page.plot(
        line_chart(
            "Restore or compute again", "tokens of the prefix", "seconds", times, x_log=True, y_log=True, x_format="tokens",
            y_format="seconds",
        ),
        caption="Until the first token of a prompt that was seen before: the lower line wins.",
    )  # fmt: skip


def _contexts(longest: int) -> list[int]:
    """Return lengths up to the longest, each twice the one before it."""
    found = [longest]
    while len(found) < _POINTS and found[-1] // 2 >= min(_LEAST, longest):
        found.append(found[-1] // 2)
    return found[::-1]
