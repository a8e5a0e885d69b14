"""Contests: values of one key meet on the machine, and the one that was there stays unless another clearly beats it, twice."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tierkv.benchmarks.probe import Decode, Probe, Residency
from tierkv.benchmarks.probe_store import Restore, StoreProbe

MARGIN: Final = 0.03
"""Share of the time that another value must win to be chosen, and that no part of the work may lose."""
NEW_TOKENS: Final = 128
"""Decoded tokens that weigh as much as one restore of the whole context."""

Row = dict[str, Any]


class Contests:
    """Measures values in turns, at one context."""

    def __init__(self, probe: Probe, store: StoreProbe, context: int, rounds: int) -> None:
        """Hold them with these probes."""
        self._probe = probe
        self._store = store
        self._context = context
        self._rounds = rounds

    def hold(
        self,
        key: str,
        candidates: Sequence[Any],
        settings: Mapping[str, Any],
        residencies: Sequence[Residency],
        *,
        restores: bool,
    ) -> tuple[Row, list[Row]]:
        """Return the row of the value that is chosen, and those of all.

        Args:
            key: by dotted name.
            candidates: values of it; the first is the one that was there.
            settings: all other keys.
            residencies: where KV lies while tokens are decoded.
            restores: time restores as well.

        Raises:
            TierKVError: this machine cannot run one of them.
        """
        rows = self._measure(key, candidates, settings, residencies, restores=restores)
        best = min((row for row in rows if not _spoils(row, rows[0])), key=lambda row: float(row["seconds"]))
        if not _beats(best, rows[0]):
            return rows[0], rows
        # Once more: a machine that others use may have lied.
        again = self._measure(key, [rows[0]["value"], best["value"]], settings, residencies, restores=restores)
        others = [row for row in rows if row["value"] not in (rows[0]["value"], best["value"])]
        return again[_beats(again[1], again[0])], [again[0], *others, again[1]]

    def _measure(
        self,
        key: str,
        candidates: Sequence[Any],
        settings: Mapping[str, Any],
        residencies: Sequence[Residency],
        *,
        restores: bool,
    ) -> list[Row]:
        """Return a row for each candidate: seconds of a token by where KV lies, of a restore, and of both weighed."""
        whole = [{**settings, key: value} for value in candidates]
        decodes = [Decode(self._context, where, own) for where in residencies for own in whole]
        decoded = self._probe.decode(decodes, self._rounds)
        restored = self._store.restore([Restore(self._context, own) for own in whole], self._rounds) if restores else []
        rows = []
        for number, value in enumerate(candidates):
            own = {where: decoded[at * len(whole) + number].seconds for at, where in enumerate(residencies)}
            row: Row = {"value": value, "decode_seconds": {name: round(one, 6) for name, one in own.items()}}
            seconds = NEW_TOKENS * sum(own.values())
            if restored:
                row["restore_seconds"] = round(restored[number].seconds, 6)
                seconds += restored[number].seconds
            rows.append({**row, "seconds": round(seconds, 4)})
        return rows


def quick_quartile(times: Sequence[float]) -> float:
    """Return the time that a quarter of the repeats beat: what others do on the machine makes only the slow ones slower."""
    return sorted(times)[len(times) // 4]


def _beats(row: Row, there: Row) -> bool:
    """Whether a value is clearly better than the one that was there, and nothing is worse for it."""
    return bool(row["seconds"] < there["seconds"] * (1 - MARGIN)) and not _spoils(row, there)


def _spoils(row: Row, there: Row) -> bool:
    """Whether decoding somewhere, or a restore, takes more time than with the value that was there."""
    pairs = [(seconds, there["decode_seconds"][where]) for where, seconds in row["decode_seconds"].items()]
    if "restore_seconds" in row:
        pairs.append((row["restore_seconds"], there["restore_seconds"]))
    return any(own > other * (1 + MARGIN) for own, other in pairs)
