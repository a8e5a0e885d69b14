"""Every way to call generate gives what it gives without tierkv, while the KV lies in three tiers."""

from typing import Any

import pytest
import torch
import transformers as tf

import tierkv

SAMPLING = {"do_sample": True, "temperature": 0.9, "top_k": 30, "top_p": 0.95}


def slow(*values):
    """Parameters for the full run only; the quick one has enough without them."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def both(lab, model, batch, *, rows=1, seed=None, tokens=200, config=None, **settings):
    """Run stock, then tiered, from the same random state; return both results and the engine's stats."""

    def seeded():
        if seed is not None:
            torch.manual_seed(seed)

    settings = {"max_new_tokens": 20} | settings
    seeded()
    stock = lab.stock(model, **batch, **settings)
    with lab.attach(model, rows=rows, tokens=tokens, **(config or {})) as engine:
        seeded()
        ours = model.generate(**batch, **settings)
        stats = engine.stats()
    return stock, ours, stats


@pytest.mark.parametrize("family", ["llama", *slow("gemma3", "qwen3_next")])
@pytest.mark.parametrize(
    ("settings", "repeats"),
    [
        ({"do_sample": False}, 1),
        (SAMPLING, 1),
        (SAMPLING | {"num_return_sequences": 3}, 3),
        ({"num_beams": 3, "do_sample": False}, 3),
        ({"num_beams": 4, "num_return_sequences": 2, "do_sample": False, "length_penalty": 0.7}, 4),
        (SAMPLING | {"num_beams": 3, "top_k": 10}, 3),
        ({"do_sample": False, "repetition_penalty": 1.7, "no_repeat_ngram_size": 2}, 1),
        (SAMPLING | {"prefill_chunk_size": 50, "num_return_sequences": 2}, 2),
    ],
    ids=["greedy", "sample", "samples", "beams", "beams2", "beam-sample", "penalties", "chunked-samples"],
)
def test_decoding(lab, tiny_model, family, settings, repeats):
    batch = lab.prompt(2, 130, pads=(0, 40))
    stock, ours, stats = both(lab, tiny_model(family), batch, rows=2 * repeats, tokens=155, seed=11, **settings)
    assert torch.equal(stock, ours)
    assert stats.moved_bytes["device_to_disk"] + stats.moved_bytes["host_to_disk"] > 0
    assert stats.kv_bytes_total == 0  # what the call used has been given back
    assert stats.caches == 0


