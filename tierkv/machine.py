"""What this machine has to give: the budgets of a configuration in bytes, and the executor its device asks for."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tierkv.budgets import Budgets, resolve
from tierkv.config import CacheConfig
from tierkv.errors import ConfigError, TierKVError
from tierkv.layout import BlockLayout, LayerSpec
from tierkv.sizes import free_memory
from tierkv.stores import Stores
from tierkv.transfer import ThreadTransfers, TransferEngine

if TYPE_CHECKING:
    import torch

_SMALLEST_MODEL: Final = (LayerSpec(model_index=0, kv_heads=1, key_dim=1, value_dim=1),)
_SPILL: Final = "spill"  # what ``SpillDirectory`` makes in the folder of the store
_TRIAL_BYTES: Final = 16 << 20
"""More than the smallest model needs of any tier."""


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


def refusals(config: CacheConfig, budgets: Budgets, device: "torch.device") -> dict[str, str]:
    """Return, by key, why no model whatsoever could run with these budgets; nothing where one could.

    The stores are opened, one tier after another, as for the smallest model there could be, and closed again. At most
    16 MiB of a budget are taken, and nothing is left behind on the disk.

    Args:
        config: the checked configuration.
        budgets: what it comes to here.
        device: where a model would run.
    """
    layout = BlockLayout(_SMALLEST_MODEL, config.block_size, "float16")
    enough = replace(budgets, device=_TRIAL_BYTES, host=0, disk=0, write_queue=0, disk_path=None)
    trials = {
        "device.capacity": replace(enough, device=min(budgets.device, _TRIAL_BYTES)),
        "host.capacity": replace(enough, host=min(budgets.host, _TRIAL_BYTES)),
    }
    found = {}
    with _trial_folder(budgets.disk_path) as folder:
        if folder is not None:
            # The path counts as set: for a default, generate warns and goes on, and here both are to be seen.
            config = config.replace({"disk.path": folder})
            trials["disk.path" if budgets.disk >= _TRIAL_BYTES else "disk.capacity"] = replace(
                enough,
                host=_TRIAL_BYTES if budgets.host else 0,
                disk=min(budgets.disk, _TRIAL_BYTES),
                write_queue=min(budgets.write_queue, _TRIAL_BYTES),
                disk_path=folder,
            )
        for key, trial in trials.items():
            try:
                Stores.open(layout, config, trial, device).close()
            except (TierKVError, ImportError) as error:  # the second where lmdb is missing
                found[key] = str(error).replace(str(folder), str(budgets.disk_path))
    return found


@contextmanager
def _trial_folder(path: Path | None) -> Iterator[Path | None]:
    """Lend a folder that can be used if and only if ``path`` can, so that nothing new is left at ``path``."""
    if path is None:
        yield None
        return
    nearest = next(folder for folder in (path / _SPILL, path, *path.parents) if os.path.exists(folder))  # noqa: PTH110
    try:
        # Where a part of the path is there already, or nothing can be made, opening the store makes nothing either.
        temporary = None if nearest.name == _SPILL else tempfile.mkdtemp(prefix=".tierkv-", dir=nearest)
    except OSError:
        temporary = None
    if temporary is None:
        yield path
        return
    try:
        yield Path(temporary, *path.relative_to(nearest).parts)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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
