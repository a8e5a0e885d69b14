"""Setup: the tiers and settings of a simulated engine, from budgets in bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tierkv.cost import CostModel, Read
from tierkv.errors import ConfigError
from tierkv.layout import SEGMENT_TOKENS
from tierkv.placement import Keep
from tierkv.simulate_store import WritePolicy
from tierkv.sizes import format_bytes
from tierkv.storage.codec import record_bytes
from tierkv.tier import Tier
from tierkv.virtual import connected_by_wire

LEAST_SLOTS: Final = 2
"""Device blocks of a sequence without which no step can begin, as for an engine."""
_SLOT_BYTES: Final = 4096  # records lie in slots of whole pages
_DISK_RUN: Final = 16
_KEEP: Final = Keep(first=1, recent=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A simulated engine.

    Attributes:
        slots: blocks of live sequences that each tier can hold.
        store_blocks: that the prefix store can hold; 0 turns it off.
        slots_per_segment: neighbouring slots of each tier.
        keep: the blocks of every sequence that stay on the device.
        promoted: tiers whose blocks move up where there is room.
        read: how blocks in host memory are read that lie there.
        eviction: the rule by which blocks are forgotten, in memory and on disk.
        write_policy: when a block is kept on disk.
        min_tokens: shorter prefixes are not kept on disk.
        queue_blocks: that may be on their way to the prefix store.
        batch: sequences that run at a time.
        longest_jump: tokens that the sequences decode at most before the manager is asked again. 1: after every token.
    """

    slots: Mapping[Tier, int]
    store_blocks: int = 0
    slots_per_segment: Mapping[Tier, int] = field(default_factory=dict)
    keep: Keep = _KEEP
    promoted: tuple[Tier, ...] = (Tier.HOST, Tier.DISK)
    read: Read = "stream"
    eviction: str = "lru"
    write_policy: WritePolicy = "second_sighting"
    min_tokens: int = 256
    queue_blocks: int = 4
    batch: int = 32
    longest_jump: int = 1 << 30


def make_setup(
    cost: CostModel,
    *,
    device_bytes: int,
    host_bytes: int = 0,
    disk_bytes: int = 0,
    queue_bytes: int = 256 << 20,
    batch: int = 32,
    eviction: str = "lru",
) -> Setup:
    """Return what an engine with default settings makes of budgets, ``prefix.persist = true`` where there is a disk.

    The prefix store and the sequences that live on disk get half of the disk each. The scratch that an engine takes from
    its pools is not counted: leave room for it.

    Args:
        cost: of the model on the machine, for the size of its blocks.
        device_bytes: for KV on the device.
        host_bytes: for KV in host memory; 0 turns the tier off.
        disk_bytes: for KV on disk; 0 turns the tier off.
        queue_bytes: that may be on their way to the prefix store; one block may in any case.
        batch: sequences that run at a time.
        eviction: name of the rule.

    Raises:
        ConfigError: the device cannot hold the two blocks that a sequence needs, or nothing connects a tier.
    """
    block = cost.block_bytes
    if device_bytes // block < LEAST_SLOTS:
        raise ConfigError(
            f"a device budget of {format_bytes(max(0, device_bytes))} cannot hold the {LEAST_SLOTS} blocks that a sequence "
            f"needs; a block of {cost.block_size} tokens takes {format_bytes(block)}, so raise it or make blocks smaller"
        )
    if disk_bytes and not any(Tier.DISK in wire for wire in cost.costs.wires):
        raise ConfigError("a disk budget is of no use, as nothing is known of the disk of this machine; set it to 0")
    record = -(-record_bytes(block, cost.block_size) // _SLOT_BYTES) * _SLOT_BYTES
    per_segment = max(1, SEGMENT_TOKENS // cost.block_size)
    # Where device and host are one memory, attention reads blocks of both where they lie.
    promoted = (Tier.HOST, Tier.DISK) if connected_by_wire(cost) else (Tier.DISK,)
    return Setup(
        slots={
            Tier.DEVICE: device_bytes // block,
            Tier.HOST: host_bytes // block,
            Tier.DISK: disk_bytes // 2 // block,
        },
        store_blocks=disk_bytes // 2 // record,
        slots_per_segment={Tier.DEVICE: per_segment, Tier.HOST: per_segment, Tier.DISK: _DISK_RUN},
        promoted=promoted,
        eviction=eviction,
        queue_blocks=max(1, queue_bytes // record),
        batch=batch,
    )
