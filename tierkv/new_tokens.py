"""New tokens of one layer: are they what the tiers were made for, and on to where they will live."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tierkv.errors import StoreFull, TransferTimeout, UnsafeCall, UnsupportedModel
from tierkv.layout import BlockLayout
from tierkv.moves import Step
from tierkv.tier import Tier, Wire
from tierkv.transfer import Copy
from tierkv.transfer_clocks import WireClock

if TYPE_CHECKING:
    import torch

    from tierkv.stores import Stores


def check_tokens(
    layout: BlockLayout,
    device: "torch.device",
    layer: int,
    rows: int,
    count: int,
    keys: "torch.Tensor",
    values: "torch.Tensor",
) -> None:
    """Raise unless K and V are what the layout promises.

    Args:
        layout: the block layout of the model's tiered layers.
        device: that the tiers belong to.
        layer: position in the layout.
        rows: sequences.
        count: new tokens of each.
        keys: as handed over.
        values: as handed over.

    Raises:
        UnsupportedModel: another shape, dtype or device.
        UnsafeCall: they need gradients.
    """
    spec = layout.layers[layer]
    expected = ((rows, spec.kv_heads, count, spec.key_dim), (rows, spec.kv_heads, count, spec.value_dim))
    got = (tuple(keys.shape), tuple(values.shape))
    if got != expected:
        raise UnsupportedModel(
            f"layer {spec.model_index} hands the cache K {got[0]} and V {got[1]}; its config promises {expected[0]} "
            f"and {expected[1]}, so this model cannot be tiered"
        )
    dtype = str(keys.dtype).removeprefix("torch.")
    if dtype != layout.dtype or values.dtype != keys.dtype:
        raise UnsupportedModel(
            f"layer {spec.model_index} hands the cache {dtype} keys and the pools are {layout.dtype}; "
            f"do not use autocast, and attach again after the model's dtype has changed"
        )
    if keys.device != device:
        raise UnsupportedModel(f"K arrives on {keys.device} and the tiers belong to {device}; use one device")
    if keys.requires_grad or values.requires_grad:
        raise UnsafeCall("a tiered cache has no gradients; run the model under torch.no_grad()")


def write_tokens(
    stores: "Stores",
    layer: int,
    step: Step,
    keys: "torch.Tensor",
    values: "torch.Tensor",
    count_copies: Callable[[Sequence[Copy]], None],
    clock: WireClock | None = None,
) -> list[Copy]:
    """Write the new tokens of a layer to the device and the disk, and return the copies to host memory to run.

    Args:
        stores: of the tiers.
        layer: position in the layout.
        step: says where each token lives.
        keys: ``[rows, kv_heads, tokens, key_dim]``; the copies read it.
        values: ``[rows, kv_heads, tokens, value_dim]``.
        count_copies: told of what moves.
        clock: told how long what goes to the disk took.

    Raises:
        StoreFull: the disk tier took no more.
    """
    num_bytes = stores.layout.token_bytes_of(layer)
    copies, written = [], []
    for row, extents in enumerate(step.writes):
        for extent in extents:
            tokens = extent.stop - extent.start
            at = slice(extent.start - step.start, extent.stop - step.start)
            row_keys, row_values = keys[row, :, at], values[row, :, at]
            if extent.tier is Tier.DEVICE:
                stores.device.write(layer, extent.run, row_keys, row_values, extent.first_token)
                continue
            wire = Wire(Tier.DEVICE, extent.tier)
            if extent.tier is Tier.HOST:
                own = stores.slab(Tier.HOST).views(layer, extent.run, extent.first_token, tokens)
                copies.append(Copy(wire, tokens * num_bytes, list(zip(own, (row_keys, row_values), strict=True))))
                continue
            began = time.perf_counter()
            try:
                stores.disk_store.write(layer, extent.run, row_keys, row_values)
            except TransferTimeout as error:
                raise StoreFull(f"the disk tier takes nothing any more: {error}") from error
            if clock is not None:
                clock.ended(wire, began)
            written.append(Copy(wire, tokens * num_bytes))
    count_copies(copies + written)
    return copies
