"""``tierkv demo``: a real model answers a question about a long document, its KV cache in three tiers."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

import tierkv
from tierkv.cli.console import BadInput, Failed, err, out, print_json, reserve_stdout
from tierkv.cli.live import live_view
from tierkv.cli.process import nothing_to_clean_up, stop_if_told
from tierkv.cli.progress import Progress
from tierkv.config import load_config
from tierkv.sizes import format_bytes

if TYPE_CHECKING:
    from tierkv.cli.demo_run import Outcome

KEEP_SECONDS = 20.0
"""Longest wait for the store; whatever it has not taken by then, the second process computes, and says so."""

EPILOG = """[bold]Examples[/bold]

tierkv demo

tierkv demo --json > demo.json

tierkv demo --prompt-tokens 6000 --max-new-tokens 100 --live
"""


def demo(
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate in each run.")] = 48,
    prompt_tokens: Annotated[int, typer.Option(min=1_500, help="Length of the prompt, about.")] = 2_000,
    model: Annotated[
        str, typer.Option(help="smollm2, or any model that [bold]tierkv generate[/bold] takes.")
    ] = "smollm2",
    live: Annotated[
        bool,
        typer.Option("--live", help="On a terminal: show tiers and traffic on stderr while tierkv generates."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a report.")] = False,
) -> None:
    """Show the tiers at work on a real model and check that they change nothing.

    SmolLM2-135M reads some pages of Python's documentation in float32 and answers a question about them, first with the
    stock cache, then with tierkv: a device and a host budget that together hold less than half of the KV cache, and
    the rest on disk. Then a second process answers the same from what the first has kept on disk. Tokens and logits are
    compared, every byte is accounted for, and the exit code is 1 if anything that should hold does not.
    """
    with reserve_stdout(as_json):
        result, outcome = _run(model, prompt_tokens, max_new_tokens, live=live)
    if as_json:
        print_json(result)
    else:
        _print(result, outcome)
    if outcome.failures:
        raise Failed(f"the demo did not show what it should: {'; '.join(outcome.failures)}")


def _run(source: str, prompt_tokens: int, new_tokens: int, *, live: bool) -> "tuple[dict[str, Any], Outcome]":
    """Run every stage; return what is printed."""
    progress = Progress()
    with progress.stage("load", f"loading {source}") as stage:
        with nothing_to_clean_up():
            from tierkv.benchmarks.restore_process import keep_all
            from tierkv.cli import demo_restart, demo_run
            from tierkv.cli.demo_text import QUESTION, demo_inputs
            from tierkv.cli.prompts import check_length, check_tokens
            from tierkv.cli.streams import decode
            from tierkv.integrations.hf_compat import block_layout
            from tierkv.integrations.hf_generate import attach
            from tierkv.integrations.hf_load import load_model
            from tierkv.storage.spill_dir import SpillDirectory

        model, tokenizer = load_model(source, "float32", progress=stage.say)
    inputs = demo_inputs(tokenizer, prompt_tokens)
    check_tokens(inputs["input_ids"], model.get_input_embeddings())
    length = inputs["input_ids"].shape[1]
    if length < 0.75 * prompt_tokens:
        raise BadInput(f"the demo's document comes to {length:,} tokens; --prompt-tokens can be at most that")
    check_length(model.config, length, new_tokens, new_tokens)
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    layout, _ = block_layout(model, demo_run.BLOCK_SIZE)

    with progress.stage("dynamic", "generating with the stock cache", new_tokens) as stage:
        dynamic = demo_run.generate(model, inputs, new_tokens, lambda _: stage.advance())
    with SpillDirectory(load_config().disk.path) as own:  # also gone after a kill, with the next to use the disk
        folder = str(own.path / "store")
        config = demo_run.demo_config(layout, length, new_tokens, folder)
        with (
            attach(model, config) as engine,
            _tiers_at_work(progress, engine, new_tokens, live=live) as on_token,
        ):
            cache = engine.new_cache()
            tiered = demo_run.generate(model, inputs, new_tokens, on_token, cache=cache)
            keep_all(engine, KEEP_SECONDS)
            tiered.stats = stats = engine.stats()
            cache.close()
        steps = demo_run.LOGIT_STEPS
        with demo_restart.second_process(source) as child:
            with (
                attach(model, config.replace({"attention.path": "gathered", "prefix.persist": False})) as engine,
                progress.stage("logits", "comparing logits bit by bit", 2 * (1 + steps)) as stage,
            ):
                identical = demo_run.same_logits(model, inputs["input_ids"], engine.new_cache, steps, stage.advance)
            with progress.stage("restart", "answering again in a second process"):
                again = demo_restart.answer_again(child, inputs["input_ids"][0].tolist(), folder, new_tokens)
    outcome = demo_run.Outcome(dynamic, tiered, again, identical)
    outcome.failures = demo_run.failures(outcome)
    speeds = {"dynamic": dynamic.stream, "tierkv": tiered.stream}
    result = {
        "model": _model_name(source, model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "question": QUESTION,
        "text": decode(tokenizer, tiered.tokens),
        "prompt_tokens": length,
        "new_tokens": len(tiered.tokens),
        "tokens_equal": dynamic.tokens == tiered.tokens,
        "restart_tokens_equal": again.tokens == tiered.tokens,
        "logits_bit_identical": identical,
        "read_path": stats.read_path,
        "budget_bytes": {name: tier.capacity_bytes for name, tier in stats.tiers.items()},
        "peak_bytes": {name: tier.peak_bytes for name, tier in stats.tiers.items()},
        "blocks": {name: tier.blocks for name, tier in stats.tiers.items()},
        "copies": {name: tier.copies for name, tier in stats.tiers.items()},
        "moved_bytes": stats.moved_bytes,
        "kv_bytes_total": stats.kv_bytes_total,
        "prefill_seconds": {name: round(stream.prefill_seconds, 3) for name, stream in speeds.items()},
        "ttft_seconds": {
            "cold": round(tiered.stream.prefill_seconds, 4),
            "warm_restart": round(again.ttft_seconds, 4),
        },
        "prefilled_tokens": {"cold": tiered.prefilled_tokens, "warm_restart": again.prefilled_tokens},
        "decode_tokens_per_second": {
            name: round(stream.decode_tokens_per_second or 0.0, 2) for name, stream in speeds.items()
        },
        "stall_seconds": round(stats.counters.stall_seconds, 3),
        "seconds": progress.seconds,
        "failures": outcome.failures,
        "versions": _versions(),
    }
    return result, outcome


@contextmanager
def _tiers_at_work(
    progress: Progress, engine: Any, new_tokens: int, *, live: bool
) -> Iterator[Callable[[int], None] | None]:
    """Run the stage of the tiers under a bar, or with a live view of them in its place; give what each token is told to."""
    if not (live and err.is_terminal):
        with progress.stage("tierkv", "generating with the KV cache in three tiers", new_tokens) as stage:
            yield lambda _: stage.advance()
        return
    began = time.perf_counter()
    with live_view(engine, shown=True):
        yield None
    progress.seconds["tierkv"] = round(time.perf_counter() - began, 3)
    stop_if_told()


def _model_name(source: str, model: Any) -> str:
    return "SmolLM2-135M-Instruct" if source == "smollm2" else model.config.name_or_path or source


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {"tierkv": tierkv.__version__} | {name: version(name) for name in ("torch", "transformers")}


def _print(result: dict[str, Any], outcome: "Outcome") -> None:
    from tierkv.cli.demo_run import upper_bytes
    from tierkv.cli.tables import pairs_table, tier_table, wire_table

    stats = outcome.tiered.stats
    assert stats is not None
    out.print(f"\n{result['question']}", style="bold")
    out.print(result["text"].strip())
    out.print(
        f"\n{result['model']}, {result['dtype']} on {result['device']}: {result['prompt_tokens']:,} prompt tokens, "
        f"{result['new_tokens']} new; {format_bytes(result['kv_bytes_total'])} of KV at the end\n",
        style="dim",
    )
    out.print(tier_table(stats))
    out.print()
    out.print(wire_table(stats.moved_bytes))
    out.print()
    ttft, computed = result["ttft_seconds"], result["prefilled_tokens"]
    speed, prefill = result["decode_tokens_per_second"], result["prefill_seconds"]
    out.print(
        pairs_table(
            {
                "stock cache": f"prompt {prefill['dynamic']:.1f} s, then {speed['dynamic']:.1f} tokens/s",
                "tierkv": f"prompt {prefill['tierkv']:.1f} s, then {speed['tierkv']:.1f} tokens/s, "
                f"of which {result['stall_seconds']:.1f} s waiting for copies",
                "after a restart": f"first token in {ttft['warm_restart']:.2f} s, {ttft['cold'] / ttft['warm_restart']:.0f} "
                f"times as soon; {computed['warm_restart']:,} of {computed['cold']:,} prompt tokens computed again",
                "device + host": f"{100 * upper_bytes(stats) / stats.kv_bytes_total:.0f}% of the KV cache",
                "read path": f"{stats.read_path}: {stats.read_path_reason}",
                "tokens": "equal to the stock cache's" if result["tokens_equal"] else "DIFFER from the stock cache's",
                "tokens after it": "equal" if result["restart_tokens_equal"] else "DIFFER from the first process's",
                "logits, gathered": "bit-identical" if result["logits_bit_identical"] else "NOT bit-identical",
            }
        )
    )
