"""Plan a model on a machine before anything is tried: what its KV takes, what fits where, and how fast it will be.

    ask = Ask(architecture=find_architecture("llama-3.1-8b"), context=131_072, profile=find_profile("h100"))
    make_plan(ask)["estimates"]["stream"]["tokens_per_second"]

Bytes are exact. Times come from ``tierkv.cost`` with the figures of a hardware profile.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tierkv.architecture_layers import Architecture
from tierkv.errors import ConfigError
from tierkv.hardware import HardwareProfile, assumed_flops
from tierkv.layout import BlockLayout
from tierkv.plan_memory import (
    Mix,
    check_block_fits,
    default_budgets,
    place,
    resolve_budgets,
    sessions_held,
)
from tierkv.plan_speed import Setting, advice, estimates, restore
from tierkv.sizes import Size
from tierkv.tier import Tier

_LARGEST: Final = 1 << 40


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What is planned.

    Attributes:
        architecture: the model as it is.
        context: tokens of every sequence, prompt and answer together.
        batch: sequences that run at a time.
        dtype: of the KV, and of weights that are not quantised.
        block_size: tokens in a block.
        assume_mha: whether to count as if every query head had a key and a value of its own.
        profile: the machine, or None for bytes alone.
        devices: over which the model is spread.
        budgets: bytes of KV by tier, where they are not what the machine has.
        mix: how long sessions are, or None for half the context each.
    """

    architecture: Architecture
    context: int
    batch: int = 1
    dtype: str = "bfloat16"
    block_size: int = 32
    assume_mha: bool = False
    profile: HardwareProfile | None = None
    devices: int = 1
    budgets: Mapping[Tier, Size] = field(default_factory=dict)
    mix: Mix | None = None

    def __post_init__(self) -> None:
        for name in ("context", "batch", "devices"):
            value = getattr(self, name)
            if not 1 <= value <= _LARGEST:
                raise ConfigError(f"{name} = {value} is not possible (legal: a whole number from 1 up)")


