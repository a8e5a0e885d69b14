"""Which kernel runs, and why there is none."""

import pytest
import torch

from tierkv.kernels import dispatch


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_driver_triton_is_not_promised():
    pytest.importorskip("triton")
    dispatch.cannot_launch.cache_clear()
    reason = dispatch.unsupported(torch.device("cuda"), torch.float16, 64, 64, 1)
    assert reason.startswith(("triton cannot launch kernels here: ", "triton has no driver"))
    assert "\n" not in reason


def test_other_devices_have_no_kernel():
    assert (
        dispatch.unsupported(torch.device("mps"), torch.float16, 64, 64, 1)
        == "there are no paged attention kernels for mps devices"
    )
