"""``tierkv tune``: measure this machine with a model and write the configuration that suits both."""

import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierkv.cli import options
from tierkv.cli.console import BadInput, check_savable, out, print_json, reserve_stdout, save_text
from tierkv.cli.process import nothing_to_clean_up
from tierkv.cli.progress import Progress
from tierkv.config import CacheConfig, load_config
from tierkv.config_toml import as_toml
from tierkv.errors import TierKVError
from tierkv.fit import check_fitting
from tierkv.page import Page
from tierkv.sizes import format_bytes, free_memory, show

if TYPE_CHECKING:
    from tierkv.tune import Tuned, Tuner

DTYPES = ("auto", "float32", "bfloat16", "float16")
QUICK_CONTEXT = 3072
FULL_CONTEXT = 8192
LEAST_CONTEXT = 512
COPIES = 12
"""Caches of the whole context that are there at once while they take turns, at most."""

EPILOG = """[bold]Examples[/bold]

tierkv tune --quick --out tierkv.toml

tierkv tune --model ./my-model --context 16000 --sessions 8 --disk-path /mnt/ssd --verify

tierkv tune --config tierkv.toml --out better.toml --verify --json
"""


def tune(
    model: Annotated[
        str, typer.Option(help="smollm2, or any model that [bold]tierkv generate[/bold] takes.")
    ] = "smollm2",
    context: Annotated[
        int | None,
        typer.Option(
            min=LEAST_CONTEXT,
            help=f"Tokens of a sequence. Default: {FULL_CONTEXT:,}, {QUICK_CONTEXT:,} with --quick; the model's limit if less.",
        ),
    ] = None,
    sessions: Annotated[int, typer.Option(min=1, max=100_000, help="Sequences whose KV is to be kept.")] = 1,
    config: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The tierkv.toml to start from. Default: $TIERKV_CONFIG, or the defaults."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, or auto: as stored (float32 for GGUF).")
    ] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto: a GPU where there is one.")] = "auto",
    disk_path: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="The disk that is meant. Default: disk.path of the configuration."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer points and repeats: under three minutes on two cores.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run a short workload with the start and with what was found, and compare.")
    ] = False,
    target: Annotated[
        str | None, typer.Option("--out", metavar="FILE", help="Where the tierkv.toml goes. Default: standard output.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            "--profile-out",
            metavar="FILE",
            help="Also write the hardware profile of this machine, for tierkv plan and simulate.",
        ),
    ] = None,
    report: Annotated[
        str | None, typer.Option(metavar="FILE", help="Also write a page with tables and charts, one HTML file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure this machine with a model and write a tierkv.toml in which every value says why it is what it is.

    Decoded tokens, prefills and restores are timed and a cost model is fitted to them. It proposes block sizes; finalists meet
    on the machine, and another value is chosen only where it is clearly better. Nothing of the model's own text is used or kept:
    K and V are synthetic.
    """
    options.one_of(dtype, DTYPES, "--dtype")
    _check_targets({"--out": target, "--profile-out": profile, "--report": report})
    check_fitting()
    check_savable(target, "--out")
    check_savable(profile, "--profile-out")
    if report is not None:
        Page.check_writable(report)
    start = load_config(config)
    if disk_path is not None:
        start = start.replace({"disk.path": disk_path}, "--disk-path")
    with reserve_stdout(as_json or target is None):
        result, text, machine_text = _run(
            model,
            start,
            context,
            sessions,
            dtype,
            device,
            quick=quick,
            verify=verify,
            report=report,
            disk_option="disk.path" if disk_path is None else "--disk-path",
        )
    if target is not None:
        save_text(target, text)
    if profile is not None:
        save_text(profile, machine_text)
    if as_json:
        print_json({**result, "out": target, "command": options.command_line()})
    elif target is None:
        out.print(text, soft_wrap=True, end="")
    else:
        _print(result, target)


def _run(
    source: str,
    start: CacheConfig,
    context: int | None,
    sessions: int,
    dtype: str,
    device: str,
    *,
    quick: bool,
    verify: bool,
    report: str | None,
    disk_option: str,
) -> tuple[dict[str, Any], str, str]:
    progress = Progress()
    with progress.stage("load", f"loading {source}") as stage:
        with nothing_to_clean_up():
            from tierkv import tune as tuning
            from tierkv import tune_profile
            from tierkv.benchmarks import filled, machine
            from tierkv.integrations.hf_load import load_model
        model, _ = load_model(source, dtype, progress=stage.say, device=device)
    goal = tuning.Goal(_context(model, context, quick=quick), sessions)
    _check_memory(goal.context * filled.token_bytes(model), model)
    with options.scratch_folder(str(start.disk.path.expanduser()), disk_option) as folder:
        with progress.stage("tune", "measuring and choosing", tuning.Tuner.steps) as stage:
            tuner = tuning.Tuner(model, start, goal, tuning.QUICK if quick else tuning.FULL, folder, stage.say)
            tuned = tuner.run(stage.advance)
        rows = None
        if verify:
            with progress.stage("verify", "running the start and what was found"):
                rows = tuner.verify(tuned)
        file_system = machine.file_system(folder)
        size = int(tuned.config.block_size)
        subject = tune_profile.Subject(
            _name(source), size, size * filled.token_bytes(model),
            sum(one.numel() for one in model.parameters()), tuned.write_bytes_per_second, folder,
        )  # fmt: skip
        profile = tune_profile.profile_toml(model, tuned.fit, subject)
    result = {
        **_found(tuner, tuned, rows),
        "goal": {"context": goal.context, "sessions": goal.sessions},
        "model": source,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "quick": quick,
        "machine": machine.description(),
        "file_system": file_system,
        "seconds": progress.seconds,
    }
    if report is not None:
        from tierkv.cli.tune_report import write_report

        today = datetime.datetime.now(tz=datetime.UTC).date()
        write_report(report, result, tuned.fit, filled.token_bytes(model), today)
    return result, as_toml(tuned.config, tuned.reasons), profile


def _found(tuner: "Tuner", tuned: "Tuned", rows: list[dict[str, Any]] | None) -> dict[str, Any]:
    from tierkv.benchmarks.predict import describe

    predicted = {
        name: {what: round(seconds, 6) for what, seconds in some.items()}
        for name, some in tuner.predicted(tuned).items()
    }
    return {
        "config": {key: _plain(tuned.config.value(key)) for key in tuned.reasons},
        "reasons": tuned.reasons,
        "predicted": predicted,
        "verified": rows,
        "contests": tuned.contests,
        "costs": describe(tuned.fit),
        "fit_errors": {kind: {"median": one.median, "worst": one.worst} for kind, one in tuned.fit.errors.items()},
        "raw_read_bytes_per_second": round(tuned.fit.raw_bytes_per_second),
    }


def _check_targets(targets: dict[str, str | None]) -> None:
    seen: dict[Path, str] = {}
    for option, target in targets.items():
        if target is not None and (other := seen.setdefault(Path(target).resolve(), option)) != option:
            raise BadInput(f"{other} and {option} are one file, {target}; give each its own")


def _name(source: str) -> str:
    """Return the name that tierkv plan knows a model by, so that what was measured is found again."""
    from tierkv.architecture import find_architecture

    try:
        return find_architecture(source).name
    except TierKVError:
        return source


def _context(model: Any, asked: int | None, *, quick: bool) -> int:
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if asked is None:
        return max(LEAST_CONTEXT, min(QUICK_CONTEXT if quick else FULL_CONTEXT, limit or FULL_CONTEXT))
    if limit and asked > limit:
        raise BadInput(
            f"--context {asked:,} is more than the {limit:,} tokens that this model was made for; give at most that"
        )
    return asked


def _check_memory(kv_bytes: int, model: Any) -> None:
    needed = COPIES * kv_bytes
    if model.device.type == "cpu" and needed > free_memory():
        raise BadInput(
            f"measuring needs about {format_bytes(needed)} of memory and {format_bytes(free_memory())} is free; give a shorter "
            f"--context"
        )


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)


def _print(result: dict[str, Any], target: str) -> None:
    from rich.table import Table

    from tierkv.cli.tables import pairs_table

    out.print(pairs_table({key: show(value) for key, value in result["config"].items()}))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "start, predicted", "tuned, predicted", "start, measured", "tuned, measured"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    measured = {row["what"]: row for row in result["verified"] or ()}
    for what, seconds in result["predicted"]["start"].items():
        row = measured.get(what)
        found = [row[name]["measured_seconds"] if row else None for name in ("start", "tuned")]
        times = (seconds, result["predicted"]["tuned"][what], *found)
        table.add_row(what, *("" if one is None else f"{1e3 * one:,.1f} ms" for one in times))
    out.print()
    out.print(table)
    errors = ", ".join(f"{kind} {one['median']:.0%}" for kind, one in result["fit_errors"].items())
    out.print(f"\nmedian error of the fitted points: {errors}", style="dim", soft_wrap=True)
    out.print(
        f"written: {Path(target)}; every value says why. Try it: tierkv generate --config {target} …", soft_wrap=True
    )
