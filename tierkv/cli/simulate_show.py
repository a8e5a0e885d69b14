"""How ``tierkv simulate`` prints what it found, for people to read."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from tierkv.charts_units import format_value
from tierkv.cli.console import out
from tierkv.cli.tables import pairs_table
from tierkv.sizes import format_bytes

_SWEPT_BYTES: Final = ("device", "host", "disk")
_PIPE_WIDTH: Final = 10_000


def print_result(result: Mapping[str, Any]) -> None:
    """Print the tables of one simulation, or one line for each point of a sweep."""
    if "points" in result:
        out.print(pairs_table(facts(result)))
        _print_table(*point_rows(result))
        return
    out.print(pairs_table(facts(result) | totals(result)))
    _print_table(*latency_rows(result))
    _print_table(*wire_rows(result))
    for reason, count in result["refused"]["reasons"].items():
        out.print(f"note: {count:,} requests were refused: {reason}", style="dim", soft_wrap=True)


def facts(result: Mapping[str, Any]) -> dict[str, str]:
    """Return what was simulated, by name."""
    workload = result.get("workload")
    source = result.get("trace") or ""
    if workload is not None:
        source = (
            f"{workload['sessions']:,} sessions of {workload['turns']:,} turns, {workload['clients']:,} at a time "
            f"(preset {result['preset']}, seed {result['seed']})"
        )
    swept = {one["key"] for one in result.get("sweep", ())}
    budgets = (
        f"{'swept' if name in swept else format_bytes(size) if size else 'no'} {name}"
        for name, size in result["budgets"].items()
    )
    return {
        "model": f"{result['model']}, KV in {result['dtype']}, blocks of {result['block_size']} tokens",
        "machine": result["machine"],
        "budgets": ", ".join(budgets),
        "requests of": source,
        "engine": f"batch up to {result['batch']:,}, eviction by {result['policy']}",
    }


def totals(result: Mapping[str, Any]) -> dict[str, str]:
    """Return what the simulation came to, by name."""
    hits, stall = result["hit_ratio"], result["stall_seconds"]
    refused = result["refused"]["requests"]
    where = ", ".join(f"{hits[name]:.1%} {name}" for name in _SWEPT_BYTES)
    return {
        "served": f"{result['requests']:,} requests, {result['sessions']:,} sessions"
        + (f"; {refused:,} refused" if refused else ""),
        "prompts found": f"{hits['total']:.1%} of {result['prompt_tokens']:,} tokens ({where})",
        "without bounds": f"{hits['ceiling']:.1%} would have been found",
        "output": f"{result['output_tokens']:,} tokens, {result['tokens_per_second'] or 0:,.1f} a second",
        "stalls": f"{_seconds(stall['total'])} for room, {_seconds(result['restore_seconds'])} to read prefixes",
        "sessions held": f"{result['sessions_held']:,} at most",
        "peak blocks": ", ".join(f"{count:,} {name}" for name, count in result["peak_blocks"].items()),
        "time": f"{_seconds(result['virtual_seconds'])} simulated in {_seconds(result['wall_seconds'])}",
    }


Rows = tuple[Sequence[str], list[list[str]]]


def latency_rows(result: Mapping[str, Any]) -> Rows:
    """Return the table of latencies: its columns, and its rows."""
    names = {
        "ttft_seconds": "first token, queue included",
        "ttft_service_seconds": "first token, served",
        "inter_token_seconds": "between tokens",
    }
    columns = ("p50", "p90", "p99", "mean")
    return ("latency", *columns), [
        [text, *(_seconds(result[name][one]) for one in columns)] for name, text in names.items()
    ]


def wire_rows(result: Mapping[str, Any]) -> Rows:
    """Return the table of wires: its columns, and its rows."""
    return ("wire", "blocks moved", "bytes moved", "bytes streamed", "busy"), [
        [
            wire.replace("_to_", " → "), f"{result['blocks_moved'][wire]:,}", format_bytes(result["bytes_moved"][wire]),
            format_bytes(result["bytes_streamed"][wire]), f"{busy:.1%}",
        ]
        for wire, busy in result["wire_busy"].items()
    ]  # fmt: skip


def point_rows(result: Mapping[str, Any]) -> Rows:
    """Return the table of a sweep's points: its columns, and its rows."""
    keys = [one["key"] for one in result["sweep"]]
    columns = (
        *keys,
        "found",
        *(f"in {name}" for name in _SWEPT_BYTES),
        "TTFT p50",
        "p99",
        "ITL p50",
        "tokens/s",
        "held",
    )
    return columns, [
        [
            *(setting(key, point[key]) for key in keys),
            *(f"{point['hit_ratio'][name]:.1%}" for name in ("total", *_SWEPT_BYTES)),
            *(_seconds(point["ttft_seconds"][name]) for name in ("p50", "p99")),
            _seconds(point["inter_token_seconds"]["p50"]), f"{point['tokens_per_second'] or 0:,.1f}",
            f"{point['sessions_held']:,}",
        ]
        for point in result["points"]
    ]  # fmt: skip


def setting(key: str, value: int | str) -> str:
    """Return a swept value as people read it."""
    return format_bytes(int(value)) if key in _SWEPT_BYTES else f"{value:,}" if isinstance(value, int) else value


def _seconds(value: float | None) -> str:
    return "" if value is None else format_value(value, "seconds")


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    # Into a pipe or a file each row is one whole line, however long.
    wide = Console(width=_PIPE_WIDTH, highlight=False, markup=False, emoji=False)
    (out if out.is_terminal else wide).print(table)
