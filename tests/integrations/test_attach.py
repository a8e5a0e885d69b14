"""attach and close: what is changed on the model is changed back, and what must not be used any more says so."""

import copy
import gc
import io
import os
import pickle
import threading
import traceback
from typing import Any

import pytest
import torch

import tierkv
from tierkv.errors import ClosedError, TierKVError, UnsafeCall
from tierkv.integrations.hf_generate import _facts

GREEDY = {"do_sample": False, "max_new_tokens": 8}


def test_the_model_is_as_before(lab, tiny_model):
    model, ids = tiny_model(), lab.prompt(1, 40)["input_ids"]
    before = [dict(module.__dict__) for module in model.modules()]
    with lab.attach(model) as engine:
        assert model.generate.__name__ == "generate"
        assert model.generate.__doc__ == type(model).generate.__doc__
        model.generate(ids, **GREEDY)
    assert [dict(module.__dict__) for module in model.modules()] == before
    assert model.generate.__func__ is type(model).generate
    engine.close()
    with lab.attach(model):
        assert torch.equal(model.generate(ids, **GREEDY), lab.stock(model, ids, **GREEDY))


def test_an_exception_inside_the_block_detaches_too(lab, tiny_model):
    with pytest.raises(ZeroDivisionError), lab.attach(tiny_model()):
        _ = 1 / 0
    assert "generate" not in tiny_model().__dict__


def test_the_engine_knows_what_a_model_costs(tiny_model):
    model = tiny_model("llama")
    facts = _facts(model)
    assert facts.query_heads == model.config.num_attention_heads
    assert facts.weight_bytes == sum(weight.numel() * weight.element_size() for weight in model.parameters())


def test_only_one_engine_a_model(lab, tiny_model):
    with lab.attach(tiny_model()) as engine:
        with pytest.raises(TierKVError, match="already attached"):
            tierkv.attach(tiny_model())
        assert tiny_model().tierkv_engine is engine
        with lab.attach(tiny_model("qwen3")):
            engine.new_cache()


def test_overrides_of_others_are_kept(lab, tiny_model):
    """Somebody wrapped generate and forward before, and somebody else does after."""
    model, ids, calls = tiny_model("phi3"), lab.prompt(1, 40)["input_ids"], []

    def wrapped(name, inner):
        def run(*args, **kwargs):
            calls.append(name)
            return inner(*args, **kwargs)

        return run

    expected = model.generate(ids, **GREEDY)
    try:
        model.generate, model.forward = wrapped("generate 1", model.generate), wrapped("forward 1", model.forward)
        first = model.generate, model.forward
        with lab.attach(model):
            assert torch.equal(model.generate(ids, **GREEDY), expected)
        assert calls == ["generate 1"] + ["forward 1"] * 8
        assert (model.generate, model.forward) == first
        with lab.attach(model):
            model.generate, model.forward = wrapped("generate 2", model.generate), wrapped("forward 2", model.forward)
            calls.clear()
            assert torch.equal(model.generate(ids, **GREEDY), expected)
            assert (calls.count("generate 2"), calls.count("forward 2"), calls.count("forward 1")) == (1, 8, 8)
        calls.clear()
        assert torch.equal(model.generate(ids, **GREEDY), expected)  # ours stays inside theirs and does nothing
        assert (calls.count("generate 1"), calls.count("forward 2"), calls.count("forward 1")) == (1, 8, 8)
    finally:
        for name in ("generate", "forward"):
            model.__dict__.pop(name, None)


