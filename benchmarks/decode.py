"""How long one decoded token takes at a given context, for the stock caches and for tierkv, in one process.

A random model of SmolLM2-135M's shapes runs single-token forwards. The past is synthetic: random K and V of the asked
length, the same for every cache, put in without a prefill (so contexts may be longer than the model was made for). All
caches are filled first and then take turns, so that a machine that slows down slows all of them; before anything is timed,
the logits of every exact cache are compared with those of ``DynamicCache``.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from transformers import DynamicCache, PreTrainedModel, QuantizedCache, StaticCache

from tierkv.benchmarks.filled import filled, smollm2_shapes, stepper, synthetic_kv
from tierkv.benchmarks.machine import drop_page_cache, memory_read_bytes_per_second
from tierkv.errors import TierKVError

CACHES: Final = ("dynamic", "static", "quantized", "tierkv", "tierkv-25", "tierkv-25-cold")
"""Baselines first. The last two keep a quarter of the KV in anonymous memory and the rest on SSD."""

WARM_UP: Final = 3
TOLERANCE: Final = {"float32": 2e-4, "bfloat16": 0.05, "float16": 0.01}
"""Largest difference of logits from the dynamic cache's, relative to the largest logit."""

MOST_LEFT: Final = 0.05
"""More of a file than this in memory, and it is not cold."""


@dataclass
class Subject:
    """One cache under test, filled.

    Attributes:
        name: one of ``CACHES``.
        step: runs one forward of one token; returns its logits.
        ram_bytes: anonymous memory that the cache takes, in bytes.
        engine: where it is a tiered cache.
        before: called before each timed step, untimed.
        page_cache: for one with a disk tier, whether the file's pages are in memory when a step begins.
        times: seconds of each timed step.
    """

    name: str
    step: Callable[[], torch.Tensor]
    ram_bytes: Callable[[], int]
    engine: Any = None
    before: Callable[[], None] = lambda: None
    page_cache: str | None = None
    times: list[float] = field(default_factory=list)


