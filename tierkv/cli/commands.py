"""The ``tierkv`` command with the list of its sub-commands.

A command is a function in a file of its own, registered below. Importing this module loads no torch and no
transformers: a command imports what it needs when it runs, so that ``--help`` and mistakes are answered at once.
"""

from typing import Annotated

import typer

import tierkv
from tierkv.cli import (
    bench,
    bench_longcontext,
    bench_predict,
    bench_replay,
    bench_restore,
    bench_scenarios,
    bench_sessions,
    demo,
    generate,
    info,
    plan,
    simulate,
    store,
    top,
    tune,
)
from tierkv.cli.console import CommandGroup

app = typer.Typer(
    name="tierkv",
    cls=CommandGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo", epilog=demo.EPILOG)(demo.demo)
app.command("generate", epilog=generate.EPILOG)(generate.generate)
bench.app.command("longcontext", epilog=bench_longcontext.EPILOG)(bench_longcontext.longcontext)
bench.app.command("predict", epilog=bench_predict.EPILOG)(bench_predict.predict)
bench.app.command("replay", epilog=bench_replay.EPILOG)(bench_replay.replay)
bench.app.command("restore", epilog=bench_restore.EPILOG)(bench_restore.restore)
bench.app.command("scenarios", epilog=bench_scenarios.EPILOG)(bench_scenarios.scenarios)
bench.app.command("sessions", epilog=bench_sessions.EPILOG)(bench_sessions.sessions)
app.add_typer(bench.app)
app.add_typer(store.app)
app.command("tune", epilog=tune.EPILOG)(tune.tune)
app.command("plan", epilog=plan.EPILOG)(plan.plan)
app.command("simulate", epilog=simulate.EPILOG)(simulate.simulate)
app.command("top", epilog=top.EPILOG)(top.top)
app.command("info", epilog=info.EPILOG)(info.info)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tierkv {tierkv.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _tierkv(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback prints it
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A tiered KV cache for LLM inference: device memory, host memory and SSD behind one cache.

    Start with [bold]tierkv demo[/bold]: a real model answers a question about a long document while most of its KV
    cache lies in host memory and on disk, with the same tokens as the ordinary cache.

    Every command prints progress to stderr and its result to stdout; [bold]--json[/bold] makes the result one JSON
    object. Exit codes: 0 done, 1 failed, 2 bad usage or bad input.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
