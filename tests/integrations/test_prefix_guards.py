"""Ids do not always decide KV. Where they do not, nothing is looked up and nothing is kept, and it is counted."""

import threading
import time

import pytest
import torch

import tierkv
from tests.integrations.prefixes import BLOCK, GREEDY, fed, first_forward, roomy
from tierkv.tier import Tier


def holes(batch):
    batch["attention_mask"][0, 40:44] = 0


def padding_on_the_right(batch):
    batch["attention_mask"][0, -3:] = 0


def positions(batch):
    batch["position_ids"] = torch.arange(5, 106)[None]


ODD = [holes, padding_on_the_right, positions]


@pytest.mark.parametrize("change", ODD)
def test_an_odd_prompt_is_neither_looked_up_nor_kept(lab, tiny_model, tmp_path, change):
    model = tiny_model()
    with tierkv.attach(model, roomy(tmp_path)) as engine:
        first_forward(model, lab.prompt(tokens=101))  # its prefix is known: a wrong hit would be possible
        named = engine.stats().prefix.named_blocks
        batch = lab.prompt(tokens=101)
        change(batch)
        out, computed = first_forward(model, batch)
        assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
        assert computed == 101
        prefix = engine.stats().prefix
        assert prefix.uncacheable_rows == 1
        assert prefix.uncacheable_reason
        # What comes before a hole is a function of the ids, and is known already.
        assert prefix.named_blocks == named
        assert first_forward(model, lab.prompt(tokens=101))[1] == 5


def test_holes_in_an_unknown_prompt_end_what_is_kept(lab, tiny_model, tmp_path):
    model, batch = tiny_model(), lab.prompt(tokens=101)
    holes(batch)
    with tierkv.attach(model, roomy(tmp_path)) as engine:
        first_forward(model, batch)
        assert engine.stats().prefix.named_blocks == 2  # 40 tokens before the hole
        whole = lab.prompt(tokens=101)
        out, computed = first_forward(model, whole)
        assert computed == 101 - 2 * BLOCK
        assert torch.equal(out, lab.stock(model, **whole, **GREEDY))


def test_pad_ids_inside_a_prompt_without_a_mask_are_holes(lab, tiny_model, tmp_path):
    """``generate`` infers a mask from pad ids when none is given."""
    model, ids = tiny_model(), lab.prompt(tokens=101)["input_ids"]
    ids[0, 50] = 0
    with tierkv.attach(model, roomy(tmp_path)) as engine:
        for _ in range(2):
            with fed(model) as counts:
                out = model.generate(ids, **GREEDY)
            assert torch.equal(out, lab.stock(model, ids, **GREEDY))
            assert counts[0] == 101
        assert engine.stats().prefix.uncacheable_rows == 2


def test_embeddings_have_no_ids(lab, tiny_model, tmp_path):
    model, batch = tiny_model(), lab.prompt(tokens=101)
    with tierkv.attach(model, roomy(tmp_path)) as engine:
        first_forward(model, batch)
        named = engine.stats().prefix.named_blocks
        embeds = model.get_input_embeddings()(batch["input_ids"]) * 1.5
        settings = {"inputs_embeds": embeds, "attention_mask": batch["attention_mask"], **GREEDY}
        assert torch.equal(model.generate(**settings), lab.stock(model, **settings))
        prefix = engine.stats().prefix
        assert (prefix.uncacheable_rows, prefix.named_blocks) == (1, named)


def test_embeddings_beside_ids_decide(lab, tiny_model, tmp_path):
    model, batch = tiny_model(), lab.prompt(tokens=101)
    with tierkv.attach(model, roomy(tmp_path)) as engine:
        first_forward(model, batch)
        embeds = model.get_input_embeddings()(batch["input_ids"]) * 1.5
        settings = {**batch, "inputs_embeds": embeds, **GREEDY}
        assert torch.equal(model.generate(**settings), lab.stock(model, **settings))
        assert engine.stats().prefix.used_tokens == 0


