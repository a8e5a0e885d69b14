"""``tierkv bench restore``: how soon the first token of a known prompt comes, after a restart and within a process."""

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from tierkv.cli import options
from tierkv.cli.bench import DTYPES
from tierkv.cli.console import BadInput, Failed, check_savable, out, print_json, reserve_stdout, save_json
from tierkv.cli.process import nothing_to_clean_up
from tierkv.cli.progress import Progress
from tierkv.sizes import format_bytes, free_memory

BLOCK_SIZES = ("16", "32", "64", "128", "256", "512")
LEAST_TOKENS = 257
"""A prefix shorter than 256 tokens is not kept on disk, and one token is computed in any case."""
PROCESSES = 4
MEMORY_COPIES = 10
"""Copies of the KV that the processes hold together at the worst moment: while a cache is copied and grows."""
DISK_COPIES = 6
"""Copies on disk: two of tierkv's while a new one replaces the last, two saved files, the plain one, and some spare."""
SPARE_BYTES = 3 * 2**30
"""tierkv's tiers are not smaller than its defaults: what they may take must be free, though only the KV's part is used."""

NAMES = {
    "cold": "cold, all computed",
    "warm_process": "tierkv, in memory",
    "deepcopy": "copy of a cache, in memory",
    "warm_restart": "tierkv, after a restart",
    "torch_load": "torch.load, after a restart",
    "safetensors": "safetensors, after a restart",
}

EPILOG = """[bold]Examples[/bold]

tierkv bench restore

tierkv bench restore --prompt-tokens 8000 --block-size 256 --disk-path /mnt/ssd --json

tierkv bench restore --model ./my-model --dtype float32 --prompt-tokens 1000 --runs 3
"""


