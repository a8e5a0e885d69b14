"""How long wires were at work: what overlaps counts once, and an engine's stats tell it."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv import transfer_clocks
from tierkv.testing.engines import PlainCache, forward, random_tokens, small_engine, small_layout
from tierkv.testing.stores import DictStore
from tierkv.testing.transfers import DOWN, RESTORE, UP, Gate, ManualTransfers
from tierkv.transfer import Copy, ThreadTransfers
from tierkv.transfer_clocks import WireClock

TICKS = 200


def busy_ticks(spans):
    """Count the ticks that lie in at least one of the spans."""
    return len({tick for begin, end in spans for tick in range(begin, end)})


@given(
    st.lists(st.tuples(st.integers(0, TICKS), st.integers(0, TICKS)).map(sorted), max_size=40),
    st.integers(1, 3),
)
def test_what_overlaps_counts_once(spans, wires):
    by_wire = [(UP, DOWN, RESTORE)[number % wires] for number in range(len(spans))]
    clock = WireClock()
    now = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: now[0])
        for (begin, end), wire in sorted(zip(spans, by_wire, strict=True), key=lambda one: one[0][1]):
            now[0] = float(end)
            clock.ended(wire, float(begin))
    for wire in set(by_wire):
        own = [span for span, other in zip(spans, by_wire, strict=True) if other == wire]
        assert clock.seconds()[wire] == busy_ticks(own)
    assert set(clock.seconds()) == set(by_wire)


def test_spans_long_past_are_a_sum(monkeypatch):
    clock, now = WireClock(), [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for number in range(10 * transfer_clocks._RECENT_SPANS):
        now[0] = number + 0.5
        clock.ended(UP, float(number))
    assert clock.seconds() == {UP: 5.0 * transfer_clocks._RECENT_SPANS}
    assert len(clock._recent[UP]) <= 2 * transfer_clocks._RECENT_SPANS


def test_two_copies_at_the_same_time_are_one_stretch_of_work():
    with ThreadTransfers(2) as engine:
        gates = [Gate(), Gate()]
        began = time.perf_counter()
        ticket = engine.submit([Copy(UP, 1, load=gate) for gate in gates])
        assert all(gate.is_inside.wait(30) for gate in gates)
        time.sleep(0.05)
        assert engine.clock.seconds() == {}
        for gate in gates:
            gate.open()
        engine.wait(ticket)
        assert 0.05 <= engine.clock.seconds()[UP] <= time.perf_counter() - began


def test_a_copy_that_failed_was_work_too():
    def refuse():
        raise OSError("no")

    with ThreadTransfers(1) as engine:
        engine.settle(engine.submit([Copy(DOWN, 1, load=refuse)]))
        assert engine.clock.seconds()[DOWN] > 0
    assert ManualTransfers().clock is None


@pytest.mark.parametrize("disk", [False, True])
def test_stats_tell_the_seconds_of_every_wire(disk):
    layout = small_layout("plain")
    more = {"disk": DictStore(layout, num_slots=32)} if disk else {"host_tokens": 64}
    with small_engine(layout, device_tokens=24, **more) as engine:
        batch, plain = engine.open(), PlainCache(layout)
        for step in range(6):
            forward(batch, plain, random_tokens(layout, 1, 6, step))
        batch.release()
        stats = engine.stats()
    assert set(stats.moved_seconds) == set(stats.moved_bytes)
    used = {wire for wire, moved in stats.moved_bytes.items() if moved}
    assert {("device_to_disk" if disk else "device_to_host"), ("disk_to_device" if disk else "host_to_device")} <= used
    assert {wire for wire, seconds in stats.moved_seconds.items() if seconds} == used
