"""What this machine has to give: the budgets of a configuration in bytes, and the executor its device asks for."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.budgets import Budgets, resolve
from tierkv.config import CacheConfig
from tierkv.errors import ConfigError
from tierkv.sizes import free_memory
from tierkv.transfer import ThreadTransfers, TransferEngine

if TYPE_CHECKING:
    import torch


def resolve_budgets(config: CacheConfig, device: "torch.device") -> Budgets:
    """Return the budgets of ``config`` on this machine, from what is free now.

    Raises:
        ConfigError: a budget that was set does not fit, or the device is neither a CPU nor a CUDA GPU.
    """
    import torch

    cuda = device.type == "cuda"
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"tiers on {device.type} devices are not supported; legal: cpu, cuda")
    free_device = torch.cuda.mem_get_info(device)[0] if cuda else 0
    return resolve(
        config,
        cuda=cuda,
        free_device_bytes=free_device,
        free_ram_bytes=free_memory(),
        free_disk_bytes=free_disk(config.disk.path),
    )


def free_disk(path: str | Path) -> int | None:
    """Return the free bytes of the file system where ``path`` is or would be made, or None where nobody knows."""
    try:
        folder = Path(path).expanduser().absolute()
    except RuntimeError:  # a home folder of nobody; whoever opens the store says so
        return None
    for candidate in (folder, *folder.parents):
        try:
            return shutil.disk_usage(candidate).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def make_transfers(device: "torch.device", workers: int) -> TransferEngine:
    """Return the executor for copies to and from ``device``."""
    if device.type == "cuda":
        from tierkv.transfer_cuda import CudaTransfers

        return CudaTransfers(device, workers)
    return ThreadTransfers(workers)
