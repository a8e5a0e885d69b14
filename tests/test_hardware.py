"""Shipped profiles against published measurements, and what is said about files that cannot be used."""

from dataclasses import fields

import pytest

from tierkv.architecture import find_architecture
from tierkv.cost import CostModel, Costs, Line
from tierkv.errors import CapacityError, ConfigError
from tierkv.hardware import PROFILES, check_weights_fit, costs, devices_for, figures, find_profile
from tierkv.hardware_profile import Measured
from tierkv.tier import Tier, Wire

LLAMA = find_architecture("llama-3.1-8b")
FIGURE = '{ value = 1000, source = "x" }'
DEVICE = "\n".join(
    [
        "[device]",
        *(
            f"{name} = {FIGURE}"
            for name in ("memory_bytes", "memory_bytes_per_second", "flops_per_second", "step_seconds")
        ),
        *(f'{name} = {{ value = 0.5, source = "x" }}' for name in ("read_efficiency", "compute_efficiency", "overlap")),
    ]
)
MEASURED = """
[measured]
model = "llama-3.1-8b"
dtype = "bfloat16"
layers = 32
block_bytes = 4194304
step_seconds = 0.5
token_seconds = 0.25
stored_bytes_per_second = 9.0
kv_bytes_per_second = { device = 7.0 }
wires = { disk_to_device = { latency_seconds = 0.125, bytes_per_second = 3.0 } }
"""


def model(profile="h100", architecture=LLAMA, dtype="bfloat16", **options):
    layout = architecture.layout(512, dtype)
    found = costs(find_profile(profile), architecture, dtype, **options)
    return CostModel(found, architecture.kv_layers, layout.block_bytes, layout.block_size)


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return str(path)

    return write


def test_the_profiles_are_there():
    assert set(PROFILES) >= {"a100", "h100", "h200", "laptop", "rtx4090"}


@pytest.mark.parametrize("name", PROFILES)
def test_every_figure_of_a_shipped_profile_has_a_source(name):
    profile = find_profile(name)
    assert profile.name == name

    found = figures(profile)
    assert len(found) >= 10
    assert all(len(source) > 5 and value >= 0 for _, value, source in found)
    assert "device.memory_bytes" in {figure for figure, _, _ in found}
    assert find_profile(name.upper()) == profile


@pytest.mark.parametrize(("tokens", "seconds"), [(10_000, 0.27), (20_000, 0.64), (50_000, 2.3), (100_000, 6.85)])
def test_prefill_on_the_h100_is_what_vllm_published(tokens, seconds):
    """Llama-3.1-8B: one share of the peak explains all four, though attention grows from 15 % of the time to two thirds."""
    assert model().prefill(tokens).seconds == pytest.approx(seconds, rel=0.07)


def test_decode_on_the_h100_is_what_vllm_published():
    """6.44 ms and 4.37e-8 s for each token of context."""
    for tokens in (1, 32_768, 131_072):
        read = {Tier.DEVICE: LLAMA.kv_bytes_read(tokens, "bfloat16")}
        assert model().decode(read).seconds == pytest.approx(6.44e-3 + tokens * 4.37e-8, rel=0.01)


@pytest.mark.parametrize(("cold", "rate"), [(1.0, 13.1), (0.5, 23.9), (0.25, 40.7)])
def test_attention_in_host_memory_is_bound_by_it(cold, rate):
    """The bound of the field's roofline, max(device, host) and 30 us a layer, at 131,072 tokens."""
    read = LLAMA.kv_bytes_read(131_072, "bfloat16")
    where = {Tier.DEVICE: (1 - cold) * read, Tier.HOST: cold * read}
    assert 1 / model().decode(where, read="compute").seconds == pytest.approx(rate, rel=0.03)


def test_copies_reach_what_the_link_gives_in_pieces_of_a_mebibyte():
    """44.3 GB/s were measured for pieces of 1 MB."""
    whole = LLAMA.kv_bytes(131_072, "bfloat16")
    seconds = model().decode({Tier.HOST: whole}).terms["copies from host"]
    computing = model().decode({Tier.DEVICE: whole}).seconds
    assert whole / (seconds + computing) == pytest.approx(44.3e9, rel=0.03)


