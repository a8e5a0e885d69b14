"""``tierkv bench scenarios``: what paging and tiers come to on the kinds of load that they are for."""

from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tierkv.benchmarks.scenarios_mix import FULL, QUICK
from tierkv.cli import bench_scenarios_show, options
from tierkv.cli.bench_sessions import DTYPES, SPARE_BYTES, document_text
from tierkv.cli.console import BadInput, Failed, check_savable, print_json, reserve_stdout, save_json
from tierkv.cli.process import nothing_to_clean_up
from tierkv.cli.progress import Progress
from tierkv.sizes import format_bytes, free_memory

if TYPE_CHECKING:
    from tierkv.benchmarks.scenarios import Load
    from tierkv.benchmarks.scenarios_mix import Plan

MIXED, DECODE, FRAGMENTATION = "mixed_load", "decode", "fragmentation"
PARTS: Final = (*FULL.scenarios, MIXED, DECODE, FRAGMENTATION)
ROOM: Final = 32
"""Tokens behind a past at which one is timed."""

EPILOG = """[bold]Examples[/bold]

tierkv bench scenarios

tierkv bench scenarios --quick --json

tierkv bench scenarios --only multi_turn,shared_prefix --save scenarios.json

[bold]What the table says[/bold]

held: conversations that the layout holds on one device budget, each answering within twice the time of the paged layout;
waste: the share of their bytes in which there is no token; round: seconds until every conversation of the scenario had its
turn, where those that are not held compute their prompts again.
"""


