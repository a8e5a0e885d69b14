"""Tiny random models of every family, and configs so small that their blocks lie in all three tiers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import PreTrainedModel

COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _config(family: str) -> Any:
    c: dict[str, Any] = dict(COMMON)
    match family:
        case "llama":
            return tf.LlamaConfig(**c)
        case "qwen3":
            return tf.Qwen3Config(**c, head_dim=16)
        case "mistral":
            return tf.MistralConfig(**c, sliding_window=24)
        case "gemma3":
            types = ["sliding_attention", "full_attention", "sliding_attention"]
            return tf.Gemma3TextConfig(**c, head_dim=16, sliding_window=20, layer_types=types)
        case "phi3":
            return tf.Phi3Config(**c)
        case "gpt_neox":
            del c["num_key_value_heads"]
            return tf.GPTNeoXConfig(**c)
        case "falcon":
            del c["intermediate_size"], c["num_key_value_heads"]
            return tf.FalconConfig(**c, multi_query=True, new_decoder_architecture=False, alibi=False)
        case "gpt_oss":
            types = ["sliding_attention", "full_attention", "sliding_attention"]
            return tf.GptOssConfig(
                **c, head_dim=16, sliding_window=20, layer_types=types, num_local_experts=4, num_experts_per_tok=2
            )
        case "deepseek_v3":
            c["num_key_value_heads"] = 4
            return tf.DeepseekV3Config(
                **c, kv_lora_rank=24, q_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
                n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
                moe_intermediate_size=32, n_shared_experts=1,
            )  # fmt: skip
        case "qwen3_next":
            c["num_hidden_layers"] = 4
            return tf.Qwen3NextConfig(
                **c, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                shared_expert_intermediate_size=32, linear_num_key_heads=2, linear_num_value_heads=4,
                linear_key_head_dim=16, linear_value_head_dim=16,
            )  # fmt: skip
    raise ValueError(family)


FAMILIES = (
    "llama", "qwen3", "mistral", "gemma3", "phi3", "gpt_neox", "falcon", "gpt_oss", "deepseek_v3", "qwen3_next",
)  # fmt: skip


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """Return a function that builds (once) a tiny random model of a family."""
    built: dict[tuple[str, str], PreTrainedModel] = {}

    def build(family: str = "llama", attention: str = "sdpa") -> PreTrainedModel:
        if (family, attention) not in built:
            torch.manual_seed(7)
            config = _config(family)
            implementation = "eager" if family == "gpt_oss" else attention
            model = tf.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
            model.generation_config = tf.GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=None)
            built[family, attention] = model.eval()
        return built[family, attention]

    return build


@pytest.fixture
def three_tiers(tmp_path: Any) -> Callable[..., dict[str, Any]]:
    """Return a function that makes a config whose tiers hold so many blocks of a model, the rest on disk."""
    from tierkv.integrations.hf_compat import block_layout

    def make(
        model: PreTrainedModel, device_blocks: int = 10, host_blocks: int = 5, block_size: int = 16, **sections: Any
    ) -> dict[str, Any]:
        layout, _ = block_layout(model, block_size)
        return {
            "block_size": block_size,
            "device": {"capacity": device_blocks * layout.block_bytes},
            "host": {"capacity": host_blocks * layout.block_bytes},
            "disk": {"path": str(tmp_path / "store"), "capacity": "64MiB"},
            **sections,
        }

    return make