def restore(
    prompt_tokens: Annotated[
        str, typer.Option(metavar="N,N", help="Tokens of the prompt, real text, separated by commas.")
    ] = "2000,8000",
    model: Annotated[
        str, typer.Option(help="smollm2, or any model that [bold]tierkv generate[/bold] takes.")
    ] = "smollm2",
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bfloat16",
    runs: Annotated[int, typer.Option(min=1, max=1000, help="Timed runs of each contender that finds KV.")] = 7,
    prefills: Annotated[
        int,
        typer.Option(
            min=1,
            max=100,
            help="Times that a whole prompt is computed, by the stock cache and by tierkv with and without writing.",
        ),
    ] = 3,
    block_size: Annotated[str, typer.Option(metavar="N", help=f"Tokens in a block: {', '.join(BLOCK_SIZES)}.")] = "32",
    disk_path: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Where stores and files go. Default: a temporary folder.")
    ] = None,
    save: Annotated[str | None, typer.Option(metavar="FILE", help="Also write the JSON record to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Time the first token of a prompt whose KV is kept: by tierkv, and by what one would do otherwise.

    Compared are computing it all (cold), tierkv and a copied cache within a process, and after a restart tierkv and files
    of torch.save and safetensors, beside a plain read of as many bytes. Each contender has a process of its own and loads
    the model once; they take turns. After a restart the page cache is dropped. The first token is checked in every run.
    The cost of writing behind a prefill is measured too. 8,000 tokens take some minutes on two cores.
    """
    lengths = sorted({options.tokens(part, "--prompt-tokens") for part in options.parts(prompt_tokens)})
    options.one_of(dtype, DTYPES, "--dtype")
    options.one_of(block_size, BLOCK_SIZES, "--block-size")
    least = max(LEAST_TOKENS, int(block_size) + 1)
    if lengths[0] < least:
        raise BadInput(
            f"--prompt-tokens: {lengths[0]} tokens are too few to be kept on disk (legal: from {least} on, with blocks of "
            f"{block_size}); give longer prompts"
        )
    check_savable(save, "--save")
    with reserve_stdout(as_json):
        result = _run(lengths, model, dtype, runs, prefills, int(block_size), disk_path)
    if save is not None:
        save_json(save, result)
    if as_json:
        print_json(result)
    else:
        _print(result)
    if wrong := {name: number for row in result["rows"] for name, number in row["wrong_tokens"].items()}:
        names = ", ".join(f"{name} in {number} runs" for name, number in wrong.items())
        raise Failed(f"the first token is not the one of the cold run: {names}")


def _run(
    lengths: list[int], model: str, dtype: str, runs: int, prefills: int, block_size: int, disk_path: str | None
) -> dict[str, Any]:
    progress = Progress()
    with nothing_to_clean_up():
        import torch

        from tierkv.benchmarks import machine
        from tierkv.benchmarks import restore as measured
    with ExitStack() as stack:
        folder = stack.enter_context(options.scratch_folder(disk_path))
        plan = measured.Plan(model, dtype, runs, prefills, block_size, folder)
        with progress.stage("load", f"loading {model} in {PROCESSES} processes"):
            children, facts = stack.enter_context(measured.contenders(plan, torch.get_num_threads()))
        _check(lengths, facts, folder, measured.STEPS + 1)
        result: dict[str, Any] = {
            "model": facts["model"],
            "text": "the first tokens of pydoc_data.topics",
            "runs": runs,
            "prefills": prefills,
            "machine": machine.description(),
            "file_system": machine.file_system(folder),
            "left_out": measured.left_out(),
            "rows": [],
        }
        for tokens in lengths:
            with progress.stage(str(tokens), f"{facts['dtype']}, {tokens:,} tokens", plan.steps) as stage:
                result["rows"].append(measured.measure(tokens, plan, children, facts, stage.advance))
    result["seconds"] = progress.seconds
    result["command"] = options.command_line()
    return {**result["rows"][-1], **result}


def _check(lengths: list[int], facts: dict[str, Any], folder: Path, new_tokens: int) -> None:
    """Refuse what cannot be measured, before anything is computed."""
    longest, most = lengths[-1], facts["text_tokens"]
    if facts["limit"] is not None:
        most = min(most, facts["limit"] - new_tokens)
    if longest > most:
        raise BadInput(
            f"--prompt-tokens: {longest:,} tokens are more than the text has, or the model takes (legal: up to {most:,})"
        )
    kv_bytes = longest * facts["kv_bytes_per_token"]
    for what, needed, free in (
        ("memory", MEMORY_COPIES * kv_bytes + SPARE_BYTES, free_memory()),
        (f"disk space in {folder.parent}", DISK_COPIES * kv_bytes + SPARE_BYTES, shutil.disk_usage(folder).free),
    ):
        if needed > free:
            raise BadInput(
                f"{longest:,} tokens need about {format_bytes(needed)} of {what} and {format_bytes(free)} is free; "
                f"choose shorter --prompt-tokens"
            )


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("tokens", "first token", "median", "least", "of cold"):
        table.add_column(name, justify="left" if name == "first token" else "right", no_wrap=True)
    for row in result["rows"]:
        head = f"{row['prompt_tokens']:,}"
        for key, name in NAMES.items():
            times, median = row["ttft_seconds_all"][key], row["ttft_seconds"][key]
            share = f"1/{row['ttft_seconds']['cold'] / median:.0f}" if key != "cold" else ""
            table.add_row(head, name, f"{1e3 * median:,.0f} ms", f"{1e3 * min(times):,.0f} ms", share)
            head = ""
    out.print(table)
    for row in result["rows"]:
        more = row["write_behind"]
        met = sum(target["met"] for target in row["targets"].values())
        out.print(
            f"{row['prompt_tokens']:,} tokens, {format_bytes(row['kv_bytes'])} of KV: restored at "
            f"{format_bytes(row['restore_bytes_per_second'])}/s, {row['restore_ratio']:.0%} of a plain read; writing behind "
            f"the prefill takes {more['cpu_percent']:+.1f}% CPU, {more['wall_percent']:+.1f}% time; {met} of "
            f"{len(row['targets'])} targets met",
            soft_wrap=True,
        )
        for name, target in row["targets"].items():
            if not target["met"]:
                bound = f"at least {target['at_least']}" if "at_least" in target else f"at most {target['at_most']}"
                out.print(f"  missed: {name} is {target['value']}, should be {bound}", style="dim", soft_wrap=True)
        if not row["page_cache_dropped"]:
            out.print(
                f"  the page cache could not be dropped: up to {row['page_cache_left']:.0%} of a file stayed in memory, so "
                f"nothing after a restart was read from the disk",
                soft_wrap=True,
            )
    for one in result["left_out"]:
        out.print(f"left out: {one['contender']}, {one['reason']}", style="dim", soft_wrap=True)
    out.print(
        "from the call of generate to its first token; loading the model and attaching tierkv are not in it",
        style="dim",
        soft_wrap=True,
    )
