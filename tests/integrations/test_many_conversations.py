"""Many conversations over one engine, and several engines and processes over one store."""

import threading

import pytest
import torch

import tierkv
from tests.integrations.prefixes import BLOCK, GREEDY, first_forward, roomy
from tierkv.errors import CapacityError


def test_threads_share_an_engine(lab, tiny_model, tmp_path):
    """Conversations of several threads, with one beginning in common, each with explicit caches and without."""
    model = tiny_model()
    system = lab.prompt(tokens=70)["input_ids"]
    prompts = [torch.cat([system, lab.prompt(tokens=20 + 3 * n, seed=n)["input_ids"]], 1) for n in range(4)]
    expected = [lab.stock(model, ids, **GREEDY) for ids in prompts]
    wrong: list[tuple[int, int]] = []

    def converse(number):
        ids = prompts[number]
        for turn in range(3):
            cache = engine.new_cache() if turn % 2 else None
            out = model.generate(ids, **GREEDY, **({"cache": cache} if cache else {}))
            if not torch.equal(out, expected[number]):
                wrong.append((number, turn))
            if cache:
                cache.close()

    with tierkv.attach(model, roomy(tmp_path, persist=True)) as engine:
        threads = [threading.Thread(target=converse, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
        assert wrong == []
        assert engine.stats().prefix.used_tokens >= 8 * 64


def test_idle_conversations_move_down_and_come_back(lab, tiny_model):
    """Six conversations where the device holds little more than one; each goes on in turn, and what was idle comes back."""
    model = tiny_model()
    with lab.attach(model, tokens=240, spare=12, host_blocks=12) as engine:
        caches = [engine.new_cache() for _ in range(6)]
        texts = [lab.prompt(tokens=120, seed=seed)["input_ids"] for seed in range(6)]
        for turn in range(3):
            for number, cache in enumerate(caches):
                ids = texts[number]
                texts[number] = model.generate(ids, cache=cache, do_sample=False, max_new_tokens=16)
                assert torch.equal(texts[number], lab.stock(model, ids, do_sample=False, max_new_tokens=16))
                texts[number] = torch.cat([texts[number], lab.prompt(tokens=5, seed=turn)["input_ids"]], 1)
        stats = engine.stats()
        assert stats.moved_bytes["disk_to_device"] + stats.moved_bytes["host_to_device"] > 0
        assert all(tier.peak_bytes <= tier.capacity_bytes for tier in stats.tiers.values())
        on_device = sum(block.tier == 0 for block in caches[-1].sequences.tables[0].blocks)
        assert on_device >= 6  # of the latest, beyond the blocks that always stay there


def test_a_conversation_too_many_is_refused_before_it_is_computed(lab, tiny_model):
    model = tiny_model()
    with lab.attach(model, tokens=140, spare=12, host_blocks=4, disk={"capacity": 0}) as engine:
        caches = []

        def begin(number):
            for seed in range(number):
                caches.append(engine.new_cache())
                model.generate(**lab.prompt(tokens=110, seed=seed), cache=caches[-1], **GREEDY)

        with pytest.raises(CapacityError, match=r"taken by other caches.*smallest device\.capacity"):
            begin(9)
        assert len(caches) >= 2
        for seed, cache in enumerate(caches[:-1]):  # the others are as they were
            ids = lab.prompt(tokens=110, seed=seed)["input_ids"]
            assert torch.equal(model.generate(ids, cache=cache, **GREEDY), lab.stock(model, ids, **GREEDY))


def test_two_engines_share_one_store(lab, tiny_model, tmp_path):
    """Two models of one process, and what one has written the other's twin finds."""
    from tests.integrations.conftest import build

    one, twin = tiny_model(), build("llama", "sdpa", torch.float32)
    batch = lab.prompt(tokens=101)
    with tierkv.attach(one, roomy(tmp_path, persist=True)) as first:
        first_forward(one, batch)
        first.stores.prefix.flush(10)
        with tierkv.attach(twin, roomy(tmp_path, persist=True)):
            out, computed = first_forward(twin, batch)
            assert computed == 101 - 6 * BLOCK
            assert torch.equal(out, lab.stock(one, **batch, **GREEDY))
        first.forget_prefixes()
        assert first_forward(one, batch)[1] == 5
