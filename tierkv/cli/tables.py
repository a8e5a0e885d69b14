"""Readable tables of what ``engine.stats()`` says; every command that ran an engine prints the same ones."""

from collections.abc import Mapping

from rich.table import Table

from tierkv.metrics import Stats
from tierkv.sizes import format_bytes


def tier_table(stats: Stats) -> Table:
    """Return one line a tier: its budget, what it took of it, and the blocks that lie in it."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tier")
    for name in ("budget", "in use", "peak", "blocks", "copies"):
        table.add_column(name, justify="right")
    for name, tier in stats.tiers.items():
        if not tier.capacity_bytes:
            table.add_row(name, "off", "", "", "", "")
            continue
        sizes = (tier.capacity_bytes, tier.allocated_bytes, tier.peak_bytes)
        table.add_row(name, *map(format_bytes, sizes), f"{tier.blocks:,}", f"{tier.copies:,}")
    return table


def wire_table(moved_bytes: Mapping[str, int]) -> Table:
    """Return one line a wire that carried something: the bytes that it carried."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("wire")
    table.add_column("moved", justify="right")
    for wire, num_bytes in moved_bytes.items():
        if num_bytes:
            table.add_row(wire.replace("_to_", " → "), format_bytes(num_bytes))
    if not table.row_count:
        table.add_row("all", "nothing")
    return table


def pairs_table(pairs: Mapping[str, str]) -> Table:
    """Return a table of names and what they are."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("name", style="dim", no_wrap=True)
    table.add_column("value", overflow="fold")
    for name, value in pairs.items():
        table.add_row(name, value)
    return table
