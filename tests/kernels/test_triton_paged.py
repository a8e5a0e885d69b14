"""The paged read path with the CUDA kernels in the place of the CPU's: a rehearsal, interpreted, of what a GPU runs."""

import pytest
import torch

from tests.test_paged import Bench
from tierkv.kernels import dispatch
from tierkv.tier import Tier

triton_attention = pytest.importorskip("tierkv.kernels.triton_attention", reason="triton is not installed")


@pytest.fixture
def calls(monkeypatch):
    """Send every launch to Triton, and count them."""
    counted = []

    def on_cpu(tensor):
        counted.append(tensor.shape)
        return False

    monkeypatch.setattr(dispatch, "_on_cpu", on_cpu)
    return counted


@pytest.mark.slow
@pytest.mark.parametrize("cold_read", ["auto", "stream"])
@pytest.mark.parametrize("layout", ["plain", "two groups", "sliding"])
def test_three_tiers(calls, layout, cold_read):
    bench = Bench(layout, rows=2, pads=[0, 5], cold_read=cold_read)
    try:
        for count in (13, 5, 1, 1):
            bench.forward(count, tolerance=1e-5)
        assert all(bench.engine.manager.census()[tier][0] for tier in Tier)
    finally:
        bench.engine.close()
    assert calls


def test_softcap_and_sinks(calls):
    bench = Bench("plain")
    try:
        for count in (14, 1):
            bench.forward(count, tolerance=1e-5, softcap=1.5, sinks=torch.tensor([0.3, -1.0, 2.0, 0.0, 0.5, -8.0]))
    finally:
        bench.engine.close()
    assert calls
