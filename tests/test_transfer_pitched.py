"""Tensors as evenly spaced lines of memory, and a two-dimensional copy of them. CUDA's has a stand-in of the same contract."""

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierkv.storage.slab import SlabStore
from tierkv.testing.engines import LAYOUTS, small_layout
from tierkv.testing.transfers import DOWN, UP, copy_of
from tierkv.tier import Run, Tier
from tierkv.transfer_pitched import Pitched, copy_pitched, find_memcpy_2d, pieces, pitched_of


def memcpy_2d(destination, destination_pitch, source, source_pitch, width, height, kind, stream):
    """Do what the manual says of cudaMemcpy2D."""
    assert (kind, stream) == (4, 7)
    if width > min(destination_pitch, source_pitch):
        return 1
    for row in range(height):
        ctypes.memmove(destination + row * destination_pitch, source + row * source_pitch, width)
    return 0


@st.composite
def views(draw, shape):
    """Draw a view of this shape into zeros: cut out of a larger tensor, dimensions of which were maybe permuted."""
    order = draw(st.permutations(range(len(shape))))
    begin = [draw(st.integers(0, 2)) for _ in shape]
    beyond = [draw(st.integers(0, 2)) for _ in shape]
    step = [draw(st.sampled_from((1, 1, 1, 2))) for _ in shape]
    whole = [b + n * s + e for b, n, s, e in zip(begin, shape, step, beyond, strict=True)]
    tensor = torch.zeros([whole[at] for at in order], dtype=torch.int16)
    tensor = tensor.permute([order.index(at) for at in range(len(shape))])
    return tensor[tuple(slice(b, b + n * s, s) for b, n, s in zip(begin, shape, step, strict=True))]


@given(data=st.data())
def test_lines_move_every_byte_and_no_other(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    source, destination = data.draw(views(shape)), data.draw(views(shape))
    source.copy_(torch.arange(1, source.numel() + 1).view(shape))
    pitched = pitched_of(destination, source)
    if pitched is None:
        # Only what no row can be cut out of, or lines that are not evenly spaced in one of both.
        assert not (destination.is_contiguous() and source.is_contiguous())
        return
    copy_pitched(memcpy_2d, destination, source, pitched, 7)
    assert torch.equal(destination, source)
    storage = torch.empty(0, dtype=torch.int16).set_(destination.untyped_storage())
    assert int(storage.count_nonzero()) == source.numel()


@given(data=st.data())
def test_pieces_are_the_whole_and_each_can_be_copied(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    source, destination = data.draw(views(shape)), data.draw(views(shape))
    source.copy_(torch.arange(1, source.numel() + 1).view(shape))
    for wire, host in ((DOWN, 0), (UP, 1)):
        destination.zero_()
        for pair in pieces(copy_of((destination, source), wire=wire), pitched=True):
            pitched = pitched_of(*pair)
            assert pitched is not None or pair[host].is_contiguous()
            if pitched is None:
                pair[0].copy_(pair[1])
            else:
                copy_pitched(memcpy_2d, *pair, pitched, 7)
        assert torch.equal(destination, source)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_block_is_one_copy_for_all_keys_and_one_for_all_values_of_a_group(name):
    layout = small_layout(name)
    device, host = (
        SlabStore(layout, tokens * layout.token_bytes, tier=tier, device=torch.device("cpu"))
        for tokens, tier in ((900, Tier.DEVICE), (3000, Tier.HOST))
    )
    assert device.slots_per_segment != 1 or host.slots_per_segment != 1
    for destination, source in device.copy_pairs(2, host, 5):
        pitched = pitched_of(destination, source)
        assert pitched is not None
        assert pitched.width * pitched.height == source.nbytes
    for layer in range(len(layout.layers)):
        run = Run(0, min(device.slots_per_segment, host.slots_per_segment))
        for pair in zip(device.views(layer, run, 1, 3), host.views(layer, run, 1, 3), strict=True):
            assert pitched_of(*pair) is not None


@pytest.mark.parametrize(
    ("destination", "source", "pitched"),
    [
        (torch.zeros(2, 6), torch.zeros(2, 6), Pitched(48, 1, 48, 48)),
        (torch.zeros(2, 6)[:, :4], torch.zeros(2, 4), Pitched(16, 2, 24, 16)),
        (torch.zeros(3, 2, 4)[:, 0], torch.zeros(3, 4), Pitched(16, 3, 32, 16)),
        (torch.zeros(4)[:1], torch.zeros(1), Pitched(4, 1, 4, 4)),
        (torch.zeros(4, 3).t(), torch.zeros(3, 4), None),  # the one runs along rows, the other along columns
        (torch.zeros(2, 3, 4)[:, :2, :2], torch.zeros(2, 2, 2), None),  # not evenly spaced
        (torch.zeros(1, 3).expand(2, 3), torch.zeros(2, 3), None),  # rows on top of each other
        (torch.zeros(2, 3), torch.zeros(3), None),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), None),
        (torch.zeros(0, 3), torch.zeros(0, 3), None),
    ],
)
def test_what_counts_as_evenly_spaced(destination, source, pitched):
    assert pitched_of(destination, source) == pitched


def test_what_cuda_refuses_is_an_error():
    with pytest.raises(RuntimeError, match=r"2 lines of 16 bytes \(error 1\)"):
        copy_pitched(memcpy_2d, torch.zeros(4, 4), torch.zeros(4, 4), Pitched(16, 2, 8, 16), 7)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_cuda_there_is_none():
    assert find_memcpy_2d("cuda") is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_the_real_one_works():
    assert find_memcpy_2d("cuda") is not None
