"""SlabFiles: files of slots of equal size, read and written at offsets. Which slot is whose is the index's business.

Nothing is mapped: a file that somebody cut off gives short reads, not a dead process. Room is given back by punching
holes, which Linux's file systems can do; where they cannot, it stays allocated and is used again.
"""

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tierkv.storage.codec import Buffer

SLOT_ALIGNMENT: Final = 4096
"""Slots are whole pages of any file system in use."""

_NO_WAIT: Final = getattr(os, "RWF_NOWAIT", 0)
_KEEP_SIZE: Final = 1
_PUNCH_HOLE: Final = 2
_UNSUPPORTED: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def slot_bytes_of(record_bytes: int) -> int:
    """Return the size of the slot that a record of this length goes to."""
    return -(-record_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


class SlabFiles:
    """One file for each slot size, opened when it is first needed. Any number of threads may read at once."""

    def __init__(self, folder: Path) -> None:
        """Use the files in a folder; makes none yet."""
        self.can_punch = True
        self._folder = folder
        self._lock = threading.Lock()
        self._descriptors: dict[int, int] = {}
        self._fallocate = _find_fallocate()

    def path(self, slot_bytes: int) -> Path:
        """Return where the slots of this size lie."""
        return self._folder / f"slab-{slot_bytes}.bin"

    def sizes(self) -> list[int]:
        """Return the slot sizes of all files in the folder, used or not."""
        names = (path.stem.removeprefix("slab-") for path in self._folder.glob("slab-*.bin"))
        return sorted(int(name) for name in names if name.isdecimal())

    def read(self, slot_bytes: int, slot: int, view: memoryview, num_slots: int = 1) -> int:
        """Fill ``view`` with slots side by side; return how many bytes there were.

        Raises:
            OSError: the disk cannot be read.
        """
        return os.preadv(self._open(slot_bytes), [view[: num_slots * slot_bytes]], slot * slot_bytes)

    def is_cached(self, slot_bytes: int, slot: int) -> bool:
        """Whether the page cache holds the beginning of a slot, as far as the operating system says."""
        try:
            return os.preadv(self._open(slot_bytes), [bytearray(1)], slot * slot_bytes, _NO_WAIT) == 1 and _NO_WAIT != 0
        except (OSError, NotImplementedError):
            return False

    def write(self, slot_bytes: int, slot: int, record: Buffer) -> None:
        """Write a record to the start of a slot.

        Raises:
            OSError: the disk is full or cannot be written; part of the record may be there.
        """
        descriptor, offset, view = self._open(slot_bytes), slot * slot_bytes, memoryview(record)
        while view:
            written = os.pwrite(descriptor, view, offset)
            offset, view = offset + written, view[written:]

    def sync(self, slot_bytes: int) -> None:
        """Return when everything written to the slots of this size is on the disk."""
        os.fdatasync(self._open(slot_bytes))

    def punch(self, slot_bytes: int, slot: int, num_slots: int = 1) -> bool:
        """Give back the room of slots side by side; False where that is impossible. They then read as zeros.

        Raises:
            OSError: the disk failed.
        """
        if not self.can_punch or self._fallocate is None:
            self.can_punch = False
            return False
        number = self._fallocate(self._open(slot_bytes), slot * slot_bytes, num_slots * slot_bytes)
        if number in _UNSUPPORTED:
            self.can_punch = False
        elif number:
            raise OSError(number, os.strerror(number), str(self.path(slot_bytes)))
        return not number

    def measure(self, slot_bytes: int) -> tuple[int, int]:
        """Return length and allocated bytes of the file of these slots."""
        status = os.fstat(self._open(slot_bytes))
        return status.st_size, status.st_blocks * 512

    def cut(self, slot_bytes: int, num_slots: int) -> None:
        """Cut the file off after so many slots, if it is longer."""
        if self.measure(slot_bytes)[0] > num_slots * slot_bytes:
            os.ftruncate(self._open(slot_bytes), num_slots * slot_bytes)

    def close(self) -> None:
        """Close the files. Nobody may be reading."""
        with self._lock:
            while self._descriptors:
                os.close(self._descriptors.popitem()[1])

    def _open(self, slot_bytes: int) -> int:
        descriptor = self._descriptors.get(slot_bytes)
        if descriptor is None:
            with self._lock:
                descriptor = self._descriptors.get(slot_bytes)
                if descriptor is None:
                    descriptor = os.open(self.path(slot_bytes), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                    self._descriptors[slot_bytes] = descriptor
        return descriptor


def _find_fallocate() -> Callable[[int, int, int], int] | None:
    """Return a function that punches a hole and answers with an errno, or None where there is none."""
    try:
        function = ctypes.CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

    def punch(descriptor: int, offset: int, num_bytes: int) -> int:
        if function(descriptor, _KEEP_SIZE | _PUNCH_HOLE, offset, num_bytes):
            return ctypes.get_errno()
        return 0

    return punch
