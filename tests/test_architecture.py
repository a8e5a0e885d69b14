"""Exact bytes of well-known models, and what is said about configs that cannot be used."""

import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.architecture import GROWING, KvLayer, canonical_name, find_architecture, model_names
from tierkv.architecture_config import read_config
from tierkv.errors import ConfigError, UnsupportedModel

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
SLIDING = {"layer_types": ["sliding_attention"] * 3, "sliding_window": 8}
ASKED = (
    "llama-2-7b llama-2-13b llama-2-70b llama-3.1-8b llama-3.1-70b llama-3.1-405b llama-3.2-1b llama-3.2-3b llama-3.3-70b "
    "qwen2.5-7b qwen2.5-72b qwen3-0.6b qwen3-8b qwen3-32b qwen3-30b-a3b qwen3-235b-a22b mistral-7b-v0.1 mistral-7b-v0.3 "
    "mixtral-8x7b mixtral-8x22b gemma-2-9b gemma-3-27b phi-3-mini deepseek-v3 gpt-oss-20b gpt-oss-120b smollm2-135m "
    "smollm2-360m smollm2-1.7b"
)


def read(**values):
    return read_config({**LLAMA, **values}, name="x", title="X", source="config.json")


@pytest.fixture
def folder(tmp_path):
    def write(content):
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "config.json").write_text(text)
        return str(tmp_path)

    return write


@pytest.mark.parametrize("name", ASKED.split())
def test_the_table_has_what_people_ask_for(name):
    found = find_architecture(name)
    assert found.kv_layers
    assert found.max_context is not None
    assert found.max_context >= 4096
    assert "config.json of" in found.source


@pytest.mark.parametrize("name", model_names())
def test_published_parameters_are_what_the_dimensions_come_to(name):
    """So that neither a dimension nor a count in the table can be wrong by itself."""
    import tomllib
    from pathlib import Path

    import tierkv.architecture

    table = tomllib.loads(Path(tierkv.architecture.__file__).with_name("models.toml").read_text())
    counted = read_config(table[name]["config"], name=name, title="", source="")
    assert counted.parameters_estimated
    assert not find_architecture(name).parameters_estimated
    assert counted.parameters == pytest.approx(table[name]["parameters"], rel=1e-4)
    assert find_architecture(name).parameters == table[name]["parameters"]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("deepseek-v3", 37), ("qwen3-235b-a22b", 22), ("qwen3-30b-a3b", 3.3), ("mixtral-8x7b", 12.9), ("mixtral-8x22b", 39),
        ("gpt-oss-120b", 5.1), ("gpt-oss-20b", 3.6),
    ],
)  # fmt: skip
def test_active_parameters_are_about_the_published_ones(name, billions):
    """Published counts include the input embeddings, ours only what is multiplied."""
    assert find_architecture(name).active_parameters / 1e9 == pytest.approx(billions, rel=0.09)


def test_llama_2_70b_and_the_multi_head_formula():
    llama = find_architecture("llama-2-70b")
    assert llama.kv_bytes(4096, "float16") == 1_342_177_280
    assert llama.assume_mha().kv_bytes(4096, "float16") == 10_737_418_240
    assert llama.assume_mha().kv_bytes(4096, "float16") * 10 == 107_374_182_400
    assert llama.assume_mha().attention_kind == "MHA"
    assert llama.kv_bytes(4096, "float16") == llama.layout(32, "float16").token_bytes * 4096


@pytest.mark.parametrize(
    ("name", "token_bytes", "kind"),
    [
        ("llama-3.1-8b", 131_072, "GQA"),
        ("deepseek-v3", 70_272, "MLA"),
        ("llama-2-7b", 524_288, "MHA"),
        ("mistral-7b-v0.1", 131_072, "GQA + sliding"),
        ("gemma-3-27b", 62 * 16 * 256 * 2, "GQA + sliding"),
        ("qwen3-235b-a22b", 94 * 4 * 256 * 2, "GQA"),
        ("smollm2-135m", 23_040, "GQA"),
    ],
)
def test_bytes_of_a_token_in_bfloat16(name, token_bytes, kind):
    found = find_architecture(name)
    assert found.token_bytes("bfloat16") == token_bytes
    assert found.token_bytes("float32") == 2 * token_bytes
    assert found.attention_kind == kind


