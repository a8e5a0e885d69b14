"""Metrics: complete, named after the conventions, the engines' own numbers, and one line where the library is missing."""

import socket
import subprocess
import sys
import urllib.request
from dataclasses import fields

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.publishing import EngineProcess
from tierkv import prometheus_names as names
from tierkv import publish_folder
from tierkv.metrics import Counters, PrefixStats, Stats, TierStats
from tierkv.prometheus import EngineCollector, serve
from tierkv.storage.prefix_stats import PrefixStoreStats
from tierkv.testing.engines import PlainCache, forward, random_tokens, small_engine, small_layout
from tierkv.watch import EngineSnapshot

LAYOUT = small_layout("plain")
TABLES = (names.TIERS, names.ENGINE, names.COUNTERS, names.PREFIX, names.STORE)


def scrape(server):
    """Return samples by name and their labels besides model, process and engine, as Prometheus' own parser reads them."""
    with urllib.request.urlopen(server.url, timeout=10) as response:
        assert response.status == 200
        text = response.read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        assert family.type in {"counter", "gauge"}
        for sample in family.samples:
            own = {name: sample.labels[name] for name in ("model_name", "pid", "engine")}
            more = {name: value for name, value in sample.labels.items() if name not in own}
            key = (sample.name, *(more[name] for name in sorted(more)), own["engine"])
            assert (key, own["pid"]) not in found
            found[key, own["pid"]] = sample.value
    return {key: value for (key, _), value in found.items()}


def test_an_engines_numbers_are_served():
    with small_engine(LAYOUT, device_tokens=24, host_tokens=64) as engine, serve(engine, port=0) as server:
        batch, plain = engine.open(), PlainCache(LAYOUT)
        for step in range(6):
            forward(batch, plain, random_tokens(LAYOUT, 1, 6, step))
        found = scrape(server)
        stats = engine.stats()
        device = stats.tiers["device"]
        assert found["tierkv_tokens_total", "1"] == 36
        assert found["tierkv_forwards_total", "1"] == 6
        assert found["tierkv_tier_blocks", "device", "1"] == device.blocks
        assert found["tierkv_tier_blocks", "device", "1"] + found["tierkv_tier_blocks", "host", "1"] == 9
        assert found["tierkv_tier_capacity_bytes", "device", "1"] == device.capacity_bytes
        ratio = found["tierkv_kv_cache_usage_ratio", "device", "1"]
        assert ratio == pytest.approx(device.allocated_bytes / device.capacity_bytes)
        assert 0 < ratio <= 1
        assert ("tierkv_kv_cache_usage_ratio", "disk", "1") not in found  # a tier that is off has no share
        assert found["tierkv_kv_bytes", "1"] == stats.kv_bytes_total > 0
        for wire, moved in stats.moved_bytes.items():
            source, destination = wire.split("_to_")
            assert found["tierkv_bytes_moved_total", destination, source, "1"] == moved > 0
        assert found["tierkv_stall_seconds_total", "1"] == stats.counters.stall_seconds
        assert found["tierkv_overlap_ratio", "1"] == stats.overlap
        assert found["tierkv_read_path_info", "gathered", "1"] == 1
        forward(batch, plain, random_tokens(LAYOUT, 1, 1, 9))
        later = scrape(server)
        assert later["tierkv_tokens_total", "1"] == 37
        assert all(later[key] >= value for key, value in found.items() if key[0].endswith("_total"))


def test_several_engines_are_told_apart_and_a_closed_one_is_gone():
    first, second = small_engine(LAYOUT, device_tokens=64), small_engine(LAYOUT, device_tokens=32)
    with first, second, serve([first, second], port=0) as server:
        found = scrape(server)
        assert found["tierkv_tier_slots", "device", "1"] == 16
        assert found["tierkv_tier_slots", "device", "2"] == 8
        first.close()
        found = scrape(server)
        assert ("tierkv_tokens_total", "1") not in found
        assert ("tierkv_tokens_total", "2") in found
        second.close()
        assert scrape(server) == {}


