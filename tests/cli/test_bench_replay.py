"""``tierkv bench replay``: what is refused, what is printed, and how it ends."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.cli.commands import assert_one_line_error, finish, one_object

LINE = '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}\n'


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--preset", "coder"], ["--preset", "'coder'", "agent, chat, hicache"]),
        (["--preset", ""], ["--preset", "''"]),
        (["--policies", "lru,fifo"], ["--policies", "'fifo'", "lru, s3fifo, cost, belady"]),
        (["--capacities", "5"], ["--capacities", "'5'", "from 0.01% to 100%"]),
        (["--capacities", "5%,0%"], ["'0%'"]),
        (["--capacities", "101%"], ["'101%'"]),
        (["--capacities", "nan%"], ["'nan%'"]),
        (["--capacities", "5%,,9%"], ["''"]),
        (["--sessions", "0"], ["--sessions"]),
        (["--seed", "-1"], ["--seed"]),
        (["--save", "/proc/x/y"], ["--save /proc/x/y", "file that can be written"]),
    ],
)
def test_bad_options_are_one_line(cli, options, words):
    assert_one_line_error(cli("bench", "replay", *options), *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LINE + "{}\n", ["line 2", '"input_length" is missing']),
        ("# a comment\n", ["line 1", "not a JSON object"]),
        ("", ["no request has a full block of 512 tokens"]),
        (LINE.replace("1100", "511").replace("[1, 2, 3]", "[1]"), ["no request has a full block"]),
    ],
)
def test_a_bad_trace_is_one_line(cli, tmp_path, text, words):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    assert_one_line_error(cli("bench", "replay", path), str(path), *words)


def test_a_trace_that_cannot_be_read_is_one_line(cli, tmp_path):
    assert_one_line_error(cli("bench", "replay", tmp_path / "none"), "No such file", "give a trace that can be read")
    assert_one_line_error(cli("bench", "replay", tmp_path), "Is a directory")


@pytest.mark.parametrize("option", [("--preset", "chat"), ("--sessions", "3"), ("--seed", "0")])
def test_a_trace_has_no_preset(cli, tmp_path, option):
    assert_one_line_error(cli("bench", "replay", tmp_path / "none", *option), option[0], "exclude each other")


def test_json_is_one_object_and_kept(cli, tmp_path):
    kept = tmp_path / "new" / "record.json"
    done = cli(
        "bench", "replay", "--preset", "hicache,chat", "--sessions", "4", "--seed", "7", "--capacities", "10%,99.5%",
        "--json", "--save", kept,
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    result = one_object(done.stdout)
    assert json.loads(kept.read_text()) == result
    assert "simulated" in result["kind"]
    assert [(one["trace"], one["seed"], one["workload"]["sessions"]) for one in result["traces"]] == [
        ("hicache", 7, 4),
        ("chat", 7, 4),
    ]
    assert len(result["rows"]) == 2 * 2 * 4
    for row in result["rows"]:
        trace = next(one for one in result["traces"] if one["trace"] == row["trace"])
        assert 0 <= row["block_hit_ratio"] <= trace["ceiling"] < 1
        assert row["capacity_bytes"] == pytest.approx(trace["unique_bytes"] * row["capacity_percent"] / 100)
    again = cli(
        "bench", "replay", "--preset", "hicache,chat", "--sessions", "4", "--seed", "7", "--capacities", "10%,99.5%",
        "--json",
    )  # fmt: skip
    assert one_object(again.stdout)["rows"] == result["rows"]


def test_a_trace_is_replayed_and_printed(cli, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(LINE * 4)
    done = cli("bench", "replay", path, "--capacities", "50%, 100%", "--policies", "cost,lru")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{path}: 4 requests ask for 8 blocks, 2 different ones; ceiling 75.0% of blocks")
    assert lines[1].split() == ["capacity", "room", "policy", "blocks", "tokens", "compute", "evicted"]
    assert [line.split() for line in lines[2:6]] == [
        ["50%", "64MiB", "cost", "37.5%", "34.9%", "37.2%", "0"],
        ["lru", "37.5%", "34.9%", "37.2%", "0"],
        ["100%", "128MiB", "cost", "75.0%", "69.8%", "75.0%", "0"],
        ["lru", "75.0%", "69.8%", "75.0%", "0"],
    ]
    assert "simulated" in lines[-1]
    assert "replaying" in done.stderr


def test_help_has_examples(cli):
    done = cli("bench", "replay", "--help")
    assert done.exit_code == 0
    assert "Examples" in done.stdout
    assert "tierkv bench replay" in done.stdout


def test_it_loads_no_torch():
    code = (
        "import sys; from tierkv.cli.commands import app; "
        "app(['bench', 'replay', '--sessions', '2', '--json'], standalone_mode=False); "
        "print(*({'torch', 'transformers', 'lmdb'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert one_object(done.stdout)
    assert done.stderr.splitlines()[-1] == ""


@pytest.mark.parametrize(("number", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_a_signal_ends_it_with_one_line(start, number, code, word):
    process = start("bench", "replay", "--sessions", "300", "--json")
    assert process.stderr.readline().startswith("making up chat: ")
    process.send_signal(getattr(signal, number))
    assert finish(process) == (code, "", f"{word}\n")


def test_a_record_goes_nowhere_it_could_harm(cli, tmp_path):
    trace, link, pipe = tmp_path / "t.jsonl", tmp_path / "link.json", tmp_path / "pipe"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n' * 3)
    os.mkfifo(pipe)
    target = tmp_path / "target.json"
    target.write_text("old")
    link.symlink_to(target)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/s\xff.json")
    for save, said in [
        (trace, "the trace itself"),
        (pipe, "no regular file"),
        (loop, "circles"),
        (odd, "UTF-8"),
        ("", "empty"),
    ]:
        assert_one_line_error(cli("bench", "replay", str(trace), "--save", str(save)), said)
    assert cli("bench", "replay", str(trace), "--save", str(link)).exit_code == 0
    assert link.is_symlink()
    assert '"rows"' in target.read_text()
