"""What is peculiar to pools in memory: segments, scratch, whole-block copies, page-locked memory."""

import contextlib
import gc
import types

import pytest
import torch

from tierkv.errors import CapacityError, ClosedError, ConfigError
from tierkv.layout import BlockLayout, LayerSpec
from tierkv.storage.slab import SlabStore
from tierkv.testing.contracts import assert_same_bits, random_bits
from tierkv.tier import Run, Tier

CPU = torch.device("cpu")


def make_layout(block_size=32, groups=(3, 1)):
    specs = [LayerSpec(index, 2, 8, 8) for index in range(groups[0])]
    specs += [LayerSpec(groups[0] + index, 1, 16, 4) for index in range(groups[1])]
    return BlockLayout(tuple(specs), block_size, "float32")


def make_slab(layout, num_blocks=200, **options):
    return SlabStore(layout, num_blocks * layout.block_bytes, tier=Tier.DEVICE, device=CPU, **options)


@pytest.fixture
def slab():
    with make_slab(make_layout()) as slab:
        yield slab


@pytest.mark.parametrize("capacity", [40_000, 123_457, 1 << 20, 50_000_001])
@pytest.mark.parametrize("block_size", [16, 32, 512])
def test_what_is_allocated_is_constant_and_within_the_capacity(capacity, block_size):
    layout = make_layout(block_size)
    with SlabStore(layout, capacity, tier=Tier.HOST, device=CPU) as slab:
        real = sum(flat.nbytes for pair in slab._flat for flat in pair)
        assert real == slab.allocated_bytes <= capacity
        assert capacity - real < layout.token_bytes
        slab.set_scratch(0)
        assert slab.allocated_bytes == real
    assert slab.allocated_bytes == 0


@pytest.mark.parametrize(("block_size", "num_blocks", "width"), [(32, 200, 16), (32, 64, 8), (32, 9, 1), (512, 20, 1)])
def test_segments_are_some_512_tokens_and_at_least_eight(block_size, num_blocks, width):
    with make_slab(make_layout(block_size), num_blocks) as slab:
        assert slab.slots_per_segment == width
        assert slab.num_slots == num_blocks // width * width


def test_a_run_is_dense_for_each_head(slab):
    keys, values = slab.views(0, Run(16, 16), 0, 512)
    assert keys[0].is_contiguous()
    assert values[1].is_contiguous()
    assert keys[:, 32:64].data_ptr() == slab.views(0, Run(17, 1), 0, 32)[0].data_ptr()


def test_a_run_never_crosses_a_segment(slab):
    tensors = torch.zeros(2, 64, 8), torch.zeros(2, 64, 8)
    with pytest.raises(ValueError, match="segment"):
        slab.write(0, Run(15, 2), *tensors)
    with pytest.raises(ValueError, match="segment"):
        slab.read(0, Run(31, 2), *tensors)


@pytest.mark.parametrize("run", [Run(-1, 1), Run(192, 1), Run(191, 2), Run(0, 0)])
def test_slots_outside_the_pool_are_refused(slab, run):
    assert slab.num_slots == 192
    with pytest.raises(ValueError, match="usable"):
        slab.views(0, run, 0, 1)


def test_clear_sets_one_slot_to_zero_and_no_other(slab):
    for flat in (flat for pair in slab._flat for flat in pair):
        flat.fill_(float("nan"))
    slab.clear(17)
    for layer in range(4):
        for slot, is_zero in ((16, False), (17, True), (18, False)):
            for view in slab.views(layer, Run(slot, 1), 0, 32):
                assert bool((view == 0).all()) is is_zero
                assert bool(view.isnan().all()) is not is_zero


def test_block_copies_move_all_layers(slab):
    with make_slab(slab.layout, 9) as other:
        written = []
        for layer, spec in enumerate(slab.layout.layers):
            keys = random_bits((spec.kv_heads, 32, spec.key_dim), torch.float32, layer)
            values = random_bits((spec.kv_heads, 32, spec.value_dim), torch.float32, 50 + layer)
            slab.write(layer, Run(21, 1), keys, values)
            written.append((keys, values))
        pairs = slab.copy_pairs(21, other, 4)
        assert len(pairs) == 2 * len(slab.layout.groups)
        assert sum(source.nbytes for _, source in pairs) == slab.layout.block_bytes
        for destination, source in pairs:
            destination.copy_(source)
        for layer, (keys, values) in enumerate(written):
            own_keys, own_values = other.views(layer, Run(4, 1), 0, 32)
            assert_same_bits(own_keys, keys)
            assert_same_bits(own_values, values)


