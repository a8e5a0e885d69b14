"""``tierkv simulate``: what is refused, what is printed, its sweeps and its page, and how it ends."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.cli.commands import assert_one_line_error, finish, one_object

LINE = '{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}\n'
TURNS = "timestamp_seconds,session,input_tokens,output_tokens\n0,a,3000,40\n5,b,2000,40\n9,a,3500,40\n"
SMALL = ("--sessions", "6", "--turns", "3", "--clients", "3")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--profile", "h10"], ["h10", "h100"]),
        (["--model", "llama-3.1-8c"], ["llama-3.1-8c", "llama-3.1-8b"]),
        (["--preset", "coder"], ["--preset", "'coder'", "agent, chat, hicache"]),
        (["--policy", "fifo"], ["--policy", "lru, s3fifo, cost"]),
        (["--dtype", "int4"], ["--dtype", "bfloat16"]),
        (["--block-size", "48"], ["--block-size", "16, 32, 64, 128, 256, 512"]),
        (["--device", "1MiB"], ["cannot hold the 2 blocks", "64MiB"]),
        (["--device", "1TiB"], ["1TiB", "not possible", "beside the weights h100 has 6"]),
        (["--device", "40%"], ["--device", "share"]),
        (["--host", "lots"], ["--host", "not a size"]),
        (
            ["--profile", "laptop", "--model", "llama-3.2-1b", "--host", "1GiB"],
            ["--host", "laptop", "the device is the RAM"],
        ),
        (["--sessions", "0"], ["--sessions"]),
        (["--batch", "0"], ["--batch"]),
        (["--seed", "-1"], ["--seed"]),
        (["--sweep", "hots=1GiB..2GiB"], ["--sweep", "did you mean host=?"]),
        (["--sweep", "host=1GiB,2GiB", "--sweep", "host=1GiB,4GiB"], ["two different things"]),
        (["--sweep", "device=8GiB,1TiB"], ["1TiB", "not possible"]),
        (["--model", "llama-3.1-70b"], ["weights", "needs"]),
        (["--report", "/nowhere/x.html"], ["/nowhere/x.html", "folder does not exist"]),
    ],
)
def test_bad_options_are_one_line(cli, options, words):
    assert_one_line_error(cli("simulate", *options), *words)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.jsonl", LINE + "{}\n", ["line 2", '"input_length" is missing']),
        ("t.jsonl", "{", ["line 1", "not a JSON object"]),
        ("t.jsonl", "", ["no request in it"]),
        ("t.csv", TURNS + "10,a,x,5\n", ["line 5", '"input_tokens"']),
        ("t.csv", "a,b\n", ["line 1", "the columns are not named"]),
        ("t.csv", TURNS.splitlines()[0], ["no request in it"]),
    ],
)
def test_a_bad_trace_is_one_line(cli, tmp_path, name, text, words):
    path = tmp_path / name
    path.write_text(text)
    assert_one_line_error(cli("simulate", path), str(path), *words)


def test_a_trace_that_cannot_be_read_is_one_line(cli, tmp_path):
    assert_one_line_error(cli("simulate", tmp_path / "none"), "No such file", "give a trace that can be read")
    assert_one_line_error(cli("simulate", tmp_path), "Is a directory")


@pytest.mark.parametrize(
    "option", [("--preset", "chat"), ("--sessions", "3"), ("--seed", "0"), ("--turns", "2"), ("--clients", "1")]
)
def test_a_trace_has_no_preset(cli, tmp_path, option):
    path = tmp_path / "t.csv"
    path.write_text(TURNS)
    assert_one_line_error(cli("simulate", path, *option), option[0], "exclude each other")


def test_json_is_one_object_and_the_same_each_time(cli):
    records = []
    for _ in range(2):
        done = cli("simulate", "--profile", "h100", "--model", "llama-3.1-8b", *SMALL, "--seed", "5", "--json")
        assert done.exit_code == 0, done.stderr
        assert "simulating" in done.stderr
        records.append(one_object(done.stdout))
    result, again = records
    assert result.pop("wall_seconds") > 0
    again.pop("wall_seconds")
    assert result == again
    assert set(result["hit_ratio"]) == {"device", "host", "disk", "total", "ceiling"}
    for name in ("ttft_seconds", "inter_token_seconds"):
        assert result[name]["p50"] <= result[name]["p90"] <= result[name]["p99"]
    assert result["sessions"] == 6
    assert result["refused"] == {"requests": 0, "reasons": {}}
    assert result["workload"]["turns"] == 3
    assert 55 * 2**30 < result["budgets"]["device"] < 60 * 2**30
    assert "simulated" in result["kind"]


@pytest.mark.parametrize(("name", "text", "requests"), [("t.csv", TURNS, 3), ("t.jsonl", LINE * 4, 4)])
def test_a_trace_is_simulated(cli, tmp_path, name, text, requests):
    path = tmp_path / name
    path.write_text(text)
    done = cli("simulate", path, "--json")
    assert done.exit_code == 0, done.stderr
    result = one_object(done.stdout)
    assert (result["trace"], result["requests"]) == (str(path), requests)
    assert result["hit_ratio"]["device"] == result["hit_ratio"]["ceiling"] > 0


def test_tables_are_printed(cli):
    done = cli("simulate", *SMALL, "--host", "0", "--disk", "0")
    assert done.exit_code == 0, done.stderr
    for words in (
        "56.",
        "no host, no disk",
        "prompts found",
        "without bounds",
        "first token, served",
        "between tokens",
    ):
        assert words in done.stdout
    assert not re.search(r"\bnan\b|None", done.stdout)


def test_answers_of_one_token_have_no_time_between_tokens(cli):
    done = cli("simulate", "--preset", "hicache", "--sessions", "3", "--turns", "2", "--json")
    assert one_object(done.stdout)["inter_token_seconds"]["p50"] is None
    assert cli("simulate", "--preset", "hicache", "--sessions", "3", "--turns", "2").exit_code == 0


def test_a_sweep_gives_points_and_a_page(cli, tmp_path):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    page = tmp_path / "sweep.html"
    done = cli("simulate", *SMALL, "--device", "2GiB", "--sweep", "host=1GiB..16GiB/3", "--report", page, "--json")
    assert done.exit_code == 0, done.stderr
    result = one_object(done.stdout)
    assert result["sweep"] == [{"key": "host", "values": [2**30, 2**32, 2**34]}]
    assert [point["host"] for point in result["points"]] == [2**30, 2**32, 2**34]
    found = [point["hit_ratio"]["total"] for point in result["points"]]
    assert found == sorted(found)
    assert {point["hit_ratio"]["ceiling"] for point in result["points"]} == {
        result["points"][0]["hit_ratio"]["ceiling"]
    }
    text = page.read_text()
    assert text.count("<svg") >= 4
    assert "tierkv simulate" in text


@pytest.mark.parametrize(
    "sweeps", [["host=0,4GiB", "policy=lru,cost"], ["policy=lru,s3fifo"], ["batch=1..4/2", "clients=1,3"]]
)
def test_other_sweeps_have_pages_too(cli, tmp_path, sweeps):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    page = tmp_path / "sweep.html"
    options = [part for sweep in sweeps for part in ("--sweep", sweep)]
    done = cli("simulate", *SMALL, "--device", "4GiB", "--disk", "64GiB", *options, "--report", page)
    assert done.exit_code == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 6
    assert "<svg" in page.read_text()


def test_one_simulation_has_a_page(cli, tmp_path):
    pytest.importorskip("jinja2")
    pytest.importorskip("matplotlib")
    page = tmp_path / "one.html"
    done = cli("simulate", *SMALL, "--report", page)
    assert done.exit_code == 0, done.stderr
    text = page.read_text()
    assert text.count("<svg") >= 3
    assert "without bounds" in text


def test_a_machine_without_a_gpu_is_simulated(cli):
    done = cli("simulate", "--profile", "laptop", "--model", "llama-3.2-1b", *SMALL, "--block-size", "64", "--json")
    assert done.exit_code == 0, done.stderr
    assert one_object(done.stdout)["sessions"] == 6


def test_help_has_examples(cli):
    done = cli("simulate", "--help")
    assert done.exit_code == 0
    assert "Examples" in done.stdout
    assert "tierkv simulate --profile h100" in done.stdout


def test_it_loads_no_torch():
    code = (
        "import sys; from tierkv.cli.commands import app; "
        "app(['simulate', '--sessions', '2', '--turns', '2', '--json'], standalone_mode=False); "
        "print(*({'torch', 'transformers', 'lmdb'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert done.stderr.splitlines()[-1] == ""


@pytest.mark.parametrize("sweep", [[], ["--sweep", "host=8GiB..64GiB/4"]])
@pytest.mark.parametrize(("number", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_a_signal_ends_it_with_one_line(start, number, code, word, sweep):
    process = start("simulate", "--sessions", "5000", "--json", *sweep)
    time.sleep(2)
    assert process.poll() is None
    process.send_signal(getattr(signal, number))
    assert finish(process, 20) == (code, "", f"{word}\n")
