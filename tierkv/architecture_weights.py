"""How many parameters a model has: counted from the dimensions in its config, by what reads them.

Exact for the families of the built-in table but for norms and small biases; an estimate for others, and said to be one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Final

from tierkv.architecture_layers import Kind, Weights
from tierkv.architecture_text import ImpossibleValue, brief, listed, optional
from tierkv.errors import UnsupportedModel

# Families whose MLP is two matrices; the others have a gate too.
_UNGATED: Final = frozenset(
    {
        "bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "mpt", "nemotron",
        "nemotron_h", "opt", "persimmon", "phi", "starcoder2", "xglm",
    }
)  # fmt: skip
_QKV_BIAS: Final = ("qwen2",)
_POSITION_TABLES: Final = ("gpt2", "gpt_bigcode", "gpt_neo", "opt", "biogpt")
_MOST_BITS: Final = 64
_MXFP4_BITS: Final = 4.25
"""4 bits a number, and an exponent of 8 bits for 32 of them."""


def count_weights(text: SimpleNamespace, kinds: Sequence[Kind], parameters: int | None = None) -> Weights:
    """Return the parameters of a model.

    Args:
        text: the config of its decoder.
        kinds: of its layers.
        parameters: the published number of all, where it is known. What the dimensions do not explain counts as dense.

    Raises:
        UnsupportedModel: the config does not name the sizes.
    """
    values = text.__dict__
    hidden, vocabulary = _size(values, "hidden_size"), _size(values, "vocab_size")
    table = vocabulary * hidden
    tied = bool(values.get("tie_word_embeddings", True))
    count = len(kinds)
    sparse = _sparse_layers(values, count)
    each = _expert(values)
    experts = _experts_of_layer(values) if each else 0
    chosen = min(
        experts, _first(values, "num_experts_per_tok", "moe_topk", "top_k_experts", "num_experts_per_token") or 1
    )
    dense = hidden  # the last norm
    for kind, is_sparse in zip(kinds, sparse, strict=True):
        dense += 2 * hidden + (_state(values) if kind == "state" else _attention(values))
        if is_sparse and experts:
            dense += hidden * experts + _shared_expert(values)
        else:
            dense += _mlp(values)
    routed = sum(sparse) * experts * each
    dense_bits, expert_bits, unknown = _bits(values)
    learned = values.get("model_type") in _POSITION_TABLES
    positions = hidden * (_first(values, "max_position_embeddings") or 0) if learned else 0
    weights = Weights(
        embedding=(0 if tied else table) + positions,
        head=table,
        dense=dense,
        experts=routed,
        active_experts=sum(sparse) * chosen * each,
        experts_of_layer=experts if routed else 0,
        active_of_layer=chosen if routed else 0,
        dense_bits=dense_bits,
        expert_bits=expert_bits,
        unknown_quantization=unknown,
    )
    if parameters is None:
        return weights
    return replace(weights, dense=weights.dense + parameters - weights.total, estimated=False)


def _attention(values: Mapping[str, Any]) -> int:
    hidden, heads = _size(values, "hidden_size"), _size(values, "num_attention_heads")
    if latent := _first(values, "kv_lora_rank"):
        rope, plain = _first(values, "qk_rope_head_dim") or 64, _first(values, "qk_nope_head_dim") or 128
        value = _first(values, "v_head_dim") or 128
        low = _first(values, "q_lora_rank")
        query = hidden * low + low * heads * (plain + rope) + low if low else hidden * heads * (plain + rope)
        key_value = hidden * (latent + rope) + latent + latent * heads * (plain + value)
        return query + key_value + heads * value * hidden
    width = _first(values, "head_dim", "attention_head_dim", "kv_channels") or hidden // heads
    kv_heads = _first(values, "num_key_value_heads", "num_kv_heads", "n_head_kv") or heads
    if values.get("multi_query") and not values.get("new_decoder_architecture"):
        kv_heads = 1
    inner, kept = heads * width, 2 * kv_heads * width
    biased = str(values.get("model_type", "")).startswith(_QKV_BIAS)
    bias = inner + kept if biased or values.get("attention_bias") else 0
    return hidden * (2 * inner + kept) + bias + (hidden if values.get("attention_bias") else 0)


def _state(values: Mapping[str, Any]) -> int:
    """Return the parameters of a layer that keeps a state: linear attention, or about those of Mamba."""
    hidden = _size(values, "hidden_size")
    if heads := _first(values, "linear_num_value_heads"):
        value = heads * (_first(values, "linear_value_head_dim") or 128)
        key = (_first(values, "linear_num_key_heads") or heads) * (_first(values, "linear_key_head_dim") or 128)
        return hidden * (2 * key + 2 * value + 2 * heads) + value * hidden
    return 3 * (_first(values, "mamba_expand", "expand") or 2) * hidden * hidden


def _mlp(values: Mapping[str, Any]) -> int:
    hidden = _size(values, "hidden_size")
    names = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "intermediate_size_mlp")
    inner = values.get("intermediate_size")
    if isinstance(inner, list) and inner:  # one for each layer
        inner = _first({"intermediate_size": inner[0]}, "intermediate_size")
        if inner is None:
            raise ImpossibleValue(f"intermediate_size is {brief(values['intermediate_size'])}; give whole numbers")
    else:
        inner = _first(values, *names) or 4 * hidden
    return _matrices(values) * hidden * inner


def _expert(values: Mapping[str, Any]) -> int:
    """Return the parameters of one expert."""
    hidden = _size(values, "hidden_size")
    inner = _first(values, "moe_intermediate_size", "intermediate_size") or 4 * hidden
    bias = 2 * inner + hidden if values.get("model_type") == "gpt_oss" else 0
    return _matrices(values) * hidden * inner + bias


def _shared_expert(values: Mapping[str, Any]) -> int:
    hidden = _size(values, "hidden_size")
    inner = _first(values, "shared_expert_intermediate_size")
    if inner is None:
        each = _first(values, "moe_intermediate_size", "intermediate_size") or 0
        inner = each * (_first(values, "n_shared_experts", "num_shared_experts") or 0)
    return 3 * hidden * inner


def _experts_of_layer(values: Mapping[str, Any]) -> int:
    found = _first(values, "num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
    return found if found is not None and found > 1 else 0


def _sparse_layers(values: Mapping[str, Any], count: int) -> list[bool]:
    """Return for every layer whether its MLP is made of experts."""
    if not _experts_of_layer(values):
        return [False] * count
    types = values.get("mlp_layer_types")
    if isinstance(types, list) and len(types) >= count:
        return [one == "sparse" for one in types[:count]]
    if (period := _first(values, "expert_layer_period")) is not None:
        offset = _first(values, "expert_layer_offset") or 0
        return [index % period == offset for index in range(count)]
    if (period := _first(values, "interleave_moe_layer_step")) is not None:
        return [(index + 1) % period == 0 for index in range(count)]
    first = _first(values, "first_k_dense_replace") or 0
    every = _first(values, "moe_layer_freq", "decoder_sparse_step") or 1
    dense = listed(values, "mlp_only_layers") or ()
    shift = 1 if "decoder_sparse_step" in values else 0
    return [index >= first and (index + shift) % every == 0 and index not in dense for index in range(count)]


def _bits(values: Mapping[str, Any]) -> tuple[float | None, float | None, str | None]:
    """Return the bits of a dense and of an expert's parameter that is stored quantised, None where they are not.

    The third is the name of a quantisation that is not known, of which no bits are counted, or None.
    """
    found = values.get("quantization_config")
    if not isinstance(found, Mapping) or not found:
        return None, None, None
    method = found.get("quant_method")
    if method == "mxfp4":
        return None, _MXFP4_BITS, None
    if method in ("fp8", "fbgemm_fp8"):
        return 8.0, 8.0, None
    if method == "compressed-tensors":
        total = _compressed(found)
    else:
        bits = found.get("bits") or (4 if found.get("load_in_4bit") else 8 if found.get("load_in_8bit") else None)
        total = _with_scales(bits, found.get("group_size"), zero_point=True)
    return total, total, None if total else brief(method or "unnamed").strip("'")


def _compressed(found: Mapping[str, Any]) -> float | None:
    """Return the bits of the widest group of layers that compressed-tensors names, so that no weight is missed."""
    groups = found.get("config_groups")
    named = (
        [one.get("weights") for one in groups.values() if isinstance(one, Mapping)]
        if isinstance(groups, Mapping)
        else []
    )
    bits = [
        _with_scales(one.get("num_bits"), one.get("group_size"), zero_point=not one.get("symmetric", True))
        for one in named
        if isinstance(one, Mapping)
    ]
    return max((one for one in bits if one is not None), default=None)


def _with_scales(bits: object, group: object, *, zero_point: bool) -> float | None:
    """Return the bits of a number with its share of the scale of 16 bits, and of the zero point, of its group."""
    if not isinstance(bits, int) or isinstance(bits, bool) or not 1 <= bits <= _MOST_BITS:
        return None
    scale = 16 + (bits if zero_point else 0)
    return bits + (scale / group if isinstance(group, int) and group > 0 else 0)


def _matrices(values: Mapping[str, Any]) -> int:
    return 2 if values.get("model_type") in _UNGATED else 3


def _size(values: Mapping[str, Any], name: str) -> int:
    found = _first(values, name)
    if found is None:
        raise UnsupportedModel(f"the config names no {name}, without which its size is unknown; add it")
    return found


def _first(values: Mapping[str, Any], *names: str) -> int | None:
    """Return the first of these that is a whole number above 0."""
    for name in names:
        value = values.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return optional(values, name)
    return None
