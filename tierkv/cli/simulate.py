"""``tierkv simulate``: how tiers of some size would serve many sessions on some machine. No model runs."""

from datetime import date
from typing import TYPE_CHECKING, Annotated

import typer

from tierkv.cli import options
from tierkv.cli.console import BadInput, print_json, reserve_stdout
from tierkv.cli.progress import Progress
from tierkv.cli.simulate_ask import BLOCK_SIZES, PRESET, facts_of, job_of, read_ask
from tierkv.eviction import POLICIES
from tierkv.layout import DTYPE_BYTES
from tierkv.tier import Tier
from tierkv.traces import PRESETS, TraceError

if TYPE_CHECKING:
    from tierkv.simulate_outcome import Outcome
    from tierkv.simulate_sweep import Job

EPILOG = """[bold]Examples[/bold]

tierkv simulate --profile h100 --model llama-3.1-8b --sessions 200 --turns 20

tierkv simulate conversation_trace.jsonl --profile a100 --model llama-3.1-8b --host 256GiB --disk 2TiB --json

tierkv simulate --profile h100 --model llama-3.1-8b --sessions 100 --sweep host=64GiB..1TiB --report sweep.html

tierkv simulate turns.csv --profile rtx4090 --model qwen3-8b --sweep policy=lru,s3fifo,cost --sweep disk=0,1TiB
"""


def simulate(
    trace: Annotated[
        str | None,
        typer.Argument(
            metavar="TRACE",
            show_default=False,
            help="Requests: .csv with timestamp_seconds,session,input_tokens,output_tokens, or JSON lines in the form of "
            "Mooncake's traces. Without it, sessions are made up.",
        ),
    ] = None,
    profile: Annotated[
        str,
        typer.Option(metavar="NAME|FILE", help="The machine: a100, h100, h200, laptop, rtx4090, or a .toml of yours."),
    ] = "h100",
    model: Annotated[
        str, typer.Option(metavar="NAME|PATH", help="A well-known model, a config.json, or the id of a hub model.")
    ] = "llama-3.1-8b",
    sessions: Annotated[int | None, typer.Option(min=1, max=1_000_000, help="Made-up sessions in all.")] = None,
    turns: Annotated[int | None, typer.Option(min=1, max=10_000, help="Turns of a session, in the median.")] = None,
    preset: Annotated[
        str | None, typer.Option(help=f"What sessions are like: {', '.join(PRESETS)}. Default: {PRESET}.")
    ] = None,
    clients: Annotated[int | None, typer.Option(min=1, max=1_000_000, help="Sessions that go on at a time.")] = None,
    batch: Annotated[int, typer.Option(min=1, max=4096, help="Sequences that run at a time, at most.")] = 32,
    device: Annotated[
        str | None, typer.Option(metavar="SIZE", help="KV on the device. Default: its memory less weights and 10%.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(metavar="SIZE", help="KV in host memory. Default: all that the machine has.")
    ] = None,
    disk: Annotated[
        str | None, typer.Option(metavar="SIZE", help="KV on disk, half of it for prefixes. Default: the whole disk.")
    ] = None,
    block_size: Annotated[str, typer.Option(help=f"Tokens in a block: {', '.join(BLOCK_SIZES)}.")] = "512",
    policy: Annotated[str, typer.Option(help=f"The rule of eviction: {', '.join(POLICIES)}.")] = "lru",
    dtype: Annotated[str, typer.Option(help=f"Of the KV: one of {', '.join(DTYPE_BYTES)}.")] = "bfloat16",
    seed: Annotated[int | None, typer.Option(min=0, help="Of made-up sessions. Default: 0.")] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=A..B/N",
            help="Simulate N points (5) from A to B, evenly spaced in ratio, or a list KEY=A,B,C. Keys: device, host, disk, batch, "
            "clients, policy. Once or twice.",
        ),
    ] = None,
    report: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="Also write a page with tables and charts.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Simulate an engine that serves many sessions: hit ratios, latencies, traffic. No model runs.

    The decisions are those of the engine's own code, block by block; only time is virtual, from the figures of a hardware
    profile. Made-up sessions go on in a closed loop: a client sends its next turn some time after the last answer.
    """
    with reserve_stdout(as_json):
        ask = read_ask(
            trace, profile, model, preset, {"sessions": sessions, "turns": turns, "clients": clients}, batch,
            {Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk}, block_size, policy, dtype, seed,
        )  # fmt: skip
        from tierkv.simulate_sweep import parse_sweep, points_of

        sweeps = [parse_sweep(text) for text in sweep or []]
        points = points_of(sweeps)
        if ask.trace is not None and any(one.key == "clients" for one in sweeps):
            raise BadInput("--sweep clients: a trace says itself when requests come; leave it out")
        jobs = [job_of(ask, point) for point in points]
        if report is not None:
            from tierkv.page import Page

            Page.check_writable(report)
        outcomes = _run(jobs)
        result = facts_of(ask)
        if sweeps:
            result["sweep"] = [{"key": one.key, "values": list(one.values)} for one in sweeps]
            result["points"] = [{**point, **outcome.record()} for point, outcome in zip(points, outcomes, strict=True)]
        else:
            result |= outcomes[0].record()
        result["command"] = options.command_line()
        if report is not None:
            from tierkv.cli.simulate_report import write_report

            write_report(report, result, date.today())
    if as_json:
        print_json(result)
    else:
        from tierkv.cli.simulate_show import print_result

        print_result(result)


def _run(jobs: "list[Job]") -> "list[Outcome]":
    """Simulate every job.

    Raises:
        BadInput: the trace has a line that cannot be used, or no request at all.
    """
    from tierkv.simulate_sweep import run_jobs

    progress, first = Progress(), jobs[0]
    try:
        source = first.source()
        if source.next_seconds() is None:
            raise BadInput(f"{first.trace}: there is no request in it; give a trace with some")
        if len(jobs) > 1:
            with progress.stage("simulate", f"simulating {len(jobs)} points", len(jobs)) as stage:
                return run_jobs(jobs, stage.advance)
        with progress.stage("simulate", "simulating", source.expected) as stage:
            return [first.run(stage.advance)]
    except TraceError as error:
        raise BadInput(str(error)) from None
    except OSError as error:
        if first.trace is None:
            raise
        raise BadInput(f"{first.trace}: {error.strerror}; give a trace that can be read") from None
