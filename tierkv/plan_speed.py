"""The time half of a plan: first token, tokens a second, restore against recompute, and what would help most."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from tierkv.architecture_layers import Architecture
from tierkv.cost import CostModel, Estimate, Read
from tierkv.hardware import HardwareProfile, costs
from tierkv.layout import BlockLayout
from tierkv.plan_memory import Placement, place, read_bytes
from tierkv.tier import Tier, Wire

_NO_GAIN: Final = 1.01
"""Below this factor a change is not worth naming."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is estimated: a batch of sequences of one length on a machine.

    Attributes:
        architecture: the model.
        profile: the machine.
        layout: the blocks.
        budgets: bytes by tier.
        context: tokens of every sequence.
        batch: sequences.
        devices: over which the model is spread.
    """

    architecture: Architecture
    profile: HardwareProfile
    layout: BlockLayout
    budgets: Mapping[Tier, int]
    context: int
    batch: int
    devices: int = 1

    @property
    def placement(self) -> Placement:
        """Where the blocks of the batch lie."""
        return place(self.budgets, self.layout, self.batch, self.context)

    def model(self) -> CostModel:
        """Return the cost model of this setting."""
        found = costs(self.profile, self.architecture, self.layout.dtype, devices=self.devices, rows=self.batch)
        return CostModel(found, self.architecture.kv_layers, self.layout.block_bytes, self.layout.block_size)


def estimates(setting: Setting) -> dict[str, Any]:
    """Return the times of each way to read cold KV, by its name; nothing where the batch does not fit.

    ``device`` is there where nothing is cold; ``compute`` where the CPU can attend.
    """
    placement = setting.placement
    if placement.missing:
        return {}
    model = setting.model()
    reads: dict[str, Read] = {"stream": "stream"}
    if Tier.HOST in model.costs.kv_bytes_per_second:
        reads["compute"] = "compute"
    if placement.on_device:
        reads = {"device": "stream", **reads}
    first = _first_token(setting, model, placement)
    return {name: _times(setting, model, placement, first, read) for name, read in reads.items()}


def _times(setting: Setting, model: CostModel, placement: Placement, first: Estimate, read: Read) -> dict[str, Any]:
    layout = setting.layout
    kv_bytes = read_bytes(
        setting.architecture, layout.dtype, setting.context, placement, setting.batch, layout.block_size
    )
    decoded = model.decode(kv_bytes, rows=setting.batch, read=read)
    return {
        "ttft_seconds": first.seconds,
        "ttft_bottleneck": first.bottleneck,
        "ttft_terms": dict(first.terms),
        "inter_token_seconds": decoded.seconds,
        "tokens_per_second": setting.batch / decoded.seconds,
        "bottleneck": decoded.bottleneck,
        "terms": dict(decoded.terms),
        "read_bytes": {tier.label: round(kv_bytes[tier]) for tier in Tier},
    }


def _first_token(setting: Setting, model: CostModel, placement: Placement) -> Estimate:
    """Return the time to the first tokens of a batch that finds nothing cached: prefill, and what cannot stay moves down."""
    terms = dict(model.prefill(setting.context, rows=setting.batch).terms)
    hidden = model.costs.overlap * sum(terms.values())
    down = [0.0]
    if placement.blocks[Tier.DISK]:
        last = Wire(Tier.HOST, Tier.DISK) if setting.profile.host is not None else Wire(Tier.DEVICE, Tier.DISK)
        down.append(model.move(last, placement.blocks[Tier.DISK]))
    if setting.profile.host is not None and (below := placement.blocks[Tier.HOST] + placement.blocks[Tier.DISK]):
        down.append(model.move(Wire(Tier.DEVICE, Tier.HOST), below))
    if max(down):
        terms["copies down"] = max(0.0, max(down) - hidden)
    return Estimate(terms)


def restore(setting: Setting) -> dict[str, Any]:
    """Return how long one sequence's KV takes to come back, against computing it again.

    ``break_even_bytes_per_second`` is the KV of one token times the tokens that a prefill computes in a second: a tier
    that is read faster than that is worth restoring from.
    """
    model = setting.model()
    blocks = setting.context // setting.layout.block_size
    tokens = blocks * setting.layout.block_size
    again = model.prefill(max(1, tokens)).seconds
    seconds: dict[str, float | None] = {"host": None, "disk": None}
    if blocks:
        if setting.profile.host is not None:
            seconds["host"] = model.restore(tokens, Tier.HOST).seconds
        if model.costs.stored_bytes_per_second is not None:
            seconds["disk"] = model.restore(tokens, Tier.DISK).seconds
    return {
        "restore_seconds": seconds,
        "recompute_seconds": again,
        "restored_tokens": tokens,
        "break_even_bytes_per_second": blocks * setting.layout.block_bytes / again,
        "worth_restoring": {tier: None if found is None else found < again for tier, found in seconds.items()},
    }


# -- what would help --------------------------------------------------------------------------------------------------


def _scaled(part: str, *names: str) -> Callable[[HardwareProfile], HardwareProfile]:
    """Return a change that doubles figures of one part of a profile."""

    def change(profile: HardwareProfile) -> HardwareProfile:
        found = getattr(profile, part)
        if found is None:
            return profile
        doubled = {
            name: getattr(found, name).model_copy(update={"value": getattr(found, name).value * 2}) for name in names
        }
        return profile.model_copy(update={part: found.model_copy(update=doubled)})

    return change


def _wires(*names: str) -> Callable[[HardwareProfile], HardwareProfile]:
    def change(profile: HardwareProfile) -> HardwareProfile:
        for name in names:
            if getattr(profile, name) is not None:
                profile = _scaled(name, "bytes_per_second")(profile)
        return profile

    return change


_CHANGES: Final[Mapping[str, Callable[[HardwareProfile], HardwareProfile]]] = {
    "device memory": lambda profile: profile,
    "host memory": lambda profile: profile,
    "disk capacity": lambda profile: profile,
    "bandwidth to the host": _wires("host_to_device", "device_to_host"),
    "disk bandwidth": _wires("disk_to_host", "host_to_disk", "disk_to_device", "device_to_disk"),
    "device bandwidth": _scaled("device", "memory_bytes_per_second"),
    "host bandwidth": _scaled("host", "memory_bytes_per_second"),
    "device arithmetic": _scaled("device", "flops_per_second"),
}
_BUDGETS: Final = {"device memory": Tier.DEVICE, "host memory": Tier.HOST, "disk capacity": Tier.DISK}


def advice(setting: Setting, device_bytes_doubled: int) -> dict[str, Any]:
    """Return what doubling one thing at a time would gain, by asking the model again, and what gains most.

    The gain is in tokens a second with the best way to read. Where the batch does not fit, it is whether it then does.

    Args:
        setting: as it is.
        device_bytes_doubled: what the device has for KV with twice the memory.
    """
    now = _best(setting)
    # What was measured says what is, not what would be: there a gain is that of the machine's figures.
    plain = replace(setting, profile=setting.profile.model_copy(update={"measured": None}))
    before = _best(plain)
    options: list[dict[str, Any]] = []
    for name, change in _CHANGES.items():
        budgets = dict(setting.budgets)
        tier = _BUDGETS.get(name)
        if tier is not None and budgets.get(tier):
            budgets[tier] = device_bytes_doubled if tier is Tier.DEVICE else 2 * budgets[tier]
        changed = replace(plain, profile=change(plain.profile), budgets=budgets)
        if changed == plain:  # the machine has no such thing
            continue
        then = _best(changed)
        gain = None if before is None or then is None else then / before
        rate = then if now is None or gain is None else now * gain
        options.append(
            {"change": f"twice the {name}", "tokens_per_second": rate, "gain": gain, "fits": then is not None}
        )
    found = [one for one in options if one["gain"] is not None and one["gain"] >= _NO_GAIN]
    best = max(found, key=lambda one: one["gain"], default=None)
    if now is None:
        best = next((one for one in options if one["fits"]), None)
    return {"now_tokens_per_second": now, "options": options, "best": best, "sentence": _sentence(now, best)}


def _best(setting: Setting) -> float | None:
    """Return the tokens a second of the best way to read, or None where the batch does not fit."""
    return max((one["tokens_per_second"] for one in estimates(setting).values()), default=None)


def _sentence(now: float | None, best: Mapping[str, Any] | None) -> str:
    if now is None:
        if best is None:
            return "The batch does not fit, nor would it with twice the room in any one tier: use a smaller batch or context."
        rate = best["tokens_per_second"]
        return f"The batch does not fit; {best['change']} would hold it, at {rate:,.1f} tokens/s."
    if best is None:
        return "No one thing doubled would make decoding faster by a percent."
    factor, rate = best["gain"], best["tokens_per_second"]
    return f"{best['change'].capitalize()} would help most: {factor:.2f}x, {now:,.1f} to {rate:,.1f} tokens/s."
