"""What decides the KV besides ids, and caches where they do not belong: noticed, and made right or refused."""

import copy
import logging

import pytest
import torch
import transformers as tf

import tierkv
from tierkv.errors import UnsafeCall, UnsupportedModel

GREEDY = {"do_sample": False, "max_new_tokens": 8}


def extended(ids, count, seed=3):
    new = torch.randint(3, 97, (ids.shape[0], count), generator=torch.Generator().manual_seed(seed))
    return torch.cat([ids, new], dim=1)


def ones(ids):
    return torch.ones_like(ids)


def test_padding_that_contradicts_the_cache(filled, check, lab):
    model, _, cache, ids, mask = filled(rows=2, pads=(0, 15))
    longer = extended(ids, 6)
    full = torch.nn.functional.pad(mask, (0, longer.shape[1] - 100), value=1)
    wrong = full.clone()
    wrong[1, 10:15] = 1
    held = cache.get_seq_length()
    with pytest.raises(UnsafeCall, match="another padding"):
        model.generate(
            longer[:, held:], attention_mask=wrong[:, : held + longer.shape[1] - held], cache=cache, **GREEDY
        )
    with torch.no_grad():
        with pytest.raises(UnsafeCall, match="another padding"):
            model(longer[:, held:], attention_mask=wrong, cache=cache)
        with pytest.raises(UnsafeCall, match="another padding"):
            model(longer[:, held:], cache=cache)
        with pytest.raises(UnsafeCall, match="must cover the 107 cached tokens"):
            model(longer[:, held:], attention_mask=full[:, held:], cache=cache)
    # With the full ids the part that agrees is kept, and the rest computed again.
    for mask in (wrong, full):
        ours = model.generate(longer, attention_mask=mask, cache=cache, **GREEDY)
        assert torch.equal(ours, lab.stock(model, longer, attention_mask=mask, **GREEDY))


def test_a_mask_of_no_known_length(filled):
    model, _, cache, ids, _ = filled()
    with pytest.raises(UnsafeCall, match="covers 50 tokens"):
        model.generate(extended(ids, 4), attention_mask=ids.new_ones((1, 50)), cache=cache, **GREEDY)


def test_pad_ids_without_a_mask(filled, lab):
    """Without a mask generate takes pad ids for padding; the cache of a row that ended early knows them as text."""
    model, _, cache, ids, _ = filled(rows=2)
    ended = ids.clone()
    ended[1, 103:] = 0
    mask = ones(ended)
    model.generate(ended, attention_mask=mask, cache=cache, **GREEDY)
    longer = extended(ended, 5)
    assert torch.equal(model.generate(longer, cache=cache, **GREEDY), lab.stock(model, longer, **GREEDY))


@pytest.mark.parametrize("settings", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}])
def test_penalties_must_see_the_cached_tokens(filled, check, settings):
    model, _, cache, ids, _ = filled()
    longer = extended(ids[:, :107], 4)
    with pytest.raises(UnsafeCall, match="pass the full ids"):
        model.generate(longer[:, 107:], attention_mask=ones(longer), cache=cache, **GREEDY, **settings)
    check(model, cache, longer, **settings)


@torch.no_grad()
def test_positions_of_the_callers_own(filled, lab):
    """KV at odd positions is not the KV of its ids: later calls must not take it for that."""
    model, engine, _, ids, _ = filled()
    cache, longer = engine.new_cache(), extended(ids[:, :50], 5)
    model(ids[:, :50], position_ids=torch.arange(7, 57)[None], cache=cache)
    with pytest.raises(UnsafeCall, match="positions or masks of the caller's own"):
        model.generate(longer[:, 50:], attention_mask=ones(longer), cache=cache, **GREEDY)
    with pytest.raises(UnsafeCall, match="do not continue"):
        model.generate(longer, cache=cache, **GREEDY)
    cache = engine.new_cache()
    model(ids[:, :30], cache=cache)
    model(ids[:, 30:50], position_ids=torch.arange(100, 120)[None], cache=cache)
    ours = model.generate(longer, cache=cache, **GREEDY)  # the first 30 are good
    assert torch.equal(ours, lab.stock(model, longer, **GREEDY))


def test_positions_given_to_generate(filled, lab, check):
    model, engine, cache, ids, _ = filled()
    longer = extended(ids, 5)
    usual = torch.arange(longer.shape[1])[None]
    before = engine.stats().counters.tokens
    check(model, cache, longer, position_ids=usual)
    assert engine.stats().counters.tokens - before == 6 + 7
    cache.crop(-7)
    check(model, cache, longer, position_ids=usual * 2)  # all computed again


@torch.no_grad()
def test_weights_that_change(filled, lab, tiny_model):
    """Adaptation, a checkpoint loaded: what is cached was computed by another model."""
    _, _, _, ids, _ = filled()
    model = copy.deepcopy(tiny_model("qwen3"))
    with lab.attach(model) as engine:
        cache = engine.new_cache()
        model(ids, cache=cache)
        assert torch.equal(model.generate(ids, cache=cache, **GREEDY), lab.stock(model, ids, **GREEDY))
        model.model.layers[0].mlp.up_proj.weight.mul_(3)
        with pytest.raises(UnsafeCall, match="weights have changed"):
            model.generate(ids, cache=cache, **GREEDY)
        cache.reset()
        assert torch.equal(model.generate(ids, cache=cache, **GREEDY), lab.stock(model, ids, **GREEDY))


