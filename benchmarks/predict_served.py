"""A small trace, served by a real engine.

A few conversations take turns, and their KV fits neither the device nor device and host together; then one prompt comes that
is longer than the device. So prefixes are found on the device, in host memory and in the store. Before each request all that
waits to be written is written, and the store's pages are dropped from the page cache: that is the state in which its rate was
measured.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import tierkv
from tierkv.benchmarks.filled import token_bytes, twin
from tierkv.benchmarks.machine import drop_page_cache
from tierkv.benchmarks.probe import read_of
from tierkv.benchmarks.restore_process import keep_all
from tierkv.errors import TierKVError
from tierkv.simulate_setup import Setup

_FLUSH_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Trace:
    """Conversations that take turns, there and back, and a long prompt at the end; all lengths in tokens.

    Attributes:
        sessions: conversations.
        turns: of each.
        common: what all begin with.
        first: more tokens of a first prompt.
        more: that each turn adds.
        longest: the prompt at the end.
        answer: tokens of each answer.
        device: that the device holds.
        host: that host memory holds.
        rounds: times that a real engine serves it, each with an empty store.
    """

    sessions: int = 4
    turns: int = 3
    common: int = 160
    first: int = 640
    more: int = 96
    longest: int = 1600
    answer: int = 24
    device: int = 1500
    host: int = 900
    rounds: int = 3

    @property
    def requests(self) -> int:
        """How many there are."""
        return self.sessions * self.turns + 1

    def plan(self) -> Iterator[tuple[int, int]]:
        """Yield ``(conversation, new tokens)`` of every request."""
        for turn in range(self.turns):
            for session in sorted(range(self.sessions), reverse=turn % 2 == 1):
                yield session, self.more if turn else self.first
        yield self.sessions, self.longest - self.common


@dataclass(frozen=True)
class Served:
    """One request as it was served.

    Attributes:
        tokens: of its prompt.
        found: of those, that were in some tier.
        first_seconds: until the first token.
        rest_seconds: from then until the last one.
    """

    tokens: int
    found: int
    first_seconds: float
    rest_seconds: float


@dataclass(frozen=True)
class RealRun:
    """What a real engine did with a trace.

    Attributes:
        served: by request.
        ids: of each, answer included.
        setup: the tiers and settings as the simulator knows them.
    """

    served: list[Served]
    ids: list[list[int]]
    setup: Setup


def serve(
    model: PreTrainedModel, trace: Trace, folder: Path, block_size: int, advance: Callable[[], None] = lambda: None
) -> RealRun:
    """Let an engine of its own, with an empty store, serve a trace."""
    draw = random.Random(0)
    vocabulary = int(model.config.get_text_config(decoder=True).vocab_size)

    def some(count: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(count)]

    common, said, served, asked = some(trace.common), dict[int, list[int]](), list[Served](), list[list[int]]()
    with (
        TemporaryDirectory(dir=folder) as store,
        tierkv.attach(twin(model), _config(model, trace, Path(store), block_size)) as engine,
    ):
        engine.model.generate(torch.tensor([some(8)]), max_new_tokens=2, min_new_tokens=2, do_sample=False)  # warm up
        for session, tokens in trace.plan():
            prompt = said.get(session, common) + some(tokens)
            if not keep_all(engine, _FLUSH_SECONDS):
                raise TierKVError(f"the store did not write what it was given within {_FLUSH_SECONDS:g} s")
            drop_page_cache(Path(store))
            before, clock = engine.stats().prefix.used_tokens, _Clock()
            given = torch.tensor([prompt], device=model.device)
            out = engine.model.generate(
                given, attention_mask=torch.ones_like(given), streamer=clock, do_sample=False,
                max_new_tokens=trace.answer, min_new_tokens=trace.answer,
            )  # fmt: skip
            first, last = clock.seconds[0], clock.seconds[-1]
            found = engine.stats().prefix.used_tokens - before
            served.append(Served(len(prompt), found, first, last - first))
            said[session] = out[0].tolist()
            asked.append(said[session])
            advance()
        return RealRun(served, asked, _setup(engine))


class _Clock(BaseStreamer):
    """Notes when tokens come; the prompt, which comes first, begins the time."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = time.perf_counter()
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:  # noqa: ARG002
        if not self._prompt:
            self.seconds.append(time.perf_counter() - self._began)
        self._prompt = False

    def end(self) -> None:
        pass


def _config(model: PreTrainedModel, trace: Trace, store: Path, block_size: int) -> dict[str, Any]:
    one = token_bytes(model)
    return {
        "block_size": block_size,
        "device": {"capacity": trace.device * one},
        "host": {"capacity": trace.host * one},
        "disk": {"capacity": 8 * (trace.device + trace.host) * one + 2**28, "path": str(store)},
        "prefix": {"persist": True, "write_policy": "always", "min_tokens": 0},
    }


def _setup(engine: Any) -> Setup:
    """Return what the simulator has to know of an engine that has served: its slots less its scratch."""
    manager, prefix = engine.manager, engine.config.prefix
    return Setup(
        slots={tier: pool.num_slots for tier, pool in manager.pools.items()},
        store_blocks=1 << 20,  # the disk has room for all of a trace
        slots_per_segment=manager.slots_per_segment,
        keep=manager.keep,
        promoted=manager.promoted,
        read=read_of(engine),
        eviction=prefix.eviction,
        write_policy=prefix.write_policy,
        min_tokens=prefix.min_tokens,
        queue_blocks=1 << 20,
        batch=1,
    )
