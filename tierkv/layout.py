"""BlockLayout: the shape, dtype and exact byte counts of one KV block.

A *block* is ``block_size`` tokens of one sequence through all cached layers; a *slice* is one layer of it. Layers
of equal shape form a *group*: groups have tensors of their own, but a block has the same slot number in all of them.

This module knows neither torch nor any model library: dtypes are names, model configs are read by attribute.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from tierkv.errors import UnsupportedModel

DTYPE_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
"""The KV dtypes that tierkv stores, with their size in bytes."""

SEGMENT_TOKENS: Final = 512
"""Neighbouring slots are grouped into segments of about this many tokens (one contiguous copy of about a MiB)."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The KV shape of one cached layer.

    Attributes:
        model_index: the layer's index in the model (gaps are normal: only cached layers are listed).
        kv_heads: number of key/value heads.
        key_dim: width of one key vector.
        value_dim: width of one value vector (differs from ``key_dim`` for multi-head latent attention).
        window: tokens a query sees, itself included, or None for full attention.
    """

    model_index: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    @property
    def elements_per_token(self) -> int:
        """Numbers kept for one token in this layer, keys and values together."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one shape. ``members`` are positions in ``BlockLayout.layers``."""

    kv_heads: int
    key_dim: int
    value_dim: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class BlockLayout:
    """What one block looks like; two caches with equal layouts can share pools.

    Attributes:
        layers: the cached layers, in model order. Stores address a layer by its position here.
        block_size: tokens in a block.
        dtype: name of the KV dtype, a key of ``DTYPE_BYTES``.
    """

    layers: tuple[LayerSpec, ...]
    block_size: int
    dtype: str

    def __post_init__(self) -> None:
        if not self.layers:
            msg = "no layer of this model keeps a plain growing KV cache, so there is nothing to tier"
            raise UnsupportedModel(msg)
        if self.dtype not in DTYPE_BYTES:
            msg = f"KV dtype {self.dtype} cannot be tiered; legal: {', '.join(DTYPE_BYTES)}"
            raise UnsupportedModel(msg)
        for layer in self.layers:
            if min(layer.kv_heads, layer.key_dim, layer.value_dim) < 1:
                raise UnsupportedModel(f"layer {layer.model_index} has an impossible KV shape: {layer}")

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Layers of equal shape, in order of first appearance."""
        members: dict[tuple[int, int, int], list[int]] = {}
        for position, layer in enumerate(self.layers):
            members.setdefault((layer.kv_heads, layer.key_dim, layer.value_dim), []).append(position)
        return tuple(LayerGroup(*shape, tuple(positions)) for shape, positions in members.items())

    @cached_property
    def group_of(self) -> tuple[tuple[int, int], ...]:
        """For each layer position: (index of its group, index within the group)."""
        places = {
            position: (index, member)
            for index, group in enumerate(self.groups)
            for member, position in enumerate(group.members)
        }
        return tuple(places[position] for position in range(len(self.layers)))

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one number."""
        return DTYPE_BYTES[self.dtype]

    def token_bytes_of(self, layer: int) -> int:
        """Bytes of one token in the layer at position ``layer``."""
        return self.layers[layer].elements_per_token * self.dtype_bytes

    def slice_bytes(self, layer: int) -> int:
        """Bytes of one slice: one block of the layer at position ``layer``."""
        return self.token_bytes_of(layer) * self.block_size

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token in all cached layers."""
        return sum(self.token_bytes_of(position) for position in range(len(self.layers)))

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block: all its slices."""
        return self.token_bytes * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens of one sequence occupy."""
        return -(-num_tokens // self.block_size)

    def scratch_bytes(self, rows: int, num_tokens: int) -> int:
        """Bytes of one gathered layer of ``rows`` sequences of ``num_tokens``, summed over the groups.

        Each group needs a scratch of its own, since their tensors differ in shape.
        """
        per_token = sum(g.kv_heads * (g.key_dim + g.value_dim) for g in self.groups)
        return per_token * self.dtype_bytes * rows * num_tokens


def kv_shape(config: Any) -> tuple[int, int, int]:
    """Return ``(kv_heads, key_dim, value_dim)`` that a decoder with this config hands to its cache.

    Covers multi-head, grouped-query, multi-query (also Falcon's two spellings) and multi-head latent attention,
    where one "head" of ``kv_lora_rank`` numbers is cached as key and ``qk_rope_head_dim`` numbers as value.

    Args:
        config: a transformers text config (of one layer, where layers differ), or anything with its attributes.

    Raises:
        UnsupportedModel: the config does not say enough.
    """

    def first(names: Sequence[str]) -> int | None:
        return next((value for name in names if isinstance(value := getattr(config, name, None), int)), None)

    if (latent := first(["kv_lora_rank"])) is not None and (rope := first(["qk_rope_head_dim"])) is not None:
        return 1, latent, rope
    heads = first(["num_attention_heads", "n_head", "num_heads"])
    hidden = first(["hidden_size", "n_embd", "d_model"])
    if heads is None or hidden is None:
        name = getattr(config, "model_type", type(config).__name__)
        raise UnsupportedModel(f"the config of {name} names no attention heads or hidden size, so KV sizes are unknown")
    head_dim = first(["head_dim", "attention_head_dim", "kv_channels"]) or hidden // heads
    if getattr(config, "new_decoder_architecture", False):
        kv_heads = heads  # Falcon repeats its KV heads for every query head before it caches them
    elif getattr(config, "multi_query", False):
        kv_heads = 1
    else:
        kv_heads = first(["num_key_value_heads", "num_kv_heads", "n_head_kv"]) or heads
    return kv_heads, head_dim, first(["v_head_dim"]) or head_dim