@torch.no_grad()
def test_a_padded_forward_without_positions(filled, lab):
    """There a model counts padding as positions; generate does not."""
    model, engine, _, _, _ = filled()
    batch, cache = lab.prompt(2, 40, pads=(0, 10)), engine.new_cache()
    model(**batch, cache=cache)
    ids = extended(batch["input_ids"], 5)
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, 5), value=1)
    with pytest.raises(UnsafeCall):
        model.generate(ids, attention_mask=mask, cache=cache, **GREEDY)


@torch.no_grad()
def test_a_mask_of_four_dimensions(filled):
    model, engine, _, ids, _ = filled()
    cache = engine.new_cache()
    mask = torch.ones((1, 1, 20, 20), dtype=torch.bool)  # not even causal
    model(ids[:, :20], attention_mask=mask, cache=cache)
    with pytest.raises(UnsafeCall, match="do not continue"):
        model.generate(ids, cache=cache, **GREEDY)


@torch.no_grad()
def test_arguments_by_place(filled, check):
    """A mask passed by place is a mask."""
    model, engine, _, ids, _ = filled()
    cache = engine.new_cache()
    mask = ones(ids[:, :40])
    mask[:, :12] = 0
    model(ids[:, :40], mask, (mask.cumsum(1) - 1).clamp(min=0), cache)
    assert not cache.content.mask[0, 0]
    with pytest.raises(UnsafeCall):
        model.generate(ids, cache=cache, **GREEDY)


def test_caches_of_others(filled, lab, tiny_model, caplog):
    model, engine, cache, ids, _ = filled("llama")
    _, other_engine, other_cache, _, _ = filled("qwen3")
    with pytest.raises(UnsafeCall, match="another engine"):
        model.generate(ids, cache=other_cache, **GREEDY)
    with pytest.raises(UnsafeCall, match="another model's engine"), torch.no_grad():
        model(ids, cache=other_engine.new_cache())
    stranger = tiny_model("phi3")  # nothing is attached to it
    with pytest.raises(UnsafeCall, match="attached"):
        stranger.generate(ids, cache=engine.new_cache(), **GREEDY)
    with caplog.at_level(logging.WARNING, "tierkv"):
        foreign = tf.DynamicCache(config=model.config)
        ours = model.generate(ids, cache=foreign, **GREEDY)
        assert foreign.get_seq_length() == ids.shape[1] + 7
        static = model.generate(ids, cache_implementation="static", **GREEDY)
    expected = lab.stock(model, ids, **GREEDY)
    assert torch.equal(ours, expected)
    assert torch.equal(static, expected)
    assert "DynamicCache was passed, and it wins" in caplog.text
    assert "cache_implementation='static' was set, and it wins" in caplog.text
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(ids, cache=cache, cache_implementation="static", **GREEDY)


def test_encoder_states(filled):
    model, _, cache, ids, _ = filled()
    with pytest.raises(UnsafeCall, match="cross-attention"):
        model.generate(ids, cache=cache, encoder_hidden_states=torch.zeros(1, 2, 64), **GREEDY)


def test_gradients(filled):
    model, engine, cache, ids, _ = filled()
    with pytest.raises(UnsafeCall, match="no_grad"):
        model(ids[:, :4], cache=engine.new_cache())
    model.train()
    try:
        with pytest.raises(UnsafeCall, match="no_grad"):
            model(ids[:, :4], cache=cache)
    finally:
        model.eval()
    with torch.inference_mode():
        model(ids[:, :4], cache=engine.new_cache())


def test_dtypes_and_devices(filled, tiny_model):
    model, engine, _, ids, _ = filled()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedModel, match="autocast"):
        model(ids, cache=engine.new_cache())
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedModel, match="autocast"):
        model.generate(ids, **GREEDY)
    moved = copy.deepcopy(tiny_model("phi3"))
    with tierkv.attach(moved, {"device": {"capacity": "8MiB"}, "disk": {"capacity": 0}}) as engine:
        moved.to("meta")
        with pytest.raises(UnsupportedModel, match="meta"), torch.no_grad():
            moved(ids.to("meta"), cache=engine.new_cache())
    moved = copy.deepcopy(tiny_model("phi3")).to(torch.float8_e4m3fn)
    with pytest.raises(UnsupportedModel, match="float8_e4m3fn"):
        tierkv.attach(moved)


@torch.no_grad()
def test_a_part_of_the_model(filled, check):
    """The decoder called directly is followed like the model; a single layer is refused."""
    model, engine, _, ids, _ = filled()
    cache = engine.new_cache()
    model.model(ids, cache=cache)
    check(model, cache, extended(ids, 5))
    hidden = torch.zeros(1, 1, 64)
    where = model.model.rotary_emb(hidden, torch.zeros(1, 1, dtype=torch.long))
    with pytest.raises(UnsafeCall, match="call that model itself"):
        model.model.layers[0].self_attn(hidden, position_embeddings=where, attention_mask=None, cache=cache)
