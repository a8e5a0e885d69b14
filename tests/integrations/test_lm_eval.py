"""lm-evaluation-harness through tiered caches: the answers and likelihoods of its own model, and its command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import save_tiny_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # the harness' own, and its libraries'
]
CONFIG = """block_size = 16
[device]
capacity = "192KiB"
[host]
capacity = "128KiB"
[disk]
capacity = "16MiB"
path = "{path}"
"""
COMMON = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{question}}",
}
ANSWER = {
    "task": "tiny_answers", "output_type": "generate_until", "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip
CHOICE = {
    "task": "tiny_choices", "output_type": "multiple_choice", "doc_to_target": 1,
    "doc_to_choice": ["yes, it is", "no, not at all"],
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip


@pytest.fixture
def harness(tmp_path, monkeypatch):
    for name, value in {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "datasets")}.items():
        monkeypatch.setenv(name, value)
    found = pytest.importorskip("lm_eval", reason="lm_eval (the extra lm-eval) is not installed")
    import tierkv.integrations.lm_eval  # noqa: F401 - makes the model known

    return found


@pytest.fixture
def files(tmp_path):
    """Make a model, a configuration whose tiers are all needed, and data; return their paths by name."""
    model = save_tiny_model(tmp_path / "tiny")
    config = tmp_path / "tierkv.toml"
    config.write_text(CONFIG.format(path=tmp_path / "store"))
    data = tmp_path / "data.jsonl"
    shared = "The keeper of the lighthouse wrote a line each day. " * 8
    rows = [
        {"question": f"{shared}On day {day} it was {day * 37 % 11}. Was it odd?", "answer": "x"} for day in range(3)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"model": str(model), "config": str(config), "data": str(data)}


def evaluate(harness, files, task, model, **arguments):
    """Return what the harness makes of a task: the answers of each sample, and its scores."""
    asked = COMMON | task | {"dataset_kwargs": {"data_files": {"test": files["data"]}}}
    found = harness.simple_evaluate(
        model=model, model_args=arguments, tasks=[asked], device="cpu", bootstrap_iters=0, log_samples=True
    )
    samples = found["samples"][task["task"]]
    return [sample["resps"] for sample in samples], found["results"][task["task"]]


@pytest.mark.parametrize("path", ["gathered", "paged"])
@pytest.mark.parametrize("task", [ANSWER, CHOICE], ids=["generate_until", "loglikelihood"])
def test_a_task_comes_to_the_same_as_with_the_harness_own_model(harness, files, task, path, monkeypatch):
    from tierkv.integrations.lm_eval import TieredHFLM

    made = []
    make = TieredHFLM.__init__

    def remember(self, *args, **kwargs):
        make(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(TieredHFLM, "__init__", remember)
    with Path(files["config"]).open("a") as file:
        file.write(f'[attention]\npath = "{path}"\n')
    expected, score = evaluate(harness, files, task, "hf", pretrained=files["model"], dtype="float32")
    found, own = evaluate(
        harness, files, task, "tierkv", pretrained=files["model"], config=files["config"], dtype="float32"
    )
    if task is ANSWER:
        assert found == expected
        assert all(len(answer[0][0]) >= 20 for answer in found)  # there is something to compare
    else:
        for one, other in zip(found, expected, strict=True):
            assert [answer[0][1] for answer in one] == [answer[0][1] for answer in other]
            assert [answer[0][0] for answer in one] == pytest.approx([answer[0][0] for answer in other], abs=1e-4)
    assert own == score
    (model,) = made
    stats = model.engine.stats()
    model.engine.close()
    assert stats.read_path == path
    assert stats.counters.forwards >= 3
    assert stats.counters.tokens + stats.prefix.used_tokens > 3 * 400
    assert (stats.prefix.used_tokens > 0) == (task is ANSWER)  # the questions begin alike
    assert stats.caches == 0
    assert stats.moved_bytes["device_to_disk"] > 0


def test_mixed_precision_is_refused(harness, files):
    from tierkv.errors import ConfigError
    from tierkv.integrations.lm_eval import TieredHFLM

    with pytest.raises(ConfigError, match="dtype=bfloat16"):
        TieredHFLM(files["model"], device="cpu", mixed_precision_dtype="bfloat16")


def test_the_command_line(harness, files, tmp_path):
    task = COMMON | ANSWER | {"dataset_kwargs": {"data_files": {"test": files["data"]}}}
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "mine.yaml").write_text(json.dumps(task))  # JSON is YAML

    def run(config):
        arguments = f"pretrained={files['model']},dtype=float32,config={config}"
        return subprocess.run(
            [sys.executable, "-m", "tierkv.integrations.lm_eval", "run", "--model", "tierkv", "--model_args", arguments,
             "--tasks", str(task["task"]), "--include_path", str(folder), "--device", "cpu",
             "--output_path", str(tmp_path / "out")],
            capture_output=True, text=True, check=False, timeout=300,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip

    done = run(files["config"])
    assert done.returncode == 0, done.stderr
    assert "exact_match" in done.stdout
    (written,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(written.read_text())["results"]["tiny_answers"]["exact_match,none"] == 0.0
    done = run("/no/such.toml")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "/no/such.toml" in done.stderr.splitlines()[-1]
