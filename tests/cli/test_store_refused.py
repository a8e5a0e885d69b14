"""``tierkv store`` where there is no store, a foreign, newer, frozen or damaged one."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.commands import assert_one_line_error, finish, one_object
from tests.cli.stores import COMMANDS, snapshot, words
from tests.storage.prefixes import (
    chain,
    files_below,
    prefixes,
    put_all,
)  # fmt: skip

# -- what is no store -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_without_a_store_nothing_is_made(cli, tmp_path, command):
    command = [part.format(tmp=tmp_path) for part in command]
    for path in (tmp_path / "none", tmp_path):
        said = f"there is no prefix store in {path}/prefix"
        assert_one_line_error(cli("store", *command, "--path", path), said, "prefix.persist")
    assert list(tmp_path.iterdir()) == []


def test_paths_that_mean_something_else(cli, kept, tmp_path):
    said = f"did you mean --path {kept}?"
    assert_one_line_error(cli("store", "ls", "--path", kept / "prefix"), "there is no prefix store", said)
    assert_one_line_error(cli("store", "ls", "--path", ""), "--path is empty")
    assert_one_line_error(cli("store", "ls", "--path", "~nobody-of-that-name/x"), "no such user")
    (tmp_path / "file").write_text("")
    assert_one_line_error(cli("store", "ls", "--path", tmp_path / "file"), "there is no prefix store")
    assert_one_line_error(cli("store", "ls", "--path", tmp_path / ("b" * 300)), "b" * 300)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"format": "tierkv prefix store", "version": 99}', ["made by a newer tierkv", "format 99"]),
        ('{"format": "photos", "version": 1}', ["no prefix store"]),
        ("not JSON", ["no prefix store"]),
    ],
)
def test_newer_and_foreign_folders_are_left_alone(cli, kept, tmp_path, command, text, said):
    (kept / "prefix" / "format.json").write_text(text)
    before = snapshot(kept)
    command = [part.format(tmp=tmp_path) for part in command]
    assert_one_line_error(cli("store", *command), *said, str(kept / "prefix"))
    assert snapshot(kept) == before


@pytest.fixture
def frozen(tmp_path):
    """A store that nothing can be written to."""
    where = tmp_path / "frozen"
    where.mkdir()
    if os.geteuid():
        fill_small(where)
        for folder in (where / "prefix", where):
            folder.chmod(0o500)
        for file in files_below(where):
            file.chmod(0o400)
        yield where
        for folder in (where, where / "prefix"):
            folder.chmod(0o700)
        return
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(where)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip()}")
    try:
        fill_small(where)
        subprocess.run(["mount", "-o", "remount,ro", str(where)], check=True)
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def fill_small(root):
    with prefixes(root) as store:
        put_all(store, chain(1, 3))


@pytest.mark.parametrize("command", [["ls"], ["stats"], ["verify"], ["gc"], ["clear", "--yes"]])
def test_a_store_that_cannot_be_written_to_is_one_line(cli, frozen, command):
    said = f"the prefix store {frozen}/prefix cannot be used"
    assert_one_line_error(cli("store", *command, "--path", frozen), said, "may write to")


def cut(path):
    os.truncate(path, 5000)


def garbage(path):
    path.write_bytes(b"garbage" * 3000)


@pytest.mark.parametrize("spoil", [cut, garbage])
def test_a_damaged_index_is_one_warning_and_a_failed_verify(start, kept, spoil):
    data = kept / "prefix" / "index" / "data.mdb"
    spoil(data)
    code, stdout, stderr = finish(start("store", "verify", "--json"))
    assert code == 1
    found = one_object(stdout)
    assert (found["checked"], found["bad"]) == (0, 0)
    assert len(found["warnings"]) == 1
    warning, progress, error = stderr.splitlines()
    assert warning == f"warning: {found['warnings'][0]}"
    assert "is moved to index.damaged-1" in warning
    assert progress.startswith("checking records")
    assert error.startswith(f"error: the index in {kept}/prefix was damaged")
    code, _, stderr = finish(start("store", "verify"))
    assert (code, len(stderr.splitlines())) == (0, 1)
    spoil(data)
    code, stdout, stderr = finish(start("store", "ls"))
    assert (code, stdout, len(stderr.splitlines())) == (0, f"{kept}/prefix is empty\n", 1)
    spoil(data)
    code, stdout, _ = finish(start("store", "verify", "--repair", "--json"))
    assert (code, len(one_object(stdout)["warnings"])) == (0, 1)


def test_a_store_without_its_index_has_no_capacity_and_takes_nothing_in(cli, kept, tmp_path):
    file = tmp_path / "file"
    assert cli("store", "export", chain(1, 5)[-1].key.hex(), file).exit_code == 0
    garbage(kept / "prefix" / "index" / "data.mdb")
    found = one_object(cli("store", "stats", "--json").stdout)
    assert (found["capacity_bytes"], found["fill"], found["blocks"]) == (None, None, 0)
    assert "the next run sets it anew" in words(cli("store", "stats").stdout)
    result = cli("store", "import", file)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "has lost its index" in result.stderr
    with prefixes(kept):
        pass
    assert one_object(cli("store", "import", file, "--json").stdout)["stored"] == 5


def test_a_path_that_is_not_utf8_touches_nothing(cli, kept, tmp_path):
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/odd\xff"))
    shutil.copytree(kept, odd)
    before = snapshot(odd)
    for command in ("ls", "stats", "verify"):
        assert_one_line_error(cli("store", command, "--path", odd), "not UTF-8")
    assert snapshot(odd) == before


@pytest.mark.parametrize("name", ["format.json", "index.digest", "use.lock", "index/data.mdb", "slab-4096.bin"])
@pytest.mark.parametrize("kind", ["fifo", "folder", "link"])
def test_files_of_another_kind_are_named(cli, kept, tmp_path, name, kind):
    path = kept / "prefix" / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").write_bytes(b"foreign")
    assert_one_line_error(cli("store", "ls"), name, "no regular file")
