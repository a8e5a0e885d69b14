"""What ``tierkv top`` shows of an engine: its numbers, and nothing that steers a terminal."""

from io import StringIO

from rich.console import Console

from tierkv.cli import top_show
from tierkv.metrics import Counters, PrefixStats, Stats, TierStats
from tierkv.watch import EngineSnapshot, Found, ProcessSnapshot, Rates


def shown(stats, rates=None, name="tiny", silent=None):
    engine = EngineSnapshot(1, name, stats)
    found = Found([ProcessSnapshot(7, 0.0, "run\x1b[2J", 1.0, [engine])], silent or {})
    rates_by_engine = {(7, 1): rates} if rates else {}
    page = StringIO()
    Console(file=page, width=120).print(top_show.render(found, rates_by_engine))
    return page.getvalue(), top_show.lines(found, rates_by_engine)[0]


def busy_stats():
    tiers = {
        "device": TierStats(100 << 20, 50 << 20, 60 << 20, 3, 1, 10),
        "host": TierStats(0, 0, 0, 0, 0, 0),
        "disk": TierStats(1 << 30, 1 << 28, 1 << 28, 5, 0, 100),
    }
    prefix = PrefixStats(
        lookups=2, prompt_tokens=100, matched_tokens_memory=30, matched_tokens_disk=20, used_tokens=40, failed_restores=3,
        waiting_blocks=4, shed_blocks=6, store={"queued_bytes": 5 << 10},
    )  # fmt: skip
    return Stats(
        tiers=tiers, moved_bytes={"device_to_disk": 3 << 20, "disk_to_device": 0}, kv_bytes_total=1, caches=2,
        read_path="paged", read_path_reason="", tiered_layers=4, native_layers=0, overlap=0.25, note="a note",
        counters=Counters(forwards=10, tokens=1000, stall_seconds=2.0, copy_seconds=4.0, blocks_lost=1), prefix=prefix,
    )  # fmt: skip


def test_what_is_shown_are_the_engines_numbers():
    text, line = shown(busy_stats())
    for part in (
        "50.0%", "25.0%", "device → disk", "3MiB", "2.00 ms stalled a token, overlap 25.0%", "50.0% of 100 prompt tokens",
        "5KiB queued, 4 blocks wait, 6 shed", "1 blocks lost, 3 failed restores", "a note", "1,000 tokens in 10 forwards",
    ):  # fmt: skip
        assert part in text, part
    assert "disk → device" not in text  # a wire that carried nothing
    for part in ("device=50.0% disk=25.0%", "prefix=50.0%", "queued=5KiB", "errors: 1 blocks lost, 3 failed restores"):
        assert part in line, part
    rates = Rates(2.0, 12.34, {"device_to_disk": 1 << 20, "disk_to_device": 0.0}, 0.001, 0.5)
    text, line = shown(busy_stats(), rates)
    for part in ("12.3 tokens/s", "1MiB/s", "1.00 ms stalled a token, overlap 50.0%"):
        assert part in text, part
    for part in ("tokens/s=12.3", "device_to_disk=1MiB/s", "stall/token=1.00ms", "overlap=50.0%"):
        assert part in line, part


def test_another_process_cannot_steer_the_terminal():
    stats = busy_stats()
    object.__setattr__(stats, "note", "\x1b]0;title\x07")
    for text in shown(stats, name="evil\x1b[31m\n", silent={"tierkv-8.sock": "no answer within 2 s"}):
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "evil?[31m?" in text
    assert "tierkv-8.sock: no answer within 2 s" in shown(stats, silent={"tierkv-8.sock": "no answer within 2 s"})[0]


def test_an_engine_without_an_answer_is_shown_as_that():
    text, line = shown(None)
    assert "no answer from this engine" in text
    assert line.endswith("no answer")
