"""Stores for tests: the simplest correct one, and one that fails on purpose."""

import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import torch

from tierkv.errors import ClosedError, RecordError
from tierkv.layout import BlockLayout
from tierkv.storage.base import BlockStore
from tierkv.tier import Run, Tier

Verb = Literal["write", "read"]


class DictStore(BlockStore):
    """Slices in a dict: the model that other stores are compared with, and a stand-in for any tier.

    Attributes:
        slices: (layer, slot) to K and V of a whole slice.
        num_slots: slots it pretends to have.
    """

    def __init__(self, layout: BlockLayout, *, tier: Tier = Tier.DISK, num_slots: int = 1 << 20) -> None:
        """Make an empty store."""
        self.tier = tier
        self.layout = layout
        self.num_slots = num_slots
        self.slices: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._lock = threading.Lock()
        self._closed = False

    def write(self, layer: int, run: Run, keys: torch.Tensor, values: torch.Tensor, first_token: int = 0) -> None:
        """Write token by token; a slice that was not there begins as zeros."""
        self._check(layer, run, keys, values, first_token)
        spec, size = self.layout.layers[layer], self.layout.block_size
        with self._lock:
            for token in range(keys.shape[1]):
                index, offset = divmod(first_token + token, size)
                if (layer, run.slot + index) not in self.slices:
                    self.slices[layer, run.slot + index] = (
                        torch.zeros((spec.kv_heads, size, spec.key_dim), dtype=keys.dtype),
                        torch.zeros((spec.kv_heads, size, spec.value_dim), dtype=values.dtype),
                    )
                own_keys, own_values = self.slices[layer, run.slot + index]
                own_keys[:, offset] = keys[:, token].detach().cpu()
                own_values[:, offset] = values[:, token].detach().cpu()

    def read(self, layer: int, run: Run, keys: torch.Tensor, values: torch.Tensor, first_token: int = 0) -> None:
        """Read token by token."""
        self._check(layer, run, keys, values, first_token)
        with self._lock:
            for token in range(keys.shape[1]):
                index, offset = divmod(first_token + token, self.layout.block_size)
                if (layer, run.slot + index) not in self.slices:
                    raise RecordError(f"slot {run.slot + index} holds no slice of layer {layer}")
                own_keys, own_values = self.slices[layer, run.slot + index]
                keys[:, token] = own_keys[:, offset]
                values[:, token] = own_values[:, offset]

    def discard(self, slot: int) -> None:
        """Forget the slot."""
        with self._lock:
            for layer in range(len(self.layout.layers)):
                self.slices.pop((layer, slot), None)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all slices."""
        return sum(self.layout.slice_bytes(layer) for layer, _ in self.slices)

    def close(self) -> None:
        """Forget everything."""
        self._closed = True
        self.slices.clear()

    def _check(self, layer: int, run: Run, keys: torch.Tensor, values: torch.Tensor, first_token: int) -> None:
        if self._closed:
            raise ClosedError("the store is closed")
        spec, tokens = self.layout.layers[layer], keys.shape[1]
        shapes = (spec.kv_heads, tokens, spec.key_dim), (spec.kv_heads, tokens, spec.value_dim)
        if (tuple(keys.shape), tuple(values.shape)) != shapes:
            raise ValueError(f"layer {layer} takes K and V of {shapes}, not {tuple(keys.shape)}, {tuple(values.shape)}")
        dtype = getattr(torch, self.layout.dtype)
        if (keys.dtype, values.dtype) != (dtype, dtype):
            raise ValueError(f"the store keeps {dtype}, not {keys.dtype} and {values.dtype}")
        if first_token < 0 or first_token + tokens > run.length * self.layout.block_size:
            raise ValueError(f"{tokens} tokens from token {first_token} on leave {run}")


@dataclass(slots=True)
class Faults:
    """What a FaultyStore does wrong; change it at any time.

    Attributes:
        delay_seconds: how long each write or read takes in addition.
        corrupt_reads: flip one bit of what is read, without an error: bytes that no checksum guarded.
        calls: calls so far, for each verb.
    """

    delay_seconds: float = 0.0
    corrupt_reads: bool = False
    calls: dict[str, int] = field(default_factory=lambda: {"write": 0, "read": 0})
    planned: dict[tuple[str, int], Exception] = field(default_factory=dict)
    always: dict[str, Exception] = field(default_factory=dict)

    def fail(self, verb: Verb, error: Exception, *, nth: int = 1) -> None:
        """Make the ``nth`` call of ``verb`` from now on raise ``error``, once; it then does nothing else."""
        self.planned[verb, self.calls[verb] + nth] = error

    def fail_always(self, verb: Verb, error: Exception | None) -> None:
        """Make every call of ``verb`` raise ``error``, or none from now on."""
        if error is None:
            self.always.pop(verb, None)
        else:
            self.always[verb] = error


class FaultyStore(BlockStore):
    """Another store, with faults. Attributes that a BlockStore does not have are those of the inner store.

    Attributes:
        inner: the store that does the work.
        faults: what goes wrong.
        discarded: the latest slots that were discarded, oldest first.
    """

    def __init__(self, inner: BlockStore) -> None:
        """Wrap ``inner``, which is closed with this store."""
        self.inner = inner
        self.tier = inner.tier
        self.layout = inner.layout
        self.faults = Faults()
        self.discarded: deque[int] = deque(maxlen=1000)
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def write(self, layer: int, run: Run, keys: torch.Tensor, values: torch.Tensor, first_token: int = 0) -> None:
        """Write, or fail before anything was written."""
        self._begin("write")
        self.inner.write(layer, run, keys, values, first_token)

    def read(self, layer: int, run: Run, keys: torch.Tensor, values: torch.Tensor, first_token: int = 0) -> None:
        """Read, or fail, or read wrong bytes."""
        self._begin("read")
        self.inner.read(layer, run, keys, values, first_token)
        if self.faults.corrupt_reads:
            # Position by position instead of a flat view: the tensor may be strided.
            first = keys[0, 0, :1].view({2: torch.int16, 4: torch.int32, 8: torch.int64}[keys.element_size()])
            first ^= 1

    def discard(self, slot: int) -> None:
        """Discard."""
        self.discarded.append(slot)
        self.inner.discard(slot)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the inner store."""
        return self.inner.allocated_bytes

    def close(self) -> None:
        """Close the inner store."""
        self.inner.close()

    def _begin(self, verb: Verb) -> None:
        with self._lock:
            self.faults.calls[verb] += 1
            error = self.faults.planned.pop((verb, self.faults.calls[verb]), None) or self.faults.always.get(verb)
        if self.faults.delay_seconds:
            time.sleep(self.faults.delay_seconds)
        if error is not None:
            raise error
