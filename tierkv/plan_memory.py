"""The memory half of a plan: where the blocks of a batch go, and how many sessions the tiers hold. Exact arithmetic."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, Final

from tierkv.architecture_layers import Architecture
from tierkv.config import CacheConfig
from tierkv.errors import CapacityError, ConfigError
from tierkv.hardware import RESERVE_PERCENT, HardwareProfile, check_weights_fit, devices_for
from tierkv.layout import DTYPE_BYTES, BlockLayout
from tierkv.sizes import Size, format_bytes
from tierkv.tier import Tier

KEEP_RECENT: Final = CacheConfig().placement.keep_recent
"""Blocks at the end of every sequence that lie on the device, as far as it can hold them."""
_QUANTILES: Final = 1000


@dataclass(frozen=True, slots=True)
class Mix:
    """How long the sessions are: log-normal, cut off at the context.

    Attributes:
        mean_tokens: of the distribution before it is cut off.
        spread: sigma of its logarithm; 0 makes every session the same.
    """

    mean_tokens: int
    spread: float = 0.0

    def lengths(self, longest: int) -> list[int]:
        """Return the lengths at evenly spaced shares of all sessions, from the shortest to the longest."""
        if not self.spread:
            return [min(longest, self.mean_tokens)]
        median = math.log(self.mean_tokens) - self.spread**2 / 2
        shares = ((index + 0.5) / _QUANTILES for index in range(_QUANTILES))
        drawn = (math.exp(NormalDist(median, self.spread).inv_cdf(share)) for share in shares)
        return [max(1, min(longest, round(length))) for length in drawn]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the blocks of a batch lie.

    Attributes:
        blocks: by tier.
        missing: blocks for which there is no room.
    """

    blocks: Mapping[Tier, int]
    missing: int

    @property
    def on_device(self) -> bool:
        """Whether everything lies on the device."""
        return not self.missing and not any(self.blocks[tier] for tier in Tier if tier is not Tier.DEVICE)


def default_budgets(
    profile: HardwareProfile, architecture: Architecture, dtype: str, devices: int = 1
) -> dict[Tier, int]:
    """Return what a machine has for KV: device memory less weights and a reserve, host memory, and the disk.

    Raises:
        CapacityError: the weights leave nothing.
    """
    left = _free_bytes(profile, architecture, dtype, devices)
    left -= profile.device.memory_bytes.value * devices * RESERVE_PERCENT // 100
    if left <= 0:
        needed = max(devices + 1, devices_for(profile, architecture, dtype))
        raise CapacityError(
            f"the weights of {architecture.name} leave no more than the reserve of {RESERVE_PERCENT}% of {profile.name}; use "
            f"--devices {needed}, a smaller model, or --device-budget"
        )
    return {Tier.DEVICE: left, **_below(profile)}


def _free_bytes(profile: HardwareProfile, architecture: Architecture, dtype: str, devices: int) -> int:
    """Return what the weights leave of the devices' memory."""
    check_weights_fit(profile, architecture, dtype, devices)
    return profile.device.memory_bytes.value * devices - architecture.weights.total_bytes(dtype)


def _below(profile: HardwareProfile) -> dict[Tier, int]:
    host = profile.host.memory_bytes.value if profile.host is not None else 0
    disk = profile.disk.capacity_bytes.value if profile.disk is not None else 0
    return {Tier.HOST: host, Tier.DISK: disk}


def resolve_budgets(
    given: Mapping[Tier, Size],
    profile: HardwareProfile | None,
    architecture: Architecture,
    dtype: str,
    devices: int = 1,
) -> dict[Tier, int]:
    """Return the bytes of every tier that is known: as given, and otherwise what the machine has.

    Raises:
        ConfigError: a budget needs a machine, or one that has this tier.
        CapacityError: a tier is smaller than its budget; on the device, beside the weights.
    """
    if profile is None:
        below = next((tier for tier in given if tier is not Tier.DEVICE), None)
        if below is not None and Tier.DEVICE not in given:
            raise ConfigError(
                f"--{below.label}-budget says nothing without the tier above it: give --device-budget, or --profile, too"
            )
        for tier, size in given.items():
            if size.percent is not None:
                raise ConfigError(f"--{tier.label}-budget {size}: a share of what? Give --profile, or bytes")
        return {tier: size.size_bytes for tier, size in given.items()}
    if profile.host is None and not given.get(Tier.HOST, Size()).is_zero:
        raise ConfigError(
            f"--host-budget: on {profile.name} the device is the RAM, so there is no host tier; leave it out"
        )
    if profile.disk is None and not given.get(Tier.DISK, Size()).is_zero:
        raise ConfigError(f"--disk-budget: {profile.name} has no disk; leave it out, or give a profile with one")
    room = _free_bytes(profile, architecture, dtype, devices)
    if Tier.DEVICE in given:
        whole = {Tier.DEVICE: room, **_below(profile)}
    else:
        whole = default_budgets(profile, architecture, dtype, devices)
    budgets = {tier: given[tier].resolve(whole[tier]) if tier in given else whole[tier] for tier in Tier}
    for tier, most in _below(profile).items():
        if budgets[tier] > most:
            raise CapacityError(
                f"--{tier.label}-budget {format_bytes(budgets[tier])} is not possible: {profile.name} has "
                f"{format_bytes(most)} of it; give at most that, or leave it out"
            )
    if budgets[Tier.DEVICE] > room:
        memory = profile.device.memory_bytes.value * devices
        raise CapacityError(
            f"--device-budget {format_bytes(budgets[Tier.DEVICE])} is not possible: {profile.name} has {format_bytes(memory)}, "
            f"of which the weights leave {format_bytes(room)}"
        )
    return budgets