def test_after_close(lab, tiny_model):
    model, batch = tiny_model(), lab.prompt(1, 100)
    with lab.attach(model) as engine:
        cache, fork = engine.new_cache(), engine.new_cache()
        ids = model.generate(**batch, cache=cache, **GREEDY)
        stale = model.generate
    for use in (
        engine.new_cache,
        engine.stats,
        lambda: model.generate(ids, cache=cache, **GREEDY),
        lambda: model.generate(**batch, cache=fork, **GREEDY),
        lambda: model(ids, cache=cache),
        lambda: cache.crop(-1),
        lambda: cache.reorder_cache(torch.tensor([0])),
        lambda: cache.batch_repeat_interleave(2),
        lambda: copy.deepcopy(cache),
        lambda: cache.layers[0].keys,
    ):
        with pytest.raises(ClosedError, match="closed"), torch.no_grad():
            use()
    cache.reset()
    cache.close()
    fork.close()
    assert torch.equal(stale(**batch, **GREEDY), lab.stock(model, **batch, **GREEDY))
    # Another engine on the same model does not take caches of the closed one.
    with lab.attach(model), pytest.raises(UnsafeCall, match="another engine"):
        model.generate(**batch, cache=fork, **GREEDY)


def test_a_closed_cache(lab, tiny_model):
    model, batch = tiny_model(), lab.prompt(1, 100)
    with lab.attach(model) as engine:
        cache = engine.new_cache()
        ids = model.generate(**batch, cache=cache, **GREEDY)
        cache.close()
        cache.close()
        assert engine.stats().kv_bytes_total == 0
        for use in (lambda: model.generate(ids, cache=cache, **GREEDY), lambda: model(ids, cache=cache), cache.reset):
            with pytest.raises(TierKVError, match="this cache was closed"), torch.no_grad():
                use()


def test_a_forgotten_cache_is_given_back(lab, tiny_model):
    model, batch = tiny_model(), lab.prompt(1, 100)
    with lab.attach(model) as engine:
        gc.collect()
        gc.disable()
        try:
            cache = engine.new_cache()
            model.generate(**batch, cache=cache, **GREEDY)
            out = model.generate(**batch, return_dict_in_generate=True, **GREEDY)
            assert engine.stats().caches == 2
            del cache, out
            assert engine.stats().caches == 0  # at once: no cycle keeps them
        finally:
            gc.enable()
        model.generate(**batch, **GREEDY)
        assert engine.stats().kv_bytes_total == 0


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*os.fork.*:RuntimeWarning")
def test_a_forked_child(lab, tiny_model):
    """Its copy has no workers and no files: it says so, and closing it there takes nothing from the parent."""
    model, batch = tiny_model(), lab.prompt(1, 100)
    with lab.attach(model) as engine:
        cache = engine.new_cache()
        ids = model.generate(**batch, cache=cache, **GREEDY)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for use in (engine.new_cache, lambda: model.generate(ids, cache=cache), lambda: model.generate(ids)):
                    with pytest.raises(ClosedError, match="fork"):
                        use()
                engine.close()
                assert "generate" not in model.__dict__
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(model.generate(ids, cache=cache, **GREEDY), lab.stock(model, ids, **GREEDY))


def test_an_engine_that_was_lost(lab, tiny_model):
    """Whoever did not keep what attach returned finds the engine where the message says."""
    model, batch = tiny_model(), lab.prompt(1, 100)
    tierkv.attach(model)
    gc.collect()
    with pytest.raises(TierKVError, match=r"call model\.tierkv_engine\.close\(\) first"):
        tierkv.attach(model)
    model.tierkv_engine.close()
    with lab.attach(model):
        assert torch.equal(model.generate(**batch, **GREEDY), lab.stock(model, **batch, **GREEDY))
    assert not hasattr(model, "tierkv_engine")


