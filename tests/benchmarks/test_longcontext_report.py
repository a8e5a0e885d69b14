"""What the rows of a long-context run come to: times, figures, sentences, the page and the table."""

import csv
from itertools import pairwise

import pytest

from tests.benchmarks.longcontext_made import row
from tierkv.benchmarks.longcontext_headline import headline
from tierkv.benchmarks.longcontext_report import make_page, write_csv
from tierkv.benchmarks.longcontext_summary import cells, scores, spread_of
from tierkv.benchmarks.longcontext_timing import Clock, times_of


def test_times_of_a_conversation():
    clocks = []
    for began, *times in ((0.0, 2.0, 2.5, 3.5), (10.0, 11.0)):
        clock = Clock()
        clock.began, clock.times = began, times
        clocks.append(clock)
    found = times_of(clocks)
    assert found["ttft_seconds"] == 2.0
    assert found["ttft_seconds_all"] == [2.0, 1.0]
    assert found["inter_token_seconds"]["p50"] == 0.75
    assert found["tokens_per_second"] == pytest.approx(2 / 1.5, abs=1e-4)
    assert found["new_tokens"] == 4
    nothing = times_of([Clock()])
    assert (nothing["ttft_seconds"], nothing["tokens_per_second"], nothing["new_tokens"]) == (None, None, 0)


def test_a_clock_leaves_out_the_prompt():
    clock = Clock()
    clock.begin()
    for _ in range(3):
        clock.put(None)
    assert len(clock.times) == 2
    assert all(one <= other for one, other in pairwise([clock.began, *clock.times]))


def test_figures_of_a_cache_at_a_length():
    rows = [row(score=1.0), row(sample=1, score=0.0, ttft_seconds=1.5), row("static", error="no memory")]
    dynamic, static = cells(rows)
    assert (dynamic["rows"], dynamic["errors"], dynamic["score"]) == (2, 0, 0.5)
    spread = dynamic["ttft_seconds"]
    assert (spread.median, spread.least, spread.most) == (1.0, 0.5, 1.5)
    assert dynamic["kv_in_memory_bytes"].median == 7
    assert (static["errors"], static["score"], static["peak_rss_bytes"]) == (1, None, None)
    assert scores(rows) == {"needle": {"dynamic": {"512": 0.5}, "static": {"512": None}}}
    assert spread_of([None]) is None


RESULT = {
    "model": "M", "dtype": "float32", "device": "cpu", "must_match": True, "missing": 0, "rows": 3, "kv_bytes_per_token": 4,
    "versions": {"tierkv": "1"}, "tasks": ["needle"], "lengths": [512], "caches": ["dynamic", "tierkv"], "samples": 2, "seed": 0,
    "machine": {"processor": "P", "cores": 2, "memory_bytes": 2**30, "accelerator": None}, "file_system": "ext4",
    "left_out": [{"cache": "offloaded", "reason": "<none>"}], "command": "tierkv bench longcontext --out x",
}  # fmt: skip


def test_the_page_says_what_was_found():
    good = [row(), row("tierkv", agreement=1.0, tier_peak_bytes={"device": 2, "host": 1, "disk": 9})]
    said = " ".join(headline(RESULT, good))
    assert "Every exact cache gave dynamic's tokens in all 1 answers compared" in said
    assert "tierkv held 3B in memory where dynamic held 7B" in said
    bad = [*good, row("static", agreement=0.5, first_difference=1), row("tierkv", sample=1, error="out of <memory>")]
    assert "1 of 2 answers of exact caches are not dynamic's" in " ".join(headline(RESULT | {"missing": 2}, bad))
    machine = {"processor": "P", "cores": 2, "memory_bytes": 2**30, "accelerator": None, "load_average": (3.26, 4, 5)}
    busy = RESULT | {"machine": machine}
    assert "3.3 ready to run on 2 cores" in make_page(busy, good).html()
    html = make_page(RESULT, bad).html()
    for text in ("out of &lt;memory&gt;", "static, needle at 512 tokens, sample 0: token 1 is the first", "&lt;none&gt;",
                 "KV in memory against context", "needle: score with tierkv", "Score by task", RESULT["command"]):  # fmt: skip
        assert str(text) in html
    assert "Nothing was measured" in make_page(RESULT, []).html()


def test_a_known_prefix_is_told_by_itself():
    shared = {"task": "system_prompt", "agreement": 1.0}
    rows = [row(task="system_prompt", sample=1, ttft_seconds=4.0), row("tierkv", sample=0, **shared, prefix_tokens=0),
            row("tierkv", sample=1, **shared, prefix_tokens=300, ttft_seconds=0.25)]  # fmt: skip
    assert cells(rows)[1]["ttft_seconds"].median == 0.5
    said = " ".join(headline(RESULT, rows))
    assert "the later ones' first token took 250 ms with tierkv and 4 s with dynamic" in said
    assert "system prompt" not in " ".join(headline(RESULT, rows[:2]))


def test_bfloat16_is_reported_and_said():
    said = " ".join(headline(RESULT | {"must_match": False, "dtype": "bfloat16"}, [row("tierkv", agreement=0.75)]))
    assert "In bfloat16 exact caches agree with dynamic on 75.0% of tokens" in said


def test_the_table_has_a_column_for_every_figure(tmp_path):
    write_csv(tmp_path / "results.csv", [row(), row("tierkv", error="a, b", moved_bytes={"disk_to_device": 3})])
    with (tmp_path / "results.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["tier_peak_bytes.host"], first["inter_token_seconds.p50"], first["moved_bytes.disk_to_device"]) == (
        "1",
        "0.1",
        "",
    )
    assert (second["error"], second["moved_bytes.disk_to_device"]) == ("a, b", "3")
    assert "moved_bytes" not in first
    assert "tokens" not in first
