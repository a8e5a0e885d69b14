"""``tierkv info``: what tierkv finds on this machine, and what a config comes to on it."""

import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

import tierkv
from tierkv.cli.console import BadInput, out, print_json, reserve_stdout
from tierkv.cli.process import nothing_to_clean_up
from tierkv.config import CacheConfig, load_config
from tierkv.config_toml import default_toml
from tierkv.sizes import format_bytes, free_memory, show

PACKAGES = ("torch", "transformers", "accelerate", "gguf", "safetensors", "lmdb", "triton", "numpy", "xxhash")

EPILOG = """[bold]Examples[/bold]

tierkv info

tierkv info --config tierkv.toml --json

tierkv info --default-config > tierkv.toml
"""


def info(
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="The tierkv.toml to resolve. Default: $TIERKV_CONFIG.")
    ] = None,
    show_default: Annotated[
        bool, typer.Option("--default-config", help="Print a tierkv.toml with every key explained, and exit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Show versions, memory, GPUs, and the bytes that each tier would take here.

    The tiers are those of [bold]--config[/bold] or of the defaults, with TIERKV_ variables of the environment applied.
    Each is tried with the smallest model there could be; a problem is what [bold]tierkv generate[/bold] would say of it.
    """
    if show_default:
        if config is not None:
            raise BadInput("--default-config and --config exclude each other: it prints the defaults")
        if as_json:
            print_json({"default_config": default_toml()})
        else:
            sys.stdout.write(default_toml())
        return
    checked = load_config(config)
    with reserve_stdout(as_json):
        found = collect(checked)
    if as_json:
        print_json(found)
    else:
        _print(found)


def collect(config: CacheConfig) -> dict[str, Any]:
    """Return everything that the command reports, ready for JSON.

    Raises:
        ConfigError: something that the config sets does not fit this machine.
    """
    with nothing_to_clean_up():
        import torch

        from tierkv.machine import refusals, resolve_budgets

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    budgets = resolve_budgets(config, device)
    problems = refusals(config, budgets, device)
    folder = budgets.disk_path
    return {
        "versions": {"tierkv": tierkv.__version__, "python": platform.python_version()}
        | {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "device": "cuda" if cuda else "cpu",
        "cuda_available": cuda,
        "gpus": [_gpu(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count() * cuda)],
        "cpus": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "ram_bytes": {
            "total": int(psutil.virtual_memory().total),
            "free": free_memory(),
            "cgroup_limit": cgroup_limit(),
        },
        "budget_bytes": {"device": budgets.device, "host": budgets.host, "disk": budgets.disk},
        "write_queue_bytes": budgets.write_queue,
        "store_path": None if folder is None else str(folder),
        "store_writable": None if folder is None else "disk.path" not in problems,
        "paged_attention": _paged_attention(device),
        "problems": problems,
        "notes": list(budgets.notes),
        "settings": {key: _plain(value) for key, value in config.explicit().items()},
    }


def _paged_attention(device: Any) -> str:
    """Say whether attention can read blocks where they lie, for the most usual shape; compiles the CPU's kernel for it."""
    import torch

    from tierkv.kernels import dispatch

    reason = dispatch.unsupported(device, torch.float32, 64, 64, 1)
    return f"not possible: {reason}" if reason else "possible"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _gpu(properties: Any) -> dict[str, Any]:
    return {
        "name": properties.name,
        "total_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}",
    }


def cgroup_limit(root: Path = Path("/")) -> int | None:
    """Return the smallest memory limit of the cgroups above this process, v2 or v1, or None where there is none.

    Args:
        root: where ``proc`` and ``sys`` are looked for; tests pass a fake tree.
    """
    mounts = root / "sys/fs/cgroup"
    limits = []
    for line in _lines(root / "proc/self/cgroup"):
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        bases = [mounts / "memory"] if controllers else [mounts, mounts / "unified"]
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        steps = [step for step in path.split("/") if step not in {"", ".", ".."}]
        for depth in range(len(steps) + 1):
            for base in bases:
                texts = _lines(base.joinpath(*steps[:depth]) / name)
                limits += [int(text) for text in texts if re.fullmatch(r"\d+", text)]  # or "max"
    # v1 says "no limit" with the largest number of pages there is.
    return min((limit for limit in limits if limit < 2**60), default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):
        return []


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)


def _print(found: dict[str, Any]) -> None:
    from tierkv.cli.tables import pairs_table

    ram, budget = found["ram_bytes"], found["budget_bytes"]
    limit = ram["cgroup_limit"]
    out.print("Versions", style="bold")
    out.print(pairs_table({name: text or "not installed" for name, text in found["versions"].items()}))
    out.print("\nMachine", style="bold")
    gpus = [f"{gpu['name']}, {format_bytes(gpu['total_bytes'])}" for gpu in found["gpus"]]
    out.print(
        pairs_table(
            {
                "platform": found["platform"],
                "device": "; ".join(gpus) or "cpu (no CUDA device)",
                "cpus": f"{found['cpus']}, torch uses {found['threads']} threads",
                "RAM": f"{format_bytes(ram['free'])} free of {format_bytes(ram['total'])}",
                "cgroup limit": "none" if limit is None else format_bytes(limit),
                "paged attention": found["paged_attention"],
            }
        )
    )
    out.print("\nTiers", style="bold")
    path = found["store_path"]
    trouble = "" if found["store_writable"] is not False else " (cannot be used)"
    tiers = {name: format_bytes(size) if size else "off" for name, size in budget.items()}
    if path is not None:
        tiers |= {"write queue": format_bytes(found["write_queue_bytes"]), "store": f"{path}{trouble}"}
    tiers |= {key: show(value) for key, value in found["settings"].items()}
    out.print(pairs_table(tiers))
    for key, problem in found["problems"].items():
        out.print(f"problem: with this {key} no model can use every tier: {problem}", style="bold", soft_wrap=True)
    for note in found["notes"]:
        out.print(f"note: {note}", style="dim")
