"""Calls that give wrong tokens with stock transformers, silently: each is made right, or refused with a sentence."""

import logging

import pytest
import torch
import transformers as tf

from tierkv.errors import CapacityError, UnsafeCall

GREEDY = {"do_sample": False, "max_new_tokens": 8}
BOTH_KINDS = pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])


def extended(ids, count, seed=3):
    new = torch.randint(3, 97, (ids.shape[0], count), generator=torch.Generator().manual_seed(seed))
    return torch.cat([ids, new], dim=1)


def ones(ids):
    return torch.ones_like(ids)


@BOTH_KINDS
def test_full_ids(filled, check, family):
    model, _, cache, ids, _ = filled(family)
    check(model, cache, extended(ids, 9))


@BOTH_KINDS
@pytest.mark.parametrize("new", [1, 3, 60, 150])
def test_only_new_ids_with_a_mask_over_all(filled, lab, family, new):
    model, _, cache, ids, _ = filled(family)
    held = cache.get_seq_length()
    whole = extended(ids[:, :held], new)
    ours = model.generate(whole[:, held:], attention_mask=ones(whole), cache=cache, **GREEDY)
    assert torch.equal(ours[:, new:], lab.stock(model, whole, **GREEDY)[:, held + new :])


def test_only_new_ids_with_a_mask_over_all_and_padding(filled, lab):
    model, _, cache, ids, mask = filled(rows=3, pads=(0, 20, 3))
    held = cache.get_seq_length()
    whole = extended(ids[:, :held], 5)
    mask = torch.cat([mask, torch.ones((3, whole.shape[1] - 100), dtype=torch.long)], dim=1)
    ours = model.generate(whole[:, held:], attention_mask=mask, cache=cache, **GREEDY)
    assert torch.equal(ours[:, 5:], lab.stock(model, whole, attention_mask=mask, **GREEDY)[:, held + 5 :])


