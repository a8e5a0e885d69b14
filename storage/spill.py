"""SpillStore: slices of live sequences as records on disk, one record for each layer of a slot.

Live blocks leave the memory layer by layer (a prompt is computed that way), so each slice is a record under the key
(layer, slot). Every write stamps its record with a number that was never used before, and the stamp is remembered here,
in memory: what an earlier owner of the slot left behind in the file can be found, but it can never be served.

A slice that cannot be read back raises RecordError. It is the only copy of living tokens, so the caller must not carry
on as if it were a cache miss.
"""

import itertools
import os
import secrets
import struct
import threading
from pathlib import Path
from typing import Final

import numpy as np
import torch

from tierkv.errors import ConfigError, RecordError, StoreError
from tierkv.layout import BlockLayout
from tierkv.storage.base import BlockStore
from tierkv.storage.bits import SAME_SIZE
from tierkv.storage.codec import (
    NAMESPACE_BYTES,
    RecordHeader,
    decode_known,
    encode,
    fields_of,
    page_rounded_bytes,
    record_bytes,
)
from tierkv.storage.disk import LmdbStore
from tierkv.storage.disk_room import usable_sets
from tierkv.storage.spill_dir import SpillDirectory
from tierkv.tier import Run, Tier

_KEY: Final = struct.Struct(">II")

# Room for 4 batches is kept free for LMDB's copy-on-write: together at most 1/32 of the capacity.
_BATCH_SHARE_OF_CAPACITY: Final = 128
# LMDB holds a copy of the batch it writes; it is part of the queue's bytes.
_BATCH_SHARE_OF_QUEUE: Final = 4


