"""One explicit cache used again and again: always the tokens of a fresh run over the whole text."""

import copy
from typing import Any

import pytest
import torch

import tierkv

GREEDY = {"do_sample": False, "max_new_tokens": 10}


def slow(*values):
    """Parameters for the full run only; the quick one has enough without them."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


HYBRID_TOO = pytest.mark.parametrize(
    "family", ["llama", "qwen3_next", *slow("gemma3", "deepseek_v3", "bloom", "gemma4")]
)


def joined(ids, *, rows=1, count=12, seed=1):
    """Append a user's next turn to what was generated so far."""
    turn = torch.randint(3, 97, (rows, count), generator=torch.Generator().manual_seed(seed))
    return torch.cat([ids, turn], dim=1)


def grown(mask, ids):
    return torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)


def forwarded(engine):
    return engine.stats().counters.tokens


@HYBRID_TOO
@pytest.mark.parametrize("settings", [{}, {"prefill_chunk_size": 7}], ids=["whole", "chunked"])
def test_a_conversation_of_three_turns(lab, tiny_model, family, settings):
    model, batch = tiny_model(family), lab.prompt(2, 100, pads=(0, 30))
    with lab.attach(model, rows=2, tokens=190) as engine:
        cache, ids, mask = engine.new_cache(), batch["input_ids"], batch["attention_mask"]
        for turn in range(3):
            before = forwarded(engine)
            ours = model.generate(ids, attention_mask=mask, cache=cache, **GREEDY, **settings)
            assert torch.equal(ours, lab.stock(model, ids, attention_mask=mask, **GREEDY))
            if turn:  # the new turn, the last token before it, and what was generated
                assert forwarded(engine) - before == 2 * (1 + 12 + 9)
            ids = joined(ours, rows=2, seed=turn)
            mask = grown(mask, ids)
        assert min(now.blocks for now in engine.stats().tiers.values()) > 0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_returned_cache_continues(lab, tiny_model, family):
    model, batch = tiny_model(family), lab.prompt(1, 120)
    with lab.attach(model, tokens=190) as engine:
        first = model.generate(**batch, return_dict_in_generate=True, **GREEDY)
        ids = joined(first.sequences)
        second = model.generate(ids, cache=first.cache, return_dict_in_generate=True, **GREEDY)
        assert second.cache is first.cache
        assert engine.stats().counters.tokens == 129 + 22
        assert torch.equal(second.sequences, lab.stock(model, ids, **GREEDY))
        first.cache.close()
        with pytest.raises(tierkv.TierKVError, match="closed"):
            model.generate(ids, cache=first.cache, **GREEDY)


@HYBRID_TOO
def test_beams_on_a_filled_cache(lab, tiny_model, family):
    model, batch = tiny_model(family), lab.prompt(2, 100, pads=(0, 8))
    with lab.attach(model, rows=6, tokens=150) as engine:
        cache = engine.new_cache()
        first = model.generate(**batch, cache=cache, **GREEDY)
        ids = joined(first, rows=2)
        mask = grown(batch["attention_mask"], ids)
        for settings in ({"num_beams": 3, "num_return_sequences": 3}, {"num_beams": 3}):
            ours = model.generate(ids, attention_mask=mask, cache=cache, **GREEDY, **settings)
            assert torch.equal(ours, lab.stock(model, ids, attention_mask=mask, **GREEDY, **settings))
            assert cache.sequences.rows == 6


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_crop_and_continue(lab, tiny_model, family):
    model, batch = tiny_model(family), lab.prompt(2, 130, pads=(20, 0))
    with lab.attach(model, rows=2, tokens=190) as engine:
        cache = engine.new_cache()
        ids = model.generate(**batch, cache=cache, **GREEDY)
        for removed in (1, 9, 47, 15):
            cache.crop(-removed)
            ids = joined(ids[:, : cache.get_seq_length()], rows=2, count=5, seed=removed)
            mask = grown(batch["attention_mask"][:, : ids.shape[1]], ids)
            assert torch.equal(
                model.generate(ids, attention_mask=mask, cache=cache, **GREEDY),
                lab.stock(model, ids, attention_mask=mask, **GREEDY),
            )
        with pytest.raises(tierkv.UnsafeCall, match="negative"):
            cache.crop(5)
        with pytest.raises(tierkv.UnsafeCall, match="holds only"):
            cache.crop(-1000)
        length = cache.get_seq_length()
        cache.crop(0)
        assert cache.get_seq_length() == length
        cache.crop(-length)
        other = lab.prompt(1, 60, seed=9)  # empty again: other rows, other text
        assert torch.equal(model.generate(**other, cache=cache, **GREEDY), lab.stock(model, **other, **GREEDY))


