"""``tierkv bench scenarios``: what is refused, the contract of its JSON, and how it ends."""

import json
import signal
import subprocess
import sys

import pytest

from tests.cli.commands import assert_one_line_error, finish, one_object
from tierkv.benchmarks.scenarios_mix import Plan, Scenario
from tierkv.benchmarks.sessions_mix import MixPlan
from tierkv.cli import bench_scenarios

SMALL = Plan(
    scenarios={
        "short_chats": Scenario("short chats", count=3, shortest=20, longest=60, answer=2),
        "long_documents": Scenario("long documents", count=3, shortest=200, longest=260, answer=2),
        "many_concurrent": Scenario("many at once", count=6, shortest=20, longest=60, answer=2),
        "multi_turn": Scenario("multi-turn", count=3, shortest=60, longest=70, turns=(2, 4), answer=2),
        "shared_prefix": Scenario("shared prefix", count=3, shortest=20, longest=50, system=100, answer=2),
    },
    mixed=MixPlan(count=4, shortest=60, longest=300, system=100, answer=2),
    reserved_sessions=2,
    context=336,
    decode_contexts=(64, 128, 256),
    recompute_lengths=(16, 64, 128),
    rounds=3,
    fragments=1 / 64,
)
LAYOUTS = ["contiguous", "paged", "tiered"]


@pytest.fixture
def small(monkeypatch):
    """Make ``--quick`` as small as it can be, and be patient: this machine may do anything while it is tested."""
    from tierkv.benchmarks import sessions

    monkeypatch.setattr(bench_scenarios, "QUICK", SMALL)
    monkeypatch.setattr(sessions, "BOUND", 1000.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dtype", "int8"], ["--dtype", "'int8'", "float32, bfloat16"]),
        (["--only", "multiturn"], ["--only", "'multiturn'", "did you mean multi_turn?", "shared_prefix"]),
        (["--only", "short_chats,"], ["--only", "''", "short_chats, long_documents"]),
        (["--context", "0"], ["--context"]),
        (["--context", "500"], ["--context 500", "long_documents", "6,068 tokens", "give at least 6068"]),
        (["--quick", "--context", "70", "--only", "short_chats"], ["--context 70", "give at least 164"]),
        (["--save", "/proc/x/y"], ["--save /proc/x/y", "file that can be written"]),
    ],
)
def test_options_are_refused_before_a_model_is_loaded(cli, options, words):
    assert_one_line_error(cli("bench", "scenarios", "--model", "no-such-model", *options), *words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--context", "9000", "--only", "short_chats"], ["--context 9000", "limit of 8,192", "give at most 8192"]),
        (["--model", "no/such/model.gguf"], ["no/such/model.gguf", "no such file"]),
    ],
)
def test_what_the_model_cannot_take_is_one_line(cli, tiny, options, words):
    if "--model" not in options:
        options = ["--model", tiny, *options]
    done = cli("bench", "scenarios", *options)
    assert (done.exit_code, done.stdout) == (2, "")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    for word in words:
        assert word in errors[0]


@pytest.mark.parametrize(
    ("limit", "only", "words"),
    [
        (1000, "short_chats,long_documents,decode", ["long_documents", "6,068 tokens", "limit is 1,000", "--quick"]),
        (4100, "mixed_load,fragmentation", ["mixed_load", "4,172 tokens", "--only fragmentation"]),
        (1500, "decode", ["decode needs three contexts", "limit is 1,500", "--only fragmentation"]),
    ],
)
def test_a_model_with_a_small_limit_is_told_what_would_do(cli, tiny, tmp_path, limit, only, words):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": limit}))
    done = cli("bench", "scenarios", "--model", folder, "--only", only)
    assert done.exit_code == 2
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: ")
    for word in words:
        assert word in error


def test_too_little_memory_is_one_line(cli, tiny, monkeypatch):
    monkeypatch.setattr(bench_scenarios, "free_memory", lambda: 1 << 20)
    done = cli("bench", "scenarios", "--model", tiny, "--quick")
    assert done.exit_code == 2
    assert "1MiB is free; give --quick" in done.stderr.splitlines()[-1]


