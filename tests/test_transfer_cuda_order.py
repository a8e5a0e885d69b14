"""CudaTransfers on a CUDA that is simulated: whatever order the rules of streams and events allow, bytes are right.

Each property is checked over many random schedules, and again with one of the waits taken out: then some schedule must
show the mistake, or the test would prove nothing.
"""

import random

import pytest
import torch

from tierkv.testing.fake_cuda import FakeCuda, FakeEvent
from tierkv.testing.transfers import DOWN, RESTORE, SHIFT, SPILL, UP, copy_of, data
from tierkv.transfer import Copy
from tierkv.transfer_cuda import CudaTransfers

SEEDS = range(60)


def engine_on(cuda):
    return CudaTransfers("cuda:0", 2, cuda)


def deaf(*streams):
    """Take the event waits out of streams."""
    for stream in streams:
        stream.wait_event = lambda event: None


# -- one rule at a time ------------------------------------------------------------------------------------------------


def copy_down_of_what_a_kernel_writes(seed, *, broken=False):
    """Return whether a copy down carries what the compute stream had been told to write before it."""
    cuda = FakeCuda(seed)
    with engine_on(cuda) as engine:
        if broken:
            deaf(*cuda.streams[1:])
        source, destination = cuda.on_device(torch.zeros(6)), torch.zeros(6)
        cuda.launch(lambda: source.copy_(data(6)))
        engine.submit([copy_of((destination, source))])
    return torch.equal(destination, data(6))


def copy_up_over_what_a_kernel_reads(seed, *, broken=False):
    """Return whether a kernel that was enqueued before a copy up still sees the old bytes."""
    cuda = FakeCuda(seed)
    seen = []
    with engine_on(cuda) as engine:
        if broken:
            deaf(*cuda.streams[1:])
        destination = cuda.on_device(data(6))
        cuda.launch(lambda: seen.append(destination.clone()))
        engine.submit([copy_of((destination, torch.zeros(6)), wire=UP)])
    cuda.advance()
    return torch.equal(seen[0], data(6)) and not destination.any()


def read_after_order(seed, *, broken=False):
    """Return whether a kernel behind ``order`` sees what a copy up brings."""
    cuda = FakeCuda(seed)
    seen = []
    with engine_on(cuda) as engine:
        if broken:
            deaf(cuda.compute)
        destination = cuda.on_device(torch.zeros(6))
        ticket = engine.submit([copy_of((destination, data(6)), wire=UP)])
        engine.order(ticket)
        cuda.launch(lambda: seen.append(destination.clone()))
    cuda.advance()
    return torch.equal(seen[0], data(6))


def reuse_of_a_slot_after_order(seed, *, broken=False):
    """Return whether a copy down is unharmed by a kernel behind ``order`` that writes to its source."""
    cuda = FakeCuda(seed)
    with engine_on(cuda) as engine:
        if broken:
            deaf(cuda.compute)
        source, destination = cuda.on_device(data(6)), torch.zeros(6)
        engine.order(engine.submit([copy_of((destination, source))]))
        cuda.launch(source.zero_)
    cuda.advance()
    return torch.equal(destination, data(6)) and not source.any()


def store_of_what_a_kernel_writes(seed, *, broken=False):
    """Return whether a ``store`` stage finds the bytes that a copy down brings, and a kernel wrote before."""
    cuda = FakeCuda(seed)
    stored = []
    with engine_on(cuda) as engine:
        source, staged = cuda.on_device(torch.zeros(6)), torch.zeros(6)
        cuda.launch(lambda: source.copy_(data(6)))
        ticket = engine.submit([Copy(SPILL, 24, [(staged, source)], store=lambda: stored.append(staged.clone()))])
        if broken:
            ticket.spans.clear()
        engine.wait(ticket)
    return torch.equal(stored[0], data(6))


def load_over_what_a_kernel_reads(seed, *, broken=False):
    """Return whether a ``load`` stage leaves host memory alone that the compute stream still reads."""
    cuda = FakeCuda(seed)
    seen = []
    staged, destination = torch.zeros(6), cuda.on_device(torch.zeros(6))
    with engine_on(cuda) as engine:
        for _ in range(3):
            cuda.launch(lambda: None)
        cuda.launch(lambda: seen.append(staged.clone()))
        ticket = engine.submit([Copy(RESTORE, 24, [(destination, staged)], load=lambda: staged.copy_(data(6)))])
        engine.order(ticket)
        cuda.launch(lambda: seen.append(destination.clone()))
    cuda.advance()
    return not seen[0].any() and torch.equal(seen[1], data(6))


def host_copy_of_what_the_stream_brings(seed, *, broken=False):
    """Return whether a copy within host memory, which no stream can order, comes after what was enqueued."""
    cuda = FakeCuda(seed)
    source, destination = torch.zeros(6), torch.zeros(6)
    with engine_on(cuda) as engine:
        cuda.launch(lambda: source.copy_(data(6)))
        engine.submit([copy_of((destination, source), wire=SHIFT)])
    return torch.equal(destination, data(6))