def measure(
    context: int,
    dtype: str,
    caches: Sequence[str],
    rounds: int,
    disk_path: Path,
    say: Callable[[str], None],
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Fill the caches, check them and let them take turns.

    Args:
        context: tokens in the past.
        dtype: of the model and of K and V.
        caches: which of ``CACHES``.
        rounds: timed steps of each.
        disk_path: where the caches with a disk tier keep it.
        say: told what is left out, and why.
        advance: called ``steps_of(caches, rounds)`` times.

    Returns:
        ``rows``, one a cache, ``left_out``, and for the resident tiered cache ``attention_bytes_per_second`` and
        ``memory_read_bytes_per_second``.

    Raises:
        TierKVError: an exact cache gave other logits than the dynamic one.
    """
    model = smollm2_shapes(dtype)
    token = torch.tensor([[11]])
    with ExitStack() as stack, torch.inference_mode():
        subjects: list[Subject] = []
        left_out: list[dict[str, Any]] = []
        for name in caches:
            try:
                subjects.append(stack.enter_context(_filled(name, model, token, context, WARM_UP + rounds, disk_path)))
                advance()
            except _LeftOut as reason:
                left_out.append({"cache": name, "context": context, "dtype": dtype, "reason": str(reason)})
                say(f"{name} at {context:,} tokens in {dtype} is left out: {reason}")
        _check(subjects, dtype)
        for _ in range(WARM_UP):
            for subject in subjects:
                subject.step()
        for _ in range(rounds):
            advance()
            for subject in subjects:
                subject.before()
                began = time.perf_counter()
                subject.step()
                subject.times.append(time.perf_counter() - began)
        kv_bytes = kv_bytes_of(context, dtype)
        rows = [_row(subject, subjects, context, dtype, kv_bytes) for subject in subjects]
        extra = {}
        resident = next((subject for subject in subjects if subject.name == "tierkv"), None)
        if resident is not None:
            extra = _bandwidths(resident, kv_bytes, rounds)
    return {"rows": rows, "left_out": left_out, **extra}


def steps_of(caches: Sequence[str], rounds: int) -> int:
    """Return how often ``measure`` calls ``advance``, if nothing is left out."""
    return len(caches) + rounds


def kv_bytes_of(context: int, dtype: str) -> int:
    """Return the bytes of K and V of ``context`` tokens in the model's shapes."""
    return int(2 * context * 30 * 3 * 64 * getattr(torch, dtype).itemsize)


def _row(subject: Subject, subjects: Sequence[Subject], context: int, dtype: str, kv_bytes: int) -> dict[str, Any]:
    median = statistics.median(subject.times)
    medians = {other.name: statistics.median(other.times) for other in subjects}
    return {
        "cache": subject.name,
        "context": context,
        "dtype": dtype,
        "ms_per_token_median": round(1e3 * median, 3),
        "ms_per_token_min": round(1e3 * min(subject.times), 3),
        "kv_bytes": kv_bytes,
        "ram_bytes": subject.ram_bytes(),
        "ratio_to_dynamic": round(medians["dynamic"] / median, 3) if "dynamic" in medians else None,
        "ratio_to_static": round(medians["static"] / median, 3) if "static" in medians else None,
        "page_cache": subject.page_cache,
        "block_size": subject.engine.config.block_size if subject.engine is not None else None,
        "read_path": subject.engine.stats().read_path if subject.engine is not None else None,
        "ms_per_token": [round(1e3 * seconds, 3) for seconds in subject.times],
    }


def _check(subjects: Sequence[Subject], dtype: str) -> None:
    """Compare the logits of one token; it also fills what fills itself at the first use."""
    logits = {subject.name: subject.step().float() for subject in subjects}
    for name, own in logits.items():
        if name == "quantized" or "dynamic" not in logits:
            continue
        off = ((own - logits["dynamic"]).abs().max() / logits["dynamic"].abs().max()).item()
        if not off <= TOLERANCE[dtype]:
            raise TierKVError(
                f"{name} in {dtype} gives logits that are {off:.2g} off the dynamic cache's: nothing is timed"
            )


def _bandwidths(subject: Subject, kv_bytes: int, rounds: int) -> dict[str, int]:
    """Time the attention calls alone, and a plain read of as many bytes, taking turns."""
    paged = subject.engine.paged
    attend = paged.attend
    spent: list[float] = []

    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        out = attend(*args, **kwargs)
        spent[-1] += time.perf_counter() - began
        return out

    reads = []
    try:
        paged.attend = timed
        for _ in range(rounds):
            spent.append(0.0)
            subject.step()
            reads.append(memory_read_bytes_per_second(kv_bytes))
    finally:
        del paged.attend
    return {
        "attention_bytes_per_second": round(kv_bytes / statistics.median(spent)) if any(spent) else 0,
        "memory_read_bytes_per_second": round(statistics.median(reads)),
    }


# -- the caches -----------------------------------------------------------------------------------------------------------


class _LeftOut(Exception):
    """A cache cannot run here; the message says why."""


@contextmanager
def _filled(
    name: str, model: PreTrainedModel, token: torch.Tensor, context: int, steps: int, disk_path: Path
) -> Iterator[Subject]:
    """Return a cache that holds ``context`` tokens and has room for ``steps`` more."""
    if name.startswith("tierkv"):
        with _tiered(name, model, token, context, 2 * steps + 8, disk_path) as subject:
            yield subject
        return
    if name == "dynamic":
        cache: Any = DynamicCache(config=model.config)
    elif name == "static":
        cache = StaticCache(config=model.config, max_cache_len=context + 2 * steps + 8)
    else:
        try:
            cache = QuantizedCache("quanto", config=model.config, nbits=4)
        except ImportError:
            raise _LeftOut("it needs the package optimum-quanto") from None
    for layer, (keys, values) in enumerate(synthetic_kv(model, context)):
        cache.update(keys, values, layer)
    yield Subject(name, stepper(model, token, cache), lambda: _tensor_bytes(cache))


def _tensor_bytes(cache: Any) -> int:
    """Count the bytes of all tensors that the layers of a cache hold."""
    seen: dict[int, int] = {}
    for layer in cache.layers:
        for value in vars(layer).values():
            if isinstance(value, torch.Tensor):
                seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(seen.values())


@contextmanager
def _tiered(
    name: str, model: PreTrainedModel, token: torch.Tensor, context: int, room: int, disk_path: Path
) -> Iterator[Subject]:
    kv_bytes = (context + room) * sum(
        2 * model.config.num_key_value_heads * model.config.head_dim * model.dtype.itemsize
        for _ in range(model.config.num_hidden_layers)
    )
    quarter = name != "tierkv"
    spare = 24 * 2**20  # scratch, and blocks that are not full
    device = kv_bytes // 4 if quarter else kv_bytes + kv_bytes // 8 + spare
    # Large blocks suit a disk: each layer's slice of a block is a record. As large as leave a dozen in memory.
    sizes = (256, 128, 64, 32) if quarter else (32,)
    block_size = next((size for size in sizes if device >= 12 * size * kv_bytes // (context + room)), 32)
    config = {
        "block_size": block_size,
        "device": {"capacity": device},
        "host": {"capacity": 0},
        "disk": {"capacity": 2 * kv_bytes + 2**26 if quarter else 0, "path": str(disk_path)},
    }
    with ExitStack() as stack:
        try:
            own = stack.enter_context(filled(model, context, room, config))
        except TierKVError as error:
            raise _LeftOut(str(error)) from None
        subject = Subject(name, own.stepper(token), lambda: _anonymous(own.engine), own.engine)
        if own.spill is not None:
            own.spill.flush()  # a record that waits to be written is read from memory
            subject.page_cache = "warm"
        if own.spill is not None and name.endswith("cold"):
            folder = own.spill.path
            left = drop_page_cache(folder)
            if left > MOST_LEFT:
                raise _LeftOut(f"{left:.0%} of the file stayed in the page cache")
            subject.page_cache = f"dropped before each token ({left:.1%} left)"
            subject.before = lambda: _drop(folder)
        yield subject


def _drop(folder: Path) -> None:
    drop_page_cache(folder)


def _anonymous(engine: Any) -> int:
    tiers = engine.stats().tiers
    return int(tiers["device"].allocated_bytes + tiers["host"].allocated_bytes)