def test_a_disk_path_that_is_a_file_is_one_line(cli, tiny, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    done = cli("bench", "scenarios", "--model", tiny, "--quick", "--disk-path", file)
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: --disk-path {file}")


@pytest.mark.slow
def test_json_is_one_object_and_kept(cli, tiny, tmp_path, small):
    kept = tmp_path / "new" / "record.json"
    done = cli(
        "bench", "scenarios", "--model", tiny, "--quick", "--disk-path", tmp_path / "disk", "--json", "--save", kept
    )
    assert done.exit_code == 0, done.stderr
    result = one_object(done.stdout)
    assert json.loads(kept.read_text()) == result
    assert list(result["scenarios"]) == list(SMALL.scenarios)
    for one in result["scenarios"].values():
        held = [one[name]["sessions_held"] for name in LAYOUTS]
        assert held[0] == 2
        assert held[2] == one["conversations"]
        for name in LAYOUTS:
            row = one[name]
            assert set(row["kv_bytes"]) == {"device", "host", "disk"}
            assert row["kv_bytes"]["device"] <= one["budget_bytes"]["device"]
            assert row["used_bytes"] <= sum(row["kv_bytes"].values())
            assert 0 <= row["waste_fraction"] < 1
            assert row["round_seconds"] > 0
            assert row["tokens_equal"]
        assert one["contiguous"]["waste_fraction"] > one["paged"]["waste_fraction"]
        assert {"mean_tokens", "longest_tokens", "reserved_bytes_per_session", "shows"} <= set(one)
    assert list(result["scenarios"]["multi_turn"]["by_turn"]) == ["2", "4"]
    for name in ("waste_fraction", "sessions_held"):
        assert list(result[name]) == LAYOUTS
    assert result["sessions_held"]["contiguous"] == 2
    assert list(result["dedup_saved_fraction_by_scenario"]) == list(SMALL.scenarios)
    assert result["dedup_saved_fraction_by_scenario"]["shared_prefix"] > 0.3
    assert 0 <= result["dedup_saved_fraction"] <= 1
    assert 0 < result["paging_saved_fraction"] < 1
    fit = result["decode_fit"]
    assert {"slope", "intercept", "r2", "points", "without_cache"} <= set(fit)
    assert [point["context"] for point in fit["points"]] == [64, 128, 256]
    assert fit["without_cache"]["exponent"] == pytest.approx(0.5, abs=1.5)
    assert set(fit["without_cache"]["times_faster_with_cache"]) == {"64", "128"}
    variants = result["fragmentation"]["variants"]
    assert variants["too_little_is_free"]["placed"] == {"contiguous": False, "paged": False, "tiered": True}
    assert (result["tokens_equal"], result["intact"], result["quick"]) == (True, True, True)
    assert {"model", "dtype", "machine", "file_system", "seconds", "command", "how"} <= set(result)
    assert not list((tmp_path / "disk").iterdir())
    for words in ("short chats, 3 conversations", "mixed load, 4 conversations", "timing tokens", "placing a sequence"):
        assert words in done.stderr


@pytest.mark.slow
def test_a_table_is_printed(cli, tiny, small):
    done = cli("bench", "scenarios", "--model", tiny, "--quick", "--only", "multi_turn,short_chats,fragmentation")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["scenario", "layout", "held", "waste", "bytes", "p90", "turn", "round"]
    assert [next(word for word in line.split() if word in LAYOUTS) for line in lines[1:7]] == LAYOUTS * 2
    assert lines[1].startswith("short chats  contiguous")
    assert lines[4].startswith("multi-turn   contiguous")
    assert "held by turn (contiguous, paged, tiered): turn 2: " in done.stdout
    assert "Fragmentation: " in done.stdout
    assert "Mixed load" not in done.stdout
    assert "--quick: fewer and shorter" in done.stdout
    assert lines[-1] == "answers: equal to the stock cache's"


@pytest.mark.slow
def test_answers_that_differ_fail_it_after_the_record(cli, tiny, tmp_path, monkeypatch, small):
    from tierkv.benchmarks import sessions, sessions_run

    real = sessions_run.reference_of

    def wrong(*args):
        found = real(*args)
        found.answer[-1] += 1
        return found

    monkeypatch.setattr(sessions, "reference_of", wrong)
    kept = tmp_path / "record.json"
    options = ["--model", tiny, "--quick", "--only", "short_chats", "--json", "--save", kept]
    done = cli("bench", "scenarios", *options)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith("error: answers differ from the stock cache's")
    result = one_object(done.stdout)
    assert result["tokens_equal"] is False
    assert result["scenarios"]["short_chats"]["paged"]["unequal_answers"]
    assert result["sessions_held"] is result["decode_fit"] is result["fragmentation"] is None
    assert kept.exists()


def test_what_is_read_back_otherwise_fails_it(cli, tiny, monkeypatch, small):
    from tierkv.benchmarks import scenarios_fragmentation

    monkeypatch.setattr(scenarios_fragmentation, "_same", lambda *_: False)
    done = cli("bench", "scenarios", "--model", tiny, "--quick", "--only", "fragmentation", "--json")
    assert done.exit_code == 1
    assert "was not read back as it was written" in done.stderr.splitlines()[-1]
    assert one_object(done.stdout)["intact"] is False


def test_help_teaches(cli):
    done = cli("bench", "scenarios", "--help")
    assert done.exit_code == 0
    for words in ("Examples", "tierkv bench scenarios --quick --json", "What the table says", "contiguous"):
        assert words in done.stdout


def test_help_loads_no_torch():
    code = (
        "import sys; from tierkv.cli.commands import app; "
        "app(['bench', 'scenarios', '--help'], standalone_mode=False); "
        "print(*({'torch', 'transformers', 'lmdb'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == ""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code", "word"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
def test_a_signal_ends_it_with_one_line_and_leaves_nothing(start, tiny, tmp_path, number, code, word):
    folder = tmp_path / "disk"
    process = start("bench", "scenarios", "--model", tiny, "--quick", "--disk-path", folder, "--json")
    while not process.stderr.readline().startswith("short chats, "):
        assert process.poll() is None
    process.send_signal(getattr(signal, number))
    ended, stdout, stderr = finish(process)
    assert (ended, stdout, stderr.splitlines()[-1]) == (code, "", word)
    assert not list(folder.iterdir())
