"""The form of a hardware profile: what its TOML may hold, checked, with every mistake on one line.

    name = "h100"
    title = "NVIDIA H100 SXM, 80 GB"

    [device]
    memory_bytes = { value = 85_000_000_000, source = "datasheet" }

A figure has a unit in its name and a source; a share is between 0 and 1.
"""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tierkv.cost import Costs, Line
from tierkv.errors import ConfigError
from tierkv.sizes import show
from tierkv.tier import Tier, Wire

# Bounds far beyond any machine, within which no sum or quotient of the cost model overflows.
Seconds = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=1, le=1e18, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=1e-6, le=1, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=1, le=1 << 60)]
Text = Annotated[str, Field(min_length=1)]
TierName = Literal["device", "host", "disk"]
WireName = Literal[
    "host_to_device", "device_to_host", "disk_to_host", "host_to_disk", "disk_to_device", "device_to_disk"
]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SecondsFigure(_Part):
    """Seconds, and where the number comes from."""

    value: Seconds
    source: Text


class RateFigure(_Part):
    """So many a second, and where the number comes from."""

    value: Rate
    source: Text


class ShareFigure(_Part):
    """A share from a millionth to 1, and where the number comes from."""

    value: Share
    source: Text


class OverlapFigure(_Part):
    """A share from 0 to 1, and where the number comes from."""

    value: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
    source: Text


class BytesFigure(_Part):
    """A whole number of bytes, and where it comes from."""

    value: Bytes
    source: Text


class Device(_Part):
    """What the model runs on.

    Attributes:
        memory_bytes: of one device.
        memory_bytes_per_second: peak.
        flops_per_second: dense bfloat16, peak.
        float32_flops_per_second: the same for float32, or None for half as many.
        float64_flops_per_second: the same for float64, or None for half as many as in float32.
        read_efficiency: share of the memory's peak at which attention reads KV.
        compute_efficiency: share of the arithmetic's peak that a prefill reaches.
        step_seconds: what a forward costs besides reading weights and KV.
        overlap: share of the computing time behind which copies can hide.
    """

    memory_bytes: BytesFigure
    memory_bytes_per_second: RateFigure
    flops_per_second: RateFigure
    float32_flops_per_second: RateFigure | None = None
    float64_flops_per_second: RateFigure | None = None
    read_efficiency: ShareFigure
    compute_efficiency: ShareFigure
    step_seconds: SecondsFigure
    overlap: OverlapFigure


class Host(_Part):
    """The machine's RAM below the device; left out where the device is that RAM.

    Attributes:
        memory_bytes: of all of it.
        memory_bytes_per_second: peak.
        read_efficiency: share of the peak at which the CPU attends, or None where it cannot.
        hop_seconds: per layer, to send a query down and bring its partial result back.
    """

    memory_bytes: BytesFigure
    memory_bytes_per_second: RateFigure
    read_efficiency: ShareFigure | None = None
    hop_seconds: SecondsFigure | None = None


class Disk(_Part):
    """The local SSD.

    Attributes:
        capacity_bytes: of the whole disk.
    """

    capacity_bytes: BytesFigure


class Cable(_Part):
    """What a copy costs in one direction.

    Attributes:
        latency_seconds: before a piece's first byte.
        bytes_per_second: from then on.
    """

    latency_seconds: SecondsFigure
    bytes_per_second: RateFigure


class MeasuredLine(_Part):
    """The same, as it was measured."""

    latency_seconds: Seconds
    bytes_per_second: Rate


