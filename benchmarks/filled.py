"""Tiered caches filled with synthetic K and V: a token can be timed at any context, without a prefill.

The past is random K and V of the asked length, the same on every call. So contexts may be longer than a model was made for.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import tierkv
from tierkv.errors import UnsupportedModel
from tierkv.integrations.hf_compat import block_layout
from tierkv.integrations.hf_content import ForwardInputs
from tierkv.layout import BlockLayout

if TYPE_CHECKING:
    from tierkv.storage.spill import SpillStore

Layer = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Filled:
    """An engine and its one cache, which holds so many tokens.

    Attributes:
        engine: of a model object of its own, over shared weights.
        cache: filled.
    """

    engine: Any
    cache: Any

    @property
    def spill(self) -> "SpillStore | None":
        """The disk tier of the cache, if it has one."""
        return cast("SpillStore | None", self.engine.stores.disk)

    def stepper(self, token: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return what runs one forward of one token ``[1, 1]`` and returns its logits."""
        return stepper(self.engine.model, token, self.cache)


def stepper(model: PreTrainedModel, token: torch.Tensor, cache: Any) -> Callable[[], torch.Tensor]:
    """Return what runs one forward of one token ``[1, 1]`` over a cache and returns its logits."""

    def step() -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=token, cache=cache, use_cache=True).logits[0, -1]
        return logits

    return step


def smollm2_shapes(dtype: str) -> PreTrainedModel:
    """Return a random model of SmolLM2-135M's shapes: 30 layers, 9 query heads, 3 KV heads, head_dim 64."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=131072, rope_theta=100000.0, tie_word_embeddings=True,
    )  # fmt: skip
    model: PreTrainedModel = LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()  # type: ignore[arg-type]
    model.generation_config.eos_token_id = None
    return model


def synthetic_kv(model: PreTrainedModel, context: int) -> Iterator[Layer]:
    """Yield random K and V ``[1, kv_heads, context, dim]`` of every tiered layer; the same on every call.

    Raises:
        UnsupportedModel: its KV cannot be tiered.
    """
    generator = torch.Generator().manual_seed(context)
    for layer in layout_of(model).layers:
        shapes = ((1, layer.kv_heads, context, dim) for dim in (layer.key_dim, layer.value_dim))
        keys, values = (torch.randn(shape, generator=generator).to(model.dtype) for shape in shapes)
        yield keys.to(model.device), values.to(model.device)


def layout_of(model: PreTrainedModel) -> BlockLayout:
    """Return the layout of a model's KV.

    Raises:
        UnsupportedModel: not all of it can be tiered, so that synthetic K and V would not be a whole past.
    """
    layout, native = block_layout(model, 32)
    if native:
        raise UnsupportedModel(
            f"{native} layers of this model keep a state of their own besides KV, so no past can be made up for it; give a model "
            f"with attention in every layer"
        )
    return layout


def token_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of K and V of one token, all layers.

    Raises:
        UnsupportedModel: its KV cannot be tiered.
    """
    return layout_of(model).token_bytes


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return another model object over the same weights: attach wraps a model, and others must run unwrapped."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


@contextmanager
def filled(model: PreTrainedModel, context: int, room: int, config: Mapping[str, Any]) -> Iterator[Filled]:
    """Give an engine of ``config`` whose cache holds ``context`` synthetic tokens and has room for ``room`` more.

    Raises:
        TierKVError: it does not fit.
        UnsupportedModel: attention cannot read blocks where they lie.
    """
    with tierkv.attach(twin(model), config) as engine:
        cache = engine.new_cache()
        engine.reserve(cache.sequences, 1, context + room, paged=True)
        if engine.gathered_because:
            raise UnsupportedModel(f"attention cannot read blocks here: {engine.gathered_because}")
        cache.sequences.first_seen = ()
        for layer, (keys, values) in enumerate(synthetic_kv(model, context)):
            cache.sequences.append_paged(layer, keys, values)
            cache.sequences.attended(layer)
        cache.content.append(ForwardInputs(context), 1, context, model.device)
        yield Filled(engine, cache)
        cache.close()
