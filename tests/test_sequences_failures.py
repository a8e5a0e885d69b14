"""SequenceBatch where something goes wrong: failed writes, dropped batches, refused forwards."""

import pytest

from tierkv.errors import CapacityError
from tierkv.testing.engines import PlainCache, divide, forward, random_tokens, small_engine, small_layout
from tierkv.testing.stores import DictStore
from tierkv.testing.transfers import ManualTransfers


def cold_batch():
    """A batch whose new blocks are written to host memory by copies that the test ends."""
    layout, transfers = small_layout("plain"), ManualTransfers()
    engine = small_engine(layout, device_tokens=400, host_tokens=160, transfers=transfers)
    divide(engine, device_slots=2, num_buffers=1, buffer_tokens=100)
    return engine, engine.open(), PlainCache(layout), transfers


@pytest.mark.parametrize("end", ["append", "release"])
def test_a_write_that_failed_tears_the_forward_and_no_more(end):
    engine, batch, plain, transfers = cold_batch()
    new = random_tokens(engine.layout, 1, 30, 1)
    batch.append(0, *new[0])
    (write,) = transfers.pending
    transfers.fail(write, OSError("cable pulled"))
    with pytest.raises(OSError, match="cable"):
        batch.append(1, *new[1])
    if end == "append":
        for count in (30, 1):
            forward(batch, plain, random_tokens(engine.layout, 1, count, count))
    batch.release()
    with engine:
        assert all(pool.used == 0 for pool in engine.manager.pools.values())


def test_writes_of_a_batch_that_was_dropped_land_in_no_slot_of_another():
    engine, batch, plain, transfers = cold_batch()
    batch.append(0, *random_tokens(engine.layout, 1, 30, 1)[0])
    assert transfers.pending
    batch = engine.open()
    for count in (30, 1):
        forward(batch, plain, random_tokens(engine.layout, 1, count, count))
    batch.release()
    engine.close()


def test_room_of_a_batch_that_was_dropped_is_given_to_the_next():
    engine, batch, plain, _ = cold_batch()
    for seed in range(5):
        plain = PlainCache(engine.layout)
        forward(batch, plain, random_tokens(engine.layout, 1, 90, seed))
        batch = engine.open()  # the one before is collected
    engine.close()


@pytest.mark.parametrize("start", ["torn", "refused"])
def test_an_empty_batch_takes_any_number_of_rows(start):
    engine, batch, plain, _ = cold_batch()
    if start == "torn":
        forward(batch, PlainCache(engine.layout), random_tokens(engine.layout, 2, 5, 0), layers=1)
    else:
        with pytest.raises(CapacityError):
            batch.append(0, *random_tokens(engine.layout, 3, 400, 0)[0])
    forward(batch, plain, random_tokens(engine.layout, 1, 5, 0))
    engine.close()


def test_more_rows_get_the_slots_that_they_need_back_from_the_scratch():
    layout = small_layout("two groups")
    engine = small_engine(layout, device_tokens=100, host_tokens=16, disk=DictStore(layout), layers_ahead=2)
    with engine:
        first = engine.open()
        forward(first, PlainCache(layout), random_tokens(layout, 1, 60, 0))
        first.release()
        engine.capacity.plan(3, 12)
        forward(engine.open(), PlainCache(layout), random_tokens(layout, 3, 12, 1))