class Measured(_Part):
    """The parameters of one model on this machine, as ``tierkv.fit`` found them: the fields of ``tierkv.cost.Costs``."""

    model: Text
    dtype: Text
    layers: Annotated[int, Field(ge=1, le=10_000)]
    block_bytes: Bytes
    block_size: Annotated[int, Field(ge=1, le=1 << 30)] | None = None
    step_seconds: Seconds
    row_seconds: Seconds = 0.0
    kv_bytes_per_second: Mapping[TierName, Rate]
    wires: Mapping[WireName, MeasuredLine] = {}
    overlap: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 1.0
    hop_seconds: Seconds = 0.0
    token_seconds: Seconds = 0.0
    pair_seconds: Seconds = 0.0
    past_pair_seconds: Seconds | None = None
    restore_seconds: Seconds = 0.0
    block_seconds: Seconds = 0.0
    stored_bytes_per_second: Rate | None = None

    @model_validator(mode="after")
    def _has_a_device(self) -> "Measured":
        if "device" not in self.kv_bytes_per_second:
            raise ValueError("the rate of the device is missing in kv_bytes_per_second; add device = ...")
        return self

    def costs(self) -> Costs:
        """Return them in the form that the cost model takes."""
        return Costs(
            step_seconds=self.step_seconds,
            row_seconds=self.row_seconds,
            kv_bytes_per_second={Tier[name.upper()]: rate for name, rate in self.kv_bytes_per_second.items()},
            wires={_wire(name): Line(one.latency_seconds, one.bytes_per_second) for name, one in self.wires.items()},
            overlap=self.overlap,
            hop_seconds=self.hop_seconds,
            token_seconds=self.token_seconds,
            pair_seconds=self.pair_seconds,
            past_pair_seconds=self.past_pair_seconds,
            restore_seconds=self.restore_seconds,
            block_seconds=self.block_seconds,
            stored_bytes_per_second=self.stored_bytes_per_second,
        )


class HardwareProfile(_Part):
    """A machine.

    Attributes:
        name: what to ask for it by; without one, the name of its file.
        title: what it is.
        device: what the model runs on.
        host: RAM below the device, or None where the device is that RAM.
        disk: the SSD, or None.
        host_to_device: and the others: wires, as far as the machine has them.
        measured: of one model on this machine, or None.
    """

    name: Text
    title: Text
    device: Device
    host: Host | None = None
    disk: Disk | None = None
    host_to_device: Cable | None = None
    device_to_host: Cable | None = None
    disk_to_host: Cable | None = None
    host_to_disk: Cable | None = None
    disk_to_device: Cable | None = None
    device_to_disk: Cable | None = None
    measured: Measured | None = None

    @model_validator(mode="after")
    def _is_connected(self) -> "HardwareProfile":
        """Every tier must be reached from the device and back."""
        needed: list[str] = []
        if self.host is not None:
            needed += ["host_to_device", "device_to_host"]
        if self.disk is not None:
            middle = "device" if self.host is None else "host"
            needed += [f"disk_to_{middle}", f"{middle}_to_disk"]
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ValueError(f"the section [{missing[0]}] is missing; add it with latency_seconds and bytes_per_second")
        return self


def parse_profile(values: Mapping[str, Any], name: str, origin: str) -> HardwareProfile:
    """Return the profile that a file holds.

    Args:
        values: what the file holds.
        name: what the profile is called where it does not say so.
        origin: the file, for messages.

    Raises:
        ConfigError: everything that is wrong with it, on one line.
    """
    try:
        return HardwareProfile.model_validate({"name": name, "title": name, **values})
    except ValidationError as error:
        raise ConfigError(f"{origin}: {'; '.join(dict.fromkeys(_problems(error)))}") from None


def _problems(error: ValidationError) -> Iterator[str]:
    for details in error.errors(include_url=False):
        steps = [str(step) for step in details["loc"] if step != "[key]"]
        key = ".".join(steps)
        context = details.get("ctx", {})
        match details["type"]:
            case "missing":
                yield f"{key} is missing; add it"
            case "extra_forbidden":
                siblings = _known(steps[:-1])
                near = get_close_matches(steps[-1], siblings, 1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(siblings)}"
                yield f"unknown key {key} ({hint})"
            case "value_error":
                yield f"{key}: {context['error']}" if key else str(context["error"])
            case "literal_error":
                yield f"unknown key {key} (known: {context['expected'].replace(chr(39), '')})"
            case "model_type" | "dict_type" | "mapping_type":
                known = ", ".join(_known(steps))
                yield f"{key} = {show(details['input'])} is not possible (legal: a table with {known or 'numbers'})"
            case _:
                legal = details["msg"].removeprefix("Input should be ")
                yield f"{key} = {show(details['input'])} is not possible (legal: {legal})"


def _known(steps: list[str]) -> list[str]:
    """Return the keys that the table at this place may have."""
    model: type[BaseModel] = HardwareProfile
    for step in steps:
        field = model.model_fields.get(step)
        if field is None:
            return []
        kinds = [field.annotation, *get_args(field.annotation)]
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not inner:
            return []
        model = inner[0]
    return list(model.model_fields)


def _wire(name: str) -> Wire:
    source, _, destination = name.partition("_to_")
    return Wire(Tier[source.upper()], Tier[destination.upper()])
