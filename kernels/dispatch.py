"""Which kernel runs: chosen here and nowhere else, by the device that holds the query."""

from collections.abc import Sequence
from types import ModuleType

import torch

from tierkv.kernels import cpu, reference
from tierkv.kernels.runs import Runs


def unsupported(device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, group: int) -> str:
    """Return why there is no paged attention for a shape on a device; empty where there is.

    Args:
        device: that computes.
        dtype: of query, K and V.
        key_dim: numbers of a head's key.
        value_dim: numbers of a head's value.
        group: query heads of a KV head.
    """
    if device.type != "cpu":
        return f"there are no paged attention kernels for {device.type} devices in this version"
    return cpu.unsupported(dtype, key_dim, value_dim, group)


def attention(
    query: torch.Tensor,
    runs: Runs,
    member: int,
    *,
    start: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the tokens of ``runs``; see ``reference.attention``.

    Returns:
        Float32 output ``[rows, queries, query_heads, value_dim]`` and log-sum-exp ``[rows, queries, query_heads]``.
    """
    return _kernels(query).attention(  # type: ignore[no-any-return]
        query, runs, member, start=start, scale=scale, window=window, softcap=softcap
    )


def append(keys: torch.Tensor, values: torch.Tensor, runs: Runs, member: int) -> None:
    """Write new tokens of one layer to where ``runs`` says they live; see ``cpu.append``."""
    _kernels(keys).append(keys, values, runs, member)


def merge(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]], sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention over disjoint sets of tokens; see ``reference.merge``."""
    if len(parts) == 1 and sinks is None:
        return parts[0]
    return reference.merge(parts, sinks)


def _kernels(tensor: torch.Tensor) -> ModuleType:
    if tensor.device.type == "cpu":
        return cpu
    raise ValueError(f"there are no paged attention kernels for {tensor.device.type} devices in this version")
