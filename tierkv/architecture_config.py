"""What a ``config.json`` says about a model's KV: the kind and the shape of every layer.

The rules are those by which transformers (5.24) makes its cache for the same file, written down here so that neither it
nor torch has to be there. The built-in table goes through the same code, so a name and a file never disagree.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Final

from tierkv.architecture_layers import GROWING, Architecture, Kind, KvLayer, Weights
from tierkv.architecture_text import (
    LARGEST,
    MOST_LAYERS,
    ImpossibleValue,
    brief,
    language_model,
    listed,
    named,
    optional,
    whole,
)
from tierkv.architecture_weights import count_weights
from tierkv.errors import UnsupportedModel
from tierkv.layout import kv_shape

# Families whose files may leave out which layers have a window: every n-th layer has none.
_PATTERNS: Final = {
    "gemma2": 2,
    "gpt_oss": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gemma4_text": 6,
    "cohere2": 4,
    "olmo3": 4,
}
_UNLESS_TOLD: Final = ("qwen2", "qwen3")
"""Families that have a window only where ``use_sliding_window`` says so."""

_KINDS: Final[Mapping[str, Kind]] = {
    "full_attention": "full", "attention": "full", "hybrid": "full", "global": "full", "global_attention": "full",
    "sliding_attention": "sliding", "hybrid_sliding": "sliding", "local": "sliding", "local_attention": "sliding",
    "chunked_attention": "chunked",
    "indexed_attention": "full", "deepseek_sparse_attention": "full",
    "linear_attention": "state", "mamba": "state", "mamba2": "state", "recurrent": "state", "conv": "state", "moe": "state",
    "mlp": "state",
}  # fmt: skip
_INDEXED: Final = ("indexed_attention", "deepseek_sparse_attention")
_LETTERS: Final = {
    "M": "mamba",
    "*": "attention",
    "-": "mlp",
    "E": "moe",
    "L": "sliding_attention",
    "G": "full_attention",
}


def read_config(
    config: Mapping[str, Any], *, name: str, title: str, source: str, parameters: int | None = None
) -> Architecture:
    """Return the architecture that a config describes.

    Args:
        config: what a ``config.json`` holds.
        name: what to call it.
        title: what people call it.
        source: where the config comes from; messages begin with it.
        parameters: their published number, or None to count them from the dimensions.

    Raises:
        UnsupportedModel: it has no KV cache, or does not say enough.
    """
    try:
        text = language_model(config)
        kinds = _layer_types(text)
        layers = tuple(_layer(text, index, kind, len(kinds)) for index, kind in enumerate(kinds))
        counted = count_weights(text, [layer.kind for layer in layers], parameters)
        return _assemble(text, layers, counted, name=name, title=title, source=source)
    except UnsupportedModel as error:
        raise type(error)(f"{source}: {error}") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        # Whatever else a file may hold in the place of a number or a list: it is the file that is wrong.
        reason = brief(" ".join(str(error).split()))
        raise ImpossibleValue(
            f"{source}: a value in it is not of the kind that a config has there ({reason}); give a model's config.json"
        ) from None


def _assemble(
    text: SimpleNamespace, layers: tuple[KvLayer, ...], counted: Weights, *, name: str, title: str, source: str
) -> Architecture:
    if not any(layer.kind in GROWING for layer in layers):
        raise UnsupportedModel(f"{_no_cache(text)}: no layer keeps KV; give a model with attention layers")
    _, key_dim, value_dim = kv_shape(text)
    if optional(text.__dict__, "kv_lora_rank"):
        key_dim = whole(text, "qk_nope_head_dim", 128) + whole(text, "qk_rope_head_dim")
        value_dim = whole(text, "v_head_dim", 128)
    most = getattr(text, "max_position_embeddings", None)
    return Architecture(
        name=name,
        title=title,
        source=source,
        layers=layers,
        query_heads=whole(text, "num_attention_heads"),
        query_dim=key_dim,
        output_dim=value_dim,
        hidden_size=whole(text, "hidden_size"),
        weights=counted,
        max_context=most if isinstance(most, int) and most > 0 else None,
    )


def _layer_types(text: SimpleNamespace) -> list[str]:
    """Return the type of every layer, in transformers' words."""
    pattern = getattr(text, "hybrid_override_pattern", None)
    if isinstance(pattern, str) and not getattr(text, "layer_types", None):
        if len(pattern) > MOST_LAYERS:
            raise ImpossibleValue(f"{len(pattern):,} layers are more than any model has; the most is {MOST_LAYERS:,}")
        return [_LETTERS.get(letter, letter) for letter in pattern]
    given = getattr(text, "layer_types", None)
    if isinstance(given, list):
        given = listed(text.__dict__, "layer_types")
    if isinstance(given, list) and getattr(text, "num_hidden_layers", None) is None:
        return [str(one) for one in given]
    count = whole(text, "num_hidden_layers")
    if getattr(text, "model_type", None) == "longcat_flash" and hasattr(text, "num_layers"):
        count *= 2  # each of its layers attends twice
    if count > MOST_LAYERS:
        raise ImpossibleValue(f"{count:,} layers are more than any model has; the most is {MOST_LAYERS:,}")
    if given is None and (cycle := listed(text.__dict__, "block_types")):
        given = [{"attention": "sliding_attention"}.get(one, one) for one in (cycle * count)[:count]]
    if given is None:
        return _inferred(text, count)
    if not isinstance(given, list) or len(given) < count:
        said = len(given) if isinstance(given, list) else brief(given)
        raise UnsupportedModel(f"layer_types must name the type of each of its {count} layers, not {said}")
    return [str(one) for one in given[:count]]


