"""Spill directories: whose process is dead is removed, whose process lives is not. With real processes."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tierkv.errors import ConfigError
from tierkv.storage import spill_dir
from tierkv.storage.spill_dir import SpillDirectory

HOLD = """
import sys, time
from tierkv.storage.spill_dir import SpillDirectory
directory = SpillDirectory(sys.argv[1])
(directory.path / "data").write_bytes(b"x" * 10_000)
print(directory.path, flush=True)
sys.stdin.read()
"""

STRESS = """
import os, sys
from tierkv.storage.spill_dir import SpillDirectory
for _ in range(int(sys.argv[2])):
    with SpillDirectory(sys.argv[1]) as directory:
        (directory.path / "mine").write_text(str(os.getpid()))
        for _ in range(3):
            assert (directory.path / "mine").read_text() == str(os.getpid())
"""


class Holder:
    """A process that holds a spill directory until it is told to stop or killed."""

    def __init__(self, root: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.path = Path(self.process.stdout.readline().strip())

    def kill(self) -> None:
        self.process.kill()
        self._reap()

    def stop(self) -> None:
        self._reap()

    def _reap(self) -> None:
        self.process.communicate()


@pytest.fixture
def holder(tmp_path):
    holder = Holder(tmp_path)
    yield holder
    holder.kill()


def entries(root):
    return sorted(path.name for path in (root / "spill").iterdir())


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_directory_is_private_empty_and_goes_with_close(tmp_path):
    descriptors = open_descriptors()
    directory = SpillDirectory(tmp_path / "not" / "there")
    assert directory.path.is_dir()
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert not list(directory.path.iterdir())
    assert re.fullmatch(rf"{os.getpid()}-[0-9a-f]{{12}}", directory.path.name)
    (directory.path / "inner").mkdir()
    (directory.path / "inner" / "file").write_text("x")
    directory.close()
    directory.close()
    assert entries(tmp_path / "not" / "there") == []
    assert open_descriptors() == descriptors


def test_two_in_one_process_do_not_see_each_other(tmp_path):
    with SpillDirectory(tmp_path) as one:
        with SpillDirectory(tmp_path) as other:
            assert one.path != other.path
            assert other.removed == ()
        assert one.path.is_dir()
    assert entries(tmp_path) == []


def test_a_directory_nobody_refers_to_is_removed(tmp_path):
    SpillDirectory(tmp_path)
    assert entries(tmp_path) == []


def test_a_process_that_ends_without_close_leaves_nothing(tmp_path, holder):
    assert holder.path.is_dir()
    holder.stop()
    assert entries(tmp_path) == []


def test_a_killed_process_is_cleaned_up_after(tmp_path, holder):
    holder.kill()
    assert (holder.path / "data").exists()
    with SpillDirectory(tmp_path) as directory:
        assert directory.removed == (holder.path.name,)
        assert entries(tmp_path) == [directory.path.name, f"{directory.path.name}.lock"]


def test_a_living_neighbour_is_left_alone(tmp_path, holder):
    with SpillDirectory(tmp_path) as directory:
        assert directory.removed == ()
    assert (holder.path / "data").read_bytes() == b"x" * 10_000


def test_a_stopped_neighbour_is_alive(tmp_path, holder):
    holder.process.send_signal(signal.SIGSTOP)
    try:
        with SpillDirectory(tmp_path):
            assert (holder.path / "data").exists()
    finally:
        holder.process.send_signal(signal.SIGCONT)


def test_a_lock_without_its_directory_is_removed(tmp_path):
    # A process that died between making the one and the other.
    (tmp_path / "spill").mkdir()
    (tmp_path / "spill" / "1-abc.lock").touch()
    with SpillDirectory(tmp_path):
        assert len(entries(tmp_path)) == 2


def test_a_lock_lost_to_a_cleaner_is_made_again(tmp_path, monkeypatch):
    take = spill_dir._take
    lost: list[Path] = []

    def lose_twice(lock, descriptor):
        if len(lost) < 2:
            lost.append(lock)
            lock.unlink()
        return take(lock, descriptor)

    monkeypatch.setattr(spill_dir, "_take", lose_twice)
    with SpillDirectory(tmp_path) as directory:
        assert directory.path.with_suffix(".lock") not in lost
        assert len(entries(tmp_path)) == 2
    assert len(lost) == 2


def test_what_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / "spill" / "photos").mkdir(parents=True)
    (tmp_path / "spill" / "notes.txt").touch()
    with SpillDirectory(tmp_path):
        pass
    assert entries(tmp_path) == ["notes.txt", "photos"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_remove_its_parents_directory(tmp_path):
    with SpillDirectory(tmp_path) as directory:
        child = os.fork()
        if child == 0:
            directory.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert directory.path.is_dir()
        with SpillDirectory(tmp_path) as other:
            assert other.removed == ()


def test_many_processes_at_once(tmp_path):
    began = time.monotonic()
    workers = [
        subprocess.Popen([sys.executable, "-c", STRESS, str(tmp_path), "60"], stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    # Meanwhile some die with theirs, over and over.
    while any(worker.poll() is None for worker in workers) and time.monotonic() - began < 30:
        Holder(tmp_path).kill()
    for worker in workers:
        _, errors = worker.communicate()
        assert worker.returncode == 0, errors
    with SpillDirectory(tmp_path):
        pass
    assert entries(tmp_path) == []


def assert_one_line(caught, root):
    assert "\n" not in str(caught.value)
    assert str(root) in str(caught.value)


def test_a_root_that_is_a_file(tmp_path):
    root = tmp_path / "file"
    root.touch()
    with pytest.raises(ConfigError, match="Not a directory") as caught:
        SpillDirectory(root)
    assert_one_line(caught, root)


def test_a_root_below_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        SpillDirectory(tmp_path / "file" / "root")
    assert_one_line(caught, tmp_path / "file" / "root")


def test_a_root_whose_spill_folder_is_a_file(tmp_path):
    (tmp_path / "spill").touch()
    with pytest.raises(ConfigError) as caught:
        SpillDirectory(tmp_path)
    assert_one_line(caught, tmp_path)


def test_a_root_that_nobody_may_write_to():
    # Not even root may make files here, so the test holds for every user.
    with pytest.raises(ConfigError) as caught:
        SpillDirectory("/proc/self")
    assert_one_line(caught, "/proc/self")
