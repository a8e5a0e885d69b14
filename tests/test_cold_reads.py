"""Which way host memory is read, and how far ahead: what the cost model says, from given and from measured bandwidths."""

import logging
from dataclasses import replace

import pytest
import torch

from tierkv import bandwidths
from tierkv.bandwidths import ModelFacts, _line, cold_reads_of, measure
from tierkv.capacity import CHUNK_TOKENS
from tierkv.cold_reads import LAYERS_AHEAD, MOST_LAYERS_AHEAD, ColdReads
from tierkv.cost import Costs, Line
from tierkv.errors import TransferTimeout
from tierkv.kernels import cpu
from tierkv.testing.engines import LAYOUTS, PlainCache, forward, random_tokens, small_engine, small_layout
from tierkv.tier import Tier, Wire
from tierkv.transfer import ThreadTransfers

UP = Wire(Tier.HOST, Tier.DEVICE)
LAYOUT = small_layout("plain")


def costs(*, wire=1e9, cpu_rate=1e9, hop=0.0, step=0.0, device=1e12):
    rates = {Tier.DEVICE: device} | ({Tier.HOST: cpu_rate} if cpu_rate else {})
    return Costs(step_seconds=step, kv_bytes_per_second=rates, wires={UP: Line(0.0, wire)}, hop_seconds=hop)


# -- the CPU or the wire ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_is_read", ["in place", "by the CPU", "streamed"])
def test_without_costs_the_configuration_says_it(host_is_read):
    reads = ColdReads(host_is_read, LAYOUT)
    assert not reads.has_choice
    assert reads.layers_ahead("auto") == LAYERS_AHEAD
    assert host_is_read in reads.describe()


@pytest.mark.parametrize(
    ("host_is_read", "has_choice"), [("in place", False), ("by the CPU", False), ("streamed", True)]
)
def test_what_the_configuration_forces_no_cost_changes(host_is_read, has_choice):
    assert ColdReads(host_is_read, LAYOUT, costs()).has_choice == has_choice


def test_the_faster_of_both_is_taken():
    kv = {Tier.DEVICE: 1e6, Tier.HOST: 1e9}
    assert not ColdReads("streamed", LAYOUT, costs(wire=1, cpu_rate=1e12)).by_cpu({Tier.HOST: 0, Tier.DISK: 1e9}, 1, 1)
    for disk in (0.0, 1e9):  # which is copied either way
        assert ColdReads("streamed", LAYOUT, costs(wire=1e9, cpu_rate=5e9)).by_cpu(kv | {Tier.DISK: disk}, 1, 1)
        assert not ColdReads("streamed", LAYOUT, costs(wire=5e9, cpu_rate=1e9)).by_cpu(kv | {Tier.DISK: disk}, 1, 1)


def test_hops_decide_where_little_lies_there():
    reads = ColdReads("streamed", LAYOUT, costs(wire=1e9, cpu_rate=5e9, hop=1e-3))
    # Four layers hop for 4 ms; the wire is 0.8 ns a byte behind.
    assert not reads.by_cpu({Tier.HOST: 4.9e6}, 1, 1)
    assert reads.by_cpu({Tier.HOST: 5.1e6}, 1, 1)


def test_a_copy_behind_computing_costs_nothing():
    """Weights that take 100 ms hide 100 ms of copies; the CPU's part waits for nothing but the device's."""
    kv = {Tier.HOST: 50e6}
    assert ColdReads("streamed", LAYOUT, costs(wire=1e9, cpu_rate=2e9)).by_cpu(kv, 1, 1)
    assert not ColdReads("streamed", LAYOUT, costs(wire=1e9, cpu_rate=2e9, step=0.1)).by_cpu(kv, 1, 1)


def test_a_prompt_is_never_attended_to_by_the_cpu():
    reads = ColdReads("streamed", LAYOUT, costs(wire=1e6, cpu_rate=1e12))
    assert [reads.by_cpu({Tier.HOST: 1e9}, 1, tokens) for tokens in (1, 2, 2048)] == [True, False, False]


