"""tune: measures this machine with one model and proposes a configuration, each value with its reason.

    measure    decoded tokens, prefills and restores; the cost model is fitted to them
    choose     block size by the model first, then everything by contests between finalists on the machine itself
    verify     where one starts from against what was found, predicted and measured

A contest is decided for another value than the one that was there only if that is clearly better, since measurements scatter:
so what is found is never worse than what one starts from by more than they do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tierkv.benchmarks.filled import layout_of
from tierkv.benchmarks.probe import Decode, Probe, Residency
from tierkv.benchmarks.probe_store import Restore, StoreProbe
from tierkv.config import FIELDS, CacheConfig
from tierkv.errors import ConfigError, TierKVError
from tierkv.fit import DecodePoint, Fit, Point, fit
from tierkv.tier import Tier
from tierkv.tune_contests import NEW_TOKENS, Contests, quick_quartile
from tierkv.tune_reasons import Reasons

BLOCK_SIZES: Final = (16, 32, 64, 128, 256, 512)
LEAST_BLOCKS: Final = 32
"""Fewer blocks than this in a context, and most of it could not be placed apart."""
CONTESTED: Final = ("block_size", "disk.readers", "transfer.layers_ahead", "attention.cold_read")
"""What contests decide, in this order; also what decoding and restores are measured with."""

Say = Callable[[str], None]
Advance = Callable[[], None]


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    Attributes:
        contexts: of decoded tokens that the model is fitted to, as shares of the goal's.
        restores: of restored prefixes, likewise.
        restored_sizes: blocks that each of them is stored in, as large as the goal allows.
        prefills: forwards, as ``(tokens, past)``, likewise.
        rounds: timed repeats of each point.
        finalists: block sizes that meet on the machine, besides the one that was there.
    """

    contexts: tuple[float, ...]
    restores: tuple[float, ...]
    restored_sizes: tuple[int, ...]
    prefills: tuple[tuple[float, float], ...]
    rounds: int
    finalists: int


QUICK: Final = Effort(
    contexts=(0.15, 1.0), restores=(0.25, 1.0), restored_sizes=(32, 128), prefills=((0.03, 0), (0.2, 0), (0.1, 0.2)),
    rounds=5, finalists=2,
)  # fmt: skip
FULL: Final = Effort(
    contexts=(0.1, 0.4, 1.0), restores=(0.25, 0.5, 1.0), restored_sizes=(32, 128),
    prefills=((0.03, 0), (0.1, 0), (0.4, 0), (0.1, 0.4)), rounds=9, finalists=3,
)  # fmt: skip


@dataclass(frozen=True)
class Goal:
    """What the configuration is for.

    Attributes:
        context: tokens of a sequence.
        sessions: sequences whose KV is kept.
    """

    context: int
    sessions: int


@dataclass
class Tuned:
    """What was found.

    Attributes:
        config: the start, with every tuned key set.
        reasons: by key.
        fit: the parameters of this machine and model, with the configuration that was found.
        start_fit: those with the one that was there.
        write_bytes_per_second: at what rate the store takes KV for good.
        contests: what was measured for which values.
    """

    config: CacheConfig
    reasons: dict[str, str]
    fit: Fit
    start_fit: Fit
    write_bytes_per_second: float
    contests: list[dict[str, Any]] = field(default_factory=list)