@pytest.mark.parametrize("family", ["qwen3_next", "jamba", "lfm2", "gemma3n"])
def test_models_that_keep_more_than_blocks(lab, tiny_model, tmp_path, family):
    model, batch = tiny_model(family), lab.prompt(tokens=101)
    with tierkv.attach(model, roomy(tmp_path, persist=True)) as engine:
        for _ in range(2):
            out, computed = first_forward(model, batch)
            assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
            assert computed == 101
        prefix = engine.stats().prefix
        assert (prefix.uncacheable_rows, prefix.named_blocks, prefix.store.blocks) == (2, 0, 0)
        assert "state is not in the blocks" in prefix.uncacheable_reason


def test_a_model_in_training_is_left_alone(lab, tiny_model, tmp_path):
    model, batch = tiny_model(), lab.prompt(tokens=101)
    with tierkv.attach(model, roomy(tmp_path)) as engine:
        try:
            model.train()
            first_forward(model, batch)
        finally:
            model.eval()
        assert engine.stats().prefix.named_blocks == 0
        assert first_forward(model, batch)[1] == 101


def test_inputs_that_somebody_prepares(lab, tiny_model, tmp_path):
    """Soft prompts enter this way: embeddings in place of ids, at the first forward on an empty cache."""
    model, batch = tiny_model(), lab.prompt(tokens=101)
    soft = torch.randn(1, 8, 64)

    def prepare(input_ids, **kwargs):
        inputs = type(model).prepare_inputs_for_generation(model, input_ids, **kwargs)
        if inputs["input_ids"] is not None and inputs["input_ids"].shape[1] > 1:
            inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")) + soft.mean()
        return inputs

    with tierkv.attach(model, roomy(tmp_path)) as engine:
        first_forward(model, batch)
        model.prepare_inputs_for_generation = prepare
        try:
            out, _ = first_forward(model, batch)
            assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
        finally:
            del model.prepare_inputs_for_generation
        assert engine.stats().prefix.uncacheable_rows == 1


def test_drafting_feeds_the_whole_prompt(lab, tiny_model, tmp_path):
    model, batch = tiny_model(), lab.prompt(tokens=101)
    with tierkv.attach(model, roomy(tmp_path)) as engine:
        for _ in range(2):
            out = model.generate(**batch, **GREEDY, prompt_lookup_num_tokens=3)
            assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
        assert engine.stats().prefix.used_tokens == 0
        out, computed = first_forward(model, batch)  # what drafting has left is right
        assert computed == 5
        assert torch.equal(out, lab.stock(model, **batch, **GREEDY))


def test_a_torn_forward_publishes_nothing(lab, tiny_model, tmp_path):
    model, batch = tiny_model(), lab.prompt(tokens=101)

    def interrupt(*_):
        raise KeyboardInterrupt

    with tierkv.attach(model, roomy(tmp_path)) as engine:
        handle = model.model.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.generate(**batch, **GREEDY)
        handle.remove()
        assert engine.stats().prefix.named_blocks == 0
        out, computed = first_forward(model, batch)
        assert computed == 101
        assert torch.equal(out, lab.stock(model, **batch, **GREEDY))


@pytest.mark.parametrize("at", ["the lookup", "the restore", "the prefill"])
def test_an_interrupt_leaves_nothing_behind(lab, tiny_model, tmp_path, monkeypatch, at):
    model, batch = tiny_model(), lab.prompt(tokens=101)
    with tierkv.attach(model, roomy(tmp_path, persist=True)) as engine:
        first_forward(model, batch)
        engine.stores.prefix.flush(10)
        engine.forget_prefixes()

        def interrupt(*_, **__):
            raise KeyboardInterrupt

        targets = {
            "the lookup": (engine.stores.prefix, "match"),
            "the restore": (engine.manager, "commit"),
            "the prefill": (model.model.layers[1].mlp, "forward"),
        }
        with monkeypatch.context() as patch:
            patch.setattr(*targets[at], interrupt)
            with pytest.raises(KeyboardInterrupt):
                model.generate(**batch, **GREEDY)
        assert not engine.manager.moves
        assert engine.stats().kv_bytes_total == 0
        out, computed = first_forward(model, batch)
        assert computed == 5
        assert torch.equal(out, lab.stock(model, **batch, **GREEDY))


