"""Odd calls of generate and of the model: one clear line, or transformers' own answer; never other tokens."""

import copy
import math

import pytest
import torch
import transformers as tf

from tierkv.errors import ClosedError, TierKVError, UnsafeCall, UnsupportedModel

GREEDY = {"do_sample": False, "max_new_tokens": 8}
IDS = torch.randint(3, 97, (2, 60), generator=torch.Generator().manual_seed(4))
ONES = torch.ones_like(IDS)
HOLES = ONES.index_fill(1, torch.tensor([30]), 0)

REFUSED = {
    "ids of text": ({"input_ids": "hello"}, "input_ids must be a tensor .*, not the text 'hello'; a tokenizer"),
    "inputs of text": ({"inputs": "hello"}, "inputs must be a tensor"),
    "ids in a list": ({"input_ids": IDS.tolist()}, "input_ids must be a tensor .*, not a list"),
    "ids of numpy": ({"input_ids": IDS.numpy()}, "not a ndarray"),
    "one id": ({"input_ids": IDS[0, 0]}, "shape \\[\\]"),
    "ids of one row": ({"input_ids": IDS[0]}, "input_ids must be a tensor \\[rows, tokens\\]"),
    "ids of floats": ({"input_ids": IDS.float()}, "must be int64 or int32"),
    "ids of bools": ({"input_ids": IDS > 50}, "must be int64 or int32"),
    "no rows": ({"input_ids": IDS[:0]}, "hold no token"),
    "no tokens": ({"input_ids": IDS[:, :0]}, "hold no token"),
    "ids out of the vocabulary": ({"input_ids": IDS + 60}, "no token of this model; legal: 0 to 96"),
    "ids below zero": ({"input_ids": IDS - 60}, "no token of this model; legal: 0 to 96"),
    "a mask in a list": ({"input_ids": IDS, "attention_mask": ONES.tolist()}, "attention_mask must be a tensor"),
    "a mask of one row": ({"input_ids": IDS, "attention_mask": ONES[0]}, "attention_mask must be a tensor"),
    "a mask of three rows": ({"input_ids": IDS, "attention_mask": torch.ones(3, 60)}, "3 rows for 2 prompts"),
    "embeddings of text": ({"inputs_embeds": "hello"}, "inputs_embeds must be a tensor"),
    "embeddings of one row": ({"inputs_embeds": torch.ones(60, 64)}, "inputs_embeds must be a tensor"),
    "positions in a list": ({"input_ids": IDS, "position_ids": [1]}, "position_ids must be a tensor"),
    "new tokens of text": ({"input_ids": IDS, "max_new_tokens": "a"}, "max_new_tokens must be a number"),
    "endless": ({"input_ids": IDS, "max_new_tokens": math.inf}, "max_new_tokens must be a number"),
    "never": ({"input_ids": IDS, "max_new_tokens": math.nan}, "max_new_tokens must be a number"),
    "a length of text": ({"input_ids": IDS, "max_length": "a", "max_new_tokens": None}, "max_length must be a number"),
    "several lengths": ({"input_ids": IDS, "max_length": [9], "max_new_tokens": None}, "max_length must be a number"),
    "no beam": ({"input_ids": IDS, "num_beams": 0}, "num_beams must be a whole number, at least 1, not 0"),
    "half beams": ({"input_ids": IDS, "num_beams": 2.5}, "num_beams must be a whole number"),
    "beams of text": ({"input_ids": IDS, "num_beams": "a"}, "num_beams must be a whole number"),
    "no sequence": ({"input_ids": IDS, "num_return_sequences": 0}, "num_return_sequences must be a whole number"),
    "an end of text": ({"input_ids": IDS, "eos_token_id": "x"}, "eos_token_id must be a token id"),
    "a config of a dict": ({"input_ids": IDS, "generation_config": {"max_length": 9}}, "must be a transformers Gener"),
    "the mask as config": ({"inputs": IDS, "generation_config": ONES}, "pass everything but the ids by name"),
    "a streamer that is none": ({"input_ids": IDS[:1], "streamer": 5}, "streamer must have put and end"),
    "a hook that is none": ({"input_ids": IDS, "stopping_criteria": 5}, "stopping_criteria must be a list"),
    "text for a cache": ({"input_ids": IDS, "past_key_values": "x"}, "different caches|past_key_values must be what"),
}  # fmt: skip

