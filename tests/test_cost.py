"""The cost model against arithmetic done by hand, and against what must hold whatever the numbers are."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.cost import CostModel, Costs, Line, WeightReads, WindowPairs
from tierkv.tier import Tier, Wire

UP = Wire(Tier.HOST, Tier.DEVICE)
GIB = 2**30

H100 = Costs(
    step_seconds=7e-3,
    row_seconds=1e-5,
    kv_bytes_per_second={Tier.DEVICE: 3e12, Tier.HOST: 2.5e11},
    wires={UP: Line(0.0, 51e9), Wire(Tier.DISK, Tier.HOST): Line(0.0, 13e9)},
    token_seconds=1e-4,
    pair_seconds=1e-9,
    restore_seconds=2e-3,
    block_seconds=1e-5,
    stored_bytes_per_second=13e9,
)
MODEL = CostModel(H100, layers=32, block_bytes=4 * 2**20, block_size=32)


def test_a_token_with_all_kv_on_the_device_costs_the_weights_and_one_read_of_it():
    found = MODEL.decode({Tier.DEVICE: 16 * GIB})
    assert found.seconds == pytest.approx(7e-3 + 16 * GIB / 3e12)
    assert found.bottleneck == "weights and launches"


def test_copies_hide_behind_computing_and_only_the_rest_shows():
    computing = 7e-3 + 16 * GIB / 3e12
    exposed = 16 * GIB / 51e9 - computing
    found = MODEL.decode({Tier.HOST: 16 * GIB})
    assert found.seconds == pytest.approx(computing + exposed)
    assert found.bottleneck == "copies from host"


def test_a_copy_that_is_hidden_still_shows_for_the_first_layer():
    found = MODEL.decode({Tier.DEVICE: 16 * GIB, Tier.HOST: 2**20})
    assert found.terms["copies from host"] == pytest.approx(2**20 / 51e9 / 32)


def test_without_overlap_everything_adds_up():
    costs = Costs(step_seconds=1e-2, kv_bytes_per_second={Tier.DEVICE: 1e10}, wires={UP: Line(0.0, 1e9)}, overlap=0.0)
    model = CostModel(costs, layers=10, block_bytes=100, block_size=1)
    assert model.decode({Tier.HOST: 10**9}).seconds == pytest.approx(1e-2 + 0.1 + 1.0)


def test_the_cpu_attends_while_the_device_does():
    found = MODEL.decode({Tier.DEVICE: 3 * 10**9, Tier.HOST: 10**9}, read="compute")
    assert found.terms["attention in host memory"] == pytest.approx(10**9 / 2.5e11 - 1e-3)


def test_what_lies_on_disk_passes_host_memory_at_the_rate_of_the_slower_wire():
    found = MODEL.decode({Tier.DISK: 13 * 10**9})
    computing = 7e-3 + 13e9 / 3e12
    assert found.seconds == pytest.approx(computing + 1.0 - computing)


def test_records_of_a_slice_each_have_a_latency():
    wire = Wire(Tier.DISK, Tier.DEVICE)
    costs = Costs(
        step_seconds=0.0, kv_bytes_per_second={Tier.DEVICE: math.inf}, wires={wire: Line(1e-3, 1e9)}, overlap=0
    )
    model = CostModel(costs, layers=10, block_bytes=1000, block_size=1)
    # Seven blocks of ten layers: seventy records.
    assert model.decode({Tier.DISK: 7000}).seconds == pytest.approx(70e-3 + 7000 / 1e9)


def test_prefill_is_linear_in_tokens_and_in_pairs_of_tokens():
    found = MODEL.prefill(1000, past=4000)
    assert found.terms["arithmetic"] == pytest.approx(0.1)
    assert found.terms["weights and launches"] == 7e-3
    assert found.terms["attention"] == pytest.approx(1000 * 4500 * 1e-9)
    assert MODEL.prefill(5000).terms["attention"] == pytest.approx(
        MODEL.prefill(4000).terms["attention"] + found.terms["attention"]
    )


def prefilling(**values):
    return CostModel(Costs(step_seconds=9.0, kv_bytes_per_second={Tier.DEVICE: 1.0}, **values), 1, 1, 1)


def test_a_prefill_takes_the_longer_of_reading_weights_and_arithmetic():
    model = prefilling(weights=WeightReads(0.5, dense_seconds=2.0), token_seconds=0.25)
    assert model.prefill(4).terms == {"launches": 0.5, "reading weights": 2.0, "attention": 0.0}
    assert model.prefill(4).bottleneck == "reading weights"
    assert model.prefill(100).terms == {"launches": 0.5, "arithmetic": 25.0, "attention": 0.0}
    assert model.prefill(50, rows=2).seconds == model.prefill(100).seconds


def test_a_prefill_reads_the_experts_that_all_its_tokens_reach():
    model = prefilling(weights=WeightReads(0.0, dense_seconds=1.0, expert_seconds=8.0, missed=0.5))
    assert model.prefill(1).terms["reading weights"] == 1 + 4
    assert model.prefill(2).terms["reading weights"] == 1 + 6
    assert model.prefill(200).terms["reading weights"] == pytest.approx(9)


@pytest.mark.parametrize(
    ("window", "tokens", "past", "pairs"),
    [
        (WindowPairs(100, 1.0), 10, 0, 50),  # what it would be without a window
        (WindowPairs(100, 1.0), 10, 50, 550),
        (WindowPairs(100, 1.0), 10, 100, 1000),
        (WindowPairs(100, 1.0), 10, 10**6, 1000),
        (WindowPairs(100, 1.0), 300, 0, 5000 + 20_000),
        (WindowPairs(100, 1.0, chunked=True), 10, 0, 50),
        (WindowPairs(100, 1.0, chunked=True), 250, 0, 2 * 5000 + 1250),
        (WindowPairs(100, 1.0, chunked=True), 10, 200, 50),
    ],
)
def test_a_token_attends_to_no_more_than_its_window(window, tokens, past, pairs):
    assert window.pairs(tokens, past) == pairs
    assert prefilling(windows=(window, window)).prefill(tokens, past).terms["attention"] == 2 * pairs


@given(st.integers(1, 5000), st.integers(0, 9000), st.integers(1, 3000), st.booleans())
def test_a_window_counts_as_if_each_token_were_counted_by_itself(tokens, past, width, chunked):
    found = WindowPairs(width, 1.0, chunked=chunked).pairs(tokens, past)
    each = (number % width if chunked else min(number, width) for number in range(past, past + tokens))
    assert found == pytest.approx(sum(each), abs=tokens + width)


def test_a_restore_through_host_memory_is_bound_by_the_slower_hop():
    costs = {"step_seconds": 1.0, "kv_bytes_per_second": {Tier.DEVICE: 1.0}, "stored_bytes_per_second": 100.0}
    slow, fast = {UP: Line(0.0, 10.0)}, {UP: Line(0.0, 1000.0)}
    assert CostModel(Costs(**costs, wires=slow), 1, 1000, 1).restore(1, Tier.DISK).terms["copies from host"] == 100
    assert CostModel(Costs(**costs, wires=fast), 1, 1000, 1).restore(1, Tier.DISK).terms["reading the disk"] == 10
    direct = slow | {Wire(Tier.DISK, Tier.DEVICE): Line(0.0, 100.0)}
    assert CostModel(Costs(**costs, wires=direct), 1, 1000, 1).restore(1, Tier.DISK).terms["reading the disk"] == 10


def test_a_restore_counts_whole_blocks():
    found = MODEL.restore(8_000 + 31, Tier.DISK)
    assert found.terms["blocks"] == pytest.approx(250e-5)
    assert found.terms["reading the disk"] == pytest.approx(250 * 4 * 2**20 / 13e9)
    assert MODEL.restore(8_000, Tier.HOST).terms["copies from host"] == pytest.approx(250 * 4 * 2**20 / 51e9)
    assert set(MODEL.restore(8_000, Tier.DEVICE).terms) == {"finding it", "blocks"}


def test_a_move_costs_its_bytes_and_its_pieces():
    costs = Costs(step_seconds=0, kv_bytes_per_second={Tier.DEVICE: 1}, wires={UP: Line(1e-6, 1e9)})
    model = CostModel(costs, layers=4, block_bytes=8 * 2**20, block_size=32)
    # 1 MiB of K and of V in each of four layers: eight pieces.
    assert model.move(UP, 1) == pytest.approx(8e-6 + 8 * 2**20 / 1e9)
    assert model.move(UP, 3) == pytest.approx(24e-6 + 24 * 2**20 / 1e9)


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda model: model.decode({Tier.HOST: 1}), "nothing moves host_to_device"),
        (lambda model: model.decode({Tier.HOST: 1}, read="compute"), "no measured rate"),
        (lambda model: model.decode({Tier.DISK: 1}), "nothing moves disk_to_device"),
        (lambda model: model.restore(1, Tier.DISK), "no prefix store"),
        (lambda model: model.move(UP, 1), "the costs of these are known: none"),
    ],
)
def test_what_a_machine_cannot_do_is_said(ask, why):
    model = CostModel(Costs(step_seconds=1, kv_bytes_per_second={Tier.DEVICE: 1}), 1, 1, 1)
    with pytest.raises(ValueError, match=why):
        ask(model)


sizes = st.floats(0, 1e12)


@given(device=sizes, host=sizes, disk=sizes, more=sizes, where=st.sampled_from(list(Tier)))
def test_more_kv_never_takes_less_time(device, host, disk, more, where):
    lying = {Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk}
    before = MODEL.decode(lying).seconds
    after = MODEL.decode({**lying, where: lying[where] + more}).seconds
    assert after >= before * (1 - 1e-9)


@given(num_bytes=st.floats(1, 1e12))
def test_a_lower_tier_is_never_faster(num_bytes):
    times = [MODEL.decode({tier: num_bytes}).seconds for tier in Tier]
    assert times == sorted(times)
