"""What one token costs against the length before it: with a cache, and when everything is computed again.

With a cache a token reads the past once, so its time is a line; without, each token is a forward over all of it. A whole answer
is a sum of such tokens, and that is where the founding claim comes from: O(n) a sequence instead of O(n^2).
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tierkv.benchmarks.probe import Decode, Probe, synchronize

Advance = Callable[[], None]


def with_cache(
    model: PreTrainedModel, contexts: Sequence[int], rounds: int, folder: Path, advance: Advance = lambda: None
) -> dict[str, Any]:
    """Time a decoded token at several contexts, all on the device, in turns; return the points and the line through them.

    Args:
        model: tierkv must not be attached to it.
        contexts: tokens in the past, which is random K and V.
        rounds: timed tokens of each; their median counts.
        folder: not written to, as no disk tier is on.
        advance: called ``len(contexts) + rounds`` times.

    Raises:
        TierKVError: one does not fit.
    """
    points = Probe(model, folder).decode([Decode(context, "device") for context in contexts], rounds, advance)
    seconds = [point.seconds for point in points]
    return {
        **line(contexts, seconds),
        "unit": "seconds of one token, against tokens in the past",
        "points": [{"context": context, "seconds": taken} for context, taken in zip(contexts, seconds, strict=True)],
        "fill": "synthetic: random K and V of the given length, not prefilled",
        "rounds": rounds,
    }


def without_cache(
    model: PreTrainedModel, lengths: Sequence[int], rounds: int, advance: Advance = lambda: None
) -> dict[str, Any]:
    """Time one token when all K and V are computed again, at several lengths; return the points and the exponent of n.

    Args:
        model: tierkv must not be attached to it.
        lengths: tokens that the forward is given.
        rounds: timed forwards of each, in turns; their median counts.
        advance: called ``rounds`` times.
    """
    known = int(model.config.get_text_config(decoder=True).vocab_size)
    ids = torch.arange(max(lengths), device=model.device)[None] % known
    times: list[list[float]] = [[] for _ in lengths]
    with torch.inference_mode():
        model(input_ids=ids[:, : min(lengths)], use_cache=False, logits_to_keep=1)  # warm up
        for _ in range(rounds):
            for own, length in zip(times, lengths, strict=True):
                synchronize(model)
                began = time.perf_counter()
                model(input_ids=ids[:, :length], use_cache=False, logits_to_keep=1)
                synchronize(model)
                own.append(time.perf_counter() - began)
            advance()
    seconds = [statistics.median(own) for own in times]
    return {
        "exponent": exponent(lengths, seconds),
        "points": [{"tokens": length, "seconds": taken} for length, taken in zip(lengths, seconds, strict=True)],
        "rounds": rounds,
    }


def line(xs: Sequence[float], ys: Sequence[float]) -> dict[str, float]:
    """Return ``slope``, ``intercept`` and ``r2`` of the line of least squares.

    Raises:
        ValueError: fewer than three points, or all at one place: any line would do.
    """
    if len(xs) < 3 or len(set(xs)) < 2:
        raise ValueError("a line is fitted to three points or more, not all at one place")
    slope, intercept = statistics.linear_regression(xs, ys)
    mean = statistics.fmean(ys)
    around = sum((y - mean) ** 2 for y in ys)
    left = sum((y - slope * x - intercept) ** 2 for x, y in zip(xs, ys, strict=True))
    return {"slope": slope, "intercept": intercept, "r2": 1 - left / around if around else 1.0}


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the ``p`` of the ``x^p`` that fits best: the slope of the logarithms.

    Raises:
        ValueError: as ``line``.
    """
    return line([math.log(x) for x in xs], [math.log(y) for y in ys])["slope"]


def times_faster(cached: dict[str, Any], recomputed: dict[str, Any]) -> dict[str, float]:
    """Return how many times as fast a token is with a cache, at every length that both were measured at."""
    seconds = {point["context"]: point["seconds"] for point in cached["points"]}
    return {
        str(point["tokens"]): point["seconds"] / seconds[point["tokens"]]
        for point in recomputed["points"]
        if point["tokens"] in seconds
    }