AS_STOCK = {
    "a mask of three dimensions": {"attention_mask": ONES[None]},
    "no new token": {"max_new_tokens": 0},
    "fewer than none": {"max_new_tokens": -1},
    "shorter than the prompt": {"max_length": 10, "max_new_tokens": None},
    "no length": {"max_length": None, "max_new_tokens": None},
    "no beams": {"num_beams": None},
    "an unknown name": {"nonsense": 3},
    "an unknown cache": {"cache_implementation": "bogus"},
    "two greedy sequences": {"num_return_sequences": 2},
    "a chunk of none": {"prefill_chunk_size": 0},
    "no temperature": {"do_sample": True, "temperature": 0.0},
    "beams without temperature": {"num_beams": 2, "do_sample": True, "temperature": 0.0},
    "several pads": {"pad_token_id": [0, 1]},
    "int32": {"input_ids": IDS.int()},
    "a mask of floats": {"attention_mask": HOLES.float()},
    "a mask of bools": {"attention_mask": HOLES.bool()},
    "a mask with holes": {"attention_mask": HOLES},
    "right padding": {"attention_mask": torch.cat([ONES[:, :50], ONES[:, 50:] * 0], dim=1)},
    "one mask for all": {"attention_mask": ONES[:1]},
    "positions of floats": {"position_ids": torch.arange(60.0).repeat(2, 1)},
    "half a token": {"max_new_tokens": 2.5},
    "a number in a tensor": {"max_new_tokens": torch.tensor(3)},
    "one beam, said oddly": {"num_beams": True},
    "several ends": {"eos_token_id": torch.tensor([95, 96])},
    "no ends": {"eos_token_id": []},
    "a minimum above the maximum": {"min_length": 100, "max_length": 70, "max_new_tokens": None},
}  # fmt: skip


@pytest.fixture
def both(lab, tiny_model):
    """A model, and a cache of its engine that holds ``IDS`` and 7 of 8 new tokens; checked afterwards."""
    model = tiny_model()
    with lab.attach(model, rows=4, tokens=120) as engine:
        cache = engine.new_cache()
        ids = model.generate(IDS, cache=cache, **GREEDY)
        yield model, cache
        ids = torch.cat([ids, IDS[:, :9]], dim=1)
        for settings in ({}, {"cache": cache}):
            assert torch.equal(model.generate(ids, **settings, **GREEDY), lab.stock(model, ids, **GREEDY))


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_one_clear_line(both, call, message):
    model, cache = both
    held = cache.sequences.rows, cache.get_seq_length()
    for settings in (GREEDY, {"cache": cache} | GREEDY):
        with pytest.raises(UnsafeCall, match=message) as refused:
            model.generate(**settings | call)
        assert "\n" not in str(refused.value)
    assert (cache.sequences.rows, cache.get_seq_length()) == held


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("call", AS_STOCK.values(), ids=AS_STOCK)
def test_what_transformers_answers(both, lab, call):
    """An error of its own, or tokens: the same with tierkv, also on a cache that holds the prompt."""
    model, cache = both
    call = {"input_ids": IDS} | GREEDY | call

    def answer(generate, **more):
        try:
            return generate(**call, **more)
        except Exception as error:
            return type(error)

    stock = answer(lambda **all_of_it: lab.stock(model, **all_of_it))
    for ours in (answer(model.generate), answer(model.generate, cache=cache)):
        assert torch.equal(ours, stock) if isinstance(stock, torch.Tensor) else ours == stock
    if call.get("attention_mask") is not None:  # it may have left the cache with another content: then a new text
        cache.reset()


@pytest.mark.parametrize(
    "given", ["x", 5, [], (), ((1, 2),), {}, object()], ids=lambda given: repr(given).partition(" at ")[0]
)
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_what_is_no_cache(both, given, name):
    model, _ = both
    with pytest.raises(
        UnsafeCall, match=f"{name} must be what engine.new_cache\\(\\) returns, or a transformers Cache"
    ):
        model.generate(IDS, **{name: given}, **GREEDY)


@pytest.mark.parametrize("make", [tf.DynamicCache, lambda config: tf.StaticCache(config, max_cache_len=80)])
def test_the_caches_of_transformers_are_left_to_it(both, lab, make):
    model, _ = both
    ours = model.generate(IDS, cache=make(config=model.config), **GREEDY)
    assert torch.equal(ours, lab.stock(model, IDS, cache=make(config=model.config), **GREEDY))


def test_two_caches(both):
    model, cache = both
    with pytest.raises(UnsafeCall, match="cache and past_key_values bring different caches"):
        model.generate(IDS, cache=cache, past_key_values=tf.DynamicCache(config=model.config), **GREEDY)
    model.generate(IDS, cache=cache, past_key_values=cache, **GREEDY)


def test_caches_that_are_not_there_any_more(both, lab, tiny_model):
    model, cache = both
    fork = copy.deepcopy(cache)
    fork.close()
    with lab.attach(tiny_model("qwen3")) as other:
        strange = other.new_cache()
        with pytest.raises(UnsafeCall, match="another engine"):
            model.generate(IDS, cache=strange, **GREEDY)
    for gone, error in ((fork, ClosedError), (strange, TierKVError)):
        with pytest.raises(error):
            model.generate(IDS, cache=gone, **GREEDY)


