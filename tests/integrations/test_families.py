"""Every family of models, gathered: the same tokens and logits, bit for bit, while the KV lies in three tiers."""

import pytest
import torch
import transformers as tf

import tierkv
from tierkv.errors import UnsupportedModel

pytestmark = pytest.mark.filterwarnings("ignore:.*is falling back to its reference:UserWarning")

TEN = (
    "llama", "qwen3", "mistral", "gemma3", "phi3", "gpt_neox", "falcon", "gpt_oss", "deepseek_v3", "qwen3_next",
)  # fmt: skip
# Soft-capped scores; experts; windows set by a switch; chunks; no position ids (alibi); learned positions; every KV head
# repeated before it is cached; layers that read others' KV; recurrent and convolution layers beside attention.
PECULIAR = (
    "gemma2", "mixtral", "qwen2_sliding", "llama4", "bloom", "gpt2", "cohere2", "falcon_new", "gemma3n", "gemma4", "jamba",
    "lfm2",
)  # fmt: skip
GATHERED = {"path": "gathered"}
NEW = {"max_new_tokens": 24, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}


def slow(*values):
    """Parameters for the full run only; the quick one has enough without them."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def assert_identical(lab, model, batch, rows=1, **settings):
    """Run stock and tiered; compare every token and every logit; the sequence must lie in all three tiers."""
    settings = NEW | settings
    stock = lab.stock(model, **batch, **settings)
    with lab.attach(model, rows=rows, tokens=180, attention=GATHERED) as engine:
        ours = model.generate(**batch, **settings)
        blocks = {tier: now.blocks for tier, now in engine.stats().tiers.items()}
    assert torch.equal(ours.sequences, stock.sequences)
    assert len(ours.logits) == len(stock.logits) == settings["max_new_tokens"]
    for step, (own, reference) in enumerate(zip(ours.logits, stock.logits, strict=True)):
        assert torch.equal(own, reference), f"step {step} differs by {(own - reference).abs().max()}"
    assert min(blocks.values()) > 0, blocks
    assert sum(blocks.values()) == rows * 12, blocks  # 155 + 24 - 1 tokens a row in blocks of 16


@pytest.mark.parametrize("family", [*TEN, *PECULIAR])
def test_one_sequence(lab, tiny_model, family):
    assert_identical(lab, tiny_model(family), lab.prompt(1, 155))


@pytest.mark.parametrize("family", [*TEN, *slow(*PECULIAR)])
def test_a_left_padded_batch(lab, tiny_model, family):
    assert_identical(lab, tiny_model(family), lab.prompt(3, 155, pads=(0, 70, 9)), rows=3)


@pytest.mark.parametrize("family", ["llama", "gemma3", *slow(*TEN[1:3], *TEN[4:], "llama4", "gemma4", "lfm2")])
def test_prefill_in_chunks(lab, tiny_model, family):
    assert_identical(lab, tiny_model(family), lab.prompt(2, 155, pads=(0, 31)), rows=2, prefill_chunk_size=33)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "deepseek_v3", "falcon"])
def test_eager_attention(lab, tiny_model, family):
    assert_identical(lab, tiny_model(family, "eager"), lab.prompt(2, 155, pads=(40, 0)), rows=2)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *(
            (family, dtype)
            for family in ("llama", "gemma3", "deepseek_v3")
            for dtype in (torch.bfloat16, torch.float16)
        ),
        ("llama", torch.float64),
        ("mistral", torch.float64),
    ],
)
def test_other_dtypes(lab, tiny_model, family, dtype):
    assert_identical(lab, tiny_model(family, "sdpa", dtype), lab.prompt(2, 155, pads=(0, 12)), rows=2)


@pytest.mark.parametrize("family", ["mistral", "gemma3", "llama4", "gpt_oss"])
def test_a_prompt_shorter_than_the_window(lab, tiny_model, family):
    """The step that crosses the window, one token at a time."""
    batch, settings = lab.prompt(2, 11, pads=(0, 3)), NEW | {"max_new_tokens": 40}
    model = tiny_model(family)
    stock = lab.stock(model, **batch, **settings)
    with lab.attach(model, rows=2, tokens=60, spare=0, attention=GATHERED):
        ours = model.generate(**batch, **settings)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, stock.logits, strict=True))


def test_layers_that_are_read_by_others_stay_native(lab, tiny_model):
    with lab.attach(tiny_model("gemma3n")) as engine:
        stats = engine.stats()
        assert (stats.tiered_layers, stats.native_layers) == (2, 4)
        tiered = [spec.model_index for spec in engine.layout.layers]
    modes = tiny_model("gemma3n").config.kv_sharing_modes
    assert [modes[index] for index in tiered] == [None, None]
    assert modes.count("store") == 2


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("deepseek_v32", "an index beside their KV"),
        ("falcon_h1", "recurrent state and KV in one layer"),
        ("mamba", "recurrent or convolution state"),
        ("minimax", "of its own"),
    ],
)
def test_a_family_without_plain_layers_is_refused(tiny_model, family, reason):
    with pytest.raises(UnsupportedModel, match=reason) as refused:
        tierkv.attach(tiny_model(family))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "config",
    [
        tf.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4),
        tf.BartConfig(
            vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=32, decoder_ffn_dim=32,
        ),
    ],
    ids=["t5", "bart"],
)  # fmt: skip
def test_an_encoder_decoder_is_refused(config):
    model = tf.AutoModelForSeq2SeqLM.from_config(config)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        tierkv.attach(model)


def test_a_model_without_a_cache_is_refused():
    with pytest.raises(UnsupportedModel, match="takes no cache"):
        tierkv.attach(tf.OpenAIGPTLMHeadModel(tf.OpenAIGPTConfig(vocab_size=97, n_embd=32, n_layer=1, n_head=2)))


def test_cross_attention_is_refused():
    config = tf.GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=2, add_cross_attention=True)
    with pytest.raises(UnsupportedModel, match="cross-attention"):
        tierkv.attach(tf.GPT2LMHeadModel(config))


def test_a_model_without_generate_is_refused(tiny_model):
    with pytest.raises(UnsupportedModel, match="language-model head"):
        tierkv.attach(tiny_model("llama").model)


def test_something_else_is_refused():
    with pytest.raises(UnsupportedModel, match="not Linear"):
        tierkv.attach(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
