"""A real model on real documentation: the same text, most of its KV on disk; gathered, the same logits too."""

import pydoc_data.topics

import pytest
import torch

import tierkv
from tierkv.errors import ConfigError
from tierkv.integrations.hf_compat import block_layout
from tierkv.integrations.hf_load import load_model

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPT_TOKENS, NEW = 1536, 48


@pytest.fixture(scope="module")
def smollm2():
    try:
        model, tokenizer = load_model("smollm2", dtype="float32", device="cpu")
    except ConfigError as missing:
        pytest.skip(str(missing))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    yield model, tokenizer
    torch.set_num_threads(threads)


def documentation(tokenizer, tokens, topic="compound"):
    ids = tokenizer(pydoc_data.topics.topics[topic], return_tensors="pt").input_ids
    assert ids.shape[1] >= tokens
    return ids[:, :tokens]


def tiers(model, folder, rows, tokens):
    """Return a config whose memory tiers hold less than half of the KV."""
    layout, _ = block_layout(model, 32)
    whole = rows * layout.blocks_for(tokens) * layout.block_bytes
    return whole, {
        "device": {"capacity": whole // 4},
        "host": {"capacity": whole // 5},
        "disk": {"path": str(folder), "capacity": "1GiB"},
    }


@pytest.mark.parametrize("path", ["paged", "gathered"])
def test_the_same_text_and_logits(smollm2, tmp_path, path):
    model, tokenizer = smollm2
    ids = documentation(tokenizer, PROMPT_TOKENS)
    settings = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True, "output_logits": True}
    stock = model.generate(ids, **settings)
    whole, config = tiers(model, tmp_path, 1, PROMPT_TOKENS + NEW)
    with tierkv.attach(model, config | {"attention": {"path": path}}) as engine:
        ours = model.generate(ids, **settings)
        stats = engine.stats()
    assert torch.equal(ours.sequences, stock.sequences)
    assert len(ours.logits) == NEW
    assert stats.read_path == path
    for own, reference in zip(ours.logits, stock.logits, strict=True):
        if path == "gathered":
            assert torch.equal(own, reference)
        torch.testing.assert_close(own, reference, rtol=1e-4, atol=1e-3)
    assert min(tier.blocks for tier in stats.tiers.values()) > 0
    assert all(tier.peak_bytes <= tier.capacity_bytes for tier in stats.tiers.values())
    assert stats.tiers["device"].capacity_bytes + stats.tiers["host"].capacity_bytes < whole / 2
    assert len(set(ours.sequences[0, PROMPT_TOKENS:].tolist())) > 10, "a degenerate answer proves little"


def test_a_conversation(smollm2, tmp_path):
    model, tokenizer = smollm2
    ids = documentation(tokenizer, 320, "assignment")
    greedy = {"do_sample": False, "max_new_tokens": 6}
    _, config = tiers(model, tmp_path, 1, 400)
    with tierkv.attach(model, config) as engine:
        cache = engine.new_cache()
        for question in (" What is a target list?", " And in one word?"):
            ids = torch.cat([ids, tokenizer(question, return_tensors="pt").input_ids], dim=1)
            ours = model.generate(ids, cache=cache, **greedy)
            assert torch.equal(ours, type(model).generate(model, ids, **greedy))
            ids = ours
        assert engine.stats().counters.tokens < ids.shape[1] + 5


@pytest.mark.parametrize("path", ["paged", "gathered"])
def test_a_chat_that_is_rendered_anew_at_every_turn(smollm2, tmp_path, path):
    """No cache is passed: each turn's text is rendered from its messages, and what was computed before is found by its ids;
    in the second round, by an engine that begins anew as after a restart."""
    model, tokenizer = smollm2
    document = tokenizer.decode(documentation(tokenizer, 700)[0])
    questions = ("What is this text about?", "Name one statement.", "And another one?")
    config = {
        "disk": {"path": str(tmp_path), "capacity": "1GiB"},
        "device": {"capacity": "256MiB"},
        "attention": {"path": path},
        "prefix": {"persist": True, "write_policy": "always"},
    }
    greedy = {"do_sample": False, "max_new_tokens": 40}
    messages, expected, prompts = [{"role": "system", "content": document}], [], []
    for question in questions:
        messages.append({"role": "user", "content": question})
        batch = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        answer = model.generate(**batch, **greedy)
        prompts.append(batch)
        expected.append(answer)
        text = tokenizer.decode(answer[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": text})
    assert len(set(expected[-1][0, prompts[-1]["input_ids"].shape[1] :].tolist())) > 5
    for round_ in range(2):
        with tierkv.attach(model, config) as engine:
            for turn, (batch, answer) in enumerate(zip(prompts, expected, strict=True)):
                before = engine.stats().prefix
                assert torch.equal(model.generate(**batch, **greedy), answer)
                used = engine.stats().prefix.used_tokens - before.used_tokens
                if turn or round_:
                    last = prompts[turn if round_ else turn - 1]["input_ids"].shape[1]
                    assert used >= last // 32 * 32 - 32
            assert engine.stats().prefix.restored_tokens >= 704 * round_
