"""What the sections of ``gpu_check`` share: a record that outlives a crash, clocks, a watch over copies, filled engines.

Everything runs on a CPU too, for the rehearsal.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from tierkv.capacity import CHUNK_TOKENS
from tierkv.config import load_config
from tierkv.engine import Engine
from tierkv.geometry import PoolGeometry
from tierkv.layout import BlockLayout, LayerSpec
from tierkv.machine import resolve_budgets
from tierkv.sequences import SequenceBatch

Layer = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Record:
    """The figures of one section, on disk from the moment they are known.

    Attributes:
        path: file that holds them.
        deadline: on the monotonic clock; a section that has more to do by then leaves it out.
        rehearse: sizes are tiny and nothing needs a GPU.
        device: where the section runs.
        figures: what was measured.
    """

    path: Path
    deadline: float
    rehearse: bool
    device: torch.device
    figures: dict[str, Any] = field(default_factory=dict)

    def put(self, **figures: Any) -> None:
        """Add figures and write all of them."""
        self.figures |= figures
        write_json(self.path, self.figures)

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Keep the error of one part, in one line, and go on with the others."""
        print(f"    {name}", file=sys.stderr, flush=True)
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, the other parts are worth having
            traceback.print_exc()
            self.put(errors=[*self.figures.get("errors", []), f"{name}: {one_line(error)}"])


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(fresh, path)  # noqa: PTH105 - Path.replace is no clearer


def one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0][:400]}"