@pytest.mark.parametrize(
    ("name", "window", "growing"),
    [("mistral-7b-v0.1", 4096, 0), ("gemma-3-27b", 1024, 10), ("gpt-oss-120b", 128, 18), ("gemma-2-9b", 4096, 21)],
)
def test_layers_with_a_window_stop_growing_where_it_ends(name, window, growing):
    found = find_architecture(name)
    one = found.token_bytes("bfloat16")
    each = one // len(found.layers)
    assert found.kv_bytes(window, "bfloat16") == window * one
    assert found.kv_bytes(window + 1, "bfloat16") - window * one == growing * each
    long = 100_000
    assert found.kv_bytes(long, "bfloat16") == (len(found.layers) - growing) * each * window + growing * each * long
    assert found.kv_bytes_read(long, "bfloat16") == found.kv_bytes(long, "bfloat16")


def test_the_last_layer_of_every_six_sees_everything_in_gemma_3():
    layers = find_architecture("gemma-3-27b").layers
    assert [index for index, layer in enumerate(layers) if layer.window is None] == list(range(5, 62, 6))


def test_weights_as_published():
    """DeepSeek V3 comes in 8 bits, the experts of gpt-oss in 4.25; the sizes of their downloads are known."""
    assert find_architecture("deepseek-v3").weights.total_bytes("bfloat16") == pytest.approx(671e9, rel=0.01)
    assert find_architecture("gpt-oss-120b").weights.total_bytes("bfloat16") == pytest.approx(60.8 * 2**30, rel=0.01)
    assert find_architecture("gpt-oss-20b").weights.total_bytes("bfloat16") == pytest.approx(12.8 * 2**30, rel=0.01)
    assert find_architecture("llama-3.1-8b").weights.total_bytes("bfloat16") == 2 * 8_030_261_248


def test_a_batch_reads_more_experts_and_never_more_than_all():
    weights = find_architecture("mixtral-8x7b").weights
    read_bytes = [weights.read_bytes("bfloat16", rows) for rows in (1, 2, 4, 64, 10_000)]
    assert read_bytes == sorted(read_bytes)
    assert read_bytes[0] == 2 * weights.active
    assert read_bytes[-1] == pytest.approx(2 * (weights.total - weights.embedding))
    dense = find_architecture("llama-3.1-8b").weights
    assert dense.read_bytes("bfloat16", 64) == dense.read_bytes("bfloat16") == 2 * dense.active


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        (" META-LLAMA/llama-3.1-8b-instruct ", "llama-3.1-8b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("mistral-7b", "mistral-7b-v0.3"),
    ],
)
def test_names_in_any_case_and_hub_ids(spelling, name):
    assert find_architecture(spelling).name == name


def test_a_file_and_its_folder_are_read_alike(folder):
    path = folder(LLAMA)
    found = find_architecture(path)
    assert found.layers == find_architecture(f"{path}/config.json").layers == (KvLayer("full", 2, 16, 16),) * 3
    assert found.token_bytes("float32") == 3 * 2 * 32 * 4
    assert found.parameters_estimated
    # embeddings, head, attention, MLP, norms
    assert found.parameters == 2 * 6400 + 3 * (64 * (64 * 2 + 64) + 3 * 64 * 96 + 128) + 64
    assert found.active_parameters == found.parameters - 6400


