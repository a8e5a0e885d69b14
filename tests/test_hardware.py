"""Shipped profiles against published measurements, and what is said about files that cannot be used."""

import json
import os
import re
from dataclasses import fields

import pytest

from tierkv.architecture import find_architecture
from tierkv.cost import CostModel, Costs, Line
from tierkv.errors import CapacityError, ConfigError
from tierkv.hardware import PROFILES, assumed_flops, check_weights_fit, costs, devices_for, figures, find_profile
from tierkv.hardware_profile import Measured, MeasuredLine
from tierkv.tier import Tier, Wire

LLAMA = find_architecture("llama-3.1-8b")


def figure(name, value):
    """Return a file with one figure that is not as it should be."""
    return re.sub(rf"(?m)^({name} = {{ value =) \S+,", rf"\1 {value},", DEVICE)


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
    found = model(architecture=mistral)
    assert found.costs.pair_seconds == 0
    assert mistral.window_pair_flops() == {(4096, False): 32 * 2 * 32 * 256}
    # Behind its window a token costs the same, wherever it is.
    assert found.prefill(100, 5000).terms["attention"] == found.prefill(100, 9000).terms["attention"]
    seen = 100 * 4096 * 32 * 2 * 32 * 256 / (989e12 * 0.6)
    assert found.prefill(100, 5000).terms["attention"] == pytest.approx(seen)
    gemma = find_architecture("gemma-3-27b")
    assert gemma.pair_flops() == 10 * 2 * 32 * 256


def test_a_window_longer_than_the_prompt_costs_no_more_than_none():
    long, short = find_architecture("phi-3-mini-128k"), find_architecture("phi-3-mini")
    seconds = model(architecture=long).prefill(4096).seconds
    assert seconds == pytest.approx(model(architecture=short).prefill(4096).seconds, rel=0.2)
    assert seconds < 0.1


def test_a_prefill_of_a_mixture_reads_all_experts_that_it_reaches():
    mixtral = find_architecture("mixtral-8x7b")
    found = model(architecture=mixtral, devices=2).prefill(64)
    assert found.terms["reading weights"] == pytest.approx(mixtral.weights.read_bytes("bfloat16", 64) / 2 / 3.35e12)
    assert found.bottleneck == "reading weights"
    assert model(architecture=mixtral, devices=2).prefill(8192).bottleneck == "arithmetic"


@pytest.mark.parametrize(
    ("name", "single", "double"),
    [("h100", 67e12, 34e12), ("h200", 67e12, 34e12), ("a100", 19.5e12, 9.7e12), ("rtx4090", 82.6e12, 1.29e12)],
)
def test_wide_numbers_are_computed_at_the_rate_of_the_datasheet(name, single, double):
    small, share = find_architecture("smollm2-135m"), find_profile(name).device.compute_efficiency.value
    for dtype, peak in (("float32", single), ("float64", double)):
        flops = 2 * small.weights.prefill / (peak * share)
        assert model(name, small, dtype).costs.token_seconds == pytest.approx(flops)
        assert assumed_flops(find_profile(name), dtype) is None


def test_a_rate_that_a_profile_leaves_out_is_assumed_and_said(written):
    profile = find_profile(written(DEVICE))
    assert "no figure for float64" in str(assumed_flops(profile, "float64"))
    assert "half the rate of bfloat16" in str(assumed_flops(profile, "float32"))
    assert assumed_flops(profile, "bfloat16") is None
    half, single, double = (
        costs(roomy(profile), LLAMA, dtype).token_seconds for dtype in ("bfloat16", "float32", "float64")
    )
    assert (single / half, double / single) == pytest.approx((2, 2))


def roomy(profile):
    memory = profile.device.memory_bytes.model_copy(update={"value": 10**12})
    return profile.model_copy(update={"device": profile.device.model_copy(update={"memory_bytes": memory})})


def test_a_cpu_computes_bfloat16_in_float32():
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
    profile = find_profile(written(DEVICE.replace("value = 1000", "value = 20_000_000_000", 1) + MEASURED))
    found = costs(profile, LLAMA, "bfloat16")
    assert found.step_seconds == 0.5
    assert found.token_seconds == 0.25
    assert found.stored_bytes_per_second == 9
    assert found.kv_bytes_per_second == {Tier.DEVICE: 7.0}
    assert found.wires == {Wire(Tier.DISK, Tier.DEVICE): Line(0.125, 3.0)}
    assert found.overlap == 1.0
    assert costs(profile, find_architecture("qwen3-8b"), "bfloat16") != found