def test_bit_patterns_are_the_pool_itself(slab):
    for bits, view in zip(slab.block_bits(3), slab.block_views(3), strict=True):
        assert bits.shape == tuple(view.shape)
        assert bits.ctypes.data == view.data_ptr()
        bits[...] = -1
        assert all(byte == 255 for byte in view.contiguous().view(torch.uint8).flatten().tolist())


def test_blocks_are_not_copied_between_layouts(slab):
    with make_slab(make_layout(64)) as other, pytest.raises(ValueError, match="one layout"):
        slab.copy_pairs(0, other, 0)


@pytest.mark.parametrize("tokens", [0, 1, 100, 1000, 6000])
def test_scratch_and_usable_slots_do_not_overlap(slab, tokens):
    usable = slab.set_scratch(tokens)
    assert usable % slab.slots_per_segment == 0
    for group, spec in enumerate(slab.layout.groups):
        for scratch, dim in zip(slab.scratch_tensors(group), (spec.key_dim, spec.value_dim), strict=True):
            assert scratch.numel() == tokens * spec.kv_heads * dim
            scratch.fill_(1.0)
    for slot in range(usable):
        slab.clear(slot)
    for group in range(len(slab.layout.groups)):
        assert all(bool((scratch == 1.0).all()) for scratch in slab.scratch_tensors(group))
    # It costs what it takes in the smallest group, rounded up to a segment.
    assert usable >= slab.num_slots - tokens // 32 - 2 * slab.slots_per_segment


def test_slots_under_the_scratch_are_refused_until_it_shrinks(slab):
    usable = slab.set_scratch(1000)
    for use in (slab.clear, slab.block_views, slab.block_bits, lambda slot: slab.views(0, Run(slot, 1), 0, 32)):
        use(usable - 1)
        with pytest.raises(ValueError, match="usable"):
            use(usable)
    assert slab.set_scratch(0) == slab.num_slots
    slab.clear(usable)


def test_scratch_larger_than_the_slab_is_refused(slab):
    assert slab.set_scratch(200 * 32) == 0
    with pytest.raises(CapacityError):
        slab.set_scratch(200 * 32 + 1)


def test_a_closed_pool_hands_out_nothing(slab):
    slab.close()
    for use in (slab.clear, slab.block_views, slab.block_bits):
        with pytest.raises(ClosedError):
            use(0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is available here")
def test_page_locked_memory_needs_cuda():
    with pytest.raises(ConfigError, match="CUDA"):
        make_slab(make_layout(), pinned=True)


class FakeRuntime(types.SimpleNamespace):
    """Stands for the CUDA runtime: keeps what is locked."""

    def __init__(self, error=0):
        super().__init__(locked={}, error=error)

    def cudaHostRegister(self, pointer, num_bytes, flags):  # noqa: N802 - CUDA's name
        self.locked[pointer] = num_bytes
        return self.error

    def cudaHostUnregister(self, pointer):  # noqa: N802 - CUDA's name
        del self.locked[pointer]


@pytest.fixture
def runtime(monkeypatch):
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def test_exactly_the_slab_is_page_locked_until_close(runtime):
    slab = make_slab(make_layout(), pinned=True)
    assert sum(runtime.locked.values()) == slab.allocated_bytes
    assert sorted(runtime.locked) == sorted(flat.data_ptr() for pair in slab._flat for flat in pair)
    slab.clear(3)
    slab.close()
    slab.close()
    assert not runtime.locked


def test_a_pool_nobody_closed_is_unlocked(runtime):
    make_slab(make_layout(), pinned=True)
    assert not runtime.locked


def test_where_the_values_cannot_be_locked_the_keys_are_unlocked(runtime, monkeypatch):
    lock, calls = runtime.cudaHostRegister, []

    def refuses_the_second(*args):
        calls.append(args)
        return 2 if len(calls) == 2 else lock(*args)

    monkeypatch.setattr(runtime, "cudaHostRegister", refuses_the_second)
    with contextlib.suppress(ConfigError):
        make_slab(make_layout(), pinned=True)
    gc.collect()
    assert len(calls) == 2
    assert not runtime.locked


def test_memory_that_cannot_be_locked_is_a_setting_that_cannot_be_met(runtime):
    runtime.error = 2
    with pytest.raises(ConfigError, match=r"host\.capacity"):
        make_slab(make_layout(), pinned=True)
