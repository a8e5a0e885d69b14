"""Prefixes that outlive the engine and the process: restored, with the tokens of a fresh run, and never a wrong one."""

import json
import os
import subprocess
import sys

import pytest
import torch

import tierkv
from tests.integrations.prefixes import BLOCK, GREEDY, first_forward, roomy
from tierkv.errors import ConfigError, RecordError

FAMILIES = ("llama", "gemma3", "gpt_oss", "deepseek_v3", "falcon", "mistral")


def run_once(model, path, batch, **prefix):
    """Attach, generate, and close; return the tokens, how many were computed for the prompt, and what was counted."""
    with tierkv.attach(model, roomy(path, persist=True, **prefix)) as engine:
        out, computed = first_forward(model, batch)
        engine.stores.prefix.flush(10)
        return out, computed, engine.stats().prefix


@pytest.mark.parametrize("attention", ["auto", "gathered"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_restored(lab, tiny_model, tmp_path, family, attention):
    model, batch = tiny_model(family), lab.prompt(tokens=101)
    stock = lab.stock(model, **batch, **GREEDY)
    out, computed, _ = run_once(model, tmp_path, batch, attention=attention)
    assert torch.equal(out, stock)
    assert computed == 101
    out, computed, prefix = run_once(model, tmp_path, batch, attention=attention)
    assert torch.equal(out, stock)
    assert computed == 101 - 6 * BLOCK
    assert (prefix.matched_tokens_memory, prefix.matched_tokens_disk) == (0, 96)
    assert (prefix.restored_tokens, prefix.used_tokens, prefix.failed_restores) == (96, 96, 0)


def test_what_is_restored_are_the_same_bytes(lab, tiny_model, tmp_path):
    model, batch = tiny_model("deepseek_v3"), lab.prompt(tokens=101)

    def layers():
        with tierkv.attach(model, roomy(tmp_path, persist=True)) as engine:
            cache = engine.new_cache()
            model.generate(**batch, cache=cache, do_sample=False, max_new_tokens=1)
            return [cache.sequences.read(layer) for layer in range(len(engine.layout.layers))]

    for (keys, values), (keys_again, values_again) in zip(layers(), layers(), strict=True):
        assert torch.equal(keys[:, :, :96], keys_again[:, :, :96])
        assert torch.equal(values[:, :, :96], values_again[:, :, :96])


@pytest.mark.parametrize("attention", ["auto", "gathered"])
@pytest.mark.parametrize("pads", [(0, BLOCK), (0, 5), (3, 21)])
def test_rows_with_padding(lab, tiny_model, tmp_path, pads, attention):
    """Written from rows that padding has shifted, restored into rows that other padding shifts."""
    model, batch = tiny_model(), lab.prompt(2, 90, pads=pads)
    out, _, _ = run_once(model, tmp_path, batch, attention=attention)
    assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
    for extra in (0, 7):  # once as they were, once shifted further
        wider = {name: torch.nn.functional.pad(values, (extra, 0)) for name, values in batch.items()}
        again, computed, prefix = run_once(model, tmp_path, wider, attention=attention)
        assert torch.equal(again, lab.stock(model, **wider, **GREEDY))
        used = min(extra + pad + (90 - pad) // BLOCK * BLOCK for pad in pads)
        assert computed == 2 * (90 + extra - used)
        assert prefix.restored_tokens > 0


def test_rows_of_different_prefixes(lab, tiny_model, tmp_path):
    model = tiny_model()
    batch = lab.prompt(3, 90)
    for row, length in enumerate((90, 70, 50)):
        own = {name: values[row : row + 1, :length] for name, values in batch.items()}
        run_once(model, tmp_path, own)
    out, computed, prefix = run_once(model, tmp_path, batch)
    assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
    assert computed == 3 * (90 - 48)
    assert (prefix.matched_tokens_disk, prefix.used_tokens) == (80 + 64 + 48, 3 * 48)


def test_a_block_that_cannot_be_read_ends_the_restore_there(lab, tiny_model, tmp_path, monkeypatch):
    model, batch = tiny_model(), lab.prompt(tokens=101)
    run_once(model, tmp_path, batch)
    with tierkv.attach(model, roomy(tmp_path, persist=True)) as engine:
        store, reads = engine.stores.prefix, []

        def read(found, *args):
            reads.append(found)
            if found.key == third:
                raise RecordError("a flipped bit")
            return whole(found, *args)

        whole = store.read
        keys = [
            one.key for one in store.match(engine._prefixes._namespace_of(engine.weights.stamp()), chain(engine, batch))
        ]
        third = keys[2]
        monkeypatch.setattr(type(store), "read", lambda self, found, *args: read(found, *args))
        whole = whole.__get__(store) if not hasattr(whole, "__self__") else whole
        out, computed = first_forward(model, batch)
        assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
        assert computed == 101 - 2 * BLOCK
        prefix = engine.stats().prefix
        assert (prefix.matched_tokens_disk, prefix.restored_tokens, prefix.failed_restores) == (96, 32, 1)
        assert len(reads) == 6  # all were in flight together, and none was tried twice


def chain(engine, batch):
    from tierkv.keys import chain_keys

    namespace = engine._prefixes._namespace_of(engine.weights.stamp())
    return chain_keys(namespace, batch["input_ids"][0].tolist(), engine.layout.block_size)


def test_a_bit_that_flips_on_the_disk(lab, tiny_model, tmp_path):
    model, batch = tiny_model(), lab.prompt(tokens=101)
    stock = lab.stock(model, **batch, **GREEDY)
    run_once(model, tmp_path, batch)
    (slab,) = (tmp_path / "prefix").glob("slab-*.bin")
    rotten = bytearray(slab.read_bytes())
    rotten[len(rotten) // 2] ^= 4
    slab.write_bytes(rotten)
    out, computed, prefix = run_once(model, tmp_path, batch)
    assert torch.equal(out, stock)
    assert 5 < computed <= 101
    assert prefix.failed_restores == 1
    assert prefix.store.damaged == 1
    out, computed, _ = run_once(model, tmp_path, batch)  # it was computed and written again
    assert torch.equal(out, stock)
    assert computed == 5


def test_a_foreign_file_in_place_of_the_store(lab, tiny_model, tmp_path, caplog):
    model, batch = tiny_model(), lab.prompt(tokens=60)
    (tmp_path / "prefix").write_text("not a folder")
    with tierkv.attach(model, roomy(tmp_path, persist=True)) as engine:
        assert engine.stores.prefix is None
        out, _ = first_forward(model, batch)
        assert engine.stats().prefix.store is None
    assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
    assert "going on without kept prefixes" in caplog.text


@pytest.mark.parametrize(
    ("settings", "blocks"),
    [
        ({"write_policy": "never"}, [0, 0, 0]),
        ({"write_policy": "second_sighting"}, [0, 6, 6]),
        ({"write_policy": "always"}, [6, 6, 6]),
        ({"write_policy": "always", "min_tokens": 102}, [0, 0, 0]),
        ({"write_policy": "always", "min_tokens": 96}, [6, 6, 6]),
    ],
)
def test_what_is_written_and_when(lab, tiny_model, tmp_path, settings, blocks):
    """Each run is another engine, as after a restart."""
    model, batch = tiny_model(), lab.prompt(tokens=97)
    batch["input_ids"] = batch["input_ids"][:, :97]
    found = []
    for _ in blocks:
        with tierkv.attach(model, roomy(tmp_path, persist=True, **settings)) as engine:
            model.generate(**batch, do_sample=False, max_new_tokens=2)
            engine.stores.prefix.flush(10)
            found.append(engine.stats().prefix.store.blocks)
    assert found == blocks


def test_a_second_sighting_in_memory_counts(lab, tiny_model, tmp_path):
    model, batch = tiny_model(), lab.prompt(tokens=97)
    with tierkv.attach(model, roomy(tmp_path, persist=True, write_policy="second_sighting")) as engine:
        for expected in (0, 6):
            model.generate(**batch, do_sample=False, max_new_tokens=2)
            engine.stores.prefix.flush(10)
            assert engine.stats().prefix.store.blocks == expected


def test_a_queue_that_cannot_take_a_block_is_refused(tiny_model, tmp_path):
    settings = roomy(tmp_path, persist=True)
    settings["disk"]["write_queue"] = "16KiB"
    with pytest.raises(ConfigError, match=r"disk\.write_queue = 16,384 bytes .* at least 25,024 bytes"):
        tierkv.attach(tiny_model(), settings)


def test_persisting_without_a_disk_is_refused(tiny_model, tmp_path):
    settings = roomy(tmp_path, persist=True)
    settings["disk"]["capacity"] = 0
    with pytest.raises(ConfigError, match=r"prefix\.persist = true .* disk\.capacity"):
        tierkv.attach(tiny_model(), settings)


def test_blocks_that_lie_on_disk_are_written_and_restored(lab, tiny_model):
    """Device and host hold a part: blocks are written from the spill file, and restored into it."""
    model, batch = tiny_model(), lab.prompt(tokens=1500)
    stock = lab.stock(model, **batch, **GREEDY)
    prefix = {"persist": True, "write_policy": "always", "min_tokens": 0}
    for computed in (1500, 1500 - 93 * BLOCK):
        lab._engines = 0  # the same store again
        with lab.attach(model, tokens=1520, host_blocks=48, prefix=prefix) as engine:
            out, fed = first_forward(model, batch)
            assert torch.equal(out, stock)
            assert fed == computed
            stats = engine.stats()
            assert stats.moved_bytes["device_to_disk"] > 0
            assert all(tier.peak_bytes <= tier.capacity_bytes for tier in stats.tiers.values())
            assert stats.prefix.shed_blocks == 0


CHILD = """
import json, sys, torch, tierkv
from tests.integrations.conftest import build
from tests.integrations.prefixes import first_forward, roomy
from pathlib import Path
torch.set_num_threads(1)
model = build("llama", "sdpa", torch.float32)
ids = torch.tensor([json.loads(sys.argv[2])])
with tierkv.attach(model, roomy(Path(sys.argv[1]), persist=True)) as engine:
    out, computed = first_forward(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
print(json.dumps([computed, out[0].tolist()]))
"""


@pytest.mark.slow
def test_other_processes_find_the_same_keys(lab, tiny_model, tmp_path):
    """Whatever PYTHONHASHSEED they have."""
    model, batch = tiny_model(), lab.prompt(tokens=101)
    stock = lab.stock(model, **batch, **GREEDY)[0].tolist()
    for seed, expected in (("1", 101), ("2", 5), ("random", 5)):
        done = subprocess.run(
            [sys.executable, "-c", CHILD, str(tmp_path), json.dumps(batch["input_ids"][0].tolist())],
            capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": "."},
        )  # fmt: skip
        assert json.loads(done.stdout.splitlines()[-1]) == [expected, stock]


def test_a_store_slower_than_the_model_is_left_alone(lab, tiny_model, tmp_path):
    model, batch = tiny_model(), lab.prompt(tokens=101)
    run_once(model, tmp_path, batch)
    with tierkv.attach(model, roomy(tmp_path, persist=True)) as engine:
        engine.prefix.rates.computed(1000, 0.001)
        engine.prefix.rates.loaded(1000, 10.0)
        out, computed = first_forward(model, batch)
        assert torch.equal(out, lab.stock(model, **batch, **GREEDY))
        assert computed == 101
        prefix = engine.stats().prefix
        assert (prefix.computed_instead, prefix.restored_tokens) == (96, 0)


def test_closing_hands_over_what_waits(lab, tiny_model, tmp_path):
    """Many blocks at once, a queue for a few of them: they are written by the time the engine is closed."""
    model, batch = tiny_model(), lab.prompt(tokens=1605)
    settings = roomy(tmp_path, persist=True)
    settings["disk"]["write_queue"] = "96KiB"
    with tierkv.attach(model, settings) as engine:
        model.generate(**batch, do_sample=False, max_new_tokens=1)
        assert engine.stats().prefix.waiting_blocks > 0
    out, computed, _ = run_once(model, tmp_path, batch)
    assert computed == 5
    assert torch.equal(out, lab.stock(model, **batch, **GREEDY))


def test_tiers_too_small_for_a_queue_still_keep_prefixes(lab, tiny_model):
    """An eighth of the tier that lends the queue is less than a record: it lends a record's worth all the same."""
    model, batch = tiny_model(), lab.prompt(tokens=101)
    stock = lab.stock(model, **batch, **GREEDY)
    prefix = {"persist": True, "write_policy": "always", "min_tokens": 0}
    for expected in (101, 5):
        lab._engines = 0
        with lab.attach(model, tokens=140, spare=8, host_blocks=4, prefix=prefix) as engine:
            out, computed = first_forward(model, batch)
            assert torch.equal(out, stock)
            assert computed == expected
            assert all(tier.peak_bytes <= tier.capacity_bytes for tier in engine.stats().tiers.values())