@HYBRID_TOO
def test_a_deepcopy_is_a_fork(lab, tiny_model, family):
    model, batch = tiny_model(family), lab.prompt(2, 120, pads=(0, 3))
    with lab.attach(model, rows=4, tokens=170) as engine:
        trunk = engine.new_cache()
        ids = model.generate(**batch, cache=trunk, **GREEDY)
        before = engine.stats()
        branch = copy.deepcopy(trunk)
        after = engine.stats()
        assert (after.moved_bytes, after.kv_bytes_total) == (before.moved_bytes, before.kv_bytes_total)
        assert after.caches == before.caches + 1
        for seed in range(2):  # they take turns, so that each writes what the other must not see
            for cache, salt in ((trunk, 10), (branch, 20)):
                longer = joined(ids, rows=2, seed=salt + seed)
                mask = grown(batch["attention_mask"], longer)
                assert torch.equal(
                    model.generate(longer, attention_mask=mask, cache=cache, **GREEDY),
                    lab.stock(model, longer, attention_mask=mask, **GREEDY),
                )
        assert 0 < engine.stats().counters.tail_copies <= 4 * 4
        trunk.close()
        branch.close()
        assert engine.stats().kv_bytes_total == 0


@HYBRID_TOO
def test_repeating_and_choosing_rows(lab, tiny_model, family):
    model, batch = tiny_model(family), lab.prompt(3, 110, pads=(0, 6, 17))
    with lab.attach(model, rows=6, tokens=140) as engine:
        cache = engine.new_cache()
        first = model.generate(**batch, cache=cache, **GREEDY)
        cache.batch_repeat_interleave(2)
        assert cache.sequences.rows == 6
        # Each choice is among the rows that the one before it left; the rows of the first call that remain are beside it.
        for chosen, rows in (([5, 0, 3], [2, 0, 1]), ([2, 1], [1, 0]), ([True, False], [1])):
            cache.batch_select_indices(torch.tensor(chosen))
            ids = joined(first[rows], rows=len(rows))
            mask = grown(batch["attention_mask"][rows], ids)
            assert torch.equal(
                model.generate(ids, attention_mask=mask, cache=copy.deepcopy(cache), **GREEDY),
                lab.stock(model, ids, attention_mask=mask, **GREEDY),
            )


BAD_ROWS: list[tuple[Any, str]] = [
    (None, "not None"), ("x", "not the text 'x'"), (1, "not a tensor of int64"), ([[0]], "shape \\[1, 1\\]"),
    (torch.tensor([0.0]), "not a tensor of float32"), (torch.tensor([0], dtype=torch.uint8), "not a tensor of uint8"),
    (torch.tensor([]), "at least one"), ([], "at least one"), (torch.tensor([False, False]), "at least one"),
    (torch.tensor([True]), "not 1 bools"), ([0, 2], "there is no row 2"), (torch.tensor([-1]), "there is no row -1"),
    ([2**70], "not a list"), ({}, "not a dict"),
]  # fmt: skip
BAD_CALLS = [
    *(("batch_select_indices", *bad) for bad in BAD_ROWS),
    *(("reorder_cache", *bad) for bad in BAD_ROWS),
    *(("batch_repeat_interleave", value, "at least 1, not") for value in (None, "a", 0, -1, 1.5, True, [2])),
    *(("crop", value, "minus the number of tokens") for value in (None, "a", -2.5, True, [-1], torch.tensor([-1, -2]))),
    ("crop", 3, "as a negative number"), ("crop", -1000, "holds only"),
]  # fmt: skip


def test_verbs_refuse_what_they_do_not_understand(filled, check):
    model, _, cache, ids, _ = filled("qwen3_next", rows=2)
    held = cache.sequences.rows, cache.get_seq_length()
    for verb, value, message in BAD_CALLS:
        with pytest.raises(tierkv.UnsafeCall, match=message) as refused:
            getattr(cache, verb)(value)
        assert str(refused.value).startswith(verb)
        assert "\n" not in str(refused.value)
        assert (cache.sequences.rows, cache.get_seq_length()) == held
    check(model, cache, joined(ids, rows=2))


@pytest.mark.parametrize("verb", ["batch_select_indices", "reorder_cache"])
@pytest.mark.parametrize("choice", [[1, 0], torch.tensor([1, 0], dtype=torch.int32), torch.tensor([True, True])])
def test_spellings_of_a_choice_of_rows(filled, check, verb, choice):
    model, _, cache, ids, _ = filled(rows=2)
    getattr(cache, verb)(choice)
    rows = torch.as_tensor(choice)
    check(model, cache, joined(ids[rows if rows.dtype == torch.bool else rows.long()], rows=2))


