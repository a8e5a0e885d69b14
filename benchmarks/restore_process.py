"""What a restart is measured with: processes that answer questions, and what to look at in them.

    parent   ``Child`` starts a module in a process of its own, asks, and ends it whatever happens
    child    ``serve`` answers: one JSON object a line in, one out

Nothing here loads torch, so that a parent without a model stays small.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from tierkv import errors
from tierkv.errors import TierKVError

if TYPE_CHECKING:
    from tierkv.engine import Engine

_GRACE_SECONDS: Final = 5.0
_POLL_SECONDS: Final = 0.01
_LAST_WORDS_BYTES: Final = 4096


class Child:
    """A process of its own, with this one's interpreter, import path and environment.

    It is in a session of its own: Ctrl-C reaches the parent alone, which then ends it. Should the parent be killed, the
    child's input ends, and so does the child.
    """

    def __init__(self, name: str, module: str, *arguments: str) -> None:
        """Start ``python -m module arguments``.

        Args:
            name: what the process is for, as it is said in errors.
            module: calls ``serve``.
            arguments: on its command line.
        """
        self.name = name
        self._noise = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._noise, text=True, encoding="utf-8",
            start_new_session=True, env=environment,
        )  # fmt: skip

    def send(self, what: str, **arguments: Any) -> None:
        """Ask for something; ``receive`` waits for the answer."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: ``receive`` finds out how
            self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self._process.stdin.flush()

    def receive(self) -> Any:
        """Wait for the answer to what was asked.

        Raises:
            TierKVError: as the child raised it, or because the child has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TierKVError(f"the process for {self.name} ended before its answer: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            kind = getattr(errors, answer["kind"], TierKVError)
            raise kind(answer["error"])
        return answer["answer"]

    def ask(self, what: str, **arguments: Any) -> Any:
        """Ask and wait for the answer."""
        self.send(what, **arguments)
        return self.receive()

    def close(self) -> None:
        """End the process: at once if it is at rest, otherwise after a few seconds by force. Idempotent."""
        try:
            with suppress(OSError):
                self._process.communicate(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout, self._noise):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:  # nobody waits for its answer any more
            self._process.kill()
        self.close()

    def _last_words(self) -> str:
        code = self._process.wait()
        size = self._noise.seek(0, os.SEEK_END)
        self._noise.seek(max(0, size - _LAST_WORDS_BYTES))
        lines = self._noise.read().decode(errors="replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return f"{said} ({f'signal {-code}' if code < 0 else f'exit code {code}'})"


def serve(answers: Mapping[str, Callable[..., Any]]) -> None:
    """Answer what the parent asks until it asks no more.

    Args:
        answers: by what is asked; a result must be JSON, a TierKVError is handed over, anything else ends the process.
    """
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as channel:
        os.dup2(2, 1)  # what libraries print is no answer
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = {"answer": answers[request.pop("do")](**request)}
            except TierKVError as error:
                answer = {"error": str(error), "kind": type(error).__name__}
            channel.write(json.dumps(answer) + "\n")
            channel.flush()


def keep_all(engine: "Engine", timeout_seconds: float) -> bool:
    """Wait until the prefix store has written what forwards have offered it; False if that took longer or failed.

    What its queue has no room for is handed over with later forwards, or here.
    """
    prefix, deadline = engine.prefix, time.monotonic() + timeout_seconds
    while engine.stats().prefix.waiting_blocks and time.monotonic() < deadline:
        with engine.exclusive():
            prefix.drain()
        time.sleep(_POLL_SECONDS)
    return prefix.store is not None and prefix.store.flush(max(0.0, deadline - time.monotonic()))


@contextmanager
def counted_tokens(model: Any) -> Iterator[list[int]]:
    """Give a list that gets the tokens of every forward of a model, summed over rows, as the model itself sees them."""
    counts: list[int] = []

    def count(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = next(
            (one for one in (kwargs.get("input_ids"), *args, kwargs.get("inputs_embeds")) if one is not None), None
        )
        counts.append(0 if ids is None else int(ids.shape[0] * ids.shape[1]))

    count.tierkv_observes = True  # type: ignore[attr-defined]
    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield counts
    finally:
        handle.remove()
