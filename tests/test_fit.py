"""Fitting: known parameters come back from points made with them, with noise and outliers; residuals are told."""

import random
from dataclasses import replace

import pytest

from tierkv.cost import Costs, Line
from tierkv.fit import DecodePoint, Errors, Fit, Point, PrefillPoint, RestorePoint, fit
from tierkv.tier import Tier, Wire

pytest.importorskip("scipy")

SPILL = Wire(Tier.DISK, Tier.DEVICE)
TRUTH = Fit(
    Costs(
        step_seconds=0.045,
        kv_bytes_per_second={Tier.DEVICE: 6e9, Tier.HOST: 4e9},
        wires={SPILL: Line(3e-5, 1.5e9)},
        overlap=0.6,
        token_seconds=1.8e-3,
        pair_seconds=8e-8,
        past_pair_seconds=2e-7,
        restore_seconds=4e-3,
        block_seconds=1.5e-4,
        stored_bytes_per_second=1.6e9,
    ),
    layers=30,
    raw_bytes_per_second=2e9,
)
TOKEN = 23_040


def points(noise: float = 0.0, seed: int = 0) -> list[Point]:
    draw = random.Random(seed)
    made: list[Point] = []
    for context in (500, 3000, 9000):
        for below in (None, Tier.HOST, Tier.DISK):
            for size in (32, 128):
                cold = 0 if below is None else context * 3 // 4
                lying = {Tier.DEVICE: (context - cold) * TOKEN} | ({below: cold * TOKEN} if below else {})
                made.append(DecodePoint(lying, size * TOKEN, 0.0))
    made += [PrefillPoint(tokens, past, 0.0) for tokens, past in ((100, 0), (1000, 0), (4000, 0), (500, 4000))]
    made += [RestorePoint(blocks, size * TOKEN, 2e9, 0.0) for blocks, size in ((30, 32), (250, 32), (60, 128))]
    return [replace(one, seconds=TRUTH.seconds(one) * (1 + draw.uniform(-noise, noise))) for one in made]


def test_the_parameters_come_back_from_points_without_noise():
    found = fit(30, points())
    costs = found.costs
    assert costs.step_seconds == pytest.approx(0.045, rel=0.02)
    assert costs.kv_bytes_per_second[Tier.DEVICE] == pytest.approx(6e9, rel=0.05)
    assert costs.kv_bytes_per_second[Tier.HOST] == pytest.approx(4e9, rel=0.05)
    assert costs.token_seconds == pytest.approx(1.8e-3, rel=0.02)
    assert costs.pair_seconds == pytest.approx(8e-8, rel=0.02)
    assert costs.past_pair_seconds == pytest.approx(2e-7, rel=0.02)
    assert costs.stored_bytes_per_second == pytest.approx(1.6e9, rel=0.05)
    assert found.raw_bytes_per_second == 2e9
    for kind in ("decode", "prefill", "restore"):
        assert found.errors[kind].worst < 0.01


def test_noise_of_ten_percent_leaves_predictions_within_ten():
    for seed in range(5):
        found = fit(30, points(0.1, seed))
        others = [
            DecodePoint({Tier.DEVICE: 2000 * TOKEN, Tier.DISK: 4000 * TOKEN}, 64 * TOKEN, 0.0),
            DecodePoint({Tier.DEVICE: 6000 * TOKEN}, 32 * TOKEN, 0.0),
            PrefillPoint(2000, 0, 0.0),
            RestorePoint(120, 64 * TOKEN, 2e9, 0.0),
        ]
        for other in others:
            assert found.seconds(other) == pytest.approx(TRUTH.seconds(other), rel=0.12)


def test_one_wild_point_does_not_carry_the_fit_away():
    some = points()
    some[3] = replace(some[3], seconds=some[3].seconds * 5)
    other = DecodePoint({Tier.DEVICE: 6000 * TOKEN}, 32 * TOKEN, 0.0)
    assert fit(30, some).seconds(other) == pytest.approx(TRUTH.seconds(other), rel=0.1)


def test_a_restore_is_predicted_at_the_disk_rate_of_its_own_minute():
    found = fit(30, points())
    one = RestorePoint(250, 32 * TOKEN, 2e9, 0.0)
    slow = replace(one, raw_bytes_per_second=1e9)
    rate = found.costs.stored_bytes_per_second
    assert rate is not None
    extra = 250 * 32 * TOKEN / rate
    assert found.seconds(slow) - found.seconds(one) == pytest.approx(extra, rel=1e-6)


def test_kinds_that_were_not_measured_are_left_out():
    some = [one for one in points() if isinstance(one, DecodePoint) and not one.kv_bytes.get(Tier.DISK)]
    found = fit(30, some)
    assert set(found.errors) == {"decode"}
    assert found.costs.wires == {}
    assert found.costs.stored_bytes_per_second is None


def test_streamed_host_memory_is_a_wire():
    up = Wire(Tier.HOST, Tier.DEVICE)
    truth = Fit(Costs(step_seconds=0.01, kv_bytes_per_second={Tier.DEVICE: 1e12}, wires={up: Line(0.0, 5e10)}), 32)
    made = [
        DecodePoint({Tier.DEVICE: own * 10**9, Tier.HOST: cold * 10**9}, 2**22, 0.0, "stream")
        for own in (1, 4, 16)
        for cold in (0, 2, 8)
    ]
    found = fit(32, [replace(one, seconds=truth.seconds(one)) for one in made])
    assert found.costs.wires[up].bytes_per_second == pytest.approx(5e10, rel=0.05)
    assert Tier.HOST not in found.costs.kv_bytes_per_second


def test_nothing_measured_is_refused():
    with pytest.raises(ValueError, match="no decoded token"):
        fit(30, [PrefillPoint(1, 0, 1.0)])


def test_errors_are_relative_and_of_either_sign():
    assert Errors.of([(1.1, 1.0), (0.5, 1.0), (1.0, 1.0)]) == Errors(pytest.approx(0.1), 0.5)
