"""What plain copies reach on this machine: the measure of what tierkv's wires reach.

    host and device   one large copy from memory to memory, beyond what caches hold; pinned memory where there is a GPU
    to the disk       a file is written without waiting for the medium, as tierkv's disk tier is
    from the disk     the file that was just written is read: it lies in the page cache, as what the disk tier wrote does

The best of a few tries counts.
"""

import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from tierkv.benchmarks.longcontext_wires import Rates
from tierkv.benchmarks.restore_raw import CHUNK_BYTES, read_bytes_per_second
from tierkv.tier import Tier, Wire

COPY_BYTES: Final = 1 << 27
FILE_BYTES: Final = 1 << 27
_TRIES: Final = 4
_READERS: Final = (1, 2)


def machine_rates(device: torch.device, folder: Path) -> Rates:
    """Measure what plain copies reach here, in bytes a second, by wire; None where that is not known.

    Args:
        device: where the model computes.
        folder: on the disk of the disk tier; must be there.
    """
    up, down = _memory_rates(device)
    written = read = None
    with suppress(OSError):  # no room: what is not measured is not known
        written, read = _disk_rates(folder)
    on_cpu = device.type == "cpu"
    # Between a GPU and the disk bytes pass through host memory: there is no one copy to compare with.
    rates = {
        Wire(Tier.DEVICE, Tier.HOST): down,
        Wire(Tier.HOST, Tier.DEVICE): up,
        Wire(Tier.HOST, Tier.DISK): written,
        Wire(Tier.DEVICE, Tier.DISK): written if on_cpu else None,
        Wire(Tier.DISK, Tier.HOST): read,
        Wire(Tier.DISK, Tier.DEVICE): read if on_cpu else None,
    }
    return {wire.label: None if rate is None else round(rate) for wire, rate in rates.items()}


def _memory_rates(device: torch.device) -> tuple[float, float]:
    """Return the rates of plain copies to the device and from it."""
    on_cpu = device.type == "cpu"
    # Written once, so that no page is handed out while the clock runs.
    host = torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=not on_cpu)
    own = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    up, down = _copy_rate(own, host, device), _copy_rate(host, own, device)
    return (max(up, down),) * 2 if on_cpu else (up, down)  # on a CPU both are one memory


def _copy_rate(destination: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    def once() -> float:
        _synchronize(device)
        began = time.perf_counter()
        destination.copy_(source, non_blocking=True)
        _synchronize(device)
        return time.perf_counter() - began

    return source.nbytes / min(once() for _ in range(_TRIES))


def _disk_rates(folder: Path) -> tuple[float, float]:
    """Return at what rates a new file is written and read again."""
    # Bytes that no file system stores as anything less.
    chunk = os.urandom(CHUNK_BYTES)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path, written = Path(name) / "bytes", 0.0
        for _ in range(2):
            path.unlink(missing_ok=True)
            began = time.perf_counter()
            with path.open("wb", buffering=0) as file:
                for _ in range(FILE_BYTES // CHUNK_BYTES):
                    file.write(chunk)
            written = max(written, FILE_BYTES / (time.perf_counter() - began))
        ways = [readers for readers in _READERS for _ in range(_TRIES)]
        read = max(read_bytes_per_second(path, "buffered", readers) or 0.0 for readers in ways)
    return written, read


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