def check_block_fits(budgets: Mapping[Tier, int], layout: BlockLayout) -> None:
    """Refuse a device budget that holds no block.

    Raises:
        CapacityError: it holds none.
    """
    device = budgets.get(Tier.DEVICE)
    if device is not None and device < layout.block_bytes:
        raise CapacityError(
            f"a device budget of {format_bytes(device)} holds no block: one is {format_bytes(layout.block_bytes)}; give more, "
            f"or a smaller --block-size"
        )


def place(budgets: Mapping[Tier, int], layout: BlockLayout, rows: int, tokens: int) -> Placement:
    """Return where the blocks of ``rows`` sequences of ``tokens`` tokens lie, from the fastest tier down.

    The block that a row writes to must lie on the device: rows for which it has none are missing whole.
    """
    slots = {tier: budgets.get(tier, 0) // layout.block_bytes for tier in Tier}
    blocks_of_row = layout.blocks_for(tokens)
    runnable = min(rows, slots[Tier.DEVICE])
    left = runnable * blocks_of_row
    blocks = {}
    for tier in Tier:
        blocks[tier] = min(left, slots[tier])
        left -= blocks[tier]
    return Placement(blocks, left + (rows - runnable) * blocks_of_row)


def sessions_held(
    budgets: Mapping[Tier, int], architecture: Architecture, layout: BlockLayout, context: int, mix: Mix, batch: int
) -> dict[str, Any]:
    """Return how many sessions the tiers hold.

    Args:
        budgets: bytes by tier.
        architecture: the model.
        layout: its blocks.
        context: tokens that a session may come to.
        mix: how long sessions are.
        batch: sessions that run at a time; each of them needs a block on the device.

    Returns:
        ``contiguous``: each reserves the whole context on the device, as a cache without blocks does. ``paged``: each
        takes the blocks of its own length, on the device. ``tiered``: the same in all tiers. And what that rests on.
    """
    lengths = mix.lengths(context)
    blocks = sum(map(layout.blocks_for, lengths)) / len(lengths)
    tokens = sum(lengths) / len(lengths)
    slots = {tier: budgets.get(tier, 0) // layout.block_bytes for tier in Tier}
    tiered = int(sum(slots.values()) / blocks) if slots[Tier.DEVICE] >= batch else 0
    return {
        "contiguous": budgets.get(Tier.DEVICE, 0) // architecture.kv_bytes(context, layout.dtype),
        "paged": int(slots[Tier.DEVICE] / blocks),
        "tiered": tiered,
        "mean_tokens": round(tokens, 1),
        "spread": mix.spread,
        "mean_blocks": round(blocks, 2),
        "last_block_waste": round(1 - tokens / (blocks * layout.block_size), 4),
    }


def read_bytes(
    architecture: Architecture, dtype: str, context: int, placement: Placement, rows: int, block_size: int
) -> dict[Tier, float]:
    """Return the bytes that all rows read for one token each, by the tier where they lie.

    The rows share the tiers evenly. A layer with a window reads the end of a sequence only, which lies on the device
    as far as that can hold it. What several layers read is copied once.
    """
    read = dict.fromkeys(Tier, 0.0)
    for tier, start, end in _spans(placement, rows, context, block_size):
        for layer in architecture.layers:
            if layer.kind == "shared" and tier is not Tier.DEVICE:
                continue
            seen = end - max(start, context - layer.tokens_read(context))
            read[tier] += rows * max(0.0, seen) * layer.elements_per_token * DTYPE_BYTES[dtype]
    return read


def _spans(placement: Placement, rows: int, context: int, block_size: int) -> Iterator[tuple[Tier, float, float]]:
    """Yield (tier, first token, end) of a row's parts: its front on the device, then host and disk, its end on the device."""
    shares = {tier: placement.blocks[tier] / rows for tier in Tier}
    recent = min(shares[Tier.DEVICE], KEEP_RECENT)
    parts = [
        (Tier.DEVICE, shares[Tier.DEVICE] - recent),
        (Tier.HOST, shares[Tier.HOST]),
        (Tier.DISK, shares[Tier.DISK]),
        (Tier.DEVICE, recent),
    ]
    start = 0.0
    for tier, blocks in parts:
        end = min(float(context), start + blocks * block_size)
        yield tier, start, end
        start = end