def test_all_engines_of_the_user_are_served(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(publish_folder, "SHARED", tmp_path)
    tmp_path.chmod(0o700)
    with serve(port=0) as server:
        assert scrape(server) == {}
        with EngineProcess(tmp_path, engines=2) as child:
            assert child.tell(12) == "computed"
            found = scrape(server)
            assert found["tierkv_tokens_total", "1"] == found["tierkv_tokens_total", "2"] == 12
            child.kill()
            assert scrape(server) == {}


def test_every_number_has_a_name():
    """A field that is new in ``Stats`` needs one too."""

    def named(table):
        return set(table)

    def of(kind, *without):
        return {field.name for field in fields(kind)} - set(without)

    assert of(Counters) == named(names.COUNTERS)
    assert of(TierStats) == named(names.TIERS) - {"usage_ratio"}
    assert of(PrefixStoreStats) == named(names.STORE)
    matched = ("matched_tokens_memory", "matched_tokens_disk")
    assert of(PrefixStats, *matched, "uncacheable_reason", "store") == named(names.PREFIX) - {"hits", "matched_tokens"}
    sentences = ("read_path_reason", "cold_read", "note")
    assert of(Stats, *sentences, "tiers", "counters", "prefix") == named(names.ENGINE)


def test_names_keep_the_conventions():
    metrics = [metric for table in TABLES for metric in table.values()]
    assert len({metric.name for metric in metrics}) == len(metrics)
    for metric in metrics:
        assert metric.name.startswith("tierkv_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.help.endswith(".")


def test_prefixes_and_their_store_are_served():
    store = PrefixStoreStats(7, 70, 80, 100, 3, 4, 5, 1, 0, 0, 0, 0, 2, 9, None)
    prefix = PrefixStats(
        lookups=2, prompt_tokens=100, matched_tokens_memory=30, matched_tokens_disk=20, used_tokens=40, store=store
    )
    with small_engine(LAYOUT, device_tokens=32) as engine:
        empty = engine.stats()
    stats = Stats(**{field.name: getattr(empty, field.name) for field in fields(Stats)} | {"prefix": prefix})
    as_sent = Stats(**{field.name: getattr(stats, field.name) for field in fields(Stats)})
    object.__setattr__(
        as_sent, "prefix", PrefixStats(**stats.as_dict()["prefix"])
    )  # its store is a dict, as JSON has it
    assert isinstance(as_sent.prefix.store, dict)
    for one in (stats, as_sent):
        collector = EngineCollector(lambda one=one: [(7, EngineSnapshot(3, 'a "name"', one))])
        found = {
            (sample.name, sample.labels.get("where", "")): (sample.value, sample.labels)
            for family in collector.collect()
            for sample in family.samples
        }
        assert found["tierkv_prefix_cache_queries_total", ""][0] == 100
        assert found["tierkv_prefix_cache_hits_total", ""][0] == 50
        assert found["tierkv_prefix_cache_matched_tokens_total", "memory"][0] == 30
        assert found["tierkv_prefix_cache_matched_tokens_total", "disk"][0] == 20
        assert found["tierkv_prefix_cache_used_tokens_total", ""][0] == 40
        assert found["tierkv_prefix_store_blocks", ""][0] == 7
        assert found["tierkv_prefix_store_queued_bytes", ""][0] == 9
        assert found["tierkv_prefix_store_write_failures_total", ""][0] == 2
        assert found["tierkv_prefix_store_failed", ""][0] == 0
        assert found["tierkv_tokens_total", ""][1] == {"model_name": 'a "name"', "pid": "7", "engine": "3"}


def test_an_engine_that_could_not_be_asked_has_no_samples():
    assert list(EngineCollector(lambda: [(1, EngineSnapshot(1, "x", None))]).collect()) == []


def test_the_port_is_given_back():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        with pytest.raises(OSError, match="in use"):
            serve([], port=taken.getsockname()[1])
    server = serve([], port=0)
    server.close()
    server.close()
    with serve([], port=server.port) as again:
        assert again.url == f"http://127.0.0.1:{server.port}/metrics"
        assert scrape(again) == {}


def test_without_its_library_it_says_what_to_install():
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from tierkv.errors import ConfigError\n"
        "from tierkv.prometheus import serve\n"
        "try:\n    serve()\nexcept ConfigError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == (
        'metrics need prometheus-client; install the extra with pip install "tierkv-cache[metrics]"\n'
    ), done.stderr
