"""What the times of ``tierkv bench restore`` come to: the row of one prompt length, and the bounds that it should keep."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

MOST_LEFT: Final = 0.05
"""More of a file than this in memory, and it was not read from the disk."""

LEAST_RESTORE_RATIO: Final = 0.65
MOST_OVERHEAD_SECONDS: Final = 0.06
LEAST_TTFT_RATIO: Final = 60.0
LEAST_TIMES_FILES: Final = 1.5
LEAST_TIMES_DEEPCOPY: Final = 2.0
MOST_CPU_PERCENT: Final = 3.0

Answer = Mapping[str, Any]


@dataclass
class Times:
    """Everything that was measured at one prompt length. Times in seconds, rates in bytes per second.

    Attributes:
        tokens: of the prompt.
        kv_bytes: of its KV.
        chunks: of a cold prefill, by ``prefill_chunk_size``.
        chunk: the fastest.
        answers: what the contenders answered, by name, in the order of the runs.
        raw: rates of plain reads, by way.
        left: share of a file that stayed in the page cache, of each run after a restart.
        decode_step: of one token decoded after the prompt, by tierkv.
    """

    tokens: int
    kv_bytes: int
    chunks: dict[int | None, float] = field(default_factory=dict)
    chunk: int | None = None
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    raw: dict[str, list[float]] = field(default_factory=dict)
    left: list[float] = field(default_factory=list)
    decode_step: float = 0.0

    def note(self, name: str, answer: Answer) -> None:
        """Take down a run of a contender."""
        self.answers.setdefault(name, []).append(answer)
        if "left" in answer:
            self.left.append(answer["left"])

    def note_raw(self, way: str, rate: float | None, left: float) -> None:
        """Take down a plain read; None where there is no such way to read."""
        if rate is not None:
            self.raw.setdefault(way, []).append(rate)
            self.left.append(left)

    def of(self, name: str, key: str = "seconds") -> list[float]:
        """Return one number of each run of a contender."""
        return [answer[key] for answer in self.answers[name]]


def row_of(times: Times) -> dict[str, Any]:
    """Return what one prompt length came to, as it stands in the record."""
    asked = ("cold", "warm_process", "warm_restart", "deepcopy", "torch_load", "safetensors")
    every = {name: times.of(name) for name in asked}
    ttft = {name: statistics.median(seconds) for name, seconds in every.items()}
    restored = [answer["restored_bytes"] / answer["restore_seconds"] for answer in times.answers["warm_restart"]]
    restore, raw = statistics.median(restored), max(statistics.median(rates) for rates in times.raw.values())
    first = times.answers["cold"][0]["token"]
    wrong = {name: sum(answer["token"] != first for answer in answers) for name, answers in times.answers.items()}
    row = {
        "prompt_tokens": times.tokens,
        "kv_bytes": times.kv_bytes,
        "ttft_seconds": {name: round(seconds, 5) for name, seconds in ttft.items()},
        "ttft_seconds_all": {name: [round(one, 5) for one in seconds] for name, seconds in every.items()},
        "ttft_ratio_restart": round(ttft["cold"] / ttft["warm_restart"], 2),
        "restore_bytes_per_second": round(restore),
        "restore_bytes_per_second_all": [round(rate) for rate in restored],
        "raw_read_bytes_per_second": round(raw),
        "raw_read_bytes_per_second_all": {way: [round(rate) for rate in rates] for way, rates in times.raw.items()},
        "restore_ratio": round(restore / raw, 3),
        "page_cache_dropped": max(times.left) <= MOST_LEFT,
        "page_cache_left": round(max(times.left), 4),
        "attach_seconds": round(statistics.median(times.of("warm_restart", "opened")), 5),
        "decode_step_seconds": round(times.decode_step, 5),
        "prefill_chunk_size": times.chunk,
        "chunk_seconds": {str(chunk): round(seconds, 4) for chunk, seconds in times.chunks.items()},
        "prefilled_tokens": {name: int(max(times.of(name, "prefilled"))) for name in ("cold", "warm_restart")},
        "restored_tokens": int(min(times.of("warm_restart", "restored_tokens"))),
        "tokens_equal": not any(wrong.values()),
        "wrong_tokens": {name: number for name, number in wrong.items() if number},
        "write_behind": _write_behind(times),
    }
    return {**row, "targets": _targets(row, ttft)}


def _write_behind(times: Times) -> dict[str, Any]:
    """Return what writing the prompt to the store adds to computing it, until it is all written."""
    more: dict[str, Any] = {}
    for name, key in (("cpu", "cpu_seconds"), ("wall", "seconds"), ("ttft", "first")):
        kept, not_kept = times.of("prefill_kept", key), times.of("prefill", key)
        more[f"{name}_percent"] = round(100 * (statistics.median(kept) / statistics.median(not_kept) - 1), 2)
        more[f"{name}_seconds"] = {
            "kept": [round(one, 4) for one in kept],
            "not_kept": [round(one, 4) for one in not_kept],
        }
    return more


def _targets(row: Mapping[str, Any], ttft: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Return what was reached of what this should reach on two CPU cores, by name."""
    restart = ttft["warm_restart"]
    most = row["kv_bytes"] / row["raw_read_bytes_per_second"] + row["decode_step_seconds"] + MOST_OVERHEAD_SECONDS
    return {
        "restore_ratio": _at_least(row["restore_ratio"], LEAST_RESTORE_RATIO),
        "ttft_seconds_restart": _at_most(restart, most),
        "ttft_ratio_restart": _at_least(row["ttft_ratio_restart"], LEAST_TTFT_RATIO),
        "times_as_fast_as_torch_load": _at_least(ttft["torch_load"] / restart, LEAST_TIMES_FILES),
        "times_as_fast_as_safetensors": _at_least(ttft["safetensors"] / restart, LEAST_TIMES_FILES),
        "times_as_fast_as_deepcopy": _at_least(ttft["deepcopy"] / ttft["warm_process"], LEAST_TIMES_DEEPCOPY),
        "write_behind_cpu_percent": _at_most(row["write_behind"]["cpu_percent"], MOST_CPU_PERCENT),
    }


def _at_least(value: float, bound: float) -> dict[str, Any]:
    return {"value": round(value, 4), "at_least": bound, "met": value >= bound}


def _at_most(value: float, bound: float) -> dict[str, Any]:
    return {"value": round(value, 4), "at_most": round(bound, 4), "met": value <= bound}