def scenarios(
    model: Annotated[
        str, typer.Option(help="smollm2, or any model that [bold]tierkv generate[/bold] takes.")
    ] = "smollm2",
    dtype: Annotated[
        str, typer.Option(help=f"Of {', '.join(DTYPES)}. In float32 every token must be the stock cache's.")
    ] = "float32",
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer and shorter conversations: shows that all works, in two minutes.")
    ] = False,
    only: Annotated[
        str | None, typer.Option(metavar="NAME,NAME", help=f"Measure only these, of {', '.join(PARTS)}. Default: all.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens that the contiguous layout reserves for each conversation of a scenario; the device budget is what two "
            "such reservations take. Default: 6,144, or 1,088 with --quick.",
        ),
    ] = None,
    disk_path: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Where the disk tier goes. Default: a temporary folder.")
    ] = None,
    save: Annotated[str | None, typer.Option(metavar="FILE", help="Also write the JSON record to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Measure what blocks and tiers gain on five kinds of conversations, and what a KV cache gains at all.

    Short chats, long documents, many conversations at once, conversations of several turns, and a shared system prompt, each
    in three layouts on one device budget: [bold]contiguous[/bold] reserves the longest context for each conversation,
    [bold]paged[/bold] is tierkv with a device tier only, [bold]tiered[/bold] has host memory and disk below it. Then the mixed
    load of [bold]tierkv bench sessions[/bold], the time of a token against its context with and without a cache, and whether a
    long sequence finds a place among others.

    Every answer is compared with the stock cache's; the exit code is 1 if one differs in float32. Some ten minutes on two
    cores.
    """
    options.one_of(dtype, DTYPES, "--dtype")
    parts = _known(only) if only is not None else list(PARTS)
    check_savable(save, "--save")
    with reserve_stdout(as_json):
        result = _run(model, dtype, parts, context, disk_path, quick=quick)
    result["command"] = options.command_line()
    if save is not None:
        save_json(save, result)
    if as_json:
        print_json(result)
    else:
        bench_scenarios_show.show(result)
    if dtype == "float32" and not result["tokens_equal"]:
        raise Failed("answers differ from the stock cache's; the record's layouts say which (unequal_answers)")
    if not result["intact"]:
        raise Failed("a sequence was not read back as it was written; the record's fragmentation says which (intact)")


def _known(only: str) -> list[str]:
    """Return the parts that were asked for, in the order in which they run."""
    asked = options.parts(only)
    for name in asked:
        if name not in PARTS:
            near = get_close_matches(name, PARTS, 2, 0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise BadInput(f"--only: {name!r} is not known{hint} (legal: {', '.join(PARTS)})")
    return [name for name in PARTS if name in asked]


def _run(
    source: str, dtype: str, parts: list[str], context: int | None, disk_path: str | None, *, quick: bool
) -> dict[str, Any]:
    """Measure what was asked for; return the record."""
    progress = Progress()
    with nothing_to_clean_up():
        from tierkv.benchmarks import machine, scenarios_decode, scenarios_fragmentation
        from tierkv.benchmarks import scenarios as measured
        from tierkv.benchmarks import scenarios_mixed as mixed
        from tierkv.benchmarks.filled import layout_of
        from tierkv.benchmarks.scenarios_record import intact, summary
        from tierkv.integrations.hf_load import load_model

    plan = QUICK if quick else FULL
    plan = replace(plan, scenarios={name: one for name, one in plan.scenarios.items() if name in parts})
    if context is not None:
        plan = replace(plan, context=context)
    _check_context(plan)
    with progress.stage("load", f"loading {source}") as stage:
        model, tokenizer = load_model(source, dtype, progress=stage.say)
    plan = _within_limit(plan, parts, model.config)
    layout = layout_of(model)
    text = document_text(tokenizer)
    found: dict[str, Any] = {}
    load: Load | None = None
    line: dict[str, Any] | None = None
    pieces: dict[str, Any] | None = None
    whole: dict[str, Any] | None = None
    with options.scratch_folder(disk_path) as folder:
        every = {
            name: measured.loads(plan, one, text, layout.token_bytes, folder) for name, one in plan.scenarios.items()
        }
        if MIXED in parts:
            load = mixed.mixed_load(plan, text, layout.token_bytes, folder)
        loads = [one for by_turn in every.values() for one in by_turn.values()] + ([load] if load else [])
        decoded = sum(plan.decode_contexts) if DECODE in parts else 0
        pools = scenarios_fragmentation.needed_bytes(layout, plan.fragments) if FRAGMENTATION in parts else 0
        _check_memory(loads, decoded, pools, layout.token_bytes)
        for name, by_turn in every.items():
            one = plan.scenarios[name]
            total = sum(load.steps for load in by_turn.values())
            with progress.stage(name, f"{one.title}, {one.count} conversations", total) as stage:
                found[name] = measured.scenario_record(model, one, by_turn, layout, stage.advance, stage.say)
        if load is not None:
            with progress.stage(MIXED, f"mixed load, {len(load.sessions)} conversations", load.steps) as stage:
                whole = mixed.mixed_record(model, plan, load, layout, stage.advance, stage.say)
        if DECODE in parts:
            total = len(plan.decode_contexts) + plan.rounds + plan.recompute_rounds
            with progress.stage(DECODE, "timing tokens", total) as stage:
                line = scenarios_decode.with_cache(model, plan.decode_contexts, plan.rounds, folder, stage.advance)
                again = scenarios_decode.without_cache(
                    model, plan.recompute_lengths, plan.recompute_rounds, stage.advance
                )
                again["times_faster_with_cache"] = scenarios_decode.times_faster(line, again)
                line["without_cache"] = again
        if FRAGMENTATION in parts:
            with progress.stage(FRAGMENTATION, "placing a sequence among others"):
                pieces = scenarios_fragmentation.run(layout, plan.fragments)
        file_system = machine.file_system(folder)
    return {
        **summary(found, whole, line, pieces),
        "intact": pieces is None or intact(pieces),
        "quick": quick,
        "parts": parts,
        "context_tokens": plan.context,
        "model": "SmolLM2-135M-Instruct" if source == "smollm2" else model.config.name_or_path or source,
        "dtype": dtype,
        "machine": machine.description(),
        "file_system": file_system,
        "seconds": progress.seconds,
    }


def _check_context(plan: "Plan") -> None:
    if plan.context < plan.least_context:
        longest = max(plan.scenarios, key=lambda name: plan.scenarios[name].context)
        raise BadInput(
            f"--context {plan.context} does not hold a conversation of {longest}, which comes to {plan.least_context:,} tokens; "
            f"give at least {plan.least_context}"
        )


def _within_limit(plan: "Plan", parts: list[str], config: Any) -> "Plan":
    """Return the plan without contexts that are beyond the model's limit.

    Raises:
        BadInput: conversations are, or too few contexts are left.
    """
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return plan
    needs = {name: one.context for name, one in plan.scenarios.items()}
    if MIXED in parts:
        needs[MIXED] = plan.mixed.context
    for name, needed in needs.items():
        if needed > limit:
            fitting = [other for other in parts if needs.get(other, 0) <= limit]
            raise BadInput(
                f"{name} has conversations of up to {needed:,} tokens and the model's limit is {limit:,}; give --quick for shorter "
                f"ones, or --only {','.join(fitting)}"
            )
    if plan.scenarios and plan.context > limit:
        raise BadInput(f"--context {plan.context} is more than the model's limit of {limit:,}; give at most {limit}")
    contexts = tuple(one for one in plan.decode_contexts if one + ROOM <= limit)
    lengths = tuple(one for one in plan.recompute_lengths if one <= limit)
    if DECODE in parts and min(len(contexts), len(lengths)) < 3:
        others = ",".join(name for name in parts if name != DECODE) or FRAGMENTATION
        raise BadInput(
            f"{DECODE} needs three contexts of {plan.decode_contexts[0]:,} tokens or more, and the model's limit is {limit:,}; "
            f"leave it out: --only {others}"
        )
    return replace(plan, decode_contexts=contexts, recompute_lengths=lengths)


def _check_memory(loads: "list[Load]", decoded: int, pools: int, per_token: int) -> None:
    """Refuse what cannot be held in memory: the stock cache's prompts and the tiers of a load, or all contexts at once."""
    needs = [
        sum(len(one.prompt) for one in load.sessions) * per_token + load.budgets.device + load.budgets.host
        for load in loads
    ]
    needed = max([*needs, decoded * per_token * 5 // 4, pools]) + SPARE_BYTES
    if needed > free_memory():
        raise BadInput(
            f"the tiers and the stock cache's prompts need about {format_bytes(needed)} of memory and "
            f"{format_bytes(free_memory())} is free; give --quick, a smaller model or dtype, or fewer parts with --only"
        )
