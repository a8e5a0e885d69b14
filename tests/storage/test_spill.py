"""What is peculiar to spilled slices: slots reused, damage, capacity, and that nothing stays behind."""

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tierkv.errors import ClosedError, ConfigError, RecordError, StoreError, StoreFull
from tierkv.layout import BlockLayout, LayerSpec
from tierkv.storage.codec import page_rounded_bytes, record_bytes
from tierkv.storage.spill import SpillStore
from tierkv.testing.contracts import assert_same_bits, random_bits
from tierkv.tier import Run

MIB = 1 << 20
UNIFORM = BlockLayout(tuple(LayerSpec(index, 2, 32, 32) for index in range(3)), 32, "bfloat16")
MIXED = BlockLayout((LayerSpec(0, 2, 64, 64), LayerSpec(1, 1, 32, 16), LayerSpec(2, 1, 32, 16)), 32, "float32")


def make(layout, layer, blocks=1, seed=0):
    spec, dtype = layout.layers[layer], getattr(torch, layout.dtype)
    tokens = blocks * layout.block_size
    keys = random_bits((spec.kv_heads, tokens, spec.key_dim), dtype, seed)
    return keys, random_bits((spec.kv_heads, tokens, spec.value_dim), dtype, seed + 1)


def read(store, layer, slot):
    keys, values = (torch.zeros_like(tensor) for tensor in make(store.layout, layer))
    store.read(layer, Run(slot, 1), keys, values)
    return keys, values


def check(store, layer, slot, wanted):
    for got, tensor in zip(read(store, layer, slot), wanted, strict=True):
        assert_same_bits(got, tensor)


def is_missing(store, layer, slot):
    try:
        read(store, layer, slot)
    except RecordError:
        return True
    return False


@pytest.fixture
def store(tmp_path):
    with SpillStore(UNIFORM, tmp_path, 8 * MIB, write_batch=4, write_queue_bytes=MIB) as store:
        yield store


# -- slots that are used again ----------------------------------------------------------------------------------------


def test_what_an_earlier_owner_left_in_the_file_is_never_served(store):
    store.write(0, Run(5, 1), *make(UNIFORM, 0))
    store.flush()
    store.discard(5)
    assert is_missing(store, 0, 5)
    store.write(1, Run(5, 1), *make(UNIFORM, 1, seed=9))
    store.flush()
    assert is_missing(store, 0, 5)
    check(store, 1, 5, make(UNIFORM, 1, seed=9))


def test_an_older_record_under_the_right_key_is_not_the_one(store):
    store.write(0, Run(5, 1), *make(UNIFORM, 0, seed=1))
    store.flush()
    key = (0).to_bytes(4, "big") + (5).to_bytes(4, "big")
    old = store._records.get(key, bytes)
    store.write(0, Run(5, 1), *make(UNIFORM, 0, seed=2))
    store.flush()
    # As if the newer write had been lost.
    store._records.put(key, old)
    with pytest.raises(RecordError, match="stamp"):
        read(store, 0, 5)


def test_the_record_of_another_slot_or_store_is_not_the_one(store, tmp_path):
    store.write(0, Run(5, 1), *make(UNIFORM, 0, seed=1))
    store.write(0, Run(6, 1), *make(UNIFORM, 0, seed=2))
    key = (0).to_bytes(4, "big")
    store._records.put(key + (6).to_bytes(4, "big"), store._records.get(key + (5).to_bytes(4, "big"), bytes))
    with pytest.raises(RecordError, match="stamp"):
        read(store, 0, 6)
    with SpillStore(UNIFORM, tmp_path, 8 * MIB) as other:
        other.write(0, Run(5, 1), *make(UNIFORM, 0, seed=1))
        store._records.put(key + (5).to_bytes(4, "big"), other._records.get(key + (5).to_bytes(4, "big"), bytes))
    with pytest.raises(RecordError, match="namespace"):
        read(store, 0, 5)


