"""The same cases as interpreted, compiled and run on a GPU, and those that only a GPU can take."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tests.kernels.triton_cases import (
    ATTENTION,
    BFLOAT16,
    COPIES,
    ERRORS,
    FLOAT16,
    FLOAT32,
    MERGES,
    check_attention,
    check_blocks,
    check_copies,
    check_error,
    check_merge,
    check_pieces,
)
from tests.kernels.triton_scenario import Case, Scenario

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
DEVICE = torch.device("cuda", 0)

LARGE = [
    Case("one long sequence", rows=(20_000,), lengths=(512,), kv_heads=8, group=4, key_dim=128, value_dim=128,
         dtype=BFLOAT16, splits=None),
    Case("short runs", rows=(5_000, 3_001), lengths=(16, 48), kv_heads=4, group=8, dtype=FLOAT16, splits=None),
    Case("ragged rows", rows=(1, 4_000, 0, 700, 2_500), lengths=(512,), kv_heads=2, group=4, dtype=BFLOAT16,
         splits=None),
    Case("a long prompt", rows=(2_000,), lengths=(512,), queries=2_000, start=0, kv_heads=4, group=4, key_dim=128,
         value_dim=128, dtype=BFLOAT16, splits=None),
    Case("a long prompt with a window", rows=(1_500,), lengths=(96,), queries=1_000, start=500, window=300, group=3,
         dtype=BFLOAT16, splits=None),
    Case("a long sequence in float32", rows=(6_000,), lengths=(512,), kv_heads=4, group=4, key_dim=128, value_dim=128,
         dtype=FLOAT32, splits=None),
]  # fmt: skip


@pytest.mark.parametrize("case", ATTENTION + LARGE, ids=str)
def test_attention_computes_what_the_reference_computes(case):
    check_attention(case, DEVICE)


@pytest.mark.parametrize("case", ERRORS, ids=str)
def test_its_error_is_that_of_stock_attention(case):
    check_error(case, DEVICE)


@pytest.mark.parametrize("case", MERGES, ids=str)
def test_merge_computes_what_the_reference_computes(case):
    check_merge(case, DEVICE)


@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
def test_attention_over_pieces_is_attention_over_all(sinks):
    check_pieces(DEVICE, sinks=sinks)


@pytest.mark.parametrize("case", COPIES, ids=str)
def test_tokens_go_where_runs_say_and_come_back(case):
    check_copies(case, DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize(("tokens", "dim"), [(16, 64), (5, 12), (64, 80)])
def test_blocks_are_packed_and_unpacked(dtype, tokens, dim):
    check_blocks(dtype, tokens, dim, DEVICE)


def test_no_launch_waits_for_the_device():
    """A launch that reads the table on the host would cost every layer of every step a wait."""
    from tierkv.kernels.triton_attention import attention

    scenario = Scenario(Case("", rows=(3_000, 100), splits=None), DEVICE)
    arguments = {"start": scenario.start, "scale": 0.125}
    attention(scenario.query, scenario.runs, scenario.member, **arguments)
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(scenario.query, scenario.runs, scenario.member, **arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
