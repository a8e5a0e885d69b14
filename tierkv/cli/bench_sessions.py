"""``tierkv bench sessions``: how many conversations one device budget holds, in four layouts."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierkv.cli import options
from tierkv.cli.console import BadInput, Failed, check_savable, out, print_json, reserve_stdout, save_json
from tierkv.cli.process import nothing_to_clean_up
from tierkv.cli.progress import Progress
from tierkv.sizes import format_bytes, free_memory

if TYPE_CHECKING:
    from tierkv.benchmarks.sessions import Budgets
    from tierkv.benchmarks.sessions_mix import MixPlan, Session

DTYPES = ("float32", "bfloat16")
RESERVED_SESSIONS = 5
"""The default device budget is what so many conversations reserve in one piece."""
SPARE_BYTES = 2**30
"""Weights, activations and the interpreter, generously."""

EPILOG = """[bold]Examples[/bold]

tierkv bench sessions

tierkv bench sessions --max-sessions 24 --host 512MiB --disk 4GiB --json

tierkv bench sessions --shortest 200 --longest 1200 --system-tokens 400 --threads 3
"""


def sessions(
    model: Annotated[
        str, typer.Option(help="smollm2, or any model that [bold]tierkv generate[/bold] takes.")
    ] = "smollm2",
    dtype: Annotated[
        str, typer.Option(help=f"Of {', '.join(DTYPES)}. In float32 every token must be the stock cache's.")
    ] = "float32",
    device: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help=f"The one device budget, as 512MiB. Default: what {RESERVED_SESSIONS} conversations reserve at their longest.",
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Host memory of the tiered layout. Default: half the device budget."),
    ] = None,
    disk: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Disk of the tiered layout. Default: room for all conversations.")
    ] = None,
    max_sessions: Annotated[int, typer.Option(min=2, max=256, help="Conversations in the mix.")] = 16,
    shortest: Annotated[int, typer.Option(min=1, help="Tokens of a prompt's own, at the least.")] = 500,
    longest: Annotated[
        int, typer.Option(min=2, help="Tokens of a prompt, system prompt included, at the most.")
    ] = 4096,
    system_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of the system prompt that one conversation in five begins with.")
    ] = 1000,
    answer: Annotated[int, typer.Option(min=1, max=1024, help="Tokens of every answer.")] = 16,
    threads: Annotated[
        int,
        typer.Option(
            min=0, max=64, help="At the end, let so many threads generate at once on the tiered layout. 0: none do."
        ),
    ] = 0,
    disk_path: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Where the disk tier goes. Default: a temporary folder.")
    ] = None,
    save: Annotated[str | None, typer.Option(metavar="FILE", help="Also write the JSON record to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Count the conversations that one device budget holds: reserved in one piece, in blocks, shared, and in tiers.

    A fixed mix of conversations (uniform lengths, real text, seed 0) is opened one by one. n are held when all n are
    prefilled and then each completes a turn, one after the other, and the p90 time of a turn stays within twice that of the
    [bold]paged[/bold] layout at its own capacity. Every answer is compared with the stock cache's; the exit code is 1 if one
    differs in float32.

    [bold]contiguous[/bold] reserves the longest context for each. [bold]paged[/bold] is tierkv with a device tier only,
    [bold]shared[/bold] shares equal prefixes as well, [bold]tiered[/bold] has host memory and disk below the same device
    budget. Several minutes on two cores.
    """
    options.one_of(dtype, DTYPES, "--dtype")
    if shortest + system_tokens > longest:
        raise BadInput(
            f"--longest {longest} has no room for a system prompt of {system_tokens} tokens and {shortest} of a prompt's own; "
            f"give at least {shortest + system_tokens}"
        )
    given = {"device": device, "host": host, "disk": disk}
    sizes = {name: None if text is None else options.size_bytes(text, f"--{name}") for name, text in given.items()}
    check_savable(save, "--save")
    lengths = {"shortest": shortest, "longest": longest, "system": system_tokens, "answer": answer}
    with reserve_stdout(as_json):
        result = _run(model, dtype, sizes, {"count": max_sessions, **lengths}, threads, disk_path)
    result["command"] = options.command_line()
    if save is not None:
        save_json(save, result)
    if as_json:
        print_json(result)
    else:
        _print(result)
    if dtype == "float32" and not result["tokens_equal"]:
        raise Failed("answers differ from the stock cache's; the record's layouts say which (unequal_answers)")


