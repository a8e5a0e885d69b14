"""``tierkv bench predict``: what the cost model says of this machine, beside what is measured."""

from typing import Annotated, Any

import typer

from tierkv.cli import options
from tierkv.cli.bench import DTYPES
from tierkv.cli.console import BadInput, check_savable, out, print_json, reserve_stdout, save_json
from tierkv.cli.process import nothing_to_clean_up
from tierkv.cli.progress import Progress
from tierkv.fit import check_fitting
from tierkv.sizes import format_bytes, free_memory

SHAPES = "smollm2-shapes"
MODEL_BYTES = 2 * 2**30
"""Weights, activations and the interpreter, generously."""

EPILOG = """[bold]Examples[/bold]

tierkv bench predict

tierkv bench predict --dtype float32 --rounds 9 --disk-path /mnt/ssd --json
"""


def predict(
    model: Annotated[
        str,
        typer.Option(
            help=f"{SHAPES} (random weights, SmolLM2-135M's shapes), or any model that [bold]tierkv generate[/bold] takes."
        ),
    ] = SHAPES,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bfloat16",
    block_size: Annotated[int, typer.Option(min=16, max=512, help="Tokens in a block.")] = 32,
    rounds: Annotated[int, typer.Option(min=3, max=1000, help="Timed repeats of each point.")] = 7,
    disk_path: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Where the disk tier goes. Default: a temporary folder.")
    ] = None,
    save: Annotated[str | None, typer.Option(metavar="FILE", help="Also write the JSON record to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Fit the cost model to some points of this machine and predict others, measured in the same rounds.

    Decoded tokens over synthetic K and V, at several contexts, with all KV on the device, a quarter there and the rest in host
    memory, or a quarter there and the rest on disk; prefills; and restores of prefixes from a store whose pages are not in
    memory. Then a small trace of conversations, served by a real engine and by the simulator. The errors are those of points
    that were not fitted. Some minutes on two cores.
    """
    options.one_of(dtype, DTYPES, "--dtype")
    check_fitting()
    check_savable(save, "--save")
    with reserve_stdout(as_json):
        result = _run(model, dtype, block_size, rounds, disk_path)
    if save is not None:
        save_json(save, result)
    if as_json:
        print_json(result)
    else:
        _print(result)


def _run(source: str, dtype: str, block_size: int, rounds: int, disk_path: str | None) -> dict[str, Any]:
    progress = Progress()
    with progress.stage("load", f"loading {source}") as stage:
        with nothing_to_clean_up():
            from tierkv.benchmarks import machine, predict
            from tierkv.benchmarks.filled import smollm2_shapes, token_bytes
            from tierkv.benchmarks.probe import RESIDENCIES
            from tierkv.integrations.hf_load import load_model
        loaded = smollm2_shapes(dtype) if source == SHAPES else load_model(source, dtype, progress=stage.say)[0]
    plan = predict.Plan(rounds=rounds)
    tokens = len(RESIDENCIES) * sum((*plan.fit_contexts, *plan.test_contexts))
    needed = tokens * token_bytes(loaded) * 5 // 4 + MODEL_BYTES
    if needed > free_memory():
        raise BadInput(
            f"all caches together need about {format_bytes(needed)} of memory and {format_bytes(free_memory())} is free; "
            f"choose a smaller model or dtype"
        )
    with options.scratch_folder(disk_path) as folder:
        with progress.stage("measure", "measuring and predicting", plan.steps) as stage:
            found = predict.measure(loaded, plan, folder, block_size, stage.advance)
        file_system = machine.file_system(folder)
    return {
        **found,
        "bounds": predict.BOUNDS,
        "met": all(found[name] <= bound for name, bound in predict.BOUNDS.items()),
        "model": source,
        "dtype": dtype,
        "block_size": block_size,
        "rounds": rounds,
        "machine": machine.description(),
        "file_system": file_system,
        "seconds": progress.seconds,
        "command": options.command_line(),
    }


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("what", "tokens", "where", "predicted", "measured", "error"):
        table.add_column(name, justify="left" if name in ("what", "where") else "right", no_wrap=True)
    for row in result["rows"]:
        behind = f"behind {row['past']:,}" if row.get("past") else f"found {row['found']:,}" if "found" in row else ""
        table.add_row(
            row["kind"], f"{row.get('context', row.get('tokens')):,}", row.get("residency", behind),
            f"{1e3 * row['predicted_seconds']:,.1f} ms", f"{1e3 * row['measured_seconds']:,.1f} ms", f"{row['error']:+.0%}",
        )  # fmt: skip
    out.print(table)
    bounds = result["bounds"]
    out.print(
        f"\nerrors of what was not fitted: median {result['median_abs_error']:.0%} (bound {bounds['median_abs_error']:.0%}), "
        f"worst {result['max_abs_error']:.0%} (bound {bounds['max_abs_error']:.0%})",
        soft_wrap=True,
    )
    together = result["trace"]["together"]
    out.print(
        f"the trace as a whole: predicted {together['predicted_seconds']:.1f} s, measured {together['measured_seconds']:.1f} s "
        f"({together['error']:+.0%})",
        soft_wrap=True,
    )
    costs = result["costs"]
    rates = {f"attention over KV in {name}": rate for name, rate in costs["kv_bytes_per_second"].items()}
    rates |= {f"wire {name}": line["bytes_per_second"] for name, line in costs["wires"].items()}
    rates["prefix store, page cache empty"] = costs["stored_bytes_per_second"]
    shown = ", ".join(f"{name} {format_bytes(round(rate))}/s" for name, rate in rates.items() if rate)
    out.print(f"{1e3 * costs['step_seconds']:.1f} ms a token without KV; {shown}", style="dim", soft_wrap=True)
