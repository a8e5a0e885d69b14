"""The simulator decides what a real engine decides: the same slots, moves and prefixes, block by block.

A real engine serves a small trace while every call of its manager is written down with its answer. Then the simulator
serves the same trace; it is told only in which order copies were complete, and when scratch was divided anew.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as tf

import tierkv
from tests.manager_log import Log, common, describe, difference
from tierkv.config import load_config
from tierkv.cost import CostModel, Costs, Line
from tierkv.integrations.hf_compat import block_layout
from tierkv.keys import chain_keys
from tierkv.manager import TierManager
from tierkv.prefix import _KNEE_TOKENS
from tierkv.simulate import Simulation
from tierkv.simulate_prefix import KNEE_TOKENS
from tierkv.simulate_requests import Names, Source, Turn
from tierkv.simulate_setup import Setup
from tierkv.storage.codec import record_bytes
from tierkv.storage.prefix_slab import slot_bytes_of
from tierkv.tier import Tier, Wire

BLOCK = 16


@dataclass
class Replayed:
    """An executor whose copies are complete in the order in which the engine's were."""

    manager: TierManager
    real: list[tuple[Any, ...]]
    mine: list[tuple[Any, ...]]

    def submit(self, moves):
        pass

    def wait(self):
        pass

    def reap(self):
        while len(self.mine) < len(self.real) and self.real[len(self.mine)][0] == "complete":
            wanted = self.real[len(self.mine)][1:]
            moves = [move for move in self.manager.moves if describe([move])[0] == wanted]
            assert len(moves) == 1, f"the engine completed {wanted}, which is not under way here"
            self.manager.complete(moves[0])


class Asked(Source):
    """The requests that the engine served, one after the other; scratch is divided before each as it was there."""

    def __init__(self, turns, real, mine):
        self.turns, self.real, self.mine = list(turns), real, mine
        self.simulation = None
        self.under_way = False

    def next_seconds(self):
        return 0.0 if self.turns and not self.under_way else None

    def take(self):
        steps = self.simulation.steps
        while self.real[len(self.mine)][0] in ("resize", "complete"):
            steps.reap()
            if self.real[len(self.mine)][0] == "resize":
                _, tier, slots, _ = self.real[len(self.mine)]
                steps.manager.resize(tier, slots)
        self.under_way = True
        return self.turns.pop(0)

    def ended(self, turn, now):
        self.under_way = False

    def published(self, turn, tokens):
        pass

    def known_blocks(self, turn):
        return 0


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


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def settings(model, folder, device_blocks, host_blocks, **prefix):
    layout, _ = block_layout(model, BLOCK)
    return {
        "block_size": BLOCK,
        "device": {"capacity": device_blocks * layout.block_bytes},
        "host": {"capacity": host_blocks * layout.block_bytes},
        "disk": {"path": str(folder), "capacity": "8MiB"},
        "placement": {"keep_first": 1, "keep_recent": 2},
        "transfer": {"layers_ahead": 1},
        "prefix": {"persist": True, "min_tokens": 32, **prefix},
    }


def serve(engine, model, plan, seed):
    """Let an engine serve turns of sessions; return of each its prompt's tokens, its answer's, and all ids.

    A turn of 0 tokens asks for the prompt of the one before again.
    """
    draw = torch.Generator().manual_seed(seed)
    store = engine.stores.prefix
    engine.prefix.rates.loading_pays = lambda num_bytes, tokens: True  # as with a GPU, where nothing is timed
    offers = engine.prefix._offers
    drain = offers.drain
    offers.drain = lambda wait_seconds=0.0: drain(5.0)  # the queue is tiny here, and its thread is as fast as it is
    common = torch.randint(3, 97, (1, 70), generator=draw)
    said: dict[int, torch.Tensor] = {}
    prompts: dict[int, torch.Tensor] = {}
    asked = []
    for session, tokens, answer in plan:
        new = torch.randint(3, 97, (1, tokens), generator=draw)
        ids = torch.cat([said.get(session, common), new], dim=1)
        if not tokens:
            ids = prompts[session]
        prompts[session] = ids
        out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=answer)
        assert out.shape[1] == ids.shape[1] + answer
        assert store.flush(20)
        said[session] = out
        asked.append((ids.shape[1], answer, out[0].tolist()))
    return asked


def turns_of(asked):
    for tokens, answer, ids in asked:
        keys = chain_keys(b"test", ids, BLOCK)
        yield Turn(0.0, tokens, answer, Names(keys, [(int.from_bytes(key[:8], "big"),) for key in keys]))


def cost_model(layout):
    wires = {Wire(a, b): Line(1e-5, 1e9) for a in Tier for b in Tier if a is not b}
    costs = Costs(step_seconds=0.01, kv_bytes_per_second=dict.fromkeys((Tier.DEVICE, Tier.HOST), 1e9), wires=wires)
    return CostModel(costs, len(layout.layers), layout.block_bytes, layout.block_size)


