"""TransferContract: what every TransferEngine must do, as tests. Subclass it in a test file and give it your engine.

A subclass overrides ``make``, and where copies do not end by themselves ``hold``, ``let_go`` and ``complete``::

    class TestMyTransfers(TransferContract):
        def make(self):
            return MyTransfers(self.workers)
"""

# ruff: noqa: D102 - the name of a test says what it shows

import gc
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar

import pytest
import torch

from tierkv.errors import ClosedError, TransferTimeout
from tierkv.testing.transfers import DOWN, RELOCATE, RESTORE, SHIFT, SPILL, UP, Gate, copy_of, data, refuse
from tierkv.tier import Wire
from tierkv.transfer import Copy, Ticket, TransferEngine

PATIENCE_SECONDS = 20.0
"""Far longer than any copy here takes, on the slowest machine."""


class TransferContract:
    """Tests of the TransferEngine contract."""

    workers: ClassVar[int] = 4
    """Threads that the engine must have for ``load`` and ``store`` stages."""

    def make(self) -> TransferEngine:
        """Override: return an open engine."""
        raise NotImplementedError

    def hold(self, engine: TransferEngine) -> None:
        """Override where ``order`` and ``wait`` would run a copy in the calling thread: make them not do so."""

    def let_go(self, engine: TransferEngine) -> None:
        """Override with ``hold``: undo it."""

    def complete(self, engine: TransferEngine, ticket: Ticket) -> None:
        """Override where a copy does not end by itself: make this one end."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not engine.is_done(ticket):
            assert time.monotonic() < deadline, "the copy does not end"
            time.sleep(0.0005)

    @pytest.fixture
    def engine(self) -> Iterator[TransferEngine]:
        """An open engine, closed afterwards."""
        with self.make() as engine:
            yield engine

    # -- bytes ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("wire", [DOWN, UP, RELOCATE, SHIFT], ids=lambda wire: wire.label)
    def test_bytes_arrive(self, engine: TransferEngine, wire: Wire) -> None:
        source, destination = data(3, 5, 8), torch.zeros(3, 5, 8)
        ticket = engine.submit([copy_of((destination, source), wire=wire)])
        engine.wait(ticket, PATIENCE_SECONDS)
        assert engine.is_done(ticket)
        assert torch.equal(destination, source)
        assert torch.equal(source, data(3, 5, 8))

    @pytest.mark.parametrize("wire", [DOWN, UP], ids=lambda wire: wire.label)
    def test_views_of_any_strides_are_copied_and_nothing_beside_them(self, engine: TransferEngine, wire: Wire) -> None:
        views: list[Callable[[torch.Tensor], torch.Tensor]] = [
            lambda whole: whole[1:3, :, 2:6],
            lambda whole: whole.transpose(0, 2)[2:4],
            lambda whole: whole[::2, :, ::2][:2],
        ]
        for into in views:
            for out_of in views:
                source, whole = data(4, 4, 8), torch.zeros(4, 4, 8)
                wanted = whole.clone()
                into(wanted).copy_(out_of(source))
                engine.wait(engine.submit([copy_of((into(whole), out_of(source)), wire=wire)]), PATIENCE_SECONDS)
                assert torch.equal(whole, wanted)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int64])
    def test_every_bit_pattern_arrives(self, engine: TransferEngine, dtype: torch.dtype) -> None:
        source = torch.arange(-256, 256).repeat_interleave(97).to(torch.int16).view(torch.uint8).clone().view(dtype)
        destination = torch.zeros_like(source)
        engine.wait(engine.submit([copy_of((destination, source))]), PATIENCE_SECONDS)
        assert torch.equal(destination.view(torch.uint8), source.view(torch.uint8))

    def test_a_ticket_holds_any_number_of_copies_on_any_wires(self, engine: TransferEngine) -> None:
        sources, destinations = [data(2, index + 1) for index in range(9)], [torch.zeros(2, n + 1) for n in range(9)]
        copies = [
            copy_of(*zip(destinations[at : at + 2], sources[at : at + 2], strict=True), wire=(DOWN, UP)[at // 2 % 2])
            for at in range(0, 9, 2)
        ]
        ticket = engine.submit(copies)
        assert ticket.num_bytes == sum(4 * source.numel() for source in sources)
        engine.wait(ticket, PATIENCE_SECONDS)
        assert all(map(torch.equal, destinations, sources))

    def test_order_is_enough_to_read_after_a_copy_up(self, engine: TransferEngine) -> None:
        source, destination = data(6, 4), torch.zeros(6, 4)
        ticket = engine.submit([copy_of((destination, source), wire=UP)])
        engine.order(ticket, PATIENCE_SECONDS)
        assert torch.equal(self.read_after_order(engine, destination), source)

    def read_after_order(self, engine: TransferEngine, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Override where reading is something to enqueue: return the tensor as such a read sees it."""
        return tensor

    # -- stages ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("wire", [SPILL, RESTORE], ids=lambda wire: wire.label)
    def test_load_comes_first_then_the_tensors_then_store(self, engine: TransferEngine, wire: Wire) -> None:
        seen = []
        staged, destination = torch.zeros(4), torch.zeros(4)

        def load() -> None:
            staged.copy_(data(4))

        def store() -> None:
            seen.append(destination.clone())

        engine.wait(engine.submit([Copy(wire, 16, [(destination, staged)], load, store)]), PATIENCE_SECONDS)
        assert torch.equal(seen[0], data(4))
        assert len(seen) == 1

    def test_stages_without_tensors_run(self, engine: TransferEngine) -> None:
        seen: list[str] = []
        copies = [
            Copy(RESTORE, 1, load=lambda: seen.append("load")),
            Copy(SPILL, 1, store=lambda: seen.append("store")),
        ]
        engine.wait(engine.submit(copies), PATIENCE_SECONDS)
        assert sorted(seen) == ["load", "store"]

    def test_an_empty_ticket_is_done(self, engine: TransferEngine) -> None:
        self.hold(engine)
        ticket = engine.submit([])
        assert engine.is_done(ticket)
        engine.order(ticket, 0)
        engine.wait(ticket, 0)
        self.let_go(engine)

    # -- time -----------------------------------------------------------------------------------------------------

    def test_a_ticket_is_not_done_before_its_end_and_asking_does_not_block(self, engine: TransferEngine) -> None:
        gate, source, destination = Gate(), data(4), torch.zeros(4)
        self.hold(engine)
        ticket = engine.submit([copy_of((destination, source), wire=UP, load=gate)])
        began = time.monotonic()
        assert not any(engine.is_done(ticket) for _ in range(100))
        assert time.monotonic() - began < 1
        assert not torch.equal(destination, source)
        self.let_go(engine)
        gate.open()
        self.complete(engine, ticket)
        assert engine.is_done(ticket)
        assert torch.equal(destination, source)

    def test_tickets_end_in_any_order(self, engine: TransferEngine) -> None:
        for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
            self.hold(engine)
            gates, source = [Gate() for _ in order], data(4)
            destinations = [torch.zeros(4) for _ in order]
            tickets = [
                engine.submit([copy_of((destination, source), wire=UP, load=gate)])
                for gate, destination in zip(gates, destinations, strict=True)
            ]
            self.let_go(engine)
            for position, index in enumerate(order):
                gates[index].open()
                self.complete(engine, tickets[index])
                assert torch.equal(destinations[index], source)
                assert not any(engine.is_done(tickets[other]) for other in order[position + 1 :])

    @pytest.mark.parametrize("verb", ["wait", "order"])
    def test_waiting_is_bounded_and_the_copy_may_still_end_later(self, engine: TransferEngine, verb: str) -> None:
        gate, source, destination = Gate(), data(4), torch.zeros(4)
        self.hold(engine)
        ticket = engine.submit([copy_of((destination, source), wire=UP, load=gate)])
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(TransferTimeout):
                getattr(engine, verb)(ticket, 0.02)
        assert time.monotonic() - began < 2
        assert ticket.error is None
        gate.open()
        self.let_go(engine)
        engine.wait(ticket, PATIENCE_SECONDS)
        assert torch.equal(destination, source)

    # -- errors ---------------------------------------------------------------------------------------------------

    @staticmethod
    def failing(stage: str) -> Copy:
        """Return a copy whose ``stage`` raises."""
        pairs = [(torch.zeros(2, 3), torch.zeros(3, 2))] if stage == "tensors" else []
        load, store = (refuse if stage == name else None for name in ("load", "store"))
        return Copy(UP if stage != "store" else SPILL, 1, pairs, load, store)

    @pytest.mark.parametrize("stage", ["load", "tensors", "store"])
    def test_an_error_comes_out_of_every_wait(self, engine: TransferEngine, stage: str) -> None:
        ticket = engine.submit([self.failing(stage)])
        for verb in ("wait", "order", "wait"):
            with pytest.raises((OSError, RuntimeError)) as caught:
                getattr(engine, verb)(ticket, PATIENCE_SECONDS)
            assert caught.value is ticket.error
            assert engine.is_done(ticket)

    @pytest.mark.parametrize("stage", ["load", "tensors"])
    def test_an_error_comes_out_of_order_alone(self, engine: TransferEngine, stage: str) -> None:
        ticket = engine.submit([self.failing(stage)])
        with pytest.raises((OSError, RuntimeError)):
            engine.order(ticket, PATIENCE_SECONDS)

    @pytest.mark.parametrize("stage", ["load", "tensors", "store"])
    def test_settle_waits_and_does_not_mind_an_error(self, engine: TransferEngine, stage: str) -> None:
        gate = Gate()
        self.hold(engine)
        tickets = [engine.submit([self.failing(stage)]), engine.submit([Copy(RESTORE, 1, load=gate)])]
        with pytest.raises(TransferTimeout):
            engine.settle(tickets[1], 0.01)
        self.let_go(engine)
        gate.open()
        for ticket in tickets:
            engine.settle(ticket, PATIENCE_SECONDS)
            assert engine.is_done(ticket)

    def test_one_of_several_errors_is_kept(self, engine: TransferEngine) -> None:
        ticket = engine.submit([self.failing(stage) for stage in ("load", "tensors", "store", "load")])
        errors = []
        for _ in range(3):
            with pytest.raises((OSError, RuntimeError)) as caught:
                engine.wait(ticket, PATIENCE_SECONDS)
            errors.append(caught.value)
        assert errors == [ticket.error] * 3

    def test_store_does_not_run_behind_a_failed_load(self, engine: TransferEngine) -> None:
        seen: list[str] = []
        ticket = engine.submit([Copy(SPILL, 1, load=refuse, store=lambda: seen.append("stored"))])
        with pytest.raises(OSError, match="luck"):
            engine.wait(ticket, PATIENCE_SECONDS)
        assert not seen

    def test_other_tickets_do_not_notice_an_error(self, engine: TransferEngine) -> None:
        sources, destinations = [data(4) for _ in range(6)], [torch.zeros(4) for _ in range(6)]
        tickets, failed = [], []
        for index, pair in enumerate(zip(destinations, sources, strict=True)):
            failed.append(engine.submit([self.failing(("load", "tensors", "store")[index % 3])]))
            tickets.append(engine.submit([copy_of(pair, wire=(DOWN, UP)[index % 2])]))
        for ticket, wrong in zip(tickets, failed, strict=True):
            engine.wait(ticket, PATIENCE_SECONDS)
            with pytest.raises((OSError, RuntimeError)):
                engine.wait(wrong, PATIENCE_SECONDS)
        assert all(map(torch.equal, destinations, sources))

    def test_a_failed_ticket_is_not_done_while_one_of_its_copies_runs(self, engine: TransferEngine) -> None:
        gate = Gate()
        ticket = engine.submit([Copy(RESTORE, 1, load=gate), self.failing("load"), self.failing("tensors")])
        for _ in range(50):
            runs = gate.is_inside.is_set()
            assert not (engine.is_done(ticket) and runs and gate.is_inside.is_set())
            time.sleep(0.0002)
        gate.open()
        self.complete(engine, ticket)
        with pytest.raises((OSError, RuntimeError)):
            engine.wait(ticket, PATIENCE_SECONDS)

    # -- owners ---------------------------------------------------------------------------------------------------

    def test_tensors_live_until_the_end_and_not_longer(self, engine: TransferEngine) -> None:
        gate = Gate()
        self.hold(engine)
        source, destination = data(4), torch.zeros(4)
        refs: Sequence[weakref.ref[torch.Tensor]] = [weakref.ref(source), weakref.ref(destination)]
        ticket = engine.submit([copy_of((destination, source), wire=UP, load=gate)])
        del source, destination
        gc.collect()
        assert all(ref() is not None for ref in refs)
        self.let_go(engine)
        gate.open()
        engine.wait(ticket, PATIENCE_SECONDS)
        self.forget(engine)
        del ticket
        deadline = time.monotonic() + PATIENCE_SECONDS
        while any(ref() is not None for ref in refs):  # a worker may be about to let go of its last copy
            assert time.monotonic() < deadline, "the engine keeps finished tickets"
            gc.collect()

    def forget(self, engine: TransferEngine) -> None:
        """Override where the engine keeps a record of what it did: clear it."""

    def test_many_tickets(self, engine: TransferEngine) -> None:
        rng = random.Random(7)
        source, destination = data(300, 6), torch.zeros(300, 6)
        stored: list[int] = []
        tickets = []
        for at in range(0, 300, 3):
            copies = [
                Copy(
                    rng.choice((DOWN, UP)),
                    24,
                    [(destination[row], source[row])],
                    load=(lambda: time.sleep(0)) if rng.random() < 0.2 else None,
                    store=partial(stored.append, row) if rng.random() < 0.2 else None,
                )
                for row in range(at, at + 3)
            ]
            tickets.append((engine.submit(copies), [copy for copy in copies if copy.store]))
            if rng.random() < 0.2:
                engine.order(rng.choice(tickets)[0], PATIENCE_SECONDS)
        rng.shuffle(tickets)
        for ticket, _ in tickets:
            engine.wait(ticket, PATIENCE_SECONDS)
        assert torch.equal(destination, source)
        assert len(stored) == len(set(stored)) == sum(len(copies) for _, copies in tickets)

    def test_close_finishes_what_was_submitted(self) -> None:
        threads = set(threading.enumerate())
        engine = self.make()
        source, loaded, destination = data(4), torch.zeros(4), torch.zeros(4)
        seen: list[torch.Tensor] = []
        tickets: list[Ticket] = [
            engine.submit([copy_of((destination, source))]),
            engine.submit([Copy(RESTORE, 1, load=lambda: loaded.fill_(1))]),
            engine.submit([Copy(SPILL, 1, [(torch.zeros(4), source)], store=lambda: seen.append(source))]),
        ]
        engine.close()
        engine.close()
        assert torch.equal(destination, source)
        assert loaded.all()
        assert len(seen) == 1
        for ticket in tickets:
            assert engine.is_done(ticket)
            engine.wait(ticket, 0)
        assert set(threading.enumerate()) <= threads

    def test_close_after_an_interrupted_close_finishes_the_work(self) -> None:
        threads = set(threading.enumerate())
        engine, gate, destination = self.make(), Gate(), torch.zeros(4)
        self.hold(engine)
        engine.submit([copy_of((destination, data(4)), wire=UP, load=gate)])
        timers = [threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)), threading.Timer(0.15, gate.open)]
        for timer in timers:
            timer.start()
        with pytest.raises(KeyboardInterrupt):
            engine.close()
        self.let_go(engine)
        engine.close()
        for timer in timers:
            timer.join()
        assert torch.equal(destination, data(4))
        assert set(threading.enumerate()) <= threads

    def test_a_closed_engine_refuses(self) -> None:
        engine = self.make()
        engine.close()
        with pytest.raises(ClosedError):
            engine.submit([])
        with pytest.raises(ClosedError):
            engine.submit([copy_of((torch.zeros(4), data(4)))])
