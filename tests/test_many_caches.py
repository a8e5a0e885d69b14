"""Many caches on one engine: what they share, what is refused, and what moves for nothing."""

import random

import pytest
import torch
import transformers as tf

import tierkv
from tierkv.engine import Engine
from tierkv.errors import CapacityError
from tierkv.integrations.hf_compat import block_layout

SIZE = 16


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(7)
    config = tf.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.2, bos_token_id=None, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    made = tf.LlamaForCausalLM(config).eval()
    made.generation_config = tf.GenerationConfig(pad_token_id=0, eos_token_id=None)
    return made


@pytest.fixture
def attach(model, tmp_path):
    """Return a function that attaches with tiers of so many blocks; the disk's are of no matter where it has any."""
    block = block_layout(model, SIZE)[0].block_bytes

    def attach(device, host=0, disk=0, **sections):
        return tierkv.attach(
            model,
            {
                "block_size": SIZE,
                "device": {"capacity": device * block},
                "host": {"capacity": host * block},
                "disk": {"capacity": disk, "path": str(tmp_path)},
                **sections,
            },
        )

    return attach


def prompts(*lengths):
    draw = random.Random(0)
    return [[draw.randrange(3, 97) for _ in range(length)] for length in lengths]


def answer(model, ids, new_tokens, cache=None, **more):
    fed = torch.tensor([ids])
    how = {"do_sample": False, "max_new_tokens": new_tokens, "attention_mask": torch.ones_like(fed), **more}
    if cache is None:
        return type(model).generate(model, fed, **how)[0, len(ids) :].tolist()
    return model.generate(fed, cache=cache, **how)[0, len(ids) :].tolist()


def take_turns(model, histories, caches, new_tokens):
    """Let every cache take a turn and put it back to its history; return the answers."""
    answers = []
    for ids, cache in zip(histories, caches, strict=True):
        answers.append(answer(model, [*ids, 5, 6, 7], new_tokens, cache))
        cache.crop(len(ids) - cache.sequences.length)
    return answers


def moved_blocks(engine, before=None):
    size = engine.layout.block_bytes
    moved = {wire: num_bytes / size for wire, num_bytes in engine.stats().moved_bytes.items()}
    return {wire: count - (before or {}).get(wire, 0) for wire, count in moved.items()}


@pytest.mark.parametrize(("device", "host", "disk"), [(30, 0, 64 << 20), (30, 20, 64 << 20), (30, 100, 0), (120, 0, 0)])
@pytest.mark.parametrize("path", ["auto", "gathered"])
def test_conversations_that_take_turns_keep_their_tokens(model, attach, device, host, disk, path):
    histories = prompts(200, 30, 310, 64, 150, 250)
    expected = [answer(model, [*ids, 5, 6, 7], 6) for ids in histories]
    with attach(device + 40 * (path == "gathered"), host, disk, attention={"path": path}) as engine:
        caches = [engine.new_cache() for _ in histories]
        for ids, cache in zip(histories, caches, strict=True):
            answer(model, ids, 1, cache)
        for _ in range(3):
            assert take_turns(model, histories, caches, 6) == expected
        for tier in engine.stats().tiers.values():
            assert tier.peak_bytes <= tier.capacity_bytes


def test_a_refused_conversation_costs_the_others_nothing(model, attach):
    histories = prompts(100, 120)
    expected = [answer(model, [*ids, 5, 6, 7], 6) for ids in histories]
    with attach(24) as engine:
        caches = [engine.new_cache() for _ in histories]
        for ids, cache in zip(histories, caches, strict=True):
            answer(model, ids, 1, cache)
        before = moved_blocks(engine)
        late = engine.new_cache()
        with pytest.raises(CapacityError, match=r"the smallest device\.capacity that suffices"):
            answer(model, prompts(300)[0], 1, late)
        late.close()
        assert moved_blocks(engine) == before
        assert take_turns(model, histories, caches, 6) == expected


