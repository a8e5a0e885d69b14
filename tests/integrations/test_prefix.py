"""Prompts that begin alike share blocks in memory: fewer tokens are computed, and they are those of a fresh run."""

import copy

import pytest
import torch

import tierkv
from tests.integrations.prefixes import BLOCK, GREEDY, fed, first_forward, roomy

PLAIN = ("llama", "qwen3", "mistral", "gemma3", "phi3", "gpt_neox", "falcon", "gpt_oss", "deepseek_v3", "gpt2", "bloom")


@pytest.mark.parametrize("attention", ["auto", "gathered"])
@pytest.mark.parametrize("family", PLAIN)
def test_the_same_prompt_is_computed_once(lab, tiny_model, tmp_path, family, attention):
    model, batch = tiny_model(family), lab.prompt(tokens=101)
    stock = lab.stock(model, **batch, **GREEDY)
    with tierkv.attach(model, roomy(tmp_path, attention=attention)) as engine:
        first, computed = first_forward(model, batch)
        again, computed_again = first_forward(model, batch)
        assert torch.equal(first, stock)
        assert torch.equal(again, stock)
        assert (computed, computed_again) == (101, 101 - 6 * BLOCK)
        prefix = engine.stats().prefix
        assert (prefix.lookups, prefix.matched_tokens_memory, prefix.used_tokens) == (2, 96, 96)
        assert prefix.kept_bytes == engine.stats().tiers["device"].blocks * engine.layout.block_bytes
        assert engine.stats().kv_bytes_total == 0


def test_one_token_is_always_left_to_compute(lab, tiny_model, tmp_path):
    model, batch = tiny_model(), lab.prompt(tokens=6 * BLOCK)
    stock = lab.stock(model, **batch, **GREEDY)
    with tierkv.attach(model, roomy(tmp_path)) as engine:
        first_forward(model, batch)
        again, computed = first_forward(model, batch)
        assert torch.equal(again, stock)
        assert computed == 1
        assert engine.stats().prefix.used_tokens == 6 * BLOCK - 1


def test_prompts_that_part_share_what_comes_before(lab, tiny_model, tmp_path):
    model, batch = tiny_model(), lab.prompt(tokens=100)
    other = lab.prompt(tokens=100)
    other["input_ids"][0, 55:] = lab.prompt(tokens=45, seed=9)["input_ids"]
    with tierkv.attach(model, roomy(tmp_path)):
        first_forward(model, batch)
        out, computed = first_forward(model, other)
        assert torch.equal(out, lab.stock(model, **other, **GREEDY))
        assert computed == 100 - 48
        again, computed = first_forward(model, batch)  # was not disturbed by it
        assert torch.equal(again, lab.stock(model, **batch, **GREEDY))
        assert computed == 100 - 96


def test_a_conversation_goes_on_from_its_answer(lab, tiny_model, tmp_path):
    """The next turn's prompt holds the answer, which was computed token by token."""
    model, batch = tiny_model(), lab.prompt(tokens=70)
    with tierkv.attach(model, roomy(tmp_path)):
        answer, _ = first_forward(model, batch, max_new_tokens=40)
        ids = torch.cat([answer, lab.prompt(tokens=9, seed=4)["input_ids"]], dim=1)
        turn = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        out, computed = first_forward(model, turn)
        assert torch.equal(out, lab.stock(model, **turn, **GREEDY))
        assert computed == 119 - 6 * BLOCK  # the answer's last token was never fed: 109 tokens, six full blocks