def test_discard_takes_back_what_is_queued(store):
    commit, begun, proceed = store._records._commit, threading.Event(), threading.Event()

    def wait(batch):
        begun.set()
        proceed.wait(10)
        commit(batch)

    store._records._commit = wait
    store.write(0, Run(0, 1), *make(UNIFORM, 0))
    begun.wait(10)
    one = store.queued_bytes
    store.write(1, Run(1, 1), *make(UNIFORM, 1))
    assert store.queued_bytes == 2 * one
    store.discard(1)
    assert store.queued_bytes == one
    proceed.set()
    store.flush()
    check(store, 0, 0, make(UNIFORM, 0))
    assert is_missing(store, 1, 1)


# -- damage and failure -----------------------------------------------------------------------------------------------


def test_a_flipped_byte_in_the_real_file_is_a_record_error(store):
    keys, values = make(UNIFORM, 0)
    store.write(0, Run(2, 1), keys, values)
    store.write(0, Run(3, 1), keys, values)
    store.flush()
    path = store._records.path / "data.mdb"
    position = path.read_bytes().index(keys.contiguous().view(torch.uint8).numpy().tobytes()) + 1234
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))
    outcomes = [is_missing(store, 0, slot) for slot in (2, 3)]
    assert sorted(outcomes) == [False, True]


def test_a_write_that_fails_leaves_no_slice_of_the_run(store, monkeypatch):
    put, calls = store._records.put, []

    def fail_third(key, value):
        calls.append(key)
        if len(calls) == 3:
            raise StoreFull("no room")
        put(key, value)

    monkeypatch.setattr(store._records, "put", fail_third)
    with pytest.raises(StoreFull):
        store.write(0, Run(0, 4), *make(UNIFORM, 0, blocks=4))
    assert all(is_missing(store, 0, slot) for slot in range(4))
    store.write(0, Run(0, 4), *make(UNIFORM, 0, blocks=4))


def test_what_a_failed_disk_accepted_is_still_there(tmp_path, monkeypatch):
    def fail(batch):
        raise OSError(5, "Input/output error")

    with SpillStore(UNIFORM, tmp_path, 8 * MIB, write_queue_bytes=MIB) as store:
        monkeypatch.setattr(store._records, "_commit", fail)
        accepted = []
        with contextlib.suppress(StoreFull):
            for slot in range(1000):
                store.write(0, Run(slot, 1), *make(UNIFORM, 0, seed=slot))
                accepted.append(slot)
        assert store.failed is not None
        assert accepted
        for slot in accepted:
            check(store, 0, slot, make(UNIFORM, 0, seed=slot))


# -- room -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [UNIFORM, MIXED])
@pytest.mark.parametrize("write_batch", [1, 16, 4096])
def test_all_promised_slots_fit_and_can_be_overwritten(tmp_path, layout, write_batch):
    capacity = 6 * MIB
    rng = random.Random(1)
    with SpillStore(layout, tmp_path, capacity, write_batch=write_batch, write_queue_bytes=MIB) as store:
        # A slice of whole pages takes one page more, for the headers: with small slices that is what costs most.
        taken = sum(page_rounded_bytes(record_bytes(layout.slice_bytes(layer))) for layer in range(3))
        assert store.num_slots * taken > 0.75 * capacity
        latest = {}
        slots = list(range(store.num_slots))
        for round_ in range(4):
            rng.shuffle(slots)
            for slot in slots:
                if round_ == 2 and slot % 5 == 0:
                    store.discard(slot)
                for layer in range(len(layout.layers)):
                    seed = 2 * (slot % 50) + round_
                    store.write(layer, Run(slot, 1), *make(layout, layer, seed=seed))
                    latest[layer, slot] = seed
            assert store.allocated_bytes <= capacity
        store.flush()
        assert store.failed is None
        assert store.allocated_bytes <= capacity
        assert store.peak_queued_bytes <= MIB
        for (layer, slot), seed in latest.items():
            check(store, layer, slot, make(layout, layer, seed=seed))


def test_slots_beyond_the_last_are_refused(store):
    store.write(0, Run(store.num_slots - 1, 1), *make(UNIFORM, 0))
    for slot in (-1, store.num_slots):
        with pytest.raises(ValueError, match="slots"):
            store.write(0, Run(slot, 1), *make(UNIFORM, 0))


