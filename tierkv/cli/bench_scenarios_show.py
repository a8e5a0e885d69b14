"""The table and the sentences of ``tierkv bench scenarios``."""

from typing import Any

from tierkv.cli.console import out
from tierkv.sizes import format_bytes


def show(record: dict[str, Any]) -> None:
    """Print a record for people."""
    from rich.table import Table

    from tierkv.benchmarks.scenarios_record import headlines

    if record["scenarios"]:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("scenario", "layout", "held", "waste", "bytes", "p90 turn", "round"):
            table.add_column(name, justify="left" if name in ("scenario", "layout") else "right", no_wrap=True)
        for one in record["scenarios"].values():
            _add(table, one)
        out.print(table)
        out.print(
            "round: until every conversation has had its turn; those that are not held compute their prompts again",
            style="dim",
            soft_wrap=True,
        )
        out.print()
        for one in record["scenarios"].values():
            out.print(f"{one['title']}: {one['shows']}", soft_wrap=True)
            if "by_turn_shows" in one:
                out.print(f"  {one['by_turn_shows']}", soft_wrap=True)
        out.print()
    for sentence in headlines(record):
        out.print(sentence, soft_wrap=True)
    out.print(f"\n{_conditions(record)}", style="dim", soft_wrap=True)
    equal = record["tokens_equal"]
    rounding = "; bfloat16 rounds sums of another order otherwise" if record["dtype"] == "bfloat16" else ""
    out.print(f"answers: {'equal to' if equal else 'DIFFER from'} the stock cache's{'' if equal else rounding}")


def _add(table: Any, one: dict[str, Any]) -> None:
    for index, name in enumerate(("contiguous", "paged", "tiered")):
        row = one[name]
        held = f"{row['sessions_held']} of {one['conversations']}"
        table.add_row(
            "" if index else one["title"],
            name,
            held,
            "" if row["waste_fraction"] is None else f"{row['waste_fraction']:.1%}",
            format_bytes(sum(row["kv_bytes"].values())),
            "" if row["p90_turn_seconds"] is None else f"{row['p90_turn_seconds']:.2f} s",
            f"{row['round_seconds']:.1f} s",
        )


def _conditions(record: dict[str, Any]) -> str:
    said = f"{record['model']} in {record['dtype']}"
    if record["scenarios"]:
        one = next(iter(record["scenarios"].values()))
        said += (
            f", device budget {format_bytes(one['budget_bytes']['device'])}, a reservation of {record['context_tokens']:,} tokens "
            f"takes {format_bytes(one['reserved_bytes_per_session'])}"
        )
    if record["mixed_load"]:
        mixed = record["mixed_load"]
        said += (
            f"; mixed load: device budget {format_bytes(mixed['budget_bytes']['device'])}, a reservation takes "
            f"{format_bytes(mixed['reserved_bytes_per_session'])}"
        )
    if record["quick"]:
        said += "; --quick: fewer and shorter conversations than the scenarios are about"
    return said
