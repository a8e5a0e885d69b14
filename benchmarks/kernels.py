"""How fast the kernels are by themselves, beside what PyTorch offers for the same work and beside a plain read of memory."""

import statistics
import time
from typing import TYPE_CHECKING, Any, Final

import torch

from tierkv.benchmarks.machine import memory_read_bytes_per_second
from tierkv.kernels import dispatch
from tierkv.kernels.runs import Runs

if TYPE_CHECKING:
    from collections.abc import Callable

KV_HEADS: Final = 3
GROUP: Final = 3
HEAD_DIM: Final = 64
"""SmolLM2-135M's shapes: 9 query heads share 3 KV heads."""
SEGMENT_TOKENS: Final = 512
LAYERS: Final = 4
"""More than the processor's caches hold at long contexts; each call reads the next one."""


def unsupported(dtype: str) -> str:
    """Return why the kernels cannot run here; empty where they can."""
    return dispatch.unsupported(torch.device("cpu"), getattr(torch, dtype), HEAD_DIM, HEAD_DIM, GROUP)


def measure(context: int, dtype: str, rounds: int) -> dict[str, Any]:
    """Time attention of one query over ``context`` tokens, and what goes with it; all take turns.

    Args:
        context: tokens in the past.
        dtype: of query, K and V.
        rounds: timed calls of each.

    Returns:
        Seconds and bytes a second: ``attention`` over runs; ``sdpa``, PyTorch's over dense tensors with the group packed into
        query rows, its fastest form; ``append`` of one token; ``merge`` of two partial results.
    """
    kind = getattr(torch, dtype)
    keys, values = (
        torch.randn(-(-context // SEGMENT_TOKENS), LAYERS, KV_HEADS, SEGMENT_TOKENS, HEAD_DIM).to(kind)
        for _ in range(2)
    )
    runs, last = _runs(keys, values, 0, context), _runs(keys, values, context - 1, 1)
    query = torch.randn(1, 1, KV_HEADS * GROUP, HEAD_DIM).to(kind).transpose(1, 2)
    packed = query.reshape(1, KV_HEADS, GROUP, HEAD_DIM)
    dense = [
        tensor.transpose(0, 2)[:, 0].reshape(1, KV_HEADS, -1, HEAD_DIM)[:, :, :context] for tensor in (keys, values)
    ]
    new = torch.randn(1, KV_HEADS, 1, HEAD_DIM).to(kind)
    part = dispatch.attention(query, runs, 0, start=context - 1, scale=0.125)
    calls: dict[str, Callable[[int], object]] = {
        "attention": lambda turn: dispatch.attention(query, runs, turn % LAYERS, start=context - 1, scale=0.125),
        "sdpa": lambda _: torch.nn.functional.scaled_dot_product_attention(packed, *dense, scale=0.125),
        "append": lambda turn: dispatch.append(new, new, last, turn % LAYERS),
        "merge": lambda _: dispatch.merge([part, part]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    reads = []
    for turn in range(3 + rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            call(turn)
            seconds[name].append(time.perf_counter() - began)
        reads.append(memory_read_bytes_per_second(0))
    medians = {name: statistics.median(times[3:]) for name, times in seconds.items()}
    kv_bytes = 2 * context * KV_HEADS * HEAD_DIM * kind.itemsize
    return {
        "context": context,
        "dtype": dtype,
        "kv_bytes": kv_bytes,
        "microseconds": {name: round(1e6 * median, 1) for name, median in medians.items()},
        "attention_bytes_per_second": round(kv_bytes / medians["attention"]),
        "sdpa_bytes_per_second": round(kv_bytes / medians["sdpa"]),
        "memory_read_bytes_per_second": round(statistics.median(reads[3:])),
    }


def _runs(keys: torch.Tensor, values: torch.Tensor, first: int, tokens: int) -> Runs:
    """Return the table of ``tokens`` tokens of one row from position ``first`` on."""
    lines = []
    at = first
    while at < first + tokens:
        segment, offset = divmod(at, SEGMENT_TOKENS)
        count = min(SEGMENT_TOKENS - offset, first + tokens - at)
        lines.append(
            [
                keys[segment, 0, 0, offset].data_ptr(), values[segment, 0, 0, offset].data_ptr(), keys.stride(1),
                values.stride(1), keys.stride(2), values.stride(2), count, at,
            ]
        )  # fmt: skip
        at += count
    return Runs(
        table=torch.tensor(lines),
        row_starts=torch.tensor([0, len(lines)]),
        most_tokens=tokens,
        members=LAYERS,
        kv_heads=KV_HEADS,
        key_dim=HEAD_DIM,
        value_dim=HEAD_DIM,
        dtype=keys.dtype,
        memory=(keys, values),
    )
