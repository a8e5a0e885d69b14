"""The CUDA runtime that PyTorch has loaded, for the few calls that PyTorch does not expose."""

import ctypes
import functools
from pathlib import Path


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library, or None where PyTorch was built without CUDA.

    It is looked up among what PyTorch's own library depends on: another CUDA runtime in the process, of CuPy for example,
    would have an error state and streams of its own.
    """
    import torch

    try:
        found = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10_cuda.so"))
    except OSError:
        return None
    return found if hasattr(found, "cudaGetLastError") else None


def forget_error() -> None:
    """Forget that a call failed, after one that PyTorch did not check.

    Otherwise it would report that error for the next kernel that it launches from this thread, whosever that is.
    """
    if (found := library()) is not None:
        found.cudaGetLastError()
