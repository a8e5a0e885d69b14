"""PrefixFolder: the prefix store's directory. Who may use it, which format it has, and whether its index can be trusted.

Two lock files, held with ``flock``, which the kernel lets go of however a process ends::

    opening.lock   held while a process opens or closes the store: one at a time
    use.lock       shared by all processes that use the store: whoever gets it for itself alone is the first, or the last

Only who is alone may replace the index. The last to close leaves a digest of the index file; the first to open compares
it. Where it does not match (a process was killed, a byte was changed) the file is verified before LMDB maps it, and one
that is not sound is moved aside.
"""

import errno
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import xxhash

from tierkv.errors import StoreError
from tierkv.storage.prefix_index import LOCK_BYTES, find_damage

_log = logging.getLogger(__name__)

FORMAT_VERSION: Final = 1
"""Of the folder and the index; records have their own."""

_FORMAT: Final = "tierkv prefix store"
_OWN_NAMES: Final = {"opening.lock", "use.lock", "format.json.new", "format.json"}
_BROKEN: Final = "broken"
_CHUNK_BYTES: Final = 4 << 20
_POLL_SECONDS: Final = 0.005


class PrefixFolder:
    """A directory that this process uses. Not thread-safe.

    Attributes:
        path: the directory, ``<root>/prefix``.
        index_path: directory of the index.
        alone: whether nobody else used it when it was opened.
        clean: whether the index is exactly as the last process left it.
        moved: why the index that was found has been moved aside; empty if it was not.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """Name the directory; touches nothing yet."""
        self.path = (Path(root).expanduser() / "prefix").absolute()
        self.index_path = self.path / "index"
        self.alone = False
        self.clean = False
        self.moved = ""
        self._use = -1

    @property
    def exists(self) -> bool:
        """Whether there is a store."""
        return (self.path / "format.json").exists()

    @contextmanager
    def opening(self, wait_seconds: float) -> Iterator[None]:
        """Be the only process to open or close the store, until the end of the block.

        Raises:
            StoreError: the directory cannot be used, is none of ours, or others were opening it for ``wait_seconds``.
        """
        try:
            str(self.path).encode()
        except UnicodeEncodeError:
            raise StoreError(f"the path {str(self.path)!a} is not UTF-8, which LMDB needs; give another") from None
        try:
            self._check_files()
            self._check_format()  # first without a lock: no byte of a newer store may change
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = _open_lock(self.path / "opening.lock")
        except StoreError:
            raise
        except OSError as error:
            raise self._unusable(error) from error
        try:
            deadline = time.monotonic() + wait_seconds
            while not _try_lock(descriptor, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise StoreError(f"another process has been opening {self.path} for {wait_seconds:g} s; try again")
                time.sleep(_POLL_SECONDS)
            yield
        finally:
            os.close(descriptor)

    def enter(self) -> None:
        """Use the directory, inside ``opening``: check the format, and the index if nobody else is using it.

        Raises:
            StoreError: the directory cannot be used, is none of ours, or was made by a newer tierkv.
        """
        try:
            if not self._check_format():
                _write_whole(self.path / "format.json", json.dumps({"format": _FORMAT, "version": FORMAT_VERSION}))
            self._use = _open_lock(self.path / "use.lock")
            self.alone = _try_lock(self._use, fcntl.LOCK_EX)
            if self.alone:
                self._check_index()
            # Nobody slips in while the lock changes its kind: whoever opens or closes holds the other one.
            fcntl.flock(self._use, fcntl.LOCK_SH)
        except BaseException as error:
            self.let_go()
            if isinstance(error, OSError) and not isinstance(error, StoreError):
                raise self._unusable(error) from error
            raise

    def move_index_aside(self, reason: str) -> None:
        """Put the index that nobody has open away, in place of one put away before, so that an empty one is made.

        Raises:
            OSError: it cannot be moved.
        """
        self.moved = reason
        old = self._moved_aside()
        numbers = (path.name.removeprefix("index.damaged-") for path in old)
        number = 1 + max((int(number) for number in numbers if number.isdecimal()), default=0)
        for path in old:
            shutil.rmtree(path)
        self.index_path.rename(self.path / f"index.damaged-{number}")
        _log.warning(
            "the prefix index in %s was damaged and is moved to index.damaged-%d; the prefix store starts empty (%s)",
            self.path, number, reason,
        )  # fmt: skip

    def remove_moved_aside(self) -> int:
        """Delete what was moved aside; return its allocated bytes."""
        freed = 0
        for path in self._moved_aside():
            freed += _allocated_bytes(path)
            shutil.rmtree(path, ignore_errors=True)
        return freed

    def other_bytes(self) -> int:
        """Return the allocated bytes of all that is neither index nor slab."""
        kept = (self.path / "namespaces", *self._moved_aside())
        return sum(_allocated_bytes(path) for path in kept)

    def allocated_bytes(self) -> int:
        """Return the allocated bytes of everything in the directory."""
        return _allocated_bytes(self.path)

    def write_manifest(self, digest: bytes, manifest: Mapping[str, Any]) -> None:
        """Put a namespace's manifest beside the data, for people to read.

        Raises:
            OSError: it cannot be written.
        """
        path = self.path / "namespaces" / f"{digest.hex()[:16]}.json"
        text = json.dumps({"digest": digest.hex(), "manifest": dict(manifest)}, indent=2, sort_keys=True) + "\n"
        with suppress(OSError, UnicodeDecodeError):
            if path.read_text(encoding="utf-8") == text:
                return
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _write_whole(path, text)

    def forget_manifest(self, digest: bytes) -> None:
        """Delete a namespace's manifest."""
        (self.path / "namespaces" / f"{digest.hex()[:16]}.json").unlink(missing_ok=True)

    def leave(self, *, sound: bool, broken: bool) -> None:
        """Stop using the directory, and if this is the last process, leave word for the next. Only inside ``opening``.

        Args:
            sound: the closed index may be trusted as long as it does not change.
            broken: nothing of it may be trusted, whatever the verifier says.
        """
        if self._use < 0:
            return
        try:
            if (sound or broken) and _try_lock(self._use, fcntl.LOCK_EX):
                with suppress(OSError):
                    word = _BROKEN if broken else _digest(self.index_path / "data.mdb")
                    _write_whole(self.path / "index.digest", word)
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Close the lock file; all that a forked child may do. Idempotent."""
        if self._use >= 0:
            os.close(self._use)
            self._use = -1

    def _check_format(self) -> bool:
        """Say whether there is a store of a format that we know.

        Raises:
            StoreError: there is something else.
            OSError: it cannot be read.
        """
        path = self.path / "format.json"
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            if self.path.is_dir() and (names := {entry.name for entry in self.path.iterdir()} - _OWN_NAMES):
                raise self._foreign(f"{min(names)!r}, but no format.json") from None
            return False
        try:
            fields = json.loads(text)
            kind, version = fields["format"], fields["version"]
        except (ValueError, TypeError, KeyError):
            raise self._foreign("a format.json that cannot be read") from None
        if kind != _FORMAT or not isinstance(version, int):
            raise self._foreign("a format.json of something else")
        if version > FORMAT_VERSION:
            raise StoreError(
                f"{self.path} was made by a newer tierkv (format {version}, this one reads {FORMAT_VERSION}); "
                f"use another disk.path or delete it"
            )
        if version < FORMAT_VERSION:
            raise StoreError(f"{self.path} has format {version}, which no tierkv ever wrote; delete it")
        return True

    def _check_index(self) -> None:
        data, digest = self.index_path / "data.mdb", self.path / "index.digest"
        shutil.rmtree(self.path / "index.tmp", ignore_errors=True)
        expected = ""
        with suppress(FileNotFoundError):
            expected = digest.read_text(encoding="ascii", errors="replace")
            digest.unlink()
        self.clean = data.exists() and bool(expected) and _digest(data) == expected
        if not self.clean and self.index_path.exists():
            # A file of no bytes is what a process that was killed while it made the store leaves.
            damage = "" if expected != _BROKEN else "LMDB found it so"
            damage = damage or find_damage(self.index_path) if data.is_file() and data.stat().st_size else ""
            if damage or not self.index_path.is_dir():
                self.move_index_aside(damage or "not a directory")
        # LMDB believes the length of a lock file that it finds, and maps it: a page that a full file system has no room
        # for would end the process (SIGBUS), so all of it is written first.
        self.index_path.mkdir(mode=0o700, exist_ok=True)
        lock = self.index_path / "lock.mdb"
        lock.unlink(missing_ok=True)
        descriptor = _open_lock(lock)
        try:
            if os.write(descriptor, bytes(LOCK_BYTES)) != LOCK_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)

    def _check_files(self) -> None:
        """Raise unless all that is there is of the kind that it should be: opening a pipe, for one, would hang."""
        files = [*(self.path / name for name in (*_OWN_NAMES, "index.digest")), *self.path.glob("slab-*.bin")]
        files += [self.index_path / name for name in ("data.mdb", "lock.mdb")]
        for path in files:
            if path.is_symlink() or (path.exists() and not path.is_file()):
                raise StoreError(
                    f"{path} is no regular file, so this is no sound prefix store; delete it, or the folder"
                )

    def _moved_aside(self) -> list[Path]:
        return sorted(self.path.glob("index.damaged-*"))

    def _foreign(self, found: str) -> StoreError:
        return StoreError(f"{self.path} holds {found}, so it is no prefix store; use another disk.path or delete it")

    def _unusable(self, error: OSError) -> StoreError:
        return StoreError(
            f"the prefix store {self.path} cannot be used: {error.strerror or error}; "
            f"give a disk.path that this user may write to"
        )


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_whole(path: Path, text: str) -> None:
    """Write a file so that whoever reads it sees all of it or none."""
    new = path.with_name(path.name + ".new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _digest(path: Path) -> str:
    checksum = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum.update(chunk)
    return checksum.hexdigest()


def _allocated_bytes(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += (Path(folder) / name).stat().st_blocks * 512
    return total
