"""Fit: the parameters of the cost model from measured points, by least squares.

Relative errors are minimised, so that a short time counts as much as a long one, with a loss that grows linearly for what
lies far out (soft L1; scipy's trust region method, Branch, Coleman and Li 1999, with every parameter at least 0).
Decoding, prefill and restores share no parameters but one, so each is fitted by itself.
"""

import importlib.util
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from tierkv.cost import CostModel, Costs, Line, Read
from tierkv.errors import ConfigError
from tierkv.tier import Tier, Wire

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SCALE: Final = 1e-9
"""Rates are fitted as nanoseconds a byte, times as seconds: numbers of like size."""
_UP: Final = Wire(Tier.HOST, Tier.DEVICE)
_SPILL: Final = Wire(Tier.DISK, Tier.DEVICE)


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """One decoded token.

    Attributes:
        kv_bytes: that it reads, by the tier where they lie.
        block_bytes: of a block, all layers.
        seconds: measured.
        read: how those in host memory are read.
    """

    kv_bytes: Mapping[Tier, int]
    block_bytes: int
    seconds: float
    read: Read = "compute"


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """One forward of ``tokens`` tokens behind ``past`` others."""

    tokens: int
    past: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """One prefix from the store, its disk's pages not in memory.

    Attributes:
        blocks: restored.
        block_bytes: of a block, all layers.
        raw_bytes_per_second: at what rate the disk gave plain bytes in the same minute.
        seconds: measured.
    """

    blocks: int
    block_bytes: int
    raw_bytes_per_second: float
    seconds: float


