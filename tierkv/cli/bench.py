"""``tierkv bench``: measurements, each beside what one would use otherwise."""

from typing import Annotated, Any

import typer

from tierkv.cli import options
from tierkv.cli.console import BadInput, check_savable, out, print_json, reserve_stdout, save_json
from tierkv.cli.process import nothing_to_clean_up
from tierkv.cli.progress import Progress
from tierkv.sizes import format_bytes, free_memory

app = typer.Typer(name="bench", rich_markup_mode="rich")


@app.callback(invoke_without_command=True)
def _bench(context: typer.Context) -> None:
    """Measure tierkv beside what one would use otherwise."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


DTYPES = ("float32", "bfloat16", "float16")
MODEL_BYTES = 2**30
"""Weights, activations and the interpreter, generously."""

DECODE_EPILOG = """[bold]Examples[/bold]

tierkv bench decode --contexts 128,2048,8000

tierkv bench decode --contexts 32000 --dtypes bfloat16 --caches dynamic,tierkv,tierkv-25 --json
"""


@app.command("decode", epilog=DECODE_EPILOG)
def decode(
    contexts: Annotated[
        str, typer.Option(metavar="N,N", help="Tokens in the past, separated by commas.")
    ] = "128,2048,8000",
    dtypes: Annotated[str, typer.Option(metavar="T,T", help=f"Of {', '.join(DTYPES)}.")] = "bfloat16,float32",
    caches: Annotated[
        str,
        typer.Option(
            metavar="C,C",
            help="Of dynamic, static, quantized (stock); tierkv (all resident), tierkv-25 (a quarter of the KV in memory, the "
            "rest on SSD), tierkv-25-cold (its page cache dropped before each token). Default: all.",
        ),
    ] = "",
    rounds: Annotated[int, typer.Option(min=5, max=1000, help="Timed tokens of each cache.")] = 9,
    disk_path: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Where the disk tier goes. Default: a temporary folder.")
    ] = None,
    save: Annotated[str | None, typer.Option(metavar="FILE", help="Also write the JSON record to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Time one decoded token at given contexts, for the stock caches and for tierkv, in one process.

    A random model of SmolLM2-135M's shapes runs over synthetic K and V of the given length: nothing is prefilled, and every
    cache holds the same. The caches take turns; logits are compared before anything is timed.
    """
    lengths = [options.tokens(part, "--contexts") for part in options.parts(contexts)]
    kinds = options.known(dtypes, DTYPES, "--dtypes")
    check_savable(save, "--save")
    with reserve_stdout(as_json):
        result = _run(lengths, kinds, caches, rounds, disk_path)
    result["command"] = options.command_line()
    if save is not None:
        save_json(save, result)
    if as_json:
        print_json(result)
    else:
        _print(result)


KERNELS_EPILOG = """[bold]Examples[/bold]

tierkv bench kernels --contexts 2048,32000
"""


