"""Predicted against measured: the cost model is fitted to some points of this machine and asked for others.

All points, those to fit and those to check, are measured in the same rounds. The disk's rate belongs to the run: restores are
predicted with the plain read that was measured beside them. Then a small trace is served and simulated with the same costs.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from transformers import PreTrainedModel

from tierkv.benchmarks.filled import layout_of
from tierkv.benchmarks.predict_served import Trace
from tierkv.benchmarks.predict_simulated import KINDS, compare
from tierkv.benchmarks.probe import RESIDENCIES, Decode, Probe
from tierkv.benchmarks.probe_store import Restore, StoreProbe
from tierkv.cost import Costs, Line
from tierkv.fit import Fit, Point, fit
from tierkv.tier import Tier, Wire

BOUNDS: Final = {"median_abs_error": 0.2, "max_abs_error": 0.4}
"""What the errors of points that were not fitted must stay within."""


@dataclass(frozen=True)
class Plan:
    """Which points are measured.

    Attributes:
        fit_contexts: decoded tokens that are fitted, in every residency.
        test_contexts: those that are predicted.
        fit_restores: restored prefixes that are fitted, as ``(tokens, block_size)``.
        test_restores: those that are predicted, in tokens.
        fit_prefills: forwards that are fitted, as ``(tokens, past)``.
        test_prefills: those that are predicted.
        rounds: timed repeats of each.
        written: tokens of a prefix that is written, to know that rate too.
        trace: that is served and simulated.
    """

    fit_contexts: tuple[int, ...] = (500, 3000, 9000)
    test_contexts: tuple[int, ...] = (1000, 2000, 5000, 7000)
    fit_restores: tuple[tuple[int, int], ...] = ((1000, 32), (4000, 32), (8000, 32), (4000, 128))
    test_restores: tuple[int, ...] = (2000, 3000, 6000)
    fit_prefills: tuple[tuple[int, int], ...] = ((128, 0), (512, 0), (2048, 0), (512, 2048))
    test_prefills: tuple[tuple[int, int], ...] = ((256, 0), (1024, 0), (1024, 1024))
    rounds: int = 7
    written: int = 2000
    trace: Trace = field(default_factory=Trace)

    @property
    def steps(self) -> int:
        """How often ``measure`` calls ``advance``."""
        decoded = len(RESIDENCIES) * (len(self.fit_contexts) + len(self.test_contexts))
        served = self.trace.rounds * (1 + self.trace.requests)
        return decoded + len(self.fit_restores) + len(self.test_restores) + 3 * self.rounds + served


Row = dict[str, Any]


def measure(
    model: PreTrainedModel, plan: Plan, folder: Path, block_size: int, advance: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Measure, fit, and predict.

    Args:
        model: that decodes, prefills and restores.
        plan: which points.
        folder: where files go.
        block_size: tokens, of the caches that decode and of the prefixes that are predicted.
        advance: called ``plan.steps`` times.

    Returns:
        ``rows`` (predicted and measured, of points that were not fitted), ``fit_rows`` (of those that were),
        ``median_abs_error`` and ``max_abs_error`` of ``rows``, ``costs``, ``fit_errors`` and what else is known of the ``trace``.

    Raises:
        TierKVError: something does not fit, or the store failed.
    """
    probe = Probe(model, folder)
    size = {"block_size": block_size}
    decodes = [
        Decode(context, residency, size)
        for context in (*plan.fit_contexts, *plan.test_contexts)
        for residency in RESIDENCIES
    ]
    restores = [Restore(tokens, {"block_size": own}) for tokens, own in plan.fit_restores]
    restores += [Restore(tokens, size) for tokens in plan.test_restores]
    prefills = (*plan.fit_prefills, *plan.test_prefills)

    decoded = probe.decode(decodes, plan.rounds, advance)
    prefilled = probe.prefill(prefills, plan.rounds, advance)
    restored = StoreProbe(model, folder).restore(restores, plan.rounds, advance)

    first = len(plan.fit_contexts) * len(RESIDENCIES), len(plan.fit_prefills), len(plan.fit_restores)
    known: list[Point] = [*decoded[: first[0]], *prefilled[: first[1]], *restored[: first[2]]]
    fitted = fit(len(layout_of(model).layers), known)
    labels = [
        *({"kind": "decode", "context": one.context, "residency": one.residency} for one in decodes),
        *({"kind": "prefill", "tokens": tokens, "past": past} for tokens, past in prefills),
        *({"kind": "restore", "tokens": one.tokens, "block_size": one.settings["block_size"]} for one in restores),
    ]
    rows = [_row(label, fitted, point) for label, point in zip(labels, [*decoded, *prefilled, *restored], strict=True)]
    parts = (rows[: len(decoded)], rows[len(decoded) : len(decoded) + len(prefilled)], rows[-len(restored) :])
    fit_rows = [row for part, count in zip(parts, first, strict=True) for row in part[:count]]
    test_rows = [row for part, count in zip(parts, first, strict=True) for row in part[count:]]
    written = StoreProbe(model, folder).write([Restore(plan.written, size)], plan.trace.rounds, advance)
    costs = with_writes(fitted.costs, plan.written * probe.token_bytes / written[0], cuda=model.device.type == "cuda")
    served = compare(model, plan.trace, costs, folder, block_size, advance)
    test_rows += served.pop("rows")
    return {
        "rows": test_rows,
        "fit_rows": fit_rows,
        **summary(test_rows),
        "by_kind": {
            kind: summary([row for row in test_rows if row["kind"] == kind]) for kind in (*fitted.errors, *KINDS)
        },
        "trace": served,
        "fit_errors": {kind: asdict(errors) for kind, errors in fitted.errors.items()},
        "costs": describe(fitted),
        "raw_read_bytes_per_second": round(fitted.raw_bytes_per_second),
    }


def with_writes(costs: Costs, bytes_per_second: float, *, cuda: bool) -> Costs:
    """Return costs that know the way down too: the store's own rate, and of a GPU the cable that is known the other way."""
    above = Tier.HOST if cuda else Tier.DEVICE
    wires = {**costs.wires, Wire(above, Tier.DISK): Line(0.0, bytes_per_second)}
    if cuda:
        wires.setdefault(Wire(Tier.DEVICE, Tier.HOST), wires[Wire(Tier.HOST, Tier.DEVICE)])
    return replace(costs, wires=wires)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the median and the largest error of rows, either sign."""
    errors = [abs(row["error"]) for row in rows]
    return {"median_abs_error": round(statistics.median(errors), 4), "max_abs_error": round(max(errors), 4)}


def describe(fitted: Fit) -> dict[str, Any]:
    """Return the parameters with their units in their names, for a record."""
    costs = fitted.costs
    return {
        "step_seconds": costs.step_seconds,
        "kv_bytes_per_second": {tier.label: rate for tier, rate in costs.kv_bytes_per_second.items()},
        "wires": {wire.label: asdict(line) for wire, line in costs.wires.items()},
        "overlap": costs.overlap,
        "token_seconds": costs.token_seconds,
        "pair_seconds": costs.pair_seconds,
        "past_pair_seconds": costs.past_pair_seconds,
        "restore_seconds": costs.restore_seconds,
        "block_seconds": costs.block_seconds,
        "stored_bytes_per_second": costs.stored_bytes_per_second,
    }


def _row(label: Row, fitted: Fit, point: Point) -> Row:
    predicted = fitted.seconds(point)
    return {
        **label,
        "predicted_seconds": round(predicted, 6),
        "measured_seconds": round(point.seconds, 6),
        "error": round(predicted / point.seconds - 1, 4),
    }
