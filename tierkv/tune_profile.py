"""The hardware profile of this machine, with what ``tierkv tune`` measured: a TOML that ``--profile`` takes."""

import datetime
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import torch

from tierkv.benchmarks.machine import description, memory_read_bytes_per_second
from tierkv.fit import Fit
from tierkv.tier import Tier, Wire

_MATRIX: Final = 1024
_COPY_BYTES: Final = 256 * 2**20

Figures = Mapping[str, tuple[float, str]]
"""Values by key, each with where it comes from."""


@dataclass(frozen=True)
class Subject:
    """What was measured.

    Attributes:
        model: its name.
        block_size: tokens in a block.
        block_bytes: of a block, all layers.
        parameters: of the model.
        write_bytes_per_second: at what rate the store takes KV for good.
        disk: a folder on the disk that is meant.
    """

    model: str
    block_size: int
    block_bytes: int
    parameters: int
    write_bytes_per_second: float
    disk: Path


def profile_toml(model: Any, fitted: Fit, subject: Subject) -> str:
    """Measure what is still missing, and return the profile of this machine.

    Args:
        model: a transformers model, on its device.
        fitted: the parameters of this machine and model.
        subject: what else is known.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    said = description()
    name = said["accelerator"] or said["processor"] or "this machine"
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    source = f"measured on {today} with {subject.model} in {dtype}"
    lines = [
        f"# {name}: written by tierkv tune, for --profile of tierkv plan and tierkv simulate.",
        f"name = {json.dumps(_slug(name))}",
        f"title = {json.dumps(f'{name}, {os.cpu_count()} cores')}",
        "",
        *_section("device", _device(model, fitted, subject, source)),
        *_section(
            "disk", {"capacity_bytes": (psutil.disk_usage(str(subject.disk)).total, "what the file system says")}
        ),
        *_wires(model.device, fitted, subject, source),
        *_measured(fitted, subject, dtype),
    ]
    return "\n".join(lines) + "\n"


def _device(model: Any, fitted: Fit, subject: Subject, source: str) -> Figures:
    device, costs = model.device, fitted.costs
    on_gpu = device.type == "cuda"
    memory = torch.cuda.mem_get_info(device)[1] if on_gpu else psutil.virtual_memory().total
    bandwidth = _device_read(device) if on_gpu else memory_read_bytes_per_second(2**28)
    flops = {dtype: _flops(device, dtype) for dtype in (torch.bfloat16, torch.float32, model.dtype)}
    weight_seconds = subject.parameters * model.dtype.itemsize / bandwidth
    reached = 2 * subject.parameters / costs.token_seconds / flops[model.dtype] if costs.token_seconds else 0.5
    reads = costs.kv_bytes_per_second[Tier.DEVICE] / bandwidth
    return {
        "memory_bytes": (memory, "what the system says"),
        "memory_bytes_per_second": (bandwidth, f"a plain read, {source}"),
        "flops_per_second": (flops[torch.bfloat16], f"a matrix product in bfloat16, {source}"),
        "float32_flops_per_second": (flops[torch.float32], f"a matrix product in float32, {source}"),
        "read_efficiency": (min(1.0, reads), f"attention, {source}"),
        "compute_efficiency": (min(1.0, reached), f"prefill, {source}"),
        "step_seconds": (
            max(0.0, costs.step_seconds - weight_seconds),
            f"a token without KV, less its weights, {source}",
        ),
        "overlap": (costs.overlap, f"fitted, {source}"),
    }


def _wires(device: torch.device, fitted: Fit, subject: Subject, source: str) -> list[str]:
    costs, lines = fitted.costs, []
    if device.type == "cuda":
        up, down = _copies(device)
        host = {
            "memory_bytes": (psutil.virtual_memory().total, "what the system says"),
            "memory_bytes_per_second": (memory_read_bytes_per_second(2**28), f"a plain read, {source}"),
        }
        lines += _section("host", host)
        lines += _cable("host_to_device", 0.0, up, f"pinned copies, {source}")
        lines += _cable("device_to_host", 0.0, down, f"pinned copies, {source}")
    middle = "host" if lines else "device"
    spill = costs.wires.get(Wire(Tier.DISK, Tier.DEVICE))
    read = costs.stored_bytes_per_second or subject.write_bytes_per_second
    why = f"records of a slice; prefix store, page cache empty, {source}"
    lines += _cable(f"disk_to_{middle}", spill.latency_seconds if spill else 0.0, read, why)
    written = f"prefix store, written for good, {source}"
    return [*lines, *_cable(f"{middle}_to_disk", 0.0, subject.write_bytes_per_second, written)]


def _measured(fitted: Fit, subject: Subject, dtype: str) -> list[str]:
    costs = fitted.costs
    lines = ["[measured]", f"model = {json.dumps(subject.model)}", f'dtype = "{dtype}"']
    numbers: Mapping[str, Any] = {
        "layers": fitted.layers, "block_bytes": subject.block_bytes, "block_size": subject.block_size,
        **{name: getattr(costs, name) for name in _NUMBERS},
    }  # fmt: skip
    lines += [f"{name} = {value!r}" for name, value in numbers.items() if value is not None]
    lines += ["", "[measured.kv_bytes_per_second]"]
    lines += [f"{tier.label} = {rate!r}" for tier, rate in costs.kv_bytes_per_second.items()]
    for wire, line in costs.wires.items():
        lines += ["", f"[measured.wires.{wire.label}]", f"latency_seconds = {line.latency_seconds!r}"]
        lines += [f"bytes_per_second = {line.bytes_per_second!r}"]
    return lines


_NUMBERS: Final = (
    "step_seconds", "row_seconds", "overlap", "hop_seconds", "token_seconds", "pair_seconds", "past_pair_seconds",
    "restore_seconds", "block_seconds", "stored_bytes_per_second",
)  # fmt: skip


def _section(name: str, figures: Figures) -> list[str]:
    lines = [f"[{name}]"]
    lines += [f"{key} = {{ value = {value!r}, source = {json.dumps(text)} }}" for key, (value, text) in figures.items()]
    return [*lines, ""]


def _cable(name: str, latency: float, rate: float, source: str) -> list[str]:
    return _section(name, {"latency_seconds": (latency, source), "bytes_per_second": (rate, source)})


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.casefold()).strip("-") or "machine"


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations a second of a matrix product, the best of a few."""
    one = torch.ones((_MATRIX, _MATRIX), dtype=dtype, device=device)
    best = float("inf")
    for _ in range(5):
        best = min(best, _seconds(device, lambda: one @ one))
    return 2 * _MATRIX**3 / best


def _device_read(device: torch.device) -> float:
    data = torch.ones(_COPY_BYTES, dtype=torch.float32, device=device)
    return data.nbytes / min(_seconds(device, data.sum) for _ in range(5))


def _copies(device: torch.device) -> tuple[float, float]:
    """Return the rates of pinned copies to the device and from it."""
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    own = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    up = min(_seconds(device, lambda: own.copy_(host, non_blocking=True)) for _ in range(5))
    down = min(_seconds(device, lambda: host.copy_(own, non_blocking=True)) for _ in range(5))
    return _COPY_BYTES / up, _COPY_BYTES / down


def _seconds(device: torch.device, work: Any) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