def test_verbs_on_an_empty_cache(lab, tiny_model):
    """Nothing to do, as with DynamicCache; what no cache could do is refused all the same."""
    with lab.attach(tiny_model()) as engine:
        cache = engine.new_cache()
        cache.crop(0)
        cache.batch_repeat_interleave(torch.tensor(3))
        cache.reorder_cache(torch.tensor([5, 1]))
        cache.batch_select_indices(torch.tensor([True, False]))
        for use in (
            lambda: cache.crop(-1),
            lambda: cache.batch_repeat_interleave(0),
            lambda: cache.reorder_cache(torch.tensor([-1])),
            lambda: cache.batch_select_indices("x"),
        ):
            with pytest.raises(tierkv.UnsafeCall):
                use()
        assert (cache.sequences.rows, cache.get_seq_length()) == (0, 0)


@HYBRID_TOO
def test_reset(lab, tiny_model, family):
    model = tiny_model(family)
    with lab.attach(model, rows=2, tokens=150) as engine:
        cache = engine.new_cache()
        for rows, seed in ((1, 5), (2, 6), (1, 7)):
            batch = lab.prompt(rows, 110, seed=seed)
            assert torch.equal(model.generate(**batch, cache=cache, **GREEDY), lab.stock(model, **batch, **GREEDY))
            cache.reset()
            assert (cache.get_seq_length(), cache.sequences.rows) == (0, 0)
            assert engine.stats().kv_bytes_total == 0


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_reading_the_layers(lab, tiny_model, family):
    """What DynamicCache shows, a tiered cache shows: lengths, iteration, tensors."""
    from transformers import DynamicCache

    model, batch = tiny_model(family), lab.prompt(2, 100, pads=(4, 0))
    with lab.attach(model, rows=2, tokens=120) as engine:
        stock, ours = DynamicCache(config=model.config), engine.new_cache()
        assert [layer.keys for layer in ours.layers] == [None, None, None]
        for cache in (stock, ours):
            model(**batch, cache=cache)
        assert len(ours) == len(stock)
        assert ours.is_sliding == stock.is_sliding
        assert ours.is_initialized == stock.is_initialized
        assert ours.is_croppable == stock.is_croppable
        assert ours.get_max_length() == stock.get_max_length()
        assert ours.batch_size == 2
        assert "length=100" in repr(ours)
        for index, (reference, own) in enumerate(zip(stock, ours, strict=True)):
            assert all(torch.equal(a, b) for a, b in zip(reference, own, strict=True) if a is not None)
            assert ours.get_seq_length(index) == stock.get_seq_length(index)
            assert [ours.get_mask_sizes(q, index) for q in (1, 5)] == [stock.get_mask_sizes(q, index) for q in (1, 5)]
        with pytest.raises(tierkv.UnsafeCall, match="cannot change alone"):
            ours.layers[0].crop(-1)
        with pytest.raises(tierkv.UnsafeCall, match="cannot change alone"):
            ours.layers[0].keys = torch.zeros(1)
        assert ours.layers[0].keys.data_ptr() != ours.layers[0].keys.data_ptr()  # a copy, never a window


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox", "falcon", "bloom", "qwen3_next"])
@pytest.mark.parametrize("positions", [True, False])
@torch.no_grad()
def test_a_loop_written_by_hand(lab, tiny_model, family, positions):
    model, ids = tiny_model(family), lab.prompt(1, 120)["input_ids"]
    expected = lab.stock(model, ids, max_new_tokens=12, do_sample=False)
    positions = positions and family != "bloom"
    with lab.attach(model) as engine:
        cache, text, fed = engine.new_cache(), ids, ids
        for step in range(12):
            where = {"position_ids": torch.arange(text.shape[1])[None, -fed.shape[1] :]} if positions else {}
            name = "cache" if step % 2 else "past_key_values"
            out = model(fed, **where, **{name: cache}) if name == "cache" else _old_name(model, fed, where, cache)
            fed = out.logits[:, -1:].argmax(dim=-1)
            text = torch.cat([text, fed], dim=1)
        assert torch.equal(text, expected)
        longer = joined(text)
        assert torch.equal(model.generate(longer, cache=cache, **GREEDY), lab.stock(model, longer, **GREEDY))
        assert engine.stats().counters.tokens == 131 + 22


def _old_name(model, fed, where, cache):
    with pytest.warns(FutureWarning, match="past_key_values"):
        return model(fed, **where, past_key_values=cache)
