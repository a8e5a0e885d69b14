"""Rows: copies of tensors that are not contiguous, as one two-dimensional copy each, which a GPU's copy engine makes by itself.

A block in a pool is one row per layer and head, all equally far apart; so is a run of tokens of one layer. PyTorch would
make it as many copies as there are rows, or pack it first. CUDA has ``cudaMemcpy2DAsync`` for it (CUDA Runtime API,
section "Memory Management"), which PyTorch does not expose.
"""

import ctypes
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tierkv.tier import Tier
from tierkv.transfer import Copy

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

Memcpy2D = Callable[[int, int, int, int, int, int, int, int], int]
"""``(destination, its pitch, source, its pitch, width, height, kind, stream)``, all in bytes; returns an error code."""

_EITHER_WAY = 4
"""``cudaMemcpyDefault``: the addresses say which memory they are of."""


class Rows(NamedTuple):
    """Equal rows of bytes in two tensors.

    Attributes:
        width: bytes of a row.
        height: rows.
        destination_pitch: bytes from one row to the next.
        source_pitch: the same in the source.
    """

    width: int
    height: int
    destination_pitch: int
    source_pitch: int


def rows_of(destination: "torch.Tensor", source: "torch.Tensor") -> Rows | None:
    """Return two tensors of one shape and dtype as equal rows; None where they are not.

    Rows are as long as both tensors are dense, and must be evenly spaced in each, without overlapping.
    """
    if destination.shape != source.shape or destination.dtype != source.dtype or not destination.numel():
        return None
    # Sizes with the strides of both, the innermost dimension first; what is one long has no stride.
    lines = [line for line in zip(source.shape, destination.stride(), source.stride(), strict=True) if line[0] > 1][
        ::-1
    ]
    item, width = destination.element_size(), 1
    while lines and lines[0][1] == lines[0][2] == width:
        width *= lines.pop(0)[0]
    if not lines:
        return Rows(width * item, 1, width * item, width * item)
    height, destination_pitch, source_pitch = lines[0]
    for size, destination_stride, source_stride in lines[1:]:
        if (destination_stride, source_stride) != (destination_pitch * height, source_pitch * height):
            return None
        height *= size
    if min(destination_pitch, source_pitch) < width:
        return None
    return Rows(width * item, height, destination_pitch * item, source_pitch * item)


def pieces(copy: Copy, *, rows: bool) -> "Iterator[tuple[torch.Tensor, torch.Tensor]]":
    """Yield the pairs of a copy, split so that the end in host memory is contiguous, or both are evenly spaced rows.

    PyTorch packs a strided host tensor into pageable memory, on the host, at once: before the work that the copy must
    follow, or blocking the caller until that work is done. A strided device tensor is packed on the stream.
    """
    for pair in copy.tensors:
        if copy.wire.destination is not Tier.DEVICE:
            yield from _split(*pair, host=0, rows=rows)
        elif copy.wire.source is not Tier.DEVICE:
            yield from _split(*pair, host=1, rows=rows)
        else:
            yield pair


def _split(
    destination: "torch.Tensor", source: "torch.Tensor", *, host: int, rows: bool
) -> "Iterator[tuple[torch.Tensor, torch.Tensor]]":
    pair = destination, source
    if pair[host].is_contiguous() or destination.shape != source.shape or (rows and rows_of(*pair)):
        yield pair
        return
    for part_of_destination, part_of_source in zip(destination, source, strict=True):
        yield from _split(part_of_destination, part_of_source, host=host, rows=rows)


def copy_rows(
    memcpy_2d: Memcpy2D, destination: "torch.Tensor", source: "torch.Tensor", rows: Rows, stream: int
) -> None:
    """Enqueue a copy on a stream. Like every copy on a stream it keeps neither tensor alive.

    Args:
        memcpy_2d: what ``find_memcpy_2d`` found.
        destination: on the device, or in page-locked memory.
        source: in the other of both.
        rows: what ``rows_of`` says of them.
        stream: its handle.

    Raises:
        RuntimeError: CUDA refused it.
    """
    error = memcpy_2d(
        destination.data_ptr(), rows.destination_pitch, source.data_ptr(), rows.source_pitch, rows.width, rows.height,
        _EITHER_WAY, stream,
    )  # fmt: skip
    if error:
        raise RuntimeError(f"CUDA refused a copy of {rows.height} rows of {rows.width} bytes (error {error})")


def find_memcpy_2d() -> Memcpy2D | None:
    """Return CUDA's two-dimensional copy, from the library that PyTorch has loaded; None where there is none that works.

    It is tried once, both ways, before anybody relies on it.
    """
    try:
        memcpy_2d = _load()
        if memcpy_2d is None or not _works(memcpy_2d):
            log.debug("there is no two-dimensional copy here; rows are copied one by one")
            return None
    except (OSError, AttributeError, RuntimeError) as error:
        log.debug("two-dimensional copies cannot be used: %s", error)
        return None
    return memcpy_2d


def _load() -> Memcpy2D | None:
    """Find the very CUDA runtime that is part of this process: another one would have streams of its own."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "libcudart" in line}
    if len(paths) != 1:
        return None
    function = ctypes.CDLL(paths.pop()).cudaMemcpy2DAsync
    address, size = ctypes.c_void_p, ctypes.c_size_t
    function.argtypes = [address, size, address, size, size, size, ctypes.c_int, address]
    function.restype = ctypes.c_int
    found: Memcpy2D = function
    return found


def _works(memcpy_2d: Memcpy2D) -> bool:
    import torch

    host, back = (torch.zeros((3, 4, 5), dtype=torch.int32).pin_memory() for _ in range(2))
    host.copy_(torch.arange(60, dtype=torch.int32).view(3, 4, 5))
    device = torch.zeros((3, 2, 5), dtype=torch.int32, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    for destination, source in ((device, host[:, 1:3]), (back[:, 2:], device)):
        rows = rows_of(destination, source)
        assert rows is not None
        copy_rows(memcpy_2d, destination, source, rows, stream)
    torch.cuda.synchronize()
    return torch.equal(back[:, 2:], host[:, 1:3]) and not back[:, :2].any()
