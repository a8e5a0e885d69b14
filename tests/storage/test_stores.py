"""The test stores themselves: faults come when they were ordered."""

import time

import pytest
import torch

from tierkv.errors import RecordError, StoreFull
from tierkv.layout import BlockLayout, LayerSpec
from tierkv.testing.contracts import bits, strided
from tierkv.testing.stores import DictStore, FaultyStore
from tierkv.tier import Run, Tier

LAYOUT = BlockLayout((LayerSpec(0, 1, 4, 4),), 16, "bfloat16")


@pytest.fixture
def store():
    with FaultyStore(DictStore(LAYOUT, tier=Tier.DISK, num_slots=9)) as store:
        yield store


def tensors():
    return torch.ones(1, 16, 4, dtype=torch.bfloat16), torch.ones(1, 16, 4, dtype=torch.bfloat16)


def test_it_passes_for_the_inner_store(store):
    assert (store.tier, store.layout, store.num_slots) == (Tier.DISK, LAYOUT, 9)
    store.write(0, Run(0, 1), *tensors())
    assert store.allocated_bytes == LAYOUT.block_bytes
    store.discard(0)
    assert list(store.discarded) == [0]
    assert store.allocated_bytes == 0


def test_the_nth_call_fails_and_does_nothing_else(store):
    store.faults.fail("write", StoreFull("no room"), nth=2)
    store.write(0, Run(0, 1), *tensors())
    with pytest.raises(StoreFull):
        store.write(0, Run(1, 1), *tensors())
    store.write(0, Run(2, 1), *tensors())
    assert sorted(store.slices) == [(0, 0), (0, 2)]
    assert store.faults.calls == {"write": 3, "read": 0}


def test_all_calls_fail_until_told_otherwise(store):
    store.write(0, Run(0, 1), *tensors())
    store.faults.fail_always("read", RecordError("damaged"))
    for _ in range(3):
        with pytest.raises(RecordError):
            store.read(0, Run(0, 1), *tensors())
    store.faults.fail_always("read", None)
    store.read(0, Run(0, 1), *tensors())


def test_reads_can_be_corrupted_without_an_error(store):
    store.write(0, Run(0, 1), *tensors())
    store.faults.corrupt_reads = True
    keys, values = strided(tensors()[0])[0], tensors()[1]
    store.read(0, Run(0, 1), keys, values)
    assert (bits(keys) != bits(tensors()[0])).sum() == 1
    assert torch.equal(values, tensors()[1])


def test_calls_can_be_slow(store):
    store.faults.delay_seconds = 0.02
    began = time.perf_counter()
    store.write(0, Run(0, 1), *tensors())
    assert time.perf_counter() - began >= 0.02
