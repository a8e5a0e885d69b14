"""CudaTransfers: the contract on a simulated CUDA, the calls that it makes, and once the real one where there is a GPU.

That no schedule breaks it is shown in ``test_transfer_cuda_order``.
"""

import gc
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch

from tierkv.errors import TransferTimeout
from tierkv.testing.fake_cuda import FakeCuda
from tierkv.testing.transfer_contract import TransferContract
from tierkv.testing.transfers import DOWN, RESTORE, UP, copy_of, data
from tierkv.transfer_cuda import CudaTransfers
from tierkv.transfer_cuda_api import TorchCuda


class TestCudaTransfers(TransferContract):
    takes_pitched = False

    def make(self):
        self.cuda = FakeCuda(takes_pitched=self.takes_pitched)
        return CudaTransfers("cuda:0", self.workers, self.cuda)

    def read_after_order(self, engine, tensor):
        seen = []
        self.cuda.launch(lambda: seen.append(tensor.clone()))
        self.cuda.advance()
        return seen[0]


class TestCudaTransfersOfPitched(TestCudaTransfers):
    takes_pitched = True


@pytest.fixture
def cuda():
    return FakeCuda()


def engine_on(cuda):
    return CudaTransfers("cuda:0", 2, cuda)


# -- what is called ---------------------------------------------------------------------------------------------------


def test_each_direction_has_its_stream_and_the_host_waits_for_none(cuda):
    engine = engine_on(cuda)
    device, host = cuda.on_device(torch.zeros(2)), torch.zeros(2)
    down = engine.submit([copy_of((host, device))])
    engine.order(down)
    up = engine.submit([copy_of((device, host), wire=UP)])
    engine.order(up)
    assert cuda.log == [
        ("compute", "record"),
        ("stream 1", "wait for compute"),
        ("stream 1", "record"),  # when the copies begin, for their time
        ("stream 1", "copy"),
        ("stream 1", "record"),
        ("compute", "wait for stream 1"),
        ("compute", "record"),
        ("stream 2", "wait for compute"),
        ("stream 2", "record"),
        ("stream 2", "copy"),
        ("stream 2", "record"),
        ("compute", "wait for stream 2"),
    ]
    engine.wait(up)
    assert engine.is_done(down)
    assert cuda.host_waits == []
    engine.close()
    assert cuda.host_waits == ["stream 1", "stream 2"]


def test_one_ticket_may_use_both_streams(cuda):
    device, host = [cuda.on_device(data(2)), cuda.on_device(torch.zeros(2))], [torch.zeros(2), data(2) * 3]
    with engine_on(cuda) as engine:
        ticket = engine.submit([copy_of((host[0], device[0])), copy_of((device[1], host[1]), wire=UP)])
        assert [stream for stream, what in cuda.log if what == "copy"] == ["stream 1", "stream 2"]
        engine.wait(ticket)
    assert torch.equal(host[0], data(2))
    assert torch.equal(device[1], data(2) * 3)


@pytest.mark.parametrize("wire", [DOWN, UP], ids=lambda wire: wire.label)
def test_strided_host_memory_is_copied_in_contiguous_pieces(cuda, wire):
    device, host = cuda.on_device(torch.zeros(2, 3, 4, 5)), torch.zeros(2, 3, 2, 4, 5)[:, :, 1]
    pair = (host, device) if wire is DOWN else (device, host)
    pair[1].copy_(data(2, 3, 4, 5))
    with engine_on(cuda) as engine:
        engine.wait(engine.submit([copy_of(pair, wire=wire)]))  # FakeCuda refuses a strided host tensor
    assert torch.equal(pair[0], data(2, 3, 4, 5))
    assert sum(what == "copy" for _, what in cuda.log) == 2 * 3


@pytest.mark.parametrize("wire", [DOWN, UP], ids=lambda wire: wire.label)
def test_a_pitched_tensor_is_one_copy_where_cuda_takes_it(wire):
    cuda = FakeCuda(takes_pitched=True)
    device, host = cuda.on_device(torch.zeros(2, 3, 4, 5)), torch.zeros(2, 3, 2, 4, 5)[:, :, 1]
    pair = (host, device) if wire is DOWN else (device, host)
    pair[1].copy_(data(2, 3, 4, 5))
    with engine_on(cuda) as engine:
        engine.wait(engine.submit([copy_of(pair, wire=wire)]))
    assert torch.equal(pair[0], data(2, 3, 4, 5))
    assert sum(what == "copy" for _, what in cuda.log) == 1