def sessions(count, turns, first, more, answer):
    """Plan ``turns`` of so many sessions in round robin: first a long prompt, then shorter ones."""
    return [(s, (first if turn == 0 else more) + 13 * s, answer + turn) for turn in range(turns) for s in range(count)]


PLANS = {
    "sharing": (sessions(3, 4, 90, 40, 20), {"device_blocks": 40, "host_blocks": 30}, {}),
    "always written": (
        sessions(3, 4, 120, 50, 21), {"device_blocks": 30, "host_blocks": 12}, {"write_policy": "always"},
    ),
    "tight": (
        sessions(4, 3, 150, 60, 18), {"device_blocks": 16, "host_blocks": 8}, {"write_policy": "always", "eviction": "cost"},
    ),
    "longer than memory": (
        sessions(2, 3, 500, 90, 17), {"device_blocks": 22, "host_blocks": 9}, {"write_policy": "always", "eviction": "s3fifo"},
    ),
    "whole blocks, asked again": (
        [(0, 90, 20), (1, 90, 9), (0, 0, 20), (1, 0, 33), (0, 26, 7), (1, 0, 5)],
        {"device_blocks": 20, "host_blocks": 9}, {"write_policy": "always"},
    ),
    "the store keeps what was found": (
        [(s, 500, 9) for s in range(5)] + [(0, 0, 5)] + [(s, 500, 9) for s in (5, 6, 7)] + [(s, 25, 9) for s in (0, 1, 2)],
        {"device_blocks": 50, "host_blocks": 20}, {"write_policy": "always"},
    ),
    "the store evicts": (
        sessions(5, 3, 500, 130, 17), {"device_blocks": 60, "host_blocks": 40}, {"write_policy": "always"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_the_same_decisions_block_by_block(model, tmp_path, name):
    plan, sizes, prefix = PLANS[name]
    config = load_config(settings(model, tmp_path, **sizes, **prefix), environ={})
    real = Log()
    with tierkv.attach(model, config) as engine:
        slots = {tier: pool.num_slots for tier, pool in engine.manager.pools.items()}
        real.watch(engine.manager)
        asked = serve(engine, model, plan, seed=len(name))
        stats = engine.stats()
        assert stats.prefix.shed_blocks == 0
        slot_bytes = slot_bytes_of(record_bytes(engine.layout.block_bytes, BLOCK))
        setup = Setup(
            slots=slots,
            store_blocks=engine.stores.prefix._parts.budget_bytes // slot_bytes,
            slots_per_segment=engine.manager.slots_per_segment,
            keep=engine.manager.keep,
            promoted=engine.manager.promoted,
            eviction=config.prefix.eviction,
            write_policy=config.prefix.write_policy,
            min_tokens=config.prefix.min_tokens,
            queue_blocks=1 << 20,
            batch=1,
            longest_jump=1,
        )
    mine = Log()
    source = Asked(turns_of(asked), real.events, mine.events)
    simulation = Simulation(cost_model(engine.layout), setup, source)
    source.simulation = simulation
    simulation.steps.mover = Replayed(simulation.steps.manager, real.events, mine.events)
    mine.watch(simulation.steps.manager)
    try:
        outcome = simulation.run()
    except Exception as error:
        error.add_note(f"after {len(mine.events)} of {len(real.events)} equal events: {common(real, mine)}")
        raise
    assert common(real, mine) == len(real.events) == len(mine.events), difference(real, mine)

    used, store = stats.prefix, simulation.prefixes.store
    assert outcome.counts.requests == len(plan)
    assert outcome.counts.prompt_tokens == used.prompt_tokens
    assert sum(outcome.counts.found_tokens.values()) == used.used_tokens
    assert (len(store), store.num_evicted) == (used.store.blocks, used.store.evicted)
    # What a scenario is for has really happened.
    seen = outcome.record()
    assert {"share", "publish", "complete", "background", "resize"} <= {event[0] for event in real.events}
    assert outcome.counts.found_tokens[Tier.DEVICE] > 0
    assert min(seen["peak_blocks"]["device"], seen["peak_blocks"]["host"]) > 0
    if name != "sharing":
        assert outcome.counts.found_tokens[Tier.DISK] > 0
        # Of a prompt that is all known, one token is computed all the same.
        assert 0 <= used.restored_tokens - outcome.counts.found_tokens[Tier.DISK] <= len(plan)
    if name == "longer than memory":
        assert seen["peak_blocks"]["disk"] > 0
        assert any(event[0] == "complete" and "disk" in event[1] for event in real.events)
    if name == "whole blocks, asked again":
        copies = [e for e in real.events if e[0] == "complete" and e[2] != e[3]]
        assert copies, "no last block was copied"
    if name.startswith("the store"):
        assert store.num_evicted > 0


def test_costs_of_blocks_are_those_of_an_engine():
    assert KNEE_TOKENS == _KNEE_TOKENS
