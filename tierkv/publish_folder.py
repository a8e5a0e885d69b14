"""The private folder in which the sockets of this user's engines lie, for those that serve them and those that look.

``$XDG_RUNTIME_DIR/tierkv`` where that is set and this user's own, otherwise ``/tmp/tierkv-<uid>``. Whoever looks, looks
in both: a service and a login shell of one user may have different environments. A folder is used only if it is a real
one, belongs to this user and lets nobody else in; what lies in it is then nobody else's doing.
"""

import os
import secrets
import socket
import stat
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

SHARED: Final = Path("/tmp")  # not TMPDIR, which may differ between processes; what lies there is checked
LONGEST_PATH: Final = 107
"""Bytes of a socket's path: ``sockaddr_un`` has 108, and the last is a zero."""
_LONGEST_NAME: Final = "/.tierkv-4194304-01234567"
_BEING_BORN_SECONDS: Final = 10.0
"""For so long a socket may exist that nobody listens to yet."""


class FolderRefused(OSError):
    """A folder is not private; the message says why and what to do."""


def folders(environ: Mapping[str, str] | None = None) -> list[Path]:
    """Return where sockets may lie, best place first, whether or not it exists.

    Args:
        environ: the environment, ``os.environ`` when None.
    """
    runtime = (os.environ if environ is None else environ).get("XDG_RUNTIME_DIR", "")
    found = []
    # After su or sudo the variable may still name a folder of another user.
    if runtime.startswith("/") and _is_own(Path(runtime)) and _fits(Path(runtime) / "tierkv"):
        found.append(Path(runtime) / "tierkv")
    return [*found, SHARED / f"tierkv-{os.geteuid()}"]


def make_private(folder: Path) -> None:
    """Make a folder that only this user can enter, or find one.

    Raises:
        OSError: it cannot be made, or what is there is not private.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        folder.chmod(0o700)  # whatever the umask left
    check_private(folder)


def check_private(folder: Path) -> None:
    """Make sure that nobody but this user put anything into a folder.

    Raises:
        FolderRefused: others could have.
        OSError: it cannot be looked at.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise FolderRefused(f"{folder} is no folder; remove it")
    if found.st_uid != os.geteuid():
        raise FolderRefused(f"{folder} belongs to another user; have it removed")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise FolderRefused(f"{folder} is open to other users; run chmod 700 {folder}")


def socket_path(folder: Path, pid: int) -> Path:
    """Return where a process serves."""
    return folder / f"tierkv-{pid}.sock"


def unborn_path(folder: Path, pid: int) -> Path:
    """Return a new name for a socket that nobody listens to yet; it is renamed once somebody does."""
    return folder / f".tierkv-{pid}-{secrets.token_hex(4)}"


def sockets(folder: Path) -> list[Path]:
    """Return the sockets in a private folder, those of processes that died included.

    Raises:
        FolderRefused: the folder is not private.
    """
    try:
        check_private(folder)
        return sorted(path for path in folder.glob("tierkv-*.sock") if _is_socket(path))
    except FolderRefused:
        raise
    except OSError:
        return []


def remove_dead(folder: Path, *, own: Path) -> list[Path]:
    """Remove the sockets that processes left behind which died; return them.

    ``own`` is the caller's: asked whether it is alive, it would take a client's place for it.

    Raises:
        FolderRefused: the folder is not private.
    """
    young = time.time() - _BEING_BORN_SECONDS
    removed = []
    for path in {*sockets(folder), *folder.glob(".tierkv-*")} - {own}:
        with suppress(OSError):
            if (not path.name.startswith(".") or path.lstat().st_mtime < young) and remove_if_dead(path):
                removed.append(path)
    return removed


def remove_if_dead(path: Path) -> bool:
    """Remove a socket that nobody listens to; say whether it was one."""
    try:
        before = path.lstat()
    except OSError:
        return False
    try:
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
            probe.setblocking(False)  # noqa: FBT003 - the standard library's own
            probe.connect(os.fspath(path))
    except ConnectionRefusedError:  # the kernel's word: no process, here or in another container, has it open
        return remove_same(path, before)
    except OSError:
        pass
    return False


def remove_same(path: Path, known: os.stat_result) -> bool:
    """Remove a file unless another has taken its name; say whether it was removed."""
    try:
        if not os.path.samestat(path.lstat(), known):
            return False
        path.unlink()
    except OSError:
        return False
    return True


def _is_own(folder: Path) -> bool:
    """Whether only this user can put things into a folder, or exchange what is there."""
    try:
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o022


def _is_socket(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.geteuid()


def _fits(folder: Path) -> bool:
    return len(os.fsencode(folder)) + len(_LONGEST_NAME) <= LONGEST_PATH
