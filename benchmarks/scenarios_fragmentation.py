"""Whether a sequence can be placed after others have come and gone: in one piece, in blocks, and with a tier below.

The founding script: A, B and C stand side by side with some room behind them; A ends; D comes. Each variant asks another D or
another amount of room. The contiguous answer is a first-fit allocator's; the other two are an engine's, whose pool is exactly
as large, with real sequences of made-up K and V that are read back and compared.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from tierkv.budgets import Budgets
from tierkv.config import CacheConfig, PrefixConfig
from tierkv.engine import Engine
from tierkv.errors import CapacityError
from tierkv.layout import BlockLayout
from tierkv.sequences import SequenceBatch
from tierkv.tier import Tier

Layer = tuple[torch.Tensor, torch.Tensor]

LENGTHS: Final = {"A": 4096, "B": 2048, "C": 4096}
"""Tokens of the sequences that are there first."""
CHUNK: Final = 512
"""Tokens that are appended at a time."""


@dataclass(frozen=True)
class Variant:
    """One script: room behind C, and the length of D, in tokens."""

    room: int
    wanted: int


VARIANTS: Final = {
    "enough_is_free": Variant(4096, 8192),
    "too_little_is_free": Variant(2048, 8192),
    "all_that_is_free": Variant(2048, 6144),
}
"""In the second, the essay's own, only memory below the device helps."""


class FirstFit:
    """Places requests in one piece each, at the lowest offset where they fit; neighbouring holes become one."""

    def __init__(self, size: int) -> None:
        """Begin with one hole of ``size`` tokens."""
        self._holes = [(0, size)]
        self._placed: dict[str, tuple[int, int]] = {}

    @property
    def free(self) -> int:
        """Tokens of all holes together."""
        return sum(size for _, size in self._holes)

    @property
    def largest_run(self) -> int:
        """Tokens of the largest hole."""
        return max((size for _, size in self._holes), default=0)

    def place(self, name: str, size: int) -> int | None:
        """Return the offset at which a request now lies, or None where no hole is large enough.

        Raises:
            ValueError: it lies somewhere already, or it asks for nothing.
        """
        if name in self._placed or size < 1:
            raise ValueError(f"{name} has a place already, or asks for nothing")
        for index, (offset, hole) in enumerate(self._holes):
            if hole >= size:
                self._holes[index : index + 1] = [(offset + size, hole - size)] if hole > size else []
                self._placed[name] = (offset, size)
                return offset
        return None

    def release(self, name: str) -> None:
        """Make a hole of a request's place.

        Raises:
            KeyError: it has none.
        """
        insort(self._holes, self._placed.pop(name))
        merged: list[tuple[int, int]] = []
        for offset, size in self._holes:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._holes = merged


def run(layout: BlockLayout, factor: float = 1.0) -> dict[str, Any]:
    """Run all variants; return what a record says of them.

    Args:
        layout: of the model's KV; only its first layer is filled, as all layers of a block lie alike.
        factor: of all lengths; they are rounded to whole blocks.
    """
    one_layer = BlockLayout(layout.layers[:1], layout.block_size, layout.dtype)
    return {
        "fill": "synthetic: random K and V of one layer",
        "block_size": layout.block_size,
        "variants": {name: _variant(one_layer, variant, factor) for name, variant in VARIANTS.items()},
    }


def needed_bytes(layout: BlockLayout, factor: float = 1.0) -> int:
    """Return the most bytes that ``run`` takes at a time: two pools, and what their contents are compared with."""
    longest = max(sum(LENGTHS.values()) + one.room + 2 * one.wanted for one in VARIANTS.values())
    return int(2 * factor * longest * layout.token_bytes_of(0))


def _variant(layout: BlockLayout, variant: Variant, factor: float) -> dict[str, Any]:
    def scaled(tokens: int) -> int:
        return max(1, round(tokens * factor / layout.block_size)) * layout.block_size

    lengths = {name: scaled(tokens) for name, tokens in LENGTHS.items()}
    room, wanted = scaled(variant.room), scaled(variant.wanted)
    whole = sum(lengths.values()) + room
    rows = FirstFit(whole)
    for name, tokens in lengths.items():
        assert rows.place(name, tokens) is not None
    rows.release("A")
    found: dict[str, Any] = {
        "tokens": {**lengths, "free": room, "D": wanted},
        "free_tokens": rows.free,
        "largest_run_tokens": rows.largest_run,
    }
    placed = {"contiguous": rows.place("D", wanted) is not None}
    paged = _in_blocks(layout, whole, 0, lengths, wanted)
    tiered = _in_blocks(layout, whole, wanted, lengths, wanted)
    placed |= {"paged": paged["placed"], "tiered": tiered["placed"]}
    return {**found, "placed": placed, "paged": paged, "tiered": tiered}


def _in_blocks(layout: BlockLayout, device: int, host: int, lengths: dict[str, int], wanted: int) -> dict[str, Any]:
    """Run the script on an engine with room for so many tokens on the device and in host memory."""
    cpu = torch.device("cpu")
    budgets = Budgets(
        device=device * layout.token_bytes, host=host * layout.token_bytes, disk=0, write_queue=0, disk_path=None
    )
    config = CacheConfig(prefix=PrefixConfig(share=False))
    with Engine(layout, config, budgets, cpu, gathered_because="") as engine:
        rows: dict[str, SequenceBatch] = {}
        kept: dict[str, Layer] = {}
        for seed, (name, tokens) in enumerate(lengths.items()):
            rows[name], kept[name] = _fill(engine, tokens, seed)
        rows.pop("A").release()
        free = engine.manager.pools[Tier.DEVICE].free * layout.block_size
        try:
            rows["D"], kept["D"] = _fill(engine, wanted, len(lengths))
        except CapacityError as error:
            return {"placed": False, "free_tokens": free, "refused": str(error)}
        slots = [block.slots.get(Tier.DEVICE) for block in rows["D"].tables[0].blocks]
        return {
            "placed": True,
            "free_tokens": free,
            "runs": _runs([slot for slot in slots if slot is not None]),
            "on_device_tokens": sum(slot is not None for slot in slots) * layout.block_size,
            "intact": all(_same(batch.read(0), kept[name]) for name, batch in rows.items()),
        }


def _fill(engine: Engine, tokens: int, seed: int) -> tuple[SequenceBatch, Layer]:
    """Make a sequence of so many tokens, some at a time; return it and what it should hold.

    Raises:
        CapacityError: there is no room for it, and it has left what it took.
    """
    spec, dtype = engine.layout.layers[0], getattr(torch, engine.layout.dtype)
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn((1, spec.kv_heads, tokens, spec.key_dim), generator=generator).to(dtype)
    values = torch.randn((1, spec.kv_heads, tokens, spec.value_dim), generator=generator).to(dtype)
    batch = engine.open()
    batch.first_seen = ()
    try:
        engine.reserve(batch, 1, tokens, paged=True)
        for start in range(0, tokens, CHUNK):
            part = slice(start, start + CHUNK)
            batch.append_paged(0, keys[:, :, part], values[:, :, part])
            batch.attended(0)
    except BaseException:
        batch.release()
        raise
    engine.end_call(batch)
    return batch, (keys, values)


def _same(found: Layer, wanted: Layer) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def _runs(slots: Sequence[int]) -> int:
    """Return in how many physical pieces blocks lie, in their order."""
    return sum(slot != before + 1 for before, slot in zip([-2, *slots], slots, strict=False))
