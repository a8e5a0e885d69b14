"""What ``tierkv simulate`` was asked for: options read, checked, and made into simulations."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tierkv
from tierkv.cli import options
from tierkv.cli.console import BadInput
from tierkv.eviction import POLICIES
from tierkv.layout import DTYPE_BYTES
from tierkv.sizes import format_bytes
from tierkv.tier import Tier
from tierkv.traces import PRESETS, Workload

if TYPE_CHECKING:
    from tierkv.architecture import Architecture
    from tierkv.hardware import HardwareProfile
    from tierkv.simulate_sweep import Job

BLOCK_SIZES = ("16", "32", "64", "128", "256", "512")
PRESET = "agent"


@dataclass(frozen=True)
class Ask:
    """What is simulated; points of a sweep change some of it."""

    architecture: "Architecture"
    profile: "HardwareProfile"
    dtype: str
    block_size: int
    budgets: dict[Tier, int]
    batch: int
    policy: str
    workload: Workload | None
    preset: str | None
    trace: str | None
    seed: int


def read_ask(
    trace: str | None,
    profile: str,
    model: str,
    preset: str | None,
    counts: dict[str, int | None],
    batch: int,
    sizes: dict[Tier, str | None],
    block_size: str,
    policy: str,
    dtype: str,
    seed: int | None,
) -> Ask:
    """Read everything that was asked for.

    Raises:
        BadInput: an option cannot be read, or cannot be had.
    """
    options.one_of(dtype, tuple(DTYPE_BYTES), "--dtype")
    options.one_of(block_size, BLOCK_SIZES, "--block-size")
    options.one_of(policy, tuple(POLICIES), "--policy")
    given = {tier: options.size_bytes(text, f"--{tier.label}") for tier, text in sizes.items() if text is not None}
    workload = None
    if trace is not None:
        for name, value in {"preset": preset, **counts, "seed": seed}.items():
            if value is not None:
                raise BadInput(f"--{name} and a trace exclude each other: leave one of them out")
        _check_readable(trace)
    else:
        options.one_of(preset or PRESET, tuple(PRESETS), "--preset")
        chosen = {name: value for name, value in counts.items() if value is not None}
        workload = replace(PRESETS[preset or PRESET], **chosen)
    from tierkv.architecture import find_architecture
    from tierkv.hardware import find_profile

    architecture, machine = find_architecture(model), find_profile(profile)
    return Ask(
        architecture, machine, dtype, int(block_size), _budgets(given, architecture, machine, dtype), batch, policy,
        workload, None if workload is None else preset or PRESET, trace, seed or 0,
    )  # fmt: skip


def _check_readable(trace: str) -> None:
    try:
        trace.encode()
        with Path(trace).open("rb"):
            pass
    except (UnicodeEncodeError, ValueError):
        raise BadInput(f"{trace!a}: the name of the trace cannot be one; give another") from None
    except OSError as error:
        raise BadInput(f"{trace}: {error.strerror}; give a trace that can be read") from None


def _budgets(
    given: dict[Tier, int], architecture: "Architecture", profile: "HardwareProfile", dtype: str
) -> dict[Tier, int]:
    from tierkv.hardware import check_weights_fit
    from tierkv.plan_memory import default_budgets

    if Tier.DEVICE not in given:
        return {**default_budgets(profile, architecture, dtype), **_below(given, profile)}
    check_weights_fit(profile, architecture, dtype)
    below = {Tier.HOST: 0, Tier.DISK: 0}
    if profile.host is not None:
        below[Tier.HOST] = int(profile.host.memory_bytes.value)
    if profile.disk is not None:
        below[Tier.DISK] = int(profile.disk.capacity_bytes.value)
    return {**below, **_below(given, profile)}


def _below(given: dict[Tier, int], profile: "HardwareProfile") -> dict[Tier, int]:
    """Return the budgets that were given, if the machine has such tiers."""
    if given.get(Tier.HOST) and profile.host is None:
        raise BadInput(f"--host: on {profile.name} the device is the RAM, so there is no host tier; leave it out")
    if given.get(Tier.DISK) and profile.disk is None:
        raise BadInput(f"--disk: {profile.name} has no disk; leave it out, or give a profile with one")
    return given


def job_of(ask: Ask, point: dict[str, Any]) -> "Job":
    """Return the simulation of one point."""
    from tierkv.cost import CostModel
    from tierkv.hardware import costs
    from tierkv.simulate_setup import make_setup
    from tierkv.simulate_sweep import Job

    budgets = ask.budgets | _below({tier: point[tier.label] for tier in Tier if tier.label in point}, ask.profile)
    memory = int(ask.profile.device.memory_bytes.value) - ask.architecture.weights.total_bytes(ask.dtype)
    if budgets[Tier.DEVICE] > memory:
        raise BadInput(
            f"a device budget of {format_bytes(budgets[Tier.DEVICE])} is not possible: beside the weights {ask.profile.name} has "
            f"{format_bytes(memory)}; give --device at most that"
        )
    batch = point.get("batch", ask.batch)
    layout = ask.architecture.layout(ask.block_size, ask.dtype)
    cost = CostModel(
        costs(ask.profile, ask.architecture, ask.dtype, rows=batch),
        len(layout.layers),
        layout.block_bytes,
        ask.block_size,
    )
    workload = ask.workload
    if workload is not None and "clients" in point:
        workload = replace(workload, clients=point["clients"])
    job = Job(
        cost=cost, budgets=budgets, batch=batch, policy=point.get("policy", ask.policy), workload=workload, trace=ask.trace,
        seed=ask.seed,
    )  # fmt: skip
    make_setup(
        cost, device_bytes=budgets[Tier.DEVICE], host_bytes=budgets[Tier.HOST], disk_bytes=budgets[Tier.DISK]
    )  # says at once what is impossible
    return job


def facts_of(ask: Ask) -> dict[str, Any]:
    """Return what was simulated, for the record."""
    source: dict[str, Any] = {"trace": ask.trace}
    if ask.workload is not None:
        source = {"preset": ask.preset, "seed": ask.seed, "workload": asdict(ask.workload)}
    return {
        "kind": "simulated: the engine's own decisions in virtual time, nothing is computed or copied",
        "version": tierkv.__version__,
        "model": ask.architecture.name,
        "profile": ask.profile.name,
        "machine": ask.profile.title,
        "dtype": ask.dtype,
        "block_size": ask.block_size,
        "batch": ask.batch,
        "policy": ask.policy,
        "budgets": {tier.label: ask.budgets[tier] for tier in Tier},
        **source,
    }