def test_where_the_cpu_cannot_attend_all_is_streamed():
    reads = ColdReads("streamed", LAYOUT, costs(cpu_rate=None))
    assert not reads.has_choice
    assert "streamed, at 1.0 GB/s" in reads.describe()


# -- layers ahead -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunks_a_layer", "layers_ahead"), [(0.01, 1), (1, 1), (1.5, 2), (2.5, 3), (3.5, 4), (1000, MOST_LAYERS_AHEAD)]
)
def test_as_much_is_fetched_ahead_as_comes_while_a_layer_computes(chunks_a_layer, layers_ahead):
    layers = len(LAYOUT.layers)
    chunk_seconds = CHUNK_TOKENS * LAYOUT.token_bytes / layers / 1e9
    reads = ColdReads("streamed", LAYOUT, costs(wire=1e9, step=layers * chunks_a_layer * chunk_seconds))
    assert reads.layers_ahead("auto") == layers_ahead
    assert [reads.layers_ahead(given) for given in (0, 3, 10**9)] == [0, 3, 10**9]


# -- measured ---------------------------------------------------------------------------------------------------------


def facts(layout):
    return ModelFacts(3 * max(spec.kv_heads for spec in layout.groups), 1 << 20)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_measured_is_a_machine(name):
    layout = small_layout(name)
    with small_engine(layout, device_tokens=400, host_tokens=400, bounce=True) as engine:
        found = measure(engine.stores, engine.transfers, facts(layout))
        assert found.step_seconds >= (1 << 20) / found.kv_bytes_per_second[Tier.DEVICE]
        assert found.wires[UP].bytes_per_second > 0
        assert found.wires[UP].latency_seconds >= 0
        assert (Tier.HOST in found.kv_bytes_per_second) == (not cpu.unsupported(torch.float32, 4, 4, 3))
        assert found.hop_seconds >= 0
        # Nobody minds what was written meanwhile, and nothing is under way.
        batch, plain = engine.open(), PlainCache(layout)
        for seed, count in enumerate((30, 1, 1)):
            forward(batch, plain, random_tokens(layout, 1, count, seed))


@pytest.mark.parametrize("tokens", [24, 60])
def test_the_smallest_pools_are_measured_too(tokens):
    with small_engine(LAYOUT, device_tokens=60, host_tokens=tokens, bounce=True) as engine:
        assert measure(engine.stores, engine.transfers, facts(LAYOUT)).wires[UP].bytes_per_second > 0


def test_a_head_that_has_no_cpu_kernel_has_no_rate(monkeypatch):
    monkeypatch.setattr(cpu, "unsupported", lambda *_: "there is no compiler")
    with small_engine(LAYOUT, device_tokens=400, host_tokens=400, bounce=True) as engine:
        found = measure(engine.stores, engine.transfers, facts(LAYOUT))
        assert set(found.kv_bytes_per_second) == {Tier.DEVICE}


@pytest.mark.parametrize(
    ("options", "cold_read", "gathered", "measured"),
    [
        ({"bounce": True}, "auto", False, True),
        ({"bounce": True}, "auto", True, True),  # for the layers ahead
        ({"bounce": True}, "stream", False, True),
        ({"bounce": True}, "compute", False, False),
        ({}, "auto", False, False),  # read in place
        ({"host_tokens": 0}, "auto", False, False),
    ],
)
def test_only_where_host_memory_is_streamed_something_is_measured(monkeypatch, options, cold_read, gathered, measured):
    calls = []

    def measured_once(*args, cpu_too):
        assert cpu_too == (cold_read == "auto" and not gathered)
        calls.append(args)
        return costs(cpu_rate=1e9 if cpu_too else None)

    monkeypatch.setattr(bandwidths, "measure", measured_once)
    with small_engine(LAYOUT, device_tokens=400, **{"host_tokens": 400} | options) as engine:
        for known in (facts(LAYOUT), None):
            reads = cold_reads_of(engine.stores, engine.transfers, cold_read, known, gathered=gathered)
            assert reads.host_is_read == engine.stores.host_is_read(cold_read)
            assert reads.has_choice == bool(known and measured and cold_read == "auto" and not gathered)
    assert len(calls) == measured


