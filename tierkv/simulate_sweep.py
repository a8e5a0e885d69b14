"""Simulations side by side: one job for each point of a sweep, in processes of their own."""

import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any, Final

from tierkv.cost import CostModel
from tierkv.errors import ConfigError
from tierkv.eviction import POLICIES
from tierkv.simulate import Simulation
from tierkv.simulate_outcome import Outcome
from tierkv.simulate_requests import Sessions, Source, TraceTurns
from tierkv.simulate_setup import make_setup
from tierkv.sizes import parse_size, show
from tierkv.tier import Tier
from tierkv.traces import BLOCK_TOKENS, Request, Workload, read_csv_trace, read_trace

SIZES: Final = tuple(tier.label for tier in Tier)
COUNTS: Final = ("batch", "clients")
KEYS: Final = (*SIZES, *COUNTS, "policy")
"""What can be swept."""
MOST_POINTS: Final = 100
_USUAL_POINTS: Final = 5
_PROCESSES: Final = 2
_RANGE: Final = re.compile(r"(.+?)\.\.([^/]+)(?:/(\d{1,4}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Sweep:
    """One thing that is varied.

    Attributes:
        key: one of ``KEYS``.
        values: bytes, counts, or names of rules.
    """

    key: str
    values: tuple[int, ...] | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One simulation.

    Attributes:
        cost: of the model on the machine.
        budgets: bytes of each tier.
        batch: sequences that run at a time.
        policy: the rule by which blocks are forgotten.
        workload: sessions that are made up, where there is no trace.
        trace: path of a trace, or None.
        seed: of the made-up sessions.
    """

    cost: CostModel
    budgets: dict[Tier, int]
    batch: int
    policy: str
    workload: Workload | None = None
    trace: str | None = None
    seed: int = 0

    def run(self, advance: Callable[[int], None] = lambda _: None) -> Outcome:
        """Simulate.

        Args:
            advance: told how many more requests are done.

        Raises:
            ConfigError: the budgets are impossible.
            OSError: the trace cannot be read.
            TraceError: a line of it is wrong.
        """
        setup = make_setup(
            self.cost,
            device_bytes=self.budgets[Tier.DEVICE],
            host_bytes=self.budgets[Tier.HOST],
            disk_bytes=self.budgets[Tier.DISK],
            batch=self.batch,
            eviction=self.policy,
        )
        return Simulation(self.cost, setup, self.source(), advance=advance).run()

    def source(self) -> Source:
        """Return the requests.

        Raises:
            ConfigError: the blocks do not divide those of a trace.
            OSError: the trace cannot be read.
            TraceError: the first line of it is wrong.
        """
        size = self.cost.block_size
        if self.trace is None:
            assert self.workload is not None
            return Sessions(self.workload, size, self.seed)
        if not self.trace.endswith(".csv") and BLOCK_TOKENS % size:
            raise ConfigError(
                f"a block of this trace stands for {BLOCK_TOKENS} tokens, which is no multiple of a block size of {size}; give "
                f"one that divides it, for example {BLOCK_TOKENS}"
            )
        return TraceTurns(requests_of(self.trace), size)


def requests_of(path: str) -> Iterator[Request]:
    """Read a trace: ``.csv`` with sessions, anything else as JSON lines in Mooncake's form."""
    return read_csv_trace(path) if Path(path).suffix == ".csv" else read_trace(path)


def parse_sweep(text: str) -> Sweep:
    """Read what is varied: ``host=64GiB..1TiB/7`` (geometric steps), ``batch=8,16,32`` or ``policy=lru,s3fifo``.

    Raises:
        ConfigError: it cannot be read; the message says what could be.
    """
    key, equals, values = text.partition("=")
    key = key.strip()
    if not equals or key not in KEYS:
        near = get_close_matches(key, KEYS, 1)
        hint = f", did you mean {near[0]}=?" if near and equals else ""
        raise ConfigError(
            f"--sweep {show(text)}: nothing that can be varied{hint} (legal: {', '.join(KEYS)}, as in {_EXAMPLE})"
        )
    if key == "policy":
        names = tuple(dict.fromkeys(name.strip() for name in values.split(",")))
        for name in names:
            if name not in POLICIES:
                raise ConfigError(f"--sweep {show(text)}: {show(name)} is not a rule (legal: {', '.join(POLICIES)})")
        return Sweep(key, names)
    match = _RANGE.fullmatch(values.strip())
    if match is None:
        return Sweep(key, tuple(dict.fromkeys(_number(key, one, text) for one in values.split(","))))
    first, last = (_number(key, match[at], text) for at in (1, 2))
    count = int(match[3] or _USUAL_POINTS)
    if not 2 <= count <= MOST_POINTS:
        raise ConfigError(f"--sweep {show(text)}: {count} points (legal: 2 to {MOST_POINTS})")
    if min(first, last) < 1:
        raise ConfigError(
            f"--sweep {show(text)}: geometric steps cannot begin at 0; list the values instead, as in 0,64GiB"
        )
    ratio = (last / first) ** (1 / (count - 1))
    steps = [round(first * ratio**step) for step in range(count - 1)]
    return Sweep(key, tuple(dict.fromkeys([*steps, last])))


_EXAMPLE: Final = "host=64GiB..1TiB or batch=8,16,32"


def _number(key: str, text: str, sweep: str) -> int:
    text = text.strip()
    if key in COUNTS:
        if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1_000_000):
            raise ConfigError(f"--sweep {show(sweep)}: {show(text)} is no number (legal: 1 to 1,000,000)")
        return int(text)
    try:
        size = parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"--sweep {show(sweep)}: {error}") from None
    if size.percent is not None:
        raise ConfigError(f"--sweep {show(sweep)}: {show(text)} is a share; give bytes, as in {_EXAMPLE}")
    return size.size_bytes


def points_of(sweeps: Sequence[Sweep]) -> list[dict[str, Any]]:
    """Return the settings of each point: every value of the first sweep with every one of the second.

    Raises:
        ConfigError: there are too many, or two sweeps vary the same.
    """
    keys = [sweep.key for sweep in sweeps]
    if len(set(keys)) < len(keys) or len(sweeps) > 2:
        raise ConfigError("--sweep may be given twice, for two different things")
    points = [dict(zip(keys, values, strict=True)) for values in product(*(sweep.values for sweep in sweeps))]
    if len(points) > MOST_POINTS:
        raise ConfigError(
            f"these sweeps come to {len(points)} points (legal: up to {MOST_POINTS}); give fewer steps, as in /5"
        )
    return points


def run_jobs(jobs: Sequence[Job], advance: Callable[[int], None] = lambda _: None) -> list[Outcome]:
    """Run jobs in parallel processes; return what each came to, in their order.

    Args:
        jobs: to run.
        advance: told how many more jobs are done.

    Raises:
        As ``Job.run``, of any.
    """
    outcomes: dict[int, Outcome] = {}
    # Fresh processes: what a fork would take along, threads of a progress bar for one, may hold locks.
    context = multiprocessing.get_context("spawn")
    processes = max(1, min(_PROCESSES, len(jobs), os.cpu_count() or 1))
    with context.Pool(processes, _ignore_interrupts) as pool:  # leaving it early ends the processes
        for index, outcome in pool.imap_unordered(_run, list(enumerate(jobs))):
            outcomes[index] = outcome
            advance(1)
    return [outcomes[index] for index in range(len(jobs))]


def _run(numbered: tuple[int, Job]) -> tuple[int, Outcome]:
    index, job = numbered
    return index, job.run()


def _ignore_interrupts() -> None:
    """Leave Ctrl-C to the process that waits for this one; it ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
