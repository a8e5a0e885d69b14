"""The few CUDA calls of transfers, behind one interface: PyTorch's, or those of a simulation in tests."""

import functools
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final, Protocol

from tierkv.transfer_pitched import copy_pitched, find_memcpy_2d, pitched_of

if TYPE_CHECKING:
    import torch

LEAST_WIDTH: Final = 4096
"""Bytes of a line below which packing on the device is taken to be faster than a copy engine that goes line by line."""


class CudaApi(Protocol):
    """What CudaTransfers asks of CUDA. Streams and events are those of ``torch.cuda``, or a test's."""

    def new_stream(self, device: Any) -> Any:
        """Return a stream: ``wait_event(event)``, ``synchronize()``."""

    def new_event(self) -> Any:
        """Return an event: ``record(stream)``, ``query()``, ``synchronize()``, ``elapsed_time(later)`` in ms."""

    def current_stream(self, device: Any) -> Any:
        """Return the stream that the calling thread enqueues on."""

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Make ``stream`` current for the calling thread."""

    takes_pitched: bool
    """Whether ``copy`` takes what is no more than evenly spaced lines of memory, too."""

    def copy(self, destination: "torch.Tensor", source: "torch.Tensor") -> None:
        """Enqueue a copy on the current stream. The end in host memory is pinned, and contiguous unless ``takes_pitched``."""


class TorchCuda:
    """The real one."""

    def __init__(self, device: Any) -> None:
        import torch

        self.new_stream = torch.cuda.Stream
        self.new_event = functools.partial(torch.cuda.Event, enable_timing=True, blocking=True)
        self.current_stream = torch.cuda.current_stream
        self.use = torch.cuda.stream
        self._memcpy_2d = find_memcpy_2d(device)
        self.takes_pitched = self._memcpy_2d is not None

    def copy(self, destination: "torch.Tensor", source: "torch.Tensor") -> None:
        """Enqueue a copy on the current stream, in one piece where both ends are evenly spaced lines of memory."""
        dense = destination.is_contiguous() and source.is_contiguous()
        host = source if destination.is_cuda else destination
        pitched = None if dense or self._memcpy_2d is None else pitched_of(destination, source)
        packed = host.is_contiguous() and pitched is not None and pitched.width < LEAST_WIDTH
        if pitched is None or packed or self._memcpy_2d is None:
            destination.copy_(source, non_blocking=True)
            return
        device = destination.device if destination.is_cuda else source.device
        copy_pitched(self._memcpy_2d, destination, source, pitched, self.current_stream(device).cuda_stream)