@pytest.fixture
def small():
    """The h100 with what was measured there of the smallest model, as far as a fit on a GPU gives it."""
    kept = Measured(
        model="smollm2-135m", dtype="bfloat16", layers=30, block_bytes=1, step_seconds=0.5, token_seconds=0.25,
        kv_bytes_per_second={"device": 7.0}, wires={"host_to_device": MeasuredLine(latency_seconds=0.5, bytes_per_second=9.0)},
    )  # fmt: skip
    return lambda **values: find_profile("h100").model_copy(update={"measured": kept.model_copy(update=values)})


def test_what_was_not_measured_is_what_the_figures_of_the_machine_say(small):
    model = find_architecture("smollm2-135m")
    peaks, found = costs(find_profile("h100"), model, "bfloat16"), costs(small(), model, "bfloat16")
    up, down = Wire(Tier.HOST, Tier.DEVICE), Wire(Tier.DEVICE, Tier.HOST)
    assert set(found.wires) == {up, down, Wire(Tier.DISK, Tier.HOST), Wire(Tier.HOST, Tier.DISK)}
    assert (found.wires[up], found.wires[down]) == (Line(0.5, 9.0), peaks.wires[down])
    assert found.kv_bytes_per_second == {Tier.DEVICE: 7.0, Tier.HOST: peaks.kv_bytes_per_second[Tier.HOST]}
    assert found.stored_bytes_per_second == peaks.stored_bytes_per_second
    assert found.hop_seconds == peaks.hop_seconds == 3e-5
    assert (found.step_seconds, found.token_seconds, found.weights) == (0.5, 0.25, None)
    attends = small(kv_bytes_per_second={"device": 7.0, "host": 3.0}, hop_seconds=0.0)
    assert costs(attends, model, "bfloat16").hop_seconds == 0
    assert costs(attends, model, "bfloat16").kv_bytes_per_second[Tier.HOST] == 3


def test_rows_that_were_not_measured_are_not_free(small):
    model = find_architecture("smollm2-135m")
    peaks = costs(find_profile("h100"), model, "bfloat16", rows=4096)
    assert peaks.row_seconds > 0
    assert costs(small(), model, "bfloat16", rows=4096).row_seconds == peaks.row_seconds
    assert costs(small(row_seconds=0.125), model, "bfloat16", rows=4096).row_seconds == 0.125


def test_a_model_is_the_one_that_was_measured_under_each_of_its_names(small, tmp_path):
    model = find_architecture("smollm2-135m")
    folder = tmp_path / "SmolLM2-135M"
    for name in (
        "SmolLM2-135M", "smollm2", "HuggingFaceTB/SmolLM2-135M", str(folder), f"{folder}/config.json", " smollm2-135m ",
    ):  # fmt: skip
        assert costs(small(model=name), model, "bfloat16").step_seconds == 0.5, name
    for name in ("smollm2-360m", "/elsewhere/other", "smol"):
        assert costs(small(model=name), model, "bfloat16").step_seconds != 0.5, name


def test_a_folder_is_known_by_the_config_in_it(small, tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "vocab_size": 100,
        "num_attention_heads": 4, "_name_or_path": "owner/mine",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = find_architecture(str(tmp_path))
    assert costs(small(model=str(tmp_path)), model, "bfloat16").step_seconds == 0.5
    assert costs(small(model="Owner/Mine"), model, "bfloat16").step_seconds == 0.5


def test_all_parameters_of_the_cost_model_can_be_measured():
    assert {field.name for field in fields(Costs)} - {"weights", "windows"} == (
        set(Measured.model_fields) - {"model", "dtype", "layers", "block_bytes", "block_size"}
    )


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
        (DEVICE.replace("value = 1000", f"value = {10**300}", 1), ["device.memory_bytes.value", "legal:"]),
        (figure("memory_bytes_per_second", "1e-300"), ["memory_bytes_per_second.value = 1e-300", "equal to 1"]),
        (figure("memory_bytes_per_second", "1e300"), ["memory_bytes_per_second.value = 1e300", "less than"]),
        (figure("flops_per_second", f"{10**400}"), ["flops_per_second.value"]),
        (figure("read_efficiency", "1e-300"), ["read_efficiency.value = 1e-300", "0.000001"]),
        (figure("step_seconds", "1e7"), ["step_seconds.value = 1e7", "less than"]),
        (figure("step_seconds", "nan"), ["step_seconds.value = nan", "finite"]),
        (DEVICE + MEASURED.replace("0.25", "1e300"), ["measured.token_seconds = 1e300"]),
        (DEVICE + MEASURED.replace("7.0", "1e-5"), ["measured.kv_bytes_per_second.device = 1e-5"]),
        (DEVICE + MEASURED.replace("3.0", "inf"), ["bytes_per_second = inf"]),
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


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path):
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="no regular file"):
        find_profile(str(pipe))
