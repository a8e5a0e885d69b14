"""``tierkv demo``: the contract of its JSON, its self-checks, and what a killed run leaves behind."""

import re
import signal
from contextlib import nullcontext
from dataclasses import replace

import pytest

from tests.cli.commands import (
    LIMIT,
    assert_one_line_error,
    byte_tokenizer,
    finish,
    one_object,
    spill_files,
    spilled_bytes,
    stop,
    wait_for,
)
from tests.cli.test_top import on_terminal
from tierkv.cli import demo_restart, demo_run
from tierkv.cli.console import BadInput
from tierkv.cli.demo_text import QUESTION, demo_inputs, document
from tierkv.cli.streams import TokenStream, decode
from tierkv.metrics import Stats, TierStats

KEYS = {
    "model", "dtype", "prompt_tokens", "new_tokens", "tokens_equal", "read_path", "logits_bit_identical", "text",
    "budget_bytes", "peak_bytes", "blocks", "copies", "moved_bytes", "kv_bytes_total", "decode_tokens_per_second",
    "ttft_seconds", "prefilled_tokens", "restart_tokens_equal",
}  # fmt: skip
TIERS = {"device", "host", "disk"}


def check(shown):
    """Check everything that the demo promises."""
    assert set(shown) >= KEYS
    assert shown["tokens_equal"] is True
    assert shown["logits_bit_identical"] is True
    assert shown["restart_tokens_equal"] is True
    assert shown["failures"] == []
    assert shown["dtype"] == "float32"
    assert shown["prompt_tokens"] >= 1500
    for name in ("budget_bytes", "peak_bytes", "blocks", "copies"):
        assert set(shown[name]) == TIERS
    assert all(count > 0 for count in shown["blocks"].values())
    assert all(0 < shown["peak_bytes"][tier] <= shown["budget_bytes"][tier] for tier in TIERS)
    assert 2 * (shown["budget_bytes"]["device"] + shown["budget_bytes"]["host"]) < shown["kv_bytes_total"]
    assert {"device_to_host", "host_to_device", "host_to_disk", "disk_to_host"} <= set(shown["moved_bytes"])
    assert set(shown["decode_tokens_per_second"]) == {"dynamic", "tierkv"}
    assert all(shown["ttft_seconds"][name] > 0 for name in ("cold", "warm_restart"))
    assert shown["prefilled_tokens"]["cold"] == shown["prompt_tokens"]
    assert 1 <= shown["prefilled_tokens"]["warm_restart"] <= demo_run.BLOCK_SIZE


@pytest.fixture
def restart_here(monkeypatch):
    """Let this process do what the second one would, so that nothing is imported a second time."""
    second = demo_restart.Second()

    def answer_again(source, *asked):
        second.load(source, 1)
        return demo_run.Restarted(**second.answer(*asked))

    monkeypatch.setattr(demo_restart, "second_process", nullcontext)
    monkeypatch.setattr(demo_restart, "answer_again", answer_again)


def test_a_tiny_model_keeps_every_promise(cli, tiny, clean_environment):
    command = ("demo", "--model", tiny, "--prompt-tokens", 2000, "--max-new-tokens", 8)
    shown = one_object(cli(*command, "--json").stdout)
    check(shown)
    assert shown["new_tokens"] == 8
    assert shown["question"] == QUESTION
    assert spill_files(clean_environment) == []


def test_the_report_says_what_was_found(cli, tiny, restart_here):
    report = cli("demo", "--model", tiny, "--prompt-tokens", 2000, "--max-new-tokens", 8)
    assert report.exit_code == 0
    assert QUESTION in " ".join(report.stdout.split())
    for word in ("budget", "disk", "tokens/s", "bit-identical", "equal to the stock", "after a restart", "prompt"):
        assert word in report.stdout


def test_the_users_budgets_do_not_change_the_demo(cli, tiny, monkeypatch, restart_here):
    monkeypatch.setenv("TIERKV_DEVICE__CAPACITY", "64MiB")
    monkeypatch.setenv("TIERKV_DISK__CAPACITY", "0")
    monkeypatch.setenv("TIERKV_PREFIX__WRITE_POLICY", "never")
    check(one_object(cli("demo", "--model", tiny, "--prompt-tokens", 2000, "--max-new-tokens", 3, "--json").stdout))


def test_bad_input(cli, tiny):
    assert_one_line_error(cli("demo", "--model", "/no/such"), "/no/such")
    assert_one_line_error(cli("demo", "--prompt-tokens", 100), "--prompt-tokens")
    result = cli("demo", "--model", tiny, "--prompt-tokens", 2 * LIMIT)
    assert result.exit_code == 2
    assert "limit" in result.stderr


