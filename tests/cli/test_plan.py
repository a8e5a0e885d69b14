"""``tierkv plan``: what is refused, what is printed, and what its JSON holds."""

import json
import os
import subprocess
import sys

import pytest

from tests.cli.commands import assert_one_line_error, one_object


def ask(cli, *args):
    done = cli("plan", *args, "--json")
    assert done.exit_code == 0, done.stderr
    return one_object(done.stdout)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "lama-3.1-8b"], ["unknown model", "did you mean llama-3.1-8b"]),
        (["--model", "llama-3.1-8b", "--profile", "h10"], ["unknown profile", "did you mean h100", "known:"]),
        (["--model", "llama-3.1-8b", "--context", "-4"], ["--context", "'-4'", "8k"]),
        (["--model", "llama-3.1-8b", "--context", "0"], ["--context", "'0'"]),
        (["--model", "llama-3.1-8b", "--context", "4096.5"], ["--context"]),
        (["--model", "llama-3.1-8b", "--context", "999999999k"], ["--context"]),
        (["--model", "llama-3.1-8b", "--batch", "0"], ["--batch"]),
        (["--model", "llama-3.1-8b", "--dtype", "int4"], ["--dtype", "'int4'", "bfloat16"]),
        (["--model", "llama-3.1-8b", "--block-size", "48"], ["--block-size", "'48'", "16, 32, 64"]),
        (["--model", "llama-3.1-8b", "--device-budget", "much"], ["--device-budget", '"much"', "512MiB"]),
        (["--model", "llama-3.1-8b", "--device-budget", "-1"], ["--device-budget"]),
        (
            ["--model", "llama-3.1-8b", "--profile", "h100", "--device-budget", "1TiB"],
            ["not possible", "leave 64.11GiB"],
        ),
        (["--model", "llama-3.1-8b", "--profile", "h100", "--host-budget", "500TiB"], ["--host-budget", "1.81TiB"]),
        (["--model", "llama-3.1-8b", "--disk-budget", "1TiB"], ["--disk-budget", "--profile"]),
        (["--model", "llama-3.1-8b", "--devices", "2"], ["--devices", "--profile"]),
        (["--model", "llama-3.1-70b", "--profile", "h100"], ["131.41GiB", "--devices 2"]),
        (["--model", "llama-3.1-8b", "--mix", "8k"], ["--mix", "'8k'"]),
        (["--model", "llama-3.1-8b", "--mix", "8k,wide"], ["--mix", "0 to 5"]),
        (["--model", "llama-3.1-8b", "--mix", "8k,nan"], ["--mix"]),
        (["--model", "llama-3.1-8b", "--mix", "8k,1", "--mean-tokens", "9"], ["--mix", "leave one"]),
        (["--model", "llama-3.1-8b", "--report", "/proc/none/x.html"], ["report", "/proc/none/x.html"]),
        (["--context", "4k"], ["--model"]),
    ],
)
def test_bad_options_are_one_line(cli, options, words):
    assert_one_line_error(cli("plan", *options), *words)


def test_a_model_without_a_kv_cache_is_one_line(cli, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 9}))
    assert_one_line_error(cli("plan", "--model", path), str(path), "bert has no KV cache")
    path.write_text("{")
    assert_one_line_error(cli("plan", "--model", tmp_path), str(path), "not JSON at line 1")


MEASURED = """
[measured]
model = "SmolLM2-135M"
dtype = "bfloat16"
layers = 30
block_bytes = 737280
step_seconds = 0.05
token_seconds = 0.001
kv_bytes_per_second = { device = 6e9 }
wires = { disk_to_device = { latency_seconds = 1e-5, bytes_per_second = 1e9 } }
"""


def test_a_measured_machine_plans_what_was_not_measured_too(cli, tmp_path):
    """A fit has no copies to the disk; the plan needs them for a batch that does not stay on the device."""
    from pathlib import Path

    import tierkv.hardware

    laptop = Path(tierkv.hardware.__file__).with_name("profiles") / "laptop.toml"
    mine = tmp_path / "mine.toml"
    mine.write_text(laptop.read_text() + MEASURED)
    asked = ("--model", "smollm2", "--context", "8k", "--device-budget", "64MiB")
    found = ask(cli, *asked, "--profile", mine)["estimates"]["stream"]
    assert found["terms"]["weights and launches"] == 0.05
    assert found["ttft_terms"]["weights and launches"] == 0.05
    assert found["terms"] != ask(cli, *asked, "--profile", "laptop")["estimates"]["stream"]["terms"]
    batch = ask(cli, *asked, "--profile", mine, "--batch", "16", "--device-budget", "4GiB")["estimates"]["device"]
    assert batch["terms"]["weights and launches"] >= 0.05


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_named_pipes_are_one_line(cli, tmp_path):
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    assert_one_line_error(cli("plan", "--model", "smollm2", "--profile", pipe), "pipe.toml", "no regular file")
    assert_one_line_error(cli("plan", "--model", pipe), "pipe.toml", "no regular file")