# -- how long the stream stands still -----------------------------------------------------------------------------------


def test_a_stall_is_what_the_compute_stream_waits_for_a_copy(cuda):
    engine, device = engine_on(cuda), cuda.on_device(torch.zeros(2))
    clock = engine.stall_clock()
    cuda.stopped = True
    ticket = engine.submit([copy_of((device, data(2)), wire=UP)])
    with clock.waiting():
        engine.order(ticket)
    assert clock.seconds == 0  # nobody knows yet, and nobody waits to know
    cuda.stopped = False
    cuda.advance()
    # The host was far ahead: the stream had nothing else to do for as long as the copy and its two halves took.
    assert clock.seconds == 0.003
    engine.close()


def test_a_copy_that_is_hidden_behind_a_kernel_is_no_stall(cuda):
    engine, device = engine_on(cuda), cuda.on_device(torch.zeros(2))
    clock = engine.stall_clock()
    ticket = engine.submit([copy_of((device, data(2)), wire=UP)])
    cuda.advance()
    cuda.launch(lambda: None)
    with clock.waiting():
        engine.order(ticket)
    cuda.advance()
    assert clock.seconds == 0
    engine.wait(ticket)
    assert ticket.seconds == 0.003
    engine.close()


def test_a_wait_that_failed_is_no_stall(cuda):
    engine = engine_on(cuda)
    clock = engine.stall_clock()
    ticket = engine.submit([copy_of((torch.zeros(3), data(2)), wire=UP)])
    with pytest.raises(RuntimeError, match="expand"), clock.waiting():
        engine.order(ticket)
    cuda.advance()
    assert clock.seconds == 0
    engine.close()


def test_a_wire_is_at_work_while_its_copies_run(cuda):
    engine = engine_on(cuda)
    device, host = cuda.on_device(torch.zeros(2)), torch.zeros(2)
    engine.wait(engine.submit([copy_of((device, data(2)), wire=UP)] * 2))
    down = engine.submit([copy_of((host, device))])
    cuda.advance()
    loaded = engine.submit([replace(copy_of((device, host), wire=RESTORE), load=lambda: time.sleep(0.01))])
    engine.wait(loaded)
    cuda.advance()
    engine.wait(down)
    seconds = engine.clock.seconds()
    assert set(seconds) == {UP, DOWN, RESTORE}
    assert seconds[UP] == 0.006
    assert seconds[DOWN] == 0.003
    assert 0.013 <= seconds[RESTORE] < 10
    engine.close()


# -- several at once ----------------------------------------------------------------------------------------------------


def test_loads_of_one_ticket_run_at_the_same_time(cuda):
    engine, both = engine_on(cuda), threading.Barrier(2, timeout=30)
    places = [cuda.on_device(torch.zeros(2)) for _ in range(2)]
    engine.wait(engine.submit([replace(copy_of((place, data(2)), wire=UP), load=both.wait) for place in places]))
    assert all(torch.equal(place, data(2)) for place in places)
    engine.close()


def test_what_needs_no_load_does_not_wait_for_those_that_do(cuda):
    engine, go_on = engine_on(cuda), threading.Event()
    now, later = (cuda.on_device(torch.zeros(2)) for _ in range(2))
    copies = [replace(copy_of((later, data(2)), wire=UP), load=go_on.wait), copy_of((now, data(2)), wire=UP)]
    ticket = engine.submit(copies)
    cuda.advance()
    assert torch.equal(now, data(2))
    assert not engine.is_done(ticket)
    go_on.set()
    engine.wait(ticket)
    assert torch.equal(later, data(2))
    engine.close()


def test_a_load_that_fails_leaves_nothing_of_its_ticket_under_way(cuda):
    engine, place = engine_on(cuda), cuda.on_device(torch.zeros(2))
    copies = [replace(copy_of((place, data(2)), wire=UP), load=load) for load in (lambda: 1 / 0, lambda: None)]
    ticket = engine.submit(copies)
    with pytest.raises(ZeroDivisionError):
        engine.wait(ticket)
    engine.settle(ticket)
    assert engine.is_done(ticket)
    engine.close()