class Tuner:
    """Measures and chooses. Ctrl-C at any time leaves nothing behind."""

    def __init__(
        self,
        model: Any,
        start: CacheConfig,
        goal: Goal,
        effort: Effort,
        folder: Path,
        say: Say,
        *,
        probe: Probe | None = None,
        store: StoreProbe | None = None,
    ) -> None:
        """Tune for ``model``.

        Args:
            model: a transformers model, on its device.
            start: the configuration that is to be beaten.
            goal: what it is for.
            effort: how much is measured.
            folder: on the disk that is meant; files in it are gone afterwards.
            say: told what was found, as it is found.
            probe: of another machine than this one (tests).
            store: likewise.
        """
        self.start = start
        self.goal = goal
        self.effort = effort
        self.chosen: dict[str, Any] = {key: start.value(key) for key in CONTESTED}
        self.reasons = Reasons(model, goal.context, goal.sessions)
        self.contests: list[dict[str, Any]] = []
        self._layers = len(layout_of(model).layers)
        self._probe = probe or Probe(model, folder, quick_quartile)
        self._store = store or StoreProbe(model, folder, quick_quartile)
        self._contests = Contests(self._probe, self._store, goal.context, effort.rounds)
        self._cold: Residency = "host" if model.device.type == "cuda" else "disk"
        self._say = say

    steps = 8
    """How often ``run`` calls ``advance``."""

    def run(self, advance: Advance = lambda: None) -> Tuned:
        """Measure and choose.

        Raises:
            TierKVError: the model does not fit, or the store failed.
        """
        start_fit = self.measure(self.chosen)
        advance()
        self._choose_block_size(start_fit)
        advance()
        self._contest("disk.readers", (1, 2, 4), ("disk",), restores=True)
        advance()
        self._contest("transfer.layers_ahead", (1, 2, 4), (self._cold,), restores=False)
        advance()
        on_gpu = self._cold == "host"
        self._contest(
            "attention.cold_read",
            ("auto", "stream", "compute") if on_gpu else ("auto", "stream"),
            ("host",),
            restores=False,
        )
        advance()
        changed = any(self.chosen[key] != self.start.value(key) for key in CONTESTED)
        found = self.measure(self.chosen) if changed else start_fit
        advance()
        values = {**self.chosen, **self.reasons.writer(self._store, self.chosen, self.start, found, self.effort.rounds)}
        advance()
        values |= self.reasons.policies(found, values)
        values |= self.reasons.budgets(self.start, values)
        advance()
        config = self.start.replace(values, "tierkv tune")
        reasons = self.reasons.ordered(FIELDS)
        return Tuned(config, reasons, found, start_fit, self.reasons.write_bytes_per_second, self.contests)

    # -- measuring ------------------------------------------------------------------------------------------------

    def measure(self, settings: Mapping[str, Any]) -> Fit:
        """Measure the points of the effort with some settings and fit the cost model to them."""
        effort, context = self.effort, self.goal.context
        residencies: tuple[Residency, ...] = ("device", "host", "disk")
        decodes = [
            Decode(round(share * context), where, settings) for share in effort.contexts for where in residencies
        ]
        # Records of two sizes, so that what a record costs and what its bytes cost can be told apart.
        largest = self._largest_block()
        other = next(size for size in (largest, *BLOCK_SIZES) if size != settings["block_size"])
        decodes += [
            Decode(round(share * context), "disk", {**settings, "block_size": other}) for share in effort.contexts[-2:]
        ]
        prefills = [(max(1, round(tokens * context)), round(past * context)) for tokens, past in effort.prefills]
        sizes = sorted({min(size, largest) for size in effort.restored_sizes})
        restores = [
            Restore(round(share * context), {**settings, "block_size": size})
            for share in effort.restores
            for size in sizes
        ]
        points: list[Point] = [*self._probe.decode(decodes, effort.rounds)]
        if not any(point.kv_bytes.get(Tier.DISK) for point in points if isinstance(point, DecodePoint)):
            raise ConfigError(
                f"{context:,} tokens of this model are so little KV that none of it has to lie on disk, so nothing can be told "
                f"apart; give a longer --context"
            )
        points += self._probe.prefill(prefills, effort.rounds // 2)
        points += self._store.restore(restores, effort.rounds)
        return fit(self._layers, points)

    def predicted(self, tuned: Tuned) -> dict[str, dict[str, float]]:
        """Return what the cost model says of the start and of what was found: seconds by what is done."""
        found = {"start": (tuned.start_fit, self.start), "tuned": (tuned.fit, tuned.config)}
        raw = tuned.fit.raw_bytes_per_second  # of one minute for both: the disk's rate is no merit of a configuration
        return {
            name: self.reasons.workload(fitted, int(config.block_size), self._cold, raw)
            for name, (fitted, config) in found.items()
        }

    def verify(self, tuned: Tuned) -> list[dict[str, Any]]:
        """Return rows of a short real workload with the start and with what was found: predicted and measured.

        Where nothing that has a say in them was changed, it runs once and counts for both.
        """
        configs = {"start": self.start, "tuned": tuned.config}
        fits = {"start": tuned.start_fit, "tuned": tuned.fit}
        settings = {name: {key: config.value(key) for key in CONTESTED} for name, config in configs.items()}
        if settings["start"] == settings["tuned"]:  # two runs of one thing would only show how they scatter
            settings.pop("start")
        wheres: tuple[Residency, ...] = ("device", self._cold)
        decodes = [Decode(self.goal.context, where, own) for where in wheres for own in settings.values()]
        restores = [Restore(self.goal.context, own) for own in settings.values()]
        rounds = max(7, self.effort.rounds)
        measured: list[Point] = [*self._probe.decode(decodes, rounds), *self._store.restore(restores, rounds)]
        rows = []
        for index, label in enumerate(self.predicted(tuned)["tuned"]):
            own = measured[index * len(settings) : (index + 1) * len(settings)]
            points = dict(zip(configs, (own[0], own[-1]), strict=True))
            row: dict[str, Any] = {"what": label}
            for name, point in points.items():
                row[name] = {
                    "predicted_seconds": round(fits[name].seconds(point), 6),
                    "measured_seconds": round(point.seconds, 6),
                }
            row["ratio"] = round(points["tuned"].seconds / points["start"].seconds, 4)
            rows.append(row)
        return rows

    # -- choosing -------------------------------------------------------------------------------------------------

    def _largest_block(self) -> int:
        return max([size for size in BLOCK_SIZES if size * LEAST_BLOCKS <= self.goal.context] or [BLOCK_SIZES[0]])

    def _choose_block_size(self, fitted: Fit) -> None:
        """Take the sizes that the model likes best to the machine."""
        sizes = [size for size in BLOCK_SIZES if size <= self._largest_block()]
        predicted = {size: self.reasons.predict(fitted, size, self._cold, NEW_TOKENS) for size in sizes}
        best = sorted(sizes, key=lambda size: predicted[size])[: self.effort.finalists]
        self._contest("block_size", best, ("device", self._cold), restores=True)
        self.contests[-1]["predicted_seconds"] = {str(size): round(seconds, 4) for size, seconds in predicted.items()}

    def _contest(self, key: str, values: Sequence[Any], residencies: tuple[Residency, ...], *, restores: bool) -> None:
        """Let some values of a key meet the one that is there."""
        there = self.chosen[key]
        candidates = [there, *(value for value in values if value != there)]
        try:
            chosen, rows = self._contests.hold(key, candidates, self.chosen, residencies, restores=restores)
        except TierKVError as error:
            # A value that this machine cannot run is no finalist; the one that was there stays.
            self._say(f"{key} stays {there}: {error}")
            self.reasons.note(key, f"left as it was: other values cannot be measured here ({error})")
            self.contests.append({"key": key, "chosen": there, "left_out": str(error)})
            return
        self.chosen[key] = chosen["value"]
        self.contests.append({"key": key, "chosen": chosen["value"], "rows": rows})
        self.reasons.contest(key, chosen, rows, self.goal.context)
        self._say(f"{key} = {chosen['value']}: {self.reasons.text(key)}")
