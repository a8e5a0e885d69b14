"""Every kernel is compiled for three generations of GPUs, without one; registers that spill are a failure."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

ROOT = Path(__file__).resolve().parents[2]
KIB = 1024
# Shared memory that a program can have: for sm_80 what its smaller relatives (sm_86, sm_89) have, so that they run too.
SHARED_BYTES = {80: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB}


@cache
def compiled(capability: int, *, quick: bool) -> list[dict[str, Any]]:
    """Compile in another process, where Triton does not interpret."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton_launches", str(capability), *(["quick"] if quick else [])]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(capability: int, report, *, quick: bool) -> None:
    found = compiled(capability, quick=quick)
    assert found
    for kernel in found:
        report(kernel["name"], capability, kernel)
    assert not [kernel for kernel in found if kernel["spill_bytes"] or kernel["stack_bytes"]]
    assert not [kernel for kernel in found if kernel["shared_bytes"] > SHARED_BYTES[capability]]
    # Addresses come from a table: whoever drops the promise of their alignment gets loads of 16 bits, and a tenth of
    # the bandwidth, from an otherwise correct kernel.
    assert not [kernel for kernel in found if kernel["narrowest_load"] < 64 and "merge" not in kernel["name"]]


def test_the_usual_shapes_fit_into_registers(report_footprint):
    check(90, report_footprint, quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_shape_fits_into_registers(capability, report_footprint):
    check(capability, report_footprint, quick=False)
