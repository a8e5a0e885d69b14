"""Every store keeps the contract: the shared suite, once for each."""

import numpy as np
import pytest
import torch

from tierkv.storage.codec import Expected, RecordHeader, decode, encode
from tierkv.storage.slab import SlabStore
from tierkv.storage.spill import SpillStore
from tierkv.testing.contracts import StoreContract, bits
from tierkv.testing.stores import DictStore, FaultyStore
from tierkv.tier import Run, Tier


class TestDictStore(StoreContract):
    @pytest.fixture
    def store(self, layout):
        with DictStore(layout) as store:
            yield store

    def raw_read(self, store, layer, slot):
        return store.slices[layer, slot]

    def raw_write(self, store, layer, slot, keys, values):
        store.slices[layer, slot] = keys.clone(), values.clone()


class TestFaultyStoreWithoutFaults(TestDictStore):
    @pytest.fixture
    def store(self, layout):
        with FaultyStore(DictStore(layout)) as store:
            yield store


class SlabContract(StoreContract):
    def test_a_slice_that_is_not_there(self, store):
        store.write(0, Run(3, 1), *self.make(store.layout, 0, 16))
        store.clear(3)
        for layer in range(len(store.layout.layers)):
            keys, values = self.make(store.layout, layer, 16)
            self.check_read(store, layer, Run(3, 1), (torch.zeros_like(keys), torch.zeros_like(values)))

    def elements(self, store, layer, slot, values):
        """Yield (flat tensor, begin, end, head) of each head's tokens, from the documented order."""
        group, member = store.layout.group_of[layer]
        spec = store.layout.groups[group]
        dim = spec.value_dim if values else spec.key_dim
        width, size = store.slots_per_segment, store.layout.block_size
        segment, at = divmod(slot, width)
        for head in range(spec.kv_heads):
            begin = (((segment * len(spec.members) + member) * spec.kv_heads + head) * width + at) * size * dim
            yield store._flat[group][values], begin, begin + size * dim

    def raw_read(self, store, layer, slot):
        def gather(values):
            parts = [flat[begin:end] for flat, begin, end in self.elements(store, layer, slot, values)]
            return torch.stack(parts).view(len(parts), store.layout.block_size, -1)

        return gather(0), gather(1)

    def raw_write(self, store, layer, slot, keys, values):
        for which, tensor in enumerate((keys, values)):
            for head, (flat, begin, end) in enumerate(self.elements(store, layer, slot, which)):
                flat[begin:end] = tensor[head].reshape(-1)


class TestSlabOnTheDevice(SlabContract):
    @pytest.fixture
    def store(self, layout):
        with SlabStore(layout, self.capacity_bytes, tier=Tier.DEVICE, device=torch.device("cpu")) as store:
            yield store


class TestSlabOnTheHost(SlabContract):
    capacity_bytes = 3_333_333  # divides into nothing

    @pytest.fixture
    def store(self, layout):
        with SlabStore(layout, self.capacity_bytes, tier=Tier.HOST, device=torch.device("cpu")) as store:
            yield store


if torch.cuda.is_available():

    @pytest.mark.gpu
    class TestSlabPinned(SlabContract):
        @pytest.fixture
        def store(self, layout):
            with SlabStore(
                layout, self.capacity_bytes, tier=Tier.HOST, device=torch.device("cpu"), pinned=True
            ) as store:
                assert all(flat.is_pinned() for pair in store._flat for flat in pair)
                yield store

    @pytest.mark.gpu
    class TestSlabOnAGpu(SlabContract):
        @pytest.fixture
        def store(self, layout):
            with SlabStore(layout, self.capacity_bytes, tier=Tier.DEVICE, device=torch.device("cuda")) as store:
                yield store


class SpillContract(StoreContract):
    takes_partial_slices = False

    @pytest.fixture
    def store(self, layout, tmp_path):
        with SpillStore(layout, tmp_path, self.capacity_bytes, write_queue_bytes=1 << 20) as store:
            yield store

    def raw_read(self, store, layer, slot):
        store.flush()
        stored = store._records.get(layer.to_bytes(4, "big") + slot.to_bytes(4, "big"), bytes)
        record = decode(stored, Expected(namespace=store._namespace, layer=layer, num_tokens=16))
        spec, dtype = store.layout.layers[layer], getattr(torch, store.layout.dtype)
        flat = torch.from_numpy(np.frombuffer(record.payload, dtype=np.uint8).copy()).view(dtype)
        split = spec.kv_heads * 16 * spec.key_dim
        return (
            flat[:split].view(spec.kv_heads, 16, spec.key_dim),
            flat[split:].view(spec.kv_heads, 16, spec.value_dim),
        )

    def raw_write(self, store, layer, slot, keys, values):
        payload = [bits(tensor).contiguous().numpy().tobytes() for tensor in (keys, values)]
        record = encode(RecordHeader(store._namespace, layer, 77, 16), (), payload)
        store._records.put(layer.to_bytes(4, "big") + slot.to_bytes(4, "big"), record)
        store._records.flush()
        store._stamps.setdefault(slot, {})[layer] = 77


class TestSpillStore(SpillContract):
    pass


class TestSpillStoreAfterFlush(SpillContract):
    """Reads come from the file, not from the queue."""

    @pytest.fixture
    def store(self, layout, tmp_path):
        class Flushing(SpillStore):
            def write(self, *args, **kwargs):
                super().write(*args, **kwargs)
                self.flush()

        with Flushing(layout, tmp_path, self.capacity_bytes) as store:
            yield store
