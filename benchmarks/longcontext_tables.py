"""The tables of a long-context run's page: what each cache came to at each length, tierkv's tiers, and its wires."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tierkv.benchmarks.longcontext_rows import Row
from tierkv.charts import Number
from tierkv.charts_data import Cell
from tierkv.charts_units import Format, format_tokens
from tierkv.page import Page

# Tables of eight columns at most: more would be broken letter by letter on paper, and out of sight on a screen.
_SPEED: Final[Mapping[str, tuple[str, Format]]] = {
    "ttft_seconds": ("first token", "seconds"),
    "tokens_per_second": ("tokens/s", "number"),
    "inter_token_p50_seconds": ("token p50", "seconds"),
    "inter_token_p99_seconds": ("token p99", "seconds"),
    "stall_seconds": ("waited", "seconds"),
}
_MEMORY: Final[Mapping[str, tuple[str, Format]]] = {
    "kv_in_memory_bytes": ("KV in memory", "bytes"),
    "peak_rss_bytes": ("resident", "bytes"),
}
_WIRE: Final[Mapping[str, tuple[str, Format]]] = {
    "bytes": ("moved", "bytes"),
    "seconds": ("at work", "seconds"),
    "bytes_per_second": ("a second", "bytes"),
    "machine_bytes_per_second": ("machine, a second", "bytes"),
    "share": ("share", "percent"),
}
_ABOUT_WIRES: Final = (
    "All rows of a length together. A wire is at work while at least one copy of it runs. The machine's rate is that of one "
    "plain, large copy of the same kind, measured when the run began: from memory to memory; into a file, without waiting "
    "for the medium; out of a file in the page cache. What goes to the disk is over when tierkv's write queue has taken it, so its "
    "share can exceed 100%. tierkv copies small pieces, checks what it reads from the disk, and shares the cores with "
    "computing where the device is a CPU."
)


def add_tables(page: Page, cells: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> None:
    """Add what there is to a page.

    Args:
        page: to which sections are added.
        cells: of ``longcontext_summary.cells``.
        rows: of the run.
    """
    page.section("All figures")
    heads = ("cache", "tokens", "rows", "errors", "score", "agreement", *(head for head, _ in _MEMORY.values()))
    shares = ("score", "agreement")
    table = [
        (*_name(cell), cell["rows"], cell["errors"], *(_number(cell[share], "percent") for share in shares),
         *_medians(cell, _MEMORY))
        for cell in cells
    ]  # fmt: skip
    page.table(heads, table, caption="Answers: means. Memory: medians.")
    heads = ("cache", "tokens", *(head for head, _ in _SPEED.values()))
    page.table(heads, [(*_name(cell), *_medians(cell, _SPEED)) for cell in cells], caption="Speed: medians.")
    _tiers(page, rows)
    _wires(page, cells)


def _tiers(page: Page, rows: Sequence[Row]) -> None:
    some = [row for row in rows if row["moved_bytes"] is not None and row["sample"] == 0]
    if not some:
        return
    reused = any(row["prefix_tokens"] for row in some)
    table = [
        (*_name(row), row["task"], row["read_path"], row["block_size"],
         *(Number(row["tier_peak_bytes"][tier], "bytes") for tier in ("device", "host", "disk")),
         *([row["prefix_tokens"]] if reused else ()))
        for row in some
    ]  # fmt: skip
    heads = ("cache", "tokens", "task", "reads", "block", "device", "host", "disk", *(["reused"] if reused else ()))
    page.table(heads, table, caption="tierkv's tiers at their fullest, first samples.")


def _wires(page: Page, cells: Sequence[Mapping[str, Any]]) -> None:
    table = [
        (*_name(cell), name.replace("_", " "), *(_number(wire[key], kind) for key, (_, kind) in _WIRE.items()))
        for cell in cells
        for name, wire in cell["wires"].items()
        if wire["bytes"]
    ]
    if table:
        page.section("Wires", _ABOUT_WIRES)
        page.table(("cache", "tokens", "wire", *(head for head, _ in _WIRE.values())), table, caption="tierkv's wires.")


def _name(one: Mapping[str, Any]) -> tuple[str, str]:
    return one["cache"], format_tokens(one["length"])


def _medians(cell: Mapping[str, Any], wanted: Mapping[str, tuple[str, Format]]) -> list[Cell]:
    return [_number(cell[key] and cell[key].median, kind) for key, (_, kind) in wanted.items()]


def _number(value: float | None, kind: Format) -> Cell:
    return None if value is None else Number(value, kind)
