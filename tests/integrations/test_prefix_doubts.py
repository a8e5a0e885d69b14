"""Any doubt whether KV is what its ids say means recompute: each of these once gave other tokens, or broke an engine."""

import signal
import threading

import pytest
import torch
import transformers as tf

import tierkv
from tests.integrations.conftest import COMMON, build
from tests.integrations.prefixes import BLOCK, GREEDY, first_forward, roomy
from tests.integrations.test_prefix_namespaces import adapt
from tierkv.errors import TierKVError
from tierkv.tier import Tier


@pytest.fixture
def model():
    """One that a test may change."""
    return build("llama", "sdpa", torch.float32)


def by_hand(model, cache, *parts):
    with torch.no_grad():
        for ids in parts:
            model(ids, cache=cache)


def check_fresh(lab, model, batch, most_used):
    with_cache = model.tierkv_engine.stats().prefix.used_tokens
    out, _ = first_forward(model, batch)
    assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
    assert model.tierkv_engine.stats().prefix.used_tokens - with_cache <= most_used


def test_tokens_that_were_computed_in_training(lab, model, tmp_path):
    model.config.attention_dropout = 0.5
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    batch = lab.prompt(tokens=101)
    with tierkv.attach(model, roomy(tmp_path)) as engine:
        cache = engine.new_cache()
        by_hand(model, cache, batch["input_ids"][:, :40])
        model.train()
        by_hand(model, cache, batch["input_ids"][:, 40:90])
        model.eval()
        by_hand(model, cache, batch["input_ids"][:, 90:])
        check_fresh(lab, model, batch, 2 * BLOCK)


def test_an_adapter_that_came_and_went_inside_a_block(lab, model, tmp_path):
    adapt(model)
    layer = model.model.layers[0].self_attn.v_proj
    batch = lab.prompt(tokens=101)
    with tierkv.attach(model, roomy(tmp_path)) as engine:
        cache = engine.new_cache()
        by_hand(model, cache, batch["input_ids"][:, :36])
        layer.scaling["english"] = 50.0
        by_hand(model, cache, batch["input_ids"][:, 36:44])
        layer.scaling["english"] = 2.0
        by_hand(model, cache, batch["input_ids"][:, 44:])
        check_fresh(lab, model, batch, 2 * BLOCK)


@pytest.mark.parametrize("share", [False, True])
def test_a_block_that_waits_to_be_written_is_not_written_to(lab, tiny_model, tmp_path, monkeypatch, share):
    """Cropping into it and going on otherwise, as assisted decoding does, while the store takes nothing."""
    model, batch = tiny_model(), lab.prompt(tokens=6 * BLOCK)
    released = threading.Event()
    settings = roomy(tmp_path, persist=True, share=share)
    settings["disk"]["write_queue"] = "32KiB"
    with tierkv.attach(model, settings) as engine:
        slabs = type(engine.stores.prefix._parts.slabs)
        write = slabs.write

        def hang(self, *args):
            released.wait(60)
            return write(self, *args)

        monkeypatch.setattr(slabs, "write", hang)
        cache = engine.new_cache()
        by_hand(model, cache, batch["input_ids"])
        assert engine.stats().prefix.waiting_blocks > 0
        cache.crop(-10)
        by_hand(model, cache, lab.prompt(tokens=10, seed=7)["input_ids"])
        released.set()
        engine.stores.prefix.flush(30)
        by_hand(model, cache, lab.prompt(tokens=3, seed=8)["input_ids"])
        engine.stores.prefix.flush(30)
    longer = {name: torch.cat([one, one[:, :5]], dim=1) for name, one in batch.items()}
    with tierkv.attach(model, roomy(tmp_path, persist=True)) as engine:
        out, computed = first_forward(model, longer)
        assert torch.equal(out, lab.stock(model, **longer, **GREEDY))
        assert computed < 6 * BLOCK + 5


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
    ],
)
def test_rotations_that_depend_on_the_length_of_a_forward(lab, tmp_path, rope):
    torch.manual_seed(3)
    settings = COMMON | {"max_position_embeddings": 64, "original_max_position_embeddings": 64}
    config = tf.LlamaConfig(
        **settings, rope_parameters={"rope_theta": 10000.0, "original_max_position_embeddings": 64, **rope}
    )
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config = tf.GenerationConfig(pad_token_id=0, eos_token_id=None)
    with tierkv.attach(model, roomy(tmp_path)) as engine:
        batch = lab.prompt(tokens=150)
        for tokens in (150, 120, 50):
            model.generate(**{name: one[:, :tokens] for name, one in batch.items()}, **GREEDY)
        prefix = engine.stats().prefix
        assert (prefix.used_tokens, prefix.named_blocks, prefix.uncacheable_rows) == (0, 0, 3)
        # The forward writes the model's own frequencies; that is no change of its weights.
        cache = engine.new_cache()
        ids = model.generate(batch["input_ids"], cache=cache, **GREEDY)
        model.generate(torch.cat([ids, ids[:, :3]], dim=1), cache=cache, **GREEDY)