class Timer:
    """Seconds of work: on a GPU between two CUDA events, or of the clock on the wall with the device idle at both ends."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def device_seconds(self, work: Callable[[], object]) -> float:
        """Return what the device took for work on the current stream; gaps in which it waited for the host included."""
        if not self.cuda:
            return self.wall_seconds(work)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.sync()
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def wall_seconds(self, work: Callable[[], object]) -> float:
        self.sync()
        began = time.perf_counter()
        work()
        self.sync()
        return time.perf_counter() - began


def rounds(works: dict[str, Callable[[], float]], repeats: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Let works take turns, so that a machine that slows down slows all; return the seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(warm_up + repeats):
        for name, work in works.items():
            seconds = work()
            if turn >= warm_up:
                times[name].append(seconds)
    return times


class Watch:
    """Measures on the device how long copies took and how long the model's stream waited for them.

    A second opinion on the engine's own ``stall_seconds``. Use as a context manager around steps, and read the figures
    behind it. On a CPU only the waiting is known.
    """

    def __init__(self, engine: Engine) -> None:
        self._transfers: Any = engine.transfers
        self._cuda = engine.device.type == "cuda"
        self._copies: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._host_waits = 0.0

    def __enter__(self) -> Self:
        transfers, order = self._transfers, self._transfers.order

        def timed_order(*args: Any, **kwargs: Any) -> None:
            began = time.perf_counter()
            with self._events(self._waits):
                order(*args, **kwargs)
            self._host_waits += time.perf_counter() - began

        transfers.order = timed_order
        if self._cuda:
            use = transfers._api.use  # noqa: SLF001 - it has no public name, and this is no place to give it one

            @contextmanager
            def timed_use(stream: Any) -> Iterator[None]:
                with use(stream), self._events(self._copies):
                    yield

            transfers._api.use = timed_use  # noqa: SLF001
            self._use = use
        return self

    def __exit__(self, *exc_info: object) -> None:
        del self._transfers.order
        if self._cuda:
            self._transfers._api.use = self._use  # noqa: SLF001
            torch.cuda.synchronize()

    @contextmanager
    def _events(self, pairs: "list[tuple[torch.cuda.Event, torch.cuda.Event]]") -> Iterator[None]:
        if not self._cuda:
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        pairs.append((begin, end))

    def figures(self, steps: int) -> dict[str, float]:
        """Return seconds of copies and waits per step, and the share of the copies that computing hid."""
        found = {"host_wait_for_copies_seconds_per_step": self._host_waits / steps}
        if self._cuda:
            copies, waits = (
                sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3 for pairs in (self._copies, self._waits)
            )
            found |= {
                "device_stall_seconds_per_step": waits / steps,
                "copies_busy_seconds_per_step": copies / steps,
                "copy_groups_per_step": len(self._copies) / steps,
            }
            if copies:
                found["overlap_ratio"] = 1 - waits / copies
        return found


def capacities(layout: BlockLayout, rows: int, tokens: int, device_share: float, cold_read: str) -> dict[str, int]:
    """Return bytes for the device and host tiers so that about this share of ``tokens`` tokens lies on the device.

    Args:
        layout: of the blocks.
        rows: sequences.
        tokens: of each.
        device_share: 1 turns the host tier off.
        cold_read: how the others are read, which decides the scratch that the device lends: ``gathered`` takes a layer.
    """
    blocks = rows * layout.blocks_for(tokens)
    if device_share >= 1:
        return {"device": _pool_bytes(layout, blocks + 2 * rows, 0), "host": 0}
    wanted = max(8 * rows, round(blocks * device_share))
    chunk, members = min(CHUNK_TOKENS, blocks * layout.block_size), min(len(group.members) for group in layout.groups)
    while 3 * chunk > wanted * layout.block_size * members:  # scratch gets at most half, as in ``Capacity``
        chunk //= 2
    scratch = {"gathered": blocks * layout.block_size, "compute": 0}.get(cold_read, 3 * chunk)
    return {
        "device": _pool_bytes(layout, wanted, scratch),
        "host": _pool_bytes(layout, blocks - wanted + 2 * rows, 0),
    }


def _pool_bytes(layout: BlockLayout, blocks: int, scratch_tokens: int) -> int:
    """Return a size of a pool that holds so many blocks and lends so many tokens of one layer."""
    size = blocks * layout.block_bytes + layout.scratch_bytes(1, scratch_tokens)
    while PoolGeometry(layout, size).num_slots(scratch_tokens) < blocks:
        size += layout.block_bytes
    return size


@contextmanager
def filled(
    layout: BlockLayout,
    device: torch.device,
    contents: Sequence[Layer],
    *,
    device_share: float = 1.0,
    cold_read: str = "stream",
    room: int = 64,
    gathered: bool = False,
) -> Iterator[tuple[Engine, SequenceBatch]]:
    """Open an engine without a model, and a batch in it whose layers hold ``contents``, in turn.

    Args:
        layout: of the blocks.
        device: of the engine.
        contents: K and V ``[rows, kv_heads, tokens, dim]``.
        device_share: of the tokens, about.
        cold_read: how the others are read.
        room: tokens that may follow.
        gathered: leave room to gather whole layers.
    """
    rows, tokens = contents[0][0].shape[0], contents[0][0].shape[2] + room
    sizes = capacities(layout, rows, tokens, device_share, "gathered" if gathered else cold_read)
    config = load_config(
        {
            "block_size": layout.block_size,
            "device": {"capacity": sizes["device"]},
            "host": {"capacity": sizes["host"]},
            "disk": {"capacity": 0},
            "attention": {"cold_read": cold_read},
        }
    )
    with Engine(layout, config, resolve_budgets(config, device), device, gathered_because="") as engine:
        batch = engine.open()
        engine.reserve(batch, rows, tokens, paged=not gathered)
        fill(batch, contents)
        yield engine, batch
        if batch.step is not None:
            batch.rollback()
        batch.release()


def fill(batch: SequenceBatch, contents: Sequence[Layer]) -> None:
    """Append to every layer, as one prefill would."""
    batch.first_seen = ()
    for layer in range(len(batch.engine.layout.layers)):
        batch.append_paged(layer, *contents[layer % len(contents)])
        batch.attended(layer)


def plain_layout(layers: int, kv_heads: int, dim: int, dtype: str, window: int | None = None) -> BlockLayout:
    return BlockLayout(tuple(LayerSpec(layer, kv_heads, dim, dim, window) for layer in range(layers)), 32, dtype)
