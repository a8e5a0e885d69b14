"""``tierkv bench sessions``: what is refused, the contract of its JSON, and how it ends."""

import json
import signal

import pytest

from tests.cli.commands import assert_one_line_error, finish, one_object

SMALL = (
    "--shortest", "60", "--longest", "400", "--system-tokens", "100", "--answer", "3", "--max-sessions", "7",
)  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dtype", "int8"], ["--dtype", "'int8'", "float32, bfloat16"]),
        (["--longest", "1400"], ["--longest 1400", "give at least 1500"]),
        (["--device", "5"], ["device.capacity = 5 bytes", "working set", "give it for example"]),
        (["--device", "many"], ["--device", '"many" is not a size', "512MiB"]),
        (["--host", "40%"], ["--host", "40%", "share of what is free"]),
        (["--disk", "1 gb"], ["--disk", "is not a size"]),
        (["--max-sessions", "1"], ["--max-sessions"]),
        (["--threads", "-1"], ["--threads"]),
        (["--longest", "9000"], ["8,192"]),
        (["--system-tokens", "800000", "--longest", "900000"], ["8,192"]),
        (["--model", "no/such/model.gguf"], ["no/such/model.gguf", "no such file"]),
        (["--save", "/proc/x/y"], ["--save /proc/x/y", "file that can be written"]),
        (["--host", "900000GiB"], ["need about", "is free", "--host"]),
    ],
)
def test_bad_options_are_one_line(cli, tiny, options, words):
    if "--model" not in options:
        options = ["--model", tiny, *options]
    done = cli("bench", "sessions", *options)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.exit_code, done.stdout, len(errors)) == (2, "", 1), done.output
    for word in words:
        assert word in errors[0]


def test_options_are_refused_before_a_model_is_loaded(cli):
    for options in (["--dtype", "x"], ["--device", "x"], ["--longest", "20"], ["--save", "/proc/x/y"]):
        assert_one_line_error(cli("bench", "sessions", "--model", "no-such-model", *options), options[0])


def test_a_budget_that_holds_nothing_is_one_line(cli, tiny):
    done = cli("bench", "sessions", "--model", tiny, *SMALL, "--device", "500KiB")
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith("error: --device 500KiB does not hold the first conversation")


def test_a_disk_path_that_is_a_file_is_one_line(cli, tiny, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    done = cli("bench", "sessions", "--model", tiny, *SMALL, "--disk-path", file)
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: --disk-path {file}")


def test_json_is_one_object_and_kept(cli, tiny, tmp_path, monkeypatch):
    from tierkv.benchmarks import sessions

    monkeypatch.setattr(sessions, "BOUND", 1000.0)  # this machine may do anything while it is tested
    kept = tmp_path / "new" / "record.json"
    done = cli(
        "bench", "sessions", "--model", tiny, *SMALL, "--threads", "2", "--disk-path", tmp_path / "disk", "--json",
        "--save", kept,
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    result = one_object(done.stdout)
    assert json.loads(kept.read_text()) == result
    layouts = ["contiguous", "paged", "shared", "tiered"]
    for name in ("sessions_held", "p90_turn_seconds", "device_bytes", "ram_bytes", "disk_bytes", "layouts"):
        assert list(result[name]) == layouts
    held = result["sessions_held"]
    assert held["contiguous"] == 5
    assert held["contiguous"] <= held["paged"] <= held["shared"] <= held["tiered"] == 7
    assert "tiered" in result["at_least"]
    assert result["tokens_equal"] is True
    assert all(0 < size <= result["budget_bytes"]["device"] for size in result["device_bytes"].values())
    assert result["device_bytes"]["contiguous"] == 5 * result["reserved_bytes_per_session"]
    assert result["ram_bytes"]["paged"] == result["disk_bytes"]["shared"] == 0
    assert result["mix"]["seed"] == 0
    assert len(result["mix"]["prompt_tokens"]) == 7
    assert result["saved_bytes"] >= 0
    assert result["tiered_rounds"][-1]["sessions"] == 7
    assert result["threads"]["threads"] == 2
    assert {"model", "dtype", "machine", "seconds", "command", "file_system"} <= set(result)
    assert not list((tmp_path / "disk").iterdir())
    assert "filling device, host memory and disk" in done.stderr


def test_a_table_is_printed(cli, tiny, monkeypatch):
    from tierkv.benchmarks import sessions

    monkeypatch.setattr(sessions, "BOUND", 1000.0)
    done = cli("bench", "sessions", "--model", tiny, *SMALL, "--dtype", "bfloat16", "--max-sessions", "2")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["layout", "held", "p90", "turn", "device", "RAM", "disk"]
    assert [line.split()[0] for line in lines[1:5]] == ["contiguous", "paged", "shared", "tiered"]
    assert "2 or more" in lines[4]
    assert "conversations of 60 to 400 tokens" in done.stdout
    assert "answers: " in lines[-1]


def test_answers_that_differ_fail_it_after_the_record(cli, tiny, tmp_path, monkeypatch):
    from tierkv.benchmarks import sessions, sessions_run

    real = sessions_run.reference_of

    def wrong(*args):
        found = real(*args)
        found.answer[-1] += 1
        return found

    monkeypatch.setattr(sessions, "reference_of", wrong)
    monkeypatch.setattr(sessions, "BOUND", 1000.0)
    kept = tmp_path / "record.json"
    done = cli("bench", "sessions", "--model", tiny, *SMALL, "--max-sessions", "2", "--json", "--save", kept)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith("error: answers differ from the stock cache's")
    assert one_object(done.stdout)["tokens_equal"] is False
    assert kept.exists()


def test_help_has_examples(cli):
    done = cli("bench", "sessions", "--help")
    assert done.exit_code == 0
    assert "Examples" in done.stdout
    assert "tierkv bench sessions" in done.stdout


@pytest.mark.parametrize(("number", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_a_signal_ends_it_with_one_line_and_leaves_nothing(start, tiny, tmp_path, number, code, word):
    folder = tmp_path / "disk"
    options = [*SMALL, "--max-sessions", "30", "--threads", "2", "--disk-path", folder, "--json"]
    process = start("bench", "sessions", "--model", tiny, *options)
    while not process.stderr.readline().startswith("filling the device in blocks"):
        assert process.poll() is None
    process.send_signal(getattr(signal, number))
    ended, stdout, stderr = finish(process)
    assert (ended, stdout, stderr.splitlines()[-1]) == (code, "", word)
    assert not list(folder.iterdir())
