"""The tiered layout when all conversations are opened before a round is measured."""

import pytest
import torch
import transformers as tf

from tierkv.benchmarks import sessions, sessions_at_once
from tierkv.benchmarks.sessions_mix import MixPlan, make_mix
from tierkv.benchmarks.sessions_run import Conversations
from tierkv.errors import CapacityError

TEXT = [(token * token // 11 + token * 31) % 89 for token in range(6000)]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    config = tf.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.2, bos_token_id=None, eos_token_id=96,
        pad_token_id=96,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def stock(model):
    plan = MixPlan(count=7, shortest=60, longest=300, system=100, answer=3)
    mix = make_mix(TEXT, plan)
    return mix, sessions.run_references(model, mix, plan.answer, lambda: None)


@pytest.fixture
def at_once(model, stock, tmp_path):
    mix, references = stock
    device = 3 * 400 * sessions.token_bytes(model)

    def run(bound, disk=64 << 20):
        config = sessions.Budgets(device, 0, disk, tmp_path).config("tiered")
        return sessions_at_once.tiered_at_once(model, config, mix, references, 3, bound=bound)

    return run


def test_a_prompt_has_its_time(stock):
    assert all(one.prefill_seconds > 0 for one in stock[1])


def test_all_take_turns_in_one_round(at_once):
    outcome = at_once(100.0)
    assert [(one.sessions, one.held) for one in outcome.rounds] == [(7, True)]
    assert (outcome.held, outcome.refused, outcome.unequal) == (7, "", [])
    assert outcome.footprint is not None
    assert outcome.footprint.sessions == 7
    assert 0 < outcome.footprint.waste < 0.2


@pytest.mark.parametrize("most", range(8))
def test_the_most_that_keep_within_the_bound_are_found(at_once, monkeypatch, most):
    monkeypatch.setattr(Conversations, "round", lambda self: [1.0 if len(self.caches) <= most else 3.0])
    outcome = at_once(2.0)
    assert outcome.held == most
    assert (outcome.footprint is None) == (most == 0)
    assert ("above 2.00 s" in outcome.refused) == (most < 7)
    assert len(outcome.rounds) <= 8  # no number of conversations more than twice


def test_a_refusal_leaves_those_that_are_open(at_once):
    outcome = at_once(100.0, disk=0)
    assert 0 < outcome.held < 7
    assert "the smallest device.capacity that suffices" in outcome.refused
    assert outcome.footprint.sessions == outcome.held


def test_turns_that_are_refused_are_not_held(at_once, monkeypatch):
    real = Conversations.round

    def only_few(self):
        if len(self.caches) > 3:
            raise CapacityError("no room for turns")
        return real(self)

    monkeypatch.setattr(Conversations, "round", only_few)
    outcome = at_once(100.0)
    assert (outcome.held, outcome.refused) == (3, "no room for turns")
