"""StoreContract: what every BlockStore must do, as tests. Subclass it in a test file and give it your store.

A subclass overrides the ``store`` fixture and two raw accessors that reach the bytes without the store's own verbs, so
that ``read`` can be tested without trusting ``write`` and the other way round::

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self, layout, tmp_path):
            with MyStore(layout, tmp_path) as store:
                yield store

        def raw_read(self, store, layer, slot): ...
        def raw_write(self, store, layer, slot, keys, values): ...

Bytes are compared, not numbers: payloads are random bits, so NaNs with payloads, infinities and -0.0 are among them.
"""

# ruff: noqa: D102 - the name of a test says what it shows

import threading
from collections.abc import Iterator
from typing import ClassVar

import pytest
import torch

from tierkv.errors import ClosedError, RecordError
from tierkv.layout import BlockLayout, LayerSpec
from tierkv.storage.base import BlockStore
from tierkv.tier import Run

NUM_SLOTS = 8
"""Slots that the suite uses; a store under test has at least these, side by side."""

Slice = tuple[torch.Tensor, torch.Tensor]

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bit patterns as integers of the same size."""
    return tensor.detach().cpu().view(_BITS[tensor.element_size()])


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a tensor of random bit patterns, with a signalling NaN and -0.0 for certain."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty((), dtype=dtype).element_size()
    whole = torch.randint(-(2**63), 2**63 - 1, shape, dtype=torch.int64, generator=generator).to(_BITS[size])
    flat = whole.view(-1)
    flat[0] = -(2 ** (8 * size - 1))
    if flat.numel() > 1:
        flat[1] = {torch.float32: 0x7F800001, torch.float16: 0x7C01, torch.bfloat16: 0x7F81}.get(dtype, 1)
    return whole.view(dtype)


def strided(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return equal bytes in a view that is dense in no dimension but the last, and the zeros that it lies in."""
    heads, tokens, dim = tensor.shape
    wide = torch.zeros((tokens + 3, heads + 1, dim + 5), dtype=tensor.dtype, device=tensor.device)
    view = wide[2 : 2 + tokens, :heads, 1 : 1 + dim].transpose(0, 1)
    view.copy_(tensor)
    return view, wide


