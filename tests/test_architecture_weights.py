"""How many bits a weight takes, by what a config says of its quantisation."""

import pytest

from tierkv.architecture_config import read_config

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip


def read(**values):
    return read_config({**LLAMA, **values}, name="x", title="X", source="config.json")


def compressed(**weights):
    groups = {"group_0": {"weights": weights}, "group_1": {"weights": {"num_bits": 2}}, "group_2": {"weights": None}}
    if weights["num_bits"] == "8":
        del groups["group_1"]
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"load_in_4bit": True}, 4),
        (compressed(num_bits=4, group_size=128, symmetric=True), 4 + 16 / 128),
        (compressed(num_bits=4, group_size=64, symmetric=False), 4 + 20 / 64),
        (compressed(num_bits=8, group_size=None, strategy="channel"), 8),
        (compressed(num_bits="8"), 32),
        ({"quant_method": "compressed-tensors", "config_groups": [1]}, 32),
        ({"quant_method": "new"}, 32),
        (None, 32),
    ],
)
def test_quantised_weights(quantization, bits):
    weights = read(quantization_config=quantization).weights
    assert weights.total_bytes("float32") == pytest.approx((weights.dense * bits + 2 * 6400 * 32) / 8, abs=1)


def test_a_quantisation_that_is_not_known_is_named():
    for method in ("torchao", "compressed-tensors"):
        assert read(quantization_config={"quant_method": method}).weights.unknown_quantization == method
    assert read(quantization_config={"bits": "four"}).weights.unknown_quantization == "unnamed"
    for known in ({"quant_method": "fp8"}, {"quant_method": "mxfp4"}, compressed(num_bits=4), None, {}):
        assert read(quantization_config=known).weights.unknown_quantization is None