def test_plain_forwards_are_kept_too(lab, tiny_model, tmp_path):
    """Somebody who runs the model by hand with a cache fills the prefixes for a later ``generate``."""
    model, batch = tiny_model(), lab.prompt(tokens=101)
    with tierkv.attach(model, roomy(tmp_path)) as engine, torch.no_grad():
        cache = engine.new_cache()
        model(batch["input_ids"][:, :60], cache=cache)
        model(batch["input_ids"][:, 60:], cache=cache)
        out, computed = first_forward(model, batch)
        assert computed == 5
        assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
        cache.close()


def test_weights_that_change_under_a_cache_end_what_is_kept(lab, tmp_path):
    from tests.integrations.conftest import build

    model, batch = build("llama", "sdpa", torch.float32), lab.prompt(tokens=101)
    with tierkv.attach(model, roomy(tmp_path)) as engine, torch.no_grad():
        cache = engine.new_cache()
        model(batch["input_ids"][:, :40], cache=cache)
        model.model.layers[0].mlp.up_proj.weight.mul_(1.1)
        model(batch["input_ids"][:, 40:], cache=cache)
        assert engine.stats().prefix.named_blocks == 2
        out, computed = first_forward(model, batch)
        assert computed == 101
        assert torch.equal(out, lab.stock(model, **batch, **GREEDY))


def test_a_disk_that_does_not_answer_holds_nobody_up(lab, tiny_model, tmp_path, monkeypatch):
    """The writer hangs in the middle of a record: what the queue cannot take is shed, and nothing waits for it."""
    model, released = tiny_model(), threading.Event()
    settings = roomy(tmp_path, persist=True)
    settings["disk"]["write_queue"] = "192KiB"
    with tierkv.attach(model, settings) as engine:
        slabs = type(engine.stores.prefix._parts.slabs)
        write = slabs.write

        def hang(self, *args):
            released.wait(60)
            return write(self, *args)

        monkeypatch.setattr(slabs, "write", hang)
        prompts = [lab.prompt(tokens=200, seed=seed) for seed in range(4)]
        for batch in prompts:
            out, _ = first_forward(model, batch)
            assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
        prefix = engine.stats().prefix
        assert not released.is_set()
        assert prefix.waiting_blocks > 20
        assert engine.stores.prefix.queued_bytes <= 96 << 10
        assert first_forward(model, prompts[-1])[1] == 200 - 12 * BLOCK  # memory serves on
        engine.forget_prefixes()  # blocks that are gone before the queue has room for them are given up
        first_forward(model, lab.prompt(tokens=60, seed=9))
        released.set()
        engine.stores.prefix.flush(30)
        first_forward(model, lab.prompt(tokens=60, seed=10))
        assert engine.stats().prefix.shed_blocks > 0


def test_an_interrupt_while_reads_are_in_flight(lab, tiny_model, tmp_path, monkeypatch):
    """They end before their places are given to others: late bytes never land in a block that is somebody else's."""
    model, batch = tiny_model(), lab.prompt(tokens=101)
    with tierkv.attach(model, roomy(tmp_path, persist=True)) as engine:
        first_forward(model, batch)
        engine.stores.prefix.flush(10)
        engine.forget_prefixes()
        store, transfers = type(engine.stores.prefix), engine.transfers
        read, settle = store.read, transfers.settle
        in_flight: list[int] = []
        interrupted: list[object] = []

        def slow(self, *args):
            in_flight.append(1)
            time.sleep(0.02)
            try:
                return read(self, *args)
            finally:
                in_flight.pop()

        def interrupt_once(ticket, *args):
            if not interrupted:
                interrupted.append(ticket)
                raise KeyboardInterrupt
            return settle(ticket, *args)

        monkeypatch.setattr(store, "read", slow)
        monkeypatch.setattr(transfers, "settle", interrupt_once)
        with pytest.raises(KeyboardInterrupt):
            model.generate(**batch, **GREEDY)
        assert interrupted
        assert not in_flight
        assert engine.manager.pools[Tier.DEVICE].used == 0
        other = lab.prompt(tokens=101, seed=5)
        out, _ = first_forward(model, other)
        assert torch.equal(out, lab.stock(model, **other, **GREEDY))
        out, computed = first_forward(model, batch)
        assert computed == 5
        assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
