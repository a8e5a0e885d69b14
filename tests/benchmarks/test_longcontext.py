"""Whole long-context runs with a tiny model: every cache, caches that fail, and what is refused."""

from pathlib import Path

import pytest

from tests.benchmarks.longcontext_made import settings
from tests.cli.commands import LIMIT, save_tiny_model
from tierkv.benchmarks.longcontext import Session
from tierkv.benchmarks.longcontext_rows import ROWS_FILE, SETTINGS_FILE, Row, key_of
from tierkv.benchmarks.longcontext_summary import mismatches, unchecked
from tierkv.errors import ConfigError

CHILD = """
import os
from tierkv.benchmarks.longcontext_child import LongContext, main

class Bad(LongContext):
    def sample(self, task, sample, trace):
        if self.caches._name == "static" and {what!r} == "end" and sample == 0:
            os._exit(7)
        return super().sample(task, sample, trace)

    def _generate(self, ids, new_tokens, cache, clock):
        answer = super()._generate(ids, new_tokens, cache, clock)
        if self.caches is None or self.caches._name != "static" or new_tokens == 2:
            return answer
        if {what!r} == "memory":
            raise MemoryError("no more of it")
        if {what!r} == "wrong":
            answer[-1] += 1
        return answer

if __name__ == "__main__":
    main(Bad)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(session):
    found: list[Row] = []
    parts: list[tuple[str, int, int]] = []
    with session:
        assert session.missing == session.keys
        session.run(found.append, lambda cache, length, rows: parts.append((cache, length, rows)))
        assert session.missing == []
    return found, parts


def assert_wires(own, others):
    """Check that every wire that carried something says how long, how fast, and how fast this machine can."""
    assert all(one["wires"] is None for one in others)
    for one in own:
        assert {name: wire["bytes"] for name, wire in one["wires"].items()} == one["moved_bytes"]
        for wire in one["wires"].values():
            assert (wire["seconds"] > 0) == (wire["bytes"] > 0)
            assert wire["machine_bytes_per_second"] > 2**20
            if wire["bytes"]:
                assert wire["bytes_per_second"] == pytest.approx(wire["bytes"] / wire["seconds"], rel=0.01)
                share = wire["bytes_per_second"] / wire["machine_bytes_per_second"]
                assert wire["share"] == pytest.approx(share, abs=1e-4)
    assert any(one["wires"]["disk_to_device"]["bytes"] for one in own)


@pytest.mark.slow
def test_all_caches_give_the_same_tokens_with_a_tiny_model(tiny, tmp_path, one_thread):
    config = tmp_path / "mine.toml"
    config.write_text('block_size = 32\n[device]\ncapacity = "64MiB"\n[disk]\ncapacity = 0\n')
    caches = ("dynamic", "static", "quantized", "tierkv", f"tierkv:{config}")
    asked = settings(model=str(tiny), caches=caches, lengths=(1024,), tasks=("chat", "system_prompt"), max_new_tokens=6)
    session = Session(asked, tmp_path / "out", resume=False)
    assert "optimum-quanto" in session.left_out.get("quantized", "optimum-quanto")
    found, parts = run(session)
    assert [part[0] for part in parts] == session.caches
    assert [key_of(one) for one in found] == session.keys
    assert {one["error"] for one in found} == {None}
    assert mismatches(found, must_match=True) == []
    assert unchecked(found) == 0
    for one in found:
        assert len(one["tokens"]) == one["new_tokens"] == (18 if one["task"] == "chat" else 6)
        assert len(one["ttft_seconds_all"]) == (3 if one["task"] == "chat" else 1)
        assert one["peak_rss_bytes"] > 2**20
    own = [one for one in found if one["cache"] == "tierkv"]
    assert all(min(one["tier_peak_bytes"].values()) > 0 for one in own)  # all three tiers are in use
    assert all(sum(one["moved_bytes"].values()) > 0 for one in own)
    assert all(one["tier_peak_bytes"]["device"] <= one["tier_capacity_bytes"]["device"] for one in own)
    assert_wires(own, [one for one in found if "tierkv" not in one["cache"]])
    shared = [one["prefix_tokens"] for one in own if one["task"] == "system_prompt"]
    assert shared[0] == 0 < shared[1]  # the second conversation begins with the first one's system prompt
    assert all(one["prefix_tokens"] == 0 for one in own if one["task"] == "chat" and one["sample"] == 1)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [ROWS_FILE, SETTINGS_FILE, "trace.json"]
    assert session.trace is not None
    names = {event["name"] for event in session.trace["traceEvents"]}
    assert {"token", "attention, layer 0", "attention, layer 7"} <= names
    assert any(name.startswith("fetch disk") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["wrong", "memory", "end"])
def test_a_cache_that_fails_is_rows_and_not_the_end(tiny, tmp_path, monkeypatch, one_thread, what):
    (tmp_path / "bad_child.py").write_text(CHILD.format(what=what))
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = settings(model=str(tiny), max_new_tokens=4)
    found, _ = run(Session(asked, tmp_path / "out", resume=False, child="bad_child"))
    assert [one["cache"] for one in found] == ["dynamic", "dynamic", "static", "static"]
    static = found[2:]
    if what == "wrong":
        assert [one["first_difference"] for one in static] == [3, 3]
        assert mismatches(found, must_match=True) == static
    elif what == "memory":
        assert [one["error"] for one in static] == ["MemoryError: no more of it"] * 2
    else:
        assert "exit code 7" in static[0]["error"]
        assert static[1]["error"] is None  # another process went on
        assert static[1]["agreement"] == 1.0


@pytest.mark.slow
def test_what_cannot_be_run_is_refused_and_leaves_nothing(tiny, tmp_path, one_thread):
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=rf"16,384 tokens are more than the {LIMIT:,}.*at least 16,384"):
        Session(settings(model=str(tiny), lengths=(512, 16384)), out, resume=False)
    with pytest.raises(ConfigError, match="needle at 128 tokens"):
        Session(settings(model=str(tiny), lengths=(128, 512)), out, resume=False)
    assert list(out.iterdir()) == []


@pytest.mark.slow
def test_a_configuration_that_does_not_fit_is_rows(tiny, tmp_path, one_thread):
    config = tmp_path / "small.toml"
    config.write_text('[device]\ncapacity = "1MiB"\n[disk]\ncapacity = 0\n')
    asked = settings(
        model=str(tiny), caches=("dynamic", f"tierkv:{config}"), lengths=(2048,), samples=1, max_new_tokens=2
    )
    found, _ = run(Session(asked, tmp_path / "out", resume=False))
    assert found[0]["error"] is None
    assert "device.capacity" in found[1]["error"]
    assert Path(asked.caches[1].removeprefix("tierkv:")).exists()
