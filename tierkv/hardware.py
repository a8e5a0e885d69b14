"""Hardware profiles: what a machine can do, each figure with its source, and the costs of a model on it.

A profile is a small TOML file. Rates are peaks from a datasheet next to the share of them that software reaches, so that
each can be checked by itself. ``[measured]`` may hold what was measured for one model on the machine at hand.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from tierkv.architecture import canonical_name, check_regular
from tierkv.architecture_layers import Architecture
from tierkv.config_sources import read_file
from tierkv.cost import Costs, Line, WeightReads, WindowPairs
from tierkv.errors import CapacityError, ConfigError
from tierkv.hardware_profile import Cable, Device, HardwareProfile, Measured, parse_profile
from tierkv.layout import DTYPE_BYTES
from tierkv.sizes import format_bytes, show
from tierkv.tier import Tier, Wire

__all__ = [
    "PROFILES",
    "RESERVE_PERCENT",
    "HardwareProfile",
    "Measured",
    "assumed_flops",
    "check_weights_fit",
    "costs",
    "devices_for",
    "figures",
    "find_profile",
    "same_model",
]

_FOLDER: Final = Path(__file__).with_name("profiles")
PROFILES: Final = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
"""The names of the profiles that come with tierkv."""
RESERVE_PERCENT: Final = 10
"""Of a device's memory: what activations and the runtime take beside weights and KV, where nothing else is said."""


def find_profile(name_or_path: str) -> HardwareProfile:
    """Return a profile: one of ``PROFILES``, or that in a TOML file.

    Raises:
        ConfigError: there is no such profile, or something in it is wrong; one line.
    """
    name = name_or_path.strip()
    if name.casefold() in PROFILES:
        path = _FOLDER / f"{name.casefold()}.toml"
        return parse_profile(read_file(path, {})[0], name.casefold(), name.casefold())
    is_path = name.endswith(".toml") or "/" in name or (bool(name) and Path(name).is_file())
    if not is_path or "\0" in name:
        raise ConfigError(f"unknown profile {show(name)} ({_suggest(name)})")
    check_regular(Path(name))
    values, origin = read_file(name, {})
    return parse_profile(values, Path(name).stem, origin)


def figures(profile: HardwareProfile) -> list[tuple[str, float, str]]:
    """Return every figure of a profile: its name, its value and where it comes from."""

    def walk(name: str, found: Any) -> Iterator[tuple[str, float, str]]:
        if isinstance(found, dict) and "source" in found:
            yield name, found["value"], found["source"]
        elif isinstance(found, dict):
            for key, inner in found.items():
                yield from walk(f"{name}.{key}".lstrip("."), inner)

    return list(walk("", profile.model_dump(exclude={"measured"})))


