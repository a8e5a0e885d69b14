"""``gpu_check`` is run where nobody can try it twice, so its every line that a CPU can run is run here."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch


def command(*arguments):
    return [sys.executable, "-m", "tierkv.benchmarks.gpu_check", *map(str, arguments)]


def run(*arguments):
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False, timeout=200)


@pytest.mark.slow
def test_a_rehearsal_runs_every_section_and_measures_what_it_promises(tmp_path):
    out = tmp_path / "gpu.json"
    done = run("--out", out, "--rehearse")
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["rehearsal_on_a_cpu"] is True
    assert report["machine"]["torch"] == torch.__version__
    sections = report["sections"]
    assert list(sections) == [
        "1_cuda_tests", "2_kernel_correctness", "3_decode_attention_bandwidth", "4_copies", "5_decode",
    ]  # fmt: skip
    assert {one["status"] for one in sections.values()} == {"done"}
    tests, kernels, bandwidth, copies, decode = sections.values()

    assert tests["outcomes"] == {"skipped" if not torch.cuda.is_available() else "passed": 1}
    assert "in " in tests["summary"]

    assert kernels["all_passed"] is True
    assert {case["read"] for case in kernels["cases"]} == {"in place", "stream", "compute", "gathered"}
    assert {case["dtype"] for case in kernels["cases"]} == {"bfloat16", "float16", "float32"}
    assert all((case["blocks_in_host_memory"] > 0) == (case["read"] != "in place") for case in kernels["cases"])

    for context in bandwidth["contexts"]:
        ours = context["tierkv_launched_from_python"]
        assert ours["kv_bytes_per_second"] > 0
        assert (
            ours["share_of_device_copy_ratio"] == ours["kv_bytes_per_second"] / context["device_copy_bytes_per_second"]
        )

    wires = {
        "paged_reads": "host_to_device", "gathered_reads": "host_to_device", "writes_of_new_tokens": "device_to_host",
        "moves_up": "host_to_device", "moves_down": "device_to_host",
    }  # fmt: skip
    for name, wire in wires.items():
        assert copies[name]["wire"] == wire
        assert copies[name]["bytes"] > 0
        assert copies[name]["share_of_plain_copy_ratio"] > 0
    assert copies["one_copy_of_the_host_pool"]["pool_host_to_device_median_bytes_per_second"] > 0

    contexts = [one for name, one in decode.items() if name.startswith("context_")]
    for context, gathered in zip(contexts, (2, 0), strict=True):
        rows = {row["cache"]: row for row in context["rows"]}
        assert "CUDA" in rows.pop("offloaded")["left_out"]
        assert len(rows) == 8 + gathered
        tolerance = decode["logit_tolerance_relative_to_largest_logit"]
        assert context["same_figure_for_a_wrong_cache"] > 2 * tolerance
        for name, row in rows.items():
            assert row["median_tokens_per_second"] == 1 / row["median_seconds_per_token"], row
            assert len(row["all_seconds_per_token"]) == row["rounds"]
            if name != "dynamic":
                for when in ("first", "last"):
                    assert row[f"{when}_logit_difference_relative_to_largest_logit"] <= tolerance
        assert rows["tierkv-10-stream"]["host_to_device_bytes_per_step"] > 0
        assert rows["tierkv-100"]["device_share_of_blocks_ratio"] == 1


@pytest.mark.slow
def test_an_interrupted_run_keeps_what_was_measured_and_leaves_no_process(tmp_path):
    out = tmp_path / "gpu.json"
    process = subprocess.Popen(
        command("--out", out, "--rehearse", "--sections", "3,5"), stderr=subprocess.PIPE, text=True
    )
    try:
        for line in process.stderr:
            if line.startswith("[5/5]"):
                break
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["interrupted"] is True
    assert report["sections"]["3_decode_attention_bandwidth"]["status"] == "done"
    assert report["sections"]["5_decode"]["status"] == "interrupted"
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
    assert not children.stdout.strip()


def test_a_section_for_which_no_time_is_left_says_so(tmp_path):
    out = tmp_path / "gpu.json"
    done = run("--out", out, "--rehearse", "--budget-seconds", 1)
    assert done.returncode == 1
    sections = json.loads(out.read_text(encoding="utf-8"))["sections"].values()
    assert {one["status"] for one in sections} == {"skipped"}
    assert all("budget" in one["reason"] for one in sections)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(tmp_path):
    done = run("--out", tmp_path / "gpu.json")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "CUDA" in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_unknown_section_is_refused(tmp_path):
    done = run("--out", tmp_path / "gpu.json", "--sections", "1,7")
    assert done.returncode == 2
    assert "legal" in done.stderr


def test_a_section_whose_process_dies_is_recorded_and_the_next_one_runs(tmp_path, monkeypatch):
    """The child finds a sitecustomize that ends it; the tests of section 1 are another program's business."""
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import os, sys\nif '2' in sys.argv or '2' in getattr(sys, 'orig_argv', []): os._exit(7)\n", encoding="utf-8"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(broken), os.environ.get("PYTHONPATH", "")]))
    out = tmp_path / "gpu.json"
    done = run("--out", out, "--rehearse", "--sections", "2,3")
    assert done.returncode == 1
    kernels, bandwidth = json.loads(out.read_text(encoding="utf-8"))["sections"].values()
    assert kernels["status"] == "failed"
    assert "code 7" in kernels["error"]
    assert bandwidth["status"] == "done"
