"""Models and calls that are not what they seem: the paged path leaves alone what it would get wrong."""

import copy
import subprocess
import sys
import threading

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tierkv.errors import UnsafeCall

NEW = {"max_new_tokens": 24, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
PAGED = {"path": "paged"}


def implementation(model):
    return model.config.get_text_config()._attn_implementation


def copied(model, **settings):
    """A model of its own, whose config may be changed."""
    twin = copy.deepcopy(model)
    for name, value in settings.items():
        setattr(twin.config, name, value)
    return twin


def assert_like_stock(lab, model, batch, paged, rows=1, **settings):
    settings = {"max_new_tokens": 10, "do_sample": False} | settings
    stock = lab.stock(model, **batch, **settings)
    with lab.attach(model, rows=rows, tokens=180) as engine:
        assert torch.equal(model.generate(**batch, **settings), stock)
        assert (engine.stats().counters.paged_forwards > 0) == paged
        return engine.stats().read_path_reason


@pytest.mark.parametrize(
    ("family", "settings"), [("llama", {"is_causal": False}), ("gemma3", {"use_bidirectional_attention": True})]
)
def test_a_model_whose_tokens_see_later_ones_is_gathered(lab, tiny_model, family, settings):
    model = copied(tiny_model(family), **settings)
    assert_like_stock(lab, model, lab.prompt(1, 120), paged=False, prefill_chunk_size=32)


def test_an_implementation_of_the_users_own_is_not_replaced(lab, tiny_model):
    def mine(module, query, key, value, mask, scaling=None, **kwargs):
        return sdpa_attention_forward(module, query, key, value, mask, scaling=30 * scaling, **kwargs)

    AttentionInterface.register("mine", mine)
    AttentionMaskInterface.register("mine", sdpa_mask)
    model = copied(tiny_model())
    model.set_attn_implementation("mine")
    reason = assert_like_stock(lab, model, lab.prompt(2, 100), paged=False, rows=2)
    assert reason == "attention is 'mine', and only sdpa and eager are known to be plain attention"
    model.set_attn_implementation("sdpa")
    with lab.attach(model, tokens=130) as engine:
        model.set_attn_implementation("mine")  # not before, but after
        batch = lab.prompt(1, 100)
        assert torch.equal(model.generate(**batch, **NEW).sequences, lab.stock(model, **batch, **NEW).sequences)
        assert engine.stats().counters.paged_forwards == 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_row_that_is_all_padding(lab, tiny_model, attention):
    batch = lab.prompt(2, 120)
    batch["attention_mask"][1] = 0
    assert_like_stock(lab, tiny_model("llama", attention), batch, paged=True, rows=2, prefill_chunk_size=32)


def test_a_static_cache_of_another_thread_keeps_its_mask(lab, tiny_model):
    """``generate`` builds it outside of any forward, perhaps while a tiered one runs."""
    model, ids, batch = copied(tiny_model()), lab.prompt(1, 100)["input_ids"], lab.prompt(2, 60, pads=(0, 30))
    settings = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    expected = lab.stock(model, **batch, **settings)
    inside, made = threading.Event(), threading.Event()
    prepare, results = model.prepare_inputs_for_generation, []

    def prepared(*args, **kwargs):
        inputs = prepare(*args, **kwargs)
        made.set()
        return inputs

    def run():
        inside.wait(20)
        model.prepare_inputs_for_generation = prepared
        results.append(type(model).generate(model, **batch, **settings))

    def hook(*_):
        inside.set()
        made.wait(20)

    thread = threading.Thread(target=run)
    with lab.attach(model, tokens=150) as engine, torch.no_grad():
        cache = engine.new_cache()
        model(ids[:, :90], cache=cache)
        handle = model.model.layers[0].register_forward_hook(hook)
        thread.start()
        model(ids[:, 90:], cache=cache)
        handle.remove()
        thread.join()
    assert torch.equal(results[0], expected)


def test_forwards_inside_of_a_forward(lab, tiny_model):
    """A stock one, from a hook, is right; a tiered one is refused; and the model is as it was."""
    model, ids = copied(tiny_model()), lab.prompt(1, 100)["input_ids"]
    expected = model(ids).logits
    inner: list[torch.Tensor] = []

    def stock(*_):
        handle.remove()
        inner.append(model(ids).logits)

    def tiered(*_):
        handle.remove()
        model(ids[:, 60:70], cache=second)

    with lab.attach(model, tokens=300) as engine, torch.no_grad():
        first, second = engine.new_cache(), engine.new_cache()
        for cache in (first, second):
            model(ids[:, :60], cache=cache)
        handle = model.model.layers[1].register_forward_hook(stock)
        outer = model(ids[:, 60:70], cache=first).logits
        assert torch.equal(inner[0], expected)
        torch.testing.assert_close(outer, expected[:, 60:70], rtol=1e-4, atol=1e-4)
        handle = model.model.layers[1].register_forward_hook(tiered)
        with pytest.raises(UnsafeCall):
            model(ids[:, 70:80], cache=first)
    assert implementation(model) == "sdpa"
    assert torch.equal(model(ids).logits, expected)


def test_nan_is_not_swallowed(lab, tiny_model):
    model, batch = copied(tiny_model()), lab.prompt(1, 100)
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight.fill_(float("nan"))
    with lab.attach(model, tokens=130) as engine:
        assert model.generate(**batch, **NEW).logits[-1].isnan().all()
        assert engine.stats().counters.paged_forwards > 0


def test_gradients_are_refused_and_not_lost(lab, tiny_model):
    model, ids = copied(tiny_model()), lab.prompt(1, 100)["input_ids"]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name and ".0." in name)
    with lab.attach(model, tokens=130) as engine:
        cache = engine.new_cache()
        with torch.no_grad():
            model(ids[:, :90], cache=cache)
        with pytest.raises(UnsafeCall, match="no gradients"):
            model(ids[:, 90:], cache=cache)


def test_inference_mode_and_no_grad_may_follow_each_other(lab, tiny_model):
    model, batch = tiny_model(), lab.prompt(1, 100)
    expected = lab.stock(model, **batch, **NEW).sequences
    with lab.attach(model, tokens=130) as engine:
        cache = engine.new_cache()
        with torch.inference_mode():
            model(batch["input_ids"][:, :60], cache=cache)
        assert torch.equal(model.generate(**batch, cache=cache, **NEW).sequences, expected)


@pytest.mark.slow
def test_closing_under_another_threads_forward_does_not_crash(tmp_path):
    """The kernel reads by address, and the pools must outlive it: in a process of its own, as a crash would end this one."""
    program = """
import sys, threading, time, torch, tierkv
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=128,
                     num_attention_heads=16, num_key_value_heads=2, max_position_embeddings=100000)
model = LlamaForCausalLM(config).eval()
tiers = {"device": {"capacity": "96MiB"}, "host": {"capacity": "16MiB"}, "disk": {"capacity": 0}}
for pause in (0.05, 0.11, 0.17):
    with tierkv.attach(model, tiers | {"attention": {"path": "paged"}}) as engine, torch.no_grad():
        cache = engine.new_cache()
        for _ in range(5):
            model(torch.randint(3, 97, (1, 1000)), cache=cache)
        def work():
            with torch.no_grad():
                try:
                    while True:
                        model(torch.tensor([[5]]), cache=cache)
                except tierkv.TierKVError as error:
                    print(type(error).__name__)
        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(pause)
    thread.join(60)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {"ClosedError", "UnsafeCall"}, done.stdout
