"""Settings and rows of long-context runs that nobody ran."""

from tierkv.benchmarks.longcontext_settings import Settings

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
        "block_size": None, "peak_rss_bytes": 100, "error": error, "agreement": None, "first_difference": None, **more,
    }  # fmt: skip