def test_more_devices_share_the_work():
    one, four = model(), model(devices=4)
    fixed = find_profile("h100").device.step_seconds.value
    assert four.costs.step_seconds - fixed == pytest.approx((one.costs.step_seconds - fixed) / 4)
    assert four.costs.token_seconds == pytest.approx(one.costs.token_seconds / 4)
    assert four.costs.kv_bytes_per_second[Tier.DEVICE] == 4 * one.costs.kv_bytes_per_second[Tier.DEVICE]
    up = Wire(Tier.HOST, Tier.DEVICE)
    assert four.costs.wires[up].bytes_per_second == 4 * one.costs.wires[up].bytes_per_second
    # Many links together are no faster than the memory that feeds them; disks do not multiply.
    eight, memory = model(devices=8), find_profile("h100").host.memory_bytes_per_second.value
    assert eight.costs.wires[up].bytes_per_second == memory
    read = Wire(Tier.DISK, Tier.HOST)
    assert eight.costs.wires[read] == one.costs.wires[read]


def test_a_batch_is_bound_by_arithmetic_once_it_is_large():
    dense = model(rows=8).costs
    assert dense.row_seconds == 0
    large = model(rows=512).costs
    flops = 989e12 * 0.6
    fixed = find_profile("h100").device.step_seconds.value
    assert large.step_seconds + 511 * large.row_seconds - fixed == pytest.approx(
        512 * 2 * LLAMA.active_parameters / flops
    )


def test_a_mixture_of_experts_reads_more_weights_with_more_rows():
    mixtral = find_architecture("mixtral-8x7b")
    found = model(architecture=mixtral, devices=2, rows=16).costs
    bandwidth = 2 * 3.35e12
    fixed = find_profile("h100").device.step_seconds.value
    assert found.step_seconds - fixed == pytest.approx(2 * mixtral.active_parameters / bandwidth, rel=1e-6)
    assert found.step_seconds + 15 * found.row_seconds - fixed == pytest.approx(
        mixtral.weights.read_bytes("bfloat16", 16) / bandwidth
    )


def test_windows_are_counted_per_token_and_not_per_pair():
    mistral = find_architecture("mistral-7b-v0.1")
    assert mistral.pair_flops() == 0
    assert model(architecture=mistral).costs.pair_seconds == 0
    assert mistral.window_flops() == 32 * 4096 * 2 * 32 * 256
    gemma = find_architecture("gemma-3-27b")
    assert gemma.pair_flops() == 10 * 2 * 32 * 256


def test_float32_takes_twice_as_long_on_tensor_cores_and_not_on_a_cpu():
    assert model(dtype="float32").costs.token_seconds == pytest.approx(2 * model().costs.token_seconds)
    small = find_architecture("smollm2-135m")
    single, half = (model("laptop", small, dtype).costs for dtype in ("float32", "bfloat16"))
    assert single.token_seconds == half.token_seconds


def test_a_machine_without_a_gpu_hides_nothing_and_has_no_host_tier():
    found = model("laptop", find_architecture("smollm2-135m")).costs
    assert found.overlap == 0
    assert set(found.kv_bytes_per_second) == {Tier.DEVICE}
    assert set(found.wires) == {Wire(Tier.DISK, Tier.DEVICE), Wire(Tier.DEVICE, Tier.DISK)}


def test_weights_that_do_not_fit_say_how_many_devices_would_do():
    large, h100 = find_architecture("llama-3.1-70b"), find_profile("h100")
    with pytest.raises(CapacityError) as caught:
        costs(h100, large, "bfloat16")
    for word in ("llama-3.1-70b", "131.41GiB", "h100 has 79.06GiB", "2 devices", "--devices 2"):
        assert word in str(caught.value)
    needed = devices_for(h100, find_architecture("llama-3.1-405b"), "bfloat16")
    check_weights_fit(h100, find_architecture("llama-3.1-405b"), "bfloat16", needed)
    with pytest.raises(CapacityError):
        check_weights_fit(h100, find_architecture("llama-3.1-405b"), "bfloat16", needed - 2)