def _run(
    source: str,
    dtype: str,
    sizes: dict[str, int | None],
    lengths: dict[str, int],
    threads: int,
    disk_path: str | None,
) -> dict[str, Any]:
    """Measure the four layouts; return the record."""
    progress = Progress()
    with progress.stage("load", f"loading {source}") as stage:
        with nothing_to_clean_up():
            from tierkv.benchmarks import machine, sessions_mix
            from tierkv.benchmarks import sessions as measured
            from tierkv.benchmarks.sessions_outcome import figures
            from tierkv.cli.prompts import check_length
            from tierkv.integrations.hf_load import load_model

        model, tokenizer = load_model(source, dtype, progress=stage.say)
    plan = sessions_mix.MixPlan(**lengths)
    check_length(model.config, plan.context - plan.answer, plan.answer, plan.answer)
    mix = _mix(tokenizer, plan)
    per_token = measured.token_bytes(model)
    reserved = plan.context * per_token
    with options.scratch_folder(disk_path) as folder:
        budgets = _budgets(measured.Budgets, sizes, plan, mix, per_token, folder)
        _check_memory(budgets, mix, per_token)
        measured.check_budgets(model, budgets)
        with progress.stage("stock", "answering with the stock cache", len(mix)) as stage:
            stock = measured.run_references(model, mix, plan.answer, stage.advance)
        found = {"contiguous": measured.contiguous(budgets, reserved, stock)}
        with progress.stage("paged", "filling the device in blocks") as stage:
            found["paged"] = measured.on_device(model, budgets.config("paged"), mix, stock, plan.answer, bound=None)
        paged = found["paged"].p90
        if paged is None:
            raise BadInput(
                f"--device {format_bytes(budgets.device)} does not hold the first conversation of {len(mix[0].prompt):,} tokens: "
                f"{found['paged'].refused}"
            )
        bound = measured.BOUND * paged
        with progress.stage("shared", "filling the device in shared blocks") as stage:
            found["shared"] = measured.on_device(model, budgets.config("shared"), mix, stock, plan.answer, bound=bound)
        first = max(1, found["shared"].held)
        total = first + sum(range(first, len(mix) + 1)) + len(mix) - first
        with progress.stage("tiered", "filling device, host memory and disk", total) as stage:
            found["tiered"] = measured.tiered(
                model, budgets.config("tiered"), mix, stock, plan.answer,
                bound=bound, first=first, threads=threads, advance=stage.advance, say=stage.say,
            )  # fmt: skip
        file_system = machine.file_system(folder)
    return {
        **figures(found),
        "at_least": [name for name, outcome in found.items() if outcome.held == len(mix)],
        "p90_bound_seconds": round(bound, 4),
        "budget_bytes": {"device": budgets.device, "host": budgets.host, "disk": budgets.disk},
        "reserved_bytes_per_session": reserved,
        "tiered_rounds": [
            {"sessions": one.sessions, "p90_turn_seconds": round(one.p90, 4), "held": one.held}
            for one in found["tiered"].rounds
        ],
        "threads": found["tiered"].threads,
        "mix": sessions_mix.describe(plan, mix),
        "how": {
            "contiguous": "tokens and turn times of DynamicCache, whose bytes are counted as if the longest context was reserved",
            "prompts": "computed once by the stock cache; K and V of those that can share nothing are copied into a layout, "
            "the others are prefilled by generate; every conversation is cropped to its prompt after each round",
            "p90": f"of a round, interpolated between its turns; paged: median of {measured.PAGED_ROUNDS} rounds",
        },
        "layouts": {name: outcome.row() for name, outcome in found.items()},
        "model": "SmolLM2-135M-Instruct" if source == "smollm2" else model.config.name_or_path or source,
        "dtype": dtype,
        "machine": machine.description(),
        "file_system": file_system,
        "seconds": progress.seconds,
    }