def saved(model):
    """Return what ``torch.load`` makes of a saved model."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), saved])
def test_a_copy_of_an_attached_model_is_an_ordinary_model(lab, tiny_model, family, copied):
    model, batch = tiny_model(family), lab.prompt(1, 100)
    with lab.attach(model) as engine:
        ours = model.generate(**batch, **GREEDY)
        before = engine.stats().counters.forwards
        twin = copied(model)
        for one, other in zip(model.modules(), twin.modules(), strict=True):
            assert set(other.__dict__) == set(one.__dict__) - {"generate", "forward", "__getstate__", "tierkv_engine"}
        with torch.no_grad():
            next(twin.parameters()).zero_()  # its own weights, its own generate
        changed = twin.generate(**batch, **GREEDY)
        assert engine.stats().counters.forwards == before
        assert torch.equal(changed, lab.stock(twin, **batch, **GREEDY))
        assert torch.equal(model.generate(**batch, **GREEDY), ours)
        with lab.attach(twin) as second:
            assert torch.equal(twin.generate(**batch, **GREEDY), changed)
            assert second.stats().counters.forwards > 0
    assert torch.equal(copied(model).generate(**batch, **GREEDY), ours)


def test_engines_and_caches_are_not_pickled(lab, tiny_model):
    model, batch = tiny_model(), lab.prompt(1, 100)
    with lab.attach(model) as engine:
        cache = engine.new_cache()
        ids = model.generate(**batch, cache=cache, **GREEDY)
        for refused, message in ((engine, "an engine cannot be copied"), (cache, "a tiered cache cannot be pickled")):
            for use in (pickle.dumps, copy.copy, lambda thing: torch.save(thing, io.BytesIO())):
                with pytest.raises(TierKVError, match=message):
                    use(refused)
        with pytest.raises(TierKVError, match="an engine cannot be copied"):
            copy.deepcopy(engine)
        assert torch.equal(model.generate(ids, cache=cache, **GREEDY), lab.stock(model, ids, **GREEDY))
    with pytest.raises(TierKVError, match="a tiered cache cannot be pickled"):
        pickle.dumps(cache)


def test_saving_an_attached_model(lab, tiny_model, tmp_path):
    model = tiny_model()
    with lab.attach(model):
        model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_threads(lab, tiny_model, family):
    """Several threads generate on one engine, each with caches of its own, while another looks at the figures."""
    model = tiny_model(family)
    prompts = [lab.prompt(1, 100 + 9 * seed, seed=seed)["input_ids"] for seed in range(3)]
    expected = []
    for ids in prompts:
        first = lab.stock(model, ids, **GREEDY)
        expected.append([first, lab.stock(model, torch.cat([first, ids[:, :7]], dim=1), **GREEDY)])
    got: dict[tuple[int, int], Any] = {}
    done = threading.Event()

    def converse(index, engine):
        try:
            for repeat in range(2):
                cache = engine.new_cache()
                first = model.generate(prompts[index], cache=cache, **GREEDY)
                fork = copy.deepcopy(cache)
                second = model.generate(torch.cat([first, prompts[index][:, :7]], dim=1), cache=cache, **GREEDY)
                third = model.generate(torch.cat([first, prompts[index][:, :7]], dim=1), cache=fork, **GREEDY)
                own = model.generate(prompts[index], **GREEDY)
                got[index, repeat] = [first, second, third, own]
                cache.close()
        except BaseException as error:
            got[index, 0] = error

    def look(engine):
        while not done.is_set():
            engine.stats().as_dict()

    with lab.attach(model, rows=3, tokens=150) as engine:
        watcher = threading.Thread(target=look, args=(engine,))
        workers = [threading.Thread(target=converse, args=(index, engine)) for index in range(3)]
        for thread in (watcher, *workers):
            thread.start()
        for thread in workers:
            thread.join()
        done.set()
        watcher.join()
        gc.collect()
        engine.new_cache().close()
        assert min(engine.stats().moved_bytes[wire] for wire in ("device_to_disk", "disk_to_device")) >= 0
    for (index, _), results in got.items():
        assert not isinstance(results, BaseException), results
        first, second = expected[index]
        assert all(torch.equal(a, b) for a, b in zip(results, [first, second, second, first], strict=True))


def test_an_engine_made_in_inference_mode_works_outside_of_it(lab, tiny_model):
    model, batch = tiny_model(), lab.prompt(1, 155)
    expected = lab.stock(model, **batch, max_new_tokens=10, do_sample=False)
    with torch.inference_mode():
        attached = lab.attach(model, tokens=180)
        engine = attached.__enter__()
    try:
        assert torch.equal(model.generate(**batch, max_new_tokens=10, do_sample=False), expected)
        assert engine.stats().tiers["host"].peak_bytes > 0
    finally:
        attached.__exit__(None, None, None)