def test_a_table_entry_and_the_same_file_do_not_differ(folder):
    import tomllib
    from pathlib import Path

    import tierkv.architecture

    table = tomllib.loads(Path(tierkv.architecture.__file__).with_name("models.toml").read_text())
    for name in ("gemma-3-27b", "deepseek-v3", "gpt-oss-20b"):
        from_file = find_architecture(folder(table[name]["config"]))
        assert from_file.layers == find_architecture(name).layers
        assert from_file.weights.total_bytes("bfloat16") == pytest.approx(
            find_architecture(name).weights.total_bytes("bfloat16"), rel=1e-4
        )


def test_the_language_model_of_a_config_of_several_parts():
    inner = {key: value for key, value in LLAMA.items() if key != "model_type"}
    inner.update(model_type="gemma3_text", sliding_window=8, tie_word_embeddings=True, head_dim=16)
    nested = {"model_type": "gemma3", "text_config": inner, "vision_config": {"hidden_size": 9}}
    found = read_config(nested, name="x", title="X", source="config.json")
    assert [layer.window for layer in found.layers] == [8, 8, 8]
    deep = {"thinker_config": {"text_config": LLAMA}}
    assert read_config(deep, name="x", title="X", source="config.json").layers == read().layers


def test_gemma_3_files_leave_out_what_the_family_has():
    config = {
        "model_type": "gemma3", "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
    }  # fmt: skip
    found = read_config(config, name="x", title="X", source="config.json")
    assert {(layer.kv_heads, layer.key_dim) for layer in found.layers} == {(4, 256)}
    assert found.layer_kinds == {"sliding": 29, "full": 5}


def test_layers_that_read_the_kv_of_others_keep_none():
    shared = read(
        num_kv_shared_layers=1,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    )
    assert [layer.kind for layer in shared.layers] == ["sliding", "full", "shared"]
    each = 2 * 32 * 2
    assert shared.kv_bytes(10, "bfloat16") == (8 + 10) * each
    assert shared.kv_bytes_read(10, "bfloat16") == (8 + 10 + 10) * each
    assert len(shared.layout(32, "bfloat16").layers) == shared.kv_layers == 2


