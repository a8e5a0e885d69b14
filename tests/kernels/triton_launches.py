"""Launches in representative shapes, and a command that compiles them: ``python -m tests.kernels.triton_launches 90``.

A process of its own, since Triton either interprets or compiles in one. Prints one JSON object a line.
"""

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator

import torch

from tierkv.kernels import triton_attention, triton_blocks, triton_compile, triton_copy, triton_merge
from tierkv.kernels.runs import Runs
from tierkv.kernels.triton_launch import Launch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# With four query heads a KV head, each is a tile of its own size.
QUERIES = {"decode": 1, "a few": 8, "chunk": 16, "prefill": 1024}


def _runs(dtype: torch.dtype, key_dim: int, value_dim: int, tokens: int) -> Runs:
    table = torch.zeros(4, 8, dtype=torch.int64)
    return Runs(table, torch.tensor([0, 4]), tokens, 1, 8, key_dim, value_dim, dtype)


ATTENTION = (
    "bf16 64/64 decode",
    "bf16 64/64 prefill",
    "bf16 80/80 decode",
    "bf16 80/80 prefill",
    "bf16 128/128 decode",
    "bf16 128/128 decode window softcap",
    "bf16 128/128 a few",
    "bf16 128/128 chunk",
    "bf16 128/128 chunk window softcap",
    "bf16 128/128 prefill",
    "bf16 128/128 prefill window softcap",
    "bf16 192/128 decode",
    "bf16 192/128 prefill",
    "bf16 256/256 decode",
    "bf16 256/256 a few",
    "bf16 256/256 prefill",
    "bf16 256/256 prefill window softcap",
    "fp16 128/128 decode",
    "fp16 128/128 prefill",
    "fp32 64/64 decode",
    "fp32 80/80 decode",
    "fp32 128/128 decode",
    "fp32 128/128 prefill window softcap",
    "fp32 256/256 decode",
    "fp32 256/256 prefill window softcap",
)
OTHERS = (
    "merge 128 of 2",
    "merge 128 of 33",
    "merge 256 of 33",
    "append bf16 decode",
    "append bf16 prefill",
    "append fp32 prefill",
    "gather bf16 decode",
    "gather bf16 prefill",
    "gather fp32 prefill",
    "pack bf16",
    "unpack bf16",
)
QUICK = (
    "attention bf16 64/64 decode",
    "attention bf16 128/128 decode",
    "attention bf16 128/128 prefill",
    "attention bf16 256/256 decode",
    "attention fp32 128/128 decode",
    "merge 128 of 33",
    "append bf16 decode",
    "gather bf16 prefill",
    "pack bf16",
)


def launch(name: str) -> Launch:
    """Make the launch of that name, over tensors that hold nothing."""
    kind, *words = name.split()
    if kind == "attention":
        return _attention(*words)
    if kind == "merge":
        parts, dim = int(words[2]), int(words[0])
        made, _, _ = triton_merge.plan(torch.empty(parts, 1, 1, 8, dim), torch.empty(parts, 1, 1, 8), torch.empty(8))
        return made
    dtype = DTYPES[words[0]]
    if kind in ("append", "gather"):
        runs = _runs(dtype, 128, 128, QUERIES[" ".join(words[1:])])
        dense = torch.empty(1, 8, runs.most_tokens, 128, dtype=dtype)
        starts = torch.empty(5, dtype=torch.int64)
        return triton_copy.plan(dense, dense, runs, 0, starts, into_runs=kind == "append")
    pool, staging = torch.empty(2, 4, 8, 16, 32, 128, dtype=dtype), torch.empty(3, 4, 8, 32, 128, dtype=dtype)
    return triton_blocks.plan(pool, [0, 17, 31], staging, into_pool=kind == "unpack")


def _attention(dtype: str, dims: str, *form: str) -> Launch:
    key_dim, value_dim = map(int, dims.split("/"))
    extra = form[-1] == "softcap"
    queries = QUERIES[" ".join(form[:-2] if extra else form)]
    # Four query heads a KV head, in the order that a model's projection gives.
    query = torch.empty(1, queries, 32, key_dim, dtype=DTYPES[dtype]).transpose(1, 2)
    made, _, _ = triton_attention.plan(
        query,
        _runs(DTYPES[dtype], key_dim, value_dim, 4096),
        0,
        start=4000,
        scale=0.1,
        window=1000 if extra else None,
        softcap=30.0 if extra else None,
        starts=torch.empty(5, dtype=torch.int64),
        splits=16,
    )
    return made


def footprints(capability: int, wanted: Iterable[str]) -> Iterator[dict[str, object]]:
    """Compile launches for a compute capability."""
    for name in wanted:
        yield {"name": name, **dataclasses.asdict(triton_compile.compile_launch(launch(name), capability))}


if __name__ == "__main__":
    wanted = QUICK if "quick" in sys.argv else [*(f"attention {name}" for name in ATTENTION), *OTHERS]
    for line in footprints(int(sys.argv[1]), wanted):
        print(json.dumps(line), flush=True)  # noqa: T201
