"""``tierkv plan``: what a model's KV takes, what fits where on a machine, and how fast it will be. Nothing is run."""

import re
from datetime import date
from typing import Annotated, Any

import typer

from tierkv.cli import options
from tierkv.cli.console import BadInput, print_json, reserve_stdout
from tierkv.errors import ConfigError
from tierkv.layout import DTYPE_BYTES
from tierkv.sizes import Size, parse_size
from tierkv.tier import Tier

BLOCK_SIZES = ("16", "32", "64", "128", "256", "512")
_MOST_TOKENS = 1 << 30
_TOKENS = re.compile(r"(\d{1,10})([kKmM]?)", re.ASCII)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}

EPILOG = """[bold]Examples[/bold]

tierkv plan --model llama-3.1-8b --context 128k --profile h100

tierkv plan --model llama-2-70b --context 4096 --batch 10 --dtype float16 --assume-mha

tierkv plan --model ./my-model/config.json --context 32k --batch 8 --profile rtx4090 --host-budget 48GiB --json

tierkv plan --model deepseek-v3 --context 128k --profile h200 --devices 8 --report plan.html
"""


def plan(
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME|PATH",
            help="A well-known model, a config.json or a folder with one, or the id of a hub model.",
        ),
    ],
    context: Annotated[
        str, typer.Option(metavar="N", help="Tokens of a sequence, prompt and answer together; 8k is 8,192.")
    ] = "8k",
    batch: Annotated[int, typer.Option(min=1, max=1_000_000, help="Sequences that run at a time.")] = 1,
    dtype: Annotated[str, typer.Option(help=f"Of the KV: one of {', '.join(DTYPE_BYTES)}.")] = "bfloat16",
    profile: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="The machine: a100, h100, h200, laptop, rtx4090, or a .toml of yours."),
    ] = None,
    devices: Annotated[int, typer.Option(min=1, max=4096, help="Devices that share the model.")] = 1,
    device_budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="KV on all devices. Default: memory less weights and 10%.")
    ] = None,
    host_budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="KV in host memory. Default: all that the machine has.")
    ] = None,
    disk_budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="KV on disk. Default: the whole disk of the machine.")
    ] = None,
    block_size: Annotated[str, typer.Option(help=f"Tokens in a block: {', '.join(BLOCK_SIZES)}.")] = "32",
    assume_mha: Annotated[
        bool, typer.Option("--assume-mha", help="Count as if every query head had a key and a value of its own.")
    ] = False,
    mean_tokens: Annotated[
        str | None, typer.Option(metavar="N", help="Mean length of a session, for how many are held. Default: half.")
    ] = None,
    mix: Annotated[
        str | None,
        typer.Option(metavar="MEAN,SPREAD", help="The same with a log-normal spread, the sigma of the logarithm."),
    ] = None,
    report: Annotated[
        str | None, typer.Option(metavar="FILE.html", help="Also write a page with tables and charts.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Plan a model on a machine: bytes of KV, what fits where, sessions, speed, and what would help most.

    Bytes are exact, from the model's own dimensions. Times are estimates from the figures of a hardware profile, each of
    which states its source; [bold]tierkv tune[/bold] measures those of this machine.
    """
    with reserve_stdout(as_json):
        ask = _ask(
            model, context, batch, dtype, profile, devices, block_size, assume_mha=assume_mha,
            budgets={Tier.DEVICE: device_budget, Tier.HOST: host_budget, Tier.DISK: disk_budget},
            mean_tokens=mean_tokens, mix=mix,
        )  # fmt: skip
        if report is not None:
            from tierkv.page import Page

            Page.check_writable(report)
        from tierkv.plan import make_plan

        result = make_plan(ask)
        if report is not None:
            from tierkv.cli.plan_report import write_report

            write_report(report, ask, result, date.today())
    if as_json:
        print_json(result)
    else:
        from tierkv.cli.plan_show import print_plan

        print_plan(result)


def _ask(
    model: str,
    context: str,
    batch: int,
    dtype: str,
    profile: str | None,
    devices: int,
    block_size: str,
    *,
    assume_mha: bool,
    budgets: dict[Tier, str | None],
    mean_tokens: str | None,
    mix: str | None,
) -> Any:
    """Read everything that was asked for.

    Raises:
        BadInput: an option cannot be read.
    """
    options.one_of(dtype, tuple(DTYPE_BYTES), "--dtype")
    options.one_of(block_size, BLOCK_SIZES, "--block-size")
    tokens = _tokens(context, "--context")
    lengths = _mix(mean_tokens, mix)
    sizes = {tier: _size(text, f"--{tier.label}-budget") for tier, text in budgets.items() if text is not None}
    if profile is None and devices != 1:
        raise BadInput("--devices means nothing without a machine: give --profile, too")
    from tierkv.architecture import find_architecture
    from tierkv.hardware import find_profile
    from tierkv.plan import Ask

    return Ask(
        architecture=find_architecture(model),
        context=tokens,
        batch=batch,
        dtype=dtype,
        block_size=int(block_size),
        assume_mha=assume_mha,
        profile=None if profile is None else find_profile(profile),
        devices=devices,
        budgets=sizes,
        mix=lengths,
    )


def _tokens(text: str, option: str) -> int:
    match = _TOKENS.fullmatch(text.strip())
    count = int(match[1]) * _UNITS[match[2].lower()] if match else 0
    if not 1 <= count <= _MOST_TOKENS:
        raise BadInput(
            f"{option}: {text!r} is not a number of tokens (legal: 1 to {_MOST_TOKENS:,}, also as 8k for 8,192 or 1m)"
        )
    return count


def _mix(mean_tokens: str | None, mix: str | None) -> Any:
    from tierkv.plan_memory import Mix

    if mean_tokens is not None and mix is not None:
        raise BadInput("--mean-tokens and --mix say the same thing: leave one of them out")
    if mean_tokens is not None:
        return Mix(_tokens(mean_tokens, "--mean-tokens"))
    if mix is None:
        return None
    found = options.parts(mix)
    try:
        spread = float(found[1]) if len(found) == 2 and found[1].isascii() else -1.0
    except ValueError:
        spread = -1.0
    if not 0 <= spread <= 5:
        raise BadInput(
            f"--mix: {mix!r} is not a mean and a spread (legal: tokens, and a number from 0 to 5, as in 8k,0.7)"
        )
    return Mix(_tokens(found[0], "--mix"), spread)


def _size(text: str, option: str) -> Size:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise BadInput(f"{option}: {error}") from None