@pytest.mark.parametrize("error", [TransferTimeout("stuck"), RuntimeError("CUDA error: out of memory")])
def test_what_cannot_be_measured_is_streamed_and_said(monkeypatch, caplog, error):
    def fail(*_, cpu_too):
        raise error

    monkeypatch.setattr(bandwidths, "measure", fail)
    with (
        small_engine(LAYOUT, device_tokens=400, host_tokens=400, bounce=True) as engine,
        caplog.at_level(logging.WARNING),
    ):
        reads = cold_reads_of(engine.stores, engine.transfers, "auto", facts(LAYOUT), gathered=False)
    assert str(error) in caplog.text
    assert reads.describe() == "blocks in host memory are streamed"
    assert not reads.has_choice


def test_a_line_goes_through_both_measurements():
    line = _line((1000, 3e-6), (9000, 7e-6), 2)
    assert line.bytes_per_second == pytest.approx(2e9)
    assert [line.seconds(1000, 2), line.seconds(9000, 2)] == [pytest.approx(3e-6), pytest.approx(7e-6)]
    assert _line((1000, 1e-6), (9000, 9e-6), 2) == Line(0.0, pytest.approx(1e9))


@pytest.mark.parametrize("second", [(1000, 3e-6), (9000, 2e-6)])
def test_measurements_that_no_line_goes_through_are_a_rate(second):
    assert _line((1000, 3e-6), second, 2) == Line(0.0, pytest.approx(second[0] / second[1]))


def test_figures_are_bytes_by_seconds(monkeypatch):
    """Whatever takes a second, and copies a second each: then a rate is the number of bytes that were moved."""
    done = []

    def a_second(work, _):
        done.append(work())
        return 1.0

    monkeypatch.setattr(bandwidths, "_best", a_second)
    monkeypatch.setattr(bandwidths, "_SAMPLE_BYTES", 4096)
    with small_engine(LAYOUT, device_tokens=400, host_tokens=400, bounce=True) as engine:
        found = measure(engine.stores, engine.transfers, facts(LAYOUT), cpu_too=False)
        flat = engine.stores.device.memory(0)[0]
        assert 0 < found.kv_bytes_per_second[Tier.DEVICE] <= 2 * 4096
        assert found.kv_bytes_per_second[Tier.DEVICE] % (2 * flat.element_size()) == 0
        # As many copies as make a sample, all in a second.
        longest = min(engine.stores.slab(tier).slots_per_segment for tier in (Tier.DEVICE, Tier.HOST))
        num_bytes = longest * LAYOUT.block_size * LAYOUT.token_bytes_of(0)
        assert found.wires[UP].bytes_per_second == num_bytes * max(1, 4096 // num_bytes)
        assert found.hop_seconds == 0


def test_a_copy_that_fails_is_no_measurement():
    class Failing(ThreadTransfers):
        def submit(self, copies):
            return super().submit([replace(copy, load=lambda: 1 / 0) for copy in copies])

    engine = small_engine(LAYOUT, device_tokens=400, host_tokens=400, bounce=True, transfers=Failing(1))
    with engine, pytest.raises(ZeroDivisionError):
        measure(engine.stores, engine.transfers, facts(LAYOUT))


def test_another_default_device_changes_nothing():
    with small_engine(LAYOUT, device_tokens=400, host_tokens=400, bounce=True) as engine, torch.device("meta"):
        assert measure(engine.stores, engine.transfers, facts(LAYOUT)).wires[UP].bytes_per_second > 0


def test_the_engine_fetches_as_far_ahead_as_the_costs_say(monkeypatch):
    chunk_seconds = CHUNK_TOKENS * LAYOUT.token_bytes / 1e9
    found = costs(wire=1e9, step=3 * chunk_seconds)
    monkeypatch.setattr("tierkv.engine.cold_reads_of", lambda *_, **__: ColdReads("streamed", LAYOUT, found))
    for configured, layers_ahead in (("auto", 3), (1, 1)):
        with small_engine(LAYOUT, device_tokens=400, host_tokens=400, bounce=True, layers_ahead=configured) as engine:
            assert engine.capacity.layers_ahead == layers_ahead