@pytest.mark.parametrize("capacity", [1, 100_000, UNIFORM.block_bytes])
def test_a_capacity_that_holds_no_block(tmp_path, capacity):
    with pytest.raises(ConfigError, match=r"disk\.capacity") as caught:
        SpillStore(UNIFORM, tmp_path, capacity)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_store_that_cannot_be_opened_takes_its_directory_with_it(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise StoreError("cannot open it")

    monkeypatch.setattr("tierkv.storage.spill.LmdbStore", refuse)
    with pytest.raises(ConfigError, match="cannot open it"):
        SpillStore(UNIFORM, tmp_path, 8 * MIB)
    assert not list((tmp_path / "spill").iterdir())


def test_a_path_that_cannot_be_used(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        SpillStore(UNIFORM, tmp_path / "file", 8 * MIB)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("write_queue_bytes", [0, 1, 20_000])
def test_a_tiny_queue_still_works(tmp_path, write_queue_bytes):
    with SpillStore(UNIFORM, tmp_path, 8 * MIB, write_queue_bytes=write_queue_bytes) as store:
        store.write(0, Run(0, 8), *make(UNIFORM, 0, blocks=8))
        store.flush()
        assert store.peak_queued_bytes < 20_000


# -- the end ----------------------------------------------------------------------------------------------------------


def test_nothing_is_left_after_close(tmp_path):
    descriptors = {path.name for path in Path("/proc/self/fd").iterdir()}
    threads = set(threading.enumerate())
    store = SpillStore(UNIFORM, tmp_path, 8 * MIB)
    store.write(0, Run(0, 8), *make(UNIFORM, 0, blocks=8))
    store.close()
    store.close()
    assert not list((tmp_path / "spill").iterdir())
    assert set(threading.enumerate()) == threads
    assert {path.name for path in Path("/proc/self/fd").iterdir()} == descriptors
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    store.discard(0)


def test_two_stores_share_a_root(tmp_path):
    with SpillStore(UNIFORM, tmp_path, 8 * MIB) as one, SpillStore(UNIFORM, tmp_path, 8 * MIB) as other:
        one.write(0, Run(0, 1), *make(UNIFORM, 0, seed=1))
        other.write(0, Run(0, 1), *make(UNIFORM, 0, seed=2))
        check(one, 0, 0, make(UNIFORM, 0, seed=1))
        check(other, 0, 0, make(UNIFORM, 0, seed=2))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_refused_and_does_no_harm(store):
    store.write(0, Run(0, 1), *make(UNIFORM, 0))
    tensors = make(UNIFORM, 0)
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (store.write, store.read):
            try:
                use(0, Run(0, 1), *tensors)
            except ClosedError:
                refused += 1
        store.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    check(store, 0, 0, tensors)


KILLED = """
import sys, torch
from tierkv.layout import BlockLayout, LayerSpec
from tierkv.storage.spill import SpillStore
from tierkv.tier import Run
layout = BlockLayout((LayerSpec(0, 2, 64, 64),), 32, "float32")
store = SpillStore(layout, sys.argv[1], 32 << 20, write_queue_bytes=1 << 20)
tensor = torch.ones(2, 32, 64)
print("ready", flush=True)
while True:
    for slot in range(store.num_slots):
        store.write(0, Run(slot, 1), tensor, tensor)
"""


def test_a_process_killed_while_it_writes_leaves_no_trouble(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    time.sleep(0.2)
    process.kill()
    process.communicate()
    assert len(list((tmp_path / "spill").iterdir())) == 2
    with SpillStore(UNIFORM, tmp_path, 8 * MIB) as store:
        assert len(list((tmp_path / "spill").iterdir())) == 2
        store.write(0, Run(0, 1), *make(UNIFORM, 0))
        store.flush()
    assert not list((tmp_path / "spill").iterdir())


def test_tensors_that_need_gradients_are_only_bytes(store):
    keys, values = (tensor.requires_grad_() for tensor in make(UNIFORM, 0))
    store.write(0, Run(0, 1), keys, values)
    check(store, 0, 0, make(UNIFORM, 0))