def test_a_prompt_that_is_there_already_needs_room_for_the_rest_only(model, attach):
    """32 blocks; 22 are taken, 20 of them by what both prompts begin with. The second needs 2 of the 10 free ones."""
    system, one, other = prompts(20 * SIZE, 12, 14)
    with attach(32) as engine:
        first, cache = engine.new_cache(), engine.new_cache()
        answer(model, system + one, 2, first)
        assert answer(model, system + other, 2, cache) == answer(model, system + other, 2)


def test_a_call_that_was_admitted_is_not_starved_by_one_that_comes_later(model, attach):
    """32 blocks. The first call may come to 20; while it is under way another is admitted that comes to 20 as well."""
    first, second = prompts(5 * SIZE, 19 * SIZE)
    refused: list[bool] = []

    class Meanwhile:
        """A streamer: calls of another thread come between two forwards just so."""

        def put(self, value):
            if not refused and value.numel() == 1:
                refused.append(False)
                try:
                    answer(model, second, SIZE, other)
                except CapacityError:
                    refused[0] = True

        def end(self):
            pass

    with attach(32) as engine:
        other = engine.new_cache()
        answer(model, first, 15 * SIZE, engine.new_cache(), streamer=Meanwhile())
        assert refused == [True]


def test_short_and_long_conversations_leave_the_scratch_alone(model, attach, monkeypatch):
    histories = prompts(200, 1500, 300, 1400)
    divided = []
    divide = Engine._divide

    def counted(self, plan):
        divided.append(plan)
        divide(self, plan)

    monkeypatch.setattr(Engine, "_divide", counted)
    with attach(200, 100, 64 << 20) as engine:
        caches = [engine.new_cache() for _ in histories]
        for ids, cache in zip(histories, caches, strict=True):
            answer(model, ids, 1, cache)
        divided.clear()
        take_turns(model, histories, caches, 2)
        assert not divided


def test_nothing_is_promoted_that_is_read_in_place(model, attach):
    """Without a GPU both tiers are RAM that attention reads alike: what moves up pushes as much down, for nothing."""
    histories = prompts(320, 320, 320, 320)
    with attach(40, 60) as engine:
        caches = [engine.new_cache() for _ in histories]
        for ids, cache in zip(histories, caches, strict=True):
            answer(model, ids, 1, cache)
        take_turns(model, histories, caches, 16)
        before = moved_blocks(engine)
        take_turns(model, histories, caches, 16)
        assert moved_blocks(engine, before)["host_to_device"] == 0


def test_a_conversation_that_comes_back_from_disk_is_read_once(model, attach):
    """80 blocks of device, less scratch, and two conversations of 30 blocks: each fits on the device by itself."""
    histories = prompts(30 * SIZE, 30 * SIZE)
    with attach(80, 0, 64 << 20) as engine:
        caches = [engine.new_cache() for _ in histories]
        for ids, cache in zip(histories, caches, strict=True):
            answer(model, ids, 1, cache)
        take_turns(model, histories, caches, 16)
        before = moved_blocks(engine)
        take_turns(model, histories, caches, 16)
        assert moved_blocks(engine, before)["disk_to_device"] <= 2 * 2 * 30


def test_a_shorter_call_leaves_a_longer_one_under_way_its_scratch(model, attach):
    """40 blocks. The first call was promised 20 and scratch for 320 tokens; the second comes to 5 blocks and ends."""
    first, second = prompts(5 * SIZE, 4 * SIZE)
    came: list[list[int]] = []

    class Meanwhile:
        """A streamer: calls of another thread come between two forwards just so."""

        def put(self, value):
            if not came and value.numel() == 1:
                came.append(answer(model, second, SIZE, other))

        def end(self):
            pass

    with attach(40, attention={"path": "gathered"}) as engine:
        other = engine.new_cache()
        answer(model, first, 15 * SIZE, engine.new_cache(), streamer=Meanwhile())
