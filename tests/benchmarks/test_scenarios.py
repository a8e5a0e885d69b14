"""Scenarios: their conversations, what each layout comes to on them, and what a record says at its top."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as tf

from tierkv.benchmarks import scenarios, scenarios_mixed, sessions
from tierkv.benchmarks.filled import layout_of
from tierkv.benchmarks.scenarios_mix import FULL, QUICK, Plan, Scenario, common_tokens, moments
from tierkv.benchmarks.scenarios_record import headlines, summary, tokens_equal
from tierkv.benchmarks.sessions_mix import MESSAGE, MixPlan, Session, make_mix
from tierkv.benchmarks.sessions_outcome import Outcome, Round
from tierkv.benchmarks.sessions_run import Reference
from tierkv.errors import CapacityError

# Nowhere does it say the same again for long, so that what is common was meant to be.
TEXT = [(token * token // 11 + token * 31) % 89 for token in range(6000)]
SMALL = Plan(
    scenarios={
        "short_chats": Scenario("short chats", count=4, shortest=20, longest=60, answer=3),
        "long_documents": Scenario("long documents", count=3, shortest=250, longest=330, answer=3),
        "multi_turn": Scenario("multi-turn", count=3, shortest=60, longest=80, turns=(2, 5), answer=3),
        "shared_prefix": Scenario("shared prefix", count=5, shortest=20, longest=50, system=100, answer=3),
    },
    mixed=MixPlan(count=6, shortest=100, longest=400, system=100, answer=3),
    reserved_sessions=3,
    context=400,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """This machine may do anything while it is tested."""
    monkeypatch.setattr(sessions, "BOUND", 1000.0)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    config = tf.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.2, bos_token_id=None, eos_token_id=96,
        pad_token_id=96,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config).eval()


@pytest.fixture
def record(model, tmp_path):
    """Return what makes the record of a scenario of ``SMALL``."""

    def make(name, plan=SMALL):
        scenario, layout = plan.scenarios[name], layout_of(model)
        by_turn = scenarios.loads(plan, scenario, TEXT, layout.token_bytes, tmp_path)
        return scenarios.scenario_record(model, scenario, by_turn, layout, lambda: None, lambda _: None)

    return make


# -- conversations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [FULL, QUICK, SMALL])
@pytest.mark.parametrize("name", FULL.scenarios)
def test_conversations_are_fixed_and_as_long_as_they_should_be(plan, name):
    if name not in plan.scenarios:
        return
    scenario = plan.scenarios[name]
    made = moments(TEXT, scenario)
    assert made == moments(TEXT, scenario)
    assert made != moments(TEXT, replace(scenario, seed=1))
    assert list(made) == list(scenario.turns or (1,))
    for turn, found in made.items():
        assert len(found) == scenario.count
        times = turn - 1 if scenario.turns else 1
        for one in found:
            assert scenario.shortest * times <= len(one.prompt) - scenario.system <= scenario.longest * times
            assert MESSAGE[0] <= len(one.message) <= MESSAGE[1]
            assert one.has_system == bool(scenario.system)
            assert len(one.turn) + scenario.answer <= scenario.context <= plan.context


def test_the_full_plan_is_the_one_that_the_table_is_about():
    plan = FULL.scenarios
    assert plan["short_chats"].longest < 500
    assert plan["long_documents"].shortest > 4000
    assert plan["many_concurrent"].count > 50
    assert plan["shared_prefix"].system == 1000
    assert FULL.mixed == MixPlan()
    assert set(QUICK.scenarios) == set(plan)


def test_a_later_turn_continues_an_earlier_one():
    made = moments(TEXT, SMALL.scenarios["multi_turn"])
    for early, late in zip(made[2], made[5], strict=True):
        assert late.prompt[: len(early.turn)] == early.turn
        assert len(late.prompt) > len(early.turn)


def test_only_a_system_prompt_is_common():
    shared = moments(TEXT, SMALL.scenarios["shared_prefix"])[1]
    assert {one.prompt[:100] for one in shared} == {tuple(TEXT[:100])}
    assert len({one.prompt[100:140] for one in shared}) == len(shared)
    for name in ("short_chats", "long_documents"):
        # The text has few different tokens, so that first ones may be equal; a block is not.
        assert common_tokens(moments(TEXT, SMALL.scenarios[name])[1]) < 16


def test_what_is_common_is_counted_once_for_each_that_has_it_again():
    def session(*prompt):
        return Session(prompt, (0,), has_system=False)

    assert common_tokens([session(1, 2, 3), session(1, 2, 4), session(1, 5), session(7)]) == 2 + 1
    assert common_tokens([session(1, 2), session(1, 2)]) == 2
    assert common_tokens([session(1, 2)]) == common_tokens([]) == 0
    mix = make_mix(TEXT, MixPlan(count=16, shortest=60, longest=400, system=100))
    assert 300 <= common_tokens(mix) < 316


@pytest.mark.parametrize("wrong", [{"system": 6000}, {"shortest": 0}, {"shortest": 61}, {"count": 0}])
def test_a_scenario_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="are needed"):
        moments(TEXT, replace(SMALL.scenarios["short_chats"], **wrong))


# -- layouts --------------------------------------------------------------------------------------------------------------


def test_what_fits_needs_no_tiers(model, record):
    found, token = record("short_chats"), layout_of(model).token_bytes
    assert (found["conversations"], found["contiguous"]["sessions_held"]) == (4, 2)
    assert found["paged"]["sessions_held"] == found["tiered"]["sessions_held"] == 4
    assert "the device holds all, so tiers gain nothing" in found["shows"]
    lengths = [len(one.prompt) for one in moments(TEXT, SMALL.scenarios["short_chats"])[1]]
    assert found["contiguous"]["used_bytes"] == sum(lengths[:2]) * token
    assert found["contiguous"]["waste_fraction"] == pytest.approx(1 - sum(lengths[:2]) / 800, abs=1e-4)
    paged = found["paged"]
    assert paged["used_bytes"] == sum(lengths) * token
    assert paged["kv_bytes"] == {"device": sum(-(-one // 32) for one in lengths) * 32 * token, "host": 0, "disk": 0}
    assert paged["waste_fraction"] == pytest.approx(1 - paged["used_bytes"] / paged["kv_bytes"]["device"], abs=1e-4)
    assert paged["kv_bytes"]["device"] <= paged["engine_bytes"]["device"] <= found["budget_bytes"]["device"]


def test_those_that_are_not_held_compute_their_prompts_again(model, record):
    found = record("long_documents")
    held = {name: found[name]["sessions_held"] for name in scenarios.LAYOUTS}
    assert held == {"contiguous": 2, "paged": 2, "tiered": 3}
    assert [found[name]["at_least"] for name in scenarios.LAYOUTS] == [False, False, True]
    rounds = found["tiered"]["rounds"]
    assert found["tiered"]["round_seconds"] == pytest.approx(sum(rounds[-1]["turn_seconds"]), abs=1e-3)
    for name in ("contiguous", "paged"):
        assert found[name]["round_seconds"] > sum(found[name]["rounds"][-1]["turn_seconds"])
    tiered = found["tiered"]
    assert tiered["kv_bytes"]["host"] + tiered["kv_bytes"]["disk"] > 0
    alone = sum(tiered["kv_bytes"].values()) - sum(tiered["copy_bytes"].values())
    assert tiered["waste_fraction"] == pytest.approx(1 - tiered["used_bytes"] / alone, abs=1e-4)
    assert tiered["waste_fraction_with_copies"] >= tiered["waste_fraction"]


def test_figures_come_by_turn(record):
    found = record("multi_turn")
    assert list(found["by_turn"]) == ["2", "5"]
    assert found["by_turn"]["2"]["mean_tokens"] < found["by_turn"]["5"]["mean_tokens"] == found["mean_tokens"]
    assert found["tiered"] == found["by_turn"]["5"]["tiered"]
    assert found["by_turn_shows"].startswith(
        "held by turn (contiguous, paged, tiered): turn 2: 2, 3, 3 of 3; turn 5: 2, "
    )
    assert tokens_equal(found)


def test_a_shared_prefix_is_there_once(model, record):
    found, block = record("shared_prefix"), layout_of(model).block_bytes
    assert found["paged"]["sessions_held"] == 5
    assert found["paged"]["saved_bytes"] == found["tiered"]["saved_bytes"] == 4 * 3 * block
    assert found["contiguous"]["saved_bytes"] == 0
    assert 0.4 < found["dedup_saved_fraction"] <= found["dedup_limit"]
    assert "in blocks that are shared" in found["shows"]
    own = sum(len(one.prompt) for one in moments(TEXT, SMALL.scenarios["shared_prefix"])[1]) - 4 * 96
    assert found["paged"]["used_bytes"] == own * layout_of(model).token_bytes


def test_a_device_that_holds_nothing_is_refused(record):
    with pytest.raises(CapacityError, match="does not hold the first conversation"):
        record("long_documents", replace(SMALL, context=120))


def test_the_mixed_load_is_that_of_bench_sessions(model, tmp_path):
    layout = layout_of(model)
    load = scenarios_mixed.mixed_load(SMALL, TEXT, layout.token_bytes, tmp_path)
    assert load.sessions == make_mix(TEXT, SMALL.mixed)
    assert load.reserved == SMALL.mixed.context
    assert load.budgets.device == 3 * SMALL.mixed.context * layout.token_bytes
    advanced: list[int] = []
    found = scenarios_mixed.mixed_record(model, SMALL, load, layout, lambda: advanced.append(1), lambda _: None)
    assert found["sessions_held"]["contiguous"] == 3
    assert 3 <= found["sessions_held"]["paged"] <= found["sessions_held"]["tiered"] == 6
    assert len(found["paged"]["rounds"]) == sessions.PAGED_ROUNDS
    assert found["waste_fraction"]["paged"] < found["waste_fraction"]["contiguous"]
    assert found["dedup_conversations"] == 6
    # Of two prompts with the system prompt, three whole blocks are common.
    blocks = sum(layout.blocks_for(len(one.prompt)) for one in load.sessions)
    assert found["dedup_saved_fraction"] == pytest.approx(3 / blocks, abs=1e-4)
    held = found["paged"]["sessions_held"]
    taken = sum(layout.blocks_for(len(one.prompt)) for one in load.sessions[:held]) * layout.block_bytes
    saved = 1 - taken / (held * SMALL.mixed.context * layout.token_bytes)
    assert found["paging_saved_fraction"] == pytest.approx(saved, abs=1e-4)
    record = summary({}, found, None, None)
    assert record["tokens_equal"]
    assert record["waste_fraction"] == found["waste_fraction"]
    assert headlines(record)[0].startswith("Mixed load: 3 conversations in reservations, ")
    json.dumps(record, allow_nan=False)


# -- what a record says ---------------------------------------------------------------------------------------------------


def test_a_round_of_all_adds_prompts_and_turns_of_those_that_are_not_held(model):
    layout = layout_of(model)
    load = scenarios.Load(
        [Session((1,) * 10, (1,), has_system=False)] * 3, 3, 100, sessions.Budgets(1, 0, 0, Path()),
    )  # fmt: skip
    stock = [Reference([], [], 1.0, 10.0), Reference([], [], 2.0, 20.0), Reference([], [], 4.0, 40.0)]
    outcome = Outcome([Round(2, [1.5, 2.5]), Round(2, [1.0, 1.0]), Round(2, [9.0, 9.0]), Round(3, [7.0], held=False)])
    row = scenarios.rows(load, {"contiguous": outcome}, stock, layout)["contiguous"]
    assert row["round_seconds"] == 4.0 + 44.0  # the median of its rounds, and the third one's prompt and turn
    nothing = scenarios.rows(load, {"tiered": Outcome()}, stock, layout)["tiered"]
    assert (nothing["round_seconds"], nothing["waste_fraction"], nothing["p90_turn_seconds"]) == (77.0, None, None)


def test_an_answer_that_differs_is_said(record):
    found = record("multi_turn")
    assert summary({"multi_turn": found}, None, None, None)["tokens_equal"]
    found["by_turn"]["2"]["paged"]["tokens_equal"] = False
    assert not summary({"multi_turn": found}, None, None, None)["tokens_equal"]


def test_parts_that_did_not_run_are_none():
    record = summary({}, None, None, None)
    assert record["tokens_equal"]
    for name in ("waste_fraction", "sessions_held", "dedup_saved_fraction", "decode_fit", "fragmentation"):
        assert record[name] is None
    assert headlines(record) == []