def test_a_failed_self_check_is_said_and_ends_with_1(cli, tiny, monkeypatch, restart_here):
    monkeypatch.setattr(demo_run, "same_logits", lambda *_: False)
    result = cli("demo", "--model", tiny, "--prompt-tokens", 2000, "--max-new-tokens", 3, "--json")
    assert result.exit_code == 1
    assert one_object(result.stdout)["failures"] == ["the logits differ from those of the stock cache"]
    assert result.stderr.splitlines()[-1].startswith("error: ")


def outcome(**changes):
    """Make the outcome of a good run, with changes."""
    tiers = {name: TierStats(100, 80, 90, 5, 0, 6) for name in ("device", "host", "disk")}
    stats = Stats(tiers, {}, 1000, 1, "gathered", "", 1, 0, None, "")
    streams = []
    for tokens in ([1, 2, 3], changes.pop("tokens", [1, 2, 3])):
        streams.append(TokenStream())
        streams[-1].tokens = tokens
    stats = replace(stats, **{name: changes.pop(name) for name in list(changes) if name in {"tiers", "kv_bytes_total"}})
    again = demo_run.Restarted(changes.pop("again", streams[1].tokens), 0.1, changes.pop("computed", 7))
    return demo_run.Outcome(
        demo_run.Run(streams[0]), demo_run.Run(streams[1], 1500, stats), again,
        **{"logits_bit_identical": True, **changes},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": [1, 9, 3]}, "new token 2"),
        ({"tokens": [1, 2]}, "new token 3"),
        ({"logits_bit_identical": False}, "logits"),
        ({"kv_bytes_total": 400}, "not under half"),
        ({"again": [1, 2, 9]}, "after the restart the tokens differ"),
        ({"computed": 1500}, "after the restart 1,500 of the prompt's tokens were computed"),
        (
            {"tiers": {n: TierStats(100, 80, 101, 5, 0, 6) for n in ("device", "host")}},
            "the device tier took 101 bytes",
        ),
        ({"tiers": {n: TierStats(100, 80, 90, 0, 3, 6) for n in ("device", "host")}}, "no block lies in the host tier"),
    ],
)
def test_every_self_check_finds_its_fault(changes, words):
    assert demo_run.failures(outcome()) == []
    assert words in "; ".join(demo_run.failures(outcome(**changes)))


def test_the_prompt_is_real_text_of_about_the_length_asked_for():
    tokenizer = byte_tokenizer()
    assert len("\n\n".join(document())) > 60_000
    for wanted in (1500, 2000, 20_000):
        inputs = demo_inputs(tokenizer, wanted)
        assert wanted - 1000 < inputs["input_ids"].shape[1] <= wanted
        text = decode(tokenizer, inputs["input_ids"][0].tolist())
        assert text.endswith(f"{QUESTION}\n[assistant] ")
        assert "context manager" in text
    with pytest.raises(BadInput, match="no room"):
        demo_inputs(tokenizer, 60)


@pytest.mark.slow
@pytest.mark.parametrize("live", [True, False])
def test_on_a_terminal_the_tiers_are_shown_at_work(tiny, clean_environment, live):
    args = ("demo", "--model", tiny, "--prompt-tokens", 2000, "--max-new-tokens", 60, "--json")
    with on_terminal("stderr", *args, *(["--live"] if live else [])) as (process, screen):
        code, stdout, _ = finish(process)
    assert code == 0, bytes(screen)
    shown = one_object(stdout)
    check(shown)
    assert set(shown["seconds"]) == {"load", "dynamic", "tierkv", "logits", "restart"}
    assert (b"engine 1" in screen) == live
    assert bool(re.search(rb"[1-9][\d,]* tokens in [1-9]", screen)) == live
    assert (b"KV cache in three tiers" in screen) != live  # one or the other
    assert screen.rindex(b"\x1b[?25h") > screen.rindex(b"\x1b[?25l")  # the cursor is back


def test_without_a_terminal_live_changes_nothing(cli, tiny, restart_here):
    done = cli("demo", "--model", tiny, "--prompt-tokens", 2000, "--max-new-tokens", 3, "--live", "--json")
    check(one_object(done.stdout))
    assert "engine 1" not in done.stderr


@pytest.mark.slow
def test_nothing_of_a_killed_run_is_left_after_the_next(start, tiny, clean_environment):
    command = ("demo", "--json", "--model", tiny, "--prompt-tokens", 2000, "--max-new-tokens")
    process = start(*command, 300)
    wait_for(lambda: spilled_bytes(clean_environment) > 200_000, process)
    code, _, _ = stop(process, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert spill_files(clean_environment), "the kill came too late to leave anything"
    code, stdout, _ = finish(start(*command, 4))
    assert code == 0
    check(one_object(stdout))
    assert spill_files(clean_environment) == []


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(600)
def test_the_real_model_answers_from_three_tiers(cli):
    shown = one_object(cli("demo", "--json").stdout)
    check(shown)
    assert shown["model"] == "SmolLM2-135M-Instruct"
    assert shown["prompt_tokens"] >= 1500
    assert shown["new_tokens"] >= 48
    assert "with" in shown["text"]