def test_a_loop_of_the_callers_own(lab, tiny_model, tmp_path):
    model, batch = tiny_model(), lab.prompt(tokens=101)

    def loop(model, input_ids, logits_processor=None, stopping_criteria=None, generation_config=None, **kwargs):
        cache = kwargs.get("cache")
        logits = model(
            input_ids, cache=cache, use_cache=True
        ).logits  # feeds the whole prompt, whatever the cache holds
        return torch.cat([input_ids, logits[:, -1:].argmax(-1)], dim=1)

    expected = lab.stock(model, **batch, do_sample=False, max_new_tokens=1)
    with tierkv.attach(model, roomy(tmp_path)):
        first_forward(model, batch)
        for _ in range(2):
            assert torch.equal(model.generate(**batch, custom_generate=loop, max_new_tokens=1), expected)


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_states_of_the_whole_prompt_that_were_asked_for(lab, tiny_model, tmp_path, name):
    model, batch = tiny_model("llama", "eager"), lab.prompt(tokens=101)
    settings = {**GREEDY, "return_dict_in_generate": True, name: True}
    field = name.removeprefix("output_")
    with tierkv.attach(model, roomy(tmp_path)):
        shapes = []
        for _ in range(2):
            out = model.generate(**batch, **settings)
            shapes.append(getattr(out, field)[0][0].shape)
            out.past_key_values.close()
        assert shapes[0] == shapes[1]
        assert 101 in shapes[0]


def test_hooks_that_may_change_what_is_computed(lab, model, tmp_path):
    batch = lab.prompt(tokens=101)
    direction = torch.randn(64) * 3

    def steer(_module, _args, output):
        return (output[0] + direction, *output[1:]) if isinstance(output, tuple) else output + direction

    with tierkv.attach(model, roomy(tmp_path, persist=True)) as engine:
        first_forward(model, batch)
        handle = model.model.layers[0].register_forward_hook(steer)
        named = engine.stats().prefix.named_blocks
        for _ in range(2):
            check_fresh(lab, model, batch, 0)
        assert engine.stats().prefix.named_blocks == named
        assert "hooks" in engine.stats().prefix.uncacheable_reason
        handle.remove()
        assert first_forward(model, batch)[1] == 5
        inner = model.model.layers[1].mlp.forward
        model.model.layers[1].mlp.forward = lambda hidden: inner(hidden) * 2
        check_fresh(lab, model, batch, 0)
        assert "replaced forward" in engine.stats().prefix.uncacheable_reason
        del model.model.layers[1].mlp.forward
        assert first_forward(model, batch)[1] == 5


def test_weights_that_cannot_be_read(lab, model, tmp_path, monkeypatch, caplog):
    batch = lab.prompt(tokens=60)

    def unreadable(self):
        raise RuntimeError("weight x is not loaded")

    monkeypatch.setattr("tierkv.integrations.hf_weights.ModelWeights.fingerprint", unreadable)
    with tierkv.attach(model, roomy(tmp_path, persist=True)) as engine:
        for _ in range(2):
            out, computed = first_forward(model, batch)
            assert computed == 60
            assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
        assert engine.stats().prefix.uncacheable_reason == "weights that cannot be read"
    assert "cannot be kept" in caplog.text


