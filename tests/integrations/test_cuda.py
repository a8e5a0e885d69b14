"""The whole path on a GPU: pinned host memory, copies on streams, the same tokens. Skipped where there is none."""

import pytest
import torch

import tierkv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_same_tokens_and_logits_through_three_tiers(tiny_model, three_tiers, family):
    model = tiny_model(family)
    ids = torch.randint(3, 97, (2, 200), generator=torch.Generator().manual_seed(1)).cuda()
    model.cuda()
    try:
        options = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        expected = model.generate(input_ids=ids, **options)
        with tierkv.attach(model, three_tiers(model, device_blocks=16, host_blocks=12)) as engine:
            got = model.generate(input_ids=ids, **options)
            blocks = {name: tier.blocks for name, tier in engine.stats().tiers.items()}
        assert torch.equal(got.sequences, expected.sequences)
        assert all(torch.equal(a, b) for a, b in zip(got.logits, expected.logits, strict=True))
        assert min(blocks.values()) > 0
    finally:
        model.cpu()