@pytest.mark.parametrize("follows", [True, False])
def test_a_caller_on_another_stream_comes_after_the_one_before(follows):
    """One thread's kernel still reads a buffer when another thread, on its own stream, has it filled again."""
    wrong = 0
    for seed in range(40):
        cuda = FakeCuda(seed)
        engine, buffer = engine_on(cuda), cuda.on_device(data(2))
        seen: list[torch.Tensor] = []
        cuda.launch(lambda buffer=buffer, seen=seen: seen.append(buffer.clone()))
        engine.mark()
        with cuda.use(cuda.new_stream(None)):
            if follows:
                engine.follow()
            engine.submit([copy_of((buffer, torch.zeros(2)), wire=UP)])
        cuda.advance()
        wrong += not torch.equal(seen[0], data(2))
        engine.close()
    assert (wrong == 0) == follows


def test_a_caller_on_the_same_stream_waits_for_nothing(cuda):
    engine = engine_on(cuda)
    engine.follow()
    engine.mark()
    engine.follow()
    assert cuda.log == [("compute", "record")]
    engine.close()


# -- waits, errors, owners --------------------------------------------------------------------------------------------


def test_waiting_for_a_stuck_device_is_bounded(cuda):
    engine = engine_on(cuda)
    destination = torch.zeros(2)
    cuda.stopped = True
    ticket = engine.submit([copy_of((destination, data(2)))])
    with pytest.raises(TransferTimeout):
        engine.wait(ticket, 0.02)
    assert not engine.is_done(ticket)
    engine.order(ticket, 0)
    cuda.stopped = False
    engine.wait(ticket)
    assert torch.equal(destination, data(2))
    engine.close()


def test_what_an_error_left_on_a_stream_is_waited_for(cuda):
    engine = engine_on(cuda)
    destination = torch.zeros(2)
    cuda.stopped = True
    ticket = engine.submit([copy_of((destination, data(2))), copy_of((torch.zeros(3), data(2)), wire=UP)])
    assert ticket.error is not None
    assert not engine.is_done(ticket)
    with pytest.raises(RuntimeError, match="expand"):
        engine.order(ticket)
    seen = []
    cuda.launch(lambda: seen.append(destination.clone()))
    cuda.stopped = False
    cuda.advance()
    assert torch.equal(seen[0], data(2))
    assert engine.is_done(ticket)
    engine.close()


def test_a_forgotten_ticket_keeps_its_tensors_until_the_copy_has_run(cuda):
    engine = engine_on(cuda)
    cuda.stopped = True
    source = data(2)
    ref = weakref.ref(source)
    engine.submit([copy_of((torch.zeros(2), source))])
    del source
    gc.collect()
    engine.submit([])
    assert ref() is not None
    cuda.advance()
    engine.submit([])
    gc.collect()
    assert ref() is None
    cuda.stopped = False
    engine.close()


# -- the real one -----------------------------------------------------------------------------------------------------


def test_the_real_api_is_that_of_torch():
    api = TorchCuda("cuda")
    assert api.new_stream is torch.cuda.Stream
    assert (api.new_event.func, api.new_event.keywords) == (torch.cuda.Event, {"enable_timing": True, "blocking": True})
    assert (api.current_stream, api.use) == (torch.cuda.current_stream, torch.cuda.stream)
    destination = torch.zeros(4)
    api.copy(destination, data(4))
    assert torch.equal(destination, data(4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_copies_behind_the_kernels_that_were_enqueued_and_before_those_that_follow():
    gpu = torch.device("cuda")
    host = torch.zeros(4, 3, 64, 8, pin_memory=True)[:, 1]
    values, device, back = data(4, 64, 8).to(gpu), torch.zeros(4, 64, 8, device=gpu), torch.zeros(4, 64, 8, device=gpu)
    with CudaTransfers(gpu, 2) as engine:
        torch.cuda._sleep(50_000_000)
        device.copy_(values)
        down = engine.submit([copy_of((host, device))])
        assert not engine.is_done(down), "submit waited for the device"
        engine.order(down)
        device.zero_()
        up = engine.submit([copy_of((back, host), wire=UP)])
        engine.order(up)
        read = back.clone()
        engine.wait(up)
    assert torch.equal(host, data(4, 64, 8))
    assert torch.equal(read.cpu(), data(4, 64, 8))
    assert not device.any()
