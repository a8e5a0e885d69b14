"""Attention over runs, interpreted, against the reference in float64."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tests.kernels.triton_cases import ATTENTION, ERRORS, check_attention, check_error
from tests.kernels.triton_scenario import Case, Scenario
from tierkv.kernels.triton_attention import attention, choose_splits


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_it_computes_what_the_reference_computes(case, interpreted):
    check_attention(case, interpreted)


@pytest.mark.parametrize("case", ERRORS, ids=str)
def test_its_error_is_that_of_stock_attention(case, interpreted):
    check_error(case, interpreted)


@pytest.fixture
def scene():
    return Scenario(Case("", rows=(20, 20), key_dim=16, value_dim=32), torch.device("cpu"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: {"query": made.query[0]}, r"query must be \[rows, query_heads, queries, key_dim\]"),
        (lambda made: {"query": made.query[:1]}, r"query must have shape \[2, 4, 1, 16\], not \[1, 4, 1, 16\]"),
        (lambda made: {"query": made.query[..., :8]}, r"query must have shape \[2, 4, 1, 16\]"),
        (lambda made: {"query": made.query.double()}, "query must be torch.float32, not torch.float64"),
        (lambda made: {"query": made.query.to("meta")}, "query must be on cpu, not on meta"),
        (lambda made: {"query": torch.zeros(2, 4, 1, 32)[..., ::2]}, "the last dimension of query must be dense"),
        (lambda made: {"query": made.query[:, :3]}, "query heads must be a multiple of the 2 KV heads, not 3"),
        (lambda made: {"query": made.query[:, :0]}, "query heads must be a multiple of the 2 KV heads, not 0"),
        (lambda made: {"member": 3}, "member must be 0 to 2, not 3"),
        (lambda made: {"start": -1}, "start must be 0 to .*, not -1"),
        (lambda made: {"start": 2**31}, "start must be 0 to .*, not 2147483648"),
        (lambda made: {"window": 0}, "window must be at least 1 token, or None, not 0"),
        (lambda made: {"softcap": 0.0}, "softcap must be positive, or None, not 0.0"),
        (lambda made: {"splits": 0}, "splits must be at least 1, or None, not 0"),
        (lambda made: {"starts": torch.zeros(4, dtype=torch.int64)}, r"starts must have shape \[3\]"),
    ],
)
def test_the_launcher_says_what_it_cannot_take(change, message, scene, interpreted):
    arguments = {"query": scene.query, "runs": scene.runs, "member": 0, "start": 19, "scale": 1.0, **change(scene)}
    with pytest.raises(ValueError, match=message):
        attention(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float64}, "K and V must be bfloat16, float16 or float32, not torch.float64"),
        ({"key_dim": 512}, "key_dim and value_dim must be 1 to 256, not 512 and 32"),
        ({"value_dim": 257}, "key_dim and value_dim must be 1 to 256, not 16 and 257"),
    ],
)
def test_runs_that_it_cannot_attend_to_are_refused(change, message, scene, interpreted):
    runs = replace(scene.runs, **change)
    query = torch.zeros(2, 4, 1, runs.key_dim, dtype=runs.dtype)
    with pytest.raises(ValueError, match=message):
        attention(query, runs, 0, start=19, scale=1.0)


def test_a_launcher_without_gpu_and_interpreter_says_so():
    code = (
        "import torch; from tierkv.kernels.triton_merge import merge\n"
        "try: merge(torch.zeros(1, 1, 1, 1, 8), torch.zeros(1, 1, 1, 1))\n"
        "except ValueError as error: print(error)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "Triton kernels run on CUDA tensors, not on cpu" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("programs", "tokens", "splits"),
    [(1, 0, 1), (1, 256, 1), (1, 257, 2), (1, 100_000, 264), (8, 100_000, 33), (8, 1000, 4), (300, 100_000, 1)],
)
def test_one_long_sequence_fills_the_device_and_a_short_one_is_not_cut_small(programs, tokens, splits):
    assert choose_splits(programs, tokens, processors=132) == splits
