"""Architecture: what a model's layers keep for each token, and what it takes to run them.

    KvLayer        one layer: does its KV grow, up to which window, and how many numbers is one token
    Weights        parameters, by what reads them: every token, some tokens, or a table that is only looked up
    Architecture   the layers and the weights of one model, with exact byte counts

Pure arithmetic. ``tierkv.architecture`` finds an architecture by name, ``tierkv.architecture_config`` reads one.
"""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Final, Literal

from tierkv.errors import UnsupportedModel
from tierkv.layout import DTYPE_BYTES, BlockLayout, LayerSpec

Kind = Literal["full", "sliding", "chunked", "latent", "shared", "state"]
"""What a layer keeps.

    full      K and V of every token
    sliding   K and V of the last tokens, as many as the window
    chunked   K and V of the tokens of one chunk
    latent    one compressed vector a token for all heads (multi-head latent attention)
    shared    nothing: it reads the KV of another layer
    state     a state of fixed size (linear attention, recurrence, convolution), or nothing at all
"""

GROWING: Final[tuple[Kind, ...]] = ("full", "sliding", "chunked", "latent")
"""Kinds that keep KV of their own."""


@dataclass(frozen=True, slots=True)
class KvLayer:
    """What one layer keeps.

    Attributes:
        kind: see ``Kind``.
        kv_heads: number of key/value heads; 0 for ``state``.
        key_dim: numbers in one key.
        value_dim: numbers in one value.
        window: tokens that a query sees at most, itself included, or None.
        index_dim: numbers a token that an index beside the KV takes (sparse attention).
    """

    kind: Kind
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    index_dim: int = 0

    @property
    def elements_per_token(self) -> int:
        """Numbers that one token comes to, whether this layer keeps them or reads them from another."""
        return self.kv_heads * (self.key_dim + self.value_dim) + self.index_dim

    def tokens_kept(self, tokens: int) -> int:
        """Return of how many tokens the layer keeps KV after ``tokens``."""
        if self.kind not in GROWING:
            return 0
        return tokens if self.window is None else min(tokens, self.window)

    def tokens_read(self, tokens: int) -> int:
        """Return of how many tokens the last of ``tokens`` reads KV."""
        if self.kind == "state" or not tokens:
            return 0
        if self.window is None:
            return tokens
        return (tokens - 1) % self.window + 1 if self.kind == "chunked" else min(tokens, self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How many parameters a model has, by what reads them.

    Attributes:
        embedding: tables that are looked up, not read: input embeddings where they are not also the head, and positions.
        head: from hidden states to the vocabulary: read for every decoded token, once in a prefill.
        dense: read for every token.
        experts: all routed experts of all layers.
        active_experts: those that one token is routed to.
        experts_of_layer: routed experts in one layer, for what a batch reaches; 0 without.
        active_of_layer: experts in one layer that one token is routed to.
        dense_bits: bits of a dense parameter as published, or None where they have the dtype of the KV.
        expert_bits: the same for the experts.
        estimated: whether the counts were made from a config's dimensions alone.
        unknown_quantization: the name of a quantisation whose bits are not known, so that none is counted; else None.
    """

    embedding: int = 0
    head: int = 0
    dense: int = 0
    experts: int = 0
    active_experts: int = 0
    experts_of_layer: int = 0
    active_of_layer: int = 0
    dense_bits: float | None = None
    expert_bits: float | None = None
    estimated: bool = True
    unknown_quantization: str | None = None

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.head + self.dense + self.experts

    @property
    def active(self) -> int:
        """Parameters that one decoded token is multiplied with."""
        return self.head + self.dense + self.active_experts

    @property
    def prefill(self) -> int:
        """Parameters that a token of a prompt is multiplied with: only the last one needs the head."""
        return self.dense + self.active_experts

    def total_bytes(self, dtype: str) -> int:
        """Return the bytes of all weights.

        Args:
            dtype: of what is not quantised, a key of ``DTYPE_BYTES``.
        """
        plain = DTYPE_BYTES[dtype] * 8.0
        bits = (self.embedding + self.head) * plain + self.dense * (self.dense_bits or plain)
        return round((bits + self.experts * (self.expert_bits or plain)) / 8)

    @property
    def missed(self) -> float:
        """Share of the routed experts that one token leaves out; 1 without experts."""
        return 1 - self.active_of_layer / self.experts_of_layer if self.experts_of_layer else 1.0

    def dense_bytes(self, dtype: str) -> float:
        """Return the bytes that every forward reads, whichever experts it reaches."""
        plain = DTYPE_BYTES[dtype] * 8.0
        return (self.head * plain + self.dense * (self.dense_bits or plain)) / 8

    def expert_bytes(self, dtype: str) -> float:
        """Return the bytes of all routed experts."""
        return self.experts * (self.expert_bits or DTYPE_BYTES[dtype] * 8.0) / 8

    def read_bytes(self, dtype: str, rows: int = 1) -> int:
        """Return the bytes of the weights that one decoded token of ``rows`` sequences reads.

        With experts, each row is routed to its own: how many different ones that makes is taken as if all were
        equally likely.
        """
        return round(self.dense_bytes(dtype) + self.expert_bytes(dtype) * (1 - self.missed**rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One model: its layers and its weights.

    Attributes:
        name: what to ask for it by.
        title: what people call it.
        source: where its dimensions come from.
        layers: in the model's order.
        query_heads: attention heads of a layer.
        query_dim: numbers in the query and the key of one head, as they are multiplied.
        output_dim: numbers in the value of one head, as they are multiplied.
        hidden_size: numbers in the hidden state of a token.
        weights: the parameters.
        max_context: tokens that the model was made for, or None where its config does not say.
    """

    name: str
    title: str
    source: str
    layers: tuple[KvLayer, ...]
    query_heads: int
    query_dim: int
    output_dim: int
    hidden_size: int
    weights: Weights
    max_context: int | None = None

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.weights.total

    @property
    def active_parameters(self) -> int:
        """Parameters that one decoded token is multiplied with."""
        return self.weights.active

    @property
    def parameters_estimated(self) -> bool:
        """Whether the numbers of parameters were made from the dimensions alone."""
        return self.weights.estimated

    @property
    def kv_layers(self) -> int:
        """Layers that keep KV of their own."""
        return sum(layer.kind in GROWING for layer in self.layers)

    @property
    def layer_kinds(self) -> dict[str, int]:
        """How many layers there are of each kind."""
        return dict(Counter(layer.kind for layer in self.layers))

    @property
    def attention_kind(self) -> str:
        """The attention's usual name: MHA, GQA, MQA or MLA, with ``sliding``, ``chunked`` and ``hybrid`` where they apply."""
        growing = [layer for layer in self.layers if layer.kind in GROWING]
        heads = {layer.kv_heads for layer in growing}
        kinds = {layer.kind for layer in self.layers}
        if "latent" in kinds:
            name = "MLA"
        elif heads == {self.query_heads}:
            name = "MHA"
        else:
            name = "MQA" if heads == {1} else "GQA"
        words = [kind for kind in ("sliding", "chunked") if kind in kinds] + ["hybrid"] * ("state" in kinds)
        return " + ".join([name, *words])

    def token_bytes(self, dtype: str) -> int:
        """Return the bytes that one token adds while every window still grows."""
        return self.kv_bytes(1, dtype)

    def kv_bytes(self, tokens: int, dtype: str) -> int:
        """Return the bytes of KV that one sequence keeps: windows hold no more than their own tokens.

        Args:
            tokens: of the sequence.
            dtype: a key of ``DTYPE_BYTES``.
        """
        numbers = sum(layer.tokens_kept(tokens) * layer.elements_per_token for layer in self.layers)
        return numbers * _bytes_of(dtype)

    def kv_bytes_read(self, tokens: int, dtype: str) -> int:
        """Return the bytes of KV that attention reads for the last of ``tokens``.

        More than ``kv_bytes`` where layers read what others keep, less where a chunk has just begun.
        """
        numbers = sum(layer.tokens_read(tokens) * layer.elements_per_token for layer in self.layers)
        return numbers * _bytes_of(dtype)

    def assume_mha(self) -> "Architecture":
        """Return a copy that caches a key and a value for every query head, as the multi-head formula has it."""

        def as_mha(layer: KvLayer) -> KvLayer:
            if layer.kind == "state":
                return layer
            kind: Kind = "full" if layer.kind == "latent" else layer.kind
            return KvLayer(kind, self.query_heads, self.query_dim, self.output_dim, layer.window)

        return replace(self, layers=tuple(map(as_mha, self.layers)))

    def layout(self, block_size: int, dtype: str) -> BlockLayout:
        """Return what one block of the layers looks like that keep plain KV of their own.

        tierkv keeps whole blocks: of a layer with a window, too.

        Raises:
            UnsupportedModel: there is no such layer, or the dtype cannot be kept.
        """
        specs = [
            LayerSpec(index, layer.kv_heads, layer.key_dim, layer.value_dim, layer.window)
            for index, layer in enumerate(self.layers)
            if layer.kind in GROWING and not layer.index_dim
        ]
        return BlockLayout(tuple(specs), block_size, dtype)

    def pair_flops(self) -> int:
        """Return the operations of attention between one token and one before it, in the layers without a window."""
        return sum(self._pair() for layer in self.layers if layer.kind != "state" and layer.window is None)

    def window_pair_flops(self) -> dict[tuple[int, bool], int]:
        """Return the same for the layers with a window, by its tokens and whether it is a chunk."""
        found = Counter((layer.window, layer.kind == "chunked") for layer in self.layers if layer.window)
        return {(window, chunked): count * self._pair() for (window, chunked), count in found.items()}

    def _pair(self) -> int:
        return 2 * self.query_heads * (self.query_dim + self.output_dim)


def _bytes_of(dtype: str) -> int:
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModel(f"KV dtype {dtype} cannot be tiered; legal: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]
