"""What a config.json is read as, against the cache that transformers makes for the same config."""

import json
from typing import Any

import pytest

from tierkv.architecture_config import read_config

transformers = pytest.importorskip("transformers")

FAMILIES = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "gemma", "gemma2",
    "gemma3_text", "gemma3n_text", "gemma4_text", "phi", "phi3", "gpt2", "gpt_neox", "gptj", "gpt_bigcode",
    "opt", "bloom", "falcon", "mpt", "xglm", "cohere", "cohere2", "starcoder2", "stablelm", "olmo2", "olmo3",
    "granite", "glm4", "smollm3", "ministral", "exaone4", "gpt_oss", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "glm4_moe_lite", "minicpm3", "llama4_text", "jamba", "falcon_h1", "zamba2", "nemotron_h",
    "recurrent_gemma", "lfm2", "minimax", "longcat_flash", "mimo_v2_flash",
)  # fmt: skip
# Configs on the hub are often older than the field `layer_types`.
UNLISTED = (
    "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gpt_oss", "cohere2", "qwen2", "qwen3",
    "llama4_text", "jamba", "falcon_h1", "qwen3_next", "lfm2", "recurrent_gemma", "minimax", "deepseek_v32",
    "exaone4", "olmo3",
)  # fmt: skip


def config_of(family: str, **values: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **values)


def as_file(config: Any) -> dict[str, Any]:
    """Return what its config.json would hold, defaults included."""
    found = json.loads(json.dumps(config.to_dict(), default=str))
    assert isinstance(found, dict)
    return found


def cached(config: Any) -> list[int | None]:
    """Return for every layer of transformers' cache the window, 0 for none, or None where no KV grows."""
    from transformers.cache_utils import (
        DummyLayer,
        DynamicCache,
        DynamicLayer,
        DynamicSlidingWindowLayer,
    )

    def one(layer: Any) -> int | None:
        if isinstance(layer, DynamicSlidingWindowLayer):
            return int(layer.sliding_window)
        return 0 if isinstance(layer, DynamicLayer) and not isinstance(layer, DummyLayer) else None

    return [one(layer) for layer in DynamicCache(config=config).layers]


def read(values: dict[str, Any]) -> list[int | None]:
    layers = read_config(values, name="x", title="x", source="config.json").layers
    return [None if layer.kind in ("shared", "state") else layer.window or 0 for layer in layers]


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_those_of_the_cache(family):
    config = config_of(family)
    assert read(as_file(config)) == cached(config)


@pytest.mark.parametrize("family", UNLISTED)
def test_layers_that_are_not_listed_are_inferred_alike(family):
    config = config_of(family)
    values = as_file(config)
    values.pop("layer_types", None)
    values.pop("layers_block_type", None)
    assert read(values) == cached(config)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_that_begins_at_a_layer(family):
    config = config_of(family, use_sliding_window=True, sliding_window=64, max_window_layers=3, num_hidden_layers=5)
    values = as_file(config)
    assert read(values) == cached(config) == [0, 0, 0, 64, 64]
    del values["layer_types"]
    assert read(values) == [0, 0, 0, 64, 64]
    del values["use_sliding_window"]  # these families have none unless they say so
    assert read(values) == [0] * 5


def test_a_hybrid_of_listed_attention_layers():
    config = config_of("bamba", attn_layer_indices=[1, 3], num_hidden_layers=4)
    assert read(as_file(config)) == cached(config) == [None, 0, None, 0]


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon", "gemma3_text", "deepseek_v3", "qwen3_moe", "gpt_oss"])
def test_bytes_are_those_that_a_model_caches(family):
    import torch

    small = {
        "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1},
        "deepseek_v3": {
            "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "q_lora_rank": 16,
            "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        },
        "gemma3_text": {"head_dim": 16, "num_key_value_heads": 2, "sliding_window": 4},
        "gpt_oss": {"head_dim": 16, "num_key_value_heads": 2, "num_local_experts": 4, "sliding_window": 4},
        "qwen3_moe": {
            "head_dim": 16, "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        },
        "llama": {"num_key_value_heads": 2},
    }  # fmt: skip
    common = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 64,
        "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    values = small.get(family, {})
    if family == "falcon":  # its MLP is four times as wide as its hidden state
        del common["intermediate_size"]
    config = config_of(family, **(values if family == "gpt2" else {**common, **values}))
    with torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        out = model(torch.ones((1, 3), dtype=torch.long), use_cache=True)
    kept = getattr(out, "cache", None) or out.past_key_values
    held = sum(one.keys.nbytes + one.values.nbytes for one in kept.layers)
    architecture = read_config(as_file(config), name="x", title="x", source="config.json")
    assert architecture.kv_bytes(3, "float32") == held
    assert architecture.layout(16, "float32").token_bytes * 3 == held
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert architecture.parameters == pytest.approx(counted, rel=0.08)