def _inferred(text: SimpleNamespace, count: int) -> list[str]:
    """Return the types of layers that a config does not list."""
    get, kind = text.__dict__.get, str(getattr(text, "model_type", ""))
    layers = range(count)
    if kind == "falcon_h1":
        return ["hybrid"] * count
    if kind == "minimax":
        return ["linear_attention" if index % 2 else "full_attention" for index in layers]
    if (period := optional(text.__dict__, "attn_layer_period", least=1)) is not None:
        offset = optional(text.__dict__, "attn_layer_offset") or 0
        return ["full_attention" if index % period == offset else "mamba" for index in layers]
    chosen = get("attn_layer_indices", get("full_attn_idxs"))
    if isinstance(chosen, list):
        return ["full_attention" if index in chosen else "linear_attention" for index in layers]
    if (every := optional(text.__dict__, "full_attention_interval")) or kind in (
        "qwen3_next",
        "qwen3_5_text",
        "qwen3_5_moe_text",
    ):
        return ["linear_attention" if (index + 1) % (every or 4) else "full_attention" for index in layers]
    if kind == "llama4_text":
        step = optional(text.__dict__, "no_rope_layer_interval") or 4
        rope = listed(text.__dict__, "no_rope_layers") or [int((index + 1) % step != 0) for index in layers]
        return ["chunked_attention" if one else "full_attention" for one in rope[:count]]
    if kind in ("deepseek_v32", "glm_moe_dsa"):
        return ["indexed_attention"] * count
    if _window(text) is None:
        return ["chunked_attention" if get("attention_chunk_size") else "full_attention"] * count
    if isinstance(pattern := get("sliding_window_pattern", get("_sliding_window_pattern")), str) and pattern:
        return [_LETTERS.get(pattern[index % len(pattern)], "full_attention") for index in layers]
    if every := pattern if isinstance(pattern, int) else _PATTERNS.get(kind):
        return ["sliding_attention" if (index + 1) % every else "full_attention" for index in layers]
    # Only below this layer is there no window, where a config has such a bound.
    first = 0
    if get("use_sliding_window"):
        first = optional(text.__dict__, "max_window_layers") or 0
        if "max_window_layers" not in text.__dict__ and kind.startswith(_UNLESS_TOLD):
            first = 28
    return ["sliding_attention" if index >= first else "full_attention" for index in layers]


def _window(text: SimpleNamespace) -> int | None:
    kind = str(getattr(text, "model_type", ""))
    if not getattr(text, "use_sliding_window", not kind.startswith(_UNLESS_TOLD)):
        return None
    window = getattr(text, "sliding_window", None)
    return window if isinstance(window, int) and window > 0 else None


def _layer(text: SimpleNamespace, index: int, kind_name: str, count: int) -> KvLayer:
    """Return what one layer keeps."""
    if kind_name not in _KINDS:
        raise UnsupportedModel(
            f"layer {index} is of the type {brief(kind_name)}, whose KV is not known; known: {', '.join(_KINDS)}"
        )
    kind = _KINDS[kind_name]
    if kind == "state":
        return KvLayer("state")
    window = None
    if kind == "sliding":
        window = _window(text) or whole(text, "sliding_window")
    elif kind == "chunked":
        window = whole(text, "attention_chunk_size")
    kv_heads, key_dim, value_dim = _shape(text, index, kind)
    if min(kv_heads, key_dim, value_dim) < 1:
        raise UnsupportedModel(
            f"layer {index} has an impossible KV shape: {kv_heads} heads of {key_dim} and {value_dim}"
        )
    if max(kv_heads, key_dim, value_dim) > LARGEST:
        raise ImpossibleValue(f"layer {index} has a KV shape larger than any model's; the most is {LARGEST:,}")
    if optional(text.__dict__, "kv_lora_rank") and kind == "full":
        kind = "latent"
    shared = optional(text.__dict__, "num_kv_shared_layers") or 0
    if index >= count - shared:
        kind = "shared"
    index_dim = whole(text, "index_head_dim", 128) if kind_name in _INDEXED else 0
    return KvLayer(kind, kv_heads, key_dim, value_dim, window, index_dim)


def _shape(text: SimpleNamespace, index: int, kind: Kind) -> tuple[int, int, int]:
    """Return ``(kv_heads, key_dim, value_dim)`` of one layer, where layers may differ."""
    values = dict(text.__dict__)
    for name in ("num_attention_heads", "hidden_size"):
        optional(values, name, least=1)
    own = values.get("per_layer_config")
    if isinstance(own, Mapping):
        of_layer = own.get(str(index)) or own.get(index) or {}
        if not isinstance(of_layer, Mapping):
            raise ImpossibleValue(f"per_layer_config of layer {index} is {brief(of_layer)}; it must be a table")
        values.update({str(key): value for key, value in of_layer.items()})
    elif str(values.get("model_type", "")).startswith("gemma4") and kind == "full":
        values["head_dim"] = values.get("global_head_dim") or 512
        if values.get("attention_k_eq_v") and values.get("num_global_key_value_heads"):
            values["num_key_value_heads"] = values["num_global_key_value_heads"]
    kv_heads, key_dim, value_dim = kv_shape(SimpleNamespace(**values))
    if kind == "sliding" and (own_heads := optional(values, "swa_num_key_value_heads")):
        width = optional(values, "swa_head_dim")
        kv_heads, key_dim = own_heads, width or key_dim
        value_dim = optional(values, "swa_v_head_dim") or width or value_dim
    elif kind == "sliding" and values.get("model_type") == "mimo_v2_flash":
        kv_heads *= 2
    return kv_heads, key_dim, value_dim


def _no_cache(text: SimpleNamespace) -> str:
    return f"{named(text.__dict__)} has no KV cache that grows"