def assert_same_bits(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Fail unless both tensors have one shape and the same bits."""
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    assert torch.equal(bits(got), bits(wanted))


class StoreContract:
    """Tests of the BlockStore contract over three dtypes and a layout of two layer groups with gaps."""

    takes_partial_slices: ClassVar[bool] = True
    """False for a store that writes whole slices only."""

    capacity_bytes: ClassVar[int] = 4 << 20
    """The bound that ``store`` was given."""

    @pytest.fixture(params=["float32", "bfloat16", "float16"])
    def layout(self, request: pytest.FixtureRequest) -> BlockLayout:
        """Two shapes of layers, K and V of different widths in one of them; model layer 1 has no cache."""
        wide, narrow = (2, 8, 8), (1, 16, 4)
        specs = [LayerSpec(0, *wide), LayerSpec(2, *narrow), LayerSpec(3, *wide), LayerSpec(4, *wide)]
        return BlockLayout(tuple(specs), block_size=16, dtype=request.param)

    @pytest.fixture
    def store(self, layout: BlockLayout) -> Iterator[BlockStore]:
        """Override: yield an open store over ``layout`` with at least NUM_SLOTS slots."""
        raise NotImplementedError

    def raw_read(self, store: BlockStore, layer: int, slot: int) -> Slice:
        """Override: return a slice's K and V without ``store.read``."""
        raise NotImplementedError

    def raw_write(self, store: BlockStore, layer: int, slot: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Override: put a slice's K and V in place without ``store.write``."""
        raise NotImplementedError

    # -- what tests use -------------------------------------------------------------------------------------------

    def make(self, layout: BlockLayout, layer: int, tokens: int, seed: int = 0) -> Slice:
        """Return K and V of random bits."""
        spec, dtype = layout.layers[layer], getattr(torch, layout.dtype)
        return (
            random_bits((spec.kv_heads, tokens, spec.key_dim), dtype, 2 * seed),
            random_bits((spec.kv_heads, tokens, spec.value_dim), dtype, 2 * seed + 1),
        )

    def blank(self, layout: BlockLayout, layer: int, tokens: int) -> Slice:
        """Return K and V to read into, filled with a pattern that no test writes."""
        keys, values = self.make(layout, layer, tokens)
        return torch.full_like(keys, 7.0), torch.full_like(values, 7.0)

    def check_read(self, store: BlockStore, layer: int, run: Run, wanted: Slice, first_token: int = 0) -> None:
        """Read into fresh tensors and compare."""
        keys, values = self.blank(store.layout, layer, wanted[0].shape[1])
        store.read(layer, run, keys, values, first_token)
        assert_same_bits(keys, wanted[0])
        assert_same_bits(values, wanted[1])

    # -- bytes ----------------------------------------------------------------------------------------------------

    def test_what_is_written_is_read(self, store: BlockStore) -> None:
        for layer in range(len(store.layout.layers)):
            keys, values = self.make(store.layout, layer, 16, seed=layer)
            store.write(layer, Run(3, 1), keys, values)
            self.check_read(store, layer, Run(3, 1), (keys, values))

    def test_write_puts_the_bytes_in_place(self, store: BlockStore) -> None:
        for layer in range(len(store.layout.layers)):
            keys, values = self.make(store.layout, layer, 16, seed=layer)
            store.write(layer, Run(2, 1), keys, values)
            raw_keys, raw_values = self.raw_read(store, layer, 2)
            assert_same_bits(raw_keys, keys)
            assert_same_bits(raw_values, values)

    def test_read_finds_the_bytes_in_place(self, store: BlockStore) -> None:
        for layer in range(len(store.layout.layers)):
            keys, values = self.make(store.layout, layer, 16, seed=layer)
            self.raw_write(store, layer, 5, keys, values)
            self.check_read(store, layer, Run(5, 1), (keys, values))

    def test_inputs_may_be_strided(self, store: BlockStore) -> None:
        keys, values = self.make(store.layout, 0, 32)
        store.write(0, Run(1, 2), strided(keys)[0], strided(values)[0])
        self.check_read(store, 0, Run(1, 2), (keys, values))

    def test_outputs_may_be_strided_and_nothing_beside_them_is_touched(self, store: BlockStore) -> None:
        keys, values = self.make(store.layout, 1, 32)
        store.write(1, Run(1, 2), keys, values)
        (into_keys, all_keys), (into_values, all_values) = map(strided, self.blank(store.layout, 1, 32))
        store.read(1, Run(1, 2), into_keys, into_values)
        assert_same_bits(into_keys, keys)
        assert_same_bits(into_values, values)
        for view, whole in ((into_keys, all_keys), (into_values, all_values)):
            view.zero_()
            assert not bits(whole).any()

    def test_the_store_keeps_no_reference_to_what_was_written(self, store: BlockStore) -> None:
        keys, values = self.make(store.layout, 0, 16)
        given_keys, given_values = keys.clone(), values.clone()
        store.write(0, Run(0, 1), given_keys, given_values)
        given_keys.zero_()
        given_values.zero_()
        self.check_read(store, 0, Run(0, 1), (keys, values))

    def test_what_is_read_is_a_copy(self, store: BlockStore) -> None:
        keys, values = self.make(store.layout, 0, 16)
        store.write(0, Run(0, 1), keys, values)
        into = self.blank(store.layout, 0, 16)
        store.read(0, Run(0, 1), *into)
        into[0].zero_()
        self.check_read(store, 0, Run(0, 1), (keys, values))

    # -- runs and parts -------------------------------------------------------------------------------------------

    def test_a_run_is_its_slots_in_order(self, store: BlockStore) -> None:
        keys, values = self.make(store.layout, 2, 64)
        store.write(2, Run(4, 4), keys, values)
        for index in range(4):
            at = slice(16 * index, 16 * index + 16)
            self.check_read(store, 2, Run(4 + index, 1), (keys[:, at], values[:, at]))

    def test_slots_written_one_by_one_are_read_as_a_run(self, store: BlockStore) -> None:
        keys, values = self.make(store.layout, 1, 64)
        for index in (2, 0, 3, 1):
            at = slice(16 * index, 16 * index + 16)
            store.write(1, Run(index, 1), keys[:, at], values[:, at])
        self.check_read(store, 1, Run(0, 4), (keys, values))

    @pytest.mark.parametrize(("first", "count"), [(0, 1), (0, 16), (5, 11), (15, 1), (10, 30), (16, 16), (17, 47)])
    def test_part_of_a_run_is_read(self, store: BlockStore, first: int, count: int) -> None:
        keys, values = self.make(store.layout, 1, 64)
        store.write(1, Run(0, 4), keys, values)
        at = slice(first, first + count)
        self.check_read(store, 1, Run(0, 4), (keys[:, at], values[:, at]), first)

    @pytest.mark.parametrize(("first", "count"), [(0, 5), (3, 1), (15, 1), (12, 20)])
    def test_part_of_a_run_is_written(self, store: BlockStore, first: int, count: int) -> None:
        keys, values = self.make(store.layout, 0, 32)
        store.write(0, Run(2, 2), keys, values)
        new_keys, new_values = self.make(store.layout, 0, count, seed=9)
        if not self.takes_partial_slices:
            with pytest.raises(ValueError, match="whole slices"):
                store.write(0, Run(2, 2), new_keys, new_values, first)
        else:
            store.write(0, Run(2, 2), new_keys, new_values, first)
            keys[:, first : first + count], values[:, first : first + count] = new_keys, new_values
        self.check_read(store, 0, Run(2, 2), (keys, values))

    def test_tokens_that_leave_the_run_are_refused(self, store: BlockStore) -> None:
        tensors = self.make(store.layout, 0, 32)
        with pytest.raises(ValueError, match="leave"):
            store.write(0, Run(0, 1), *tensors)
        with pytest.raises(ValueError, match="leave"):
            store.read(0, Run(0, 2), *tensors, 1)

    def test_tensors_of_another_shape_are_refused(self, store: BlockStore) -> None:
        keys, values = self.make(store.layout, 0, 16)
        store.write(0, Run(0, 1), keys, values)
        # One head would otherwise be copied to all.
        with pytest.raises(ValueError, match="takes K and V"):
            store.write(0, Run(0, 1), keys[:1], values[:1])
        with pytest.raises(ValueError, match="takes K and V"):
            store.read(0, Run(0, 1), keys, values[:, :8])
        self.check_read(store, 0, Run(0, 1), (keys, values))

    def test_tensors_of_another_dtype_are_refused(self, store: BlockStore) -> None:
        keys, values = self.make(store.layout, 0, 16)
        with pytest.raises(ValueError, match="store keeps"):
            store.write(0, Run(0, 1), keys.double(), values.double())
        with pytest.raises(ValueError, match="store keeps"):
            store.read(0, Run(0, 1), keys.double(), values.double())

    # -- slots ----------------------------------------------------------------------------------------------------

    def test_slots_and_layers_are_independent(self, store: BlockStore) -> None:
        layers = range(len(store.layout.layers))
        written = {
            (layer, slot): self.make(store.layout, layer, 16, seed=100 * layer + slot)
            for layer in layers
            for slot in range(NUM_SLOTS)
        }
        for (layer, slot), tensors in written.items():
            store.write(layer, Run(slot, 1), *tensors)
        for (layer, slot), tensors in written.items():
            self.check_read(store, layer, Run(slot, 1), tensors)

    def test_a_slot_can_be_overwritten(self, store: BlockStore) -> None:
        for seed in range(5):
            tensors = self.make(store.layout, 3, 16, seed=seed)
            store.write(3, Run(7, 1), *tensors)
            self.check_read(store, 3, Run(7, 1), tensors)

    def test_discard_leaves_other_slots(self, store: BlockStore) -> None:
        kept, dropped = self.make(store.layout, 0, 16, seed=1), self.make(store.layout, 0, 16, seed=2)
        store.write(0, Run(1, 1), *kept)
        store.write(0, Run(2, 1), *dropped)
        store.discard(2)
        self.check_read(store, 0, Run(1, 1), kept)

    def test_a_discarded_slot_can_be_used_again(self, store: BlockStore) -> None:
        store.write(0, Run(2, 1), *self.make(store.layout, 0, 16, seed=1))
        store.discard(2)
        again = self.make(store.layout, 0, 16, seed=2)
        store.write(0, Run(2, 1), *again)
        self.check_read(store, 0, Run(2, 1), again)

    def test_an_empty_slot_can_be_discarded(self, store: BlockStore) -> None:
        store.discard(6)
        store.discard(6)

    def test_a_slice_that_is_not_there(self, store: BlockStore) -> None:
        """Override where a slot is memory, which always holds something: its owner clears it."""
        into = self.blank(store.layout, 0, 16)
        with pytest.raises(RecordError, match="slot 3"):
            store.read(0, Run(3, 1), *into)
        store.write(0, Run(3, 1), *self.make(store.layout, 0, 16))
        with pytest.raises(RecordError, match="slot 3"):
            store.read(2, Run(3, 1), *into)
        store.discard(3)
        with pytest.raises(RecordError, match="slot 3"):
            store.read(0, Run(3, 1), *into)

    # -- threads, bytes, end --------------------------------------------------------------------------------------

    def test_many_threads_read(self, store: BlockStore) -> None:
        written = [self.make(store.layout, 0, 16, seed=slot) for slot in range(4)]
        for slot, tensors in enumerate(written):
            store.write(0, Run(slot, 1), *tensors)
        errors: list[BaseException] = []

        def read(slot: int) -> None:
            try:
                for _ in range(50):
                    self.check_read(store, 0, Run(slot, 1), written[slot])
            except BaseException as error:  # noqa: BLE001 - raised in the main thread below
                errors.append(error)

        threads = [threading.Thread(target=read, args=(index % 4,)) for index in range(6)]
        for thread in threads:
            thread.start()
        # Meanwhile another slot changes all the time.
        for seed in range(20):
            store.write(0, Run(5, 1), *self.make(store.layout, 0, 16, seed=seed))
        for thread in threads:
            thread.join()
        assert not errors

    def test_bytes_stay_within_the_capacity(self, store: BlockStore) -> None:
        for layer in range(len(store.layout.layers)):
            store.write(layer, Run(0, 8), *self.make(store.layout, layer, 128))
        assert 0 < store.allocated_bytes <= self.capacity_bytes

    def test_close_can_be_repeated(self, store: BlockStore) -> None:
        store.write(0, Run(0, 1), *self.make(store.layout, 0, 16))
        store.close()
        store.close()

    def test_a_closed_store_refuses(self, store: BlockStore) -> None:
        tensors = self.make(store.layout, 0, 16)
        store.write(0, Run(0, 1), *tensors)
        store.close()
        with pytest.raises(ClosedError):
            store.write(0, Run(0, 1), *tensors)
        with pytest.raises(ClosedError):
            store.read(0, Run(0, 1), *tensors)
