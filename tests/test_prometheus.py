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
            key = (sample.name, *sorted(more.values()), own["engine"])
            assert (key, own["pid"]) not in found
            found[key, own["pid"]] = sample.value
    return {key: value for (key, _), value in found.items()}


def test_an_engines_numbers_are_served(monkeypatch):
    with small_engine(LAYOUT, device_tokens=64, host_tokens=64) as engine, serve(engine, port=0) as server:
        batch = engine.open()
        forward(batch, PlainCache(LAYOUT), random_tokens(LAYOUT, 1, 9, 0))
        found = scrape(server)
        stats = engine.stats()
        device = stats.tiers["device"]
        assert found["tierkv_tokens_total", "1"] == 9
        assert found["tierkv_forwards_total", "1"] == 1
        assert found["tierkv_tier_blocks", "device", "1"] == 3
        assert found["tierkv_tier_capacity_bytes", "device", "1"] == device.capacity_bytes
        ratio = found["tierkv_kv_cache_usage_ratio", "device", "1"]
        assert ratio == pytest.approx(device.allocated_bytes / device.capacity_bytes)
        assert 0 < ratio <= 1
        assert ("tierkv_kv_cache_usage_ratio", "disk", "1") not in found  # a tier that is off has no share
        assert found["tierkv_kv_bytes", "1"] == stats.kv_bytes_total
        for wire, moved in stats.moved_bytes.items():
            assert found["tierkv_bytes_moved_total", *sorted(wire.split("_to_")), "1"] >= 0 <= moved
        assert found["tierkv_stall_seconds_total", "1"] == stats.counters.stall_seconds
        assert found["tierkv_read_path_info", "gathered", "1"] == 1
        assert ("tierkv_overlap_ratio", "1") not in found  # nothing was fetched
        forward(batch, PlainCache(LAYOUT), random_tokens(LAYOUT, 1, 0, 0)) if False else None
        batch.append(0, *random_tokens(LAYOUT, 1, 1, 1)[0])
        batch.rollback()
        assert scrape(server)["tierkv_torn_forwards_total", "1"] == engine.stats().counters.torn_forwards