@pytest.mark.parametrize(
    "settings", [{"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}], ids=["beams", "two"]
)
def test_only_new_ids_with_beams(filled, lab, settings):
    model, _, cache, ids, _ = filled()
    whole = extended(ids[:, :107], 5)
    ours = model.generate(whole[:, 107:], attention_mask=ones(whole), cache=cache, **GREEDY, **settings)
    assert torch.equal(ours[:, 5:], lab.stock(model, whole, **GREEDY, **settings)[:, 112:])


@pytest.mark.parametrize("new", [1, 3, 107, 120])
def test_only_new_ids_without_a_mask(filled, check, new):
    model, _, cache, ids, _ = filled()
    fresh = extended(ids[:, :0], new, seed=8)
    if fresh[0, 0] == ids[0, 0]:
        fresh[0, 0] = 3 + (fresh[0, 0] - 2) % 90
    with pytest.raises(UnsafeCall, match="do not continue"):
        model.generate(fresh, cache=cache, **GREEDY)
    fresh[:, 0] = ids[:, 0]  # shares one token by chance: what was passed is what is continued
    check(model, cache, fresh)


@BOTH_KINDS
@pytest.mark.parametrize("count", [100, 107, 108, 60, 1])
def test_a_prompt_that_is_cached_already(filled, check, family, count):
    """The same prompt again, exactly what the cache holds, one more, and shorter ones."""
    model, engine, cache, ids, _ = filled(family)
    check(model, cache, ids[:, :count])
    if family == "llama" and count < 108:
        assert engine.stats().counters.tokens_cropped >= 107 - count


@BOTH_KINDS
def test_a_prompt_that_diverges(filled, check, family, caplog):
    model, _, cache, ids, _ = filled(family)
    other = extended(ids, 12)
    other[0, 41] = 3 + (other[0, 41] - 2) % 90
    with caplog.at_level(logging.WARNING, "tierkv"):
        check(model, cache, other)
    assert "continue only 41 of the 107 cached tokens" in caplog.text


def test_another_prompt_altogether(filled, lab):
    model, _, cache, ids, _ = filled()
    other = (ids - 3 + 7) % 90 + 3
    with pytest.raises(UnsafeCall, match=r"cache\.reset\(\) for a new text"):
        model.generate(other, cache=cache, **GREEDY)
    cache.reset()
    assert torch.equal(model.generate(other, cache=cache, **GREEDY), lab.stock(model, other, **GREEDY))


@pytest.mark.parametrize("chunk", [3, 64])
def test_prefill_in_chunks(filled, check, chunk):
    model, _, cache, ids, _ = filled()
    check(model, cache, extended(ids, 20), prefill_chunk_size=chunk)
    check(model, cache, ids[:, :100], prefill_chunk_size=chunk)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_embeddings(filled, lab, family):
    model, engine, cache, ids, _ = filled(family)
    embeds = model.get_input_embeddings()(ids).detach()
    expected = lab.stock(model, inputs_embeds=embeds, **GREEDY)
    empty = engine.new_cache()
    assert torch.equal(model.generate(inputs_embeds=embeds, cache=empty, **GREEDY), expected)
    assert torch.equal(model.generate(inputs_embeds=embeds, **GREEDY), expected)
    for settings in ({"inputs_embeds": embeds}, {"inputs_embeds": embeds, "input_ids": ids}, {}):
        with pytest.raises(UnsafeCall, match="cannot be compared"):
            model.generate(cache=cache, **GREEDY, **settings)
    with pytest.raises(UnsafeCall, match="do not continue"):  # nobody knows which ids the embeddings stand for
        model.generate(ids, cache=empty, **GREEDY)
    # New ids after them, with a mask over all: the positions are the usual ones.
    held, new = empty.get_seq_length(), ids[:, 50:55]
    mask = torch.ones((1, held + 5), dtype=torch.long)
    cache_ids = torch.cat([ids, expected[:, :-1], new], dim=1)
    ours = model.generate(new, attention_mask=mask, cache=empty, **GREEDY)
    assert torch.equal(ours[:, 5:], lab.stock(model, cache_ids, **GREEDY)[:, cache_ids.shape[1] :])


@pytest.mark.parametrize("drafts", ["lookup", "assistant"])
def test_drafting_on_a_filled_cache(filled, check, tiny_model, drafts):
    model, _, cache, ids, _ = filled()
    settings = {"prompt_lookup_num_tokens": 4} if drafts == "lookup" else {"assistant_model": tiny_model("qwen3")}
    check(model, cache, extended(ids, 9), **settings)
    check(model, cache, extended(ids, 30), **settings)
    cache.crop(107 - cache.get_seq_length())
    longer = extended(ids[:, :107], 4)
    with pytest.raises(UnsafeCall, match="full ids"):
        model.generate(longer[:, 107:], attention_mask=ones(longer), cache=cache, **GREEDY, **settings)


def test_no_cache_wanted(filled, lab, caplog):
    model, engine, cache, ids, _ = filled()
    with pytest.raises(UnsafeCall, match="use_cache=False"):
        model.generate(ids, cache=cache, use_cache=False, **GREEDY)
    with pytest.raises(UnsafeCall, match="use_cache=False"):
        model.generate(ids, tf.GenerationConfig(use_cache=False, pad_token_id=0, **GREEDY), cache=cache)
    before = engine.stats().counters.forwards
    with caplog.at_level(logging.WARNING, "tierkv"):
        ours = model.generate(ids, use_cache=False, **GREEDY)
    assert torch.equal(ours, lab.stock(model, ids, **GREEDY))
    assert engine.stats().counters.forwards == before
    assert "use_cache=False asks for no cache" in caplog.text


@pytest.mark.parametrize("repeats", [{"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True, "top_k": 1}])
def test_rows_are_repeated(filled, check, repeats):
    model, _, cache, ids, _ = filled()
    check(model, cache, extended(ids, 4), **repeats)
    check(model, cache, extended(ids, 11), **repeats)  # now the cache has three rows


def test_a_wrong_number_of_rows(filled, lab):
    model, _, cache, ids, _ = filled(rows=2)
    with pytest.raises(UnsafeCall, match="2 rows"):
        model.generate(ids[:1], cache=cache, **GREEDY)
    with pytest.raises(UnsafeCall, match="2 rows"):
        model.generate(ids.repeat(2, 1), cache=cache, **GREEDY)
    with pytest.raises(UnsafeCall, match="2 rows"), torch.no_grad():
        model(ids[:1, :3], cache=cache)
    assert torch.equal(model.generate(ids, cache=cache, **GREEDY), lab.stock(model, ids, **GREEDY))


def test_one_call_at_a_time_uses_a_cache(filled, tiny_model):
    """A second call on the cache, or a reset, from inside a running call is refused; the running one stays exact."""
    model, _, cache, ids, _ = filled("llama")
    refused = []

    class Meddle(tf.LogitsProcessor):
        def __call__(self, input_ids, scores):
            for meddle in (lambda: model.generate(ids, cache=cache, **GREEDY), cache.reset):
                with pytest.raises(UnsafeCall) as caught:
                    meddle()
                refused.append(str(caught.value))
            return scores

    got = model.generate(ids, cache=cache, logits_processor=tf.LogitsProcessorList([Meddle()]), **GREEDY)
    assert torch.equal(got, model.generate(ids, cache=tf.DynamicCache(config=model.config), **GREEDY))
    assert any("in use by a generate call" in text for text in refused)
    assert any("cannot be reset" in text for text in refused)
    cache.reset()


def test_a_refused_call_leaves_the_cache_as_it_was(filled):
    model, _, cache, ids, _ = filled("llama")
    rows, length = cache.sequences.rows, cache.sequences.length
    with pytest.raises(CapacityError):
        model.generate(ids[:, : length // 2], cache=cache, do_sample=False, num_beams=8, max_new_tokens=10**6)
    assert (cache.sequences.rows, cache.sequences.length) == (rows, length)
    assert model.generate(extended(ids, 3), cache=cache, **GREEDY).shape[1] == ids.shape[1] + 3 + 8


@pytest.mark.parametrize("setting", [{"bad_words_ids": [[5, 6]]}, {"repetition_penalty": 1.2}, {"min_length": 400}])
def test_only_new_ids_are_refused_where_something_looks_at_all_ids(filled, setting):
    model, _, cache, ids, _ = filled("llama")
    new = extended(ids, 4)[:, -4:]
    mask = torch.ones((ids.shape[0], cache.sequences.length + 4), dtype=torch.long)
    with pytest.raises(UnsafeCall, match="must see the cached tokens too"):
        model.generate(new, attention_mask=mask, cache=cache, **GREEDY, **setting)
