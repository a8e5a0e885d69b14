"""How ``tierkv top`` shows engines: tables with bars for a terminal, one line an engine for a pipe."""

import time
from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tierkv.cli.store_open import format_age
from tierkv.cli.tables import pairs_table
from tierkv.metrics import Stats, TierStats
from tierkv.sizes import format_bytes
from tierkv.watch import EngineSnapshot, Found, ProcessSnapshot, Rates

RatesByEngine = Mapping[tuple[int, int], Rates]
"""By the numbers of process and engine."""

_BAR_WIDTH = 14
_LONGEST_COMMAND = 60
_NOTHING = "-"


def engines_of(found: Found) -> Iterator[tuple[ProcessSnapshot, EngineSnapshot]]:
    """Yield every engine with its process."""
    return ((process, engine) for process in found.processes for engine in process.engines)


def render(found: Found, rates: RatesByEngine) -> RenderableType:
    """Return a panel for every engine, and a line for every process that does not answer."""
    parts: list[RenderableType] = [
        _panel(process, engine, rates.get((process.pid, engine.id))) for process, engine in engines_of(found)
    ]
    parts += [Text(f"{name}: {why}", style="yellow") for name, why in found.silent.items()]
    return Group(*parts)


def lines(found: Found, rates: RatesByEngine) -> list[str]:
    """Return one line for every engine: time, process, and what it does now."""
    now = time.strftime("%H:%M:%S")
    return [
        f"{now} pid={process.pid} engine={engine.id} model={printable(engine.name)} "
        + _facts(engine.stats, rates.get((process.pid, engine.id)))
        for process, engine in engines_of(found)
    ]


