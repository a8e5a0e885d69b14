"""Page-locked memory, from and to which a GPU copies by itself."""

import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch

from tierkv.cuda_runtime import forget_error
from tierkv.errors import ConfigError
from tierkv.storage.page_faults import fault_in

_THREADS: Final = 4


def page_locked(elements: int, dtype: torch.dtype, owner: object) -> "tuple[torch.Tensor, weakref.finalize[Any, Any]]":
    """Return memory of exactly this size, uninitialised, and what lets the driver go of it, to be called before it is freed.

    Not ``torch.empty(pin_memory=True)``: its allocator rounds up to a power of two, so 20 GiB would take 32.

    Args:
        elements: of a flat tensor.
        dtype: of it.
        owner: the driver keeps the pages locked until it is told otherwise, which is at the latest when this object dies.

    Raises:
        ConfigError: it cannot be locked.
    """
    if not torch.cuda.is_available():
        raise ConfigError("memory can only be page-locked where CUDA is available")
    tensor = torch.frombuffer(mmap.mmap(-1, elements * dtype.itemsize), dtype=dtype)
    _fault_in(tensor)  # or the driver does it, on one thread
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    if error:
        forget_error()
        raise ConfigError(
            f"CUDA cannot page-lock {tensor.nbytes:,} bytes of host memory (error {error}); lower host.capacity"
        )
    return tensor, weakref.finalize(owner, _unlock, cudart, tensor)


def _unlock(cudart: Any, tensor: torch.Tensor) -> None:
    """Let the driver go. Until then the tensor keeps the memory, even where its owner was never finished."""
    cudart.cudaHostUnregister(tensor.data_ptr())


def _fault_in(tensor: torch.Tensor) -> None:
    share = max(1, -(-tensor.nbytes // _THREADS))
    with ThreadPoolExecutor(_THREADS) as pool:
        for begin in range(0, tensor.nbytes, share):
            pool.submit(fault_in, tensor.data_ptr() + begin, min(share, tensor.nbytes - begin))
