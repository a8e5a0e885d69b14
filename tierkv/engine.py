"""Engine: the tiers of one model. Owns the stores, the manager and the threads; caches are handed out by it.

One forward reads like this (``SequenceBatch.append`` in ``tierkv.sequences`` walks it):

    begin     the manager gives every new token a home and makes room; the reader starts fetching cold layers
    append    per layer: new tokens go to their homes; the full K and V come back, or attention over them
    commit    the tokens are part of the sequences; background moves start
"""

import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Self

from tierkv.bandwidths import ModelFacts, cold_reads_of
from tierkv.budgets import Budgets
from tierkv.capacity import Capacity, ScratchPlan
from tierkv.config import CacheConfig
from tierkv.errors import CapacityError, ClosedError, TierKVError
from tierkv.fetch import Fetcher
from tierkv.gate import ForwardGate
from tierkv.interrupts import deferred_interrupt
from tierkv.layout import BlockLayout
from tierkv.machine import make_transfers
from tierkv.manager import TierManager
from tierkv.metrics import Counters, Stats
from tierkv.mover import Mover
from tierkv.moves import Step
from tierkv.orphans import Orphans
from tierkv.paged import PagedReader
from tierkv.placement import Keep
from tierkv.prefetch import LayerReader
from tierkv.prefix import PrefixCache
from tierkv.promises import Promise, Promises
from tierkv.report import make_stats
from tierkv.rows import RowTables
from tierkv.scratch import Scratch
from tierkv.sequences import SequenceBatch
from tierkv.stepping import MAX_ROOM_ROUNDS, begin_when_there_is_room
from tierkv.stores import Stores
from tierkv.tier import Tier, Wire
from tierkv.transfer import Copy, Ticket, TransferEngine
from tierkv.usage import Usage

if TYPE_CHECKING:
    import torch

    from tierkv.block_table import BlockTable


