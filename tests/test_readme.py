"""The README's code runs, its configuration loads, and the targets and commands it names exist."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tierkv.config import load_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.mark.model
@pytest.mark.slow
def test_python_blocks_run_one_after_another(tmp_path):
    script = "\n".join(blocks("python"))
    assert "attach" in script
    environment = {"TIERKV_DISK__PATH": str(tmp_path)}  # keeps the run out of the home folder
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", script],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "'disk'" in done.stdout


def test_toml_blocks_are_legal_and_state_the_defaults():
    for block in blocks("toml"):
        written = load_config(tomllib.loads(block))
        for key in ("block_size", "device.capacity", "disk.capacity", "placement.keep_first", "transfer.layers_ahead"):
            assert written.value(key) == load_config({}, environ={}).value(key), key


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_named_files_exist():
    for name in re.findall(r"`(\.?[\w/]+(?:\.py|\.md|/run))`", README):
        assert (ROOT / name).exists(), name
