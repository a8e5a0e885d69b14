"""Settings, rows and a report of long-context runs that nobody ran; the trace in it is of an engine that did."""

import time

from tierkv.benchmarks.longcontext_report import make_page
from tierkv.benchmarks.longcontext_settings import Settings
from tierkv.benchmarks.longcontext_trace import MODEL, TOKEN, Span, chrome_trace, watched
from tierkv.benchmarks.longcontext_wires import wires_of
from tierkv.testing.engines import PlainCache, forward, random_tokens, small_engine, small_layout

PEAKS = {"device": 6, "host": 1, "disk": 9}


def settings(**changes):
    given = {"model": "m", "dtype": "float32", "lengths": (512,), "tasks": ("needle",), "caches": ("dynamic", "static"),
             "samples": 2, "seed": 0}  # fmt: skip
    return Settings(**given | changes)


def row(cache="dynamic", sample=0, tokens=(1, 2, 3), *, length=512, task="needle", error=None, score=1.0, **more):
    return {
        "cache": cache, "length": length, "task": task, "sample": sample, "depth": sample / 2, "prompt_tokens": 500,
        "dtype": "float32", "exact": cache != "quantized", "score": None if error else score, "output": "x",
        "tokens": None if error else list(tokens), "ttft_seconds": 0.5, "ttft_seconds_all": [0.5],
        "inter_token_seconds": {"p50": 0.1, "p99": 0.2}, "tokens_per_second": 10.0, "new_tokens": 3,
        "tier_peak_bytes": PEAKS, "moved_bytes": None, "stall_seconds": None, "prefix_tokens": None, "read_path": None,
        "block_size": None, "wires": None, "peak_rss_bytes": 100, "error": error, "agreement": None,
        "first_difference": None, **more,
    }  # fmt: skip


def a_trace():
    """Return the trace of one forward of a small engine whose blocks lie in host memory, mostly."""
    layout = small_layout("plain")
    with small_engine(layout, device_tokens=24, host_tokens=96) as engine:
        batch, plain = engine.open(), PlainCache(layout)
        for step in range(12):
            forward(batch, plain, random_tokens(layout, 1, 5, step))
        with watched(engine) as spans:
            began = time.perf_counter()
            forward(batch, plain, random_tokens(layout, 1, 1, 99))
            token = Span(MODEL, TOKEN, began, time.perf_counter())
    return chrome_trace(spans, token, {"tokens before": 60, "cache": "tierkv", "model": "m"})


CACHES = {
    "dynamic": 1.0,
    "static": 0.9,
    "quantized": 0.3,
    "tierkv": 0.5,
    "tierkv:a-rather-long-name-of-a-config.toml": 0.7,
}
LENGTHS = (256, 512, 1024, 2048)


def a_report():
    """Return the page of a run with every kind of row: five caches, lengths, depths, wires, an error, a difference."""
    rows = []
    for length in LENGTHS:
        for number, (cache, share) in enumerate(CACHES.items()):
            tiered = cache.startswith("tierkv")
            stats = {"moved_bytes": {"disk_to_device": length << 16, "host_to_device": 0},
                     "moved_seconds": {"disk_to_device": length / 2000, "host_to_device": 0.0}}  # fmt: skip
            nothing: dict[str, dict[str, float]] = {"moved_bytes": {}, "moved_seconds": {}}
            rates = {"disk_to_device": 3e9, "host_to_device": 9e9}
            rows += [
                row(
                    cache, sample, length=length, task=task, score=(sample + number) % 3 / 2,
                    depth=sample / 4 if task == "needle" else None, ttft_seconds=length / 1000 * (1 + sample / 5),
                    tokens_per_second=2e4 / (length + 500 * number), peak_rss_bytes=(600 << 20) + length * (number << 12),
                    tier_peak_bytes={"device": int(length * share * 46080), "host": 0, "disk": 9 if tiered else 0},
                    agreement=None if cache == "dynamic" else 0.7 if cache == "quantized" else 1.0,
                    **({"wires": wires_of(stats, nothing, rates), "moved_bytes": stats["moved_bytes"],
                        "read_path": "paged", "block_size": 32, "prefix_tokens": 0} if tiered else {}),
                )
                for task in ("needle", "doc_qa")
                for sample in range(5)
            ]  # fmt: skip
    rows[-1] |= {"error": "CapacityError: device.capacity cannot hold the working set of one sequence", "score": None,
                 "agreement": None}  # fmt: skip
    result = {
        "model": "SmolLM2-135M-Instruct", "dtype": "float32", "device": "cpu", "must_match": True, "missing": 0,
        "rows": len(rows), "kv_bytes_per_token": 46080, "versions": {"tierkv": "1", "torch": "2.9"},
        "tasks": ["needle", "doc_qa"], "lengths": list(LENGTHS), "caches": list(CACHES), "samples": 5, "seed": 0,
        "machine": {"processor": "A processor", "cores": 2, "memory_bytes": 2**34, "accelerator": None},
        "file_system": "ext4", "left_out": [{"cache": "offloaded", "reason": "transformers cannot run it on a CPU"}],
        "command": "tierkv bench longcontext --lengths 256,512,1k,2k --tasks needle,doc_qa --samples 5 --out out",
    }  # fmt: skip
    return make_page(result, rows, a_trace())