class SpillStore(BlockStore):
    """The disk tier of live sequences. Slots are numbered from 0 to ``num_slots - 1``; a slot may be written at will.

    All methods may be called from any thread, as long as a slice is not written while it is read. Slices are written
    whole. Memory: the queue and LMDB's copy of one batch stay within ``write_queue_bytes`` (two records, where that is
    less), and each thread inside ``write`` holds one encoded record.

    Attributes:
        num_slots: blocks that always fit, whatever is overwritten in whatever order.
    """

    def __init__(
        self,
        layout: BlockLayout,
        root: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        write_batch: int = 16,
        write_queue_bytes: int = 256 << 20,
        readers: int = 2,
    ) -> None:
        """Make a private directory under ``root`` and an empty store in it; both are gone after ``close``.

        Args:
            layout: the block layout.
            root: folder of the disk tier; see ``SpillDirectory``.
            capacity_bytes: bound on the allocated bytes of the store's files.
            write_batch: blocks a transaction; fewer where that would take too much of the capacity or the queue.
            write_queue_bytes: RAM for slices that wait to be written.
            readers: threads that usually read at the same time.

        Raises:
            ConfigError: ``root`` cannot be written to, or the capacity holds no block.
        """
        self.tier = Tier.DISK
        self.layout = layout
        layers = range(len(layout.layers))
        sizes = [record_bytes(layout.slice_bytes(layer)) for layer in layers]
        largest = page_rounded_bytes(max(sizes))
        batch_bytes = min(capacity_bytes // _BATCH_SHARE_OF_CAPACITY, write_queue_bytes // _BATCH_SHARE_OF_QUEUE)
        batch = max(1, min(write_batch * len(sizes), batch_bytes // largest))
        self.num_slots = usable_sets(capacity_bytes, sizes, batch)
        if self.num_slots < 1:
            raise ConfigError(
                f"disk.capacity = {capacity_bytes:,} bytes holds no block of {layout.block_bytes:,} bytes; "
                f"raise it, or set disk.capacity = 0 to turn the tier off"
            )
        self._namespace = secrets.token_bytes(NAMESPACE_BYTES)
        self._next_stamp = itertools.count(1)
        self._stamps: dict[int, dict[int, int]] = {}
        self._stamps_lock = threading.Lock()
        self._element = SAME_SIZE[layout.dtype_bytes]
        self._directory = SpillDirectory(root)
        try:
            self._records = LmdbStore(
                self._directory.path,
                capacity_bytes,
                write_batch=batch,
                write_queue_bytes=max(largest, write_queue_bytes - batch * largest),
                durable=False,
                readers=readers,
            )
        except StoreError as error:
            self._directory.close()
            raise ConfigError(f"the disk path {root} cannot hold a store: {error}") from error
        except BaseException:
            self._directory.close()
            raise

    def write(self, layer: int, run: Run, keys: torch.Tensor, values: torch.Tensor, first_token: int = 0) -> None:
        """Queue whole slices; they are readable at once. Waits while the queue is full.

        Raises:
            ValueError: the tokens do not fill the run.
            StoreFull: the disk or the store is full. No slice of the run is readable afterwards.
            TransferTimeout: the disk did not take anything for a minute; likewise.
            ClosedError: the store is closed.
        """
        tokens = self._check(layer, run, keys, values, first_token)
        block_size = self.layout.block_size
        if first_token or tokens != run.length * block_size:
            raise ValueError(
                f"the disk takes whole slices: {run.length} of {block_size} tokens, "
                f"not {tokens} tokens from token {first_token} on"
            )
        # One copy for the whole run where the tensors are on a device.
        keys, values = keys.detach().cpu(), values.detach().cpu()
        try:
            for index in range(run.length):
                at = slice(index * block_size, (index + 1) * block_size)
                self._write_slice(layer, run.slot + index, keys[:, at], values[:, at])
        except BaseException:
            for slot in range(run.slot, run.slot + run.length):
                self._forget(layer, slot)
            raise

    def read(self, layer: int, run: Run, keys: torch.Tensor, values: torch.Tensor, first_token: int = 0) -> None:
        """Fill ``keys`` and ``values`` from the queue or the disk; see ``BlockStore.read``.

        Raises:
            RecordError: a slice was never written, was discarded, or is damaged.
            ClosedError: the store is closed.
        """
        tokens = self._check(layer, run, keys, values, first_token)
        block_size = self.layout.block_size
        into_keys, into_values = keys.detach(), values.detach()
        if keys.device.type != "cpu":
            into_keys, into_values = (torch.empty_like(tensor, device="cpu") for tensor in (into_keys, into_values))
        first, last = first_token // block_size, (first_token + tokens - 1) // block_size
        slots = range(run.slot + first, run.slot + last + 1)
        self._read_slices(layer, slots, first_token - first * block_size, into_keys, into_values)
        if keys.device.type != "cpu":
            keys.detach().copy_(into_keys)
            values.detach().copy_(into_values)

    def discard(self, slot: int) -> None:
        """Forget the slot's slices. What is still queued is never written; what the file holds stays unreadable."""
        with self._stamps_lock:
            stamps = self._stamps.pop(slot, None)
        if stamps and self._records.queued_bytes:
            self._records.cancel(_KEY.pack(layer, slot) for layer in stamps)

    def flush(self, timeout_seconds: float = 60.0) -> None:
        """Wait until all that was written so far is in the file; see ``LmdbStore.flush``."""
        self._records.flush(timeout_seconds)

    @property
    def path(self) -> Path:
        """The private directory with the store's files; gone after ``close``."""
        return self._directory.path

    @property
    def failed(self) -> StoreError | None:
        """Why the store takes no more slices (full file system, broken disk), or None. Reads go on."""
        return self._records.failed

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._records.queued_bytes

    @property
    def peak_queued_bytes(self) -> int:
        """The most ``queued_bytes`` has been."""
        return self._records.peak_queued_bytes

    @property
    def allocated_bytes(self) -> int:
        """Allocated file bytes; never above the capacity."""
        return self._records.allocated_bytes

    def close(self) -> None:
        """Stop the writer and remove the directory. Idempotent."""
        self._records.close()
        self._directory.close()

    def _check(self, layer: int, run: Run, keys: torch.Tensor, values: torch.Tensor, first_token: int) -> int:
        """Return the number of tokens, after checking that all arguments fit each other and the layout."""
        # First of all, since tensor operations may hang in a forked child.
        self._records.check_open()
        spec = self.layout.layers[layer]
        tokens = keys.shape[1]
        shapes = (spec.kv_heads, tokens, spec.key_dim), (spec.kv_heads, tokens, spec.value_dim)
        if (tuple(keys.shape), tuple(values.shape)) != shapes:
            raise ValueError(f"layer {layer} takes K and V of {shapes}, not {tuple(keys.shape)}, {tuple(values.shape)}")
        for tensor in (keys, values):
            if str(tensor.dtype) != f"torch.{self.layout.dtype}":
                raise ValueError(f"the store keeps {self.layout.dtype}, not {tensor.dtype}")
        if run.slot < 0 or run.slot + run.length > self.num_slots:
            raise ValueError(f"{run} leaves the store's {self.num_slots} slots")
        if first_token < 0 or first_token + tokens > run.length * self.layout.block_size:
            raise ValueError(f"{tokens} tokens from token {first_token} on leave {run}")
        return tokens

    def _write_slice(self, layer: int, slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        stamp = next(self._next_stamp)
        parts = [part.contiguous().view(torch.uint8).numpy().data for part in (keys, values)]
        header = RecordHeader(self._namespace, layer, stamp, self.layout.block_size)
        self._records.put(_KEY.pack(layer, slot), encode(header, (), parts))
        with self._stamps_lock:
            self._stamps.setdefault(slot, {})[layer] = stamp

    def _read_slices(self, layer: int, slots: range, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill K and V from the slices of ``slots``, beginning ``start`` tokens into the first."""
        spec, block_size, tokens = self.layout.layers[layer], self.layout.block_size, keys.shape[1]
        payload_bytes = self.layout.slice_bytes(layer)
        with self._stamps_lock:
            stamps = [self._stamps.get(slot, {}).get(layer) for slot in slots]
        fields = []
        for slot, stamp in zip(slots, stamps, strict=True):
            if stamp is None:
                raise RecordError(f"slot {slot} on disk holds no slice of layer {layer}")
            fields.append(fields_of(RecordHeader(self._namespace, layer, stamp, block_size), payload_bytes))
        torch_type, numpy_type = self._element
        into_keys, into_values = (into.view(torch_type).numpy() for into in (keys, values))
        split = spec.kv_heads * block_size * spec.key_dim

        def copy_out(index: int, buffer: memoryview) -> None:
            payload = np.frombuffer(decode_known(buffer, fields[index], payload_bytes), dtype=numpy_type)
            begin = max(0, index * block_size - start)
            end = min(tokens, (index + 1) * block_size - start)
            first = begin + start - index * block_size
            at, own = slice(begin, end), slice(first, first + end - begin)
            np.copyto(into_keys[:, at], payload[:split].reshape(spec.kv_heads, block_size, spec.key_dim)[:, own])
            np.copyto(into_values[:, at], payload[split:].reshape(spec.kv_heads, block_size, spec.value_dim)[:, own])

        self._records.get_many([_KEY.pack(layer, slot) for slot in slots], copy_out)

    def _forget(self, layer: int, slot: int) -> None:
        with self._stamps_lock:
            self._stamps.get(slot, {}).pop(layer, None)
