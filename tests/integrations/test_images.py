"""A model that sees images: the text decoder is tiered, and ids alone no longer say what the cache holds."""

import pytest
import torch
import transformers as tf

from tierkv.errors import UnsafeCall

IMAGE = 96
GREEDY = {"do_sample": False, "max_new_tokens": 8, "suppress_tokens": [IMAGE]}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    vision = tf.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=4
    )
    text = tf.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = tf.LlavaForConditionalGeneration(
        tf.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1)
    )
    model.generation_config = tf.GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=None)
    return model.eval()


def text(count, seed):
    return torch.randint(3, IMAGE, (1, count), generator=torch.Generator().manual_seed(seed))


def picture(seed):
    return torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def shown(prompt, at):
    """Put the 16 placeholders of a picture into a prompt."""
    return torch.cat([prompt[:, :at], torch.full((1, 16), IMAGE), prompt[:, at:]], dim=1)


def test_a_conversation_about_a_picture(lab, model):
    with lab.attach(model) as engine:
        cache, pixels, ids = engine.new_cache(), {"pixel_values": picture(0)}, shown(text(90, 0), 40)
        for seed in range(3):
            ours = model.generate(ids, cache=cache, **pixels, **GREEDY)
            assert torch.equal(ours, lab.stock(model, ids, **pixels, **GREEDY))
            ids = torch.cat([ours, text(7, seed)], dim=1)
        assert min(now.blocks for now in engine.stats().tiers.values()) > 0
        # The ids without the picture are another text.
        with pytest.raises(UnsafeCall, match="do not continue"):
            model.generate(torch.where(ids == IMAGE, 5, ids), cache=cache, **GREEDY)
        # New ids alone go on behind the picture.
        held = cache.get_seq_length()
        ours = model.generate(ids[:, held:], attention_mask=torch.ones_like(ids), cache=cache, **GREEDY)
        expected = lab.stock(model, ids, **pixels, **GREEDY)
        assert torch.equal(ours[:, ids.shape[1] - held :], expected[:, ids.shape[1] :])


def test_another_picture_behind_the_same_ids(lab, model):
    ids = shown(text(60, 4), 20)
    with lab.attach(model) as engine:
        cache = engine.new_cache()
        for seed in (1, 2):
            pixels = {"pixel_values": picture(seed)}
            ours = model.generate(ids, cache=cache, **pixels, **GREEDY)
            assert torch.equal(ours, lab.stock(model, ids, **pixels, **GREEDY))


def test_a_picture_after_text(lab, model):
    with lab.attach(model) as engine:
        cache = engine.new_cache()
        first = model.generate(text(60, 5), cache=cache, **GREEDY)
        ids, pixels = torch.cat([first, shown(text(20, 6), 3)], dim=1), {"pixel_values": picture(3)}
        ours = model.generate(ids, cache=cache, **pixels, **GREEDY)
        assert torch.equal(ours, lab.stock(model, ids, **pixels, **GREEDY))
