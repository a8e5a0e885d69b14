"""``tierkv bench restore``: what is refused, the contract of its JSON, and how it ends."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.cli.commands import LIMIT, assert_one_line_error, finish, one_object, wait_for

KEYS = {
    "prompt_tokens", "dtype", "kv_bytes", "ttft_seconds", "ttft_seconds_all", "restore_bytes_per_second",
    "raw_read_bytes_per_second", "restore_ratio", "ttft_ratio_restart", "tokens_equal", "page_cache_dropped",
    "decode_step_seconds", "write_behind", "prefilled_tokens", "targets",
}  # fmt: skip
CONTENDERS = {"cold", "warm_process", "warm_restart", "deepcopy", "torch_load", "safetensors"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--prompt-tokens", "0"], ["--prompt-tokens", "'0'", "1 to 1,000,000"]),
        (["--prompt-tokens", "2000,x"], ["'x'", "whole numbers"]),
        (["--prompt-tokens", "256,2000"], ["256 tokens are too few", "from 257 on", "longer prompts"]),
        (["--prompt-tokens", "500", "--block-size", "512"], ["500 tokens are too few", "from 513 on"]),
        (["--dtype", "int8"], ["--dtype", "'int8'", "float32, bfloat16, float16"]),
        (["--block-size", "24"], ["--block-size", "'24'", "16, 32, 64, 128, 256, 512"]),
        (["--runs", "0"], ["--runs"]),
        (["--prefills", "0"], ["--prefills"]),
        (["--save", "/proc/x/y"], ["--save /proc/x/y", "file that can be written"]),
    ],
)
def test_bad_options_are_one_line(cli, options, words):
    assert_one_line_error(cli("bench", "restore", *options), *words)


def test_a_disk_path_that_is_a_file_is_one_line(cli, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert_one_line_error(cli("bench", "restore", "--disk-path", file), f"--disk-path {file}", "give a folder")


def test_help_teaches(cli):
    done = cli("bench", "restore", "--help")
    assert done.exit_code == 0
    for word in ("Examples", "--prompt-tokens", "--save", "page cache", "tierkv bench restore"):
        assert word in done.stdout


@pytest.mark.slow
def test_what_the_model_decides_is_refused_before_anything_is_computed(cli, tiny, tmp_path):
    options = ("--disk-path", tmp_path)
    result = cli("bench", "restore", "--model", "/no/such", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith("error: /no/such: no such file or folder")
    result = cli("bench", "restore", "--model", tiny, "--prompt-tokens", LIMIT, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"legal: up to {LIMIT - 9:,}" in result.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_json_is_one_object_and_kept(start, tiny, tmp_path):
    kept = tmp_path / "new" / "record.json"
    options = ["--model", tiny, "--dtype", "float32", "--prompt-tokens", "600,300", "--runs", "2", "--prefills", "1"]
    more = ["--disk-path", tmp_path, "--save", kept, "--json"]
    code, stdout, stderr = finish(start("bench", "restore", *options, *more), 300)
    assert code == 0, stderr
    result = one_object(stdout)
    assert json.loads(kept.read_text()) == result
    assert [row["prompt_tokens"] for row in result["rows"]] == [300, 600]
    for row in result["rows"]:
        assert set(row) >= KEYS
        assert set(row["ttft_seconds"]) == CONTENDERS
        assert row["tokens_equal"] is True
        assert {"cpu_percent", "wall_percent"} <= set(row["write_behind"])
        assert all({"value", "met"} < set(target) for target in row["targets"].values())
    assert {key: result[key] for key in result["rows"][1]} == result["rows"][1]
    assert result["prefilled_tokens"] == {"cold": 600, "warm_restart": 600 % 32}
    assert {one["contender"] for one in result["left_out"]} <= {"kvboost", "llama.cpp"}
    assert {"machine", "file_system", "command", "model", "text"} <= set(result)
    assert not list(tmp_path.glob("tierkv-bench-*"))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_a_signal_ends_it_and_its_processes(start, tiny, tmp_path, number, code, word):
    process = start("bench", "restore", "--model", tiny, "--prompt-tokens", "300", "--disk-path", tmp_path, "--json")
    wait_for(lambda: list(tmp_path.glob("tierkv-bench-*/tierkv-300")), process)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 4
    process.send_signal(getattr(signal, number))
    ended, stdout, stderr = finish(process)
    assert (ended, stdout) == (code, "")
    assert stderr.splitlines()[-1] == word
    for child in children:
        with pytest.raises(ProcessLookupError):
            os.kill(int(child), signal.SIG_DFL)
    assert not list(tmp_path.iterdir())
