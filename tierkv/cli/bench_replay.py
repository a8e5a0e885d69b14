"""``tierkv bench replay``: how often each eviction rule would have found what a trace asks for."""

import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import tierkv
from tierkv.cli import options
from tierkv.cli.console import BadInput, check_savable, out, print_json, reserve_stdout, save_json
from tierkv.cli.process import nothing_to_clean_up
from tierkv.cli.progress import Progress
from tierkv.eviction import POLICIES
from tierkv.sizes import format_bytes
from tierkv.traces import BLOCK_TOKENS, PRESETS, Request, TraceError, generate, read_trace

if TYPE_CHECKING:
    from tierkv.benchmarks.replay import Trace

OPTIMUM = "belady"
KINDS = (*POLICIES, OPTIMUM)

EPILOG = """[bold]Examples[/bold]

tierkv bench replay

tierkv bench replay --preset agent,chat,hicache --sessions 300 --capacities 2%,10%

tierkv bench replay conversation_trace.jsonl --policies lru,belady --json
"""


@dataclass(frozen=True)
class _Source:
    """Where requests come from."""

    name: str
    verb: str
    requests: Iterator[Request]
    facts: dict[str, Any]


def replay(
    trace: Annotated[
        str | None,
        typer.Argument(
            metavar="TRACE.jsonl",
            show_default=False,
            help="Requests in the form of Mooncake's traces, one JSON object a line. Without it, a preset is made up.",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="P,P",
            help=f"Of {', '.join(PRESETS)}: sessions of several turns after published statistics. Default: chat.",
        ),
    ] = None,
    sessions: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Sessions of a preset. Default: the preset's own number.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of a preset's random numbers. Default: 0.")] = None,
    capacities: Annotated[
        str, typer.Option(metavar="%,%", help="Room of the store, as shares of all different blocks of the trace.")
    ] = "5%,10%,25%",
    policies: Annotated[
        str, typer.Option(metavar="P,P", help=f"Of {', '.join(KINDS)}; the last one knows the future.")
    ] = ",".join(KINDS),
    save: Annotated[str | None, typer.Option(metavar="FILE", help="Also write the JSON record to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Replay a trace against the eviction rules and count what each of them finds again. No model runs.

    A store of limited size gives each prompt its leading full blocks and takes in the others, evicting by the rules of
    the setting prefix.eviction. [bold]belady[/bold] knows the future: no rule finds more. What a store without limits
    finds is the ceiling.
    """
    rules = options.known(policies, KINDS, "--policies")
    shares = [_share(part) for part in options.parts(capacities)]
    sources = _sources(trace, preset, sessions, seed)
    check_savable(save, "--save")
    if save is not None and trace is not None and Path(save).resolve() == Path(trace).resolve():
        raise BadInput(f"--save {save} is the trace itself; give another file")
    with reserve_stdout(as_json):
        result = _run(sources, rules, shares)
    if save is not None:
        save_json(save, result)
    if as_json:
        print_json(result)
    else:
        _print(result)


def _sources(trace: str | None, preset: str | None, sessions: int | None, seed: int | None) -> list[_Source]:
    if trace is not None:
        for name, value in {"--preset": preset, "--sessions": sessions, "--seed": seed}.items():
            if value is not None:
                raise BadInput(f"{name} and a trace exclude each other: leave one of them out")
        try:
            trace.encode()
        except UnicodeEncodeError:
            raise BadInput(f"{trace!a}: the name of the trace is not UTF-8; give it another") from None
        return [_Source(trace, "reading", read_trace(trace), {"file": trace})]
    sources = []
    for name in options.known(preset if preset is not None else "chat", tuple(PRESETS), "--preset"):
        workload = PRESETS[name] if sessions is None else replace(PRESETS[name], sessions=sessions)
        facts = {"preset": name, "seed": seed or 0, "workload": asdict(workload)}
        sources.append(_Source(name, "making up", generate(workload, seed or 0), facts))
    return sources


def _run(sources: list[_Source], rules: list[str], shares: list[Decimal]) -> dict[str, Any]:
    progress = Progress()
    with nothing_to_clean_up():
        from tierkv.benchmarks import replay as measured
    result: dict[str, Any] = {
        "kind": "simulated: blocks are counted, nothing is computed or timed",
        "versions": {"tierkv": tierkv.__version__, "python": platform.python_version()},
        "block_tokens": BLOCK_TOKENS,
        "block_bytes": measured.BLOCK_BYTES,
        "traces": [],
        "rows": [],
    }
    for source in sources:
        with progress.stage(f"trace-{source.name}", f"{source.verb} {source.name}"):
            trace = _read(source)
        result["traces"].append({"trace": source.name, **source.facts, **trace.facts()})
        total = len(trace.requests) * len(rules) * len(shares)
        with progress.stage(f"replay-{source.name}", f"replaying {source.name}", total) as stage:
            for share in shares:
                capacity = int(trace.unique * measured.BLOCK_BYTES * share / 100)
                for rule in rules:
                    outcome = measured.replay(trace, rule, capacity, stage.advance)
                    result["rows"].append({"trace": source.name, "capacity_percent": float(share), **outcome.row()})
    result["seconds"] = progress.seconds
    result["command"] = options.command_line()
    return result


def _read(source: _Source) -> "Trace":
    """Read a trace to its end.

    Raises:
        BadInput: it cannot be read, or there is nothing in it.
    """
    from tierkv.benchmarks.replay import compile_trace

    try:
        trace = compile_trace(source.requests)
    except TraceError as error:
        raise BadInput(str(error)) from None
    except OSError as error:
        raise BadInput(f"{source.name}: {error.strerror}; give a trace that can be read") from None
    if not trace.unique:
        raise BadInput(f"{source.name}: no request has a full block of {BLOCK_TOKENS} tokens; give a trace with some")
    return trace


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table

    for trace in result["traces"]:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("capacity", "room", "policy", "blocks", "tokens", "compute", "evicted"):
            table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
        last = None
        for row in result["rows"]:
            if row["trace"] == trace["trace"]:
                percent = row["capacity_percent"]
                head = ("", "") if percent == last else (f"{percent:g}%", format_bytes(row["capacity_bytes"]))
                ratios = (f"{row[f'{name}_hit_ratio']:.1%}" for name in ("block", "token", "compute"))
                table.add_row(*head, row["policy"], *ratios, f"{row['evictions']:,}")
                last = percent
        out.print(
            f"{trace['trace']}: {trace['requests']:,} requests ask for {trace['block_lookups']:,} blocks, "
            f"{trace['unique_blocks']:,} different ones; ceiling {trace['ceiling']:.1%} of blocks",
            soft_wrap=True,
        )
        out.print(table)
        out.print()
    out.print(
        f"simulated; found again: of full blocks of {BLOCK_TOKENS} tokens, of all tokens, of what computing the blocks costs",
        style="dim",
        soft_wrap=True,
    )


def _share(part: str) -> Decimal:
    try:
        share = Decimal(part.removesuffix("%")) if part.endswith("%") and part.isascii() else Decimal(0)
    except InvalidOperation:
        share = Decimal(0)
    if not (share.is_finite() and Decimal("0.01") <= share <= 100):
        raise BadInput(f"--capacities: {part!r} is not a share of the trace (legal: from 0.01% to 100%, as in 5%,10%)")
    return share
