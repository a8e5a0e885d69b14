"""Where sockets lie: only in folders that nobody else can enter."""

import logging
import os

import pytest

from tests.publishing import Client
from tierkv import publish_folder
from tierkv.publish import Publisher
from tierkv.testing.engines import small_engine, small_layout

LAYOUT = small_layout("plain")


@pytest.fixture
def engine():
    with small_engine(LAYOUT, device_tokens=64) as one:
        yield one


@pytest.mark.parametrize("what", ["a file", "a link", "open to others"])
def test_a_folder_that_is_not_private_is_not_used(publisher, runtime, engine, what, tmp_path, caplog):
    folder, elsewhere = runtime / "tierkv", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if what == "a file":
        folder.write_text("")
    elif what == "a link":
        folder.symlink_to(elsewhere)
    else:
        folder.mkdir()
        folder.chmod(0o755)
    with caplog.at_level(logging.DEBUG, "tierkv.publish"):
        publisher.add(engine, "tiny")
    assert str(folder) in caplog.text
    assert list(elsewhere.iterdir()) == []
    # The other place is there for that.
    other = tmp_path / f"tierkv-{os.geteuid()}" / f"tierkv-{os.getpid()}.sock"
    with Client(other) as client:
        assert client.ask()["pid"] == os.getpid()
    publisher.remove(engine)
    assert not other.exists()


def test_folders_of_other_users_are_not_used(tmp_path, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("only root can make a folder of another user")
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 4711, 4711)
    with pytest.raises(publish_folder.FolderRefused, match="belongs to another user"):
        publish_folder.make_private(theirs)
    # After su the variable may still name the other user's.
    monkeypatch.setattr(publish_folder, "SHARED", tmp_path)
    assert publish_folder.folders({"XDG_RUNTIME_DIR": str(theirs)}) == [tmp_path / "tierkv-0"]


def test_only_own_and_short_places_are_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(publish_folder, "SHARED", tmp_path)
    shared = [tmp_path / f"tierkv-{os.geteuid()}"]
    good, open_to_all = tmp_path / "good", tmp_path / "open"
    good.mkdir(mode=0o700)
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert publish_folder.folders({"XDG_RUNTIME_DIR": str(good)}) == [good / "tierkv", *shared]
    for text in ("", "relative", str(tmp_path / "missing"), str(open_to_all)):
        assert publish_folder.folders({"XDG_RUNTIME_DIR": text}) == shared
    long = tmp_path / ("x" * 100)
    long.mkdir(mode=0o700)
    assert publish_folder.folders({"XDG_RUNTIME_DIR": str(long)}) == shared


def test_the_longest_place_that_is_taken_can_be_bound(tmp_path, monkeypatch, engine):
    room = 107 - len("/tierkv/.tierkv-4194304-01234567") - len(str(tmp_path)) - 1
    if room < 1:
        pytest.skip("the temporary folder's own path is too long")
    longest = tmp_path / ("x" * room)
    longest.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(longest))
    monkeypatch.setattr(publish_folder, "SHARED", tmp_path / "missing")
    monkeypatch.setattr(os, "getpid", lambda: 4194304)
    assert publish_folder.folders()[0] == longest / "tierkv"
    one = Publisher()
    one.add(engine, "tiny")
    with Client(longest / "tierkv" / "tierkv-4194304.sock") as client:
        assert client.ask()["pid"] == 4194304
    one.close()


def test_nowhere_to_publish_is_said_once_and_harms_nothing(tmp_path, monkeypatch, engine, caplog):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(publish_folder, "SHARED", tmp_path / "missing")
    one = Publisher()
    with caplog.at_level(logging.DEBUG, "tierkv.publish"):
        for _ in range(3):
            one.add(engine, "tiny")
            one.remove(engine)
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert one._server is None
