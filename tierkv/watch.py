"""Watch the engines of this user: find their sockets, read snapshots, and tell rates from two of them.

The other side is ``tierkv.publish``. What comes through a socket is checked before it is believed, a process that does
not answer costs a bounded wait, and the socket of one that died is removed.
"""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from tierkv.metrics import Stats
from tierkv.publish_folder import FolderRefused, folders, remove_if_dead, sockets
from tierkv.publish_server import VERSION

LONGEST_ANSWER: Final = 4 << 20
"""Bytes of an answer that are read."""
WAIT_SECONDS: Final = 2.0
"""Longest wait for a process."""
_AT_A_TIME: Final = 16


class WatchError(Exception):
    """A process gave no answer that can be used; the message says why, in a few words."""


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """One engine at one moment."""

    id: int
    """No other engine of the process ever has this number."""
    name: str
    """Of its model."""
    stats: Stats | None
    """None where the engine could not be asked just then."""


@dataclass(frozen=True, slots=True)
class ProcessSnapshot:
    """One process at one moment."""

    pid: int
    started: float
    """When the process was started, in seconds since 1970."""
    command: str
    """Its command line, perhaps shortened."""
    taken: float
    """When this was taken: a monotonic clock of that process, in seconds."""
    engines: list[EngineSnapshot]
    """Those that are open."""


@dataclass(frozen=True, slots=True)
class Found:
    """Everything that a look around found."""

    processes: list[ProcessSnapshot] = field(default_factory=list)
    """In the order of their numbers."""
    silent: dict[str, str] = field(default_factory=dict)
    """Sockets that somebody serves and that gave nothing to use, by name, and why."""
    refused: list[str] = field(default_factory=list)
    """Folders that were not looked into, since others could have put something there: why, and what to do."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What an engine did between two snapshots."""

    seconds: float
    tokens_per_second: float
    moved_bytes_per_second: dict[str, float]
    """By wire, as ``Stats.moved_bytes``."""
    stall_seconds_per_token: float | None
    """None where no token was computed."""
    overlap: float | None
    """Share of the fetches' time that was hidden behind computing; None where nothing was fetched or nobody knows."""


_ANSWER: Final[TypeAdapter[ProcessSnapshot]] = TypeAdapter(ProcessSnapshot)


def look_around(pid: int | None = None, environ: Mapping[str, str] | None = None) -> Found:
    """Read a snapshot of every process of this user that has an engine open, and remove what the dead left.

    Args:
        pid: only this process.
        environ: the environment, ``os.environ`` when None.
    """
    paths: list[Path] = []
    refused = []
    for folder in folders(environ):
        try:
            paths += sockets(folder)
        except FolderRefused as error:
            refused.append(str(error))
    if pid is not None:
        paths = [path for path in paths if path.name == f"tierkv-{pid}.sock"]
    if not paths:
        return Found([], {}, refused)
    processes, silent = [], {}
    with ThreadPoolExecutor(min(_AT_A_TIME, len(paths))) as pool:
        for path, outcome in zip(paths, pool.map(_try, paths), strict=True):
            if isinstance(outcome, ProcessSnapshot):
                processes.append(outcome)
            elif outcome is not None:
                silent[path.name] = outcome
    return Found(sorted(processes, key=lambda process: process.pid), silent, refused)


def read_snapshot(path: Path, wait_seconds: float = WAIT_SECONDS) -> ProcessSnapshot:
    """Read a snapshot from a socket.

    Args:
        path: of the socket.
        wait_seconds: longest wait in all.

    Raises:
        WatchError: what answers is no tierkv of this version, or too slow.
        OSError: nobody answers.
    """
    deadline = time.monotonic() + wait_seconds
    late = f"no answer within {wait_seconds:g} s"
    answer = bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(wait_seconds)
        try:
            connection.connect(os.fspath(path))
            connection.sendall(b'{"want": "stats"}\n')
            while not answer.endswith(b"\n"):
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                received = connection.recv(1 << 16)
                answer += received
                if not received:
                    raise WatchError("it hung up")
                if len(answer) > LONGEST_ANSWER:
                    raise WatchError(f"its answer is longer than {LONGEST_ANSWER >> 20} MiB")
                if time.monotonic() > deadline:
                    raise WatchError(late)
        except (TimeoutError, BlockingIOError):  # the latter where many others wait already
            raise WatchError(late) from None
    return _parse(bytes(answer))


def rates(before: EngineSnapshot, after: EngineSnapshot, seconds: float) -> Rates | None:
    """Return what an engine did between two snapshots, or None where that cannot be told.

    Args:
        before: the earlier snapshot.
        after: the later one, of the same engine.
        seconds: between the two.
    """
    if before.stats is None or after.stats is None or seconds <= 0:
        return None
    old, new = before.stats.counters, after.stats.counters
    tokens = new.tokens - old.tokens
    stalled, copied = new.stall_seconds - old.stall_seconds, new.copy_seconds - old.copy_seconds
    knows = after.stats.overlap is not None and copied > 0
    return Rates(
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        moved_bytes_per_second={
            wire: (moved - before.stats.moved_bytes.get(wire, 0)) / seconds
            for wire, moved in after.stats.moved_bytes.items()
        },
        stall_seconds_per_token=stalled / tokens if tokens > 0 else None,
        overlap=max(0.0, 1 - stalled / copied) if knows else None,
    )


def rates_between(before: Sequence[ProcessSnapshot], after: Sequence[ProcessSnapshot]) -> dict[tuple[int, int], Rates]:
    """Return the rates of every engine that is in both, by the numbers of process and engine."""
    earlier = {
        (process.pid, process.started, engine.id): (process.taken, engine)
        for process in before
        for engine in process.engines
    }
    found = {}
    for process in after:
        for engine in process.engines:
            taken, old = earlier.get((process.pid, process.started, engine.id), (process.taken, engine))
            if (between := rates(old, engine, process.taken - taken)) is not None:
                found[process.pid, engine.id] = between
    return found


def _try(path: Path) -> ProcessSnapshot | str | None:
    """Return a snapshot, why there is none, or None where the process has just ended."""
    try:
        return read_snapshot(path, WAIT_SECONDS)
    except WatchError as error:
        return str(error)
    except ConnectionRefusedError:
        remove_if_dead(path)
        return None
    except (FileNotFoundError, ConnectionResetError, BrokenPipeError):
        return None
    except OSError as error:
        return error.strerror or str(error)


def _parse(line: bytes) -> ProcessSnapshot:
    try:
        head: Any = _HEAD.validate_json(line)
        if head.get("version") == VERSION and "error" not in head:
            return _ANSWER.validate_json(line)
    except (ValidationError, RecursionError):
        raise WatchError("its answer is not one of tierkv's") from None
    if head.get("version") == VERSION:
        raise WatchError(f"it refuses: {str(head['error'])[:200]}")
    raise WatchError(f"it speaks version {str(head.get('version'))[:20]} of the protocol, not {VERSION}")


_HEAD: Final[TypeAdapter[dict[str, Any]]] = TypeAdapter(dict[str, Any])
