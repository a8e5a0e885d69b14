"""How fast the prefix store gives and takes on this machine, as points that a cost model is fitted to.

A restore is a whole prefix out of the store into a new engine, the page cache dropped before it, with a plain read of as many
bytes beside it. All that is compared takes turns.
"""

import gc
import random
import secrets
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel

import tierkv
from tierkv.benchmarks.filled import synthetic_kv, token_bytes, twin
from tierkv.benchmarks.machine import drop_page_cache
from tierkv.benchmarks.probe import SPARE_BYTES, Advance, Pick, Settings, merged, synchronize
from tierkv.benchmarks.restore_process import keep_all
from tierkv.benchmarks.restore_raw import read_bytes_per_second, write_file
from tierkv.errors import TierKVError
from tierkv.fit import RestorePoint
from tierkv.prefix_rows import KeyedRow, Prompt

_FLUSH_SECONDS: Final = 120.0


@dataclass(frozen=True)
class Restore:
    """A restored prefix that is asked for."""

    tokens: int
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class _Stored:
    """A prefix in a store of its own."""

    tokens: int
    block_size: int
    config: Mapping[str, Any]
    ids: list[int]
    namespace: bytes
    folder: Path
    write_seconds: float


class StoreProbe:
    """Measures the store with one model's KV. Files go to a folder of the disk that is meant."""

    def __init__(self, model: PreTrainedModel, folder: Path, pick: Pick = statistics.median) -> None:
        """Measure with the shapes of ``model``; ``pick`` says which of the repeated times counts."""
        self.model = model
        self.folder = folder
        self._pick = pick
        self.token_bytes = token_bytes(model)

    def restore(self, wanted: Sequence[Restore], rounds: int, advance: Advance = lambda: None) -> list[RestorePoint]:
        """Time whole prefixes from the store into a new engine, and a plain read of as many bytes beside each.

        Args:
            wanted: what to time.
            rounds: restores of each; ``pick`` says which counts; of the plain reads it is the median.
            advance: called ``len(wanted) + rounds`` times.

        Raises:
            TierKVError: the store did not take a prefix, or gave less of it back.
        """
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            folder = Path(name)
            stored = []
            for number, one in enumerate(wanted):
                stored.append(self._store(one, folder / f"prefix-{number}"))
                advance()
            raw = folder / "raw"
            raw.mkdir()
            write_file(raw / "bytes", max(one.tokens for one in wanted) * self.token_bytes)
            times: list[list[float]] = [[] for _ in wanted]
            rates: list[float] = []
            for _ in range(rounds):
                drop_page_cache(raw)
                rates.append(read_bytes_per_second(raw / "bytes", "buffered", 1) or 0.0)
                for number, prefix in enumerate(stored):
                    times[number].append(self._restore(prefix))
                advance()
        rate = statistics.median(rates)
        return [
            RestorePoint(
                prefix.tokens // prefix.block_size, prefix.block_size * self.token_bytes, rate, self._pick(some)
            )
            for prefix, some in zip(stored, times, strict=True)
        ]

    def write(self, wanted: Sequence[Restore], rounds: int, advance: Advance = lambda: None) -> list[float]:
        """Return the seconds until the store has written a prefix to the disk for good, one of ``rounds`` each, see ``pick``.

        Args:
            wanted: what to time.
            rounds: times that each is written, to a store of its own.
            advance: called ``rounds`` times.

        Raises:
            TierKVError: the store did not take a prefix.
        """
        times: list[list[float]] = [[] for _ in wanted]
        for _ in range(rounds):
            for number, one in enumerate(wanted):
                with tempfile.TemporaryDirectory(dir=self.folder) as name:
                    times[number].append(self._store(one, Path(name)).write_seconds)
            advance()
        return [self._pick(some) for some in times]

    def _store(self, one: Restore, folder: Path) -> "_Stored":
        """Put a prefix of synthetic KV into a store of its own."""
        kv_bytes = one.tokens * self.token_bytes
        config = merged(
            {
                "device": {"capacity": kv_bytes * 5 // 4 + 2 * SPARE_BYTES},
                "host": {"capacity": 0},
                "disk": {"capacity": 4 * kv_bytes + 2**28, "path": str(folder)},
                "prefix": {"persist": True, "write_policy": "always", "min_tokens": 0},
            },
            one.settings,
        )
        draw = random.Random(one.tokens)
        ids = [draw.randrange(1000) for _ in range(one.tokens + 1)]
        namespace = secrets.token_bytes(32)
        with torch.inference_mode(), tierkv.attach(twin(self.model), config) as engine:
            engine.prefix.store.namespace(namespace, {"model": "synthetic KV of a measurement"})
            with closing(engine.new_cache()) as cache:
                rows = cache.sequences
                engine.reserve(rows, 1, one.tokens, paged=True)
                rows.first_seen = ()
                for layer, (keys, values) in enumerate(synthetic_kv(self.model, one.tokens)):
                    rows.append_paged(layer, keys, values)
                    rows.attended(layer)
                began = time.perf_counter()
                engine.prefix.publish(rows, namespace, [KeyedRow()], [one.tokens], lambda _, begin, end: ids[begin:end])
                if not keep_all(engine, _FLUSH_SECONDS):
                    raise TierKVError(
                        f"the store in {folder} did not take {one.tokens:,} tokens in {_FLUSH_SECONDS:g} s"
                    )
                seconds = time.perf_counter() - began
            size = engine.layout.block_size
        return _Stored(one.tokens // size * size, size, config, ids, namespace, folder, seconds)

    def _restore(self, stored: "_Stored") -> float:
        gc.collect()
        drop_page_cache(stored.folder)
        with torch.inference_mode(), tierkv.attach(twin(self.model), stored.config) as engine:
            batch = engine.open()
            began = time.perf_counter()
            engine.prefix.reuse(batch, stored.namespace, [Prompt(stored.ids)], stored.tokens)
            synchronize(self.model)
            seconds = time.perf_counter() - began
            if batch.length != stored.tokens:
                raise TierKVError(f"of {stored.tokens:,} tokens the store gave {batch.length:,} back: nothing is timed")
            batch.release()
        return seconds
