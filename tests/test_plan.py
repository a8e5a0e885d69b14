"""Bytes, placement, sessions and advice of a plan: exact where it is arithmetic, consistent where it is an estimate."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.architecture import find_architecture
from tierkv.errors import CapacityError, ConfigError
from tierkv.hardware import find_profile
from tierkv.plan import Ask, make_plan
from tierkv.plan_memory import Mix, Placement, default_budgets, place, read_bytes, sessions_held
from tierkv.sizes import parse_size
from tierkv.tier import Tier

LLAMA = find_architecture("llama-3.1-8b")
H100 = find_profile("h100")
GIB = 2**30


def plan(name="llama-3.1-8b", **options):
    budgets = {Tier[tier.upper()]: parse_size(size) for tier, size in options.pop("budgets", {}).items()}
    if isinstance(options.get("profile"), str):
        options["profile"] = find_profile(options["profile"])
    return make_plan(Ask(architecture=find_architecture(name), budgets=budgets, **options))


def test_the_essay_and_the_truth():
    options = {"context": 4096, "batch": 10, "dtype": "float16"}
    essay = plan("llama-2-70b", assume_mha=True, **options)
    assert essay["bytes_per_request"] == 10_737_418_240
    assert essay["bytes_total"] == 107_374_182_400
    true = plan("llama-2-70b", **options)
    assert true["bytes_per_request"] == 1_342_177_280
    assert true["bytes_per_token"] == 327_680
    for text in (essay["why"], true["why"]):
        assert "10.74 GB" in text
        assert "1.34 GB" in text
        assert "8 KV heads" in text
        assert "64 query heads" in text
        assert "8x" in text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama-2-7b", ["as the multi-head formula has it", "32 query heads"]),
        ("deepseek-v3", ["one latent vector of 512 + 64 numbers", "128 query heads"]),
    ],
)
def test_why_for_other_kinds_of_attention(name, words):
    for word in words:
        assert word in plan(name, context=4096)["why"]


def test_without_a_machine_there_are_only_bytes():
    found = plan(context=8192)
    assert found["bytes_per_token"] == 131_072
    assert found["blocks_per_request"] == 256
    for key in ("budgets", "fits", "sessions_held", "estimates", "restore_seconds", "advice", "profile"):
        assert found[key] is None
    assert any("--profile" in note for note in found["notes"])
    json.dumps(found, allow_nan=False)


def test_budgets_without_a_machine_say_what_fits():
    found = plan(context=8192, batch=3, budgets={"device": "2GiB", "host": "512MiB"})
    assert found["fits"] == {
        "device": {"blocks": 512, "bytes": 2 * GIB},
        "host": {"blocks": 128, "bytes": GIB // 2},
        "disk": {"blocks": 0, "bytes": 0},
        "missing": {"blocks": 128, "bytes": GIB // 2},
        "everything": False,
    }
    assert found["budgets"] == {"device": 2 * GIB, "host": GIB // 2, "disk": None}
    assert found["estimates"] is None


def test_a_machine_has_memory_less_weights_and_a_reserve():
    budgets = default_budgets(H100, LLAMA, "bfloat16")
    memory = 84_900_000_000
    assert budgets[Tier.DEVICE] == memory - 16_060_522_496 - memory // 10
    assert budgets[Tier.HOST] == 2_000_000_000_000
    two = default_budgets(H100, LLAMA, "bfloat16", 2)
    assert two[Tier.DEVICE] == 2 * memory - 16_060_522_496 - 2 * memory // 10


def test_everything_on_the_device():
    found = plan(context=8192, batch=4, profile="h100")
    assert found["fits"]["everything"]
    assert set(found["estimates"]) == {"device", "stream", "compute"}
    fast = found["estimates"]["device"]
    assert fast["read_bytes"] == {"device": found["bytes_total"], "host": 0, "disk": 0}
    assert fast["inter_token_seconds"] == pytest.approx(6.44e-3 + 4 * GIB / 3.015e12, rel=0.01)
    assert fast["tokens_per_second"] == pytest.approx(4 / fast["inter_token_seconds"])
    assert fast["bottleneck"] == "weights and launches"
    assert sum(fast["terms"].values()) == pytest.approx(fast["inter_token_seconds"])
    assert sum(fast["ttft_terms"].values()) == pytest.approx(fast["ttft_seconds"])


def test_cold_kv_is_read_in_two_ways_and_the_bottleneck_is_named():
    found = plan(context=131_072, batch=4, profile="h100", budgets={"device": "40GiB"})
    stream, compute = found["estimates"]["stream"], found["estimates"]["compute"]
    assert "device" not in found["estimates"]
    assert stream["read_bytes"] == {"device": 40 * GIB, "host": 24 * GIB, "disk": 0}
    assert stream["bottleneck"] == "copies from host"
    assert compute["bottleneck"] == "attention in host memory"
    # 24 GiB at 250 GB/s, of which the device's 40 GiB at 3 TB/s hide 14 ms.
    assert compute["inter_token_seconds"] == pytest.approx(0.111, rel=0.02)
    assert stream["tokens_per_second"] < compute["tokens_per_second"]


def test_a_machine_that_cannot_attend_in_host_memory_only_streams():
    profile = H100.model_copy(update={"host": H100.host.model_copy(update={"read_efficiency": None})})
    found = plan(context=131_072, batch=4, profile=profile, budgets={"device": "40GiB"})
    assert set(found["estimates"]) == {"stream"}


def test_the_first_token_of_a_batch_is_one_forward_of_all_its_tokens():
    one, four = (
        plan("llama-3.1-8b", context=16, batch=batch, profile="h100")["estimates"]["device"] for batch in (1, 4)
    )
    assert one["ttft_bottleneck"] == four["ttft_bottleneck"] == "reading weights"
    assert four["ttft_terms"]["reading weights"] == one["ttft_terms"]["reading weights"]
    long = plan("llama-3.1-8b", context=4096, batch=4, profile="h100")["estimates"]["device"]
    assert long["ttft_bottleneck"] == "arithmetic"
    assert long["ttft_terms"]["launches"] == 1.96e-3


def test_kv_that_moves_to_disk_during_the_prefill_may_hold_it_up():
    slow = plan(context=1024, batch=64, profile="h100", budgets={"device": "256MiB", "host": "0", "disk": "100GiB"})
    first = slow["estimates"]["stream"]
    assert slow["fits"]["disk"]["blocks"] == 64 * 32 - 64
    assert first["ttft_terms"]["copies down"] == 0  # 16 GB/s are faster than computing
    small = plan("smollm2-135m", context=1024, batch=1024, profile="laptop", budgets={"device": "2GiB"})
    assert small["fits"]["disk"]["blocks"] > 0
    assert small["estimates"]["stream"]["ttft_terms"]["copies down"] > 0


def test_what_does_not_fit_has_no_times_and_says_what_would_help():
    small = plan(context=131_072, batch=4, profile="h100", budgets={"device": "40GiB", "host": "12GiB", "disk": "0"})
    assert small["estimates"] == {}
    assert not small["fits"]["everything"]
    assert small["advice"]["best"]["change"] == "twice the device memory"
    assert "does not fit" in small["advice"]["sentence"]
    disk = plan(context=131_072, batch=4, profile="h100", budgets={"device": "8GiB", "host": "0", "disk": "30GiB"})
    assert disk["advice"]["best"]["change"] == "twice the disk capacity"
    assert "twice the disk capacity would hold it" in disk["advice"]["sentence"]
    none = plan(context=131_072, batch=99, profile="h100", budgets={"device": "4GiB", "host": "0", "disk": "0"})
    assert none["advice"]["best"] is None
    assert "nor would it" in none["advice"]["sentence"]


def test_a_row_without_a_block_of_its_own_on_the_device_cannot_run():
    layout = LLAMA.layout(32, "bfloat16")
    three = {Tier.DEVICE: 3 * layout.block_bytes, Tier.HOST: 100 * layout.block_bytes}
    assert place(three, layout, 4, 320) == Placement({Tier.DEVICE: 3, Tier.HOST: 27, Tier.DISK: 0}, 10)
    assert sessions_held(three, LLAMA, layout, 320, Mix(320), 4)["tiered"] == 0


def test_advice_names_the_change_with_the_largest_gain():
    found = plan(context=131_072, batch=4, profile="h100", budgets={"device": "40GiB"})["advice"]
    gains = {one["change"]: one["gain"] for one in found["options"]}
    assert found["best"]["gain"] == max(gains.values())
    assert found["best"]["change"] == "twice the device memory"
    assert f"{found['best']['gain']:.2f}x" in found["sentence"]
    # Attention in host memory is bound by that memory alone.
    assert gains["twice the host bandwidth"] > 1.5
    assert gains["twice the bandwidth to the host"] == 1
    assert gains["twice the disk bandwidth"] == 1
    assert all(gain >= 1 for gain in gains.values())


def test_advice_on_a_machine_without_a_gpu_knows_no_host():
    found = plan("smollm2-135m", context=8192, profile="laptop")["advice"]
    assert not [one for one in found["options"] if "host" in one["change"]]
    assert found["best"]["change"] == "twice the device bandwidth"


def test_restore_against_recompute():
    found = plan(context=100_000, profile="h100")
    assert found["restored_tokens"] == 100_000
    assert found["recompute_seconds"] == pytest.approx(6.85, rel=0.03)
    assert found["restore_seconds"]["host"] == pytest.approx(0.31, rel=0.05)  # as vLLM published
    even = found["break_even_bytes_per_second"]
    assert even == pytest.approx(131_072 * 100_000 / found["recompute_seconds"])
    assert even == pytest.approx(1.9e9, rel=0.02)
    assert found["worth_restoring"] == {"host": True, "disk": True}


def test_a_slow_disk_is_not_worth_it():
    slow = H100.disk_to_host.bytes_per_second.model_copy(update={"value": 1.8e9})
    profile = H100.model_copy(update={"disk_to_host": H100.disk_to_host.model_copy(update={"bytes_per_second": slow})})
    found = plan(context=100_000, profile=profile)
    assert found["worth_restoring"] == {"host": True, "disk": False}
    assert found["break_even_bytes_per_second"] > 1.8e9


def test_less_than_a_block_is_not_restored():
    found = plan(context=20, profile="h100")
    assert found["restore_seconds"] == {"host": None, "disk": None}
    assert found["restored_tokens"] == 0


def test_sessions_held_three_ways():
    layout = LLAMA.layout(32, "bfloat16")
    budgets = {Tier.DEVICE: 64 * GIB, Tier.HOST: 128 * GIB, Tier.DISK: 256 * GIB}
    held = sessions_held(budgets, LLAMA, layout, 16_384, Mix(4090), 1)
    assert held["contiguous"] == 32  # 2 GiB each
    assert held["mean_blocks"] == 128
    assert held["last_block_waste"] == round(1 - 4090 / 4096, 4)
    assert held["paged"] == 128
    assert held["tiered"] == 128 * 7


def test_a_spread_of_lengths_is_cut_off_at_the_context():
    lengths = Mix(4096, 0.8).lengths(16_384)
    assert max(lengths) == 16_384
    assert min(lengths) >= 1
    assert sum(lengths) / len(lengths) == pytest.approx(4096, rel=0.03)
    assert Mix(4096, 0.8).lengths(10**9) == sorted(Mix(4096, 0.8).lengths(10**9))
    assert Mix(9, 0.0).lengths(5) == [5]


def test_windows_are_read_where_they_lie():
    """The recent blocks are on the device; a window that fits them reads nothing cold."""
    model = find_architecture("gpt-oss-20b")
    rows, tokens = 2, 4096
    placement = Placement({Tier.DEVICE: 20, Tier.HOST: 200, Tier.DISK: 36}, 0)
    found = read_bytes(model, "bfloat16", tokens, placement, rows, 32)
    each = 8 * 128 * 2
    assert found[Tier.HOST] == 200 * 32 * 12 * each
    assert found[Tier.DISK] == 36 * 32 * 12 * each
    assert found[Tier.DEVICE] == 20 * 32 * 12 * each + rows * 128 * 12 * each
    assert sum(found.values()) == rows * model.kv_bytes_read(tokens, "bfloat16")


def test_tierkv_keeps_whole_blocks_of_layers_with_a_window_and_says_so():
    found = plan("gpt-oss-20b", context=65_536, profile="h100")
    assert found["bytes_per_request"] < found["blocks_per_request"] * found["block_bytes"]
    assert found["fits"]["device"]["bytes"] == found["blocks_per_request"] * found["block_bytes"]
    assert any("whole blocks" in note for note in found["notes"])


def test_notes_say_what_a_reader_must_know():
    assert any("made for 4,096 tokens" in note for note in plan("llama-2-7b", context=8192)["notes"])
    assert not [note for note in plan("llama-2-7b", context=4096)["notes"] if "made for" in note]
    odd = replace(LLAMA, weights=replace(LLAMA.weights, unknown_quantization="torchao"))
    found = make_plan(Ask(architecture=odd, context=64))["notes"]
    assert any("quantisation 'torchao'" in note and "weights count as bfloat16" in note for note in found)
    bare = H100.model_copy(update={"device": H100.device.model_copy(update={"float64_flops_per_second": None})})
    for profile, count in ((H100, 0), (bare, 1)):
        found = plan("smollm2-135m", context=64, dtype="float64", profile=profile)["notes"]
        assert sum("no figure for float64" in note for note in found) == count
    two = plan("llama-3.1-70b", context=4096, profile="h100", devices=2)
    assert any("not counted" in note for note in two["notes"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budgets": {"device": "70GiB"}}, ["--device-budget 70GiB", "h100 has 79.06GiB", "leave 64.11GiB"]),
        ({"budgets": {"device": "1MiB"}}, ["holds no block", "4MiB", "--block-size"]),
        ({"budgets": {"host": "500TiB"}}, ["--host-budget 500TiB", "not possible", "h100 has 1.81TiB"]),
        ({"budgets": {"disk": "15TiB"}}, ["--disk-budget 15TiB", "h100 has 13.96TiB"]),
        ({"name": "llama-3.1-70b"}, ["--devices 2"]),
        ({"profile": "rtx4090", "name": "gemma-2-9b", "dtype": "float32"}, ["--devices 2"]),
    ],
)
def test_what_does_not_fit_the_machine(options, words):
    with pytest.raises(CapacityError) as caught:
        plan(**{"context": 4096, "profile": "h100", **options})
    for word in words:
        assert word in str(caught.value)


def test_weights_that_leave_only_the_reserve_need_an_explicit_budget():
    tight = H100.device.model_copy(
        update={"memory_bytes": H100.device.memory_bytes.model_copy(update={"value": 17 * 10**9})}
    )
    profile = H100.model_copy(update={"device": tight})
    with pytest.raises(CapacityError, match=r"the reserve of 10% of h100; use --devices 2.*--device-budget"):
        plan(context=4096, profile=profile)
    assert plan(context=4096, profile=profile, budgets={"device": "800MiB"})["fits"]["everything"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budgets": {"host": "4GiB"}, "profile": "laptop", "name": "smollm2-135m"}, ["--host-budget", "no host tier"]),
        ({"budgets": {"device": "40%"}, "profile": None}, ["--device-budget 40%", "--profile"]),
        ({"budgets": {"host": "4GiB"}, "profile": None}, ["--host-budget", "--device-budget", "--profile"]),
        ({"budgets": {"disk": "4GiB"}, "profile": None}, ["--disk-budget", "--device-budget", "--profile"]),
        ({"context": 0}, ["context = 0", "from 1 up"]),
        ({"batch": -1}, ["batch = -1"]),
        ({"devices": 0}, ["devices = 0"]),
    ],
)
def test_impossible_questions(options, words):
    with pytest.raises(ConfigError) as caught:
        plan(**{"context": 4096, "profile": "h100", **options})
    for word in words:
        assert word in str(caught.value)


def test_a_share_is_one_of_what_the_machine_has():
    found = plan(context=4096, profile="h100", budgets={"host": "50%", "device": "50%"})
    assert found["budgets"]["host"] == 10**12
    assert found["budgets"]["device"] == (84_900_000_000 - 16_060_522_496) // 2


@given(
    st.sampled_from(["llama-3.1-8b", "gpt-oss-20b", "gemma-3-27b", "deepseek-v3"]),
    st.integers(1, 200_000),
    st.integers(1, 40),
    st.tuples(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000)),
)
def test_every_block_has_one_place_and_every_byte_is_read_once(name, tokens, rows, slots):
    model = find_architecture(name)
    layout = model.layout(64, "bfloat16")
    budgets = {tier: count * layout.block_bytes + 1 for tier, count in zip(Tier, slots, strict=True)}
    found = place(budgets, layout, rows, tokens)
    assert sum(found.blocks.values()) + found.missing == rows * layout.blocks_for(tokens)
    assert all(found.blocks[tier] <= count for tier, count in zip(Tier, slots, strict=True))
    if not found.missing:
        read = read_bytes(model, "bfloat16", tokens, found, rows, 64)
        assert sum(read.values()) == pytest.approx(rows * model.kv_bytes_read(tokens, "bfloat16"))
        assert all(size >= 0 for size in read.values())


@given(st.integers(1, 300_000), st.integers(1, 64), st.sampled_from(["1GiB", "20GiB", "60GiB"]))
def test_plans_are_json_and_more_is_never_slower(context, batch, device):
    found = make_plan(
        Ask(architecture=LLAMA, context=context, batch=batch, profile=H100, budgets={Tier.DEVICE: parse_size(device)})
    )
    json.dumps(found, allow_nan=False)
    for one in found["advice"]["options"]:
        assert one["gain"] is None or one["gain"] >= 1 - 1e-9
