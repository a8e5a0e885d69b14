"""Configs that hold anything at all: each is read, or refused in one line."""

from hypothesis import given
from hypothesis import strategies as st

from tierkv.architecture_config import read_config
from tierkv.errors import UnsupportedModel

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
KEYS = (
    *LLAMA, "architectures", "attn_config", "attn_layer_indices", "attn_layer_offset", "attn_layer_period", "block_types",
    "expert_layer_period", "first_k_dense_replace", "full_attention_interval", "global_head_dim", "head_dim",
    "hybrid_override_pattern", "index_head_dim", "kv_lora_rank", "layer_types", "linear_num_value_heads", "max_window_layers",
    "mlp_layer_types", "mlp_only_layers", "moe_intermediate_size", "moe_layer_freq", "multi_query", "n_shared_experts",
    "no_rope_layer_interval", "no_rope_layers", "num_experts", "num_experts_per_tok", "num_kv_shared_layers",
    "per_layer_config", "qk_nope_head_dim", "qk_rope_head_dim", "quantization_config", "sliding_window",
    "sliding_window_pattern", "swa_head_dim", "swa_num_key_value_heads", "text_config", "use_sliding_window", "v_head_dim",
)  # fmt: skip
families = st.sampled_from(
    ["llama", "llama4_text", "gemma3_text", "gemma4_text", "qwen2", "qwen3_next", "jamba", "mimo_v2_flash", "minimax",
     "deepseek_v32", "falcon_h1", "longcat_flash", "gpt_oss", "zamba2"]
)  # fmt: skip
plain = (
    st.none() | st.booleans() | st.integers(-3, 9) | st.sampled_from([0, 2**31, 2**70, -1]) | st.floats()
    | st.sampled_from(["", "M*", "sliding_attention", "full_attention", "x" * 99])
)  # fmt: skip
odd = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from([*KEYS, "0", "bits", "quant_method", "config_groups"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(families, st.dictionaries(st.sampled_from(KEYS), odd, max_size=4))
def test_whatever_a_config_holds_it_is_read_or_refused_in_one_line(family, changes):
    values = {**LLAMA, "model_type": family, "num_local_experts": 4, "attention_chunk_size": 64}
    try:
        found = read_config({**values, **changes}, name="x", title="X", source="config.json")
    except UnsupportedModel as error:
        assert "\n" not in str(error)
        assert str(error).startswith("config.json: ")
    else:
        assert found.kv_bytes(100, "bfloat16") > 0
        assert found.weights.total_bytes("bfloat16") >= 0
        assert found.attention_kind
