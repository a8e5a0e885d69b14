"""Conversations on one budget: the mix, what each layout holds, and that every answer is the stock cache's."""

import threading

import pytest
import torch
import transformers as tf

import tierkv
from tierkv.benchmarks import sessions as measured
from tierkv.benchmarks import sessions_run
from tierkv.benchmarks.sessions_mix import MESSAGE, MixPlan, describe, make_mix
from tierkv.benchmarks.sessions_outcome import Outcome, Round, figures, p90
from tierkv.benchmarks.sessions_run import Conversations

PLAN = MixPlan(count=8, shortest=60, longest=400, system=100, answer=5)
TEXT = [(token * token + token // 7) % 94 for token in range(5000)]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model():
    """A random Llama of many thin layers, so that small budgets hold several blocks, whose answers are no monotone."""
    torch.manual_seed(3)
    config = tf.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.2, bos_token_id=None, eos_token_id=96,
        pad_token_id=96,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def mix():
    return make_mix(TEXT, PLAN)


@pytest.fixture(scope="module")
def stock(model, mix):
    return measured.run_references(model, mix, PLAN.answer, lambda: None)


@pytest.fixture
def budgets(model, tmp_path):
    device = 4 * PLAN.context * measured.token_bytes(model)
    return measured.Budgets(device, device // 2, 64 << 20, tmp_path)


# -- the mix --------------------------------------------------------------------------------------------------------------


def test_the_mix_is_fixed(mix):
    assert mix == make_mix(TEXT, PLAN)
    assert [session.has_system for session in mix] == [True, False, False, False, False, True, False, False]
    assert mix[0].prompt[:100] == mix[5].prompt[:100] == tuple(TEXT[:100])
    assert mix[0].prompt[100:] != mix[5].prompt[100 : len(mix[0].prompt)]
    for session in mix:
        assert PLAN.shortest + 100 * session.has_system <= len(session.prompt) <= PLAN.longest
        assert MESSAGE[0] <= len(session.message) <= MESSAGE[1]
        assert len(session.turn) + PLAN.answer <= PLAN.context


def test_a_longer_mix_begins_with_the_shorter_one(mix):
    longer = make_mix(TEXT, MixPlan(count=20, shortest=60, longest=400, system=100, answer=5))
    assert longer[: len(mix)] == mix


def test_the_mix_is_described(mix):
    said = describe(PLAN, mix)
    assert said["prompt_tokens"] == [len(session.prompt) for session in mix]
    assert (said["system_sessions"], said["system_share"], said["seed"]) == ([0, 5], 0.2, 0)


@pytest.mark.parametrize("plan", [MixPlan(system=5000), MixPlan(system=100, longest=500), MixPlan(shortest=0)])
def test_a_mix_that_cannot_be_is_refused(plan):
    with pytest.raises(ValueError, match="room for it"):
        make_mix(TEXT, plan)


def test_the_answers_could_not_be_guessed(stock):
    assert len({tuple(one.answer) for one in stock}) == len(stock)


# -- layouts --------------------------------------------------------------------------------------------------------------


def test_reservations_hold_what_the_division_says(model, stock, budgets):
    reserved = PLAN.context * measured.token_bytes(model)
    outcome = measured.contiguous(budgets, reserved, stock)
    assert outcome.held == 4
    assert outcome.last.bytes == {"device": 4 * reserved, "host": 0, "disk": 0}
    assert measured.contiguous(budgets, budgets.device + 1, stock).held == 0


def test_blocks_hold_more_and_sharing_saves(model, mix, stock, budgets):
    found = {}
    for name in ("paged", "shared"):
        found[name] = measured.on_device(
            model, budgets.config(name), mix, stock, PLAN.answer, bound=None if name == "paged" else 100.0
        )
    paged, shared = found["paged"], found["shared"]
    assert 4 < paged.held <= shared.held < len(mix)
    assert "the smallest device.capacity that suffices" in paged.refused
    assert [len(one.turn_seconds) for one in paged.rounds] == [paged.held] * measured.PAGED_ROUNDS
    assert (paged.last.saved_bytes, paged.computed) == (0, 0)
    if shared.held > 5:  # the second conversation with the system prompt is there: 3 whole blocks are common
        assert shared.last.saved_bytes == 3 * 32 * measured.token_bytes(model)
    assert shared.computed >= 1
    for outcome in found.values():
        assert not outcome.unequal
        assert outcome.last.bytes["device"] <= budgets.device
        assert outcome.last.bytes["host"] == outcome.last.bytes["disk"] == 0


def test_tiers_hold_all_and_threads_take_turns(model, mix, stock, budgets):
    advanced: list[int] = []
    said: list[str] = []
    outcome = measured.tiered(
        model, budgets.config("tiered"), mix, stock, PLAN.answer,
        bound=100.0, first=4, threads=3, advance=lambda: advanced.append(1), say=said.append,
    )  # fmt: skip
    assert outcome.held == len(mix)
    assert [one.sessions for one in outcome.rounds] == [4, 5, 6, 7, 8]
    assert not outcome.unequal
    assert not outcome.refused
    assert outcome.computed == 2
    assert outcome.computed + outcome.copied == len(mix)
    assert outcome.last.saved_bytes == 3 * 32 * measured.token_bytes(model)
    assert 0 < outcome.last.bytes["host"] <= budgets.host
    assert outcome.threads is not None
    assert outcome.threads["tokens_equal"]
    assert len(outcome.threads["finish_seconds"]) == 3
    assert 0 <= outcome.threads["spread"] < 1
    # Prefills, a warm-up, turns, and those of the threads.
    assert len(advanced) == 8 + 1 + (4 + 5 + 6 + 7 + 8) + 8
    assert said[0].startswith("4 conversations: p90 ")


def test_a_turn_that_takes_too_long_ends_the_growth_at_the_second_try(model, mix, stock, budgets, monkeypatch):
    rounds = iter([[1.0], [3.0], [1.5], [3.0], [3.0], [0.1]])
    monkeypatch.setattr(Conversations, "round", lambda self: next(rounds))
    outcome = measured.tiered(model, budgets.config("tiered"), mix, stock, PLAN.answer, bound=2.0)
    assert [(one.sessions, one.held) for one in outcome.rounds] == [
        (1, True),
        (2, False),
        (2, True),
        (3, False),
        (3, False),
    ]
    assert outcome.held == 2
    assert "p90 turn time above 2.00 s" in outcome.refused


def test_a_refusal_ends_the_growth(model, mix, stock, budgets):
    small = measured.Budgets(budgets.device, 0, 0, budgets.folder)
    outcome = measured.tiered(model, small.config("tiered"), mix, stock, PLAN.answer, bound=100.0, threads=2)
    assert 4 < outcome.held < len(mix)
    assert "the smallest device.capacity that suffices" in outcome.refused
    assert outcome.threads is not None
    assert outcome.threads["sessions"] == outcome.held


def test_prompts_that_fit_without_their_turns_are_not_held(model, mix, stock, budgets, monkeypatch):
    refuse = iter([True, False])
    real = Conversations.round

    def once(self):
        if next(refuse, False):
            raise tierkv.errors.CapacityError("no room for turns")
        return real(self)

    monkeypatch.setattr(Conversations, "round", once)
    outcome = measured.on_device(model, budgets.config("paged"), mix, stock, PLAN.answer, bound=None)
    assert outcome.refused == "no room for turns"
    assert outcome.held >= 4


def test_the_users_environment_has_no_say(budgets, monkeypatch):
    monkeypatch.setenv("TIERKV_DEVICE__CAPACITY", "1MiB")
    config = budgets.config("paged")
    assert config.device.capacity.size_bytes == budgets.device
    assert not config.prefix.share
    assert budgets.config("tiered").prefix.share


# -- conversations --------------------------------------------------------------------------------------------------------


def test_a_copied_prompt_is_what_a_prefill_puts_there(model, mix, stock, budgets):
    with tierkv.attach(model, budgets.config("paged")) as engine:
        talks = Conversations(engine, mix, stock, PLAN.answer)
        talks.open_next()
        assert (talks.copied, talks.computed) == (1, 0)
        own = engine.new_cache()
        sessions_run.generate(model, mix[0].prompt, 1, own)
        for layer in range(len(engine.layout.layers)):
            for copied, computed in zip(talks.caches[0].sequences.read(layer), own.sequences.read(layer), strict=True):
                assert torch.equal(copied, computed)
        assert torch.equal(talks.caches[0].content.ids, own.content.ids)


def test_where_layers_are_gathered_prompts_are_computed(model, mix, stock, budgets):
    config = budgets.config("tiered").replace({"attention.path": "gathered"})
    with tierkv.attach(model, config) as engine:
        talks = Conversations(engine, mix, stock, PLAN.answer)
        talks.open_next()
        assert len(talks.round()) == talks.computed == 1
        assert not talks.unequal


def test_every_round_finds_the_same_state(model, mix, stock, budgets):
    with tierkv.attach(model, budgets.config("tiered")) as engine:
        talks = Conversations(engine, mix, stock, PLAN.answer)
        for _ in range(3):
            talks.open_next()
        for _ in range(3):
            talks.round()
            assert [cache.sequences.length for cache in talks.caches] == [len(one.prompt) for one in mix[:3]]
        assert not talks.unequal
        talks.close()
        assert engine.stats().kv_bytes_total == 0


def test_an_answer_that_differs_is_noticed(model, mix, stock, budgets):
    wrong = [sessions_run.Reference(one.layers, [*one.answer[:-1], 1000], 0.0) for one in stock]
    with tierkv.attach(model, budgets.config("paged")) as engine:
        talks = Conversations(engine, mix, wrong, PLAN.answer)
        talks.open_next()
        talks.round()
        assert talks.unequal == [(1, 0)]


def test_a_thread_that_fails_ends_the_others_and_is_heard(model, mix, stock, budgets, monkeypatch):
    with tierkv.attach(model, budgets.config("tiered")) as engine:
        talks = Conversations(engine, mix, stock, PLAN.answer)
        for _ in range(4):
            talks.open_next()
        real = Conversations._turn

        def turn(self, index):
            if index == 1:
                raise ValueError("of a thread")
            return real(self, index)

        monkeypatch.setattr(Conversations, "_turn", turn)
        with pytest.raises(ValueError, match="of a thread"):
            talks.threaded_round(2)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("conversations-")]
        assert [cache.sequences.length for cache in talks.caches] == [len(one.prompt) for one in mix[:4]]


# -- what a record says ---------------------------------------------------------------------------------------------------


def test_p90_lies_between_the_times_that_there_are():
    assert p90([2.0]) == 2.0
    assert p90([1.0] * 9 + [2.0]) == pytest.approx(1.1)
    assert p90([float(number) for number in range(11)]) == 9.0


def test_the_p90_of_several_rounds_is_their_median():
    rounds = [Round(2, [seconds]) for seconds in (9.0, 1.0, 2.0)]
    assert Outcome(rounds).p90 == 2.0
    assert Outcome([*rounds, Round(3, [5.0]), Round(4, [6.0], held=False)]).p90 == 5.0
    assert Outcome().p90 is None


def test_figures_are_those_of_the_largest_number_that_was_held():
    def outcome(*rounds, **more):
        return Outcome(
            [Round(count, [seconds], {"device": count}, 7, held=held) for count, seconds, held in rounds], **more
        )

    found = {name: outcome((2, 1.0, True)) for name in ("contiguous", "paged", "shared")}
    found["tiered"] = outcome((2, 1.0, True), (3, 1.5, True), (4, 9.0, False))
    said = figures(found)
    assert said["sessions_held"] == {"contiguous": 2, "paged": 2, "shared": 2, "tiered": 3}
    assert said["p90_turn_seconds"]["tiered"] == 1.5
    assert said["device_bytes"]["tiered"] == 3
    assert (said["saved_bytes"], said["tokens_equal"]) == (7, True)
    found["paged"].unequal.append((2, 1))
    assert not figures(found)["tokens_equal"]
    found["paged"].unequal.clear()
    found["tiered"].threads = {"tokens_equal": False}
    assert not figures(found)["tokens_equal"]
    found["contiguous"] = Outcome()
    said = figures(found)
    assert (said["sessions_held"]["contiguous"], said["p90_turn_seconds"]["contiguous"]) == (0, None)