@app.command("kernels", epilog=KERNELS_EPILOG)
def kernels(
    contexts: Annotated[str, typer.Option(metavar="N,N", help="Tokens in the past.")] = "128,2048,8000,32000",
    dtypes: Annotated[str, typer.Option(metavar="T,T", help=f"Of {', '.join(DTYPES)}.")] = "bfloat16,float32",
    rounds: Annotated[int, typer.Option(min=5, max=1000, help="Timed calls of each.")] = 40,
    save: Annotated[str | None, typer.Option(metavar="FILE", help="Also write the JSON record to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Time attention over blocks by itself, beside PyTorch's over dense tensors and a plain read of memory."""
    lengths = [options.tokens(part, "--contexts") for part in options.parts(contexts)]
    kinds = options.known(dtypes, DTYPES, "--dtypes")
    check_savable(save, "--save")
    with reserve_stdout(as_json):
        progress = Progress()
        with nothing_to_clean_up():
            from tierkv.benchmarks import kernels as measured
            from tierkv.benchmarks import machine
        for dtype in kinds:
            if reason := measured.unsupported(dtype):
                raise BadInput(f"there is nothing to time: {reason}")
        rows = []
        with progress.stage("kernels", "timing kernels", len(lengths) * len(kinds)) as stage:
            for dtype in kinds:
                for context in lengths:
                    rows.append(measured.measure(context, dtype, rounds))
                    stage.advance()
    result = {"machine": machine.description(), "rounds": rounds, "rows": rows, "command": options.command_line()}
    if save is not None:
        save_json(save, result)
    if as_json:
        print_json(result)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("dtype", "context", "attention", "sdpa", "append", "merge", "GB/s", "of a read"):
        table.add_column(name, justify="left" if name == "dtype" else "right", no_wrap=True)
    for row in rows:
        times = [f"{row['microseconds'][name]:,.0f} us" for name in ("attention", "sdpa", "append", "merge")]
        rate = row["attention_bytes_per_second"]
        share = rate / row["memory_read_bytes_per_second"]
        table.add_row(row["dtype"], f"{row['context']:,}", *times, f"{rate / 1e9:.1f}", f"{share:.0%}")
    out.print(table)
    out.print("of a read: K and V that attention reads in a second, as a share of a plain read of memory", style="dim")


def _run(contexts: list[int], dtypes: list[str], caches: str, rounds: int, disk_path: str | None) -> dict[str, Any]:
    progress = Progress()
    with nothing_to_clean_up():
        from tierkv.benchmarks import decode, machine
    chosen = options.known(caches, decode.CACHES, "--caches") if caches else list(decode.CACHES)
    for context in contexts:
        for dtype in dtypes:
            needed = (len(chosen) + 1) * decode.kv_bytes_of(context, dtype) + MODEL_BYTES
            if needed > free_memory():
                raise BadInput(
                    f"{len(chosen)} caches of {context:,} tokens in {dtype} need about {format_bytes(needed)} of memory and "
                    f"{format_bytes(free_memory())} is free; choose shorter --contexts or fewer --caches"
                )
    result: dict[str, Any] = {
        "fill": "synthetic: random K and V of the given length, not prefilled",
        "model": "random weights, SmolLM2-135M's shapes",
        "rounds": rounds,
        "machine": machine.description(),
        "rows": [],
        "left_out": [],
        "attention": [],
    }
    with options.scratch_folder(disk_path) as folder:
        result["file_system"] = machine.file_system(folder)
        for dtype in dtypes:
            for context in contexts:
                total = decode.steps_of(chosen, rounds)
                with progress.stage(f"{dtype}-{context}", f"{dtype}, {context:,} tokens", total) as stage:
                    found = decode.measure(context, dtype, chosen, rounds, folder, stage.say, stage.advance)
                result["rows"] += found["rows"]
                result["left_out"] += found["left_out"]
                if "attention_bytes_per_second" in found:
                    rates = {
                        name: found[name] for name in ("attention_bytes_per_second", "memory_read_bytes_per_second")
                    }
                    result["attention"].append({"context": context, "dtype": dtype, **rates})
    if result["attention"]:  # the figures of the longest context in the smallest dtype
        last = max(result["attention"], key=lambda one: (one["context"], one["dtype"] != "float32"))
        result |= {name: last[name] for name in ("attention_bytes_per_second", "memory_read_bytes_per_second")}
    result["seconds"] = progress.seconds
    return result


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("dtype", "context", "cache", "ms", "least", "dynamic", "static", "memory"):
        table.add_column(name, justify="left" if name in ("dtype", "cache") else "right", no_wrap=True)
    for row in result["rows"]:
        table.add_row(
            row["dtype"], f"{row['context']:,}", row["cache"], f"{row['ms_per_token_median']:.1f}",
            f"{row['ms_per_token_min']:.1f}", _times(row["ratio_to_dynamic"]), _times(row["ratio_to_static"]),
            format_bytes(row["ram_bytes"]),
        )  # fmt: skip
    out.print(table)
    for one in result["attention"]:
        share = one["attention_bytes_per_second"] / one["memory_read_bytes_per_second"]
        out.print(
            f"{one['dtype']}, {one['context']:,} tokens: attention reads {format_bytes(one['attention_bytes_per_second'])}/s of "
            f"K and V, {share:.0%} of a plain read of memory",
            style="dim",
        )
    out.print(
        "ms: median time of a token; dynamic, static: how many times as fast as that cache; random weights, synthetic K and V",
        style="dim",
    )


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"
