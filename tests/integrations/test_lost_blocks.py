"""A block that only the disk held and that cannot be read back: computed again once, or a clear error; never a wrong token."""

import logging
from typing import Any

import pytest
import torch
import transformers as tf

from tierkv.errors import BlockLost, RecordError, StoreFull
from tierkv.testing.stores import FaultyStore

NEW = 24
GREEDY = {"do_sample": False, "max_new_tokens": NEW}
SAMPLING = {"do_sample": True, "top_k": 20, "max_new_tokens": NEW}


@pytest.fixture
def faulty(lab):
    """Attach with a disk tier whose faults a test can switch."""

    def attach(model, **kwargs):
        context = lab.attach(model, **kwargs)
        engine = context.__enter__()
        engine.stores.disk = FaultyStore(engine.stores.disk)
        opened.append(context)
        return engine, engine.stores.disk.faults

    opened: list[Any] = []
    yield attach
    for context in opened:
        context.__exit__(None, None, None)


class Recorder(tf.generation.streamers.BaseStreamer):
    def __init__(self):
        self.seen, self.ended = [], 0

    def put(self, value):
        self.seen.append(value.clone())

    def end(self):
        self.ended += 1


class Counting(tf.LogitsProcessor):
    """Stateful: bans another token at each call."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.shape[1])
        scores[:, 3 + len(self.calls) :: 11] = -torch.inf
        return scores


@pytest.mark.parametrize("settings", [GREEDY, SAMPLING, {"num_beams": 3, **GREEDY}], ids=["greedy", "sample", "beams"])
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("nth", [1, 40])
def test_generate_runs_again_from_the_ids(lab, faulty, tiny_model, caplog, settings, family, nth):
    model, batch = tiny_model(family), lab.prompt(2, 150, pads=(0, 7))
    torch.manual_seed(2)
    stock = lab.stock(model, **batch, **settings)
    after = torch.rand(1)
    engine, faults = faulty(model, rows=2 * settings.get("num_beams", 1), tokens=180)
    faults.fail("read", RecordError("a flipped bit"), nth=nth)
    torch.manual_seed(2)
    with caplog.at_level(logging.WARNING, "tierkv"):
        ours = model.generate(**batch, **settings)
    assert torch.equal(ours, stock)
    assert torch.equal(torch.rand(1), after)
    counters = engine.stats().counters
    assert (counters.recomputes, counters.blocks_lost) == (1, 1)
    assert caplog.text.count("generating again from the ids") == 1
    assert engine.stats().kv_bytes_total == 0


@pytest.mark.parametrize("nth", [1, 30, 55])
@pytest.mark.parametrize("by_place", [False, True])
def test_what_the_user_watches_is_told_once(lab, faulty, tiny_model, nth, by_place):
    model, ids = tiny_model(), lab.prompt(1, 150)["input_ids"]
    torch.manual_seed(4)
    reference = Counting()
    stock = lab.stock(model, ids, logits_processor=[reference], **SAMPLING)
    engine, faults = faulty(model)
    faults.fail("read", RecordError("a flipped bit"), nth=nth)
    torch.manual_seed(4)
    streamer, processor = Recorder(), Counting()
    if by_place:
        ours = model.generate(ids, None, [processor], None, None, None, None, streamer, **SAMPLING)
    else:
        ours = model.generate(ids, logits_processor=[processor], streamer=streamer, **SAMPLING)
    assert engine.stats().counters.recomputes == 1
    assert torch.equal(ours, stock)
    assert torch.equal(torch.cat([value.flatten() for value in streamer.seen]), ours[0])
    assert streamer.ended == 1
    assert processor.calls == reference.calls


def test_only_once(lab, faulty, tiny_model):
    model, batch = tiny_model(), lab.prompt(1, 150)
    engine, faults = faulty(model)
    faults.fail_always("read", RecordError("gone"))
    with pytest.raises(BlockLost, match="only the disk tier held"):
        model.generate(**batch, **GREEDY)
    assert engine.stats().counters.recomputes == 1
    assert engine.stats().kv_bytes_total == 0
    faults.fail_always("read", None)
    assert torch.equal(model.generate(**batch, **GREEDY), lab.stock(model, **batch, **GREEDY))


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_an_explicit_cache_says_so_and_can_be_used_after_reset(lab, faulty, tiny_model, family):
    model, batch = tiny_model(family), lab.prompt(1, 150)
    engine, faults = faulty(model)
    cache = engine.new_cache()
    ids = model.generate(**batch, cache=cache, **GREEDY)
    faults.fail_always("read", RecordError("gone"))
    for _ in range(2):
        with pytest.raises((BlockLost, RuntimeError)):
            model.generate(ids, cache=cache, **GREEDY)
    assert engine.stats().counters.recomputes == 0
    faults.fail_always("read", None)
    cache.reset()
    assert torch.equal(model.generate(ids, cache=cache, **GREEDY), lab.stock(model, ids, **GREEDY))


def test_bytes_that_rot_on_the_disk(lab, tiny_model):
    """One bit of every record, flipped behind the store's back."""
    model, batch = tiny_model(), lab.prompt(1, 150)
    with lab.attach(model) as engine:
        cache = engine.new_cache()
        ids = model.generate(**batch, cache=cache, **GREEDY)
        disk = engine.stores.disk
        disk.flush()
        flipped = 0
        with disk._records._environment.begin(write=True) as transaction:
            for key, value in list(transaction.cursor()):
                rotten = bytearray(value)
                rotten[-100] ^= 1
                transaction.put(key, bytes(rotten))
                flipped += 1
        assert flipped > 0
        with pytest.raises(BlockLost):
            model.generate(ids, cache=cache, **GREEDY)
        with pytest.raises(BlockLost), torch.no_grad():
            model(ids[:, -1:], cache=cache)
        cache.reset()
        assert torch.equal(model.generate(ids, cache=cache, **GREEDY), lab.stock(model, ids, **GREEDY))


@pytest.mark.parametrize("nth", [1, 20])
def test_a_disk_that_is_full(lab, faulty, tiny_model, nth):
    """Where memory suffices for the call, it goes on there; nothing is written any more."""
    model, batch = tiny_model(), lab.prompt(1, 150)
    engine, faults = faulty(model, spare=20)
    cache = engine.new_cache()
    model.generate(**lab.prompt(1, 150, seed=5), cache=cache, **GREEDY)  # something to move down
    faults.fail_always("write", StoreFull("no room on the device"))
    ours = model.generate(**batch, **GREEDY)
    assert torch.equal(ours, lab.stock(model, **batch, **GREEDY))
