"""A forward that is interrupted anywhere leaves the cache as it was before, or the cache says that it cannot."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from tierkv.errors import TornForward
from tierkv.testing.ctrl_c import interrupts

GREEDY = {"do_sample": False, "max_new_tokens": 8}


class Boom(Exception):
    pass


class Interrupter:
    """Raises once, when ``module`` has run ``after`` times."""

    def __init__(self, module, error, after=0):
        self._left, self._error = after, error
        self._handle = module.register_forward_hook(self._hook)

    def _hook(self, *_):
        self._left -= 1
        if self._left < 0:
            self._handle.remove()
            raise self._error


def places(model):
    """Name every place of a forward: before the cache, in each layer before and after its update, after the cache."""
    decoder = model.get_decoder()
    found = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    for index, layer in enumerate(decoder.layers):
        found[f"layer {index} norm"] = layer.input_layernorm
        found[f"layer {index} mlp"] = layer.mlp
    return found


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_same_cache_goes_on(lab, tiny_model, family, error):
    model = tiny_model(family)
    ids = lab.prompt(1, 100)["input_ids"]
    with lab.attach(model, tokens=220) as engine:
        cache = engine.new_cache()
        for turn, (name, module) in enumerate(places(model).items()):
            after = 0 if "head" in name or turn % 2 else 3  # in the prefill, or some tokens later
            Interrupter(module, error(name), after)
            with pytest.raises(error, match=name):
                model.generate(ids, cache=cache, **GREEDY)
            ours = model.generate(ids, cache=cache, **GREEDY)
            assert torch.equal(ours, lab.stock(model, ids, **GREEDY)), name
            ids = torch.cat([ours, lab.prompt(1, 4, seed=turn)["input_ids"]], dim=1)
        assert engine.stats().counters.torn_forwards > 0


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
@torch.no_grad()
def test_a_loop_by_hand_repeats_the_step(lab, tiny_model, error):
    """After the exception the cache is as long as before the forward, wherever it was interrupted."""
    model = tiny_model()
    ids = lab.prompt(2, 60)["input_ids"]
    expected = lab.stock(model, ids, do_sample=False, max_new_tokens=10)
    with lab.attach(model, rows=2, tokens=80) as engine:
        cache, fed, text = engine.new_cache(), ids, ids
        for name, module in places(model).items():
            held = cache.get_seq_length()
            Interrupter(module, error(name))
            with pytest.raises(error):
                model(fed, cache=cache)
            assert cache.get_seq_length() == held
            assert cache.content.length == held
            fed = model(fed, cache=cache).logits[:, -1:].argmax(dim=-1)
            text = torch.cat([text, fed], dim=1)
        assert torch.equal(text, expected[:, : text.shape[1]])


def test_a_first_forward_leaves_nothing(lab, tiny_model):
    """Not even the number of rows."""
    model = tiny_model("qwen3_next")
    with lab.attach(model, rows=2) as engine:
        cache = engine.new_cache()
        Interrupter(model.model.layers[2].mlp, Boom())
        with pytest.raises(Boom):
            model.generate(**lab.prompt(2, 50), cache=cache, **GREEDY)
        batch = lab.prompt(1, 70, seed=2)
        assert torch.equal(model.generate(**batch, cache=cache, **GREEDY), lab.stock(model, **batch, **GREEDY))


@pytest.mark.parametrize("place", ["layer 0 norm", "layer 1 mlp", "layer 2 mlp", "layer 3 norm", "layer 3 mlp", "head"])
@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
def test_recurrent_layers_cannot_go_back(lab, tiny_model, place, error):
    model = tiny_model("qwen3_next")
    batch = lab.prompt(1, 100)
    with lab.attach(model) as engine:
        cache = engine.new_cache()
        ids = model.generate(**batch, cache=cache, **GREEDY)
        longer = torch.cat([ids, lab.prompt(1, 9, seed=1)["input_ids"]], dim=1)
        Interrupter(places(model)[place], error(), after=2)
        with pytest.raises(error):
            model.generate(longer, cache=cache, **GREEDY)
        for use in (
            lambda: model.generate(longer, cache=cache, **GREEDY),
            lambda: cache.crop(-1),
            lambda: cache.reorder_cache(torch.tensor([0])),
            lambda: lab.stock(model, longer, cache=cache, **GREEDY),
        ):
            with pytest.raises(TornForward, match=r"cache\.reset"):
                use()
        cache.reset()
        assert torch.equal(model.generate(longer, cache=cache, **GREEDY), lab.stock(model, longer, **GREEDY))


def test_a_cache_of_the_engines_own_is_given_back(lab, tiny_model):
    model, batch = tiny_model(), lab.prompt(1, 100)
    with lab.attach(model) as engine:
        for settings in ({}, {"return_dict_in_generate": True}):
            Interrupter(model.model.layers[1].mlp, Boom(), after=4)
            with pytest.raises(Boom):
                model.generate(**batch, **GREEDY, **settings)
            stats = engine.stats()
            assert (stats.kv_bytes_total, stats.counters.torn_forwards > 0) == (0, True)
        assert torch.equal(model.generate(**batch, **GREEDY), lab.stock(model, **batch, **GREEDY))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "step"), [("explicit", 1201), ("own", 1201), ("filled", 6007)])
def test_ctrl_c_at_many_places(lab, tiny_model, kind, step):
    """SIGINT at places spread over a whole generation; the same cache then gives exact tokens, nothing is kept."""
    model, batch = tiny_model(), lab.prompt(1, 150)
    expected = lab.stock(model, **batch, **GREEDY)
    before = lab.prompt(1, 90)["input_ids"]  # shares its first tokens
    before[0, 60] = 3 + before[0, 60] % 50
    with lab.attach(model, rows=3, tokens=170) as engine:
        tried = 0
        for interrupt in interrupts(first=11, step=step):
            cache = engine.new_cache()
            settings = GREEDY if kind == "own" else GREEDY | {"cache": cache}
            if kind == "filled":
                model.generate(before, cache=cache, **GREEDY)
                settings = settings | {"num_beams": 3}  # crops, repeats rows, reorders them
            interrupt.during(lambda settings=settings: model.generate(**batch, **settings))
            if cache.sequences.rows > 1:
                cache.batch_select_indices(torch.tensor([0]))
            assert torch.equal(model.generate(**batch, cache=cache, **GREEDY), expected), interrupt
            assert torch.equal(model.generate(**batch, **GREEDY), expected), interrupt
            cache.close()
            assert engine.stats().kv_bytes_total == 0, interrupt
            assert model.config._attn_implementation == "sdpa", interrupt
            tried += 1
        assert tried > 5


CTRL_C = """
import os; os.environ["HF_HUB_OFFLINE"] = "1"
import signal, sys, threading, time, torch, tierkv, transformers as tf
torch.set_num_threads(1)
config = tf.LlamaConfig(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
                        num_key_value_heads=2, max_position_embeddings=4096)
