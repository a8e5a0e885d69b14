"""Every place where tierkv depends on how transformers works inside, each with the version it was checked against.

Checked: transformers 5.24. There ``cache=`` replaced ``past_key_values=``, ``crop`` takes how many tokens to remove
(at most 0), and ``update`` is called as ``update(k, v, layer_idx, kwargs=...)``.
"""

from typing import Any, Final

from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, get_layer_types_and_kwargs

from tierkv.errors import UnsupportedModel
from tierkv.layout import BlockLayout, LayerSpec, kv_shape

CACHE_ARGUMENTS: Final = ("cache", "past_key_values")
"""Names under which a model takes its cache; the first wins where both are given (5.24)."""

OWN_CACHE_TYPES: Final = {"deepseek_v4", "minimax_m3", "mllama"}
"""Model types whose attention reads fields of cache layers of their own (5.24)."""


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
    if name in OWN_CACHE_TYPES or not model._supports_default_dynamic_cache():  # noqa: SLF001 - no public way (5.24)
        raise UnsupportedModel(f"{name} keeps its KV in cache layers of its own, which cannot be tiered")
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type != "meta"}
    if len(devices) > 1:
        raise UnsupportedModel(
            f"the model is spread over {', '.join(sorted(map(str, devices)))}; this version tiers a model on one device"
        )
    sharing = getattr(config, "kv_sharing_modes", None) or []
    shared_types = getattr(config, "num_kv_shared_layers", 0) or 0
    specs = []
    template = DynamicCache(config=config)
    per_layer = config.per_layer_config
    for index, layer in enumerate(template.layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            continue
        if (index < len(sharing) and sharing[index]) or shared_types:
            continue
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        specs.append(LayerSpec(index, *kv_shape(per_layer[index]), window))
    if not specs:
        raise UnsupportedModel(
            f"no layer of {name} keeps a plain growing KV cache (they are recurrent, indexed or read by other layers), "
            f"so there is nothing to tier; call generate without attaching tierkv"
        )
    dtype = str(model.dtype).removeprefix("torch.")
    return BlockLayout(tuple(specs), block_size, dtype), len(template.layers) - len(specs)


def effective_generation_config(model: PreTrainedModel, generation_config: Any, kwargs: dict[str, Any]) -> Any:
    """Return the generation config that ``generate`` will use, as it computes it itself (5.24)."""
    config, _ = model._prepare_generation_config(generation_config, **kwargs)  # noqa: SLF001 - no public way (5.24)
    return config


def max_length(config: Any, prompt_tokens: int) -> int:
    """Return the longest sequence, in tokens, that ``generate`` can produce under ``config``."""
    if config.max_new_tokens is not None:
        return prompt_tokens + int(config.max_new_tokens)
    if config.max_length is not None:
        return max(int(config.max_length), prompt_tokens + 1)
    return prompt_tokens + 20  # the library's default (5.24)