def test_beams_share_what_they_have_in_common(lab, tiny_model):
    model, batch, beams, new = tiny_model(), lab.prompt(1, 160), 4, 40
    settings = {"num_beams": beams, "max_new_tokens": new, "do_sample": False, "return_dict_in_generate": True}
    stock = lab.stock(model, **batch, **settings)
    with lab.attach(model, rows=beams, tokens=208, spare=60) as engine:
        ours = model.generate(**batch, **settings)
        stats = engine.stats()
        block_bytes, rows = engine.layout.block_bytes, ours.cache.sequences.rows
        copied = sum(engine.moved.values())
    assert torch.equal(ours.sequences, stock.sequences)
    assert torch.equal(ours.beam_indices, stock.beam_indices)
    assert rows == beams
    # The prompt lies there once (10 blocks); each beam has at most its own last blocks.
    assert stats.kv_bytes_total <= (10 + beams * (new // 16 + 2)) * block_bytes
    # A reorder copies nothing; a beam that writes into a last block it shares copies that one block.
    assert 0 < stats.counters.tail_copies <= beams * new
    assert copied <= stats.counters.tail_copies * block_bytes


@torch.no_grad()
def test_reordering_moves_no_bytes(lab, tiny_model):
    model, batch = tiny_model(), lab.prompt(3, 100)
    with lab.attach(model, rows=3, tokens=130) as engine:
        cache = engine.new_cache()
        model(**batch, cache=cache)
        before = engine.stats()
        expected = [cache.layers[1].keys[[2, 0, 2]], cache.layers[1].values[[2, 0, 2]]]
        cache.reorder_cache(torch.tensor([2, 0, 2]))
        after = engine.stats()
        assert after.moved_bytes == before.moved_bytes
        assert after.kv_bytes_total == before.kv_bytes_total * 2 // 3
        assert torch.equal(cache.layers[1].keys, expected[0])
        assert torch.equal(cache.layers[1].values, expected[1])


@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2"])
@pytest.mark.parametrize("sampling", [{"do_sample": False}, SAMPLING], ids=["greedy", "sample"])
def test_prompt_lookup(lab, tiny_model, family, sampling):
    batch = {"input_ids": lab.prompt(1, 20)["input_ids"].repeat(1, 7)}
    stock, ours, _ = both(
        lab, tiny_model(family), batch, seed=3, max_new_tokens=40, prompt_lookup_num_tokens=5, tokens=190, **sampling
    )
    assert torch.equal(stock, ours)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("sampling", [{"do_sample": False}, SAMPLING], ids=["greedy", "sample"])
@pytest.mark.parametrize("attached", ["target", "assistant", "both"])
def test_assisted_decoding(lab, tiny_model, family, sampling, attached):
    model, assistant = tiny_model(family), tiny_model("qwen3")
    batch, settings = lab.prompt(1, 140), {"max_new_tokens": 30, "assistant_model": assistant} | sampling
    torch.manual_seed(5)
    stock = model.generate(**batch, **settings)
    engines = [
        lab.attach(m, tokens=190)
        for m, who in ((model, "target"), (assistant, "assistant"))
        if attached in (who, "both")
    ]
    opened = [engine.__enter__() for engine in engines]
    try:
        torch.manual_seed(5)
        ours = model.generate(**batch, **settings)
        assert all(engine.stats().counters.forwards > 0 for engine in opened)
        assert all(engine.stats().counters.torn_forwards == 0 for engine in opened)
    finally:
        for engine in engines:
            engine.__exit__(None, None, None)
    assert torch.equal(stock, ours)


def test_hybrid_models_refuse_assisted_decoding_as_they_do_without(lab, tiny_model):
    batch = lab.prompt(1, 40)
    with lab.attach(tiny_model("qwen3_next")), pytest.raises(ValueError, match="stateful"):
        tiny_model("qwen3_next").generate(**batch, prompt_lookup_num_tokens=3, max_new_tokens=5)


class Recorder(tf.generation.streamers.BaseStreamer):
    def __init__(self):
        self.seen, self.ended = [], 0

    def put(self, value):
        self.seen.append(value.clone())

    def end(self):
        self.ended += 1


def test_streamers_see_every_token_once(lab, tiny_model):
    model, batch = tiny_model(), lab.prompt(1, 120)
    with lab.attach(model):
        by_name, by_place = Recorder(), Recorder()
        ours = model.generate(**batch, streamer=by_name, max_new_tokens=10, do_sample=False)
        model.generate(
            batch["input_ids"], None, None, None, None, None, None, by_place, max_new_tokens=10, do_sample=False
        )
    for recorder in (by_name, by_place):
        assert torch.equal(torch.cat([value.flatten() for value in recorder.seen]), ours[0])
        assert recorder.ended == 1


def test_logits_processors_and_stopping_criteria(lab, tiny_model):
    class Ban(tf.LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores[:, input_ids[0, -1] % 50] = -torch.inf
            return scores

    class Stop(tf.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 133)

    settings = {
        "logits_processor": tf.LogitsProcessorList([Ban()]), "stopping_criteria": tf.StoppingCriteriaList([Stop()]),
        "do_sample": False,
    }  # fmt: skip
    stock, ours, _ = both(lab, tiny_model(), lab.prompt(2, 120), rows=2, **settings)
    assert stock.shape[1] == 133
    assert torch.equal(stock, ours)


def test_everything_that_generate_can_return(lab, tiny_model):
    settings = {
        "return_dict_in_generate": True, "output_scores": True, "output_logits": True, "output_attentions": True,
        "output_hidden_states": True, "do_sample": False, "max_new_tokens": 6,
    }  # fmt: skip
    stock, ours, _ = both(lab, tiny_model("gemma3", "eager"), lab.prompt(2, 100, pads=(7, 0)), rows=2, **settings)
    assert stock.keys() == ours.keys()
    flat = [torch.utils._pytree.tree_leaves([out[key] for key in out if key != "cache"]) for out in (stock, ours)]
    assert len(flat[0]) > 50
    assert all(torch.equal(a, b) for a, b in zip(*flat, strict=True))


def test_spellings_of_one_call(lab, tiny_model):
    model, batch = tiny_model(), lab.prompt(1, 120)
    ids = batch["input_ids"]
    expected = lab.stock(model, ids, max_new_tokens=8, do_sample=False)
    config = tf.GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0)
    with lab.attach(model) as engine:
        results = [
            model.generate(ids, max_new_tokens=8, do_sample=False),
            model.generate(inputs=ids, max_new_tokens=8, do_sample=False),
            model.generate(ids, config),
            model.generate(input_ids=ids, generation_config=config),
            model.generate(ids, max_length=128, do_sample=False),
            model.generate(ids, cache=engine.new_cache(), max_new_tokens=8, do_sample=False),
            model.generate(ids, past_key_values=engine.new_cache(), max_new_tokens=8, do_sample=False),
            model.generate(ids, cache_params=engine.new_cache(), max_new_tokens=8, do_sample=False),
            model.generate(ids, custom_generate=type(model)._sample, max_new_tokens=8, do_sample=False),
            model.generate(None, input_ids=ids, cache=None, past_key_values=None, max_new_tokens=8, do_sample=False),
        ]
        assert engine.stats().counters.forwards == 80
        with pytest.raises(TypeError):
            model.generate(ids, inputs=ids)
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
def test_without_a_length_the_default_is_reserved(lab, tiny_model):
    model, batch = tiny_model(), lab.prompt(1, 100)
    with lab.attach(model, tokens=120) as engine:
        assert torch.equal(model.generate(**batch, do_sample=False), lab.stock(model, **batch, do_sample=False))
        assert engine.scratch.holds(120)
    with lab.attach(model, tokens=20, spare=0, disk={"capacity": 0}), pytest.raises(tierkv.CapacityError):
        model.generate(**batch, do_sample=False)


def test_a_prompt_from_nothing(lab, tiny_model):
    model = tiny_model()
    with lab.attach(model):
        assert torch.equal(
            model.generate(max_new_tokens=40, do_sample=False), lab.stock(model, max_new_tokens=40, do_sample=False)
        )


def test_classifier_free_guidance(lab, tiny_model):
    """It runs the model a second time inside each step, with a cache of its own."""
    batch = lab.prompt(1, 110)
    stock, ours, _ = both(
        lab,
        tiny_model(),
        batch,
        guidance_scale=1.6,
        negative_prompt_ids=lab.prompt(1, 30, seed=4)["input_ids"],
        do_sample=False,
    )
    assert torch.equal(stock, ours)


def test_finished_rows_are_padded(lab, tiny_model):
    model, batch = tiny_model(), lab.prompt(3, 110, pads=(0, 5, 60))
    end = lab.stock(model, **batch, max_new_tokens=20, do_sample=False)[0, 118].item()
    stock, ours, _ = both(lab, model, batch, rows=3, do_sample=False, eos_token_id=end, max_new_tokens=30)
    assert (stock[0, 119:] == 0).all()
    assert torch.equal(stock, ours)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*was traced:UserWarning")
@torch.no_grad()
def test_a_compiled_forward(lab, tiny_model):
    model, batch = tiny_model(), lab.prompt(1, 100)
    expected = lab.stock(model, **batch, max_new_tokens=6, do_sample=False)
    compiled: Any = torch.compile(model, backend="eager")
    with lab.attach(model) as engine:
        try:
            cache, ids = engine.new_cache(), batch["input_ids"]
            fed = ids
            for _ in range(6):
                logits = compiled(input_ids=fed, cache=cache).logits
                fed = logits[:, -1:].argmax(dim=-1)
                ids = torch.cat([ids, fed], dim=1)
            assert torch.equal(ids, expected)
            assert torch.equal(compiled.generate(**batch, max_new_tokens=6, do_sample=False), expected)
        finally:
            torch._dynamo.reset()