def test_chunks_begin_anew():
    chunked = read(layer_types=["chunked_attention"] * 3, attention_chunk_size=8)
    each = 3 * 2 * 32 * 2
    assert [chunked.kv_bytes_read(tokens, "float16") // each for tokens in (0, 1, 8, 9, 16, 17)] == [0, 1, 8, 1, 8, 1]
    assert chunked.kv_bytes(17, "float16") == 8 * each
    assert chunked.attention_kind == "GQA + chunked"


def test_hybrids_grow_only_in_their_attention_layers():
    jamba = read(attn_layer_period=3, attn_layer_offset=1)
    assert [layer.kind for layer in jamba.layers] == ["state", "full", "state"]
    assert jamba.token_bytes("bfloat16") == 2 * 32 * 2
    assert jamba.attention_kind == "GQA + hybrid"
    assert [spec.model_index for spec in jamba.layout(16, "bfloat16").layers] == [1]
    assert read(hybrid_override_pattern="M*-", model_type="nemotron_h").layer_kinds == {"state": 2, "full": 1}


def test_an_index_beside_the_kv_is_counted_and_not_tiered():
    sparse = read(kv_lora_rank=24, qk_rope_head_dim=8, index_head_dim=16, layer_types=["deepseek_sparse_attention"] * 3)
    assert sparse.token_bytes("bfloat16") == 3 * (24 + 8 + 16) * 2
    with pytest.raises(UnsupportedModel, match="nothing to tier"):
        sparse.layout(32, "bfloat16")


def test_one_kv_head_is_multi_query():
    assert read(num_key_value_heads=1).attention_kind == "MQA"
    assert read(multi_query=True, model_type="gpt_bigcode").attention_kind == "MQA"
    assert read(num_key_value_heads=None).attention_kind == "MHA"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"is_encoder_decoder": True, "model_type": "t5"}, ["t5 is an encoder-decoder", "decoder-only"]),
        ({"model_type": "bert"}, ["bert has no KV cache", "decoder-only"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["no KV cache"]),
        ({"model_type": "mamba"}, ["mamba has no KV cache", "state of fixed size"]),
        ({"layer_types": ["linear_attention"] * 3}, ["no KV cache"]),
        ({"model_type": "deepseek_v4"}, ["cannot be tiered"]),
        ({"layer_types": ["full_attention"]}, ["layer_types", "3 layers", "not 1"]),
        ({"layer_types": "full_attention"}, ["layer_types", "'full_attention'"]),
        ({"layer_types": ["full_attention", "odd", "full_attention"]}, ["layer 1", "'odd'", "known:"]),
        ({"layer_types": ["sliding_attention"] * 3}, ["sliding_window is missing"]),
        ({"num_hidden_layers": -3}, ["num_hidden_layers is -3", "from 1 up"]),
        ({"num_hidden_layers": "many"}, ["num_hidden_layers is 'many'"]),
        ({"num_attention_heads": 0}, ["num_attention_heads is 0", "from 1 up"]),
        ({"num_attention_heads": None}, ["names no attention heads"]),
        ({"num_key_value_heads": -1}, ["impossible KV shape"]),
        ({"vocab_size": 0}, ["names no vocab_size"]),
        ({"attn_layer_period": False}, ["attn_layer_period is False", "whole number from 1 up"]),
        ({"full_attention_interval": [None]}, ["full_attention_interval is [None]"]),
        ({"architectures": 3}, ["architectures is 3", "a list"]),
        ({"model_type": ["llama"]}, ["model_type is ['llama']", "family"]),
        ({"intermediate_size": [None]}, ["intermediate_size is [None]"]),
        ({"model_type": "llama4_text", "no_rope_layers": 5}, ["no_rope_layers is 5"]),
        ({"num_kv_shared_layers": [[1]]}, ["num_kv_shared_layers is [[1]]"]),
        ({"per_layer_config": {"0": 5}}, ["per_layer_config of layer 0 is 5"]),
        ({"block_types": [[1]]}, ["block_types is [[1]]"]),
        ({**SLIDING, "swa_num_key_value_heads": {"a": 1}}, ["swa_num_key_value_heads is {'a': 1}"]),
        ({**SLIDING, "swa_num_key_value_heads": 2, "swa_head_dim": math.nan}, ["swa_head_dim is nan"]),
        ({"num_hidden_layers": 10_001}, ["10,001 layers", "the most is 10,000"]),
        ({"num_hidden_layers": 10**9}, ["1,000,000,000 layers", "the most is 10,000"]),
        ({"num_hidden_layers": 10**40}, ["num_hidden_layers is 1000", "the most is 2,147,483,648"]),
        ({"num_key_value_heads": 2**31 + 1}, ["layer 0", "larger than any", "2,147,483,648"]),
        ({"hidden_size": 2**31 + 1}, ["hidden_size is 2147483649", "2,147,483,648"]),
        ({"hybrid_override_pattern": "*" * 10_001, "layer_types": None}, ["10,001 layers"]),
        ({"num_hidden_layers": None, "layer_types": ["attention"] * 10_001}, ["layer_types lists 10,001"]),
        ({"rope": 1, "text_config": {"hidden_size": "x" * 500}}, ["config.json"]),
    ],
)
def test_a_config_that_cannot_be_used_is_one_line(folder, monkeypatch, values, words):
    monkeypatch.setattr("tierkv.integrations.hf_config.fill_defaults", lambda config: None)
    path = folder({**LLAMA, **values})
    with pytest.raises(UnsupportedModel) as caught:
        find_architecture(path)
    assert "\n" not in str(caught.value)
    for word in [path, *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [("", ["not JSON"]), ("{", ["not JSON at line 1"]), ("[1]", ["not a JSON object"]), ("\xff", ["not JSON"])],
)
def test_a_file_that_is_no_config_is_one_line(folder, text, words):
    path = folder(text)
    with pytest.raises(ConfigError) as caught:
        find_architecture(path)
    for word in [path, *words]:
        assert word in str(caught.value)


