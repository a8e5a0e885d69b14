"""Small engines for tests, and the cache without any tiers that they are compared with."""

from collections.abc import Sequence
from typing import Literal

import torch

from tierkv.budgets import Budgets
from tierkv.capacity import ScratchPlan
from tierkv.config import AttentionConfig, CacheConfig, PlacementConfig, TransferConfig
from tierkv.engine import Engine
from tierkv.layout import BlockLayout, LayerSpec
from tierkv.sequences import SequenceBatch
from tierkv.storage.base import BlockStore
from tierkv.storage.slab import SlabStore
from tierkv.stores import Stores, bounce_of
from tierkv.tier import Tier
from tierkv.transfer import TransferEngine

Layer = tuple[torch.Tensor, torch.Tensor]
"""K ``[rows, kv_heads, tokens, key_dim]`` and V ``[rows, kv_heads, tokens, value_dim]``."""

LAYOUTS = {
    "plain": [LayerSpec(index, 2, 4, 4) for index in range(4)],
    "two groups": [LayerSpec(0, 2, 4, 4), LayerSpec(1, 1, 6, 2), LayerSpec(2, 2, 4, 4), LayerSpec(3, 2, 4, 4)],
    "sliding": [LayerSpec(0, 1, 4, 4, window=6), LayerSpec(1, 1, 4, 4), LayerSpec(2, 1, 4, 4, window=1)],
    "latent": [LayerSpec(index, 1, 8, 2) for index in range(3)],
}
"""Layers of some kinds of models, as small as they come."""


def small_layout(name: str, dtype: str = "float32", block_size: int = 4) -> BlockLayout:
    """Return one of ``LAYOUTS``."""
    return BlockLayout(tuple(LAYOUTS[name]), block_size, dtype)


def small_engine(
    layout: BlockLayout,
    *,
    device_tokens: int,
    host_tokens: int = 0,
    disk: BlockStore | None = None,
    queue_bytes: int = 0,
    transfers: TransferEngine | None = None,
    layers_ahead: int | Literal["auto"] = 2,
    keep: tuple[int, int] = (1, 1),
    bounce: bool = False,
    cold_read: Literal["auto", "stream", "compute", "promote"] = "auto",
) -> Engine:
    """Return an engine on the CPU.

    Args:
        layout: the block layout.
        device_tokens: tokens, of all layers, in the device tier; scratch is taken from it.
        host_tokens: tokens in the host tier; 0 turns it off.
        disk: the disk tier, where it is on.
        queue_bytes: RAM that the disk's queue takes, on top of the tier that it lies in.
        transfers: the executor; threads unless given.
        layers_ahead: layers to fetch ahead where there is room.
        keep: first and most recent blocks that stay on the device.
        bounce: let device and disk meet in the host pool, as on a machine with a GPU.
        cold_read: how the paged path reads what lies below the device.
    """
    cpu = torch.device("cpu")
    device_bytes, host_bytes = device_tokens * layout.token_bytes, host_tokens * layout.token_bytes
    device = SlabStore(layout, device_bytes, tier=Tier.DEVICE, device=cpu)
    host = SlabStore(layout, host_bytes, tier=Tier.HOST, device=cpu) if host_tokens else None
    config = CacheConfig(
        placement=PlacementConfig(keep_first=keep[0], keep_recent=keep[1]),
        transfer=TransferConfig(layers_ahead=layers_ahead),
        attention=AttentionConfig(cold_read=cold_read),
    )
    lender = Tier.HOST if host else Tier.DEVICE
    budgets = Budgets(
        device=device_bytes + (queue_bytes if lender is Tier.DEVICE else 0),
        host=host_bytes + (queue_bytes if lender is Tier.HOST else 0),
        disk=1 << 40 if disk else 0,
        write_queue=queue_bytes,
        disk_path=None,
    )
    stores = Stores(layout, device, host, disk, queue_bytes, bounce_of(host) if bounce and host else None)
    return Engine(layout, config, budgets, cpu, transfers=transfers, stores=stores)


def divide(engine: Engine, *, device_slots: int, num_buffers: int, buffer_tokens: int) -> None:
    """Give an engine without any blocks exactly so many device slots and scratch buffers."""
    assert engine.manager.resize(Tier.DEVICE, device_slots) is None
    host_slots = engine.manager.pools[Tier.HOST].num_slots
    engine.scratch.divide(ScratchPlan(num_buffers, buffer_tokens, device_slots, host_slots))
    assert engine.stores.device.usable_slots >= device_slots


def random_tokens(layout: BlockLayout, rows: int, count: int, seed: int) -> list[Layer]:
    """Return new K and V of every layer."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, layout.dtype)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return [
        (draw(rows, spec.kv_heads, count, spec.key_dim), draw(rows, spec.kv_heads, count, spec.value_dim))
        for spec in layout.layers
    ]


class PlainCache:
    """One tensor for K and one for V a layer, extended with ``torch.cat``."""

    def __init__(self, layout: BlockLayout, layers: Sequence[Layer] | None = None) -> None:
        """Make a cache; empty, without a number of rows, unless layers are given."""
        self.layout = layout
        self.layers = list(layers or ())

    @property
    def length(self) -> int:
        """Tokens of every row."""
        return self.layers[0][0].shape[2] if self.layers else 0

    @property
    def rows(self) -> int:
        """Sequences."""
        return self.layers[0][0].shape[0] if self.layers else 0

    def seen(self, layer: int, new: Layer) -> Layer:
        """Return what attention reads in a layer when ``new`` tokens come: all of them, or what a window needs."""
        window = self.layout.layers[layer].window
        first = 0 if window is None else max(0, self.length - window + 1)
        if not self.layers:
            return new
        keys, values = (
            torch.cat([old[:, :, first:], more], 2) for old, more in zip(self.layers[layer], new, strict=True)
        )
        return keys, values

    def extend(self, new: Sequence[Layer]) -> None:
        """Keep new tokens of all layers."""
        if not self.layers:
            self.layers = [(keys.clone(), values.clone()) for keys, values in new]
        else:
            self.layers = [
                (torch.cat([keys, more_keys], 2), torch.cat([values, more_values], 2))
                for (keys, values), (more_keys, more_values) in zip(self.layers, new, strict=True)
            ]

    def crop(self, length: int) -> None:
        """Keep the first tokens."""
        self.layers = [(keys[:, :, :length], values[:, :, :length]) for keys, values in self.layers]

    def select(self, indices: Sequence[int]) -> None:
        """Choose rows."""
        rows = torch.tensor(indices, dtype=torch.int64)
        self.layers = [(keys[rows], values[rows]) for keys, values in self.layers]

    def fork(self) -> "PlainCache":
        """Return a second one."""
        return PlainCache(self.layout, self.layers)


def assert_same(got: Layer, wanted: Layer, what: object = "") -> None:
    """Fail unless both are the same bit for bit. NaN, which is the poison of unfinished copies, is never the same."""
    for mine, plain in zip(got, wanted, strict=True):
        assert mine.shape == plain.shape, what
        assert torch.equal(mine, plain), what


def forward(batch: SequenceBatch, plain: PlainCache, new: Sequence[Layer], layers: int | None = None) -> None:
    """Run a forward and compare what every layer returns; ``layers`` fewer than all tear it."""
    count = len(new) if layers is None else layers
    for layer in range(count):
        keys, values = batch.append(layer, *new[layer])
        assert keys.is_contiguous()
        assert values.is_contiguous()
        assert_same((keys, values), plain.seen(layer, new[layer]), f"layer {layer} of {plain.length} tokens")
    if count == len(new):
        plain.extend(new)