@pytest.mark.parametrize("options", [{"devices": 0}, {"rows": 0}])
def test_impossible_numbers(options):
    with pytest.raises(ConfigError, match="not possible"):
        model(**options)


def test_measured_parameters_win_for_their_model(written):
    profile = find_profile(written(DEVICE.replace("value = 1000", "value = 20_000_000_000") + MEASURED))
    found = costs(profile, LLAMA, "bfloat16")
    assert found.step_seconds == 0.5
    assert found.token_seconds == 0.25
    assert found.stored_bytes_per_second == 9
    assert found.kv_bytes_per_second == {Tier.DEVICE: 7.0}
    assert found.wires == {Wire(Tier.DISK, Tier.DEVICE): Line(0.125, 3.0)}
    assert found.overlap == 1.0
    assert costs(profile, find_architecture("qwen3-8b"), "bfloat16") != found


def test_all_parameters_of_the_cost_model_can_be_measured():
    assert {field.name for field in fields(Costs)} <= set(Measured.model_fields)


def test_a_file_needs_no_name(written):
    profile = find_profile(written(DEVICE))
    assert (profile.name, profile.title) == ("mine", "mine")
    assert (profile.host, profile.disk, profile.measured) == (None, None, None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["device is missing"]),
        ("[device]", ["device.memory_bytes is missing", "device.overlap is missing"]),
        (DEVICE + "\n[hots]", ["unknown key hots", "did you mean host?"]),
        (DEVICE.replace("overlap", "overlop"), ["unknown key device.overlop", "did you mean overlap?"]),
        (
            DEVICE.replace("value = 0.5", "value = 1.5", 1),
            ["device.read_efficiency.value = 1.5", "less than or equal to 1"],
        ),
        (DEVICE.replace("value = 1000", "value = -1", 1), ["device.memory_bytes.value = -1", "legal:"]),
        (DEVICE.replace("value = 1000", 'value = "80GB"', 1), ['device.memory_bytes.value = "80GB"', "valid integer"]),
        (DEVICE.replace(FIGURE, "1000", 1), ["device.memory_bytes = 1000", "a table with value, source"]),
        (DEVICE.replace('source = "x"', 'source = ""', 1), ["device.memory_bytes.source", "at least 1 character"]),
        (DEVICE.replace(", source = ", ", origin = ", 1), ["device.memory_bytes.source is missing", "origin"]),
        (
            DEVICE + f"\n[host]\nmemory_bytes = {FIGURE}\nmemory_bytes_per_second = {FIGURE}",
            ["the section [host_to_device] is missing"],
        ),
        (DEVICE + f"\n[disk]\ncapacity_bytes = {FIGURE}", ["the section [disk_to_device] is missing"]),
        (DEVICE + MEASURED.replace("device = 7.0", "host = 7.0"), ["measured", "the rate of the device is missing"]),
        (DEVICE + MEASURED.replace("disk_to_device", "disk_to_tape"), ["disk_to_tape", "host_to_device"]),
        ("[device", ["not valid TOML"]),
    ],
)
def test_a_file_that_is_wrong_is_one_line(written, text, words):
    path = written(text)
    with pytest.raises(ConfigError) as caught:
        find_profile(path)
    assert "\n" not in str(caught.value)
    for word in [path, *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("h10", ["unknown profile", "did you mean h100", "known: a100, h100, h200, laptop, rtx4090"]),
        ("RTX-4090", ["did you mean rtx4090"]),
        ("", ["unknown profile", "known:"]),
        ("a\0b", ["unknown profile"]),
        ("none.toml", ["none.toml: no such file"]),
    ],
)
def test_unknown_profiles_say_what_is_known(name, words):
    with pytest.raises(ConfigError) as caught:
        find_profile(name)
    for word in words:
        assert word in str(caught.value)
