"""Publish the statistics of this process's engines to ``tierkv top`` and other readers of the same user.

One thread per process serves a private Unix socket for as long as an engine is open (``publish_server``; where it lies
is ``publish_folder``'s business, ``tierkv.watch`` is the other side). It asks ``engine.stats()``, which any thread may,
and takes no lock that a forward takes. Whatever goes wrong here is said once in the debug log, and nowhere else.

``TIERKV_PUBLISH=0`` in the environment turns it off.

An answer is one line of JSON:

    {"version": 1, "pid": 4711, "started": 1790000000.0, "command": "python chat.py", "taken": 5021.25,
     "engines": [{"id": 1, "name": "SmolLM2-135M", "stats": {...}}]}

``started`` is the process's start in seconds since 1970, ``taken`` a monotonic clock in seconds, ``id`` a number that no
other engine of the process ever has, and ``stats`` what ``Stats.as_dict`` returns, or null where none could be had.
"""

import atexit
import itertools
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Protocol

import psutil

from tierkv.errors import ConfigError, TierKVError
from tierkv.interrupts import deferred_interrupt
from tierkv.metrics import Stats
from tierkv.publish_folder import folders
from tierkv.publish_server import VERSION, SocketServer
from tierkv.sizes import show

SWITCH: Final = "TIERKV_PUBLISH"
_LONGEST_TEXT: Final = 500
_TRIES: Final = 3
_ANSWER_SECONDS: Final = 2.0
"""Longest wait for an answer under way when an engine closes: its disk may hang, and Ctrl-C is held back meanwhile."""

_log = logging.getLogger(__name__)


class Published(Protocol):
    """What is published: an engine."""

    def stats(self) -> Stats:
        """Return a snapshot; any thread."""


class _Entry:
    """One open engine, which this does not keep alive."""

    def __init__(self, engine: Published, name: str, ended: Callable[[object], None]) -> None:
        self.engine = weakref.ref(engine, ended)
        self.name = name[:_LONGEST_TEXT]
        self.lock = threading.Lock()  # held while it is asked, and while it leaves: no engine is asked while it closes


class Publisher:
    """The open engines of a process, and the thread that tells about them while there are any."""

    def __init__(self) -> None:
        """Start with no engine and no thread."""
        self._ids = itertools.count(1)
        self._said = False
        self._begin()

    def _begin(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._lock = threading.Lock()
        self._server: SocketServer | None = None

    def add(self, engine: Published, name: str) -> None:
        """Publish an engine until it is removed or collected. Never fails for want of a place to publish.

        Args:
            engine: open.
            name: of its model, for people.
        """
        with deferred_interrupt(), self._lock:
            self._entries[next(self._ids)] = _Entry(engine, name, self._collected)
            if self._server is None:
                self._server = self._serve()

    def remove(self, engine: Published) -> None:
        """Publish an engine no longer; nothing asks it any more when this returns. Idempotent."""
        with deferred_interrupt():
            with self._lock:
                found = [(number, entry) for number, entry in self._entries.items() if entry.engine() is engine]
                for number, _ in found:
                    del self._entries[number]
                idle = None if self._entries else self._server
                if idle is not None:
                    self._let_go(idle)
            for _, entry in found:
                if entry.lock.acquire(timeout=_ANSWER_SECONDS):
                    entry.lock.release()
        if idle is not None:
            idle.stop()

    def close(self) -> None:
        """Publish nothing any more, and remove the socket."""
        with self._lock:
            self._entries.clear()
            server, self._server = self._server, None
        if server is not None:
            server.stop()

    def forget_in_child(self) -> None:
        """Begin anew in a forked child, whose copies of the engines are unusable."""
        server = self._server
        self._begin()  # with a lock of its own: another thread may have held the parent's
        if server is not None:
            server.forget_in_child()

    def describe(self) -> dict[str, Any]:
        """Return the answer: this process and its engines."""
        with self._lock:
            entries = list(self._entries.items())
        engines = []
        for number, entry in entries:
            with entry.lock:
                engine = entry.engine()
                if engine is not None and number in self._entries:
                    engines.append({"id": number, "name": entry.name, "stats": _ask(engine)})
                del engine  # ours must not be the reference that lasts longest
        return {"version": VERSION, **_process(), "taken": time.monotonic(), "engines": engines}

    def _serve(self) -> SocketServer | None:
        """Start the thread in the first folder that can be used."""
        for folder in folders():
            try:
                return SocketServer(folder, self._answer, self._is_wanted)
            except (OSError, RuntimeError) as error:
                if not self._said:
                    _log.debug("%s cannot be used for the live view: %s", folder, error)
        self._said = True
        return None

    def _answer(self) -> bytes:
        return json.dumps(self.describe()).encode()

    def _is_wanted(self, server: SocketServer) -> bool:
        """Whether a server is to go on: it is ours, and an engine is left. Forgets the collected ones."""
        with self._lock:
            for number, entry in list(self._entries.items()):
                if entry.engine() is None:
                    del self._entries[number]
            if server is self._server and not self._entries:
                self._let_go(server)
            return server is self._server

    def _let_go(self, server: SocketServer) -> None:
        """Make room for the next server before anybody can ask for one, and have this one end, whoever waits for that."""
        self._server = None
        server.hide()
        server.wake()

    def _collected(self, _: object) -> None:
        # Runs wherever the collector does, perhaps while this thread holds the lock: the server shall see to it.
        server = self._server
        if server is not None:
            server.wake()


def add(engine: Published, name: str) -> None:
    """Publish an engine of this process, unless ``TIERKV_PUBLISH`` says otherwise; see ``Publisher.add``."""
    if is_wanted():
        _publisher.add(engine, name)


def remove(engine: Published) -> None:
    """Publish an engine no longer; see ``Publisher.remove``."""
    _publisher.remove(engine)


def is_wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether engines are to be published.

    Args:
        environ: the environment, ``os.environ`` when None.

    Raises:
        ConfigError: the variable says neither yes nor no.
    """
    text = (os.environ if environ is None else environ).get(SWITCH, "")
    if text.lower() not in {"", "0", "1", "false", "true"}:
        raise ConfigError(f"{SWITCH} = {show(text)} is not possible (legal: 0 or 1)")
    return text.lower() not in {"0", "false"}


def _ask(engine: Published) -> dict[str, Any] | None:
    """Return the statistics, or None where they cannot be had; a forward may be changing what they are made of."""
    for _ in range(_TRIES):
        try:
            return engine.stats().as_dict()
        except TierKVError:  # closed meanwhile
            return None
        except Exception as error:  # noqa: BLE001 - the view has a gap, and generation goes on
            _log.debug("an engine could not be asked for its statistics: %s", error)
    return None


def _process() -> dict[str, Any]:
    command = " ".join(" ".join(sys.orig_argv or sys.argv).split())
    started = 0.0
    with suppress(psutil.Error):
        started = psutil.Process().create_time()
    return {"pid": os.getpid(), "started": started, "command": command[:_LONGEST_TEXT]}


_publisher: Final = Publisher()
"""One a process, as the socket is."""
atexit.register(_publisher.close)
os.register_at_fork(after_in_child=_publisher.forget_in_child)