torch.manual_seed(7)
model = tf.LlamaForCausalLM(config).eval()
model.generation_config = tf.GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=None)
ids = torch.randint(3, 97, (1, 200))
greedy = {"do_sample": False, "max_new_tokens": 150}
expected = model.generate(ids, **greedy)
block = 16 * 3 * 2 * 2 * 16 * 4
settings = {"block_size": 16, "device": {"capacity": 12 * block}, "host": {"capacity": 3 * block},
            "disk": {"path": sys.argv[1], "capacity": "64MiB"}}
caught = 0
with tierkv.attach(model, settings) as engine:
    cache = engine.new_cache()
    for attempt in range(12):
        delay = 0.02 + 0.05 * attempt
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            model.generate(ids, cache=cache, **greedy)
            timer.join()
            time.sleep(0.05)
        except KeyboardInterrupt:
            caught += 1
        timer.cancel()
        timer.join()
    assert torch.equal(model.generate(ids, cache=cache, **greedy), expected)
    assert torch.equal(model.generate(ids, **greedy), expected)
    cache.close()
    assert engine.stats().kv_bytes_total == 0, engine.stats()
assert caught >= 3, caught
assert [thread.name for thread in threading.enumerate()] == ["MainThread"], threading.enumerate()
print("interrupted", caught)
"""


@pytest.mark.slow
def test_real_ctrl_c(tmp_path):
    """SIGINT at a dozen moments of a generation; the same cache then gives exact tokens, and nothing is left behind."""
    done = subprocess.run(
        [sys.executable, "-c", CTRL_C, str(tmp_path)], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("interrupted")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_signals_are_back_to_normal():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert os.getpid() > 0
