"""FakeCuda: streams and events without a GPU, run in any order that CUDA's rules allow."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tierkv.testing.transfers import poison
from tierkv.transfer_pitched import pitched_of


@dataclass(eq=False)
class Operation:
    """One entry of a stream's queue; it can run when ``after`` has passed, and takes so many milliseconds."""

    run: Callable[[], object]
    after: "Mark | None" = None
    takes: int = 1


@dataclass(eq=False)
class Mark:
    """One recording of an event. It passes when its stream gets there, at a time in milliseconds."""

    passed: bool = False
    at: int = 0

    def passes(self, now: int) -> None:
        """The stream is there."""
        self.passed, self.at = True, now


class FakeStream:
    """A queue of operations that run in order, each at some time."""

    def __init__(self, cuda: "FakeCuda", name: str) -> None:
        self.name = name
        self.queue: deque[Operation] = deque()
        self._cuda = cuda

    def wait_event(self, event: "FakeEvent") -> None:
        """Let later operations run after what the event marks *now*."""
        self._cuda.enqueue(self, f"wait for {event.stream}", lambda: None, event.mark, takes=0)

    def synchronize(self) -> None:
        """Block the host until the queue is empty."""
        self._cuda.host_waits.append(self.name)
        self._cuda.run_until(lambda: not self.queue)


class FakeEvent:
    """A mark in a stream. One that was never recorded has passed, as in CUDA."""

    def __init__(self, cuda: "FakeCuda") -> None:
        self.stream = ""
        self.mark = Mark(passed=True)
        self._cuda = cuda

    def record(self, stream: FakeStream) -> None:
        """Mark the end of the queue."""
        mark = self.mark = Mark()
        self.stream = stream.name
        self._cuda.enqueue(stream, "record", lambda: mark.passes(self._cuda.now), takes=0)

    def query(self) -> bool:
        """Return whether the mark has passed. Time goes on while one looks, unless it was stopped."""
        self._cuda.let_time_pass()
        return self.mark.passed

    def elapsed_time(self, later: "FakeEvent") -> float:
        """Return the milliseconds between two marks that have passed."""
        assert self.mark.passed, "CUDA refuses an event that has not passed"
        assert later.mark.passed, "CUDA refuses an event that has not passed"
        return float(later.mark.at - self.mark.at)

    def synchronize(self) -> None:
        """Block the host until the mark has passed."""
        mark = self.mark
        self._cuda.run_until(lambda: mark.passed)


class FakeCuda:
    """A ``CudaApi`` without a GPU: streams that advance in random order, as far as events let them.

    A copy is several operations: it spoils its destination, then moves it in two halves. So whoever comes too early or
    too late for one sees NaN or mixed bytes for some seed. Tensors of host memory must be contiguous, where the test
    has said with ``on_device`` which are not.

    Attributes:
        takes_pitched: whether evenly spaced lines of memory are copied in one piece.
        compute: the current stream of every thread that has not chosen another.
        now: milliseconds; one copy, half a copy or kernel after the other takes one, whatever its stream.
        stopped: nothing advances, except what ``advance`` runs.
        log: (stream, what) of everything that was enqueued, in order.
        host_waits: names of the streams that the host has waited for.
    """

    def __init__(self, seed: int = 0, *, takes_pitched: bool = False) -> None:
        self.takes_pitched = takes_pitched
        self.stopped = False
        self.now = 0
        self.log: list[tuple[str, str]] = []
        self.host_waits: list[str] = []
        self._rng = random.Random(seed)
        self._lock = threading.RLock()
        self._local = threading.local()
        self._device: set[int] = set()
        self.streams: list[FakeStream] = []
        self._speeds: list[float] = []
        self.compute = self.new_stream(None)

    # -- what CudaTransfers calls ---------------------------------------------------------------------------------

    def new_stream(self, device: Any) -> FakeStream:  # noqa: ARG002 - there is one
        """Return a stream that is, for this seed, rather fast or rather slow."""
        stream = FakeStream(self, f"stream {len(self.streams)}" if self.streams else "compute")
        self.streams.append(stream)
        self._speeds.append(self._rng.choice((1, 5, 25)))
        return stream

    def new_event(self) -> FakeEvent:
        """Return an event."""
        return FakeEvent(self)

    def current_stream(self, device: Any) -> FakeStream:  # noqa: ARG002 - there is one
        """Return the calling thread's stream."""
        stream: FakeStream = getattr(self._local, "stream", self.compute)
        return stream

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        """Make ``stream`` current for the calling thread."""
        before = self.current_stream(None)
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy. Like CUDA it keeps neither tensor alive, only their memory."""
        ends = [tensor.untyped_storage().data_ptr() in self._device for tensor in (destination, source)]
        for tensor, is_device in zip((destination, source), ends, strict=True):
            whole = tensor.is_contiguous() or (self.takes_pitched and pitched_of(destination, source))
            assert is_device or not any(ends) or whole, "a strided host tensor is copied by the host"
        into, out_of = destination.detach(), source.detach().expand(destination.shape)
        stream = self.current_stream(None)
        self.enqueue(stream, "copy", partial(into.fill_, poison(into.dtype)))
        for half in (slice(None, None, 2), slice(1, None, 2)) if into.dim() else (...,):
            self.enqueue(stream, "", partial(into[half].copy_, out_of[half]))

    # -- what tests call ------------------------------------------------------------------------------------------

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Declare a tensor's memory to be device memory; return the tensor."""
        self._device.add(tensor.untyped_storage().data_ptr())
        return tensor

    def launch(self, kernel: Callable[[], object]) -> None:
        """Enqueue work on the current stream."""
        self.enqueue(self.current_stream(None), "kernel", kernel)

    def advance(self, operations: int | None = None) -> None:
        """Run so many operations of random streams, or all."""
        while operations is None or operations > 0:
            if not self._advance_once():
                return
            operations = None if operations is None else operations - 1

    # -- the simulation -------------------------------------------------------------------------------------------

    def enqueue(
        self, stream: FakeStream, what: str, run: Callable[[], object], after: Mark | None = None, *, takes: int = 1
    ) -> None:
        """Put an operation at the end of a stream."""
        with self._lock:
            if what:
                self.log.append((stream.name, what))
            stream.queue.append(Operation(run, after, takes))

    def let_time_pass(self) -> None:
        """Run a few operations, unless time was stopped."""
        if not self.stopped:
            with self._lock:
                self.advance(self._rng.randrange(4))

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Block the calling thread until the host may go on."""
        while not is_over():
            if self.stopped:
                time.sleep(0.001)
            elif not self._advance_once() and not is_over():
                raise AssertionError("the streams wait for each other for ever")

    def _advance_once(self) -> bool:
        with self._lock:
            ready = [
                (stream, speed)
                for stream, speed in zip(self.streams, self._speeds, strict=True)
                if stream.queue and (stream.queue[0].after is None or stream.queue[0].after.passed)
            ]
            if not ready:
                return False
            (stream,) = self._rng.choices([one for one, _ in ready], [speed for _, speed in ready])
            operation = stream.queue.popleft()
            self.now += operation.takes
            operation.run()
            return True
