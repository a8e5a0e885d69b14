"""Why each value of a tuned configuration is what it is; and the values that follow from figures rather than from contests."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

from tierkv.benchmarks.filled import token_bytes
from tierkv.benchmarks.probe_store import Restore, StoreProbe
from tierkv.benchmarks.replay import compile_trace, replay
from tierkv.config import CacheConfig
from tierkv.cost import Read
from tierkv.eviction import POLICIES
from tierkv.fit import DecodePoint, Fit, Point, PrefillPoint, RestorePoint
from tierkv.machine import free_disk
from tierkv.sizes import Size, format_bytes, free_memory
from tierkv.tier import Tier
from tierkv.traces import PRESETS, generate

if TYPE_CHECKING:
    from tierkv.benchmarks.probe import Residency

WRITE_BATCHES: Final = (4, 16, 64)
REPLAYED_SESSIONS: Final = 40
REPLAYED_SHARES: Final = (0.05, 0.1, 0.25)
"""Room of the store, as shares of all different blocks of the trace."""
CLEARLY: Final = 0.03
_MIB: Final = 2**20
_SCRATCH_SHARE: Final = 0.15
"""What the device tier lends as scratch, generously."""
_MEMORY_SHARE: Final = 0.6
"""Of free memory: the rest is for activations and for others."""
_DISK_SHARE: Final = 0.4
"""Of free disk space: a capacity that is set must still fit tomorrow."""


class Reasons:
    """Collects a sentence for each key. Sizes are those of one model and one goal.

    Attributes:
        write_bytes_per_second: at what rate the store takes KV for good, once ``writer`` has measured it.
    """

    def __init__(self, model: Any, context: int, sessions: int) -> None:
        """Begin without any."""
        self._device = model.device
        self._token_bytes = token_bytes(model)
        self._context = context
        self._sessions = sessions
        self._texts: dict[str, str] = {}
        self.write_bytes_per_second = 0.0

    def note(self, key: str, text: str) -> None:
        """Say why a key has its value."""
        self._texts[key] = text

    def text(self, key: str) -> str:
        """Return what was said of a key."""
        return self._texts[key]

    def ordered(self, keys: Iterable[str]) -> dict[str, str]:
        """Return all that was said, in the order of ``keys``."""
        return {key: self._texts[key] for key in keys if key in self._texts}

    # -- contests -------------------------------------------------------------------------------------------------

    def predict(self, fitted: Fit, block_size: int, cold: "Residency", new_tokens: int) -> float:
        """Return what the model says of a short workload with blocks of a size: decoding partly cold KV, and a restore.

        What the last, half-filled block of a sequence wastes is counted as that much more time.
        """
        _, cold_seconds, restore = self.workload(fitted, block_size, cold, fitted.raw_bytes_per_second).values()
        return (new_tokens * cold_seconds + restore) * (1 + block_size / 2 / self._context)

    def workload(
        self, fitted: Fit, block_size: int, cold: "Residency", raw_bytes_per_second: float
    ) -> dict[str, float]:
        """Return what the model says of a decoded token, KV on the device or mostly below it, and of a restore."""
        kv_bytes, block_bytes = self._context * self._token_bytes, block_size * self._token_bytes
        below = Tier.HOST if cold == "host" else Tier.DISK
        lying = {Tier.DEVICE: kv_bytes // 4, below: kv_bytes - kv_bytes // 4}
        points: dict[str, Point] = {
            "a token, KV on device": DecodePoint({Tier.DEVICE: kv_bytes}, block_bytes, 0.0),
            f"a token, KV on {cold}": DecodePoint(lying, block_bytes, 0.0, self._host_read(fitted)),
            "a restore": RestorePoint(self._context // block_size, block_bytes, raw_bytes_per_second, 0.0),
        }
        return {what: fitted.seconds(point) for what, point in points.items()}

    @staticmethod
    def _host_read(fitted: Fit) -> Read:
        return "compute" if Tier.HOST in fitted.costs.kv_bytes_per_second else "stream"

    def contest(self, key: str, chosen: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], context: int) -> None:
        """Say how a contest was decided; ``rows`` are what was measured, that of the value that was there first."""
        figures = [
            f"{1e3 * seconds:.1f} ms a token with KV on {where}" for where, seconds in chosen["decode_seconds"].items()
        ]
        if "restore_seconds" in chosen:
            figures.append(f"{1e3 * chosen['restore_seconds']:.0f} ms to restore {context:,} tokens")
        others = [row for row in rows if row is not chosen]
        compared = ", ".join(f"{row['value']}: {row['seconds'] / chosen['seconds'] - 1:+.0%} time" for row in others)
        self.note(
            key, f"measured {'; '.join(figures)}. Against it {compared}." if others else f"measured {figures[0]}."
        )

    # -- values that follow from figures --------------------------------------------------------------------------

    def writer(
        self, store: StoreProbe, chosen: Mapping[str, Any], start: CacheConfig, fitted: Fit, rounds: int
    ) -> dict[str, Any]:
        """Return how the store is written: batch, queue and policy."""
        there = start.disk.write_batch
        batches = [there, *(batch for batch in WRITE_BATCHES if batch != there)]
        settings = [Restore(self._context, {**chosen, "disk.write_batch": batch}) for batch in batches]
        times = dict(zip(batches, store.write(settings, max(3, rounds // 2)), strict=True))
        best = min(batches, key=lambda batch: times[batch])
        batch = best if times[best] < times[there] * (1 - CLEARLY) else there
        kv_bytes = self._context * self._token_bytes
        self.write_bytes_per_second = rate = kv_bytes / times[batch]
        shown = ", ".join(
            f"{one}: {format_bytes(round(kv_bytes / seconds))}/s" for one, seconds in sorted(times.items())
        )
        self.note("disk.write_batch", f"blocks a transaction, with what was written to the disk for good: {shown}.")

        made = kv_bytes / fitted.seconds(PrefillPoint(self._context, 0, 0.0))
        waiting = kv_bytes * max(0.25, 1 - rate / made)
        queue = max(64 * _MIB, -(-round(waiting) // (16 * _MIB)) * 16 * _MIB)
        self.note(
            "disk.write_queue",
            f"a prefill of {self._context:,} tokens makes {format_bytes(round(made))}/s of KV and the disk takes "
            f"{format_bytes(round(rate))}/s; so much of it may have to wait.",
        )
        keeps_up = rate >= made
        self.note(
            "prefix.write_policy",
            f"with prefix.persist = true: the disk {'keeps' if keeps_up else 'does not keep'} up with a prefill, so "
            + ("every prefix can be written." if keeps_up else "only what was asked for twice is written."),
        )
        return {
            "disk.write_batch": batch,
            "disk.write_queue": Size(queue),
            "prefix.write_policy": "always" if keeps_up else "second_sighting",
        }

    def policies(self, fitted: Fit, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the eviction rule and the shortest prefix worth keeping."""
        found = replayed_policies()
        best = max(found, key=lambda policy: found[policy])
        policy = best if found[best] > found["lru"] * (1 + CLEARLY) else "lru"
        shown = ", ".join(f"{name} {ratio:.1%}" for name, ratio in found.items())
        self.note(
            "prefix.eviction",
            f"prefill saved on made-up chats ({REPLAYED_SESSIONS} sessions, the store holding 5% to 25% of them): {shown}.",
        )
        size = int(values["block_size"])
        least = self._break_even(fitted, size)
        if least is None:
            least = self._context
            why = f"up to {least:,} tokens a restore never takes less time than computing them, by the model of this machine."
        else:
            why = (
                f"from {least:,} tokens on a restore takes less time than computing them, by the model of this machine."
            )
        self.note("prefix.min_tokens", why)
        return {"prefix.eviction": policy, "prefix.min_tokens": least}

    def budgets(self, start: CacheConfig, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the sizes of the tiers: what the goal needs, as far as the machine has it."""
        size = int(values["block_size"])
        blocks = self._sessions * -(-(self._context + size) // size)
        needed = round(blocks * size * self._token_bytes * (1 + _SCRATCH_SHARE)) + 64 * _MIB
        on_gpu = self._device.type == "cuda"
        free = torch.cuda.mem_get_info(self._device)[0] if on_gpu else free_memory()
        device = min(needed, round(free * _MEMORY_SHARE))
        what = f"{self._sessions} x {self._context:,} tokens take {format_bytes(needed)} with scratch"
        where = "device memory" if on_gpu else "memory"
        fits = device >= needed
        self.note(
            "device.capacity",
            f"{what}; {format_bytes(free)} of {where} is free, of which {_MEMORY_SHARE:.0%} may be taken: "
            + ("all of it fits." if fits else "the rest lies below."),
        )
        left = needed - device
        host = min(left, round(free_memory() * _MEMORY_SHARE / 2)) if on_gpu else 0
        self.note(
            "host.capacity",
            f"what the device does not hold: {format_bytes(left)}."
            if on_gpu
            else "without a GPU it would be the same memory as the device tier.",
        )
        left -= host
        room = free_disk(start.disk.path.expanduser()) or 0
        # Live blocks get one half where prefixes are persisted; records have headers and pages of their own.
        wanted, most = 2 * left + left // 4, round(room * _DISK_SHARE)
        disk = min(max(wanted, start.disk.capacity.resolve(room)), most)
        if wanted > most:
            why = f"{format_bytes(left)} of the goal's KV has to lie on disk, which may not fit: that takes {format_bytes(wanted)}"
        elif left:
            why = f"{format_bytes(left)} of the goal's KV has to lie on disk, and prefixes may have as much"
        else:
            why = "no KV of the goal has to lie on disk, so it is for prefixes"
        self.note("disk.capacity", f"{why}; {format_bytes(room)} is free, of which {_DISK_SHARE:.0%} may be taken.")
        sizes = {"device.capacity": device, "host.capacity": host, "disk.capacity": disk}
        return {key: Size(value // _MIB * _MIB) for key, value in sizes.items()}

    # -- internals ------------------------------------------------------------------------------------------------

    def _break_even(self, fitted: Fit, block_size: int) -> int | None:
        """Return the fewest tokens, whole blocks, that are sooner restored than computed; None if none of the goal's are."""
        block_bytes = block_size * self._token_bytes
        for blocks in range(1, max(2, self._context // block_size)):
            restore = fitted.seconds(RestorePoint(blocks, block_bytes, fitted.raw_bytes_per_second, 0.0))
            if restore < fitted.seconds(PrefillPoint(blocks * block_size, 0, 0.0)):
                return blocks * block_size
        return None


@cache
def replayed_policies() -> Mapping[str, float]:
    """Return, by eviction rule, the share of prefill that it saves on made-up chats. The same on every machine."""
    trace = compile_trace(generate(replace(PRESETS["chat"], sessions=REPLAYED_SESSIONS)))
    room = [round(share * trace.facts()["unique_bytes"]) for share in REPLAYED_SHARES]
    return {
        policy: statistics.mean(replay(trace, policy, capacity).compute_hit_ratio for capacity in room)
        for policy in POLICIES
    }
