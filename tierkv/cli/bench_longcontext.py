"""``tierkv bench longcontext``: real tasks at growing length, with several caches, into a folder with a page."""

import re
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tierkv.cli import options
from tierkv.cli.bench import DTYPES
from tierkv.cli.bench_longcontext_show import Watch, finish_the_row, show_result
from tierkv.cli.console import BadInput, Failed, check_savable, print_json, reserve_stdout, save_json
from tierkv.cli.process import nothing_to_clean_up
from tierkv.cli.progress import Progress
from tierkv.config import load_config
from tierkv.errors import ConfigError
from tierkv.page import Page

if TYPE_CHECKING:
    from tierkv.benchmarks.longcontext import Session
    from tierkv.benchmarks.longcontext_settings import Settings

_TOKENS: Final = re.compile(r"(\d{1,7})(k?)", re.ASCII | re.IGNORECASE)
_MOST_TOKENS: Final = 1_000_000
_LISTED: Final = 5

DEFAULTS: Final[dict[str, Any]] = {
    "lengths": "1k,2k,4k,8k",
    "tasks": "needle,niah_multikey,niah_multivalue,variable_tracking,common_words,doc_qa,chat,system_prompt",
    "caches": "dynamic,static,quantized,offloaded,tierkv",
    "samples": 5,
    "max_new_tokens": None,
}
QUICK: Final[dict[str, Any]] = {
    "lengths": "256,512,1k",
    "tasks": "needle,passkey,variable_tracking",
    "caches": "dynamic,static,tierkv",
    "samples": 1,
    "max_new_tokens": 24,
}

EPILOG = """[bold]Examples[/bold]

tierkv bench longcontext --quick --out out

tierkv bench longcontext --lengths 2k,4k,8k --tasks needle,doc_qa --caches dynamic,static,tierkv --samples 10 --out out

tierkv bench longcontext --caches dynamic,tierkv:mine.toml --tasks needle,mine.jsonl --resume --out out --json
"""


