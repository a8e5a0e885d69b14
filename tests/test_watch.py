"""Watching: processes are found and read, the dead are cleaned up, answers are checked, rates are differences."""

import json
import os
import socket
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest

from tests.publishing import EngineProcess
from tierkv import watch
from tierkv.metrics import Counters, Stats, TierStats
from tierkv.watch import EngineSnapshot, ProcessSnapshot, WatchError, look_around, rates, rates_between, read_snapshot


@contextmanager
def answering(path, *pieces):
    """Serve one client at ``path``: read what it asks, send the pieces, hang up."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(4)

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                for piece in pieces:
                    if piece is None:
                        leave.wait(20)
                        return
                    connection.sendall(piece)

        leave = threading.Event()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield
        leave.set()
        thread.join(20)


def made_up(tokens=0, moved=0, stalled=0.0, copied=0.0, overlap=0.5):
    tier = TierStats(100, 50, 60, 3, 1, 10)
    return Stats(
        tiers={"device": tier}, moved_bytes={"host_to_device": moved}, kv_bytes_total=1, caches=1, read_path="paged",
        read_path_reason="", tiered_layers=4, native_layers=0, overlap=overlap, note="a note",
        counters=Counters(tokens=tokens, stall_seconds=stalled, copy_seconds=copied),
    )  # fmt: skip


def one(stats, number=1):
    return EngineSnapshot(number, "tiny", stats)


def test_processes_are_found_and_what_they_did_is_told_from_two_looks(runtime):
    assert look_around() == watch.Found()
    with EngineProcess(runtime, engines=2) as first, EngineProcess(runtime) as second:
        before = look_around()
        assert [process.pid for process in before.processes] == sorted([first.pid, second.pid])
        assert (before.silent, before.refused) == ({}, [])
        assert first.tell(12) == "computed"
        after = look_around()
        mine = next(process for process in after.processes if process.pid == first.pid)
        assert [(engine.id, engine.name) for engine in mine.engines] == [(1, "tiny-0"), (2, "tiny-1")]
        assert all(engine.stats.counters.tokens == 12 for engine in mine.engines)
        assert mine.engines[0].stats.tiers["device"].blocks == 3
        found = rates_between(before.processes, after.processes)
        assert set(found) == {(first.pid, 1), (first.pid, 2), (second.pid, 1)}
        between = found[first.pid, 1]
        assert between.tokens_per_second * between.seconds == pytest.approx(12)
        assert found[second.pid, 1].tokens_per_second == 0
        assert look_around(pid=second.pid).processes[0].pid == second.pid
        assert look_around(pid=1) == watch.Found()
        assert first.tell("close") == "closed"
        assert [process.pid for process in look_around().processes] == [second.pid]


def test_the_socket_of_a_killed_process_is_removed(runtime):
    with EngineProcess(runtime) as dead, EngineProcess(runtime) as alive:
        dead.kill()
        assert dead.socket.exists()
        assert [process.pid for process in look_around().processes] == [alive.pid]
        assert not dead.socket.exists()
        assert alive.socket.exists()


def test_both_places_are_looked_into(runtime, tmp_path):
    """A service without the variable and a login shell with it belong to the same user."""
    own = tmp_path / f"tierkv-{os.geteuid()}"
    with EngineProcess(runtime) as child:
        own.mkdir(mode=0o700)
        child.socket.rename(own / child.socket.name)
        assert [process.pid for process in look_around().processes] == [child.pid]
        assert [process.pid for process in look_around(environ={}).processes] == [child.pid]


def test_a_folder_that_others_could_write_to_is_not_read(runtime):
    with EngineProcess(runtime) as child:
        child.socket.parent.chmod(0o770)
        found = look_around()
        assert found.processes == []
        (said,) = found.refused
        assert "open to other users" in said
        assert f"chmod 700 {child.socket.parent}" in said


def test_what_is_no_socket_of_ours_is_left_alone(runtime, tmp_path):
    folder = runtime / "tierkv"
    folder.mkdir(mode=0o700)
    (folder / "tierkv-7.sock").write_text("a file")
    elsewhere = tmp_path / "elsewhere.sock"
    (folder / "tierkv-8.sock").symlink_to(elsewhere)
    with answering(elsewhere):
        assert look_around() == watch.Found()
        read_snapshot_raises(elsewhere, "hung up")
    assert sorted(path.name for path in folder.iterdir()) == ["tierkv-7.sock", "tierkv-8.sock"]


def read_snapshot_raises(path, words, wait_seconds=5.0):
    with pytest.raises(WatchError, match=words):
        read_snapshot(path, wait_seconds)


GOOD = {"version": 1, "pid": 7, "started": 1.0, "command": "x", "taken": 2.0, "engines": []}


def as_line(**more):
    return json.dumps(GOOD | more).encode() + b"\n"


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([], "hung up"),
        ([b'{"version": 1'], "hung up"),
        ([None], r"no answer within 0\.3 s"),
        ([b"{", None], r"no answer within 0\.3 s"),
        ([b"no json\n"], "not one of tierkv's"),
        ([b"[1]\n"], "not one of tierkv's"),
        ([b"[" * 100_000 + b"\n"], "not one of tierkv's"),
        ([as_line(version=2)], "version 2"),
        ([b'{"version": 1, "error": "no"}\n'], "it refuses: no"),
        ([as_line(engines=3)], "not one of tierkv's"),
        ([as_line(engines=[{"id": 1, "name": "x", "stats": {"tiers": 1}}])], "not one of tierkv's"),
        ([as_line(pid="seven")], "not one of tierkv's"),
    ],
)
def test_answers_are_checked(tmp_path, pieces, words):
    with answering(tmp_path / "s" / "x.sock", *pieces):
        read_snapshot_raises(tmp_path / "s" / "x.sock", words, wait_seconds=0.3)


def test_answers_have_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "LONGEST_ANSWER", 1 << 20)
    with answering(tmp_path / "s" / "x.sock", b"x" * ((1 << 20) + 1), None):
        read_snapshot_raises(tmp_path / "s" / "x.sock", "longer than 1 MiB")


def test_one_bad_process_hides_no_other(runtime, monkeypatch):
    monkeypatch.setattr(watch, "WAIT_SECONDS", 0.3)
    with EngineProcess(runtime) as child, answering(runtime / "tierkv" / "tierkv-7.sock", None):
        found = look_around()
    assert [process.pid for process in found.processes] == [child.pid]
    assert found.silent == {"tierkv-7.sock": "no answer within 0.3 s"}


def test_a_newer_tierkv_may_tell_more_and_an_older_less(tmp_path):
    stats = made_up(tokens=5).as_dict()
    stats["counters"] = {"tokens": 5, "something_new": 1}
    line = as_line(engines=[{"id": 1, "name": "x", "stats": stats, "new": 1}, {"id": 2, "name": "y", "stats": None}])
    with answering(tmp_path / "s" / "x.sock", line[:50], line[50:]):
        snapshot = read_snapshot(tmp_path / "s" / "x.sock")
    assert snapshot.engines[0].stats == made_up(tokens=5)
    assert snapshot.engines[1].stats is None


def test_rates_are_differences_by_the_seconds_between():
    before, after = made_up(100, 1000, 1.0, 4.0), made_up(150, 3000, 2.0, 8.0)
    between = rates(one(before), one(after), 2.0)
    assert between.tokens_per_second == 25
    assert between.moved_bytes_per_second == {"host_to_device": 1000}
    assert between.stall_seconds_per_token == 0.02
    assert between.overlap == 0.75


def test_what_cannot_be_told_is_none():
    quiet = made_up(100, 1000, 1.0, 4.0)
    assert rates(one(None), one(quiet), 1.0) is None
    assert rates(one(quiet), one(None), 1.0) is None
    assert rates(one(quiet), one(quiet), 0.0) is None
    between = rates(one(quiet), one(quiet), 1.0)
    assert (between.tokens_per_second, between.stall_seconds_per_token, between.overlap) == (0, None, None)
    on_cuda = replace(quiet, overlap=None)
    assert rates(one(made_up()), one(on_cuda), 1.0).overlap is None


def test_rates_are_only_between_snapshots_of_one_engine():
    def process(pid, started, taken, *numbers):
        return ProcessSnapshot(pid, started, "x", taken, [one(made_up(), number) for number in numbers])

    before = [process(1, 10.0, 5.0, 1, 2), process(2, 10.0, 5.0, 1)]
    # Engine 2 was closed and 3 is new; process 2 is another one of that number.
    after = [process(1, 10.0, 6.0, 1, 3), process(2, 11.0, 6.0, 1)]
    assert set(rates_between(before, after)) == {(1, 1)}
