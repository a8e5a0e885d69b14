"""Engine: the tiers of one model. Owns the stores, the manager and the threads; caches are handed out by it.

One forward reads like this (``SequenceBatch.append`` in ``tierkv.sequences`` walks it):

    begin     the manager gives every new token a home and makes room; the reader starts fetching cold layers
    append    per layer: new tokens go to their homes; the full K and V come back
    commit    the tokens are part of the sequences; background moves start
"""

import os
import shutil
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierkv.block_table import BlockTable
from tierkv.capacity import Capacity
from tierkv.config import Budgets, CacheConfig, resolve
from tierkv.errors import BlockLost, ClosedError, ConfigError, RecordError, StoreFull, TierKVError
from tierkv.interrupts import deferred_interrupt
from tierkv.layout import BlockLayout
from tierkv.manager import Move, Step, TierManager
from tierkv.metrics import Counters, Stats
from tierkv.placement import Keep
from tierkv.prefetch import LayerReader
from tierkv.report import make_stats
from tierkv.sequences import SequenceBatch
from tierkv.sizes import free_memory
from tierkv.stores import Stores
from tierkv.tier import Tier, Wire
from tierkv.usage import Usage
from tierkv.transfer import WAIT_SECONDS, Copy, ThreadTransfers, Ticket, TransferEngine

if TYPE_CHECKING:
    import torch

MAX_ROOM_ROUNDS = 1000
"""Making room takes a few rounds; this many mean that sequences take each other's slots for ever."""