@pytest.mark.parametrize("attention", ["auto", "gathered"])
@pytest.mark.parametrize("pads", [(0, BLOCK), (0, 5), (3, 21), (BLOCK, 2 * BLOCK)])
def test_rows_of_a_batch_with_padding(lab, tiny_model, tmp_path, pads, attention):
    """Rows share one length, so all use what the worst has; a row that is shifted by its padding gets copies."""
    model, batch = tiny_model(), lab.prompt(2, 90, pads=pads)
    stock = lab.stock(model, **batch, **GREEDY)
    with tierkv.attach(model, roomy(tmp_path, attention=attention)) as engine:
        for row in range(2):  # each by itself, without padding
            own = {name: values[row : row + 1, pads[row] :] for name, values in batch.items()}
            first_forward(model, own)
        out, computed = first_forward(model, batch)
        assert torch.equal(out, stock)
        used = min(pad + (90 - pad) // BLOCK * BLOCK for pad in pads)
        used = min(used, 89)
        assert computed == 2 * (90 - used)
        assert engine.stats().prefix.used_tokens == sum(used - pad for pad in pads)


def test_rows_that_nothing_is_known_of_hold_the_batch_back(lab, tiny_model, tmp_path):
    model, batch = tiny_model(), lab.prompt(2, 90)
    with tierkv.attach(model, roomy(tmp_path)) as engine:
        first_forward(model, {name: values[:1] for name, values in batch.items()})
        out, computed = first_forward(model, batch)
        assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
        assert computed == 180
        prefix = engine.stats().prefix
        assert (prefix.matched_tokens_memory, prefix.used_tokens) == (80, 0)


@pytest.mark.parametrize("settings", [{"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}])
def test_rows_of_one_prompt_share_its_blocks(lab, tiny_model, tmp_path, settings):
    model, batch = tiny_model(), lab.prompt(tokens=100)
    settings = {**GREEDY, **settings}
    torch.manual_seed(3)
    stock = lab.stock(model, **batch, **settings)
    with tierkv.attach(model, roomy(tmp_path)) as engine:
        for expected in (300, 3 * 4):
            torch.manual_seed(3)
            with fed(model) as counts:
                out = model.generate(**batch, **settings, return_dict_in_generate=True)
            assert torch.equal(out.sequences, stock)
            assert counts[0] == expected
            assert len({id(table.blocks[0]) for table in out.past_key_values.sequences.tables}) == 1
            # Six full blocks of the prompt, each there once instead of three times.
            assert engine.stats().prefix.saved_bytes >= 2 * 6 * engine.layout.block_bytes
            out.past_key_values.close()


def test_an_explicit_cache_begins_with_what_is_known(lab, tiny_model, tmp_path):
    model, batch = tiny_model(), lab.prompt(tokens=100)
    stock = lab.stock(model, **batch, **GREEDY)
    with tierkv.attach(model, roomy(tmp_path)) as engine:
        first_forward(model, batch)
        cache = engine.new_cache()
        out, computed = first_forward(model, batch, cache=cache)
        assert torch.equal(out, stock)
        assert computed == 4
        fork = copy.deepcopy(cache)
        cache.crop(-60)  # into a block that others hold
        ids = torch.cat([stock[:, :51], lab.prompt(tokens=20, seed=8)["input_ids"]], dim=1)
        assert torch.equal(model.generate(ids, cache=cache, **GREEDY), lab.stock(model, ids, **GREEDY))
        assert torch.equal(model.generate(stock, cache=fork, **GREEDY), lab.stock(model, stock, **GREEDY))
        out, computed = first_forward(model, batch)
        assert torch.equal(out, stock)
        assert computed == 4


def test_what_is_kept_gives_way_to_what_is_needed(lab, tiny_model):
    """A device of few blocks and nothing below: kept blocks are forgotten, no call is refused because of them."""
    model = tiny_model()
    with lab.attach(model, tokens=140, spare=8, host_blocks=0, disk={"capacity": 0}) as engine:
        for seed in range(6):
            batch = lab.prompt(tokens=110, seed=seed)
            out, _ = first_forward(model, batch)
            assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
        stats = engine.stats()
        assert stats.prefix.kept_bytes > 0
        assert all(tier.peak_bytes <= tier.capacity_bytes for tier in stats.tiers.values())


def test_kept_blocks_move_to_host_memory_and_never_to_disk(lab, tiny_model):
    model = tiny_model()
    with lab.attach(model, tokens=140, spare=8, host_blocks=6) as engine:
        batches = [lab.prompt(tokens=110, seed=seed) for seed in range(3)]
        for batch in batches:
            first_forward(model, batch)
        moved = engine.stats().moved_bytes
        assert moved["device_to_host"] > 0
        for batch in reversed(batches):
            out, _ = first_forward(model, batch)
            assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
        assert engine.stats().prefix.used_tokens > 0


def test_forgotten_prefixes_are_computed_again(lab, tiny_model, tmp_path):
    model, batch = tiny_model(), lab.prompt(tokens=100)
    with tierkv.attach(model, roomy(tmp_path)) as engine:
        first_forward(model, batch)
        engine.forget_prefixes()
        assert engine.stats().prefix.kept_bytes == 0
        assert first_forward(model, batch)[1] == 100


def test_sharing_can_be_turned_off(lab, tiny_model, tmp_path):
    model, batch = tiny_model(), lab.prompt(tokens=100)
    with tierkv.attach(model, roomy(tmp_path, share=False)) as engine:
        for _ in range(2):
            assert first_forward(model, batch)[1] == 100
        prefix = engine.stats().prefix
        assert (prefix.lookups, prefix.named_blocks, prefix.kept_bytes) == (0, 0, 0)


def test_rows_end_at_their_own_end(lab, tiny_model, tmp_path):
    """A row that has answered goes on with padding; that is nobody's prefix."""
    model, batch = tiny_model(), lab.prompt(2, 60)
    plain = lab.stock(model, **batch, do_sample=False, max_new_tokens=60)
    end = int(plain[0, 70])  # some token of the first row's answer; the second may have it too, later or never
    settings = {"eos_token_id": end, "max_new_tokens": 60}
    with tierkv.attach(model, roomy(tmp_path)) as engine:
        out, _ = first_forward(model, batch, **settings)
        assert torch.equal(out, lab.stock(model, **batch, **GREEDY | settings))
        ends = [(row[60:] == end).nonzero() for row in out]
        lengths = [60 + int(found[0]) + 1 if len(found) else out.shape[1] - 1 for found in ends]
        assert lengths[0] < out.shape[1] - 2 * BLOCK
        named = engine.stats().prefix.named_blocks
        assert named == sum(min(length, out.shape[1] - 1) // BLOCK for length in lengths)


def test_a_collision_of_keys_is_a_miss(lab, tiny_model, tmp_path, monkeypatch):
    """Two texts under one key: their ids tell them apart."""
    import tierkv.prefix

    monkeypatch.setattr(
        tierkv.prefix, "chain_keys", lambda start, ids, size: [b"%032d" % at for at in range(len(ids) // size)]
    )
    model = tiny_model()
    with tierkv.attach(model, roomy(tmp_path)):
        for seed in range(3):
            batch = lab.prompt(tokens=100, seed=seed)
            out, computed = first_forward(model, batch)
            assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
            assert computed == 100


@pytest.mark.parametrize("pad", [5, BLOCK])
def test_blocks_that_vanish_between_the_look_and_the_use(lab, tiny_model, tmp_path, monkeypatch, pad):
    """Making room for one row may cost another what it was matched with. One text over and over: all ids are alike."""
    model = tiny_model()
    ids = torch.full((1, 90 - pad), 17)
    ids[0, :4] = torch.tensor([3, 4, 5, 6])
    batch = {name: torch.nn.functional.pad(values, (pad, 0)) for name, values in
             {"input_ids": ids, "attention_mask": torch.ones_like(ids)}.items()}  # fmt: skip
    stock = lab.stock(model, **batch, **GREEDY)
    with tierkv.attach(model, roomy(tmp_path, persist=True)) as engine:
        first_forward(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        engine.stores.prefix.flush(10)
        for kept in (0, 2):
            known = engine.manager.share

            def share(table, keys, ids, known=known, kept=kept):
                return known(table, keys[:kept], ids)

            with monkeypatch.context() as patch:
                patch.setattr(engine.manager, "share", share)
                out, computed = first_forward(model, batch)
            assert torch.equal(out, stock)
            assert computed == (90 if not kept else 90 - pad - 2 * BLOCK)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}])
def test_a_short_cache_does_not_hide_a_longer_known_prefix(lab, tiny_model, tmp_path, settings):
    model, batch = tiny_model(), lab.prompt(tokens=100)
    stock = lab.stock(model, **batch, **GREEDY, **settings)
    with tierkv.attach(model, roomy(tmp_path)) as engine:
        cache = engine.new_cache()
        model.generate(batch["input_ids"][:, :40], cache=cache, do_sample=False, max_new_tokens=2)
        first_forward(model, batch)
        out, computed = first_forward(model, batch, cache=cache, **settings)
        assert torch.equal(out, stock)
        assert computed == 4 * settings.get("num_beams", 1)
        # Only the new ids, with a mask over all: nothing to look up with, and nothing is.
        more = lab.prompt(tokens=5, seed=3)["input_ids"]
        if not settings:
            ids = torch.cat([out[:, :-1], more], dim=1)
            assert torch.equal(
                model.generate(more, attention_mask=torch.ones_like(ids), cache=cache, **GREEDY)[:, 5:],
                lab.stock(model, ids, **GREEDY)[:, ids.shape[1] :],
            )