def make_plan(ask: Ask) -> dict[str, Any]:
    """Return everything that is known about a model on a machine, ready for JSON.

    What needs a machine is None where none was given.

    Raises:
        ConfigError: a budget is not possible.
        CapacityError: the weights, or a block, do not fit.
        UnsupportedModel: the model has nothing that can be tiered.
    """
    model = ask.architecture.assume_mha() if ask.assume_mha else ask.architecture
    layout = model.layout(ask.block_size, ask.dtype)
    budgets = resolve_budgets(ask.budgets, ask.profile, ask.architecture, ask.dtype, ask.devices)
    check_block_fits(budgets, layout)
    per_request = model.kv_bytes(ask.context, ask.dtype)
    result: dict[str, Any] = {
        "model": model.name,
        "title": model.title,
        "source": model.source,
        "context": ask.context,
        "batch": ask.batch,
        "dtype": ask.dtype,
        "block_size": ask.block_size,
        "assume_mha": ask.assume_mha,
        "bytes_per_token": model.token_bytes(ask.dtype),
        "bytes_per_request": per_request,
        "bytes_total": per_request * ask.batch,
        "bytes_read_per_token": model.kv_bytes_read(ask.context, ask.dtype),
        "block_bytes": layout.block_bytes,
        "blocks_per_request": layout.blocks_for(ask.context),
        "architecture": _facts(model, ask.dtype),
        "why": why(ask),
        "profile": None,
        "budgets": {tier.label: budgets.get(tier) for tier in Tier} if budgets else None,
        "fits": None,
        "sessions_held": None,
        "estimates": None,
        "restore_seconds": None,
        "recompute_seconds": None,
        "break_even_bytes_per_second": None,
        "worth_restoring": None,
        "advice": None,
    }
    if Tier.DEVICE in budgets:
        mix = ask.mix or Mix(max(1, ask.context // 2))
        result["fits"] = _fits(budgets, layout, ask)
        result["sessions_held"] = sessions_held(budgets, model, layout, ask.context, mix, ask.batch)
    if ask.profile is not None:
        result.update(_speed(ask, ask.profile, model, layout, budgets))
    result["notes"] = _notes(ask, model, result)
    return result


def _speed(
    ask: Ask, profile: HardwareProfile, model: Architecture, layout: BlockLayout, budgets: Mapping[Tier, int]
) -> dict[str, Any]:
    setting = Setting(
        architecture=model, profile=profile, layout=layout, budgets=budgets, context=ask.context, batch=ask.batch,
        devices=ask.devices,
    )  # fmt: skip
    twice = profile.device.memory_bytes.model_copy(update={"value": profile.device.memory_bytes.value * 2})
    larger = profile.model_copy(update={"device": profile.device.model_copy(update={"memory_bytes": twice})})
    doubled = 2 * budgets[Tier.DEVICE]
    if Tier.DEVICE not in ask.budgets:
        doubled = default_budgets(larger, model, ask.dtype, ask.devices)[Tier.DEVICE]
    return {
        "profile": {"name": profile.name, "title": profile.title, "devices": ask.devices},
        "estimates": estimates(setting),
        "advice": advice(setting, doubled),
        **restore(setting),
    }


def _facts(model: Architecture, dtype: str) -> dict[str, Any]:
    windows = sorted({layer.window for layer in model.layers if layer.window is not None})
    return {
        "attention": model.attention_kind,
        "layers": len(model.layers),
        "layer_kinds": model.layer_kinds,
        "windows": windows,
        "query_heads": model.query_heads,
        "kv_heads": sorted({layer.kv_heads for layer in model.layers if layer.kv_heads}),
        "hidden_size": model.hidden_size,
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "parameters_estimated": model.parameters_estimated,
        "weight_bytes": model.weights.total_bytes(dtype),
        "max_context": model.max_context,
    }


def _fits(budgets: Mapping[Tier, int], layout: BlockLayout, ask: Ask) -> dict[str, Any]:
    placement = place(budgets, layout, ask.batch, ask.context)
    tiers = {
        tier.label: {"blocks": placement.blocks[tier], "bytes": placement.blocks[tier] * layout.block_bytes}
        for tier in Tier
    }
    missing = {"blocks": placement.missing, "bytes": placement.missing * layout.block_bytes}
    return {**tiers, "missing": missing, "everything": not placement.missing}


def why(ask: Ask) -> str:
    """Return the sentence that sets the true figure against the one of the multi-head formula."""
    true = ask.architecture.kv_bytes(ask.context, ask.dtype)
    formula = ask.architecture.assume_mha().kv_bytes(ask.context, ask.dtype)
    title, heads = ask.architecture.title, ask.architecture.query_heads
    if true == formula:
        return f"{title} keeps a key and a value for each of its {heads} query heads, as the multi-head formula has it."
    reason = f"{title} {_reason(ask.architecture)}"
    times = f"{formula / true:.3g}x"
    if ask.assume_mha:
        return (
            f"The multi-head formula gives {_decimal(formula)} a request, with a key and a value for each of {heads} query "
            f"heads; {reason}, so the true figure is {_decimal(true)}, {times} less."
        )
    return (
        f"{reason}, so a request of {ask.context:,} tokens takes {_decimal(true)}; the multi-head formula, with a key and a "
        f"value for each of {heads} query heads, would give {_decimal(formula)}, {times} as much."
    )


def _reason(model: Architecture) -> str:
    kept = [layer for layer in model.layers if layer.kind not in ("state", "shared")]
    heads = sorted({layer.kv_heads for layer in kept})
    if any(layer.kind == "latent" for layer in kept):
        one = kept[0]
        return f"keeps one latent vector of {one.key_dim} + {one.value_dim} numbers for all heads of a layer"
    shared = " or ".join(map(str, heads))
    text = f"has {shared} KV head{'s' if heads != [1] else ''}, which query heads share"
    left = len(model.layers) - len(kept)
    return f"{text}, in {len(kept)} of {len(model.layers)} layers" if left else text


def _notes(ask: Ask, model: Architecture, result: Mapping[str, Any]) -> list[str]:
    notes = []
    if model.max_context is not None and ask.context > model.max_context:
        notes.append(f"{model.title} was made for {model.max_context:,} tokens; {ask.context:,} is beyond that")
    if model.parameters_estimated:
        notes.append("the number of parameters is an estimate from the dimensions in the config")
    whole = result["blocks_per_request"] * result["block_bytes"]
    windows = [layer for layer in model.layers if layer.window is not None and layer.window < ask.context]
    if windows:
        notes.append(
            f"{len(windows)} layers keep no more than their window; tierkv keeps whole blocks of them too, {_decimal(whole)} "
            f"a request, and reads only the window"
        )
    if any(layer.kind == "state" for layer in model.layers):
        notes.append("layers with a state of fixed size, which does not grow with the tokens, are not counted")
    if model.weights.unknown_quantization is not None:
        notes.append(
            f"the bits of the quantisation {model.weights.unknown_quantization!r} in the config are not known: weights count as "
            f"{ask.dtype}, which is more than they take"
        )
    if ask.profile is not None and (assumed := assumed_flops(ask.profile, ask.dtype)) is not None:
        notes.append(assumed)
    if ask.profile is None:
        notes.append("give --profile for what fits where and how fast it is")
    elif ask.devices > 1:
        notes.append("devices share work and KV evenly; what they tell each other is not counted")
    return notes


def _decimal(num_bytes: int) -> str:
    """Return bytes in decimal units, as papers state them."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes} bytes"
