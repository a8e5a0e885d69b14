"""What the user meets when the machine misbehaves: full disks, unusable paths, budgets too small, and nothing leaks."""

import contextlib
import gc
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import tierkv
from tierkv.errors import CapacityError, ConfigError, TierKVError


def prompt(rows=1, tokens=200):
    return torch.randint(3, 97, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


def greedy(model, ids, new=30, **kwargs):
    return model.generate(input_ids=ids, max_new_tokens=new, do_sample=False, **kwargs)


@pytest.fixture
def filling_disk(tmp_path):
    """A real file system of 4 MiB, and a function that fills it up to so many free bytes, as another program would."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine does not let tests mount a tmpfs: {done.stderr.decode().strip()}")

    def fill(leave):
        with (folder / "ballast").open("wb") as ballast:
            ballast.write(b"x" * (shutil.disk_usage(folder).free - leave))

    yield folder, fill
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_does_not_stop_a_generation_that_fits_in_memory(tiny_model, three_tiers, filling_disk):
    """Memory holds each conversation alone. The idle one cannot move down, so the second is refused while it lives."""
    model = tiny_model()
    folder, fill = filling_disk
    config = three_tiers(model, device_blocks=48, host_blocks=6, disk={"path": str(folder), "capacity": "3MiB"})
    first, second = prompt(tokens=300), prompt(tokens=500)
    expected = greedy(model, first), greedy(model, second)
    with tierkv.attach(model, config) as engine:
        cache = engine.new_cache()
        assert torch.equal(greedy(model, first, cache=cache), expected[0])
        fill(leave=0)
        # Moving the idle conversation down fails; the blocks stay where they are and nothing is lost.
        with contextlib.suppress(CapacityError):
            assert torch.equal(greedy(model, second), expected[1])
        longer = torch.cat([expected[0], prompt(tokens=9)], dim=1)
        cache_again = greedy(model, longer, cache=cache)
        cache.close()
        assert torch.equal(greedy(model, second), expected[1])
    assert torch.equal(cache_again, greedy(model, longer))


def test_a_full_disk_that_held_what_memory_cannot_is_one_clear_error(tiny_model, three_tiers, filling_disk):
    model = tiny_model()
    folder, fill = filling_disk
    config = three_tiers(model, device_blocks=60, host_blocks=4, disk={"path": str(folder), "capacity": "3MiB"})
    ids = prompt(rows=2, tokens=600)
    expected = greedy(model, ids)
    with tierkv.attach(model, config) as engine:
        fill(leave=32 << 10)
        with pytest.raises(CapacityError) as caught:
            greedy(model, ids)
        assert "\n" not in str(caught.value)
        assert "disk tier failed" in str(caught.value)
        stats = engine.stats()
        assert stats.counters.write_failures >= 1
        assert stats.counters.recomputes == 1
        assert "disk tier failed" in stats.note
        # What fits in memory still works afterwards.
        small = prompt(tokens=40)
        assert torch.equal(greedy(model, small, new=8), _detached(model, small))
    named = re.search(r'device\.capacity that suffices is "(\w+)"', str(caught.value))
    config["device"] = {"capacity": named.group(1)}
    (folder / "ballast").unlink()
    with tierkv.attach(model, config) as engine:
        fill(leave=32 << 10)
        assert torch.equal(greedy(model, ids), expected)


def _detached(model, ids):
    """A stock run of the attached model: a cache of transformers' own wins."""
    return greedy(model, ids, new=8, cache=DynamicCache(config=model.config))


def test_a_call_that_cannot_fit_is_refused_before_the_prefill(tiny_model, three_tiers):
    model = tiny_model()
    config = three_tiers(model, device_blocks=6, host_blocks=0, disk={"capacity": 0})
    calls = []
    handle = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    try:
        with (
            tierkv.attach(model, config),
            pytest.raises(CapacityError, match=r"smallest device\.capacity that suffices"),
        ):
            greedy(model, prompt(rows=2, tokens=400), num_beams=3)
    finally:
        handle.remove()
    assert not calls


@pytest.mark.parametrize("rows", [1, 3])
def test_the_budget_that_the_refusal_names_suffices(tiny_model, three_tiers, rows):
    model = tiny_model()
    ids = prompt(rows=rows, tokens=300)
    expected = greedy(model, ids)
    config = three_tiers(model, device_blocks=6, host_blocks=0, disk={"capacity": 0})
    with tierkv.attach(model, config), pytest.raises(CapacityError) as caught:
        greedy(model, ids)
    config["device"] = {"capacity": re.search(r'suffices is "(\w+)"', str(caught.value)).group(1)}
    with tierkv.attach(model, config):
        assert torch.equal(greedy(model, ids), expected)


def test_a_device_smaller_than_one_working_set_is_refused_at_attach(tiny_model):
    with pytest.raises(ConfigError, match=r"device\.capacity = 4,096 bytes cannot hold"):
        tierkv.attach(tiny_model(), {"device": {"capacity": 4096}, "disk": {"capacity": 0}})


@pytest.mark.parametrize("kind", ["a file", "under a file"])
def test_an_unusable_disk_path_is_one_line_at_attach(tiny_model, three_tiers, tmp_path, kind):
    path = tmp_path / "taken"
    path.write_text("here already", encoding="utf-8")
    if kind == "under a file":
        path = path / "store"
    config = three_tiers(tiny_model())
    config["disk"] = {"path": str(path), "capacity": "1MiB"}
    with pytest.raises(ConfigError) as caught:
        tierkv.attach(tiny_model(), config)
    assert str(path.name) in str(caught.value)
    assert "\n" not in str(caught.value)
    # Nothing was left attached.
    tierkv.attach(tiny_model(), three_tiers(tiny_model())).close()


def test_a_missing_disk_path_is_made(tiny_model, three_tiers, tmp_path):
    config = three_tiers(tiny_model())
    config["disk"]["path"] = str(tmp_path / "a" / "b")
    ids = prompt()
    with tierkv.attach(tiny_model(), config):
        greedy(tiny_model(), ids)
        assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("wrong", [3, ["device"], torch.nn.Linear(1, 1), "no/such/file.toml"])
def test_a_config_that_is_none_is_one_line(tiny_model, wrong):
    with pytest.raises(ConfigError) as caught:
        tierkv.attach(tiny_model(), wrong)
    assert "\n" not in str(caught.value)


def test_the_config_of_a_model_is_not_a_config_for_tiers(tiny_model):
    with pytest.raises(ConfigError):
        tierkv.attach(tiny_model(), tiny_model().config)


def test_a_config_object_can_serve_several_models(tiny_model, three_tiers):
    config = tierkv.load_config(three_tiers(tiny_model("llama"), device_blocks=40, host_blocks=8))
    ids = prompt()
    for family in ("llama", "qwen3"):
        expected = greedy(tiny_model(family), ids)
        with tierkv.attach(tiny_model(family), config):
            assert torch.equal(greedy(tiny_model(family), ids), expected)


def test_two_models_share_one_store_path(tiny_model, three_tiers):
    config = three_tiers(tiny_model("llama"))
    ids = prompt()
    expected = [greedy(tiny_model(family), ids) for family in ("llama", "qwen3")]
    with tierkv.attach(tiny_model("llama"), config), tierkv.attach(tiny_model("qwen3"), config):
        got = [greedy(tiny_model(family), ids) for family in ("llama", "qwen3")]
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def test_closing_leaves_no_thread_file_or_mapping(tiny_model, three_tiers, tmp_path):
    def footprint():
        gc.collect()
        files = {name for name in map(_target, Path("/proc/self/fd").iterdir()) if str(tmp_path) in name}
        maps = {line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line}
        return {thread.name for thread in threading.enumerate()}, files, maps

    before = footprint()
    for _ in range(3):
        engine = tierkv.attach(tiny_model(), three_tiers(tiny_model()))
        greedy(tiny_model(), prompt())
        engine.close()
        engine.close()
    assert footprint() == before
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


def test_an_engine_that_nobody_closed_cleans_up_when_the_process_ends(tmp_path):
    script = f"""
import os; os.environ["HF_HUB_OFFLINE"] = "1"
import torch, tierkv
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                                     num_attention_heads=2, num_key_value_heads=1))
engine = tierkv.attach(model, {{"device": {{"capacity": 120000}}, "disk": {{"path": {str(tmp_path)!r}, "capacity": "8MiB"}}}})
model.generate(torch.ones((1, 600), dtype=torch.long), max_new_tokens=4)
assert engine.stats().moved_bytes["device_to_disk"] > 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def _target(link):
    try:
        return str(link.readlink())
    except OSError:
        return ""


MEMORY_SCRIPT = """
import json, os, sys
os.environ["HF_HUB_OFFLINE"] = "1"
import torch, tierkv
from transformers import LlamaConfig, LlamaForCausalLM

def anonymous():
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Anonymous:"))

torch.manual_seed(0)
config = LlamaConfig(vocab_size=97, hidden_size=256, intermediate_size=64, num_hidden_layers=24, num_attention_heads=4,
                     num_key_value_heads=4, max_position_embeddings=8192)
model = LlamaForCausalLM(config).eval()
ids = torch.randint(3, 97, (1, 64))
device, host, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
settings = {"device": {"capacity": device}, "host": {"capacity": host}, "disk": {"path": path, "capacity": "512MiB"}}
with tierkv.attach(model, settings) as engine:
    cache = engine.new_cache()
    with torch.no_grad():
        model(input_ids=ids, cache=cache)           # everything that loads lazily is loaded now
        before, known = anonymous(), sum(engine.usage.now(tier) for tier in list(engine.usage._peak)[:2])
        for _ in range(40):
            model(input_ids=ids, cache=cache)
    after = anonymous()
    stats = engine.stats()
    tiers = {name: [tier.capacity_bytes, tier.peak_bytes, tier.blocks] for name, tier in stats.tiers.items()}
    reported = stats.tiers["device"].allocated_bytes + stats.tiers["host"].allocated_bytes
    print(json.dumps({"grown": after - before, "reported": reported - known, "tiers": tiers, "total": stats.kv_bytes_total}))
"""


@pytest.mark.slow
def test_resident_memory_agrees_with_the_report(tmp_path):
    """Anonymous memory grows by what the report says, within 16 MiB (allocator arenas, LMDB's own buffers)."""
    device, host = 48 << 20, 24 << 20
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, str(device), str(host), str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=240,
    )
    said = json.loads(done.stdout)
    for capacity, peak, blocks in said["tiers"].values():
        assert 0 < peak <= capacity
        assert blocks > 0
    assert said["total"] > 1.5 * (device + host)
    assert abs(said["grown"] - said["reported"]) < 16 << 20, said


def test_errors_that_users_see_are_all_tierkv_errors_of_one_line(tiny_model, three_tiers):
    model = tiny_model()
    with tierkv.attach(model, three_tiers(model)) as engine:
        cache = engine.new_cache()
        with pytest.raises(TierKVError) as caught:
            cache.crop(-1)
        assert "\n" not in str(caught.value)
