"""The rest of ``bench scenarios``: a token's time against its context, and whether a sequence finds a place."""

import random

import pytest
import torch

from tierkv.benchmarks import scenarios_decode, scenarios_fragmentation
from tierkv.benchmarks.filled import layout_of, smollm2_shapes
from tierkv.benchmarks.scenarios_decode import exponent, line, times_faster
from tierkv.benchmarks.scenarios_fragmentation import FirstFit
from tierkv.benchmarks.scenarios_record import headlines, intact, summary
from tierkv.layout import BlockLayout, LayerSpec
from tierkv.sequences import SequenceBatch

LAYOUT = BlockLayout(tuple(LayerSpec(index, 2, 8, 4) for index in range(3)), 32, "float32")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- a line through points ------------------------------------------------------------------------------------------------


def test_a_line_is_found_again():
    found = line([1, 2, 3, 10], [5.5, 6.0, 6.5, 10.0])
    assert found == pytest.approx({"slope": 0.5, "intercept": 5.0, "r2": 1.0})
    assert line([1, 2, 3], [2.0, 2.0, 2.0])["r2"] == 1.0


def test_r2_says_what_the_line_leaves():
    # By hand: slope 0.5, intercept 1/3; what is left is 1/6 of 2/3.
    found = line([0, 1, 2], [0.0, 1.0, 1.0])
    assert found == pytest.approx({"slope": 0.5, "intercept": 1 / 6, "r2": 0.75})


@pytest.mark.parametrize("xs", [[], [1, 2], [5, 5, 5]])
def test_too_few_points_make_no_line(xs):
    with pytest.raises(ValueError, match="three points or more"):
        line(xs, [1.0] * len(xs))


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_an_exponent_is_found_again(power):
    assert exponent([128, 256, 512, 4096], [3 * n**power for n in (128, 256, 512, 4096)]) == pytest.approx(power)


def test_lengths_that_both_have_are_compared():
    cached = {"points": [{"context": 512, "seconds": 0.1}, {"context": 900, "seconds": 0.2}]}
    again = {"points": [{"tokens": 256, "seconds": 1.0}, {"tokens": 512, "seconds": 2.0}]}
    assert times_faster(cached, again) == {"512": pytest.approx(20.0)}


@pytest.mark.slow
def test_a_token_is_timed_with_a_cache_and_without(tmp_path):
    model = smollm2_shapes("float32")
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    advanced: list[int] = []
    found = scenarios_decode.with_cache(model, (64, 128, 256), 3, tmp_path, lambda: advanced.append(1))
    assert len(advanced) == 3 + 3
    assert [point["context"] for point in found["points"]] == [64, 128, 256]
    assert all(point["seconds"] > 0 for point in found["points"])
    assert "synthetic" in found["fill"]
    again = scenarios_decode.without_cache(model, (32, 64, 128), 3, lambda: advanced.append(1))
    assert len(advanced) == 6 + 3
    assert again["points"][-1]["seconds"] > 0
    found["without_cache"] = again
    said = headlines(summary({}, None, found, None))
    assert said[0].startswith("With the cache a token takes ")
    assert not list(tmp_path.iterdir())


# -- one piece each -------------------------------------------------------------------------------------------------------


def test_the_founding_script_finds_no_place():
    rows = FirstFit(12288)
    assert [rows.place(name, size) for name, size in {"A": 4096, "B": 2048, "C": 4096}.items()] == [0, 4096, 6144]
    rows.release("A")
    assert (rows.free, rows.largest_run) == (6144, 4096)
    assert rows.place("D", 8192) is None
    assert rows.place("D", 6144) is None  # enough is free, and not in one piece
    assert rows.place("D", 2048) == 0  # the first hole, not the one that fits best


def test_neighbouring_holes_become_one():
    rows = FirstFit(40)
    for name in "abcd":
        rows.place(name, 10)
    rows.release("a")
    rows.release("c")
    assert (rows.free, rows.largest_run) == (20, 10)
    rows.release("b")
    assert rows.largest_run == 30
    rows.release("d")
    assert rows.place("all", 40) == 0
    assert (rows.free, rows.largest_run) == (0, 0)


def test_names_are_placed_once_and_released_once():
    rows = FirstFit(10)
    rows.place("a", 5)
    for name, size in (("a", 1), ("b", 0)):
        with pytest.raises(ValueError, match="a place already, or asks for nothing"):
            rows.place(name, size)
    rows.release("a")
    with pytest.raises(KeyError):
        rows.release("a")


def test_first_fit_is_what_looking_at_every_token_finds():
    draw, size = random.Random(0), 60
    rows, cells = FirstFit(size), [""] * size
    for step in range(2000):
        there = sorted(set(cells) - {""})
        if there and draw.random() < 0.5:
            name = draw.choice(there)
            rows.release(name)
            cells = ["" if cell == name else cell for cell in cells]
        else:
            want = draw.randint(1, 20)
            first = next((at for at in range(size - want + 1) if not any(cells[at : at + want])), None)
            assert rows.place(f"s{step}", want) == first
            if first is not None:
                cells[first : first + want] = [f"s{step}"] * want
        assert rows.free == cells.count("")
        runs = "".join("." if not cell else "#" for cell in cells).split("#")
        assert rows.largest_run == max(map(len, runs))


# -- the same on an engine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1 / 8, 1 / 32])
def test_blocks_and_tiers_find_the_place(factor):
    found = scenarios_fragmentation.run(LAYOUT, factor)
    placed = {name: one["placed"] for name, one in found["variants"].items()}
    assert placed == {
        "enough_is_free": {"contiguous": False, "paged": True, "tiered": True},
        "too_little_is_free": {"contiguous": False, "paged": False, "tiered": True},
        "all_that_is_free": {"contiguous": False, "paged": True, "tiered": True},
    }
    for one in found["variants"].values():
        assert one["paged"]["free_tokens"] == one["free_tokens"]  # the pool is exactly as large
        assert one["largest_run_tokens"] < one["tokens"]["D"]
    assert found["variants"]["too_little_is_free"]["free_tokens"] == round(6144 * factor)
    scattered = found["variants"]["enough_is_free"]["paged"]
    assert (scattered["runs"], scattered["intact"]) == (2, True)  # where A was, and behind C
    assert "the tiers hold" in found["variants"]["too_little_is_free"]["paged"]["refused"]
    assert intact(found)
    said = headlines(summary({}, None, None, found))[0]
    assert said.count("placed by tiered") == 1
    assert said.count("placed by paged and tiered") == 2


def test_what_comes_back_otherwise_is_noticed(monkeypatch):
    real = SequenceBatch.read

    def wrong(self, layer):
        keys, values = real(self, layer)
        return keys, values + 1

    monkeypatch.setattr(SequenceBatch, "read", wrong)
    assert not intact(scenarios_fragmentation.run(LAYOUT, 1 / 64))


def test_what_it_takes_is_known_before():
    layout = layout_of(smollm2_shapes("bfloat16"))
    assert scenarios_fragmentation.needed_bytes(layout, 1 / 8) < scenarios_fragmentation.needed_bytes(layout)
    assert scenarios_fragmentation.needed_bytes(layout) < 100 << 20
