"""SpillDirectory: a private directory per engine that is gone when its process is, however it ended.

Beside each directory ``<root>/spill/<pid>-<random>`` lies a lock file ``<pid>-<random>.lock`` that its process holds
with ``flock`` for as long as it lives; the kernel lets go of it even after ``kill -9``. A lock that can be taken means
a dead owner, whatever process now has that pid and in whichever container. Whoever opens a directory under the same
root first removes those of the dead.

The order decides the races. An owner makes and locks the file, then the directory; a cleaner locks the file, removes
the directory, then the file. Between making and locking, a cleaner may win: the owner then finds its lock taken, or its
path no longer naming the file it locked, and starts over under another name.
"""

import fcntl
import logging
import os
import secrets
import shutil
import weakref
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from tierkv.errors import ConfigError

_log = logging.getLogger(__name__)

_ATTEMPTS: Final = 100


class SpillDirectory:
    """An empty directory of this process's own, removed by ``close``, at exit, or by the next to open one.

    Attributes:
        path: the directory; readable by its owner only.
        removed: names of dead processes' directories that opening this one removed.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """Clean up after dead processes and make a directory.

        Args:
            root: made with its parents if it is missing.

        Raises:
            ConfigError: nothing can be written there.
        """
        parent = Path(root).expanduser().absolute() / "spill"
        try:
            parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.removed = _remove_dead(parent)
            self.path, lock, descriptor = _claim(parent)
        except OSError as error:
            raise ConfigError(
                f"the disk path {root} cannot be used: {error.strerror or error}; "
                f"give a directory that this user may write to"
            ) from error
        # Also runs at exit and when nobody refers to this object any more.
        self._remove = weakref.finalize(self, _give_up, os.getpid(), self.path, lock, descriptor)

    def close(self) -> None:
        """Remove the directory with all it holds. Idempotent; does nothing in a forked child."""
        self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _claim(parent: Path) -> tuple[Path, Path, int]:
    """Make a lock file, hold it, and make its directory."""
    for _ in range(_ATTEMPTS):
        path = parent / f"{os.getpid()}-{secrets.token_hex(6)}"
        lock = path.with_suffix(".lock")
        # Not inherited by programs that are started, but by fork(): a child that outlives us keeps the directory.
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if _take(lock, descriptor):
                path.mkdir(mode=0o700)
                return path, lock, descriptor
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)  # before its lock goes: nobody would look for it afterwards
            lock.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise OSError(f"{_ATTEMPTS} names in a row were taken away by other processes")


def _take(lock: Path, descriptor: int) -> bool:
    """Lock the open file; say whether we hold it and ``lock`` still names it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), lock.stat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _remove_dead(parent: Path) -> tuple[str, ...]:
    """Remove the directories whose lock nobody holds."""
    removed = []
    for lock in sorted(parent.glob("*.lock")):
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # another cleaner was faster, or it belongs to another user
        try:
            if _take(lock, descriptor):
                _remove_both(lock.with_suffix(""), lock)
                removed.append(lock.stem)
        except OSError as error:
            _log.warning("cannot remove the dead spill directory %s: %s", lock.with_suffix(""), error)
        finally:
            os.close(descriptor)
    return tuple(removed)


def _remove_both(path: Path, lock: Path) -> None:
    """Remove a directory, then its lock file, which the caller holds: as long as there is one, the other is there."""
    if path.exists():
        shutil.rmtree(path)
    lock.unlink(missing_ok=True)


def _give_up(pid: int, path: Path, lock: Path, descriptor: int) -> None:
    if os.getpid() != pid:
        return  # a forked child: directory and lock are the parent's
    try:
        _remove_both(path, lock)
    except OSError as error:
        # The lock goes with the descriptor, so the next process to open a directory tries again.
        _log.warning("cannot remove the spill directory %s: %s", path, error)
    finally:
        os.close(descriptor)
