"""Every place where tierkv depends on how transformers works inside, each with the version it was checked against.

Checked: transformers 5.24. There ``cache=`` replaced ``past_key_values=``, ``crop`` takes how many tokens to remove
(at most 0), and ``update`` is called as ``update(k, v, layer_idx, kwargs=...)``.
"""

import inspect
import math
from functools import cache as cached
from typing import Any, Final

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.generation.configuration_utils import GenerationMode

from tierkv.errors import UnsupportedModel
from tierkv.layout import BlockLayout, LayerSpec, kv_shape

CACHE_ARGUMENTS: Final = ("cache", "past_key_values", "cache_params")
"""Names under which a model takes its cache; the first wins where several are given (5.24)."""

CROSS_ATTENTION: Final = ("encoder_hidden_states", "encoder_outputs")
"""Arguments with which a decoder attends to an encoder, through cache layers of their own (5.24)."""

NEUTRAL: Final = frozenset(
    {
        *CACHE_ARGUMENTS, "input_ids", "attention_mask", "position_ids", "inputs_embeds", "labels", "logits_to_keep",
        "inputs", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",
        "assistant_model", "streamer", "negative_prompt_ids", "negative_prompt_attention_mask", "custom_generate", "tokenizer",
        "assistant_tokenizer",
    }
)  # fmt: skip
"""Arguments of a forward or of ``generate`` that are looked at, or that cannot change the KV of the prompt (5.24)."""

OWN_CACHE_TYPES: Final = ("cpmant", "deepseek_v4", "diffusion_gemma", "dory", "inkling2_loop", "minimax_m3", "mllama")
"""How the names of model types begin whose attention reads fields of cache layers, adds layers, or feeds more tokens than
it was given (5.24)."""


def text_config(model: PreTrainedModel) -> Any:
    """Return the config of the model's decoder."""
    return model.config.get_text_config(decoder=True)


def block_layout(model: PreTrainedModel, block_size: int) -> tuple[BlockLayout, int]:
    """Return the layout of the layers that can be tiered, and how many cached layers cannot.

    Tiered: plain growing attention and sliding or chunked windows. Left to transformers: recurrent and convolution
    layers, layers that keep an index beside their KV, and layers whose KV other layers read during the same forward
    (what ``update`` returned to them must outlive the scratch).

    Raises:
        UnsupportedModel: an encoder-decoder, a model with cache layers of its own, one split over devices, or one with
            nothing to tier.
    """
    config = text_config(model)
    name = getattr(config, "model_type", type(model).__name__)
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{name} is an encoder-decoder: its cross-attention reads cache tensors directly, which cannot be tiered; "
            f"use a decoder-only model, or call generate without attaching tierkv"
        )
    if not model.can_generate():
        raise UnsupportedModel(
            f"{type(model).__name__} has no generate; attach to the model with a language-model head"
        )
    if getattr(config, "add_cross_attention", False):
        raise UnsupportedModel(
            f"{name} has cross-attention, whose cache tensors are read directly, which cannot be tiered"
        )
    if not set(CACHE_ARGUMENTS) & set(forward_parameters(model)):
        raise UnsupportedModel(f"{name} takes no cache, so there is nothing to tier")
    names = (name, str(model.config.model_type))
    if any(one.startswith(OWN_CACHE_TYPES) for one in names) or not model._supports_default_dynamic_cache():  # noqa: SLF001 - no public way (5.24)
        raise UnsupportedModel(f"{name} keeps its KV in cache layers of its own, which cannot be tiered")
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type != "meta"}
    if len(devices) > 1:
        raise UnsupportedModel(
            f"the model is spread over {', '.join(sorted(map(str, devices)))}; this version tiers a model on one device"
        )
    specs = []
    template = DynamicCache(config=config)
    per_layer = config.per_layer_config
    sharing = getattr(config, "kv_sharing_modes", None) or [None] * len(per_layer)
    for index, layer in enumerate(template.layers):
        # Subclasses keep more than KV.
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or sharing[index]:
            continue
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        specs.append(LayerSpec(index, *_kv_shape(per_layer[index], windowed=window is not None), window))
    if not specs:
        kept = " and ".join(sorted({_kept_by(layer) for layer in template.layers}))
        raise UnsupportedModel(
            f"no layer of {name} keeps a plain growing KV cache (they keep {kept}), so there is nothing to tier; call "
            f"generate without attaching tierkv"
        )
    dtype = str(model.dtype).removeprefix("torch.")
    return BlockLayout(tuple(specs), block_size, dtype), len(template.layers) - len(specs)


def _kv_shape(config: Any, *, windowed: bool) -> tuple[int, int, int]:
    """Return ``(kv_heads, key_dim, value_dim)`` of what one layer really hands to the cache (5.24)."""
    kv_heads, key_dim, value_dim = kv_shape(config)
    if config.model_type == "falcon" and config.new_decoder_architecture:
        kv_heads = config.num_attention_heads  # it repeats its KV heads before it caches them
    if config.model_type == "mimo_v2_flash" and windowed:
        kv_heads *= 2
    return kv_heads, key_dim, value_dim


def _kept_by(layer: Any) -> str:
    """Say what a layer keeps that is not plain KV."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        both = isinstance(layer, DynamicLayer)
        return "recurrent state and KV in one layer" if both else "recurrent or convolution state"
    if isinstance(layer, DynamicIndexedLayer):
        return "an index beside their KV"
    if is_dummy(layer):
        return "nothing"
    return "KV that other layers read" if isinstance(layer, DynamicLayer) else f"a {type(layer).__name__}"


def num_cache_layers(model: PreTrainedModel) -> int:
    """Return how many layers the model's cache has now; early exit lowers it while it drafts (5.24)."""
    return len(DynamicCache(config=text_config(model)).layers)