Point = DecodePoint | PrefillPoint | RestorePoint


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of predictions: ``|predicted - measured| / measured``."""

    median: float
    worst: float

    @classmethod
    def of(cls, pairs: Iterable[tuple[float, float]]) -> "Errors":
        """Return those of pairs of predicted and measured seconds; at least one."""
        errors = [abs(predicted - measured) / measured for predicted, measured in pairs]
        return cls(statistics.median(errors), max(errors))


@dataclass(frozen=True)
class Fit:
    """Parameters, and how well they describe the points that they come from.

    Attributes:
        costs: the parameters.
        layers: that keep KV.
        raw_bytes_per_second: of the disk, that ``costs.stored_bytes_per_second`` belongs to.
        errors: by kind of point: decode, prefill, restore.
    """

    costs: Costs
    layers: int
    raw_bytes_per_second: float = 0.0
    errors: Mapping[str, Errors] = field(default_factory=dict)

    def seconds(self, point: Point) -> float:
        """Return what the model says of a point; a restore is taken at the disk rate of its own minute."""
        if isinstance(point, PrefillPoint):
            return self._model(1, self.costs).prefill(point.tokens, point.past).seconds
        if isinstance(point, DecodePoint):
            return self._model(point.block_bytes, self.costs).decode(point.kv_bytes, read=point.read).seconds
        costs = self.costs
        if costs.stored_bytes_per_second:
            scale = point.raw_bytes_per_second / self.raw_bytes_per_second
            costs = replace(costs, stored_bytes_per_second=costs.stored_bytes_per_second * scale)
        return self._model(point.block_bytes, costs).restore(point.blocks, Tier.DISK).seconds

    def _model(self, block_bytes: int, costs: Costs) -> CostModel:
        return CostModel(costs, self.layers, block_bytes, block_size=1)


def check_fitting() -> None:
    """Find out before minutes of measuring whether anything can be fitted.

    Raises:
        ConfigError: scipy is not installed.
    """
    if importlib.util.find_spec("scipy") is None:
        raise ConfigError('fitting needs scipy; install the extra with pip install -e ".[tune]"')


def fit(layers: int, points: Sequence[Point]) -> Fit:
    """Return the parameters that describe measured points best.

    Args:
        layers: that keep KV.
        points: at least as many of each kind as it has parameters; a kind may be absent, decoding may not.

    Raises:
        ConfigError: scipy is not installed.
        ValueError: there are no points of decoding.
    """
    decode = [point for point in points if isinstance(point, DecodePoint)]
    prefill = [point for point in points if isinstance(point, PrefillPoint)]
    restore = [point for point in points if isinstance(point, RestorePoint)]
    if not decode:
        raise ValueError("no decoded token was measured, so there is nothing to fit")
    result = _fit_decode(layers, decode)
    if prefill:
        result = _fit_prefill(result, prefill)
    if restore:
        result = _fit_restore(result, restore)
    kinds: dict[str, Sequence[Point]] = {"decode": decode, "prefill": prefill, "restore": restore}
    errors = {
        kind: Errors.of((result.seconds(point), point.seconds) for point in some)
        for kind, some in kinds.items()
        if some
    }
    return replace(result, errors=errors)


def _fit_decode(layers: int, points: Sequence[DecodePoint]) -> Fit:
    least = min(point.seconds for point in points)
    tiers = {tier for point in points for tier, num_bytes in point.kv_bytes.items() if num_bytes}
    reads = {point.read for point in points if point.kv_bytes.get(Tier.HOST)}

    def make(values: "NDArray[np.float64]") -> Fit:
        step, device, host, wire, latency, disk, overlap = values.tolist()
        rates = {Tier.DEVICE: _rate(device)}
        if "compute" in reads:
            rates[Tier.HOST] = _rate(host)
        wires = {}
        if "stream" in reads:
            wires[_UP] = Line(0.0, _rate(wire))
        if Tier.DISK in tiers:
            wires[_SPILL] = Line(latency, _rate(disk))
        return Fit(Costs(step_seconds=step, kv_bytes_per_second=rates, wires=wires, overlap=overlap), layers)

    # It begins with a machine of no surprises: 10 GB/s from memory, 2 GB/s from disk, 20 us a record.
    begin = [least / 2, 0.1, 0.1, 0.1, 2e-5, 0.5, 0.5]
    return make(_solve(lambda values: _errors(make(values), points), begin, most=[_NO_LIMIT] * 6 + [1.0]))


def _rate(nanoseconds: float) -> float:
    return 1 / max(nanoseconds * _SCALE, 1e-15)


def _fit_prefill(so_far: Fit, points: Sequence[PrefillPoint]) -> Fit:
    def make(values: "NDArray[np.float64]") -> Fit:
        token, pair, behind = values.tolist()
        costs = replace(
            so_far.costs, token_seconds=token, pair_seconds=pair * _SCALE, past_pair_seconds=behind * _SCALE
        )
        return replace(so_far, costs=costs)

    begin = [statistics.median(point.seconds / point.tokens for point in points), 100.0, 100.0]
    return make(_solve(lambda values: _errors(make(values), points), begin))


def _fit_restore(so_far: Fit, points: Sequence[RestorePoint]) -> Fit:
    raw = statistics.median(point.raw_bytes_per_second for point in points)

    def make(values: "NDArray[np.float64]") -> Fit:
        begin, block, share = values.tolist()
        stored = raw / max(share, 1e-3)
        costs = replace(so_far.costs, restore_seconds=begin, block_seconds=block, stored_bytes_per_second=stored)
        return replace(so_far, costs=costs, raw_bytes_per_second=raw)

    return make(_solve(lambda values: _errors(make(values), points), [1e-3, 1e-4, 1.0]))


def _errors(candidate: Fit, points: Sequence[Point]) -> list[float]:
    return [candidate.seconds(point) / point.seconds - 1 for point in points]


_NO_LIMIT: Final = float("inf")


def _solve(
    errors: "Callable[[NDArray[np.float64]], list[float]]", begin: Sequence[float], most: Sequence[float] = ()
) -> "NDArray[np.float64]":
    """Return the values, none below 0 and none above its most, whose errors are least."""
    check_fitting()
    from scipy.optimize import least_squares

    limits = (0.0, list(most) or _NO_LIMIT)
    found: Any = least_squares(errors, begin, bounds=limits, x_scale=list(begin), loss="soft_l1", f_scale=0.1)
    values: NDArray[np.float64] = found.x
    return values