def test_the_contract_of_the_issue(cli):
    asked = ("--model", "llama-2-70b", "--context", "4096", "--batch", "10", "--dtype", "float16")
    essay = ask(cli, *asked, "--assume-mha")
    assert essay["bytes_per_request"] == 10_737_418_240
    assert essay["bytes_total"] == 107_374_182_400
    assert ask(cli, *asked)["bytes_per_request"] == 1_342_177_280
    assert ask(cli, "--model", "llama-3.1-8b")["bytes_per_token"] == 131_072
    assert ask(cli, "--model", "deepseek-v3", "--dtype", "bfloat16")["bytes_per_token"] == 70_272


def test_json_has_every_part(cli):
    found = ask(
        cli, "--model", "meta-llama/Llama-3.1-8B", "--context", "128k", "--batch", "4", "--profile", "h100",
        "--device-budget", "40GiB", "--host-budget", "64GiB", "--disk-budget", "1TiB", "--block-size", "512", "--mix", "16k,0.7",
    )  # fmt: skip
    assert found["context"] == 131_072
    assert found["budgets"] == {"device": 40 * 2**30, "host": 64 * 2**30, "disk": 2**40}
    assert found["architecture"]["attention"] == "GQA"
    assert found["architecture"]["layer_kinds"] == {"full": 32}
    assert found["architecture"]["weight_bytes"] == 16_060_522_496
    assert set(found["fits"]) == {"device", "host", "disk", "missing", "everything"}
    assert set(found["sessions_held"]) >= {"contiguous", "paged", "tiered"}
    assert set(found["estimates"]) == {"stream", "compute"}
    for one in found["estimates"].values():
        assert set(one) >= {"ttft_seconds", "tokens_per_second", "inter_token_seconds", "bottleneck", "terms"}
    assert set(found["restore_seconds"]) == {"host", "disk"}
    assert found["recompute_seconds"] > found["restore_seconds"]["disk"] > found["restore_seconds"]["host"]
    assert found["advice"]["best"]["change"].startswith("twice the ")
    assert found["why"]


def test_tables_for_people(cli):
    done = cli("plan", "--model", "llama-3.1-8b", "--context", "128k", "--batch", "4", "--profile", "h100",
               "--device-budget", "40GiB")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    for text in (
        "Llama 3.1 8B: GQA", "128KiB (131,072 bytes)", "NVIDIA H100", "device", "10,240", "24GiB", "contiguous", "tiered",
        "stream to the device", "attend in host memory", "copies from host", "to compute it again", "would help most",
    ):  # fmt: skip
        assert text in done.stdout
    assert done.stderr == ""


def test_tables_without_a_machine(cli):
    done = cli("plan", "--model", "gemma-3-27b", "--context", "64k")
    assert done.exit_code == 0
    assert "52 sliding, 10 full; window 1,024" in done.stdout
    assert "note: give --profile" in done.stdout
    assert "would help" not in done.stdout


def test_one_row_is_enough_where_nothing_is_cold(cli):
    done = cli("plan", "--model", "smollm2-135m", "--profile", "laptop")
    assert "all on the device" in done.stdout
    assert "stream to the device" not in done.stdout


def test_a_batch_that_does_not_fit_has_no_times(cli):
    done = cli("plan", "--model", "llama-3.1-8b", "--context", "128k", "--batch", "8", "--profile", "h100",
               "--host-budget", "1GiB", "--disk-budget", "0")  # fmt: skip
    assert done.exit_code == 0
    assert "no room" in done.stdout
    assert "does not fit" in done.stdout
    assert "tokens/s  bottleneck" not in done.stdout


@pytest.mark.parametrize(
    "options",
    [
        ["--profile", "h100", "--context", "128k", "--batch", "4", "--device-budget", "40GiB"],
        ["--context", "64"],
        ["--profile", "h100", "--batch", "8", "--context", "128k", "--host-budget", "1GiB", "--disk-budget", "0"],
    ],
)
def test_a_report_is_one_page(cli, tmp_path, options):
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    page = tmp_path / "plan.html"
    done = cli("plan", "--model", "gpt-oss-20b", *options, "--report", page, "--json")
    assert done.exit_code == 0, done.stderr
    found, text = one_object(done.stdout), page.read_text()
    assert found["why"][:40] in text
    assert "gpt-oss 20b" in text
    assert text.count("<svg") >= 1
    assert "nan" not in text.lower().replace("nand", "")
    if found["estimates"]:
        assert found["advice"]["sentence"][:30] in text
        assert "Restore or compute again" in text
        assert "NVIDIA H100 datasheet" in text


def test_help_has_examples(cli):
    done = cli("plan", "--help")
    assert done.exit_code == 0
    assert "Examples" in done.stdout
    assert "tierkv plan --model" in done.stdout


def test_it_loads_no_torch():
    code = (
        "import sys; from tierkv.cli.commands import app; "
        "app(['plan', '--model', 'deepseek-v3', '--profile', 'h200', '--devices', '8', '--json'], standalone_mode=False); "
        "print(*({'torch', 'transformers', 'lmdb', 'matplotlib', 'huggingface_hub'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert one_object(done.stdout)
    assert done.stderr.strip() == ""
