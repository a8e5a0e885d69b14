"""What tune decides, on machines whose every time is known; and once, in tests/cli, on this one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tierkv.benchmarks.filled import smollm2_shapes
from tierkv.benchmarks.probe import Decode
from tierkv.benchmarks.probe_store import Restore
from tierkv.config import CacheConfig, load_config
from tierkv.config_toml import as_toml
from tierkv.cost import Costs, Line
from tierkv.errors import CapacityError
from tierkv.fit import DecodePoint, Fit, PrefillPoint, RestorePoint
from tierkv.tier import Tier, Wire
from tierkv.tune import QUICK, Goal, Tuned, Tuner
from tierkv.tune_contests import MARGIN, quick_quartile

pytest.importorskip("scipy")

TOKEN = 2 * 30 * 3 * 64 * 2
SPILL = Wire(Tier.DISK, Tier.DEVICE)
TRUTH = Fit(
    Costs(
        step_seconds=0.03, kv_bytes_per_second={Tier.DEVICE: 8e9, Tier.HOST: 8e9}, wires={SPILL: Line(1e-5, 2e9)}, overlap=0.3,
        token_seconds=1e-3, pair_seconds=1e-7, restore_seconds=4e-3, block_seconds=1e-5, stored_bytes_per_second=2e9,
    ),
    layers=30,
    raw_bytes_per_second=2e9,
)  # fmt: skip

GOAL = Goal(2048, 1)

Slower = Callable[[Mapping[str, Any], str], float]


@dataclass
class Machine:
    """A machine that takes the time that ``TRUTH`` says, times what ``slower`` says of the settings."""

    slower: Slower = lambda settings, what: 1.0
    write_seconds: Mapping[int, float] = field(default_factory=dict)
    asked: list[Any] = field(default_factory=list)

    def decode(
        self, wanted: Sequence[Decode], rounds: int, advance: Callable[[], None] = lambda: None
    ) -> list[DecodePoint]:
        assert rounds > 0
        self.asked += wanted
        found = []
        for one in wanted:
            kv_bytes, size = one.context * TOKEN, int(one.settings["block_size"])
            cold = {"device": 0, "host": kv_bytes * 3 // 4, "disk": kv_bytes * 3 // 4}[one.residency]
            lying = {Tier.DEVICE: kv_bytes - cold, Tier[one.residency.upper()]: cold or kv_bytes}
            point = DecodePoint(lying, size * TOKEN, 0.0)
            found.append(replace(point, seconds=TRUTH.seconds(point) * self.slower(one.settings, one.residency)))
            advance()
        return found

    def prefill(self, wanted: Sequence[tuple[int, int]], rounds: int) -> list[PrefillPoint]:
        assert rounds > 0
        points = [PrefillPoint(tokens, past, 0.0) for tokens, past in wanted]
        return [replace(point, seconds=TRUTH.seconds(point)) for point in points]

    def restore(self, wanted: Sequence[Restore], rounds: int) -> list[RestorePoint]:
        assert rounds > 0
        self.asked += wanted
        found = []
        for one in wanted:
            size = int(one.settings["block_size"])
            point = RestorePoint(one.tokens // size, size * TOKEN, 2e9, 0.0)
            found.append(replace(point, seconds=TRUTH.seconds(point) * self.slower(one.settings, "restore")))
        return found

    def write(self, wanted: Sequence[Restore], rounds: int) -> list[float]:
        assert rounds > 0
        return [self.write_seconds.get(one.settings["disk.write_batch"], 0.2) for one in wanted]


@pytest.fixture(scope="module")
def model():
    return smollm2_shapes("bfloat16")


def tuned(model, machine: Machine, folder: Path, start: Mapping[str, Any] | None = None, goal: Goal = GOAL) -> Tuned:
    config = load_config({"disk": {"path": str(folder)}, **(start or {})}, environ={})
    tuner = Tuner(model, config, goal, QUICK, folder, lambda _: None, probe=machine, store=machine)  # type: ignore[arg-type]
    return tuner.run()


def readers_matter(settings: Mapping[str, Any], what: str) -> float:
    return {1: 1.5, 2: 1.0, 4: 0.8}[settings["disk.readers"]] if what == "disk" else 1.0


def test_a_machine_on_which_nothing_matters_keeps_every_default(model, tmp_path):
    found = tuned(model, Machine(), tmp_path, {"block_size": 64})
    default = CacheConfig()
    for key in ("disk.readers", "transfer.layers_ahead", "attention.cold_read", "disk.write_batch", "prefix.eviction"):
        assert found.config.value(key) == default.value(key), key
    assert found.config.block_size == 64


def test_a_value_that_clearly_wins_is_chosen_and_says_so(model, tmp_path):
    found = tuned(model, Machine(readers_matter), tmp_path)
    assert found.config.disk.readers == 4
    assert "2: +" in found.reasons["disk.readers"]


def test_a_win_within_the_margin_is_none(model, tmp_path):
    machine = Machine(lambda settings, what: 1 - MARGIN * 0.9 * (settings["disk.readers"] == 4))
    assert tuned(model, machine, tmp_path).config.disk.readers == 2


def test_a_value_that_wins_on_the_whole_and_spoils_restores_is_not_chosen(model, tmp_path):
    def slower(settings: Mapping[str, Any], what: str) -> float:
        return (2.0 if what == "restore" else 0.5) if settings["disk.readers"] == 4 else 1.0

    assert tuned(model, Machine(slower), tmp_path).config.disk.readers == 2


def test_a_win_that_does_not_repeat_is_none(model, tmp_path):
    seen: list[int] = []

    def slower(settings: Mapping[str, Any], what: str) -> float:
        if settings["disk.readers"] != 4 or what != "disk":
            return 1.0
        seen.append(1)
        return 0.5 if len(seen) == 1 else 1.0

    assert tuned(model, Machine(slower), tmp_path).config.disk.readers == 2
    assert len(seen) == 2


def test_the_model_proposes_the_block_sizes_that_meet(model, tmp_path):
    # Records cost 10 us each: large blocks have fewer. 2,048 tokens allow blocks of 64 at most.
    found = tuned(model, Machine(), tmp_path, {"block_size": 16})
    contest = next(one for one in found.contests if one["key"] == "block_size")
    assert list(contest["predicted_seconds"]) == ["16", "32", "64"]
    assert contest["predicted_seconds"]["64"] < contest["predicted_seconds"]["16"]
    assert found.config.block_size == 64


def test_a_bad_start_is_left_behind(model, tmp_path):
    def slower(settings: Mapping[str, Any], what: str) -> float:
        return readers_matter(settings, what) * (
            1.3 if settings["transfer.layers_ahead"] == 0 and what == "disk" else 1.0
        )

    bad = {"block_size": 16, "disk": {"readers": 1, "path": str(tmp_path)}, "transfer": {"layers_ahead": 0}}
    found = tuned(model, Machine(slower), tmp_path, bad)
    assert (found.config.block_size, found.config.disk.readers) == (64, 4)
    assert found.config.transfer.layers_ahead != 0


def test_verify_runs_one_configuration_once_and_two_in_turns(model, tmp_path):
    for machine, changed in ((Machine(), False), (Machine(readers_matter), True)):
        config = load_config({"disk": {"path": str(tmp_path)}, "block_size": 64}, environ={})
        tuner = Tuner(model, config, GOAL, QUICK, tmp_path, lambda _: None, probe=machine, store=machine)  # type: ignore[arg-type]
        found = tuner.run()
        machine.asked.clear()
        rows = tuner.verify(found)
        assert len(machine.asked) == (6 if changed else 3)
        assert [row["what"] for row in rows] == ["a token, KV on device", "a token, KV on disk", "a restore"]
        assert [row["ratio"] for row in rows] == pytest.approx([1.0, 0.8 if changed else 1.0, 1.0], abs=1e-3)


def test_values_that_cannot_run_here_leave_what_was_there(model, tmp_path):
    class Small(Machine):
        def decode(
            self, wanted: Sequence[Decode], rounds: int, advance: Callable[[], None] = lambda: None
        ) -> list[DecodePoint]:
            if any(one.settings["attention.cold_read"] == "stream" for one in wanted):
                raise CapacityError("no room for buffers")
            return super().decode(wanted, rounds, advance)

    found = tuned(model, Small(), tmp_path)
    assert found.config.attention.cold_read == "auto"
    assert "no room for buffers" in found.reasons["attention.cold_read"]


@pytest.mark.parametrize(("seconds", "policy"), [(0.01, "always"), (60.0, "second_sighting")])
def test_every_prefix_is_written_only_where_the_disk_keeps_up(model, tmp_path, seconds, policy):
    found = tuned(model, Machine(write_seconds=dict.fromkeys((4, 16, 64), seconds)), tmp_path)
    assert found.config.prefix.write_policy == policy


def test_a_prefix_is_worth_keeping_from_where_a_restore_takes_less_than_computing(model, tmp_path):
    found = tuned(model, Machine(), tmp_path)
    tokens, size = found.config.prefix.min_tokens, found.config.block_size
    restore = TRUTH.seconds(RestorePoint(tokens // size, size * TOKEN, 2e9, 0.0))
    assert restore < TRUTH.seconds(PrefillPoint(tokens, 0, 0.0))
    before = tokens - size
    if before:
        assert TRUTH.seconds(RestorePoint(before // size, size * TOKEN, 2e9, 0.0)) >= TRUTH.seconds(
            PrefillPoint(before, 0, 0.0)
        )


def test_the_device_tier_holds_the_goal_where_memory_allows(model, tmp_path):
    one, two = (tuned(model, Machine(), tmp_path, goal=Goal(2048, count)).config.device.capacity for count in (1, 2))
    assert one.size_bytes >= 2048 * TOKEN
    assert two.size_bytes - one.size_bytes == pytest.approx(2048 * TOKEN * 1.15, rel=0.1)


def test_the_file_says_why_and_reads_back_equal(model, tmp_path):
    found = tuned(model, Machine(readers_matter), tmp_path)
    text = as_toml(found.config, found.reasons)
    for key in found.reasons:
        assert found.config.is_explicit(key)
    assert text.count("# Why: ") == len(found.reasons) >= 12
    path = tmp_path / "tierkv.toml"
    path.write_text(text, encoding="utf-8")
    assert load_config(path, environ={}) == found.config


def test_the_quick_quartile_does_not_see_the_slow_ones():
    assert quick_quartile([5.0, 1.0, 1.1, 9.0, 7.0]) == 1.1
    assert quick_quartile([3.0]) == 3.0
