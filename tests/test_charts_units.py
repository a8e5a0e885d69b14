"""Numbers of charts: what they read like, and where axes begin and end."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.charts_ticks import limits, tick_labels, ticks
from tierkv.charts_units import fit, format_number, format_seconds, format_tokens, format_value, plain, width_of

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (0, "seconds", "0 s"),
        (1.23456, "seconds", "1.23 s"),
        (0.9999, "seconds", "1 s"),
        (0.9994, "seconds", "999 ms"),
        (0.0123, "seconds", "12.3 ms"),
        (4.56e-6, "seconds", "4.56 µs"),
        (7e-9, "seconds", "7 ns"),
        (3600, "seconds", "3,600 s"),
        (-0.5, "seconds", "-500 ms"),
        (4096, "tokens", "4k"),
        (1536, "tokens", "1.5k"),
        (131072, "tokens", "128k"),
        (2**20, "tokens", "1M"),
        (3 * 2**19, "tokens", "1.5M"),
        (1000, "tokens", "1,000"),
        (4097, "tokens", "4,097"),
        (512, "tokens", "512"),
        (0, "tokens", "0"),
        (3 * 2**30, "bytes", "3GiB"),
        (-2048, "bytes", "-2KiB"),
        (-0.2, "bytes", "0B"),
        (3.25 * 2**40, "bytes_per_second", "3.25TiB/s"),
        (0.875, "percent", "87.5%"),
        (1, "percent", "100%"),
        (1234567, "number", "1,234,567"),
        (0.123456, "number", "0.1235"),
        (1e-9, "number", "1e-09"),
        (NAN, "bytes", "n/a"),
        (INF, "tokens", "∞"),
        (-INF, "seconds", "-∞"),
    ],
)
def test_numbers_read_like(value, kind, text):
    assert format_value(value, kind) == text


@given(st.integers(0, 2**40))
def test_tokens_are_exact(tokens):
    text = format_tokens(tokens).replace(",", "")
    scale = {"k": 2**10, "M": 2**20}.get(text[-1], 1)
    assert float(text.rstrip("kM")) * scale == tokens


@given(st.floats(1e-9, 1e9))
def test_seconds_keep_three_digits(seconds):
    number, unit = format_seconds(seconds).replace(",", "").split()
    scale = {"s": 1, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[unit]
    assert float(number) * scale == pytest.approx(seconds, rel=5.1e-3)
    assert unit == "s" or 1 <= float(number) < 1000


@given(
    st.floats(allow_nan=True, allow_infinity=True), st.sampled_from(["bytes", "tokens", "seconds", "percent", "number"])
)
def test_every_float_has_a_short_text(value, kind):
    assert 1 <= len(format_value(value, kind)) < 30
    assert format_number(3.0) == "3"


def test_text_without_what_xml_and_utf8_cannot_hold():
    assert plain("a\n b\tc\x00\ud800\ufffe") == "a b c���"


@given(st.text(), st.floats(20, 300))
def test_text_is_cut_to_a_width(text, width):
    short = fit(text, width)
    assert width_of(short) <= width
    assert short == text or (short.endswith("…") and text.startswith(short[:-1]))


def test_wide_letters_are_counted_as_wide():
    assert width_of("模型") > width_of("WW") > width_of("ee") > width_of("il")


@given(
    st.lists(st.floats(1e-200, 1e200), min_size=1, max_size=9), st.booleans(),
    st.sampled_from(["bytes", "tokens", "seconds", "percent", "number"]),
)  # fmt: skip
def test_axes_hold_their_values_and_few_ticks(values, log, kind):
    low, high = limits(values, log=log, from_zero=not log)
    assert low < high
    assert low <= min(values)
    assert max(values) <= high
    found = ticks(low, high, kind, log=log, values=values)
    assert len(found) <= 14
    assert all(low <= one * (1 + 1e-9) and one * (1 - 1e-9) <= high for one in found)
    assert all(a < b for a, b in pairwise(found))
    assert len(tick_labels(found, kind, log=log)) == len(found)


@pytest.mark.parametrize(
    ("low", "high", "kind", "log", "texts"),
    [
        (0, 70 * 2**30, "bytes", False, ["0", "16GiB", "32GiB", "48GiB", "64GiB"]),
        (0, 1.5 * 2**30, "bytes", False, ["0", "0.25GiB", "0.5GiB", "0.75GiB", "1GiB", "1.25GiB", "1.5GiB"]),
        (0, 131072, "tokens", False, ["0", "32k", "64k", "96k", "128k"]),
        (0, 0.053, "seconds", False, ["0", "10 ms", "20 ms", "30 ms", "40 ms", "50 ms"]),
        (0, 1, "percent", False, ["0%", "20%", "40%", "60%", "80%", "100%"]),
        (-3, 3, "number", False, ["-3", "-2", "-1", "0", "1", "2", "3"]),
        (3500, 140000, "tokens", True, ["4k", "8k", "16k", "32k", "64k", "128k"]),
        (1e-6, 1e2, "seconds", True, ["1 µs", "100 µs", "10 ms", "1 s", "100 s"]),
        (0.9, 22, "number", True, ["1", "2", "5", "10", "20"]),
    ],
)
def test_ticks_are_round(low, high, kind, log, texts):
    found = ticks(low, high, kind, log=log)
    assert tick_labels(found, kind, log=log) == texts


def test_few_values_of_a_logarithmic_axis_are_its_ticks():
    assert ticks(900, 70000, "tokens", log=True, values=[1000, 3000, 60000]) == [1000, 3000, 60000]
