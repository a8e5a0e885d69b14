"""Stores: the three stores of one engine, opened within their budgets, and how a block gets from one to another."""

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.budgets import Budgets
from tierkv.capacity import Bounce, Capacity, queue_bytes
from tierkv.cold_reads import HostIsRead
from tierkv.config import CacheConfig
from tierkv.errors import ConfigError, StoreError, TierKVError
from tierkv.geometry import PoolGeometry
from tierkv.layout import BlockLayout
from tierkv.moves import Move
from tierkv.storage.base import BlockStore
from tierkv.storage.codec import record_bytes
from tierkv.storage.slab import SlabStore
from tierkv.tier import Run, Tier
from tierkv.transfer import Copy

if TYPE_CHECKING:
    import torch

    from tierkv.storage.prefix_store import PrefixStore

log = logging.getLogger(__name__)

BOUNCE_BLOCKS = 4
"""Whole blocks on their way between a GPU and the disk at one time: enough to keep a drive busy."""

MIN_PREFIX_BYTES = 4 << 20
"""The least that a prefix store can be given (``storage.prefix_open.MIN_CAPACITY_BYTES``, which loads LMDB)."""

DISK_RUN = 16
"""Records that one read call fetches; on disk every slice is a record of its own, so this only bounds the call."""


@dataclass
class Stores:
    """The stores of one engine.

    Attributes:
        layout: shape of the blocks.
        device: the device pool.
        host: the host pool, or None where the tier is off.
        disk: the store of live sequences on disk, or None where the tier is off.
        queue_limit: the most RAM that writes to disk may take while they wait. It is part of the host tier, or of the
            device tier where there is no host tier, and never more than a share of it (``queue_bytes``).
        bounce: the part of the host pool through which device and disk meet; None where they meet directly.
        queue_least: the least RAM that the same may take.
        prefix: prefixes that are kept on disk, or None. Half of the disk tier, and half of its queue, are its.
    """

    layout: BlockLayout
    device: SlabStore
    host: SlabStore | None
    disk: "BlockStore | None"
    queue_limit: int = 0
    bounce: Bounce | None = None
    prefix: "PrefixStore | None" = None
    queue_least: int = 0

    @classmethod
    def open(cls, layout: BlockLayout, config: CacheConfig, budgets: Budgets, device: "torch.device") -> "Stores":
        """Open the stores that the budgets ask for.

        Raises:
            ConfigError: a budget cannot hold a single block, or the disk path cannot be used.
        """
        import torch

        cuda = device.type == "cuda"
        disk_on = budgets.disk > 0 and budgets.disk_path is not None
        queue = 0
        if config.prefix.persist and not disk_on:
            raise ConfigError(
                "prefix.persist = true keeps prefixes on disk, and there is no room there: give disk.capacity some, or set "
                "prefix.persist = false"
            )
        if config.prefix.persist and disk_on and budgets.disk < 2 * MIN_PREFIX_BYTES:
            raise ConfigError(
                f"disk.capacity = {budgets.disk:,} bytes is too small for prefix.persist = true, which takes half of it and needs "
                f"{MIN_PREFIX_BYTES:,} bytes; give disk.capacity at least {2 * MIN_PREFIX_BYTES:,} bytes"
            )
        least_queue = _least_queue(layout, config) if disk_on else 0
        if least_queue > budgets.write_queue and disk_on:
            raise ConfigError(
                f"disk.write_queue = {budgets.write_queue:,} bytes cannot take the blocks that prefix.persist = true writes; "
                f"give it at least {least_queue:,} bytes, or make block_size smaller"
            )
        if disk_on:
            # The queue is RAM: it lies in the host tier, or in the device tier of a machine without one.
            lender = budgets.host or (0 if cuda else budgets.device)
            queue = queue_bytes(lender, budgets.write_queue, least_queue)
            if cuda and not budgets.host:
                raise ConfigError(
                    "the disk tier of a GPU needs pinned memory to pass through, and host.capacity is 0; "
                    'give host.capacity some room, for example "1GiB", or set disk.capacity = 0'
                )
        device_bytes = budgets.device - (0 if budgets.host else queue)
        host_bytes = budgets.host - (queue if budgets.host else 0)
        least = 2 * layout.block_bytes + layout.scratch_bytes(1, layout.block_size)
        if PoolGeometry(layout, device_bytes).num_slots(layout.block_size) < Capacity.least_slots(1):
            raise ConfigError(
                f"device.capacity = {budgets.device:,} bytes cannot hold the working set of one sequence; a block of "
                f"{layout.block_size} tokens takes {layout.block_bytes:,} bytes in this model's {len(layout.layers)} "
                f"tiered layers, so give it for example {-(-(least + queue) // 2**20) + 1}MiB, or make block_size smaller"
            )
        if budgets.host and not PoolGeometry(layout, host_bytes).num_slots():
            raise ConfigError(
                f"host.capacity = {budgets.host:,} bytes cannot hold one block of {layout.block_bytes:,} bytes; raise "
                f"it, or set host.capacity = 0 to turn the tier off"
            )
        slab = SlabStore(layout, device_bytes, tier=Tier.DEVICE, device=device)
        host = None
        if host_bytes > 0:
            host = SlabStore(layout, host_bytes, tier=Tier.HOST, device=torch.device("cpu"), pinned=cuda)
        bounce = bounce_of(host) if host and cuda and disk_on else None
        stores = cls(layout, slab, host, None, budgets.write_queue if disk_on else 0, bounce)
        stores.queue_least = least_queue
        if disk_on and budgets.disk_path is not None:
            try:
                parts = 2 if config.prefix.persist else 1  # two stores share the tier and its queue
                stores.disk = _open_disk(layout, config, budgets.disk // parts, budgets.disk_path, queue // parts)
                if config.prefix.persist:
                    stores.prefix = _open_prefixes(config, budgets.disk // parts, budgets.disk_path, queue // parts)
            except BaseException as error:
                if isinstance(error, ConfigError) and not config.is_explicit("disk.path"):
                    log.warning("going on without a disk tier: %s", error)
                    stores.bounce = None
                    return stores
                stores.close()
                raise
        return stores

    @property
    def slots(self) -> dict[Tier, int]:
        """Blocks that each tier can hold."""
        stores = {Tier.DEVICE: self.device, Tier.HOST: self.host, Tier.DISK: self.disk}
        slots = {tier: getattr(store, "num_slots", 0) for tier, store in stores.items()}
        if self.bounce:
            slots[Tier.HOST] -= self.bounce.blocks
        return slots

    def host_is_read(self, cold_read: str) -> HostIsRead:
        """Return how the paged path reads blocks in host memory, with ``attention.cold_read`` as configured.

        In place: the device is a CPU, so both pools are one memory to it. By the CPU: attention over these blocks is
        computed there and merged. Streamed: through buffers on the device.
        """
        if cold_read == "compute":
            return "by the CPU"
        if cold_read == "auto" and self.device.on_cpu and not self.bounce:
            return "in place"
        return "streamed"

    @property
    def bounce_slots(self) -> range:
        """Host slots through which whole blocks pass; the last usable ones, so they change with ``set_scratch``."""
        if self.host is None or self.bounce is None:
            return range(0)
        return range(self.host.usable_slots - self.bounce.blocks, self.host.usable_slots)

    @property
    def slots_per_segment(self) -> dict[Tier, int]:
        """Neighbouring slots of each tier."""
        host = self.host.slots_per_segment if self.host else 1
        return {Tier.DEVICE: self.device.slots_per_segment, Tier.HOST: host, Tier.DISK: DISK_RUN}

    def capacity(self, layers_ahead: int, cold_read: str) -> Capacity:
        """Return what the tiers hold, for questions before a prefill."""
        host, disk = self.slots[Tier.HOST], self.slots[Tier.DISK]
        cold = bool(disk or (host and self.host_is_read(cold_read) == "streamed"))
        if self.host:
            return Capacity(self.layout, self.device.geometry, host, disk, layers_ahead, cold, bounce=self.bounce)
        # A larger device budget has a larger queue and writes larger batches, for which a full disk keeps more room:
        # up to a 32nd of it. What is promised for one budget must hold for the one that a refusal names.
        disk -= -(-disk // 32)
        return Capacity(
            self.layout, self.device.geometry, host, disk, layers_ahead, cold, self.queue_limit, self.queue_least
        )

    def slab(self, tier: Tier) -> SlabStore:
        """Return the pool of a memory tier."""
        store = self.device if tier is Tier.DEVICE else self.host
        if store is None or tier is Tier.DISK:
            raise TierKVError(f"there is no {tier.label} pool")
        return store

    @property
    def disk_store(self) -> BlockStore:
        """The disk store, where the tier is on."""
        if self.disk is None:
            raise TierKVError("there is no disk tier")
        return self.disk

    def set_scratch(self, tokens: int) -> None:
        """Lend scratch for ``tokens`` tokens of one layer from the device pool, and as much to bounce through."""
        self.device.set_scratch(tokens)
        if self.host and self.bounce:
            self.host.set_scratch(tokens)

    def bounces(self, move: Move) -> bool:
        """Return whether a move passes through one of the ``bounce_slots``."""
        return self.bounce is not None and Tier.HOST not in move.wire and Tier.DISK in move.wire

    def copy_of(self, move: Move, bounce_slot: int | None = None) -> Copy:
        """Return the work that carries out a move: all layers of one block.

        Args:
            move: what the manager planned.
            bounce_slot: a free one, where the move ``bounces``.
        """
        source, destination = move.wire
        num_bytes = self.layout.block_bytes
        if Tier.DISK not in move.wire:
            pairs = self.slab(source).copy_pairs(move.source_slot, self.slab(destination), move.slot)
            return Copy(move.wire, num_bytes, pairs)
        memory = self.slab(destination if source is Tier.DISK else source)
        slot = move.slot if source is Tier.DISK else move.source_slot
        if not self.bounces(move):
            if source is Tier.DISK:
                return Copy(
                    move.wire, num_bytes, load=lambda: self.load_block(move.source_slot, memory.block_views(slot))
                )
            return Copy(move.wire, num_bytes, store=lambda: self.save_block(memory.block_views(slot), move.slot))
        assert bounce_slot is not None
        host = self.slab(Tier.HOST)
        views = host.block_views(bounce_slot)
        if source is Tier.DISK:
            pairs = host.copy_pairs(bounce_slot, memory, slot)
            return Copy(move.wire, num_bytes, pairs, load=lambda: self.load_block(move.source_slot, views))
        pairs = memory.copy_pairs(slot, host, bounce_slot)
        return Copy(move.wire, num_bytes, pairs, store=lambda: self.save_block(views, move.slot))

    def load_block(self, disk_slot: int, views: "list[torch.Tensor]") -> None:
        """Fill the views of a block, shaped as ``SlabStore.block_views``, from the disk tier.

        Raises:
            RecordError: a slice is missing or damaged.
        """
        for layer, (group, member) in enumerate(self.layout.group_of):
            keys, values = views[2 * group][member], views[2 * group + 1][member]
            self.disk_store.read(layer, Run(disk_slot, 1), keys, values)

    def save_block(self, views: "list[torch.Tensor]", disk_slot: int) -> None:
        """Write the views of a block to the disk tier.

        Raises:
            StoreFull: it took no more.
        """
        for layer, (group, member) in enumerate(self.layout.group_of):
            keys, values = views[2 * group][member], views[2 * group + 1][member]
            self.disk_store.write(layer, Run(disk_slot, 1), keys, values)

    def close(self) -> None:
        """Close all stores. Idempotent."""
        with ExitStack() as stack:  # each is closed, whatever the others say
            for store in (self.device, self.host, self.disk, self.prefix):
                if store is not None:
                    stack.callback(store.close)


def bounce_of(host: SlabStore) -> Bounce:
    """Return what a host pool lends where a GPU and the disk meet in it."""
    return Bounce(host.geometry, max(1, min(BOUNCE_BLOCKS, host.num_slots // 8)))


def _least_queue(layout: BlockLayout, config: CacheConfig) -> int:
    """Return the bytes of queue that keeping prefixes needs: half of the queue must take a record of one block."""
    return 2 * record_bytes(layout.block_bytes, layout.block_size) if config.prefix.persist else 0


def _open_prefixes(config: CacheConfig, capacity: int, path: Path, queue_bytes: int) -> "PrefixStore | None":
    from tierkv.storage.prefix_store import PrefixStore

    try:
        return PrefixStore.open(
            path,
            capacity,
            eviction=config.prefix.eviction,
            ttl_seconds=config.prefix.ttl_seconds,
            write_batch=config.disk.write_batch,
            write_queue_bytes=queue_bytes,
        )
    except StoreError as error:  # a cache that cannot be used is done without
        log.warning("going on without kept prefixes: %s", error)
        return None


def _open_disk(layout: BlockLayout, config: CacheConfig, capacity: int, path: Path, queue_bytes: int) -> BlockStore:
    # Imported late: it loads lmdb, which a run without a disk tier does not need.
    from tierkv.storage.spill import SpillStore

    return SpillStore(
        layout,
        path,
        capacity_bytes=capacity,
        write_batch=config.disk.write_batch,
        write_queue_bytes=queue_bytes,
        readers=max(1, config.disk.readers),
    )
