"""How the commands of ``tierkv store`` print what they found, for people to read."""

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from tierkv.cli.console import out
from tierkv.cli.store_open import format_age
from tierkv.cli.tables import pairs_table
from tierkv.sizes import format_bytes

_MOST_LINES: Final = 20
"""Damaged records that are named one by one; JSON names all."""
_PIPE_WIDTH: Final = 10_000
_DIGITS: Final = 12
"""Of a digest or key; the commands take any beginning that only one has."""
_TEXTS: Final = {"namespace", "model", "dtype", "last block", "pinned"}
"""Columns that hold no numbers."""


def print_namespaces(result: Mapping[str, Any]) -> None:
    """Print the table of namespaces, and that of chains where they were asked for."""
    if not result["namespaces"]:
        out.print(f"{result['path']} is empty", soft_wrap=True)
        return
    names = ("namespace", "dtype", "block", "blocks", "bytes", "oldest", "newest", "hits", "model")
    rows = [
        (
            one["digest"][:_DIGITS], _text(one["dtype"]), _text(one["block_size"]), f"{one['blocks']:,}",
            format_bytes(one["bytes"]), format_age(one["oldest_seconds"]), format_age(one["newest_seconds"]),
            f"{one['hits']:,}", PurePath(_text(one["model"])).name,
        )
        for one in result["namespaces"]
    ]  # fmt: skip
    _print_table(names, rows)
    if "leaves" not in result:
        return
    out.print()
    columns = ("last block", "namespace", "blocks", "tokens", "bytes", "age", "hits", "pinned")
    leaves = [
        (
            one["key"][:_DIGITS], one["namespace"][:_DIGITS], f"{one['blocks']:,}", f"{one['tokens']:,}",
            format_bytes(one["bytes"]), format_age(one["age_seconds"]), f"{one['hits']:,}", "pinned" if one["pinned"] else "",
        )
        for one in result["leaves"]
    ]  # fmt: skip
    _print_table(columns, leaves)


def _print_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        fold = name == "model"
        table.add_column(name, justify="left" if name in _TEXTS else "right", no_wrap=not fold, overflow="fold")
    for row in rows:
        table.add_row(*row)
    # Into a pipe or a file each row is one whole line, however long.
    (out if out.is_terminal else Console(width=_PIPE_WIDTH, highlight=False, markup=False, emoji=False)).print(table)


def _text(value: object) -> str:
    """Return a value of a manifest, which an imported file may have brought, with nothing that steers a terminal."""
    return "?" if value is None else "".join(c if c.isprintable() else "?" for c in str(value))


def print_stats(result: Mapping[str, Any]) -> None:
    """Print what a store holds and how full it is."""
    room = "; the capacity was lost with the index, the next run sets it anew"
    if result["capacity_bytes"] is not None:
        room = f" of {format_bytes(result['capacity_bytes'])} ({result['fill']:.1%})"
    out.print(
        pairs_table(
            {
                "store": result["path"],
                "blocks": f"{result['blocks']:,} in {result['namespaces']:,} namespaces",
                "KV": format_bytes(result["bytes"]),
                "on disk": f"{format_bytes(result['allocated_bytes'])}{room}",
                "reusable": f"{format_bytes(result['reusable_bytes'])}, which tierkv store gc gives back",
                "index": f"at most {format_bytes(result['index_bytes'])}",
                "eviction": result["eviction"],
                "hits": f"{result['hits']:,}",
                "pinned": f"{result['pinned']:,} blocks",
                "damaged": f"{result['damaged_slots']:,} slots that are not used again until tierkv store gc",
            }
        )
    )


def print_verified(result: Mapping[str, Any]) -> None:
    """Print what a check found, the first damaged records by name."""
    number = f"{result['checked']:,} records checked in {result['seconds']:.1f} s"
    if not result["bad"]:
        out.print(f"{number}: all are whole")
        return
    out.print(f"{number}: {result['bad']:,} are damaged, {result['repaired']:,} of them taken out")
    for one in result["damaged"][:_MOST_LINES]:
        out.print(f"  {one['key'][:_DIGITS]}  {one['reason']}", soft_wrap=True)
    if result["bad"] > _MOST_LINES:
        out.print(f"  and {result['bad'] - _MOST_LINES:,} more, which --json names")
