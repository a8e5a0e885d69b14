"""Engine: what a reservation promises, and what happens when a copy or the disk fails."""

import pytest

from tierkv.errors import CapacityError, ClosedError
from tierkv.testing.engines import PlainCache, forward, random_tokens, small_engine, small_layout


def test_a_reservation_holds_although_an_earlier_one_was_for_longer_sequences():
    """The scratch of the longer one leaves too few slots for the shorter one beside live blocks: it is divided again."""
    layout = small_layout("plain")
    with small_engine(layout, device_tokens=48, host_tokens=80) as engine:
        first, second = engine.open(), engine.open()
        engine.reserve(first, 1, 100)
        forward(first, PlainCache(layout), random_tokens(layout, 1, 8, 1))
        with pytest.raises(CapacityError, match="taken by other caches"):
            engine.reserve(second, 1, 96)  # the first one may still come to its 100 tokens
        engine.end_call(first)
        engine.reserve(second, 1, 96)
        forward(second, PlainCache(layout), random_tokens(layout, 1, 96, 2))


def test_what_cannot_fit_is_refused_by_the_reservation():
    layout = small_layout("plain")
    with small_engine(layout, device_tokens=48, host_tokens=80) as engine:
        with pytest.raises(CapacityError, match=r"smallest device\.capacity"):
            engine.reserve(engine.open(), 4, 100)
        with pytest.raises(CapacityError, match=r"smallest device\.capacity"):
            engine.reserve(engine.open(), 1, 10**12)


@pytest.mark.parametrize("layers_ahead", [0, 10**9])
def test_any_number_of_layers_ahead_is_answered_at_once(layers_ahead):
    layout = small_layout("plain")
    with small_engine(layout, device_tokens=200, host_tokens=80, layers_ahead=layers_ahead) as engine:
        batch = engine.open()
        engine.reserve(batch, 1, 60)
        forward(batch, PlainCache(layout), random_tokens(layout, 1, 60, 3))


def test_use_after_release_or_close_is_a_closed_error():
    layout = small_layout("plain")
    engine = small_engine(layout, device_tokens=100)
    released, left = engine.open(), engine.open()
    forward(left, PlainCache(layout), random_tokens(layout, 1, 5, 4))
    released.release()
    with pytest.raises(ClosedError, match="this cache was closed"):
        released.append(0, *random_tokens(layout, 1, 1, 5)[0])
    engine.close()
    for use in (
        lambda: left.crop(1),
        lambda: left.append(0, *random_tokens(layout, 1, 1, 6)[0]),
        engine.open,
        engine.stats,
    ):
        with pytest.raises(ClosedError, match="this tierkv engine is closed"):
            use()
