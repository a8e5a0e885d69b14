"""What every Triton launcher shares: a launch as a value, and the checks made before one."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from tierkv.kernels.runs import Column, Runs

# A vector instruction moves this much. Addresses come from a table, so a kernel knows of their alignment only what the
# launcher promises; without a promise it loads number by number.
VECTOR_BYTES = 16

# Bits are copied, so any dtype of a size goes through one compiled kernel, and a NaN keeps its payload.
BITS_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel and all that it is launched with; a value, so that what runs can also be compiled without a GPU.

    Attributes:
        kernel: a ``triton.jit`` function.
        grid: programs along each axis.
        arguments: by name; tensors, numbers and compile-time constants.
        device: of the tensors.
        warps: of a program.
        stages: depth of the software pipeline of its inner loop.
        most_registers: of a thread; None lets the assembler choose, which may prefer spills to fewer threads at a time.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    device: torch.device
    warps: int = 4
    stages: int = 1
    most_registers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The same, as Triton calls them."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.most_registers}

    def run(self) -> None:
        """Launch on the current stream of the tensors' device."""
        if not all(self.grid):
            return
        # Triton launches on the current device, whatever device its tensors are on.
        with torch.cuda.device(self.device if self.device.type == "cuda" else -1):
            self.kernel[self.grid](**self.arguments, **self.options)


def require(condition: bool, message: str) -> None:  # noqa: FBT001
    """Raise ValueError with ``message`` unless the condition holds."""
    if not condition:
        raise ValueError(message)


def alignment(dim: int, dtype: torch.dtype) -> int:
    """Return the bytes that the address of every token of ``dim`` numbers is a multiple of, in aligned memory."""
    return math.gcd(VECTOR_BYTES, dim * dtype.itemsize)


def check_device(kernel: Any, device: torch.device) -> None:
    """Raise ValueError unless the kernel can run on memory of ``device``."""
    interpreted = not isinstance(kernel, triton.runtime.JITFunction)
    require(
        device.type == "cuda" or interpreted,
        f"Triton kernels run on CUDA tensors, not on {device}; choose another implementation in dispatch",
    )


def check_dense(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: Any) -> None:
    """Raise ValueError unless a tensor has a shape, dtype and device, and its last dimension lies densely."""
    require(tuple(tensor.shape) == shape, f"{name} must have shape {list(shape)}, not {list(tensor.shape)}")
    require(tensor.dtype == dtype, f"{name} must be {dtype}, not {tensor.dtype}")
    require(tensor.device == device, f"{name} must be on {device}, not on {tensor.device}")
    require(
        tensor.stride(-1) == 1 or tensor.shape[-1] < 2,
        f"the last dimension of {name} must be dense, its stride is {tensor.stride(-1)}",
    )


def check_runs(runs: Runs, member: int, starts: torch.Tensor) -> None:
    """Raise ValueError unless a kernel can read the table and member is a layer of it.

    What the table says cannot be checked: it lies on the device, and reading it would wait for all work before it.
    """
    device = runs.table.device
    count = runs.table.shape[0]
    require(0 <= member < runs.members, f"member must be 0 to {runs.members - 1}, not {member}")
    check_dense("runs.table", runs.table, (count, len(Column)), torch.int64, device)
    check_dense("runs.row_starts", runs.row_starts, (runs.rows + 1,), torch.int64, device)
    check_dense("starts", starts, (count + 1,), torch.int64, device)
    require(runs.table.is_contiguous(), "runs.table must be contiguous")
    aligned = max(alignment(runs.key_dim, runs.dtype), alignment(runs.value_dim, runs.dtype))
    for tensor in runs.memory:
        require(tensor.device == device, f"runs.memory must be on {device} like its table, not on {tensor.device}")
        require(
            tensor.data_ptr() % aligned == 0,
            f"runs.memory must begin at a multiple of {aligned} bytes, not at {tensor.data_ptr():#x}",
        )
