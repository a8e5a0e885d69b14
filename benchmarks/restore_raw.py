"""How fast the disk gives bytes back at best: plain reads of a file, page cache dropped, whatever way is fastest."""

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

CHUNK_BYTES: Final = 4 << 20
WAYS: Final = (("buffered", 1), ("buffered", 2), ("direct", 1), ("direct", 2))
"""How a file is opened, and by how many threads it is read."""


def write_file(path: Path, num_bytes: int) -> None:
    """Write a file of at least so many bytes, whole pages that no file system can store as anything less."""
    random = np.random.default_rng(0)
    with path.open("wb") as file:
        for begin in range(0, num_bytes, CHUNK_BYTES):
            size = -(-min(CHUNK_BYTES, num_bytes - begin) // mmap.PAGESIZE) * mmap.PAGESIZE
            file.write(random.bytes(size))
        file.flush()
        os.fsync(file.fileno())


def read_bytes_per_second(path: Path, way: str, threads: int) -> float | None:
    """Read a file once, into buffers that are used again; None where its file system has no such reads."""
    size = path.stat().st_size
    try:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if way == "direct" else 0))
        try:
            with ThreadPoolExecutor(threads) as pool:
                buffers = [mmap.mmap(-1, CHUNK_BYTES) for _ in range(threads)]  # page-aligned, as direct reads want it
                began = time.perf_counter()
                done = list(pool.map(lambda index: _read(number, size, buffers[index], index, threads), range(threads)))
                seconds = time.perf_counter() - began
        finally:
            os.close(number)
    except OSError:
        if way == "direct":
            return None
        raise
    return sum(done) / seconds


def _read(number: int, size: int, buffer: mmap.mmap, index: int, threads: int) -> int:
    """Read every so many chunks of a file; return how many bytes."""
    done = 0
    with memoryview(buffer) as view:
        for begin in range(index * CHUNK_BYTES, size, threads * CHUNK_BYTES):
            at, end = begin, min(size, begin + CHUNK_BYTES)
            while at < end:
                got = os.preadv(number, [view[: end - at]], at)
                if not got:
                    break
                at, done = at + got, done + got
    return done