def test_a_folder_without_a_config(tmp_path):
    with pytest.raises(ConfigError, match=r"it has no config\.json"):
        find_architecture(str(tmp_path))
    with pytest.raises(ConfigError, match="no such file or folder"):
        find_architecture(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lama-3.1-8b", ["unknown model 'lama-3.1-8b'", "did you mean llama-3.1-8b"]),
        ("qwen3_8b", ["did you mean qwen3-8b?"]),
        ("zzz", ["unknown model 'zzz'", "known: llama-2-7b", "config.json"]),
        ("", ["no name"]),
        ("a\0b", ["no name"]),
        ("./zzz", ["no such file"]),
        ("x" * 5000, ["no such file or folder"]),
    ],
)
def test_unknown_names_say_what_is_known(name, words):
    with pytest.raises(ConfigError) as caught:
        find_architecture(name)
    for word in words:
        assert word in str(caught.value)


def test_a_hub_model_that_is_not_there(monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as caught:
        find_architecture("Qwen/Qwen3-9B")
    for word in ("Qwen/Qwen3-9B", "HF_HUB_OFFLINE", "did you mean qwen3-8b", "path of a config.json"):
        assert word in str(caught.value)


def test_a_hub_model_is_read_from_what_the_hub_gives(monkeypatch):
    monkeypatch.setattr("tierkv.integrations.hf_config.fetch_config", lambda name: LLAMA)
    found = find_architecture("someone/llama-3.1-8b-tuned")
    assert found.layers == read().layers
    assert found.source == "config.json of someone/llama-3.1-8b-tuned"


def test_sizes_that_a_file_leaves_out_come_from_transformers(folder):
    pytest.importorskip("transformers")
    found = find_architecture(folder({"model_type": "llama", "num_hidden_layers": 2}))
    assert found.layers == (KvLayer("full", 32, 128, 128),) * 2


layers = st.builds(
    KvLayer,
    st.sampled_from(GROWING),
    st.integers(1, 9),
    st.integers(1, 70),
    st.integers(1, 70),
    st.none() | st.integers(1, 500),
)


@given(layers, st.integers(0, 2000))
def test_a_layer_never_reads_more_than_it_keeps(layer, tokens):
    kept, seen = layer.tokens_kept(tokens), layer.tokens_read(tokens)
    assert 0 <= seen <= kept <= tokens
    assert (seen > 0) == (tokens > 0)
    assert layer.tokens_kept(tokens + 1) - kept in (0, 1)


@given(st.sampled_from(model_names()), st.integers(0, 300_000), st.integers(0, 300_000))
def test_bytes_grow_with_the_tokens_and_are_bounded_by_the_formula(name, one, other):
    found = find_architecture(name)
    few, many = sorted((one, other))
    assert found.kv_bytes(few, "bfloat16") <= found.kv_bytes(many, "bfloat16")
    assert found.kv_bytes(many, "bfloat16") <= many * found.token_bytes("bfloat16")
    assert found.kv_bytes(many, "bfloat16") <= found.assume_mha().kv_bytes(many, "bfloat16")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    for name in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(ConfigError, match="no regular file"):
            find_architecture(str(name))


def test_one_spelling_stands_for_all_names_of_a_model(tmp_path):
    for name in ("SmolLM2", "HuggingFaceTB/SmolLM2-135M", "/none/SmolLM2-135M", "./smollm2-135m/config.json"):
        assert canonical_name(name) == "smollm2-135m"
    assert canonical_name("Owner/Tuned") == canonical_name(" owner/tuned ") == "owner/tuned"
    assert canonical_name("/a/Mine/") == canonical_name("/b/mine/config.json") == "mine"
    assert canonical_name(str(tmp_path)) == tmp_path.name.casefold()
