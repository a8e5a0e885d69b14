"""What the tests of the live view share: a private place for sockets, processes that serve, and clients that ask."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

CHILD = """
import sys, torch
torch.set_num_threads(1)
from tierkv import publish
from tierkv.testing.engines import PlainCache, forward, random_tokens, small_engine, small_layout
layout = small_layout("plain")
engines = [small_engine(layout, device_tokens=64) for _ in range(int(sys.argv[1]))]
batches = [engine.open() for engine in engines]
plains = [PlainCache(layout) for _ in engines]
for number, engine in enumerate(engines):
    publish.add(engine, f"tiny-{number}")
print("open", flush=True)
for step, line in enumerate(sys.stdin):
    if line.strip() == "close":
        break
    for batch, plain in zip(batches, plains):
        forward(batch, plain, random_tokens(layout, 1, int(line), step))
    print("computed", flush=True)
for engine in engines:
    publish.remove(engine)
    engine.close()
print("closed", flush=True)
sys.stdin.read()
"""
"""A process with engines. Each number on its standard input is a forward of so many tokens; ``close`` closes them."""


def own_socket(runtime: Path) -> Path:
    """Return where this process serves."""
    return runtime / "tierkv" / f"tierkv-{os.getpid()}.sock"


def wait_until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


class EngineProcess:
    """A child process with open engines; a context manager that ends it. Its engines compute what they are told."""

    def __init__(self, runtime: Path, engines: int = 1, code: str = CHILD) -> None:
        """Start it and wait until its engines are published in ``runtime``/tierkv."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TIERKV_")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, str(engines)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**environment, "XDG_RUNTIME_DIR": str(runtime), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.pid = self.process.pid
        self.socket = runtime / "tierkv" / f"tierkv-{self.pid}.sock"
        assert self.read() == "open"

    def read(self) -> str:
        return self.process.stdout.readline().strip()

    def tell(self, line: object) -> str:
        """Send a line and return what it answers."""
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.read()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


class Client:
    """A plain client of the socket, which may ask anything."""

    def __init__(self, path: Path, wait_seconds: float = 5.0) -> None:
        self.connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.connection.settimeout(wait_seconds)
        self.connection.connect(str(path))
        self.received = b""

    def send(self, data: bytes) -> None:
        self.connection.sendall(data)

    def line(self) -> bytes:
        """Return the next line, or what came before the end."""
        while b"\n" not in self.received:
            more = self.connection.recv(1 << 16)
            if not more:
                break
            self.received += more
        line, end, self.received = self.received.partition(b"\n")
        return line + end

    def ask(self) -> dict[str, Any]:
        self.send(b'{"want":"stats"}\n')
        answer = json.loads(self.line())
        assert isinstance(answer, dict)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.connection.close()
