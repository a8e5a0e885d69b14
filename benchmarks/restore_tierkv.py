"""tierkv as a contender of ``tierkv bench restore``: written by a prefill, found in memory, and after a restart."""

import resource
import shutil
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch

import tierkv
from tierkv.benchmarks.restore_contenders import WARM_UP_TOKENS, Answer, Contender
from tierkv.benchmarks.restore_process import keep_all
from tierkv.config import CacheConfig, load_config
from tierkv.errors import TierKVError
from tierkv.integrations.hf_compat import block_layout

FLUSH_SECONDS: Final = 120.0
_MIB: Final = 2**20


class _Clock:
    """A streamer that notes when the prompt and each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        """Take what ``generate`` hands out."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing."""


class Tiered(Contender):
    """An engine with a store, attached anew for each run that needs a new one."""

    engine: Any = None
    number = 0

    def warm_up(self, other: torch.Tensor) -> None:
        """Load all that an engine with a store loads, on a store that is thrown away."""
        self._attach(self.folder / "warm-up")
        self.generate(other, 2)
        self.close()
        shutil.rmtree(self.folder / "warm-up")

    def prefill(self, persist: bool) -> Answer:  # noqa: FBT001 - a JSON key
        """Compute the whole prompt on an empty cache, written to a new store or not; ends when the store is flushed.

        Returns:
            ``seconds`` and ``cpu_seconds`` (of all threads) until then, and ``first``, the seconds to the first token.
        """
        self.close()
        self.number += 1
        kept, folder = self.folder / "kept", self.folder / f"new-{self.number}"
        self._attach(folder, persist=persist)
        began, cpu_began = time.perf_counter(), _cpu_seconds()
        token, first = self.generate(self.ids, 1)
        if persist:
            self._flush()
        seconds, cpu_seconds = time.perf_counter() - began, _cpu_seconds() - cpu_began
        self.close()
        if persist:
            shutil.rmtree(kept, ignore_errors=True)
            folder.rename(kept)
        else:
            shutil.rmtree(folder, ignore_errors=True)
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, "first": first, "token": token}

    def hold(self) -> None:
        """Have the prompt's KV in the memory of an engine."""
        self.close()
        self._attach(self.folder / "kept")
        self.generate(self.ids, 1)

    def again(self) -> Answer:
        """Generate from what the engine holds in memory."""
        token, seconds = self.generate(self.ids, 1)
        return {"seconds": seconds, "token": token}

    def step_seconds(self, steps: int) -> float:
        """Return the median time of a decoded token after the prompt."""
        clock = _Clock()
        self.generate(self.ids, steps + 1, streamer=clock)
        _prompt, *tokens = clock.times
        return statistics.median(later - earlier for earlier, later in pairwise(tokens))

    def restart(self) -> Answer:
        """Open the store anew and generate.

        Raises:
            TierKVError: the store gave nothing back.
        """
        self.close()

        def attach() -> float:
            began = time.perf_counter()
            self._attach(self.folder / "kept")
            return time.perf_counter() - began

        answer = self.after_restart(attach)
        stats, block_bytes = self.engine.stats().prefix, self.engine.layout.block_bytes
        self.close()
        if not stats.restored_tokens or stats.failed_restores:
            raise TierKVError(
                f"of {self.ids.shape[1]:,} tokens {stats.restored_tokens:,} came back from the store, and "
                f"{stats.failed_restores} rows failed: nothing is timed; look at the file system of {self.folder}"
            )
        return {
            **answer,
            "restored_tokens": stats.restored_tokens,
            "restored_bytes": stats.restored_tokens // self.block_size * block_bytes,
            "restore_seconds": stats.restore_seconds,
        }

    def close(self) -> None:
        """Close the engine."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def _attach(self, folder: Path, *, persist: bool = True) -> None:
        self.engine = tierkv.attach(self.model, self._config(folder, persist=persist))

    def _config(self, folder: Path, *, persist: bool) -> CacheConfig:
        """Return the defaults, with room for the prompt in memory and on disk; the user's variables have no say."""
        layout, _ = block_layout(self.model, self.block_size)
        kv_bytes = layout.blocks_for(self.ids.shape[1] + WARM_UP_TOKENS) * layout.block_bytes
        config = {
            "block_size": self.block_size,
            "device": {"capacity": max(2048 * _MIB, kv_bytes + kv_bytes // 4 + 64 * _MIB)},
            "disk": {"path": str(folder), "capacity": 4 * kv_bytes + 512 * _MIB},
            "prefix": {"persist": persist, "write_policy": "always"},
        }
        return load_config(config, environ={})

    def _flush(self) -> None:
        """Wait until the whole prompt is on the disk.

        Raises:
            TierKVError: the store did not take it.
        """
        written = keep_all(self.engine, FLUSH_SECONDS)
        stats = self.engine.stats().prefix
        if not written or stats.shed_blocks or stats.waiting_blocks:
            raise TierKVError(
                f"the store did not take the prompt ({stats.shed_blocks} blocks shed, {stats.waiting_blocks} waiting): "
                f"{stats.store.failed or 'the disk is too slow or too full'}; give another --disk-path"
            )


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
