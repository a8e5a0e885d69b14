"""Tiny random models of every family, configs whose tiers are too small for one sequence, and stock runs to compare with."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import PreTrainedModel

import tierkv

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
SMALL_GPT = {"vocab_size": 97, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 4096}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_shared_experts": 1,
}  # fmt: skip
SHARED = {
    "num_hidden_layers": 6, "head_dim": 16, "sliding_window": 20, "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3, "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
}  # fmt: skip


def _common(*left_out: str, **more: Any) -> dict[str, Any]:
    return {name: value for name, value in COMMON.items() if name not in left_out} | more


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**COMMON),
    "qwen3": lambda: tf.Qwen3Config(**COMMON, head_dim=16),
    "mistral": lambda: tf.MistralConfig(**COMMON, sliding_window=24),
    "gemma3": lambda: tf.Gemma3TextConfig(**COMMON, head_dim=16, sliding_window=20, layer_types=MIXED),
    "phi3": lambda: tf.Phi3Config(**COMMON),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**_common("num_key_value_heads")),
    "falcon": lambda: tf.FalconConfig(
        **_common("intermediate_size", "num_key_value_heads"), multi_query=True, new_decoder_architecture=False, alibi=False
    ),
    "gpt_oss": lambda: tf.GptOssConfig(**COMMON, head_dim=16, sliding_window=20, layer_types=MIXED, **EXPERTS),
    "deepseek_v3": lambda: tf.DeepseekV3Config(**_common(**LATENT)),
    "qwen3_next": lambda: tf.Qwen3NextConfig(
        **_common(num_hidden_layers=4), head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
    # Further ones, for what is peculiar about them.
    "falcon_new": lambda: tf.FalconConfig(
        **_common("intermediate_size", "num_key_value_heads"), num_kv_heads=2, new_decoder_architecture=True, alibi=False
    ),
    "gemma2": lambda: tf.Gemma2Config(**COMMON, head_dim=16, sliding_window=20, layer_types=MIXED, query_pre_attn_scalar=16),
    "mixtral": lambda: tf.MixtralConfig(**COMMON, num_local_experts=4),
    "qwen2_sliding": lambda: tf.Qwen2Config(**COMMON, use_sliding_window=True, sliding_window=20, max_window_layers=1),
    # Plain ones, whose attention reads blocks too.
    "cohere": lambda: tf.CohereConfig(**COMMON),
    "gemma": lambda: tf.GemmaConfig(**COMMON, head_dim=16),
    "glm4": lambda: tf.Glm4Config(**COMMON, head_dim=16),
    "granite": lambda: tf.GraniteConfig(**COMMON),
    "olmo2": lambda: tf.Olmo2Config(**COMMON),
    "phi": lambda: tf.PhiConfig(**COMMON),
    "qwen2": lambda: tf.Qwen2Config(**COMMON),
    "qwen2_moe": lambda: tf.Qwen2MoeConfig(
        **COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
    ),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(
        **COMMON, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "smollm3": lambda: tf.SmolLM3Config(**COMMON),
    "starcoder2": lambda: tf.Starcoder2Config(**COMMON),
    "llama4": lambda: tf.Llama4TextConfig(
        **COMMON, head_dim=16, attention_chunk_size=32, num_local_experts=2, num_experts_per_tok=1, intermediate_size_mlp=96,
        layer_types=["chunked_attention", "full_attention", "chunked_attention"], no_rope_layers=[1, 0, 1],
    ),
    "bloom": lambda: tf.BloomConfig(vocab_size=97, hidden_size=64, n_layer=3, n_head=4),
    "gpt2": lambda: tf.GPT2Config(**SMALL_GPT),
    "cohere2": lambda: tf.Cohere2Config(**COMMON, sliding_window=20, layer_types=MIXED),
    "gemma3n": lambda: tf.Gemma3nTextConfig(
        **_common(**SHARED), altup_num_inputs=2, laurel_rank=8, activation_sparsity_pattern=[0.0] * 6
    ),
    "gemma4": lambda: tf.Gemma4TextConfig(**_common(**SHARED), global_head_dim=32),
    "jamba": lambda: tf.JambaConfig(
        **_common(num_hidden_layers=4), attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        num_experts=2, num_experts_per_tok=1, use_mamba_kernels=False, mamba_d_state=8, mamba_dt_rank=8,
    ),
    "lfm2": lambda: tf.Lfm2Config(
        **_common(num_hidden_layers=4), layer_types=["conv", "full_attention"] * 2, block_multiple_of=8
    ),
    "deepseek_v32": lambda: tf.DeepseekV32Config(**_common(**LATENT), index_n_heads=2, index_head_dim=16, index_topk=8),
    "falcon_h1": lambda: tf.FalconH1Config(
        **COMMON, head_dim=16, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=16
    ),
    "mamba": lambda: tf.MambaConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2, state_size=8),
    "minimax": lambda: tf.MiniMaxConfig(
        **COMMON, head_dim=16, layer_types=["linear_attention", "full_attention", "linear_attention"], **EXPERTS
    ),
}  # fmt: skip

FAMILIES = (
    "llama", "qwen3", "mistral", "gemma3", "phi3", "gpt_neox", "falcon", "gpt_oss", "deepseek_v3", "qwen3_next",
)  # fmt: skip


def build(family: str, attention: str, dtype: torch.dtype, seed: int = 7) -> PreTrainedModel:
    torch.manual_seed(seed)
    implementation = None if attention == "sdpa" else attention  # where a family has no sdpa, its default
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation=implementation)
    model.generation_config = tf.GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=None)
    return model.to(dtype).eval()  # type: ignore[no-any-return]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models are faster on one thread, above all beside other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., PreTrainedModel]:
    """Return a function that builds (once) a tiny random model of a family."""
    built: dict[tuple[str, str, torch.dtype], PreTrainedModel] = {}

    def get(family: str = "llama", attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        if (family, attention, dtype) not in built:
            built[family, attention, dtype] = build(family, attention, dtype)
        return built[family, attention, dtype]

    return get


@pytest.fixture
def three_tiers(tmp_path: Path) -> Callable[..., dict[str, Any]]:
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


class Lab:
    """What most tests here need: prompts, an engine with tiny tiers, and stock runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._engines = 0

    @contextmanager
    def attach(
        self,
        model: PreTrainedModel,
        *,
        rows: int = 1,
        tokens: int = 200,
        spare: int = 2,
        host_blocks: int = 3,
        **sections: Any,
    ) -> Iterator[Any]:
        """Attach with a device tier that holds the scratch for ``rows`` of ``tokens`` and ``spare`` more blocks a row."""
        from tierkv.integrations.hf_compat import block_layout

        self._engines += 1
        layout, _ = block_layout(model, 16)
        fewest = min(len(group.members) for group in layout.groups)
        scratch = -(-rows * tokens // fewest) * layout.token_bytes
        config = {
            "block_size": 16,
            "device": {"capacity": scratch + (2 * rows + spare + 1) * layout.block_bytes},
            "host": {"capacity": host_blocks * layout.block_bytes},
            "disk": {"path": str(self._folder / f"store{self._engines}"), "capacity": "64MiB"},
            "placement": {"keep_first": 1, "keep_recent": 1},
            "transfer": {"layers_ahead": 0},
            **sections,
        }
        with tierkv.attach(model, config) as engine:
            yield engine

    @staticmethod
    def prompt(rows: int = 1, tokens: int = 120, seed: int = 0, pads: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
        """Return ids and mask, left-padded by ``pads`` tokens a row."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 97, (rows, tokens), generator=generator)
        mask = torch.ones_like(ids)
        for row, count in enumerate(pads):
            ids[row, :count] = 0
            mask[row, :count] = 0
        return {"input_ids": ids, "attention_mask": mask}

    @staticmethod
    def stock(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        """Run the generate that transformers has, with the cache that it makes, whether tierkv is attached or not."""
        return type(model).generate(model, *args, **kwargs)  # type: ignore[attr-defined]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


@pytest.fixture
def filled(lab: Lab, tiny_model: Callable[..., PreTrainedModel]) -> Iterator[Callable[..., Any]]:
    """Return a function that makes a cache holding a prompt of 100 tokens and 7 of its 8 new ones."""
    with ExitStack() as opened:

        def fill(family: str = "llama", *, rows: int = 1, pads: tuple[int, ...] = ()) -> Any:
            model, batch = tiny_model(family), lab.prompt(rows, 100, pads=pads)
            engine = opened.enter_context(lab.attach(model, rows=4 * rows, tokens=180))
            cache = engine.new_cache()
            ids = model.generate(**batch, cache=cache, do_sample=False, max_new_tokens=8)  # type: ignore[operator]
            return model, engine, cache, ids, batch["attention_mask"]

        yield fill


@pytest.fixture
def check(lab: Lab) -> Callable[..., None]:
    """Return a function that asserts that a call on a filled cache gives what a fresh run over ``ids`` gives."""

    def check(model: Any, cache: Any, ids: torch.Tensor, **settings: Any) -> None:
        settings = {"do_sample": False, "max_new_tokens": 8} | settings
        assert torch.equal(model.generate(ids, cache=cache, **settings), lab.stock(model, ids, **settings))

    return check