def bare_store_of_what_the_stream_brings(seed, *, broken=False):
    """Return whether a ``store`` stage without tensors comes after what was enqueued."""
    cuda = FakeCuda(seed)
    source, stored = torch.zeros(6), []
    with engine_on(cuda) as engine:
        cuda.launch(lambda: source.copy_(data(6)))
        engine.wait(engine.submit([Copy(SPILL, 24, store=lambda: stored.append(source.clone()))]))
    return torch.equal(stored[0], data(6))


ON_STREAMS = [
    copy_down_of_what_a_kernel_writes,
    copy_up_over_what_a_kernel_reads,
    read_after_order,
    reuse_of_a_slot_after_order,
]
ON_THE_HOST = [
    store_of_what_a_kernel_writes,
    load_over_what_a_kernel_reads,
    host_copy_of_what_the_stream_brings,
    bare_store_of_what_the_stream_brings,
]


def name(scenario):
    return scenario.__name__


@pytest.mark.parametrize("scenario", ON_STREAMS + ON_THE_HOST, ids=name)
def test_no_schedule_shows_a_mistake(scenario):
    assert [seed for seed in SEEDS if not scenario(seed)] == []


@pytest.mark.parametrize("scenario", ON_STREAMS, ids=name)
def test_some_schedule_shows_that_a_wait_is_missing(scenario):
    assert not all(scenario(seed, broken=True) for seed in SEEDS)


@pytest.mark.parametrize("scenario", ON_THE_HOST, ids=name)
def test_some_schedule_shows_that_the_host_did_not_wait(scenario, monkeypatch):
    monkeypatch.setattr(FakeEvent, "synchronize", lambda self: None)
    assert not all(scenario(seed, broken=True) for seed in SEEDS)


# -- random programs --------------------------------------------------------------------------------------------------


class Program:
    """A host that writes, reads, copies and waits at random, keeping the rules, beside a model without any streams."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.cuda = FakeCuda(seed)
        self.engine = engine_on(self.cuda)
        self.memory = {
            **{("device", index): self.cuda.on_device(torch.zeros(4)) for index in range(3)},
            **{("host", index): torch.zeros(4) for index in range(3)},
        }
        self.model = dict.fromkeys(self.memory, 0.0)
        self.unordered = []  # tickets that the compute stream does not know, and the places that they touch
        self.tickets = []
        self.seen = []
        self.is_right = True

    def run(self, operations):
        verbs = [self.write, self.read, self.copy_down, self.copy_up, self.host_writes, self.host_reads, self.go_on]
        with self.engine:
            for number in range(1, operations + 1):
                self.rng.choice(verbs)(
                    float(number), ("device", self.rng.randrange(3)), ("host", self.rng.randrange(3))
                )
        self.cuda.advance()
        ends = [(self.memory[place], self.model[place]) for place in self.memory]
        return self.is_right and all(bool((tensor == number).all()) for tensor, number in [*self.seen, *ends])

    def write(self, number, place, _):
        self.order(place)
        self.cuda.launch(lambda: self.memory[place].fill_(number))
        self.model[place] = number

    def read(self, _, place, __):
        self.order(place)
        number = self.model[place]
        self.cuda.launch(lambda: self.seen.append((self.memory[place].clone(), number)))

    def copy_down(self, _, device, host):
        self.submit(DOWN, device, host)

    def copy_up(self, _, device, host):
        self.submit(UP, host, device)

    def host_writes(self, number, _, place):
        self.wait(place)
        self.memory[place].fill_(number)
        self.model[place] = number

    def host_reads(self, _, __, place):
        self.wait(place)
        self.is_right &= bool((self.memory[place] == self.model[place]).all())

    def go_on(self, *_):
        self.cuda.advance(self.rng.randrange(9))

    def submit(self, wire, source, destination):
        self.order(source, destination)
        ticket = self.engine.submit([copy_of((self.memory[destination], self.memory[source]), wire=wire)])
        self.unordered.append((ticket, {source, destination}))
        self.tickets.append((ticket, {source, destination}))
        self.model[destination] = self.model[source]

    def order(self, *places):
        for ticket, touched in self.unordered:
            if touched & set(places):
                self.engine.order(ticket)
        self.unordered = [entry for entry in self.unordered if not entry[1] & set(places)]

    def wait(self, place):
        for ticket, touched in self.tickets:
            if place in touched:
                self.engine.wait(ticket)


def test_random_programs_do_what_they_would_do_without_streams():
    assert [seed for seed in range(100) if not Program(seed).run(40)] == []


@pytest.mark.parametrize("missing", ["compute", "down", "up", "host"])
def test_random_programs_show_a_missing_wait(missing, monkeypatch):
    if missing == "host":
        monkeypatch.setattr(FakeEvent, "query", lambda self: True)
        monkeypatch.setattr(FakeEvent, "elapsed_time", lambda self, later: 0.0)  # which nobody is to ask too early

    def run(seed):
        program = Program(seed)
        names = ["compute", "down", "up"]
        deaf(*(stream for stream, name in zip(program.cuda.streams, names, strict=True) if name == missing))
        return program.run(40)

    assert not all(run(seed) for seed in range(100))
