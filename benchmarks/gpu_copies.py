"""The section of ``gpu_check`` about copies: what our copies reach of a plain copy between pinned memory and the device."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tierkv.benchmarks.gpu_common import Layer, Record, Timer, Watch, fill, filled, plain_layout, rounds
from tierkv.block_table import Block
from tierkv.engine import Engine
from tierkv.moves import Move
from tierkv.sequences import SequenceBatch
from tierkv.tier import Tier, Wire

UP, DOWN = Wire(Tier.HOST, Tier.DEVICE), Wire(Tier.DEVICE, Tier.HOST)
SHARE = 0.05
"""Of the tokens on the device: as good as none, so that a step moves as good as all."""


def measure_copies(record: Record) -> None:
    """Measure reads of cold tokens, writes of new ones and moves of whole blocks."""
    layers, kv_heads, dim, tokens = (2, 2, 16, 1500) if record.rehearse else (4, 8, 128, 65536)
    repeats = 3 if record.rehearse else 9
    layout = plain_layout(layers, kv_heads, dim, "bfloat16")
    generator = torch.Generator(record.device).manual_seed(0)
    keys, values = (
        torch.randn((1, kv_heads, tokens, dim), generator=generator, device=record.device).bfloat16() for _ in range(2)
    )
    record.put(
        layers=layers, kv_heads=kv_heads, head_dim=dim, tokens=tokens, dtype="bfloat16", repeats=repeats,
        block_tokens=layout.block_size, block_bytes=layout.block_bytes, kv_bytes=tokens * layout.token_bytes,
        clock="of the wall, device idle at both ends",
    )  # fmt: skip
    timer = Timer(record.device)
    plain = _plain(timer, record.device, tokens * layout.token_bytes)
    content = keys, values
    with (
        record.part("steps of the paged path"),
        filled(layout, record.device, [content], device_share=SHARE) as (engine, batch),
    ):
        # Whether the lines of a block go in one copy; see tierkv.transfer_pitched.
        record.put(takes_pitched=getattr(getattr(engine.transfers, "_api", None), "takes_pitched", None))
        works: dict[str, Callable[[], object]] = {
            "paged_reads": lambda: _step(engine, batch, content, gathered=False),
            "writes_of_new_tokens": lambda: _refill(batch, content),
        }
        _measure(record, timer, engine, works, plain, repeats)
        batch.reset()
        with record.part("moves of whole blocks"):
            _measure(record, timer, engine, _moves(record, engine), plain, repeats)
        with record.part("plain copies from and to the host pool"):
            pool = _plain_to_pool(timer, engine)
            times = rounds({**pool, **plain}, repeats)
            record.put(one_copy_of_the_host_pool=_rates(pool, times), one_plain_copy=_rates(plain, times))
    with (
        record.part("steps of the gathered path"),
        filled(layout, record.device, [content], device_share=SHARE, gathered=True) as (engine, batch),
    ):
        works = {"gathered_reads": lambda: _step(engine, batch, content, gathered=True)}
        _measure(record, timer, engine, works, plain, repeats)


@dataclass(frozen=True)
class _PlainCopy:
    """One contiguous copy; calling it returns its seconds."""

    timer: Timer
    destination: torch.Tensor
    source: torch.Tensor

    def __call__(self) -> float:
        return self.timer.wall_seconds(lambda: self.destination.copy_(self.source, non_blocking=True))


def _plain(timer: Timer, device: torch.device, num_bytes: int) -> dict[str, _PlainCopy]:
    """Return what we are compared with: so many bytes at once, from and to memory that PyTorch has pinned."""
    there = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=timer.cuda)
    return {UP.label: _PlainCopy(timer, there, host), DOWN.label: _PlainCopy(timer, host, there)}


def _plain_to_pool(timer: Timer, engine: Engine) -> dict[str, _PlainCopy]:
    """Return the same with memory as our pool pins it. The pool must be empty."""
    host = engine.stores.slab(Tier.HOST)._flat[0][0]  # noqa: SLF001 - the pool as one piece, which nothing else needs
    there = torch.empty_like(host, device=engine.device)
    return {f"pool_{UP.label}": _PlainCopy(timer, there, host), f"pool_{DOWN.label}": _PlainCopy(timer, host, there)}


def _rates(copies: dict[str, _PlainCopy], times: dict[str, list[float]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name, copy in copies.items():
        figures[f"{name}_bytes"] = copy.source.nbytes
        figures[f"{name}_median_bytes_per_second"] = copy.source.nbytes / statistics.median(times[name])
        figures[f"{name}_all_seconds"] = times[name]
    return figures


def _measure(
    record: Record,
    timer: Timer,
    engine: Engine,
    works: dict[str, Callable[[], object]],
    plain: dict[str, _PlainCopy],
    repeats: int,
) -> None:
    """Time works that move bytes in turn with plain copies, and set each beside the one in its direction."""

    def moved() -> dict[Wire, int]:
        return {wire: engine.moved.get(wire, 0) for wire in (UP, DOWN)}

    counts: dict[str, dict[Wire, int]] = {}

    def timed(name: str) -> float:
        before = moved()
        seconds = timer.wall_seconds(works[name])
        counts[name] = {wire: after - before[wire] for wire, after in moved().items()}
        return seconds

    turns: dict[str, Callable[[], float]] = {name: lambda name=name: timed(name) for name in works}
    times = rounds({**turns, **plain}, repeats)
    for name in works:
        wire = max(counts[name], key=counts[name].__getitem__)
        num_bytes, median = counts[name][wire], statistics.median(times[name])
        rate = plain[wire.label].source.nbytes / statistics.median(times[wire.label])
        found: dict[str, Any] = {
            "wire": wire.label,
            "bytes": num_bytes,
            "median_seconds": median,
            "min_seconds": min(times[name]),
            "all_seconds": times[name],
            "median_bytes_per_second": num_bytes / median,
            "plain_copy_median_bytes_per_second": rate,
            "share_of_plain_copy_ratio": num_bytes / median / rate,
        }
        with Watch(engine) as watch:
            works[name]()
        found |= watch.figures(1)
        if busy := found.get("copies_busy_seconds_per_step"):
            found["bytes_per_second_while_copies_run"] = num_bytes / busy
        record.put(**{name: found})


def _step(engine: Engine, batch: SequenceBatch, content: Layer, *, gathered: bool) -> None:
    """Run one step of one token without a model, and take the token back."""
    new = content[0][:, :, :1], content[1][:, :, :1]
    length = batch.length
    batch.first_seen = None if gathered else ()
    for layer in range(len(engine.layout.layers)):
        if gathered:
            batch.append(layer, *new)
        else:
            batch.append_paged(layer, *new)
            batch.attend(layer, new[0], scale=0.1)
    batch.crop(length)


def _refill(batch: SequenceBatch, content: Layer) -> None:
    batch.reset()
    fill(batch, [content])


def _moves(record: Record, engine: Engine) -> dict[str, Callable[[], object]]:
    """Return works that move blocks between the pools, which must be empty, each as a copy of its own like the mover's."""
    stores = engine.stores
    count = min(64, stores.device.usable_slots, stores.slab(Tier.HOST).usable_slots)
    record.put(blocks_moved_at_once=count)

    def move(wire: Wire) -> None:
        tickets = []
        for slot in range(count):
            copy = stores.copy_of(Move(Block(slot), wire, slot, slot))
            tickets.append(engine.transfers.submit([copy]))
            engine.count_copies([copy])
        for ticket in tickets:
            engine.transfers.wait(ticket)

    return {"moves_down": lambda: move(DOWN), "moves_up": lambda: move(UP)}
