"""Merging partial attention, interpreted, against the reference in float64."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from tests.kernels.triton_cases import MERGES, check_merge, check_pieces
from tierkv.kernels import triton_merge


@pytest.mark.parametrize("case", MERGES, ids=str)
def test_it_computes_what_the_reference_computes(case, interpreted):
    check_merge(case, interpreted)


@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
def test_attention_over_pieces_is_attention_over_all(sinks, interpreted):
    check_pieces(interpreted, sinks=sinks)


def parts(**changes):
    made = {"outs": torch.zeros(2, 1, 3, 4, 8), "lses": torch.zeros(2, 1, 3, 4), "sinks": torch.zeros(4)}
    return {**made, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outs": torch.zeros(2, 3, 4, 8)}, r"outs must be \[parts, rows, queries, query_heads, value_dim\]"),
        ({"outs": torch.zeros(0, 1, 3, 4, 8), "lses": torch.zeros(0, 1, 3, 4)}, "at least one part"),
        ({"outs": torch.zeros(2, 1, 3, 4, 8).half()}, "outs must be torch.float32, not torch.float16"),
        ({"lses": torch.zeros(2, 1, 3, 5)}, r"lses must have shape \[2, 1, 3, 4\]"),
        ({"lses": torch.zeros(2, 1, 3, 4).double()}, "lses must be torch.float32"),
        ({"outs": torch.zeros(2, 1, 4, 3, 8).transpose(2, 3)}, "each part of outs and lses must be contiguous"),
        ({"outs": torch.zeros(2, 1, 3, 4, 16)[..., ::2]}, "the last dimension of outs must be dense"),
        ({"sinks": torch.zeros(3)}, r"sinks must have shape \[4\]"),
        ({"sinks": torch.zeros(4, device="meta")}, "sinks must be on cpu, not on meta"),
    ],
)
def test_the_launcher_says_what_it_cannot_take(changes, message, interpreted):
    with pytest.raises(ValueError, match=message):
        triton_merge.merge(**parts(**changes))


def test_nothing_to_merge_is_no_launch(interpreted):
    out, lse = triton_merge.merge(torch.zeros(2, 0, 1, 4, 8), torch.zeros(2, 0, 1, 4))
    assert out.shape == (0, 1, 4, 8)
    assert lse.shape == (0, 1, 4)