def document_text(tokenizer: Any) -> list[int]:
    """Return the ids of the text that conversations are made of.

    Raises:
        BadInput: this Python came without it.
    """
    from tierkv.benchmarks.sessions_mix import document_ids

    try:
        return document_ids(tokenizer)
    except ImportError:
        raise BadInput(
            "the conversations are Python's own documentation (pydoc_data.topics), and this Python came without it; install "
            "the full standard library"
        ) from None


def _mix(tokenizer: Any, plan: "MixPlan") -> "list[Session]":
    from tierkv.benchmarks.sessions_mix import make_mix

    text = document_text(tokenizer)
    if len(text) <= plan.system:
        raise BadInput(f"--system-tokens {plan.system}: the text has {len(text):,} tokens; give less than that")
    return make_mix(text, plan)


def _budgets(
    make: "type[Budgets]",
    sizes: dict[str, int | None],
    plan: "MixPlan",
    mix: "list[Session]",
    per_token: int,
    folder: Path,
) -> "Budgets":
    device, host, disk = sizes["device"], sizes["host"], sizes["disk"]
    if device is None:
        device = RESERVED_SESSIONS * plan.context * per_token
    everything = sum(len(one.turn) + plan.answer for one in mix) * per_token
    return make(
        device,
        device // 2 if host is None else host,
        2 * everything + (64 << 20) if disk is None else disk,  # files have pages and bookkeeping of their own
        folder,
    )


def _check_memory(budgets: "Budgets", mix: "list[Session]", per_token: int) -> None:
    stock = sum(len(one.prompt) for one in mix) * per_token
    needed = stock + budgets.device + budgets.host + SPARE_BYTES
    if needed > free_memory():
        raise BadInput(
            f"the tiers and the stock cache's prompts need about {format_bytes(needed)} of memory and "
            f"{format_bytes(free_memory())} is free; choose fewer --max-sessions or a smaller --longest, --device or --host"
        )


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("layout", "held", "p90 turn", "device", "RAM", "disk"):
        table.add_column(name, justify="left" if name == "layout" else "right", no_wrap=True)
    for name, held in result["sessions_held"].items():
        seconds = result["p90_turn_seconds"][name]
        taken = (result[f"{tier}_bytes"][name] for tier in ("device", "ram", "disk"))
        table.add_row(
            name,
            f"{held} or more" if name in result["at_least"] else str(held),
            "" if seconds is None else f"{seconds:.2f} s",
            *(format_bytes(size) if size else "" for size in taken),
        )
    out.print(table)
    out.print(f"\n{_conditions(result)}", style="dim", soft_wrap=True)
    if result["threads"] is not None:
        together = result["threads"]
        out.print(
            f"{together['threads']} threads at once on {together['sessions']} conversations: p90 turn "
            f"{together['p90_turn_seconds']:.2f} s; the first thread ended {together['spread']:.0%} of the time before the last",
            soft_wrap=True,
        )
    rounding = "; bfloat16 rounds sums of another order otherwise" if result["dtype"] == "bfloat16" else ""
    equal = result["tokens_equal"]
    out.print(f"answers: {'equal to' if equal else 'DIFFER from'} the stock cache's{'' if equal else rounding}")


def _conditions(result: dict[str, Any]) -> str:
    mix, budget = result["mix"], result["budget_bytes"]
    return (
        f"{result['model']} in {result['dtype']}, device budget {format_bytes(budget['device'])}; conversations of "
        f"{mix['shortest']:,} to {mix['longest']:,} tokens, uniform, a reservation takes "
        f"{format_bytes(result['reserved_bytes_per_session'])}; sharing saves {format_bytes(result['saved_bytes'])}; held: p90 "
        f"turn within {result['p90_bound_seconds']:.2f} s"
    )
