"""One decoded token, copy by copy: what the wires, the waiting and attention were busy with, as a trace for Perfetto.

    tracks   model (the token, and attention of every layer), waits, and every thread that copies

Only where the device is a CPU: there a copy's work is all in the thread that runs it. What is watched is taken off again.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from tierkv.tier import Tier
from tierkv.transfer import Copy, ThreadTransfers, run_here

MODEL: Final = "model"
WAITS: Final = "waits"
TOKEN: Final = "token"
_TO_MICROSECONDS: Final = 1e6
_SHORTEST_WAIT: Final = 5e-6


class Span(NamedTuple):
    """Something that took time, in seconds of the monotonic clock.

    Attributes:
        track: what was busy.
        name: with what.
        begin: when it began.
        end: when it ended.
        num_bytes: that were moved.
    """

    track: str
    name: str
    begin: float
    end: float
    num_bytes: int = 0


def why_not(engine: Any) -> str | None:
    """Say why an engine cannot be watched; None where it can."""
    return None if isinstance(engine.transfers, ThreadTransfers) else "a token can be traced on a CPU only"


@contextmanager
def watched(engine: Any) -> Iterator[list[Span]]:
    """Give a list that gets a span for every copy, wait and attention of an engine while the block runs."""
    spans: list[Span] = []
    reader, name = (engine.paged, "attend") if not engine.gathered_because else (engine.gathered, "gather")
    submit = engine.transfers.submit
    changed = ((engine.transfers, "submit"), (engine.fetcher, "order"), (reader, name))

    def traced(copy: Copy) -> Copy:
        def run() -> None:
            began = time.perf_counter()
            run_here(copy)
            spans.append(_copy_span(copy, began))

        # All stages of it, in its order, by the worker that would run them anyway.
        return Copy(copy.wire, copy.num_bytes, load=run)

    engine.transfers.submit = lambda copies: submit([traced(copy) for copy in copies])
    engine.fetcher.order = _timed(engine.fetcher.order, spans, WAITS, "wait for a fetch")
    setattr(reader, name, _timed(getattr(reader, name), spans, MODEL, "attention" if name == "attend" else "gather"))
    try:
        yield spans
    finally:
        for target, attribute in changed:
            delattr(target, attribute)  # what the class has shows again


def chrome_trace(spans: Sequence[Span], token: Span, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spans that overlap a token as a trace that Perfetto and Chrome open, its times from the token's begin.

    Args:
        spans: of all that was watched.
        token: the one decoded token.
        about: what is said of the trace.
    """
    seen = sorted((one for one in spans if one.end > token.begin and one.begin < token.end), key=lambda one: one.begin)
    threads = sorted({one.track for one in seen} - {MODEL, WAITS})
    tracks = {track: number for number, track in enumerate([MODEL, WAITS, *threads], 1)}
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": track}}
        for track, number in tracks.items()
    ]
    events += [
        {
            "name": one.name,
            "cat": "tierkv",
            "ph": "X",
            "ts": round((one.begin - token.begin) * _TO_MICROSECONDS, 3),
            "dur": round((one.end - one.begin) * _TO_MICROSECONDS, 3),
            "pid": 1,
            "tid": tracks[one.track],
            "args": {"bytes": one.num_bytes} if one.num_bytes else {},
        }
        for one in (token, *seen)
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about)}


def timeline_rows(trace: Mapping[str, Any]) -> dict[str, list[tuple[float, float, str]]]:
    """Return what a trace shows as rows of ``tierkv.charts.timeline``: times in seconds.

    The token has a row of its own: what it is made of lies in it, and would be drawn over it.
    """
    names = {one["tid"]: one["args"]["name"] for one in trace["traceEvents"] if one["ph"] == "M"}
    rows: dict[str, list[tuple[float, float, str]]] = {name: [] for name in (TOKEN, *names.values())}
    for one in trace["traceEvents"]:
        if one["ph"] == "X":
            begin = one["ts"] / _TO_MICROSECONDS
            row = TOKEN if one["name"] == TOKEN else names[one["tid"]]
            rows[row].append((begin, begin + one["dur"] / _TO_MICROSECONDS, one["name"]))
    return rows


def _timed(function: Callable[..., Any], spans: list[Span], track: str, name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            ended = time.perf_counter()
            if track != WAITS or ended - began > _SHORTEST_WAIT:
                layer = f", layer {args[0]}" if track == MODEL else ""
                spans.append(Span(track, f"{name}{layer}", began, ended))

    return run


def _copy_span(copy: Copy, began: float) -> Span:
    ended, wire = time.perf_counter(), copy.wire
    verb = "fetch" if wire.destination is Tier.DEVICE else "move"
    return Span(threading.current_thread().name, f"{verb} {wire.label}", began, ended, copy.num_bytes)