def longcontext(
    out: Annotated[
        str,
        typer.Option(
            "--out", metavar="DIR", help="Folder of the rows (rows.jsonl), results.csv, report.html and plots."
        ),
    ],
    model: Annotated[
        str, typer.Option(help="smollm2, or any model that [bold]tierkv generate[/bold] takes.")
    ] = "smollm2",
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,N",
            help=f"Tokens of prompt and answer together; 8k means 8,192. Default: {DEFAULTS['lengths']}.",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="T,T",
            help="Names of tasks, all for every task, or FILE.jsonl with lines of a prompt and its answers. Default: "
            f"{DEFAULTS['tasks'].replace(',', ', ')}.",
        ),
    ] = None,
    caches: Annotated[
        str | None,
        typer.Option(
            metavar="C,C",
            help="Of dynamic, static, quantized (lossy), offloaded, tierkv and tierkv:FILE.toml. dynamic always runs: the "
            "others' tokens are compared with its own. Default: all of transformers' and tierkv.",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help=f"Of each task at each length. Default: {DEFAULTS['samples']}."),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(help=f"One of {', '.join(DTYPES)}. Exact caches must be equal in float32; else it is reported."),
    ] = "float32",
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of the samples.")] = 0,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="The most tokens of an answer. Default: as the task has it.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the rows that DIR holds.")] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="A complete small page in minutes: three tasks, lengths and caches; other options win."
        ),
    ] = False,
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also write a Perfetto trace of one decoded token of tierkv to this file."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Run long-context tasks with tierkv and with transformers' own caches, and leave a page to show.

    Every cache runs at every length in a process of its own; each row is on disk before the next sample begins. A cache that
    is refused or runs out of memory is a row with an error. Ctrl-C finishes the row, writes the page and ends;
    [bold]--resume[/bold] goes on. In float32 an exact cache whose tokens are not those of dynamic fails the run at its end.
    """
    given = {"lengths": lengths, "tasks": tasks, "caches": caches, "samples": samples, "max_new_tokens": max_new_tokens}
    chosen = {
        name: value if value is not None else (QUICK if quick else DEFAULTS)[name] for name, value in given.items()
    }
    options.one_of(dtype, DTYPES, "--dtype")
    settings = _settings(model, dtype, seed, chosen)
    folder = _folder(out)
    check_savable(trace, "--trace")
    if trace is not None and not any(map(_is_tiered, settings.caches)):
        raise BadInput("--trace shows a token of tierkv: add tierkv to --caches, or leave it out")
    with reserve_stdout(as_json):
        result, rows = _run(settings, folder, trace, resume=resume)
    if as_json:
        print_json(result)
    else:
        show_result(result, rows)
    _judge(result, rows)


def _settings(model: str, dtype: str, seed: int, chosen: dict[str, Any]) -> "Settings":
    """Return the settings; everything that can be found out without a model is."""
    from tierkv.benchmarks.longcontext_settings import CACHES, JSONL, REFERENCE, Settings, config_file
    from tierkv.benchmarks.tasks import TASKS, load_jsonl

    names = options.parts(chosen["tasks"])
    names = list(dict.fromkeys(one for name in names for one in (TASKS if name == "all" else (name,))))
    for name in names:
        if name.endswith(JSONL):
            load_jsonl(name)
        else:
            _known(name, [*TASKS, "all"], "--tasks", "a FILE.jsonl")
    kinds = list(dict.fromkeys(options.parts(chosen["caches"])))
    for kind in kinds:
        if (file := config_file(kind)) is not None:
            load_config(file, environ={})
        else:
            _known(kind, CACHES, "--caches", "tierkv:FILE.toml")
    return Settings(
        model=model,
        dtype=dtype,
        lengths=tuple(sorted({_length(part) for part in options.parts(chosen["lengths"])})),
        tasks=tuple(names),
        caches=(REFERENCE, *(kind for kind in kinds if kind != REFERENCE)),
        samples=chosen["samples"],
        seed=seed,
        max_new_tokens=chosen["max_new_tokens"],
    )


def _is_tiered(cache: str) -> bool:
    from tierkv.benchmarks.longcontext_settings import is_tiered

    return is_tiered(cache)


def _known(name: str, legal: Any, option: str, more: str) -> None:
    if name in legal:
        return
    near = get_close_matches(name, list(legal), 2, 0.5)
    advice = f"did you mean {' or '.join(near)}? " if near else ""
    raise BadInput(f"{option}: {name!r} is not known ({advice}legal: {', '.join(legal)}, {more})")


def _length(text: str) -> int:
    match = _TOKENS.fullmatch(text)
    count = int(match[1]) * (1024 if match[2] else 1) if match else 0
    if not 1 <= count <= _MOST_TOKENS:
        raise BadInput(
            f"--lengths: {text!r} is not a number of tokens (legal: 1 to {_MOST_TOKENS:,}, also as 8k for 8,192)"
        )
    return count


def _folder(name: str) -> Path:
    """Return the folder of a run, after making sure that its page can be written."""
    if not name or not name.isprintable():
        raise BadInput(f"--out {name!r} names no folder; give one that can be written to")
    folder = Path(name).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        Page.check_writable(folder / "report.html")
    except OSError as error:
        raise BadInput(f"--out {name}: {error.strerror}; give a folder that can be written to") from None
    except ConfigError as error:
        raise BadInput(f"--out {name}: {error}") from None
    return folder


def _run(
    settings: "Settings", folder: Path, trace: str | None, *, resume: bool
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    progress = Progress()
    with nothing_to_clean_up():
        from tierkv.benchmarks.longcontext import Session
        from tierkv.benchmarks.longcontext_report import make_page, write_csv
        from tierkv.benchmarks.longcontext_summary import mismatches, scores, unchecked
    with progress.stage("load", f"loading {settings.model} and making samples"):
        session = Session(settings, folder, resume=resume)
    with session:
        with Watch(session) as watch, finish_the_row(watch) as asked:
            session.run(watch.on_row, watch.on_part, asked.is_set)
        rows = [row for key in session.keys if (row := session.log.rows.get(key)) is not None]
        wrong = mismatches(rows, must_match=settings.must_match)
        result = {
            "rows": len(rows),
            "missing": len(session.missing),
            "interrupted": asked.is_set(),
            "tasks": list(settings.tasks),
            "lengths": list(settings.lengths),
            "caches": session.caches,
            "left_out": [{"cache": name, "reason": why} for name, why in session.left_out.items()],
            "exact_mismatches": len(wrong),
            "must_match": settings.must_match,
            "unchecked": unchecked(rows),
            "errors": sum(row["error"] is not None for row in rows),
            "scores": scores(rows),
            "samples": settings.samples,
            "seed": settings.seed,
            **_about(session, settings),
            "trace": None if trace is None or session.trace is None else trace,
            "report": str(folder / "report.html"),
            "seconds": {**progress.seconds, "run": watch.seconds},
            "command": options.command_line(),
        }
        write_csv(folder / "results.csv", rows)
        page = make_page(result, rows, session.trace)
        page.write(folder / "report.html")
        page.write_plots(folder / "plots")
        if trace is not None and session.trace is not None:
            save_json(trace, session.trace)
        elif trace is not None:
            watch.say("no trace was taken: a token of tierkv can be traced on a CPU, at the end of the longest length")
    return result, rows


def _about(session: "Session", settings: "Settings") -> dict[str, Any]:
    facts = session.facts
    return {
        "model": facts["model"],
        "dtype": facts["dtype"],
        "device": facts["device"],
        "kv_bytes_per_token": facts["kv_bytes_per_token"],
        "machine": facts["machine"],
        "file_system": facts["file_system"],
        "versions": settings.record()["versions"],
    }


def _judge(result: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Fail a run whose exact caches were not exact, or that has no answer at all.

    Raises:
        Failed: so it is.
    """
    from tierkv.benchmarks.longcontext_summary import describe, mismatches

    if wrong := mismatches(rows, must_match=result["must_match"]):
        more = f"; and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise Failed(
            f"{len(wrong)} answers of exact caches are not those of dynamic in {result['dtype']}: "
            f"{'; '.join(map(describe, wrong[:_LISTED]))}{more}; the rows are in {result['report']}"
        )
    if rows and result["errors"] == len(rows) and not result["interrupted"]:
        raise Failed(f"every row is an error, the first: {rows[0]['error']}")
