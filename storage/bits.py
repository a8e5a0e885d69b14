"""Bit patterns: tensors of KV as arrays of integers. numpy knows no bfloat16, and a NaN keeps its payload this way."""

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

Bits: TypeAlias = "NDArray[np.signedinteger[Any]]"
"""Bit patterns of KV."""

SAME_SIZE: Final = {2: (torch.int16, np.int16), 4: (torch.int32, np.int32), 8: (torch.int64, np.int64)}
"""Integers of so many bytes, for torch and for numpy."""


def bits_of(tensor: torch.Tensor) -> Bits:
    """Return a view of a tensor in the CPU's memory as bit patterns: same shape, same strides, same bytes."""
    bits: Bits = tensor.detach().view(SAME_SIZE[tensor.element_size()][0]).numpy()
    return bits
