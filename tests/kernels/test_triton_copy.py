"""Append, gather, pack and unpack, interpreted: every bit arrives, and no other bit changes."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tests.kernels.triton_cases import COPIES, check_blocks, check_copies
from tests.kernels.triton_scenario import Case, Scenario
from tierkv.kernels.triton_blocks import pack_blocks, unpack_blocks
from tierkv.kernels.triton_copy import append, gather
from tierkv.kernels.triton_runs import token_starts


@pytest.mark.parametrize("case", COPIES, ids=str)
def test_tokens_go_where_runs_say_and_come_back(case, interpreted):
    check_copies(case, interpreted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize(("tokens", "dim"), [(16, 64), (5, 12), (64, 80)])
def test_blocks_are_packed_and_unpacked(dtype, tokens, dim, interpreted):
    check_blocks(dtype, tokens, dim, interpreted)


def test_tokens_are_counted_over_all_rows():
    runs = Scenario(Case("", rows=(70, 0, 33), lengths=(64, 16)), torch.device("cpu")).runs
    starts = token_starts(runs)
    assert starts.tolist() == [0, 64, 70, 103]
    assert token_starts(replace(runs, starts=starts)) is starts


@pytest.fixture
def scene():
    return Scenario(Case("", rows=(20, 20), kv_heads=2, key_dim=16, value_dim=32), torch.device("cpu"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: {"member": 3}, "member must be 0 to 2, not 3"),
        (lambda made: {"member": -1}, "member must be 0 to 2, not -1"),
        (lambda made: {"keys": made.keys[:, :, :-1]}, r"keys must have shape \[2, 2, 20, 16\], not \[2, 2, 19, 16\]"),
        (lambda made: {"values": made.keys}, r"values must have shape \[2, 2, 20, 32\]"),
        (lambda made: {"keys": made.keys.double()}, "keys must be torch.float32, not torch.float64"),
        (lambda made: {"keys": made.keys.to("meta")}, "keys must be on cpu, not on meta"),
        (lambda made: {"keys": made.values[..., ::2]}, "the last dimension of keys must be dense, its stride is 2"),
        (lambda made: {"starts": torch.zeros(2, dtype=torch.int64)}, r"starts must have shape \[3\]"),
        (lambda made: {"starts": torch.zeros(3, dtype=torch.int32)}, "starts must be torch.int64"),
    ],
)
def test_the_launchers_say_what_they_cannot_take(change, message, scene, interpreted):
    arguments = {"keys": scene.keys, "values": scene.values, "runs": scene.runs, "member": 0, **change(scene)}
    for function in (append, gather):
        with pytest.raises(ValueError, match=message):
            function(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda runs: {"table": runs.table[:, :7]}, r"runs.table must have shape \[2, 8\]"),
        (lambda runs: {"table": runs.table.int()}, "runs.table must be torch.int64"),
        (lambda runs: {"table": runs.table.T.contiguous().T}, "the last dimension of runs.table must be dense"),
        (lambda runs: {"table": torch.cat([runs.table] * 2, 1)[:, :8]}, "runs.table must be contiguous"),
        (lambda runs: {"row_starts": runs.row_starts.int()}, "runs.row_starts must be torch.int64"),
        (lambda runs: {"row_starts": runs.row_starts.to("meta")}, "runs.row_starts must be on cpu, not on meta"),
        (lambda runs: {"memory": (torch.empty(3, device="meta"),)}, "runs.memory must be on cpu like its table"),
        (lambda runs: {"memory": (runs.memory[0].flatten()[1:],)}, "runs.memory must begin at a multiple of 16 bytes"),
    ],
)
def test_runs_that_no_kernel_can_read_are_refused(change, message, scene, interpreted):
    runs = replace(scene.runs, **change(scene.runs))
    with pytest.raises(ValueError, match=message):
        gather(runs, 0, scene.keys, scene.values, starts=torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool": torch.zeros(3, 2, 4, 8, 16)}, r"pool must be \[segment, layer, kv_head, slot, token, dim\]"),
        ({"pool": torch.zeros(3, 2, 2, 4, 16, 8).mT}, "token and dim of pool must be dense"),
        ({"slots": [12, 0]}, r"slots must be 0 to 11, not \[12\]"),
        ({"slots": [0, -1]}, r"slots must be 0 to 11, not \[-1\]"),
        ({"slots": [1]}, r"staging must have shape \[1, 2, 2, 8, 16\], not \[2, 2, 2, 8, 16\]"),
        ({"staging": torch.zeros(2, 2, 2, 8, 16).half()}, "staging must be torch.float32"),
        ({"staging": torch.zeros(2, 2, 2, 8, 16, device="meta")}, "staging must be on cpu"),
        ({"staging": torch.zeros(2, 2, 8, 2, 16).transpose(2, 3)}, "staging must be contiguous"),
        ({"pool": torch.zeros(3, 2, 2, 4, 8, 16, dtype=torch.complex128)}, "staging must be torch.complex128"),
    ],
)
def test_the_block_launchers_say_what_they_cannot_take(changes, message, interpreted):
    arguments = {"pool": torch.zeros(3, 2, 2, 4, 8, 16), "slots": [1, 2], "staging": torch.zeros(2, 2, 2, 8, 16)}
    for function in (pack_blocks, unpack_blocks):
        with pytest.raises(ValueError, match=message):
            function(**{**arguments, **changes})


def test_two_blocks_cannot_be_unpacked_into_one_slot(interpreted):
    with pytest.raises(ValueError, match="these name one twice"):
        unpack_blocks(torch.zeros(2, 2, 2, 8, 16), [1, 1], torch.zeros(3, 2, 2, 4, 8, 16))