@pytest.mark.parametrize("method", ["add", "use", "keep", "forget"])
def test_an_interrupt_inside_the_index_of_shared_blocks(lab, tiny_model, tmp_path, method):
    """Ctrl-C anywhere in its bookkeeping is held back until the books agree."""
    model, batch = tiny_model(), lab.prompt(tokens=101)
    with tierkv.attach(model, roomy(tmp_path, persist=True)) as engine:
        first_forward(model, batch)
        engine.stores.prefix.flush(10)
        engine.forget_prefixes()
        shared = type(engine.manager.shared)
        whole = getattr(shared, method)
        raised: list[int] = []

        def interrupted(self, *args):
            if not raised:
                raised.append(1)
                signal.raise_signal(signal.SIGINT)
            return whole(self, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared, method, interrupted)
            try:
                for seed in range(2):
                    first_forward(model, lab.prompt(2, 101, seed=seed, pads=(0, 5)))
                    first_forward(model, batch)
                engine.forget_prefixes()
            except KeyboardInterrupt:
                assert raised
        for _ in range(2):
            out, _ = first_forward(model, batch)
            assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
        engine.forget_prefixes()
        assert all(pool.used == 0 for pool in engine.manager.pools.values())


def test_a_store_that_hangs_while_it_reads_costs_a_moment(lab, tiny_model, tmp_path, monkeypatch):
    """The reads are given up, their places stay taken until they end, and the prompt is computed."""
    model, batch = tiny_model(), lab.prompt(tokens=101)
    released = threading.Event()
    monkeypatch.setattr("tierkv.rows.RESTORE_SECONDS", 0.2)
    with tierkv.attach(model, roomy(tmp_path, persist=True)) as engine:
        first_forward(model, batch)
        engine.stores.prefix.flush(10)
        engine.forget_prefixes()
        store = type(engine.stores.prefix)
        read = store.read

        def hang(self, *args):
            released.wait(60)
            return read(self, *args)

        monkeypatch.setattr(store, "read", hang)
        out, computed = first_forward(model, batch)
        assert computed == 101
        assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
        assert engine.stats().prefix.failed_restores == 1
        taken = engine.manager.pools[Tier.DEVICE].used
        released.set()
        for _ in range(50):
            out, _ = first_forward(model, batch)
            if engine.manager.pools[Tier.DEVICE].used < taken:
                break
        assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
        assert engine.manager.pools[Tier.DEVICE].used < taken


def test_a_call_that_fails_before_it_runs_keeps_no_promise(lab, tiny_model, tmp_path, monkeypatch):
    model, batch = tiny_model(), lab.prompt(tokens=101)
    with tierkv.attach(model, roomy(tmp_path)) as engine:
        cache = engine.new_cache()

        def interrupt(*_, **__):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine._prefixes, "begin", interrupt)
            with pytest.raises(KeyboardInterrupt):
                model.generate(**batch, cache=cache, **GREEDY)
        assert engine._promises.blocks_to_come(engine.open()) == 0
        model.generate(**batch, cache=cache, **GREEDY)
        assert engine._promises.blocks_to_come(engine.open()) == 0


def test_closing_when_the_store_is_closed_already(lab, tiny_model, tmp_path, monkeypatch):
    model = tiny_model()
    settings = roomy(tmp_path, persist=True)
    settings["disk"]["write_queue"] = "32KiB"
    engine = tierkv.attach(model, settings)
    model.generate(**lab.prompt(tokens=400), **GREEDY)
    engine.stores.prefix.close()  # as the interpreter's end does
    try:
        engine.close()
    except TierKVError as error:
        raise AssertionError(error) from error
    assert engine.closed
