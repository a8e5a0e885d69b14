"""Pitched copies: tensors that are not contiguous, copied in one piece where they are evenly spaced lines of memory.

A block in a pool is one line per layer and head, all equally far apart; so is a run of tokens of one layer. PyTorch would
make it as many copies as there are lines, or pack it first. CUDA has ``cudaMemcpy2DAsync`` for it (CUDA Runtime API,
section "Memory Management"), which PyTorch does not expose.
"""

import ctypes
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from tierkv import cuda_runtime
from tierkv.tier import Tier
from tierkv.transfer import Copy

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

Memcpy2D = Callable[[int, int, int, int, int, int, int, int], int]
"""``(destination, its pitch, source, its pitch, width, height, kind, stream)``, all in bytes; returns an error code."""

_EITHER_WAY = 4
"""``cudaMemcpyDefault``: the addresses say which memory they are of."""


class Pitched(NamedTuple):
    """Two tensors as equal lines of memory.

    Attributes:
        width: bytes of a line.
        height: lines.
        destination_pitch: bytes from the begin of one line to that of the next.
        source_pitch: the same in the source.
    """

    width: int
    height: int
    destination_pitch: int
    source_pitch: int


def pitched_of(destination: "torch.Tensor", source: "torch.Tensor") -> Pitched | None:
    """Return two tensors of one shape and dtype as equal lines; None where they are not.

    A line is as long as both tensors are dense; lines must be evenly spaced in each, without overlapping.
    """
    if destination.shape != source.shape or destination.dtype != source.dtype or not destination.numel():
        return None
    # Sizes with the strides of both, the outermost dimension first; what is one long has no stride.
    outer = [one for one in zip(source.shape, destination.stride(), source.stride(), strict=True) if one[0] > 1]
    item, width = destination.element_size(), 1
    while outer and outer[-1][1] == outer[-1][2] == width:
        width *= outer.pop()[0]
    if not outer:
        return Pitched(width * item, 1, width * item, width * item)
    height, destination_pitch, source_pitch = outer.pop()
    for size, destination_stride, source_stride in reversed(outer):
        if (destination_stride, source_stride) != (destination_pitch * height, source_pitch * height):
            return None
        height *= size
    if min(destination_pitch, source_pitch) < width:
        return None
    return Pitched(width * item, height, destination_pitch * item, source_pitch * item)


def pieces(copy: Copy, *, pitched: bool) -> "Iterator[tuple[torch.Tensor, torch.Tensor]]":
    """Yield the pairs of a copy, split so that the end in host memory is contiguous, or both are evenly spaced lines.

    PyTorch packs a strided host tensor into pageable memory, on the host, at once: before the work that the copy must
    follow, or blocking the caller until that work is done. A strided device tensor is packed on the stream.
    """
    for pair in copy.tensors:
        if copy.wire.destination is not Tier.DEVICE:
            yield from _split(*pair, host=0, pitched=pitched)
        elif copy.wire.source is not Tier.DEVICE:
            yield from _split(*pair, host=1, pitched=pitched)
        else:
            yield pair


def _split(
    destination: "torch.Tensor", source: "torch.Tensor", *, host: int, pitched: bool
) -> "Iterator[tuple[torch.Tensor, torch.Tensor]]":
    pair = destination, source
    if pair[host].is_contiguous() or destination.shape != source.shape or (pitched and pitched_of(*pair)):
        yield pair
        return
    for part_of_destination, part_of_source in zip(destination, source, strict=True):
        yield from _split(part_of_destination, part_of_source, host=host, pitched=pitched)


def copy_pitched(
    memcpy_2d: Memcpy2D, destination: "torch.Tensor", source: "torch.Tensor", pitched: Pitched, stream: int
) -> None:
    """Enqueue a copy on a stream. Like every copy on a stream it keeps neither tensor alive.

    Args:
        memcpy_2d: what ``find_memcpy_2d`` found.
        destination: on the device, or in page-locked memory.
        source: in the other of both.
        pitched: what ``pitched_of`` says of them.
        stream: its handle.

    Raises:
        RuntimeError: CUDA refused it.
    """
    error = memcpy_2d(
        destination.data_ptr(), pitched.destination_pitch, source.data_ptr(), pitched.source_pitch, pitched.width, pitched.height,
        _EITHER_WAY, stream,
    )  # fmt: skip
    if error:
        cuda_runtime.forget_error()
        raise RuntimeError(f"CUDA refused a copy of {pitched.height} lines of {pitched.width} bytes (error {error})")


def find_memcpy_2d(device: "torch.device | str") -> Memcpy2D | None:
    """Return CUDA's two-dimensional copy, from the library that PyTorch has loaded; None where there is none that works.

    It is tried first, both ways, so that nobody relies on a library that is another than it should be.

    Args:
        device: to and from which is copied.
    """
    try:
        memcpy_2d = _load()
        if memcpy_2d is None or not _works(memcpy_2d, device):
            log.info("there is no two-dimensional copy here; lines are copied one by one")
            return None
    except (AttributeError, RuntimeError) as error:
        log.info("two-dimensional copies cannot be used: %s", error)
        return None
    return memcpy_2d


def _load() -> Memcpy2D | None:
    library = cuda_runtime.library()
    if library is None:
        return None
    function = library.cudaMemcpy2DAsync
    address, size = ctypes.c_void_p, ctypes.c_size_t
    function.argtypes = [address, size, address, size, size, size, ctypes.c_int, address]
    function.restype = ctypes.c_int
    found: Memcpy2D = function
    return found


def _works(memcpy_2d: Memcpy2D, device: "torch.device | str") -> bool:
    import torch

    if not torch.cuda.is_available():
        return False
    with torch.cuda.device(device):
        host, back = (torch.zeros((3, 4, 5), dtype=torch.int32, device="cpu", pin_memory=True) for _ in range(2))
        host.copy_(torch.arange(60, dtype=torch.int32, device="cpu").view(3, 4, 5))
        there = torch.zeros((3, 2, 5), dtype=torch.int32, device=device)
        stream = torch.cuda.current_stream(device)
        for destination, source in ((there, host[:, 1:3]), (back[:, 2:], there)):
            pitched = pitched_of(destination, source)
            assert pitched is not None
            copy_pitched(memcpy_2d, destination, source, pitched, stream.cuda_stream)
        stream.synchronize()
    return torch.equal(back[:, 2:], host[:, 1:3]) and not back[:, :2].any()
