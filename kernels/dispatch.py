"""Which kernel runs: chosen here and nowhere else, by the device that holds the query."""

import functools
from collections.abc import Sequence

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
    if device.type == "cpu":
        return cpu.unsupported(dtype, key_dim, value_dim, group)
    if device.type != "cuda":
        return f"there are no paged attention kernels for {device.type} devices"
    try:
        from tierkv.kernels import triton_attention
    except ImportError:
        return "triton is not installed, and paged attention on CUDA is written in it"
    if reason := cannot_launch():
        return reason
    return triton_attention.unsupported(dtype, key_dim, value_dim)


@functools.cache
def cannot_launch() -> str:
    """Return why Triton cannot launch anything here, empty where it can: it compiles its launcher with a C compiler."""
    import triton

    try:
        return "" if triton.runtime.driver.active.utils else "triton has no driver here"
    except Exception as error:  # noqa: BLE001 - whatever it is, attention is gathered then
        said = str(error).strip() or type(error).__name__
        return f"triton cannot launch kernels here: {said.splitlines()[-1]}"


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
    how = {"start": start, "scale": scale, "window": window, "softcap": softcap}
    if _on_cpu(query):
        return cpu.attention(query, runs, member, **how)  # type: ignore[arg-type]
    from tierkv.kernels import triton_attention

    return triton_attention.attention(query, runs, member, starts=runs.starts, **how)  # type: ignore[arg-type]


def append(keys: torch.Tensor, values: torch.Tensor, runs: Runs, member: int) -> None:
    """Write new tokens of one layer to where ``runs`` says they live; see ``cpu.append``."""
    if _on_cpu(keys):
        cpu.append(keys, values, runs, member)
        return
    from tierkv.kernels import triton_copy

    triton_copy.append(keys, values, runs, member, starts=runs.starts)


def merge(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]], sinks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention over disjoint sets of tokens; see ``reference.merge``."""
    if len(parts) == 1 and sinks is None:
        return parts[0]
    if _on_cpu(parts[0][0]):
        return reference.merge(parts, sinks)
    from tierkv.kernels import triton_merge

    outs, lses = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    return triton_merge.merge(outs, lses, sinks)


def _on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"
