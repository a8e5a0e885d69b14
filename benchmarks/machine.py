"""What a benchmark record says about the machine it was taken on, and what the machine can do at most."""

import ctypes
import mmap
import os
import platform
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
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


def file_system(folder: Path) -> str:
    """Name the kind of file system that a folder lies on."""
    best = ("", "unknown")
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, mount, kind, *_ = line.split()
        if folder.resolve().is_relative_to(mount) and len(mount) > len(best[0]):
            best = mount, kind
    return best[1]


def memory_read_bytes_per_second(num_bytes: int) -> float:
    """Read so much anonymous memory once with all threads, beyond what caches hold, and return the rate."""
    data = _memory(max(2**28, -(-num_bytes // 2**20) * 2**20))
    began = time.perf_counter()
    data.sum()
    return float(data.nbytes / (time.perf_counter() - began))


@cache
def _memory(num_bytes: int) -> torch.Tensor:
    return torch.ones(num_bytes // 4, dtype=torch.float32)


def drop_page_cache(folder: Path) -> float:
    """Drop the pages of all files below a folder from the page cache; return the share of them that stayed.

    Pages that this process has mapped, as LMDB does, are first taken out of its page tables: mapped pages are never
    dropped.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(f"{folder.resolve()}/"):
            begin, end = (int(part, 16) for part in fields[0].split("-"))
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)
    resident = pages = 0
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                there, all_of_it = _resident_pages(libc, file.fileno(), path.stat().st_size)
            resident, pages = resident + there, pages + all_of_it
    return resident / pages if pages else 0.0


def _resident_pages(libc: ctypes.CDLL, number: int, size: int) -> tuple[int, int]:
    """Return how many pages of a file are in memory, and how many it has."""
    pages = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    with mmap.mmap(number, size, prot=mmap.PROT_READ) as view:
        array = np.frombuffer(view, dtype=np.uint8)  # for its address; nothing is read
        failed = libc.mincore(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(size), found)
        del array
    return pages if failed else sum(byte & 1 for byte in found), pages


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
