"""One daemon thread that answers on a Unix socket. It sleeps in the kernel until somebody asks, and trusts nobody.

    ask      one line, {"want": "stats"}
    answer   one line, the JSON object of ``tierkv.publish``, or {"version": 1, "error": ...}

A connection may ask again and again. One that says nothing for a minute, that does not read its answer, or that sends
anything else is closed; when there are too many, the one goes that was silent longest. Whatever a client does, it costs
this thread a few bytes and the engine nothing.
"""

import errno
import json
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from tierkv.publish_folder import make_private, remove_dead, remove_if_dead, remove_same, socket_path, unborn_path

VERSION: Final = 1
"""Of the protocol: higher when a client that knows this one would misread an answer."""
LONGEST_REQUEST: Final = 4096
"""Bytes of a line that asks."""
MOST_CLIENTS: Final = 16
SILENT_SECONDS: Final = 60.0
"""For so long a client may ask nothing."""
STUCK_SECONDS: Final = 5.0
"""For so long a client may leave an answer unread."""

_log = logging.getLogger(__name__)


class _Client:
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.asked = bytearray()
        self.answer = memoryview(b"")
        self.ends = False  # once its answer is sent
        self.deadline = time.monotonic() + SILENT_SECONDS


class SocketServer:
    """Serves snapshots on ``tierkv-<pid>.sock`` in a private folder until ``stop``, or until nobody wants it any more."""

    def __init__(
        self, folder: Path, snapshot: Callable[[], bytes], is_wanted: "Callable[[SocketServer], bool]"
    ) -> None:
        """Bind the socket and start the thread.

        Args:
            folder: made if it is missing.
            snapshot: returns what is answered, without the line's end. Called in the server's thread.
            is_wanted: asked about the server whenever it wakes up; it ends when this says no.

        Raises:
            OSError: the folder is not private, or the socket cannot be made.
        """
        self._snapshot = snapshot
        self._is_wanted = is_wanted
        self._clients: dict[int, _Client] = {}
        self._stops = False
        self._listener = _listen(folder)
        self.path = socket_path(folder, os.getpid())
        self._selector = selectors.DefaultSelector()
        self._wakes, self._woken = socket.socketpair()
        self._known = self.path.lstat()
        for one in (self._listener, self._wakes, self._woken):
            one.setblocking(False)  # noqa: FBT003 - the standard library's own
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="tierkv-publish", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._close()
            raise

    def wake(self) -> None:
        """Have the thread look whether it is still wanted. Any thread, at any time; never waits."""
        with suppress(OSError):
            self._wakes.send(b"\0")

    def hide(self) -> None:
        """Remove the socket, so that nobody new finds it. Idempotent."""
        remove_same(self.path, self._known)

    def stop(self, wait_seconds: float = 2.0) -> None:
        """Remove the socket and end the thread. Idempotent."""
        self._stops = True
        self.hide()
        self.wake()
        if self._thread is not threading.current_thread():
            self._thread.join(wait_seconds)

    def forget_in_child(self) -> None:
        """Close what a forked child has inherited: a socket that it held would seem alive after the parent's end.

        Nothing is taken out of the selector, which the parent still uses.
        """
        self._stops = True
        self._selector.close()
        clients = [client.connection for client in self._clients.values()]
        for one in (self._listener, self._wakes, self._woken, *clients):
            with suppress(OSError):
                one.close()

    # -- in the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            remove_dead(self.path.parent, own=self.path)
            while not self._stops and self._is_wanted(self):
                for key, _ in self._selector.select(self._wait_seconds()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._woken:
                        with suppress(OSError):
                            self._woken.recv(LONGEST_REQUEST)
                    elif key.fd in self._clients:
                        self._serve(self._clients[key.fd])
                self._drop_late()
        except Exception as error:  # noqa: BLE001 - whatever it is, generation goes on without a live view
            _log.debug("the live view of this process ends: %s", error)
        finally:
            self._close()

    def _close(self) -> None:
        self.hide()
        for client in list(self._clients.values()):
            self._drop(client)
        self._selector.close()
        for one in (self._listener, self._wakes, self._woken):
            one.close()

    def _wait_seconds(self) -> float | None:
        if not self._clients:
            return None
        return max(0.0, min(client.deadline for client in self._clients.values()) - time.monotonic())

    def _drop_late(self) -> None:
        now = time.monotonic()
        for client in [client for client in self._clients.values() if client.deadline <= now]:
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        del self._clients[client.connection.fileno()]
        with suppress(KeyError, ValueError):
            self._selector.unregister(client.connection)
        client.connection.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # the listener stays readable: do not spin
                time.sleep(0.1)
            return
        connection.setblocking(False)  # noqa: FBT003 - the standard library's own
        if not _is_ours(connection):
            connection.close()
            return
        if len(self._clients) >= MOST_CLIENTS:
            self._drop(min(self._clients.values(), key=lambda client: client.deadline))
        self._clients[connection.fileno()] = _Client(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _serve(self, client: _Client) -> None:
        """Send what is left of an answer, or read what is asked."""
        try:
            if not client.answer:
                # At most what a line may have, so that little is kept for whoever sends much.
                received = client.connection.recv(LONGEST_REQUEST)
                if not received:
                    self._drop(client)
                    return
                client.asked += received
            self._answer(client)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)

    def _answer(self, client: _Client) -> None:
        while True:
            if client.answer:
                try:
                    client.answer = client.answer[client.connection.send(client.answer) :]
                except BlockingIOError:
                    self._selector.modify(client.connection, selectors.EVENT_WRITE)
                    return
                if client.answer:
                    continue
                client.deadline = time.monotonic() + SILENT_SECONDS
                self._selector.modify(client.connection, selectors.EVENT_READ)
            if client.ends:
                self._drop(client)
                return
            line, end, rest = client.asked.partition(b"\n")
            if end:
                client.asked = rest
                complaint = _complaint(bytes(line))
            elif len(client.asked) > LONGEST_REQUEST:
                complaint = f"a request is one line of at most {LONGEST_REQUEST} bytes"
            else:
                return
            client.ends = bool(complaint)
            text = json.dumps({"version": VERSION, "error": complaint}).encode() if complaint else self._snapshot()
            client.answer = memoryview(text + b"\n")
            client.deadline = time.monotonic() + STUCK_SECONDS


def _listen(folder: Path) -> socket.socket:
    """Return a socket that listens under the name of this process."""
    make_private(folder)
    path = socket_path(folder, os.getpid())
    # Somebody else of this number: a process in another container that shares the folder. Who was first stays.
    if path.exists() and not remove_if_dead(path) and path.exists():
        raise OSError(errno.EADDRINUSE, "another process of this number serves there", os.fspath(path))
    unborn = unborn_path(folder, os.getpid())
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(os.fspath(unborn))
        unborn.chmod(0o600)
        listener.listen(MOST_CLIENTS)
        unborn.rename(path)  # only now: who finds a socket that nobody listens to takes it for a dead one's
    except BaseException:
        listener.close()
        unborn.unlink(missing_ok=True)
        raise
    return listener


def _is_ours(connection: socket.socket) -> bool:
    """Whether a client runs as this user, or as root, who may see everything anyhow."""
    if not hasattr(socket, "SO_PEERCRED"):  # only Linux has it; elsewhere the folder has to do
        return True
    pid_uid_gid = struct.Struct("3i")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, pid_uid_gid.size)
    return pid_uid_gid.unpack(credentials)[1] in {0, os.geteuid()}


def _complaint(line: bytes) -> str:
    """Return what is wrong with a request, empty where nothing is."""
    try:
        asked = json.loads(line)
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict) or asked.get("want") != "stats":
        return 'ask with the line {"want": "stats"}'
    return ""