def vocabulary_size(model: PreTrainedModel) -> int | None:
    """Return how many token ids a model has; None where others than those may stand for images and the like (5.24)."""
    embedding = model.get_input_embeddings()
    if text_config(model) is not model.config or not isinstance(embedding, torch.nn.Embedding):
        return None
    return embedding.num_embeddings


def watched_modules(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the modules whose forward takes the cache and may be called by users: the model, and its decoder."""
    decoder = model.get_decoder()
    return [model] if decoder is model else [model, decoder]


def forward_parameters(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of a module's forward, in order; wrappers that others put on it may hide them."""
    return tuple(inspect.signature(type(module).forward).parameters)[1:]


def is_dummy(layer: Any) -> bool:
    """Whether a cache layer holds nothing."""
    return isinstance(layer, DummyLayer)


def can_crop(layer: Any, length: int, tokens_to_remove: int) -> bool:
    """Whether a native cache layer can forget the last ``-tokens_to_remove`` of ``length`` tokens.

    ``is_croppable`` does not say all (5.24): windowed and convolution layers raise unless they record their past, and
    give wrong states when more is removed than they recorded.
    """
    removed = -tokens_to_remove
    if not removed or is_dummy(layer):
        return True
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        recorded = all(
            state is None or state.shape[-1] >= length or state.shape[-1] - removed >= layer.conv_kernel_size[index]
            for index, state in layer.conv_states.items()
        )
        return layer.is_croppable and layer.record_past and recorded and not isinstance(layer, DynamicLayer)
    if isinstance(layer, DynamicSlidingWindowLayer):
        if layer.keys is None:
            return False
        recorded = layer.record_past or length < layer.sliding_window
        return recorded and layer.keys.shape[-2] - removed >= min(layer.sliding_window - 1, length - removed)
    return bool(layer.is_croppable)


def bound_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of one call of ``generate`` by name.

    Raises:
        TypeError: they do not fit its signature.
    """
    bound = _generate_signature().bind(None, *args, **kwargs).arguments
    named = {name: value for name, value in bound.items() if name not in ("self", "kwargs")}
    return named | bound.get("kwargs", {})


def effective_generation_config(model: PreTrainedModel, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the generation config that ``generate`` will use for these arguments, and what it hands to the model (5.24)."""
    settings = {name: value for name, value in named.items() if name not in _generate_signature().parameters}
    return model._prepare_generation_config(named.get("generation_config"), **settings)  # noqa: SLF001 - no public way (5.24)


def deciding_arguments(named: dict[str, Any]) -> list[str]:
    """Name the arguments besides ids, mask and positions that may change the KV: images, token types and the like.

    Switches and numbers select what is returned; a tensor or an object may change what is computed.
    """

    def says_nothing(value: Any) -> bool:
        if isinstance(value, dict):  # what encoders put out, by kind
            return all(map(says_nothing, value.values()))
        return value is None or isinstance(value, bool | str | int | float)

    return [name for name, value in named.items() if name not in NEUTRAL and not says_nothing(value)]


def drafts_tokens(config: Any, assistant_model: Any) -> bool:
    """Whether candidates are drafted and verified (assisted decoding, prompt lookup, multi-token prediction)."""
    return bool(config.get_generation_mode(assistant_model) == GenerationMode.ASSISTED_GENERATION)


def effective_mask(config: Any, ids: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor | None:
    """Return the padding mask ``[rows, tokens]`` that ``generate`` will use: without one it looks for pad ids (5.24)."""
    if given is not None:
        return given
    pad, ends = config.pad_token_id, config.eos_token_id
    if pad is None or (ends is not None and bool((torch.as_tensor(ends) == torch.as_tensor(pad)).any())):
        return None
    return ids != pad


def max_length(model: PreTrainedModel, config: Any, named: dict[str, Any], prompt_tokens: int) -> int:
    """Return the longest sequence, in tokens, that ``generate`` can produce with these arguments (5.24)."""
    if config.max_new_tokens is not None:
        return prompt_tokens + math.ceil(config.max_new_tokens)
    given = named.get("generation_config")
    asked = [named.get("max_length"), getattr(given, "max_length", None), model.generation_config.max_length]
    total = math.ceil(config.max_length or 0)  # None where the caller says so: transformers has an error for that
    if all(length is None for length in asked):
        total += prompt_tokens  # the library's default counts new tokens
    return max(total, prompt_tokens + 1)


@cached
def _generate_signature() -> inspect.Signature:
    return inspect.signature(GenerationMixin.generate)


LOOKS_AT_IDS: Final = {
    "repetition_penalty": (None, 1.0), "encoder_repetition_penalty": (None, 1.0), "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0), "bad_words_ids": (None,), "sequence_bias": (None,), "min_length": (None, 0),
    "watermarking_config": (None,), "stop_strings": (None,), "forced_bos_token_id": (None,), "guidance_scale": (None, 1.0),
    "exponential_decay_length_penalty": (None,), "begin_suppress_tokens": (None,), "token_healing": (None, False),
}  # fmt: skip
"""Settings whose processors read the ids of the whole sequence, and the values that leave them off (5.24)."""

CALLER_HOOKS: Final = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "custom_generate")
"""Arguments of ``generate`` through which a caller's own code sees the ids (5.24)."""


def looks_at_ids(config: Any, arguments: dict[str, Any]) -> list[str]:
    """Return what in a call of ``generate`` reads the ids of the whole sequence, not only its last token."""
    settings = [name for name, off in LOOKS_AT_IDS.items() if getattr(config, name, None) not in off]
    return settings + [name for name in CALLER_HOOKS if arguments.get(name) is not None]
