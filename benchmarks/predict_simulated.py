"""The same trace, served by the simulator with the costs that were just fitted, and how far its times are off."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from transformers import PreTrainedModel

from tierkv.benchmarks.filled import layout_of
from tierkv.benchmarks.predict_served import RealRun, Served, Trace, serve
from tierkv.cost import CostModel, Costs
from tierkv.keys import chain_keys
from tierkv.simulate import Simulation
from tierkv.simulate_requests import Names, Source, Turn
from tierkv.tier import Tier

KINDS: Final = {"first token": "first_seconds", "answer": "rest_seconds"}


def compare(
    model: PreTrainedModel,
    trace: Trace,
    costs: Costs,
    folder: Path,
    block_size: int,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Serve a trace with a real engine, some times over, and simulate it.

    Args:
        model: that answers.
        trace: what is asked.
        costs: of the model on this machine.
        folder: where files go.
        block_size: tokens in a block.
        advance: called ``trace.rounds * trace.requests`` times.

    Returns:
        ``rows`` with ``predicted_seconds``, ``measured_seconds`` (median of the rounds) and ``error`` of the time to the first
        token and of the rest of each answer; ``together``, the same of all; ``found_tokens`` of prompts, ``simulated`` and
        ``real``, by request, and as simulated ``by_tier``.

    Raises:
        TierKVError: the store did not take what it was given, or a budget is too small.
    """
    rounds = [serve(model, trace, folder, block_size, advance) for _ in range(trace.rounds)]
    simulated, by_tier = simulate(model, trace, costs, rounds[0], block_size)
    rows = []
    for number, predicted in enumerate(simulated):
        real = [one.served[number] for one in rounds]
        for kind, part in KINDS.items():
            seconds = _compared(getattr(predicted, part), [getattr(one, part) for one in real])
            row = {"kind": kind, "request": number, "tokens": predicted.tokens, "found": predicted.found, **seconds}
            rows.append(row)
    return {
        "rows": rows,
        "together": _compared(_total(simulated), [_total(one.served) for one in rounds]),
        "found_tokens": {
            "simulated": [one.found for one in simulated],
            "real": [one.found for one in rounds[0].served],
            "by_tier": {tier.label: tokens for tier, tokens in by_tier.items()},
        },
    }


def simulate(
    model: PreTrainedModel, trace: Trace, costs: Costs, real: RealRun, block_size: int
) -> tuple[list[Served], dict[Tier, int]]:
    """Serve the same requests, one after the other as well, in virtual time; also return the tokens found in each tier."""
    layout = layout_of(model)
    cost = CostModel(costs, len(layout.layers), block_size * layout.token_bytes, block_size)
    source = _OneByOne(real.ids, trace.answer, block_size)
    simulation = Simulation(cost, real.setup, source)
    source.simulation = simulation
    outcome = simulation.run()
    return source.served, outcome.counts.found_tokens


class _OneByOne(Source):
    """Each request comes when the one before it was answered."""

    simulation: Simulation

    def __init__(self, sequences: Sequence[list[int]], answer: int, block_size: int) -> None:
        self._turns = [self._turn(ids, answer, block_size) for ids in sequences]
        self._now = 0.0
        self._under_way = False
        self.served: list[Served] = []

    def next_seconds(self) -> float | None:
        return self._now if self._turns and not self._under_way else None

    def take(self) -> Turn:
        turn = self._turns.pop(0)
        turn.arrival_seconds = self._now
        self._under_way = True
        self._before = _Counted.of(self.simulation)
        return turn

    def ended(self, turn: Turn, now: float) -> None:
        after = _Counted.of(self.simulation)
        first = after.first_seconds - self._before.first_seconds
        self.served.append(Served(turn.input_tokens, after.found - self._before.found, first, now - self._now - first))
        self._now, self._under_way = now, False

    def published(self, turn: Turn, tokens: int) -> None:
        pass

    def known_blocks(self, turn: Turn) -> int:  # noqa: ARG002
        return 0

    @staticmethod
    def _turn(ids: Sequence[int], answer: int, block_size: int) -> Turn:
        keys = chain_keys(b"served", ids, block_size)
        return Turn(0.0, len(ids) - answer, answer, Names(keys, [(int.from_bytes(key[:8], "big"),) for key in keys]))


@dataclass(frozen=True)
class _Counted:
    """What a simulation has counted so far."""

    first_seconds: float
    found: int

    @classmethod
    def of(cls, simulation: Simulation) -> Self:
        counts = simulation.steps.counts
        return cls(counts.service.total, sum(counts.found_tokens.values()))


def _total(served: Sequence[Served]) -> float:
    return sum(one.first_seconds + one.rest_seconds for one in served)


def _compared(predicted: float, measured: Sequence[float]) -> dict[str, float]:
    middle = statistics.median(measured)
    return {
        "predicted_seconds": round(predicted, 6),
        "measured_seconds": round(middle, 6),
        "error": round(predicted / middle - 1, 4),
    }