class Engine:
    """Tiered KV memory for one model on one device. Use as a context manager, or call ``close``.

    Thread rule: one forward at a time (``enter_forward`` to ``leave_forward``); ``stats`` may be called from any thread.
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

        Raises:
            ConfigError: a budget is too small for a single block, or the disk path cannot be used.
        """
        self.layout = layout
        self.config = config
        self.budgets = budgets
        self.device = device
        self.native_layers = native_layers
        self.moved: dict[Wire, int] = {}
        self._pid = os.getpid()
        self._closed = False
        self._gate = threading.Lock()
        self._gate_owner: int | None = None
        self._caches: weakref.WeakSet[SequenceBatch] = weakref.WeakSet()
        self._orphans: deque[tuple[list[BlockTable], Step | None]] = deque()
        self._tickets: dict[Move, Ticket] = {}
        self._counts: dict[str, Any] = {field.name: 0 for field in fields(Counters)}
        self.stores = stores or Stores.open(layout, config, budgets, device)
        self.transfers = transfers or _make_transfers(device, max(1, config.disk.readers))
        self.reader = LayerReader(layout, self.stores, self.transfers, self.count_copies)
        self.capacity = self.stores.capacity(config.transfer.layers_ahead)
        self.manager = TierManager(
            layout.block_size,
            self.stores.slots,
            self.stores.slots_per_segment,
            Keep(config.placement.keep_first, config.placement.keep_recent),
        )
        self.usage = Usage(self.stores, self.manager, self.reader)

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
        self._adopt_orphans()
        return make_stats(self, Counters(**self._counts | {"stall_seconds": self.reader.stall_seconds}), len(self._caches))

    def reserve(self, batch: SequenceBatch, rows: int, tokens: int) -> None:
        """Make sure that ``batch`` can grow to ``rows`` sequences of ``tokens`` tokens, before anything is computed.

        Raises:
            CapacityError: it cannot; the message names the smallest budget that suffices.
        """
        with deferred_interrupt():
            self._adopt_orphans()
        own = {block for table in batch.tables for block in table.blocks}
        live = sum(primary for primary, _ in self.manager.census().values())
        plan = self.capacity.plan(rows, tokens, live - len(own))
        if self.reader.holds(plan.buffer_tokens) and live:
            return
        self._divide_device(plan.num_buffers, plan.buffer_tokens, plan.device_slots)

    def close(self) -> None:
        """End the workers, give back all memory and remove the spill files. Idempotent; safe after an interrupt."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return  # a forked child owns none of it
        self.transfers.close()
        self.stores.close()

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
            raise ClosedError("this tierkv engine belongs to the parent process; after fork() attach to the model again")
        if self._closed:
            raise ClosedError("this tierkv engine is closed; attach to the model again")

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- the stages of a forward ----------------------------------------------------------------------------------

    def enter_forward(self) -> None:
        """Wait until no other thread is inside a forward of this engine.

        Raises:
            TierKVError: another thread has been inside for too long.
        """
        if self._gate_owner == threading.get_ident():
            return  # an interrupted forward of this thread never left
        if not self._gate.acquire(timeout=WAIT_SECONDS):
            raise TierKVError(f"another thread has been inside a forward of this engine for {WAIT_SECONDS:g} s")
        self._gate_owner = threading.get_ident()

    def leave_forward(self) -> None:
        """Let the next thread in; does nothing where this thread is not inside."""
        if self._gate_owner == threading.get_ident():
            self._gate_owner = None
            self._gate.release()

    def begin_step(self, tables: Sequence[BlockTable], count: int) -> Step:
        """Give ``count`` new tokens of every table a home, waiting for room where needed, and start fetching.

        Raises:
            CapacityError: the tiers cannot hold them.
            BlockLost: a last block that must be copied cannot be read.
            TransferTimeout: a copy that must end first did not.
        """
        tokens = len(tables) * (tables[0].length + count)
        if not self.reader.holds(tokens):
            self._grow_scratch(len(tables), tables[0].length + count)
        for _ in range(MAX_ROOM_ROUNDS):
            with deferred_interrupt():
                self._adopt_orphans()
                self._reap()
                outcome = self.manager.begin(tables, count)
                if isinstance(outcome, Step):
                    self.reader.begin(outcome)
                    return outcome
                self._submit(outcome.moves)
            self.count(room_waits=1)
            self._wait_for_moves()
        raise TierKVError("no room could be made: sequences keep taking each other's blocks; close some caches")

    def finish_step(self, step: Step) -> None:
        """Count a committed forward and start what may happen in the background."""
        self.count(forwards=1, tokens=step.count * len(step.tables))
        self.usage.observe()
        with deferred_interrupt():
            self._reap()
            self._submit(self.manager.background(step.tables))

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

    def orphan(self, tables: list[BlockTable], step: Step | None) -> None:
        """Take over the tables of a collected cache. Called by the garbage collector, from any thread at any time."""
        self._orphans.append((tables, step))

    # -- internals ------------------------------------------------------------------------------------------------

    def _adopt_orphans(self) -> None:
        while self._orphans:
            tables, step = self._orphans.popleft()
            if step is not None:
                self.manager.rollback(step)
            for table in tables:
                self.manager.release(table)

    def _submit(self, moves: Sequence[Move]) -> None:
        for move in moves:
            copy = self.stores.copy_of(move)
            self.count_copies([copy])
            self._tickets[move] = self.transfers.submit([copy])

    def _reap(self) -> None:
        """Report the moves that ended."""
        for move in list(self.manager.moves):
            ticket = self._tickets.get(move)
            if ticket is not None and not self.transfers.is_done(ticket):
                continue
            self._tickets.pop(move, None)
            # No ticket: an interrupt came between planning and submitting. It did not happen.
            error = None if ticket is None else ticket.error
            if ticket is None or error is not None:
                self.manager.fail(move)
            else:
                self.manager.complete(move)
                self.count(tail_copies=int(move.tail_of is not None))
            if isinstance(error, StoreFull):
                self.disk_failed()
            elif error is not None and move.tail_of is not None:
                self.count(blocks_lost=1)
                raise BlockLost(f"the last block of a sequence cannot be read back ({error})") from error

    def _wait_for_moves(self) -> None:
        for ticket in list(self._tickets.values()):
            try:
                self.transfers.wait(ticket)
            except (StoreFull, RecordError):
                continue  # `_reap` reports it

    def _grow_scratch(self, rows: int, tokens: int) -> None:
        """A cache whose longest length nobody announced outgrew the scratch: enlarge it, generously where possible."""
        live = sum(primary for primary, _ in self.manager.census().values())
        held = rows * self.layout.blocks_for(tokens)
        for ahead in (tokens + tokens // 2, tokens):
            try:
                plan = self.capacity.plan(rows, ahead, max(0, live - held))
            except TierKVError:
                if ahead == tokens:
                    raise
                continue
            self._divide_device(plan.num_buffers, plan.buffer_tokens, plan.device_slots)
            return

    def _divide_device(self, num_buffers: int, buffer_tokens: int, device_slots: int) -> None:
        """Move blocks out of the end of the device pool and lend it as scratch."""
        for _ in range(MAX_ROOM_ROUNDS):
            with deferred_interrupt():
                self._reap()
                room = self.manager.resize(Tier.DEVICE, device_slots)
                if room is None:
                    self.stores.device.set_scratch(num_buffers * buffer_tokens)
                    self.reader.use_buffers(num_buffers, buffer_tokens)
                    return
                self._submit(room.moves)
            self._wait_for_moves()
        raise TierKVError("the device pool cannot give room to the scratch: its blocks do not move")


def resolve_budgets(config: CacheConfig, device: "torch.device") -> Budgets:
    """Return the budgets of ``config`` on this machine, from what is free now.

    Raises:
        ConfigError: a budget that was set does not fit.
    """
    import torch

    cuda = device.type == "cuda"
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"tiers on {device.type} devices are not supported; legal: cpu, cuda")
    free_device = torch.cuda.mem_get_info(device)[0] if cuda else 0
    return resolve(
        config,
        cuda=cuda,
        free_device_bytes=free_device,
        free_ram_bytes=free_memory(),
        free_disk_bytes=_free_disk(config.disk.path),
    )


def _free_disk(path: str) -> int | None:
    """Return the free bytes where ``path`` is or would be made, or None where nobody knows."""
    folder = Path(path).expanduser().absolute()
    for candidate in (folder, *folder.parents):
        if candidate.exists():
            try:
                return shutil.disk_usage(candidate).free
            except OSError:
                return None
    return None


def _make_transfers(device: "torch.device", workers: int) -> TransferEngine:
    if device.type == "cuda":
        from tierkv.transfer_cuda import CudaTransfers

        return CudaTransfers(device, workers)
    return ThreadTransfers(workers)
