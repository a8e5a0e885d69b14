"""What a benchmark record says about the machine it was taken on, and what the machine can do at most."""

import os
import platform
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

import tierkv


def description() -> dict[str, Any]:
    """Return processor, cores, memory, accelerator and versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tierkv": tierkv.__version__,
    }


def memory_read_bytes_per_second(num_bytes: int) -> float:
    """Read so much anonymous memory once with all threads, beyond what caches hold, and return the rate."""
    data = _memory(max(2**28, -(-num_bytes // 2**20) * 2**20))
    began = time.perf_counter()
    data.sum()
    return float(data.nbytes / (time.perf_counter() - began))


@cache
def _memory(num_bytes: int) -> torch.Tensor:
    return torch.ones(num_bytes // 4, dtype=torch.float32)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
