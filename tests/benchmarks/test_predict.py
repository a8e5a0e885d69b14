"""``bench predict``: what is measured, fitted and predicted, and a small trace that is served and simulated."""

import math

import pytest
import torch
import transformers as tf

from tierkv.benchmarks import predict
from tierkv.benchmarks.predict_served import Trace
from tierkv.prefix_rates import Rates

TRACE = Trace(sessions=4, turns=3, common=32, first=200, more=40, longest=600, answer=9, device=512, host=320, rounds=1)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(7)
    config = tf.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = tf.LlamaForCausalLM(config).eval()
    model.generation_config = tf.GenerationConfig(pad_token_id=0, eos_token_id=None)
    return model


def test_a_trace_is_simulated_as_it_was_served(model, tmp_path, monkeypatch):
    # Of so small a model computing is as fast as reading, which an engine sees and the simulator does not.
    monkeypatch.setattr(Rates, "loading_pays", lambda self, num_bytes, tokens: True)
    plan = predict.Plan(
        fit_contexts=(100, 700), test_contexts=(300,), fit_restores=((128, 16), (512, 16)), test_restores=(256,),
        fit_prefills=((64, 0), (256, 0), (64, 256)), test_prefills=((128, 0),), rounds=2, trace=TRACE,
    )  # fmt: skip
    steps = []
    found = predict.measure(model, plan, tmp_path, 16, lambda: steps.append(1))
    assert len(steps) == plan.steps
    assert {row["kind"] for row in found["rows"]} == {"decode", "prefill", "restore", "first token", "answer"}
    assert {row["kind"] for row in found["rows"]} == found["by_kind"].keys()
    for row in (*found["rows"], *found["fit_rows"], found["trace"]["together"]):
        assert row["measured_seconds"] > 0
        assert row["error"] == pytest.approx(row["predicted_seconds"] / row["measured_seconds"] - 1, abs=0.01)
    served = [row for row in found["rows"] if "request" in row]
    assert len(served) == 2 * TRACE.requests
    assert math.isclose(
        sum(row["predicted_seconds"] for row in served), found["trace"]["together"]["predicted_seconds"], rel_tol=1e-3
    )
    tokens = found["trace"]["found_tokens"]
    assert tokens["simulated"] == tokens["real"]
    assert min(tokens["by_tier"].values()) > 0, "one tier has given nothing"
    assert sum(tokens["by_tier"].values()) == sum(tokens["simulated"])


def test_the_trace_that_users_run_uses_every_tier_and_ends_with_what_the_device_cannot_hold():
    trace = Trace()
    asked = list(trace.plan())
    assert len(asked) == trace.requests
    assert {session for session, _ in asked} == set(range(trace.sessions + 1))
    held = trace.sessions * (trace.first + (trace.turns - 1) * (trace.more + trace.answer))
    assert held > trace.device + trace.host
    assert trace.device < trace.longest + trace.answer < trace.device + trace.host
