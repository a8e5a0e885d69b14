"""``tierkv tune`` and ``tierkv bench predict``: the real measurements on a tiny model, what is written, what is refused."""

import json
import tomllib
from dataclasses import replace

import pytest

from tests.cli.commands import assert_one_line_error, one_object
from tierkv import tune
from tierkv.config import load_config

pytest.importorskip("scipy")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Tune once for all tests: the start is bad on purpose."""
    folder = tmp_path_factory.mktemp("tuned")
    start = folder / "start.toml"
    start.write_text("block_size = 16\n[disk]\nreaders = 1\n[transfer]\nlayers_ahead = 0\n", encoding="utf-8")
    return folder, start


def test_it_measures_chooses_and_writes(cli, tiny, tuned, monkeypatch):
    fewer = replace(tune.QUICK, contexts=(0.4, 1.0), restored_sizes=(32, 64), rounds=3, finalists=1)
    monkeypatch.setattr(tune, "QUICK", fewer)
    folder, start = tuned
    out, machine, page = folder / "t.toml", folder / "here.toml", folder / "t.html"
    done = cli(
        "tune", "--quick", "--model", tiny, "--context", 2048, "--config", start, "--disk-path", folder / "disk", "--out", out,
        "--profile-out", machine, "--report", page, "--verify", "--json",
    )  # fmt: skip
    result = one_object(done.stdout)
    config = load_config(out, environ={})
    assert config.explicit().keys() >= result["reasons"].keys() >= {"block_size", "disk.readers", "device.capacity"}
    assert out.read_text(encoding="utf-8").count("# Why: ") == len(result["reasons"])
    assert result["out"] == str(out)
    assert set(result["predicted"]) == {"start", "tuned"}
    assert [row["what"] for row in result["verified"]] == ["a token, KV on device", "a token, KV on disk", "a restore"]
    for row in result["verified"]:
        for name in ("start", "tuned"):
            assert row[name]["predicted_seconds"] > 0
            assert row[name]["measured_seconds"] > 0
    for contest in result["contests"]:
        assert contest["rows"][0]["value"] == {"block_size": 16, "disk.readers": 1, "transfer.layers_ahead": 0}.get(
            contest["key"], "auto"
        )
    assert {kind for kind, errors in result["fit_errors"].items() if errors["median"] < 1} == {
        "decode",
        "prefill",
        "restore",
    }
    assert not list((folder / "disk").iterdir()), "measurements leave nothing behind"
    assert "block_size" in page.read_text(encoding="utf-8")
    assert tomllib.loads(machine.read_text(encoding="utf-8"))["measured"]["layers"] > 0

    # The profile is one that plan and simulate take, and the configuration one that generate takes.
    planned = one_object(
        cli("plan", "--model", "smollm2-135m", "--context", 512, "--profile", machine, "--json").stdout
    )
    assert planned["profile"]
    answered = cli(
        "generate", "--model", tiny, "--config", out, "--prompt", "one two three", "--max-new-tokens", 3, "--json"
    )
    assert one_object(answered.stdout)


def test_without_a_file_the_configuration_goes_to_standard_output(cli, tiny, tmp_path, monkeypatch):
    effort = tune.Effort((0.4, 1.0), (0.5, 1.0), (32,), ((0.05, 0), (0.1, 0), (0.05, 0.1)), rounds=2, finalists=1)
    monkeypatch.setattr(tune, "QUICK", effort)
    done = cli("tune", "--quick", "--model", tiny, "--context", 2048, "--disk-path", tmp_path)
    assert done.exit_code == 0, done.output
    assert tomllib.loads(done.stdout)["disk"]["readers"] in (1, 2, 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--out", "/proc/x/y"], ["--out /proc/x/y", "file that can be written"]),
        (["--profile-out", "/proc/x/y"], ["--profile-out /proc/x/y"]),
        (["--report", "/proc/x/y.html"], ["/proc/x"]),
        (["--config", "/no/such.toml"], ["/no/such.toml"]),
        (["--context", "99999999"], ["--context", "was made for"]),
        (["--context", "5"], ["--context"]),
        (["--disk-path", "/proc/x"], ["--disk-path", "folder that can be written"]),
        (["--dtype", "int3"], ["int3"]),
        (["--model", "no/such/model.gguf"], ["no/such/model.gguf"]),
    ],
)
def test_bad_options_are_one_line(cli, tiny, options, words):
    if "--model" not in options:
        options = ["--model", tiny, *options]
    done = cli("tune", "--quick", *options)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.exit_code, done.stdout, len(errors)) == (2, "", 1), done.output
    for word in words:
        assert word in errors[0]


def test_predict_reports_points_that_were_not_fitted(cli, tiny, tmp_path, monkeypatch):
    from tierkv.benchmarks import predict
    from tierkv.benchmarks.predict_served import Trace

    small = predict.Plan(
        fit_contexts=(600, 2000), test_contexts=(1200,), fit_restores=((128, 32), (512, 32), (512, 64)), test_restores=(256,),
        fit_prefills=((32, 0), (128, 0), (64, 128)), test_prefills=((64, 0),), rounds=3,
        trace=Trace(sessions=2, turns=2, common=64, first=200, more=40, longest=600, answer=4, device=900, host=300, rounds=1),
    )  # fmt: skip
    monkeypatch.setattr(predict, "Plan", lambda rounds: small)
    saved = tmp_path / "record.json"
    done = cli("bench", "predict", "--model", tiny, "--dtype", "float32", "--rounds", 3, "--save", saved, "--json")
    result = one_object(done.stdout)
    assert result == json.loads(saved.read_text(encoding="utf-8"))
    served = ["first token", "answer"] * 5
    assert [row["kind"] for row in result["rows"]] == ["decode"] * 3 + ["prefill", "restore"] + served
    assert {row["residency"] for row in result["rows"] if row["kind"] == "decode"} == {"device", "host", "disk"}
    errors = sorted(abs(row["error"]) for row in result["rows"])
    assert result["max_abs_error"] == pytest.approx(errors[-1])
    assert result["median_abs_error"] == pytest.approx(errors[7])
    assert result["met"] == (errors[7] <= 0.2 and errors[-1] <= 0.4)
    for row in result["rows"]:
        assert row["error"] == pytest.approx(row["predicted_seconds"] / row["measured_seconds"] - 1, abs=2e-3)


def test_predict_refuses_in_one_line(cli):
    assert_one_line_error(cli("bench", "predict", "--dtype", "int8"), "--dtype")
    assert_one_line_error(cli("bench", "predict", "--save", "/proc/x/y"), "--save")
