"""``tierkv top``: the live view of this user's running engines."""

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierkv.cli.console import BadInput, Failed, err, out, print_json, reserve_stdout

if TYPE_CHECKING:
    from tierkv.watch import Found, ProcessSnapshot

EPILOG = """[bold]Examples[/bold]

tierkv top

tierkv top --once

tierkv top --pid 4711 --interval 0.5

tierkv top --json

tierkv top --prometheus 9400
"""


def top(
    pid: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the engines of this process.")] = None,
    interval: Annotated[float, typer.Option(min=0.1, max=3600.0, metavar="SECONDS", help="Between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and end.")] = False,
    prometheus: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            metavar="PORT",
            help="Serve the same numbers to Prometheus at http://127.0.0.1:PORT/metrics until Ctrl-C; show nothing.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one snapshot as one JSON object.")] = False,
) -> None:
    """Watch the running engines of this user: tiers, traffic, prefix hits, waits, speed.

    Every process that attaches tierkv to a model publishes what [bold]engine.stats()[/bold] says on a socket that only
    this user can open; TIERKV_PUBLISH=0 in its environment turns that off. Into a pipe or file one line an engine is
    printed at each look. Ctrl-C ends it; so does the end of the last engine, with exit code 0.
    """
    if prometheus is not None:
        for name, given in {"--pid": pid is not None, "--once": once, "--json": as_json}.items():
            if given:
                raise BadInput(f"--prometheus and {name} exclude each other: leave one of them out")
        _serve(prometheus)
    elif as_json:
        with reserve_stdout(as_json):
            result = _as_dict(_look(pid))
        print_json(result)
    elif once:
        _print_once(_look(pid))
    else:
        _watch(pid, interval)


def _look(pid: int | None) -> "Found":
    """Return what runs now.

    Raises:
        Failed: no engine does.
    """
    from tierkv.watch import look_around

    found = look_around(pid)
    if found.processes:
        return found
    reasons = [f"{name}: {reason}" for name, reason in found.silent.items()] + found.refused
    why = "".join(f"; {reason}" for reason in reasons)
    if pid is not None:
        others = ", ".join(str(process.pid) for process in look_around().processes)
        raise Failed(
            f"process {pid} has no tierkv engine open that this user may see "
            f"({f'those that have: {others}' if others else 'no other has one either'}){why}"
        )
    raise Failed(
        "no tierkv engine is running for this user; start one with tierkv generate, or with tierkv.attach in a program, "
        f"and without TIERKV_PUBLISH=0{why}"
    )


def _print_once(found: "Found") -> None:
    from tierkv.cli.top_show import render

    out.print(render(found, {}))


def _as_dict(found: "Found") -> dict[str, Any]:
    processes = [asdict(process) for process in found.processes]
    return {"version": 1, "processes": processes, "silent": found.silent, "refused": found.refused}


def _watch(pid: int | None, interval: float) -> None:
    """Show what runs until nothing does."""
    from tierkv.cli.top_show import lines, render
    from tierkv.watch import look_around, rates_between

    found = _look(pid)
    before: list[ProcessSnapshot] = []
    if out.is_terminal:
        from rich.live import Live

        with Live(render(found, {}), console=out, auto_refresh=False) as live:
            live.refresh()
            while found.processes or found.silent:
                before = found.processes
                time.sleep(interval)
                found = look_around(pid)
                if found.processes or found.silent:
                    live.update(render(found, rates_between(before, found.processes)), refresh=True)
    else:
        while found.processes or found.silent:
            for line in lines(found, rates_between(before, found.processes)):
                print(line, flush=True)
            before = found.processes
            time.sleep(interval)
            found = look_around(pid)
    err.print("the last engine was closed", style="dim")


def _serve(port: int) -> None:
    """Serve Prometheus until a signal comes.

    Raises:
        BadInput: the port cannot be had.
    """
    from tierkv.prometheus import serve

    try:
        server = serve(port=port)
    except OSError as error:
        raise BadInput(f"--prometheus {port}: {error.strerror}; give another port") from None
    with server:
        err.print(f"serving {server.url} until Ctrl-C", style="dim", soft_wrap=True)
        while True:
            time.sleep(3600)
