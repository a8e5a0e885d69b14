"""Executors on the CPU: threads, and the manual one, whose own eyes must be good as other tests rely on them."""

import random
from functools import partial

import pytest
import torch

from tierkv.errors import TransferTimeout
from tierkv.testing.transfer_contract import PATIENCE_SECONDS, TransferContract
from tierkv.testing.transfers import DOWN, RESTORE, UP, Gate, ManualTransfers, copy_of, data
from tierkv.transfer import Copy, ThreadTransfers


class TestThreadTransfers(TransferContract):
    def make(self):
        return ThreadTransfers(self.workers)

    def test_copies_of_one_ticket_run_at_the_same_time(self, engine):
        gates = [Gate() for _ in range(self.workers)]
        ticket = engine.submit([Copy(RESTORE, 1, load=gate) for gate in gates])
        assert all(gate.is_inside.wait(PATIENCE_SECONDS) for gate in gates)
        for gate in gates:
            gate.open()
        engine.wait(ticket)

    def test_no_thread_is_started_before_it_is_needed(self, engine):
        engine.wait(engine.submit([]))
        assert not engine._pool._threads


class TestManualTransfers(TransferContract):
    def make(self):
        return ManualTransfers()

    def hold(self, engine):
        engine.patient = False

    def let_go(self, engine):
        engine.patient = True

    def complete(self, engine, ticket):
        engine.finish(ticket)

    def forget(self, engine):
        engine.submitted.clear()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
    def test_a_destination_is_poisoned_until_the_end(self, engine, dtype):
        destination = torch.zeros(3, dtype=dtype)
        ticket = engine.submit([copy_of((destination, data(3).to(dtype)))])
        poison = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
        assert torch.equal(destination.nan_to_num(5), torch.full((3,), poison, dtype=dtype).nan_to_num(5))
        engine.finish(ticket)
        assert torch.equal(destination, data(3).to(dtype))

    def test_a_failed_copy_leaves_poison(self, engine):
        destination = torch.zeros(3)
        ticket = engine.submit([copy_of((destination, data(3)))])
        engine.fail(ticket, OSError("cable pulled"))
        assert destination.isnan().all()
        with pytest.raises(OSError, match="cable"):
            engine.order(ticket)

    def test_an_impatient_engine_times_out_at_once(self):
        engine = ManualTransfers(patient=False)
        ticket = engine.submit([copy_of((torch.zeros(3), data(3)))])
        with pytest.raises(TransferTimeout):
            engine.wait(ticket)
        assert engine.pending == [ticket]
        engine.close()
        assert engine.pending == []

    def test_some_end_in_random_order(self, engine):
        ends: list[int] = []
        tickets = [engine.submit([Copy(RESTORE, 1, load=partial(ends.append, index))]) for index in range(12)]
        rng = random.Random(3)
        while engine.pending:
            engine.finish_some(rng)
        assert sorted(ends) == list(range(12))
        assert ends != sorted(ends)
        assert engine.submitted == tickets


def change_source(source, destination):
    source[1] = 9.0


def write_destination(source, destination):
    destination[1] = 9.0


def copy_there_too(source, destination):
    """Another copy to the same place, which ends first."""
    destination.copy_(data(3))


@pytest.mark.parametrize("mistake", [change_source, write_destination, copy_there_too], ids=lambda do: do.__name__)
@pytest.mark.parametrize("end", ["finish", "wait", "fail", "close"])
def test_a_mistake_under_a_copy_fails_loudly_and_for_ever(mistake, end):
    engine = ManualTransfers()
    source, destination = data(3), torch.zeros(3)
    ticket = engine.submit([copy_of((destination, source), wire=UP)])
    mistake(source, destination)
    ends = {
        "finish": lambda: engine.finish(ticket),
        "wait": lambda: engine.wait(ticket),
        "fail": lambda: engine.fail(ticket, OSError()),
        "close": engine.close,
    }
    with pytest.raises(AssertionError, match="under a copy from host_to_device"):
        ends[end]()
    for verb in (lambda: engine.submit([]), lambda: engine.is_done(ticket), engine.close):
        with pytest.raises(AssertionError, match="under a copy"):
            verb()


def test_what_a_load_fills_is_no_mistake():
    staged, destination = torch.zeros(3), torch.zeros(3)
    with ManualTransfers() as engine:
        ticket = engine.submit([Copy(RESTORE, 12, [(destination, staged)], load=lambda: staged.copy_(data(3)))])
        engine.wait(ticket)
    assert torch.equal(destination, data(3))


def test_copies_that_share_a_source_are_no_mistake():
    source, first, second = data(3), torch.zeros(3), torch.zeros(3)
    with ManualTransfers() as engine:
        tickets = [engine.submit([copy_of((into, source), wire=DOWN)]) for into in (first, second)]
        engine.finish(tickets[1])
        assert first.isnan().all()
    assert torch.equal(first, second)
