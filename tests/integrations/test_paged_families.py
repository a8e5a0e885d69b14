"""Families whose attention reads blocks where they lie: the same tokens, with all forwards paged and three tiers in use."""

import threading

import pytest
import torch

import tierkv
from tierkv.errors import UnsafeCall, UnsupportedModel
from tierkv.integrations import hf_attention

FAMILIES = (
    "llama", "qwen3", "mistral", "gemma3", "phi3", "gpt_oss", "gemma2", "mixtral", "qwen2_sliding",
)  # fmt: skip
# Nothing is peculiar about these, so once is enough.
PLAIN = (
    "cohere", "gemma", "glm4", "granite", "olmo2", "phi", "qwen2", "qwen2_moe", "qwen3_moe", "smollm3", "starcoder2",
)  # fmt: skip
NEW = {"max_new_tokens": 24, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
PAGED = {"path": "paged"}


def implementation(model):
    return model.config.get_text_config()._attn_implementation


def assert_same_tokens(lab, model, batch, rows=1, tolerance=1e-5, **settings):
    """Run stock and paged; compare every token; the sequence must lie in all three tiers and every forward be paged."""
    settings, before = NEW | settings, implementation(model)
    stock = lab.stock(model, **batch, **settings)
    with lab.attach(model, rows=rows, tokens=180, attention=PAGED) as engine:
        ours = model.generate(**batch, **settings)
        stats = engine.stats()
    assert torch.equal(ours.sequences, stock.sequences)
    for own, reference in zip(ours.logits, stock.logits, strict=True):
        torch.testing.assert_close(own, reference, rtol=tolerance, atol=tolerance)
    assert stats.read_path == "paged"
    assert stats.counters.paged_forwards == stats.counters.forwards > 0
    assert all(tier.blocks > 0 for tier in stats.tiers.values()), stats.tiers
    assert all(tier.peak_bytes <= tier.capacity_bytes for tier in stats.tiers.values())
    assert implementation(model) == before


@pytest.mark.parametrize("family", [*FAMILIES, *PLAIN])
def test_one_sequence(lab, tiny_model, family):
    assert_same_tokens(lab, tiny_model(family), lab.prompt(1, 155))


def test_every_family_that_is_let_through_is_tested(tiny_model):
    tested = {tiny_model(family).config.get_text_config().model_type for family in (*FAMILIES, *PLAIN)}
    assert tested == hf_attention.FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_a_left_padded_batch(lab, tiny_model, family):
    assert_same_tokens(lab, tiny_model(family), lab.prompt(3, 155, pads=(0, 70, 9)), rows=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_in_chunks(lab, tiny_model, family):
    """The second row's padding reaches into the second chunk."""
    assert_same_tokens(lab, tiny_model(family), lab.prompt(2, 155, pads=(0, 41)), rows=2, prefill_chunk_size=33)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_a_model_that_was_loaded_with_eager_attention(lab, tiny_model, family):
    assert_same_tokens(lab, tiny_model(family, "eager"), lab.prompt(2, 155, pads=(40, 0)), rows=2)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss"])
def test_a_prompt_shorter_than_the_window(lab, tiny_model, family):
    """The step that crosses the window, one token at a time."""
    batch, settings = lab.prompt(2, 11, pads=(0, 3)), NEW | {"max_new_tokens": 40}
    model = tiny_model(family)
    stock = lab.stock(model, **batch, **settings)
    with lab.attach(model, rows=2, tokens=60, spare=0, attention=PAGED):
        assert torch.equal(model.generate(**batch, **settings).sequences, stock.sequences)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_half_precision_is_as_near_to_float64_as_stock(lab, tiny_model, family, dtype):
    """Logits of the same forced tokens, against the model in float64."""
    batch = lab.prompt(1, 155)
    exact, model = tiny_model(family, "sdpa", torch.float64), tiny_model(family, "sdpa", dtype)
    exact.load_state_dict({name: weight.double() for name, weight in model.state_dict().items()})
    tokens = lab.stock(exact, **batch, **NEW).sequences
    with torch.inference_mode():
        wanted = exact(tokens).logits

        def error(cache):
            logits = [model(tokens[:, :155], cache=cache).logits]
            logits += [model(tokens[:, at : at + 1], cache=cache).logits for at in range(155, tokens.shape[1])]
            return (torch.cat(logits, 1).double() - wanted)[:, 155:].square().mean().sqrt()

        stock = error(None if family == "none" else _dynamic(model))
        with lab.attach(model, tokens=180, attention=PAGED) as engine:
            assert error(engine.new_cache()) <= 1.3 * stock


def _dynamic(model):
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


# -- every forward decides for itself ---------------------------------------------------------------------------------


def test_a_mask_with_a_hole_is_gathered(lab, tiny_model):
    model, batch = tiny_model(), lab.prompt(2, 100)
    batch["attention_mask"][0, 50] = 0
    stock = lab.stock(model, **batch, **NEW)
    with lab.attach(model, rows=2, tokens=130) as engine:
        ours = model.generate(**batch, **NEW)
        stats = engine.stats()
    assert all(map(torch.equal, ours.logits, stock.logits))
    assert (stats.read_path, stats.counters.paged_forwards) == ("gathered", 0)
    assert stats.read_path_reason.startswith("24 of 24 forwards gathered layers: a mask with holes")


@pytest.mark.parametrize("how", ["weights are asked for", "training"])
def test_what_blocks_cannot_give_is_gathered(lab, tiny_model, how):
    model, batch = tiny_model("llama", "eager"), lab.prompt(1, 100)
    settings = NEW | {"output_attentions": how == "weights are asked for"}
    model.train(how == "training")
    try:
        stock = lab.stock(model, **batch, **settings)
        with lab.attach(model, tokens=130) as engine:
            ours = model.generate(**batch, **settings)
            assert engine.stats().counters.paged_forwards == 0
    finally:
        model.eval()
    assert torch.equal(ours.sequences, stock.sequences)
    if how != "training":
        assert torch.equal(ours.attentions[3][0], stock.attentions[3][0])


def test_a_family_that_cannot_is_gathered_and_says_why(lab, tiny_model):
    model, batch = tiny_model("gpt_neox"), lab.prompt(1, 100)
    with lab.attach(model, tokens=130) as engine:
        model.generate(**batch, **NEW)
        stats = engine.stats()
    assert (stats.read_path, stats.counters.paged_forwards) == ("gathered", 0)
    assert stats.read_path_reason == "gpt_neox is not one of the families whose attention can read blocks"
    with pytest.raises(UnsupportedModel, match=r'attention\.path = "paged" is not possible: gpt_neox .*use "auto"'):
        tierkv.attach(model, {"attention": PAGED})


def test_a_dtype_without_a_kernel_is_gathered_and_says_why(tiny_model):
    with tierkv.attach(tiny_model("llama", "sdpa", torch.float64)) as engine:
        assert engine.stats().read_path_reason == "there is no CPU kernel for float64"


def test_the_gathered_path_can_be_asked_for(tiny_model):
    with tierkv.attach(tiny_model(), {"attention": {"path": "gathered"}}) as engine:
        stats = engine.stats()
    assert (stats.read_path, stats.read_path_reason) == ("gathered", 'attention.path = "gathered" asks for it')


# -- what attach leaves behind ------------------------------------------------------------------------------------------


def test_an_exception_in_a_forward_leaves_the_model_as_it_was(lab, tiny_model):
    model, batch = tiny_model(), lab.prompt(1, 100)
    before, state = implementation(model), model.config.to_dict()

    def fail(*_):
        raise KeyboardInterrupt

    with lab.attach(model, tokens=130) as engine:
        cache = engine.new_cache()
        with torch.inference_mode():
            model(**batch, cache=cache)
            hook = model.model.layers[1].register_forward_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                model(input_ids=batch["input_ids"][:, :1], cache=cache)
            hook.remove()
            assert implementation(model) == before
            assert cache.sequences.length == 100
    assert model.config.to_dict() == state


def test_a_stock_forward_of_another_thread_never_meets_the_other_attention(lab, tiny_model):
    model, batch = tiny_model(), lab.prompt(1, 60)
    stock = lab.stock(model, **batch, **NEW)
    settings = NEW | {"use_cache": True}
    results: list[torch.Tensor] = []
    errors: list[BaseException] = []

    def run(cache_of):
        try:
            results.extend(model.generate(**batch, cache=cache_of(), **settings).sequences for _ in range(3))
        except BaseException as error:
            errors.append(error)
            raise

    with lab.attach(model, rows=2, tokens=90) as engine:
        threads = [threading.Thread(target=run, args=(maker,)) for maker in (engine.new_cache, lambda: _dynamic(model))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert len(results) == 6
    assert all(torch.equal(result, stock.sequences) for result in results)


def test_attention_with_what_there_is_no_kernel_for_is_refused(tiny_model):
    with pytest.raises(UnsafeCall, match="position_bias cannot read blocks"):
        hf_attention.attention(
            tiny_model(), torch.zeros(1, 4, 1, 8), torch.zeros(1), torch.zeros(1), None, tierkv_layer=1, position_bias=1
        )


def test_beams_and_drafts_stay_on_the_paged_path(lab, tiny_model):
    model, batch = tiny_model(), lab.prompt(2, 120, pads=(0, 17))
    for settings in ({"num_beams": 3, "num_return_sequences": 2}, {"prompt_lookup_num_tokens": 3}):
        one = {name: value[:1] for name, value in batch.items()} if "prompt_lookup_num_tokens" in settings else batch
        stock = lab.stock(model, **one, max_new_tokens=20, do_sample=False, **settings)
        with lab.attach(model, rows=6, tokens=180, attention=PAGED) as engine:
            assert torch.equal(model.generate(**one, max_new_tokens=20, do_sample=False, **settings), stock)
            counters = engine.stats().counters
        assert counters.paged_forwards == counters.forwards > 0
