"""How ``tierkv plan`` prints a plan, for people to read."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from tierkv.cli.console import out
from tierkv.cli.tables import pairs_table
from tierkv.sizes import format_bytes

READS = {"device": "all on the device", "stream": "stream to the device", "compute": "attend in host memory"}


def print_plan(result: Mapping[str, Any]) -> None:
    """Print the tables of a plan."""
    out.print(pairs_table(facts(result)))
    out.print(result["why"], soft_wrap=True)
    if result["fits"] is not None:
        _print_tiers(result)
    if result["estimates"] is not None:
        _print_speed(result)
    for note in result["notes"]:
        out.print(f"note: {note}", style="dim", soft_wrap=True)


def facts(result: Mapping[str, Any]) -> dict[str, str]:
    """Return what was asked and the bytes it comes to, by name."""
    model = result["architecture"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in model["layer_kinds"].items())
    windows = " or ".join(f"{window:,}" for window in model["windows"])
    about = "about " if model["parameters_estimated"] else ""
    active = model["active_parameters"]
    found = {
        "model": f"{result['title']}: {model['attention']}{', counted as MHA' if result['assume_mha'] else ''}",
        "layers": f"{model['layers']} ({kinds}{f'; window {windows}' if windows else ''})",
        "parameters": f"{about}{model['parameters'] / 1e9:,.2f} billion, {active / 1e9:,.2f} for a decoded token",
        "weights": format_bytes(model["weight_bytes"]),
        "asked for": f"{result['batch']:,} x {result['context']:,} tokens in {result['dtype']}",
        "KV of a token": f"{format_bytes(result['bytes_per_token'])} ({result['bytes_per_token']:,} bytes)",
        "KV of a request": f"{format_bytes(result['bytes_per_request'])} ({result['bytes_per_request']:,} bytes)",
        "KV of all": f"{format_bytes(result['bytes_total'])} ({result['bytes_total']:,} bytes)",
        "block": f"{result['block_size']} tokens, {format_bytes(result['block_bytes'])}",
    }
    machine = result["profile"]
    if machine is not None:
        several = f"{machine['devices']} x " if machine["devices"] > 1 else ""
        found["machine"] = f"{several}{machine['title']}"
    return found


def tier_rows(result: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return a row for each tier: its name, its budget, the blocks in it and their bytes."""
    rows = []
    for name in ("device", "host", "disk"):
        budget = result["budgets"][name]
        used = result["fits"][name]
        if budget:
            rows.append((name, format_bytes(budget), f"{used['blocks']:,}", format_bytes(used["bytes"])))
        else:
            rows.append((name, "off" if budget == 0 else "not given", "", ""))
    missing = result["fits"]["missing"]
    if missing["blocks"]:
        rows.append(("no room", "", f"{missing['blocks']:,}", format_bytes(missing["bytes"])))
    return rows


def session_rows(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return a row for each way to hold sessions: its name, how many, and what it means."""
    held = result["sessions_held"]
    return [
        ("contiguous", f"{held['contiguous']:,}", "each reserves the whole context on the device"),
        ("paged", f"{held['paged']:,}", "each takes blocks for its own length, on the device"),
        ("tiered", f"{held['tiered']:,}", "the same in all tiers, one batch at a time running"),
    ]


def speed_rows(result: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Return a row for each way to read cold KV; one is enough where nothing is cold."""
    ways = result["estimates"]
    if "device" in ways:
        ways = {"device": ways["device"]}
    return [
        (
            READS[name], format_seconds(one["ttft_seconds"]), format_seconds(one["inter_token_seconds"]),
            f"{one['tokens_per_second']:,.1f}", one["bottleneck"],
        )
        for name, one in ways.items()
    ]  # fmt: skip


def _print_tiers(result: Mapping[str, Any]) -> None:
    out.print()
    out.print(_table(("tier", "budget", "blocks", "KV"), tier_rows(result)))
    held = result["sessions_held"]
    out.print()
    out.print(_table(("sessions", "held", "how"), session_rows(result), left=("sessions", "how")))
    spread = f", spread {held['spread']:g}" if held["spread"] else ""
    out.print(
        f"sessions of {held['mean_tokens']:,.0f} tokens on average{spread}; {held['last_block_waste']:.1%} of their blocks "
        f"is not filled",
        style="dim",
        soft_wrap=True,
    )


def _print_speed(result: Mapping[str, Any]) -> None:
    out.print()
    rows = speed_rows(result)
    if rows:
        columns = ("cold KV", "first token", "a token", "tokens/s", "bottleneck")
        out.print(_table(columns, rows, left=("cold KV", "bottleneck")))
    out.print(restore_sentence(result), soft_wrap=True)
    out.print(result["advice"]["sentence"], style="bold", soft_wrap=True)


def restore_sentence(result: Mapping[str, Any]) -> str:
    """Return how restoring one request compares with computing it again."""
    ways = [
        f"{format_seconds(seconds)} from {tier}{'' if result['worth_restoring'][tier] else ' (not worth it)'}"
        for tier, seconds in result["restore_seconds"].items()
        if seconds is not None
    ]
    again = f"{format_seconds(result['recompute_seconds'])} to compute it again"
    even = f"loading wins above {result['break_even_bytes_per_second'] / 1e9:,.2f} GB/s"
    return f"restore of one request: {', '.join([*ways, again])}; {even}"


def format_seconds(seconds: float) -> str:
    """Return seconds in the unit that people would use."""
    if seconds >= 120:
        return f"{seconds / 60:,.1f} min"
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:,.3g} ms"


def _table(names: tuple[str, ...], rows: list[Any], left: tuple[str, ...] = ("tier",)) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name not in ("how", "bottleneck"))
    for row in rows:
        table.add_row(*row)
    return table
