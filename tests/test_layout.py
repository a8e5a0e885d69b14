"""Byte counts are exact, and `kv_shape` says what real models hand to their cache."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.errors import UnsupportedModel
from tierkv.layout import DTYPE_BYTES, BlockLayout, LayerGroup, LayerSpec, kv_shape


def layout(*shapes, block_size=32, dtype="float16"):
    layers = tuple(LayerSpec(index, *shape) for index, shape in enumerate(shapes))
    return BlockLayout(layers, block_size, dtype)


@pytest.mark.parametrize(
    ("kv_heads", "token_bytes", "request_bytes"),
    [
        (64, 2_621_440, 10_737_418_240),  # often quoted: 2 x 80 layers x hidden 8192 x 4096 tokens x 2 bytes = 10.7 GB
        (8, 327_680, 1_342_177_280),  # the model as published has 8 KV heads: 1.34 GB
    ],
    ids=["multi-head, as often assumed", "grouped-query, as published"],
)
def test_llama_2_70b_at_4096_tokens(kv_heads, token_bytes, request_bytes):
    llama = layout(*[(kv_heads, 128, 128)] * 80)
    assert llama.token_bytes == token_bytes
    assert llama.token_bytes_of(0) == token_bytes // 80
    assert llama.slice_bytes(79) == 32 * token_bytes // 80
    assert llama.block_bytes == 32 * token_bytes
    assert llama.blocks_for(4096) == 128
    assert llama.blocks_for(4096) * llama.block_bytes == request_bytes


def test_the_usual_formula_is_the_multi_head_case():
    layers, hidden, tokens, num_bytes = 80, 8192, 4096, 2
    assert layout(*[(64, 128, 128)] * 80).token_bytes * tokens == 2 * layers * hidden * tokens * num_bytes
    assert 10 * 2 * layers * hidden * tokens * num_bytes > 80e9  # ten requests do not fit an 80 GB card


def test_latent_attention_keeps_576_numbers_a_token_and_layer():
    deepseek = layout(*[(1, 512, 64)] * 61, dtype="bfloat16")
    assert deepseek.token_bytes == 61 * (512 + 64) * 2 == 70_272


def test_key_and_value_widths_may_differ():
    odd = layout((3, 24, 16), block_size=16, dtype="float32")
    assert odd.layers[0].elements_per_token == 3 * (24 + 16)
    assert odd.slice_bytes(0) == 16 * 3 * 40 * 4
    assert odd.scratch_bytes(2, 10) == 2 * 10 * 3 * 40 * 4


def test_layers_of_one_shape_form_a_group_whatever_their_window_or_order():
    layers = (
        LayerSpec(0, 4, 64, 64, window=512),
        LayerSpec(3, 2, 128, 128),
        LayerSpec(5, 4, 64, 64),
        LayerSpec(6, 4, 64, 32),
        LayerSpec(9, 2, 128, 128, window=16),
    )
    mixed = BlockLayout(layers, 16, "bfloat16")
    assert mixed.groups == (LayerGroup(4, 64, 64, (0, 2)), LayerGroup(2, 128, 128, (1, 4)), LayerGroup(4, 64, 32, (3,)))
    assert mixed.group_of == ((0, 0), (1, 0), (0, 1), (2, 0), (1, 1))
    # One layer of scratch for each group, since their tensors differ in shape.
    assert mixed.scratch_bytes(3, 100) == 2 * 300 * (4 * 128 + 2 * 256 + 4 * 96)


shapes = st.tuples(st.integers(1, 9), st.integers(1, 70), st.integers(1, 70))
layouts = st.builds(
    lambda rows, size, dtype: layout(*rows, block_size=size, dtype=dtype),
    st.lists(shapes, min_size=1, max_size=6),
    st.sampled_from([16, 32, 100, 512]),
    st.sampled_from(sorted(DTYPE_BYTES)),
)


@given(layouts, st.integers(0, 5000))
def test_every_total_is_the_sum_of_its_parts(any_layout, tokens):
    layers = range(len(any_layout.layers))
    numbers = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in any_layout.layers)
    assert any_layout.dtype_bytes == {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[any_layout.dtype]
    assert any_layout.token_bytes == numbers * any_layout.dtype_bytes
    assert any_layout.block_bytes == sum(any_layout.slice_bytes(layer) for layer in layers)
    assert sorted(member for group in any_layout.groups for member in group.members) == list(layers)
    for layer, (group, member) in enumerate(any_layout.group_of):
        spec, shape = any_layout.layers[layer], any_layout.groups[group]
        assert shape.members[member] == layer
        assert (spec.kv_heads, spec.key_dim, spec.value_dim) == (shape.kv_heads, shape.key_dim, shape.value_dim)
    waste = any_layout.blocks_for(tokens) * any_layout.block_size - tokens
    assert 0 <= waste < any_layout.block_size


@pytest.mark.parametrize(
    ("shapes_given", "dtype", "says"),
    [
        ([], "float16", "nothing to tier"),
        ([(1, 8, 8)], "float8_e4m3fn", "float8_e4m3fn cannot be tiered; legal: float32, float16, bfloat16, float64"),
        ([(1, 8, 8)], "int8", "int8 cannot be tiered"),
        ([(1, 8, 8), (0, 8, 8)], "float16", "layer 1 has an impossible KV shape"),
        ([(1, -8, 8)], "float16", "layer 0 has an impossible KV shape"),
        ([(1, 8, 0)], "float16", "layer 0 has an impossible KV shape"),
    ],
)
def test_what_cannot_be_tiered_is_refused_in_one_line(shapes_given, dtype, says):
    with pytest.raises(UnsupportedModel, match=says) as caught:
        layout(*shapes_given, dtype=dtype)
    assert "\n" not in str(caught.value)


def test_equal_layouts_are_equal_so_that_they_can_share_pools():
    assert layout((2, 8, 8)) == layout((2, 8, 8))
    assert layout((2, 8, 8)) != layout((2, 8, 8), block_size=64)
    assert hash(layout((2, 8, 8))) == hash(layout((2, 8, 8)))


# -- kv_shape: configs by attribute ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attributes", "shape"),
    [
        ({"num_attention_heads": 64, "hidden_size": 8192}, (64, 128, 128)),
        ({"num_attention_heads": 64, "hidden_size": 8192, "num_key_value_heads": 8}, (8, 128, 128)),
        (
            {"num_attention_heads": 64, "hidden_size": 8192, "num_key_value_heads": None, "head_dim": None},
            (64, 128, 128),
        ),
        ({"n_head": 12, "n_embd": 768}, (12, 64, 64)),
        ({"num_heads": 8, "d_model": 512}, (8, 64, 64)),
        ({"num_attention_heads": 8, "hidden_size": 1024, "head_dim": 256, "num_key_value_heads": 4}, (4, 256, 256)),
        ({"num_attention_heads": 32, "hidden_size": 4096, "kv_channels": 96}, (32, 96, 96)),
        ({"num_attention_heads": 4, "hidden_size": 32, "v_head_dim": 16}, (4, 8, 16)),
        ({"num_attention_heads": 71, "hidden_size": 4544, "multi_query": True}, (1, 64, 64)),
        ({"num_attention_heads": 8, "hidden_size": 64, "n_head_kv": 2}, (2, 8, 8)),
        ({"num_attention_heads": 128, "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, (1, 512, 64)),
        ({"num_attention_heads": 4, "hidden_size": 32, "kv_lora_rank": None, "qk_rope_head_dim": 64}, (4, 8, 8)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_every_spelling_of_a_config(attributes, shape):
    assert kv_shape(SimpleNamespace(**attributes)) == shape


@pytest.mark.parametrize(
    "attributes", [{}, {"hidden_size": 8}, {"num_attention_heads": 8}, {"hidden_size": 8, "n_head": "4"}]
)
def test_a_config_that_says_too_little_is_named(attributes):
    with pytest.raises(UnsupportedModel, match="the config of mystery names no attention heads or hidden size"):
        kv_shape(SimpleNamespace(model_type="mystery", **attributes))
    with pytest.raises(UnsupportedModel, match="the config of SimpleNamespace names"):
        kv_shape(SimpleNamespace(**attributes))


# -- kv_shape: what real models hand over -----------------------------------------------------------------------------

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
FALCON = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = SMALL | {"num_key_value_heads": 2}
WIDE = GROUPED | {"head_dim": 16}
EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
RECURRENT = {f"linear_{part}": 2 for part in ("num_key_heads", "num_value_heads")} | {
    f"linear_{part}_head_dim": 8 for part in ("key", "value")
}
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, int, int]]] = {
    "multi-head": ("LlamaConfig", SMALL, (4, 8, 8)),
    "Llama": ("LlamaConfig", GROUPED, (2, 8, 8)),
    "Qwen3": ("Qwen3Config", WIDE, (2, 16, 16)),
    "Mistral": ("MistralConfig", GROUPED | {"sliding_window": 8}, (2, 8, 8)),
    "Gemma 3": ("Gemma3TextConfig", WIDE | {"layer_types": ["sliding_attention", "full_attention"]}, (2, 16, 16)),
    "Phi-3": ("Phi3Config", GROUPED | {"pad_token_id": 0}, (2, 8, 8)),
    "GPT-NeoX": ("GPTNeoXConfig", SMALL, (4, 8, 8)),
    "Falcon, multi-query": ("FalconConfig", FALCON | {"multi_query": True}, (1, 8, 8)),
    "Falcon, multi-head": ("FalconConfig", FALCON | {"multi_query": False}, (4, 8, 8)),
    # It repeats its KV heads for every query head before it caches them.
    "Falcon, new decoder": ("FalconConfig", FALCON | {"num_kv_heads": 2, "new_decoder_architecture": True}, (4, 8, 8)),
    "gpt-oss": ("GptOssConfig", WIDE | {"num_local_experts": 2, "num_experts_per_tok": 1}, (2, 16, 16)),
    "DeepSeek-V3": ("DeepseekV3Config", SMALL | EXPERTS | LATENT | ROUTED | {"num_key_value_heads": 4}, (1, 16, 8)),
    "Qwen3-Next": (
        "Qwen3NextConfig",
        WIDE
        | EXPERTS
        | RECURRENT
        | {"num_experts": 2, "shared_expert_intermediate_size": 16}
        | {"layer_types": ["linear_attention", "full_attention"]},
        (2, 16, 16),
    ),
}


SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}


def _config(name):
    transformers = pytest.importorskip("transformers")
    family, settings, shape = MODELS[name]
    return getattr(transformers, family)(**SPECIAL_TOKENS, **settings), shape


@pytest.mark.parametrize("name", MODELS)
def test_shapes_of_real_configs(name):
    config, shape = _config(name)
    assert kv_shape(config) == shape


@pytest.mark.slow
@pytest.mark.parametrize("name", list(MODELS))
def test_real_models_hand_over_these_shapes(name):
    """Guards the table above: it is what a forward of the model itself puts into transformers' cache."""
    config, shape = _config(name)
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import DynamicCache, DynamicLayer

    cache = DynamicCache(config=config)
    with torch.no_grad():
        AutoModelForCausalLM.from_config(config).eval()(torch.tensor([[3, 4, 5]]), cache=cache)
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer) and layer.is_initialized]
    assert layers
    heads, key_dim, value_dim = shape
    for layer in layers:
        assert layer.keys is not None
        assert layer.values is not None
        assert tuple(layer.keys.shape) == (1, heads, 3, key_dim)
        assert tuple(layer.values.shape) == (1, heads, 3, value_dim)