def devices_for(profile: HardwareProfile, architecture: Architecture, dtype: str) -> int:
    """Return how many devices of a machine hold the weights of a model beside the reserve."""
    memory = profile.device.memory_bytes.value
    return -(-architecture.weights.total_bytes(dtype) // (memory - memory * RESERVE_PERCENT // 100))


def check_weights_fit(profile: HardwareProfile, architecture: Architecture, dtype: str, devices: int = 1) -> None:
    """Refuse a machine whose memory is too small for the weights.

    Raises:
        CapacityError: it is; the message says how many devices would do.
    """
    weights, memory = architecture.weights.total_bytes(dtype), profile.device.memory_bytes.value
    if weights > memory * devices:
        needed = devices_for(profile, architecture, dtype)
        have = format_bytes(memory) if devices == 1 else f"{devices} x {format_bytes(memory)}"
        raise CapacityError(
            f"the weights of {architecture.name} are {format_bytes(weights)}, and {profile.name} has {have}: it needs "
            f"{needed} devices (--devices {needed}), or a smaller model"
        )


def costs(
    profile: HardwareProfile, architecture: Architecture, dtype: str, *, devices: int = 1, rows: int = 1
) -> Costs:
    """Return what a model costs on a machine: a roofline of its peaks and the shares of them that are reached.

    Devices are taken to share all work and all KV evenly, each with its own wire to the host; what they tell each other
    is not counted. Measured parameters win where the profile has them for this model, dtype and one device.

    Args:
        profile: the machine.
        architecture: the model.
        dtype: of the KV, and of weights that are not quantised.
        devices: over which the model is spread.
        rows: sequences of the batch that the costs shall be right for. With a mixture of experts more rows read more of
            the weights, and large batches are bound by arithmetic; ``row_seconds`` is the straight line between.

    Raises:
        CapacityError: the weights do not fit so many devices.
    """
    if devices < 1 or rows < 1:
        raise ConfigError(f"{devices} devices and {rows} rows are not possible; both are whole numbers from 1 up")
    measured = profile.measured
    if measured is not None and devices == 1 and measured.dtype == dtype and same_model(measured, architecture):
        return _with_measured(_roofline(profile, architecture, dtype, devices, rows), measured)
    check_weights_fit(profile, architecture, dtype, devices)
    return _roofline(profile, architecture, dtype, devices, rows)


def same_model(measured: Measured, architecture: Architecture) -> bool:
    """Return whether a model is the one that was measured, under whatever name that goes."""
    return canonical_name(measured.model) == canonical_name(architecture.name)


def _with_measured(peaks: Costs, measured: Measured) -> Costs:
    """Return what was measured, and for what was not what the machine's figures say."""
    found = measured.costs()
    # A rate of the CPU was fitted together with its hops, be they 0.
    with_hops = Tier.HOST in found.kv_bytes_per_second and "hop_seconds" in measured.model_fields_set
    return replace(
        found,
        row_seconds=found.row_seconds or peaks.row_seconds,
        kv_bytes_per_second={**peaks.kv_bytes_per_second, **found.kv_bytes_per_second},
        wires={**peaks.wires, **found.wires},
        hop_seconds=found.hop_seconds if with_hops else found.hop_seconds or peaks.hop_seconds,
        stored_bytes_per_second=found.stored_bytes_per_second or peaks.stored_bytes_per_second,
    )


def _roofline(profile: HardwareProfile, architecture: Architecture, dtype: str, devices: int, rows: int) -> Costs:
    device = profile.device
    bandwidth = device.memory_bytes_per_second.value * devices
    flops = _flops(device, dtype) * device.compute_efficiency.value * devices
    weights = architecture.weights

    reads = WeightReads(
        device.step_seconds.value,
        weights.dense_bytes(dtype) / bandwidth,
        weights.expert_bytes(dtype) / bandwidth,
        weights.missed,
    )

    def forward(count: int) -> float:
        arithmetic = count * 2 * weights.active / flops
        return max(reads.seconds(count), arithmetic)

    rates = {Tier.DEVICE: bandwidth * device.read_efficiency.value}
    if profile.host is not None and profile.host.read_efficiency is not None:
        rates[Tier.HOST] = profile.host.memory_bytes_per_second.value * profile.host.read_efficiency.value
    wires = _wires(profile, devices)
    from_disk = [wires[wire] for wire in (Wire(Tier.DISK, Tier.DEVICE), Wire(Tier.DISK, Tier.HOST)) if wire in wires]
    return Costs(
        step_seconds=device.step_seconds.value + forward(1),
        row_seconds=(forward(rows) - forward(1)) / (rows - 1) if rows > 1 else 0.0,
        kv_bytes_per_second=rates,
        wires=wires,
        overlap=device.overlap.value,
        hop_seconds=profile.host.hop_seconds.value if profile.host is not None and profile.host.hop_seconds else 0.0,
        token_seconds=2 * weights.prefill / flops,
        pair_seconds=architecture.pair_flops() / flops,
        stored_bytes_per_second=from_disk[0].bytes_per_second if from_disk else None,
        weights=reads,
        windows=tuple(
            WindowPairs(tokens, pair / flops, chunked)
            for (tokens, chunked), pair in architecture.window_pair_flops().items()
        ),
    )


def _flops(device: Device, dtype: str) -> float:
    """Return the peak for numbers of this size."""
    half = device.flops_per_second.value
    if DTYPE_BYTES[dtype] == 2:
        return half
    single = device.float32_flops_per_second.value if device.float32_flops_per_second is not None else half / 2
    if DTYPE_BYTES[dtype] == 4:
        return single
    return device.float64_flops_per_second.value if device.float64_flops_per_second is not None else single / 2


def assumed_flops(profile: HardwareProfile, dtype: str) -> str | None:
    """Return what is assumed of the arithmetic in a dtype for want of a figure, or None where there is one."""
    name = f"{dtype}_flops_per_second"
    if dtype not in ("float32", "float64") or getattr(profile.device, name) is not None:
        return None
    wider = "bfloat16" if dtype == "float32" else "float32"
    return f"{profile.title} has no figure for {dtype} arithmetic; half the rate of {wider} is assumed"


def _wires(profile: HardwareProfile, devices: int) -> dict[Wire, Line]:
    """Return what copies cost. Every device has a wire to the host of its own, which host memory has to feed."""
    wires = {}
    for name, ends in WIRES.items():
        cable: Cable | None = getattr(profile, name)
        if cable is None:
            continue
        rate = cable.bytes_per_second.value
        if devices > 1 and Tier.DISK not in ends and profile.host is not None:
            rate = min(rate * devices, max(rate, profile.host.memory_bytes_per_second.value))
        wires[ends] = Line(cable.latency_seconds.value, rate)
    return wires


WIRES: Final[Mapping[str, Wire]] = {
    wire.label: wire for wire in (Wire(source, to) for source in Tier for to in Tier if source is not to)
}
"""Every wire by its name in a profile."""


def _suggest(name: str) -> str:
    near = get_close_matches(name.casefold().replace("-", "").replace("_", ""), PROFILES, 2, 0.6)
    known = f"known: {', '.join(PROFILES)}; or the path of a .toml"
    return f"did you mean {' or '.join(near)}? {known}" if near else known