class Engine:
    """Tiered KV memory for one model on one device. Use as a context manager, or call ``close``.

    Thread rule: one forward at a time, kept by ``gate``; ``stats`` may be called from any thread.
    """

    def __init__(
        self,
        layout: BlockLayout,
        config: CacheConfig,
        budgets: Budgets,
        device: "torch.device",
        *,
        transfers: TransferEngine | None = None,
        stores: Stores | None = None,
        native_layers: int = 0,
        gathered_because: str = "nothing attends over blocks here",
        facts: ModelFacts | None = None,
    ) -> None:
        """Allocate the pools and start the workers.

        Args:
            layout: the block layout of the model's tiered layers.
            config: the validated configuration.
            budgets: its sizes, resolved to bytes on this machine.
            device: where the model computes.
            transfers: another executor than the device's own (tests).
            stores: other stores than those the budgets ask for (tests).
            native_layers: cached layers of the model that are left to transformers, for the report.
            gathered_because: why the paged path cannot be taken; empty where it can.
            facts: of the model, from which it is told how cold blocks are read the fastest; None: by rule.

        Raises:
            ConfigError: a budget is too small for a single block, or the disk path cannot be used.
        """
        self.layout = layout
        self.config = config
        self.budgets = budgets
        self.device = device
        self.native_layers = native_layers
        self.gathered_because = gathered_because
        self.moved: dict[Wire, int] = {}
        self.open_batch: weakref.ref[SequenceBatch] | None = None
        self._pid = os.getpid()
        self._closed = False
        self._caches: weakref.WeakSet[SequenceBatch] = weakref.WeakSet()
        self._promises = Promises()
        self._counts: dict[str, Any] = {field.name: 0 for field in fields(Counters)}
        readers = max(1, config.disk.readers)
        self.transfers = transfers or make_transfers(device, readers)
        self.gate = ForwardGate(self.transfers.follow, self.transfers.mark)
        try:
            self.stores = stores or Stores.open(layout, config, budgets, device)
        except BaseException:
            self.transfers.close()
            raise
        # Also runs when the engine is collected or the interpreter exits, so that no spill file outlives a process.
        self._finalizer = weakref.finalize(self, _close_parts, self.transfers, self.stores, self._pid)
        self.scratch = Scratch(layout, self.stores)
        self.fetcher = Fetcher(self.stores, self.scratch, self.transfers, self.count_copies, readers)
        self.gathered = LayerReader(layout, self.stores.device, self.scratch, self.fetcher)
        cold_read = config.attention.cold_read
        self.cold_reads = cold_reads_of(self.stores, self.transfers, cold_read, facts, gathered=bool(gathered_because))
        self.paged = PagedReader(layout, self.stores, self.scratch, self.fetcher, self.cold_reads)
        layers_ahead = self.cold_reads.layers_ahead(config.transfer.layers_ahead)
        self.capacity: Capacity = self.stores.capacity(layers_ahead, cold_read)
        keep = Keep(config.placement.keep_first, config.placement.keep_recent)
        self.manager = TierManager(
            layout.block_size,
            self.stores.slots,
            self.stores.slots_per_segment,
            keep,
            promoted=self._promoted(cold_read),
            eviction=config.prefix.eviction,
        )
        self._mover = Mover(self.manager, self.stores, self.transfers, self.count_copies, self.disk_failed)
        self._orphans = Orphans(self.manager, self.transfers, self.end_reads)
        self.usage = Usage(self.stores, self.manager, self.scratch)
        self.prefix = PrefixCache(self, config.prefix, self.stores.prefix)

    # -- what users call ------------------------------------------------------------------------------------------

    def open(self) -> SequenceBatch:
        """Return an empty batch of sequences."""
        self.check_open()
        batch = SequenceBatch(self)
        self._caches.add(batch)
        return batch

    def stats(self) -> Stats:
        """Return a snapshot of where every byte is, what moved and what waited. Any thread; not after close."""
        self.check_open()
        timings = {
            "stall_seconds": self.fetcher.stall_seconds,
            "copy_seconds": self.fetcher.copy_seconds,
            "tail_copies": self.manager.num_tail_copies,
        }
        return make_stats(self, Counters(**self._counts | timings), len(self._caches))

    def reserve(self, batch: SequenceBatch, rows: int, tokens: int, *, paged: bool = False) -> None:
        """Make sure that ``batch`` can grow to ``rows`` sequences of ``tokens`` tokens, before anything is computed.

        Args:
            batch: that grows.
            rows: sequences.
            tokens: the longest they get.
            paged: every forward will attend over blocks; those that gather after all make room by themselves.

        Raises:
            CapacityError: it cannot; the message names the smallest budget that suffices.
        """
        with self.exclusive():
            own = {block for table in batch.tables for block in table.blocks}
            held = self._live_blocks() - len(own) + self._promises.blocks_to_come(batch)
            least_buffer = self._promises.least_buffer(batch)
            try:
                plan = self.capacity.plan(rows, tokens, held, paged=paged, least_buffer=least_buffer)
            except CapacityError as error:
                if paged or not self.gathered_because:
                    raise
                raise CapacityError(f"{error}. Layers are gathered whole here: {self.gathered_because}") from None
            blocks = rows * self.layout.blocks_for(tokens)
            enough = self._num_slots() >= blocks + held
            least = self.manager.pools[Tier.DEVICE].num_slots >= self.capacity.least_slots(rows)
            # Dividing anew moves blocks and costs a moment: it is done where it must be, and where nobody would notice.
            # A ring of chunks may be smaller than it should be; a buffer for a layer may not.
            wanted = max(least_buffer, plan.buffer_tokens // 2 if paged else plan.buffer_tokens)
            if not (self._live_blocks() and enough and least and self.scratch.holds(wanted)):
                self._divide(plan)
            self._promises.give(batch, Promise(blocks, 0 if paged else rows * tokens))

    def end_call(self, batch: RowTables) -> None:
        """A call is over: what was set aside for it is free for others again, and so is the place of its blocks."""
        if self.closed:
            return
        with self.exclusive(), deferred_interrupt():
            if self._promises.end(batch):
                self.manager.rest(batch.tables)

    def close(self) -> None:
        """End the workers, give back all memory and remove the spill files. Idempotent; safe after an interrupt."""
        try:
            if not self._closed and os.getpid() == self._pid:
                self.prefix.close()
        finally:
            self._closed = True
        _close_parts(self.transfers, self.stores, self._pid)
        self._finalizer.detach()  # only now: an interrupted close is finished by the next one

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def check_open(self) -> None:
        """Raise unless the engine can be used here.

        Raises:
            ClosedError: it is closed, or this is a forked child, whose copy has no workers and no files.
        """
        if os.getpid() != self._pid:
            raise ClosedError(
                "this tierkv engine belongs to the parent process; attach to the model again after fork()"
            )
        if self._closed:
            raise ClosedError("this tierkv engine is closed; attach to the model again")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- the stages of a forward ----------------------------------------------------------------------------------

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other threads out of the tiers while the block runs."""
        with self.gate.exclusive():
            self._orphans.adopt()
            yield

    def begin_step(self, batch: SequenceBatch, count: int, first_seen: Sequence[int] | None) -> None:
        """Give ``count`` new tokens of every row a home, waiting for room where needed, and start fetching.

        The batch has the step, in ``batch.step``, the moment it exists: an interrupt can never leave it to nobody.

        Args:
            batch: that grows.
            count: new tokens of every row.
            first_seen: per row the first token that is not padding, where the step attends over blocks; None where it
                gathers.

        Raises:
            CapacityError: the tiers cannot hold them.
            BlockLost: a last block that must be copied cannot be read.
            TransferTimeout: a copy that must end first did not.
        """
        self._orphans.adopt()  # their room is wanted, and a torn one's fetches must end before others begin
        length = batch.length + count
        too_few_slots = self.manager.pools[Tier.DEVICE].num_slots < self.capacity.least_slots(batch.rows)
        paged = first_seen is not None
        least = (self.layout.block_size if self.capacity.cold else 0) if paged else batch.rows * length
        if too_few_slots or not self.scratch.holds(least):
            self._grow_scratch(batch, length, paged=paged)

        def begin_reads(step: Step) -> None:
            if first_seen is None:
                self.gathered.begin(step)
            else:
                self.paged.begin(step, first_seen)

        self._place(batch, batch.tables, count, begin_reads)

    def begin_fill(self, rows: RowTables, table: "BlockTable", count: int) -> None:
        """Give ``count`` tokens of one row a home, for bytes that no forward computes; see ``begin_step``."""
        self._orphans.adopt()
        self._place(rows, [table], count, lambda _: None)

    def end_reads(self, step: Step) -> None:
        """Wait for fetches of ``step``, needed before its slots may be given up.

        Raises:
            TransferTimeout: one did not end in time; can be tried again.
        """
        self.gathered.end(step)
        self.paged.end(step)

    def finish_step(self, step: Step, *, paged: bool) -> None:
        """Count a committed forward and start what may happen in the background."""
        by_cpu = paged and self.paged.cpu_attended
        self.count(
            forwards=1, paged_forwards=int(paged), cpu_forwards=int(by_cpu), tokens=step.count * len(step.tables)
        )
        self.usage.observe()
        with deferred_interrupt():
            self._mover.reap()
            self._mover.submit(self.manager.background(step.tables))

    def count(self, **events: int) -> None:
        """Add to the counters of ``Stats``."""
        for name, number in events.items():
            self._counts[name] += number

    def count_copies(self, copies: Sequence[Copy]) -> None:
        """Add what copies move to the bytes of their wires."""
        for copy in copies:
            self.moved[copy.wire] = self.moved.get(copy.wire, 0) + copy.num_bytes

    def disk_failed(self) -> None:
        """Put nothing more on disk; what lies there stays readable."""
        self.count(write_failures=1)
        self.manager.freeze(Tier.DISK)
        self.capacity = replace(self.capacity, disk_slots=0, disk_failed=True)

    def block_lost(self) -> None:
        """A live block cannot be read back. Others may share it: nobody else shall find it, nor what lies beside it."""
        self.count(blocks_lost=1)
        with deferred_interrupt():
            self.manager.disown_shared()

    def orphan(self, tables: "list[BlockTable]", step: Step | None, writes: list[Ticket]) -> None:
        """Take over the tables of a collected cache. Called by the garbage collector, from any thread at any time."""
        self._orphans.collected((tables, step, writes))

    def abandon(self, tables: "list[BlockTable]", step: Step, writes: list[Ticket]) -> None:
        """Take over rows into which copies are under way that nobody waits for any more."""
        self._orphans.abandoned((tables, step, writes))

    # -- internals ------------------------------------------------------------------------------------------------

    def _promoted(self, cold_read: str) -> tuple[Tier, ...]:
        """Return the tiers whose blocks move up where there is room: none that attention reads as well where they are."""
        if cold_read not in ("auto", "promote"):
            return ()
        in_place = not self.gathered_because and self.stores.host_is_read(cold_read) == "in place"
        return (Tier.DISK,) if in_place else (Tier.HOST, Tier.DISK)

    def _num_slots(self) -> int:
        return sum(0 if pool.frozen else pool.num_slots for pool in self.manager.pools.values())

    def _live_blocks(self) -> int:
        return sum(primary for primary, _ in self.manager.census().values()) - self.manager.shared.num_unused

    def _place(
        self, rows: RowTables, tables: "Sequence[BlockTable]", count: int, begin_reads: Callable[[Step], None]
    ) -> None:
        """Make room until the manager has a step, and hand it over."""

        def take(step: Step) -> None:
            rows.step = step
            begin_reads(step)

        begin_when_there_is_room(
            self.manager, self._mover, tables, count, take=take, waits=lambda: self.count(room_waits=1)
        )

    def _grow_scratch(self, batch: SequenceBatch, tokens: int, *, paged: bool) -> None:
        """A cache whose longest length nobody announced outgrew the scratch: enlarge it, generously where possible."""
        held = batch.rows * self.layout.blocks_for(tokens)
        elsewhere = max(0, self._live_blocks() - held) + self._promises.blocks_to_come(batch)
        least_buffer = self._promises.least_buffer(batch)
        try:
            plan = self.capacity.plan(
                batch.rows, tokens + tokens // 2, elsewhere, paged=paged, least_buffer=least_buffer
            )
        except CapacityError:
            plan = self.capacity.plan(batch.rows, tokens, elsewhere, paged=paged, least_buffer=least_buffer)
        self._divide(plan)

    def _divide(self, plan: ScratchPlan) -> None:
        """Move blocks out of the end of the pools and lend it as scratch."""
        bounce = self.stores.bounce is not None
        for _ in range(MAX_ROOM_ROUNDS):
            with deferred_interrupt():
                self._mover.reap()
                room = self.manager.resize(Tier.HOST, plan.host_slots) if bounce else None
                room = room or self.manager.resize(Tier.DEVICE, plan.device_slots)
                if room is None and not (bounce and self.manager.moves):  # they may pass through what is lent anew
                    self.scratch.divide(plan)
                    return
                self._mover.submit(room.moves if room else ())
            self._mover.wait()
        raise TierKVError("the pools cannot give room to the scratch: their blocks do not move")


def _close_parts(transfers: TransferEngine, stores: Stores, pid: int) -> None:
    if os.getpid() == pid:  # a forked child owns none of it
        transfers.close()
        stores.close()