def printable(text: str) -> str:
    """Return what another process sent, with nothing in it that steers a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _panel(process: ProcessSnapshot, engine: EngineSnapshot, rates: Rates | None) -> Panel:
    stats = engine.stats
    title = f"{printable(engine.name)} · pid {process.pid} · engine {engine.id}"
    # Bounded, as a clock may have been set since.
    up = format_age(max(0.0, time.time() - process.started)) if process.started else ""
    subtitle = " · ".join(filter(None, (_shortened(printable(process.command)), f"up {up}" if up else "")))
    body: RenderableType = Text("no answer from this engine", style="yellow")
    if stats is not None:
        body = Group(_tiers(stats), Text(), _wires(stats, rates), Text(), pairs_table(_pairs(stats, rates)))
    return Panel(
        body,
        title=Text(title, style="bold"),
        subtitle=Text(subtitle, style="dim"),
        title_align="left",
        subtitle_align="left",
    )


def _tiers(stats: Stats) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tier", no_wrap=True)
    table.add_column("", width=_BAR_WIDTH)
    for name in ("in use", "budget", "share", "peak", "blocks", "copies"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, tier in stats.tiers.items():
        if not tier.capacity_bytes:
            table.add_row(printable(name), Text("off", style="dim"))
            continue
        sizes = (tier.allocated_bytes, tier.capacity_bytes)
        table.add_row(
            printable(name),
            ProgressBar(total=tier.capacity_bytes, completed=min(sizes), width=_BAR_WIDTH),
            *map(format_bytes, sizes),
            f"{_share(tier):.1%}",
            format_bytes(tier.peak_bytes),
            f"{tier.blocks:,}",
            f"{tier.copies:,}",
        )
    return table


def _wires(stats: Stats, rates: Rates | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("wire")
    table.add_column("now", justify="right", min_width=12)
    table.add_column("in all", justify="right")
    for wire, moved in stats.moved_bytes.items():
        if not moved:
            continue
        now = _NOTHING if rates is None else f"{_bytes(rates.moved_bytes_per_second.get(wire, 0.0))}/s"
        table.add_row(printable(wire).replace("_to_", " → "), now, format_bytes(moved))
    if not table.row_count:
        table.add_row("all", "", "nothing")
    return table


def _pairs(stats: Stats, rates: Rates | None) -> dict[str, str]:
    counters, prefix = stats.counters, stats.prefix
    speed = _NOTHING if rates is None else f"{rates.tokens_per_second:,.1f} tokens/s"
    pairs = {
        "computed": f"{speed}; {counters.tokens:,} tokens in {counters.forwards:,} forwards; caches open: {stats.caches:,}",
        "waits": f"{_stall(stats, rates)} stalled a token, overlap {_ratio(_overlap(stats, rates))}",
        "attention": printable(stats.read_path),
        "prefixes": (
            f"{_ratio(hit_ratio(stats))} of {prefix.prompt_tokens:,} prompt tokens matched: "
            f"{prefix.matched_tokens_memory:,} in memory, {prefix.matched_tokens_disk:,} on disk; "
            f"{prefix.used_tokens:,} not computed; {format_bytes(prefix.kept_bytes)} kept, "
            f"{format_bytes(prefix.saved_bytes)} saved by sharing"
        ),
        "writing": (
            f"{format_bytes(queued_bytes(stats))} queued, {prefix.waiting_blocks:,} blocks wait, "
            f"{prefix.shed_blocks:,} shed"
        ),
        "errors": _errors(stats),
        "note": printable(stats.note),
    }
    return {name: value for name, value in pairs.items() if value}


def _facts(stats: Stats | None, rates: Rates | None) -> str:
    if stats is None:
        return "no answer"
    parts = [f"tokens/s={_NOTHING if rates is None else f'{rates.tokens_per_second:.1f}'}"]
    parts += [f"{name}={_share(tier):.1%}" for name, tier in stats.tiers.items() if tier.capacity_bytes]
    wires = rates.moved_bytes_per_second if rates is not None else {}
    parts += [f"{wire}={_bytes(moved)}/s" for wire, moved in wires.items() if moved]
    parts += [f"stall/token={_stall(stats, rates).replace(' ', '')}", f"overlap={_ratio(_overlap(stats, rates))}"]
    parts += [f"prefix={_ratio(hit_ratio(stats))}", f"queued={format_bytes(queued_bytes(stats))}"]
    if errors := _errors(stats):
        parts.append(f"errors: {errors}")
    return printable(" ".join(parts))


def hit_ratio(stats: Stats) -> float | None:
    """Return the share of prompt tokens that were found, in memory or on disk; None where none was looked up."""
    prefix = stats.prefix
    if not prefix.prompt_tokens:
        return None
    return (prefix.matched_tokens_memory + prefix.matched_tokens_disk) / prefix.prompt_tokens


def queued_bytes(stats: Stats) -> int:
    """Return the bytes of prefixes that wait to be written to the store."""
    store = stats.prefix.store
    queued = store.get("queued_bytes", 0) if isinstance(store, dict) else 0
    return queued if isinstance(queued, int) else 0


def _errors(stats: Stats) -> str:
    """Return what went wrong since the engine was made, empty where nothing did."""
    counters, prefix = stats.counters, stats.prefix
    numbers = {
        "blocks lost": counters.blocks_lost,
        "recomputes": counters.recomputes,
        "refused writes": counters.write_failures,
        "failed restores": prefix.failed_restores,
        "torn forwards": counters.torn_forwards,
    }
    return ", ".join(f"{number:,} {name}" for name, number in numbers.items() if number)


def _stall(stats: Stats, rates: Rates | None) -> str:
    counters = stats.counters
    seconds = counters.stall_seconds / counters.tokens if counters.tokens else None
    if rates is not None:  # what happens now, not the average of all that was
        seconds = rates.stall_seconds_per_token
    return _NOTHING if seconds is None else f"{1e3 * seconds:.2f} ms"


def _overlap(stats: Stats, rates: Rates | None) -> float | None:
    return stats.overlap if rates is None else rates.overlap


def _ratio(share: float | None) -> str:
    return _NOTHING if share is None else f"{share:.1%}"


def _share(tier: TierStats) -> float:
    return tier.allocated_bytes / tier.capacity_bytes


def _bytes(number: float) -> str:
    return format_bytes(max(0, round(number)))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_COMMAND else f"{text[: _LONGEST_COMMAND - 1]}…"
