"""Reading KV or computing it: whichever was measured to be faster."""

import pytest

from tierkv.prefix_rates import Rates


def test_what_is_unknown_is_read():
    rates = Rates()
    assert rates.loading_pays(1 << 40, 1)
    rates.computed(1000, 1e-9)
    assert rates.loading_pays(1 << 40, 1)


def test_the_faster_one_wins():
    now = [0.0]
    rates = Rates(lambda: now[0])
    rates.computed(1000, 2.0)  # 2 ms a token
    rates.loaded(1_000_000, 0.1)  # 10 MB/s
    assert rates.loading_pays(20_000, 2)  # 2 ms against 4
    assert not rates.loading_pays(20_000, 1)
    rates.loaded(0, 1.0)  # nothing came: says nothing about the medium
    assert rates.seconds_per_byte == pytest.approx(1e-7)


def test_the_newest_measurement_counts_and_old_ones_fade():
    rates = Rates()
    rates.computed(100, 1.0)
    for _ in range(20):
        rates.computed(100, 3.0)
    assert rates.seconds_per_token == pytest.approx(0.03, rel=0.01)


def test_a_slow_medium_is_tried_again():
    now = [0.0]
    rates = Rates(lambda: now[0])
    rates.computed(1000, 0.001)
    rates.loaded(1000, 10.0)
    assert not rates.loading_pays(1000, 10)
    now[0] = 61.0
    assert rates.loading_pays(1000, 10)