@pytest.mark.parametrize("value", [False, None, 0, ""], ids=repr)
def test_use_cache_in_any_spelling(both, lab, value):
    """Only at True are single tokens fed: with a cache, any other spelling would append the text again and again."""
    model, cache = both
    with pytest.raises(UnsafeCall, match="gives wrong tokens"):
        model.generate(IDS, cache=cache, use_cache=value, **GREEDY)
    ours = model.generate(IDS, use_cache=value, **GREEDY)
    assert torch.equal(ours, lab.stock(model, IDS, use_cache=value, **GREEDY))


@pytest.mark.parametrize("mask", [2 * ONES, -ONES, 0.5 * ONES, math.nan * ONES], ids=["2", "-1", "0.5", "nan"])
def test_masks_of_other_numbers(both, lab, mask):
    """They make other positions of the same ids, so what the cache holds does not fit; a fresh run is as stock's."""
    model, cache = both
    with pytest.raises(UnsafeCall, match="other values than 0 and 1"):
        model.generate(IDS, attention_mask=mask, cache=cache, **GREEDY)
    ours = model.generate(IDS, attention_mask=mask, **GREEDY)
    assert torch.equal(ours, lab.stock(model, IDS, attention_mask=mask, **GREEDY))


def test_one_mask_row_for_all_is_compared_with_each(filled, check):
    model, _, cache, ids, mask = filled(rows=2, pads=(0, 20))
    new = ids[:, :5]
    everything = torch.ones((1, cache.get_seq_length() + 5), dtype=torch.long)
    with pytest.raises(UnsafeCall, match="another padding"):
        model.generate(new, attention_mask=everything, cache=cache, **GREEDY)
    with torch.no_grad(), pytest.raises(UnsafeCall, match="another padding"):
        model(new, attention_mask=everything, cache=cache)
    check(model, cache, ids, attention_mask=torch.nn.functional.pad(mask, (0, ids.shape[1] - 100), value=1))


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("after", [0, 3])
def test_beams_that_came_to_nothing(filled, check, family, after):
    """The rows that were repeated for them are given up: the next call need not be one with beams."""
    model, _, cache, ids, _ = filled(family, rows=2)

    class Boom(tf.LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] >= ids.shape[1] + after:
                raise ZeroDivisionError
            return scores

    with pytest.raises(ZeroDivisionError):
        model.generate(ids, cache=cache, num_beams=2, logits_processor=[Boom()], **GREEDY)
    assert cache.sequences.rows == 2
    check(model, cache, torch.cat([ids, IDS[:, :5]], dim=1))
    check(model, cache, torch.cat([ids, IDS[:, :9]], dim=1), num_beams=2)


def test_a_mask_and_no_ids(both, lab):
    """transformers makes as many prompts of one token as the mask has rows."""
    model, cache = both
    mask = torch.ones((3, 1), dtype=torch.long)
    assert torch.equal(model.generate(attention_mask=mask, **GREEDY), lab.stock(model, attention_mask=mask, **GREEDY))
    with pytest.raises(UnsafeCall, match="cannot be compared"):
        model.generate(attention_mask=mask, cache=cache, **GREEDY)


def test_early_exit_is_left_to_transformers(both, lab):
    """It drafts with this very model, cut short for the time being."""
    model, cache = both
    settings = {"assistant_early_exit": 1} | GREEDY
    expected = lab.stock(model, IDS[:1], **GREEDY)
    assert torch.equal(model.generate(IDS[:1], **settings), expected)
    with pytest.raises(UnsafeCall, match="runs only the first layers"):
        model.generate(IDS[:1], cache=cache, **settings)


def test_a_config_that_names_other_layers(both):
    model, cache = both
    model.config.num_hidden_layers = 1
    try:
        with pytest.raises(UnsupportedModel, match="other layers than when tierkv was attached"):
            cache.engine.new_cache()
    finally:
        model.config.num_hidden_layers = 3


@pytest.mark.parametrize(
    ("fed", "message"),
    [
        ({"input_ids": IDS.tolist()}, "input_ids must be a tensor"),
        ({"input_ids": IDS[0]}, "input_ids must be a tensor"),
        ({"inputs_embeds": "x"}, "inputs_embeds must be a tensor"),
        ({"input_ids": IDS[:, :3], "attention_mask": ONES}, "it must cover the 67 cached tokens"),
    ],
)
def test_the_model_called_itself(both, fed, message):
    model, cache = both
    with torch.no_grad(), pytest.raises(UnsafeCall, match=message):
        model(**fed, cache=cache)
