"""The whole path on a GPU: pinned host memory, copies on streams, the same tokens. Skipped where there is none."""

import pytest
import torch

import tierkv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("path", ["gathered", "auto"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_same_tokens_and_logits_through_three_tiers(tiny_model, three_tiers, family, path):
    model = tiny_model(family)
    ids = torch.randint(3, 97, (2, 200), generator=torch.Generator().manual_seed(1)).cuda()
    model.cuda()
    try:
        options = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        expected = model.generate(input_ids=ids, **options)
        with tierkv.attach(model, three_tiers(model, 16, 18, attention={"path": path})) as engine:
            got = model.generate(input_ids=ids, **options)
            stats = engine.stats()
            blocks = {name: tier.blocks for name, tier in stats.tiers.items()}
        assert torch.equal(got.sequences, expected.sequences)
        assert stats.read_path == ("gathered" if path == "gathered" or family == "deepseek_v3" else "paged")
        for own, reference in zip(got.logits, expected.logits, strict=True):
            if stats.read_path == "gathered":
                assert torch.equal(own, reference)
            torch.testing.assert_close(own, reference, rtol=1e-4, atol=1e-4)
        assert min(blocks.values()) > 0
    finally:
        model.cpu()
