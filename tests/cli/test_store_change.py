"""``tierkv store gc``, ``clear``, ``export`` and ``import``: what is changed, and what is asked first."""

import os
import pty
import signal
import subprocess
import sys
from itertools import pairwise

import pytest

from tests.cli.commands import assert_one_line_error, finish, one_object
from tests.cli.stores import MANIFEST, ROOT, damage, flip, snapshot
from tests.storage.prefixes import (
    MIB,
    NAMESPACE,
    OTHER,
    chain,
    check_sound,
    prefixes,
    put_all,
    read_run,
)  # fmt: skip
from tierkv.cli import store_open
from tierkv.storage.prefix_queue import ShedQueue

# -- gc and clear -----------------------------------------------------------------------------------------------------


def test_gc(cli, kept):
    found = one_object(cli("store", "gc", "--json").stdout)
    assert [found[name] for name in ("aged", "orphans", "evicted", "retired", "blocks")] == [0, 0, 0, 0, 9]
    found = one_object(cli("store", "gc", "--budget", f"{3 * 8192 + 2 * 4096}", "--json").stdout)
    assert (found["evicted"], found["blocks"]) == (4, 5)
    assert found["freed_bytes"] > 0
    assert found["allocated_bytes"] == one_object(cli("store", "stats", "--json").stdout)["allocated_bytes"]
    assert one_object(cli("store", "gc", "--max-age", "1h", "--json").stdout)["aged"] == 0
    with prefixes(kept) as store:
        age_all(store, 7200)
    stdout = cli("store", "gc", "--max-age", "1h").stdout
    assert "2 too old" in stdout
    assert "3 blocks remain" in stdout, "pinned ones stay"
    with prefixes(kept) as store:
        check_sound(store)


def age_all(store, seconds):
    with store._parts.write() as book:
        for row in list(book.all_rows()):
            row.created -= seconds
            book.file(row)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--budget", "lots"], ["--budget", '"lots" is not a size', "512MiB"]),
        (["--budget", "2gb"], ["--budget", "did you mean"]),
        (["--budget", "40%"], ["--budget", "40%", "legal here"]),
        (["--budget", ""], ["--budget"]),
        (["--max-age", "7"], ["--max-age: '7' is not a duration", "12h"]),
        (["--max-age", "0d"], ["--max-age: '0d'"]),
        (["--max-age", "-3h"], ["--max-age: '-3h'"]),
        (["--max-age", "1y"], ["--max-age: '1y'"]),
        (["--max-age", "٣d"], ["--max-age"]),
    ],
)
def test_bad_limits_are_one_line(cli, kept, options, said):
    assert_one_line_error(cli("store", "gc", *options), *said)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("90m", 5400), ("1.5h", 5400), ("7 d", 604_800), (" 2w ", 1_209_600)]
)
def test_durations(text, seconds):
    assert store_open.parse_duration(text, "--max-age") == seconds


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, ""), (0, "0s"), (119, "119s"), (120, "2m"), (36 * 3600, "36h"), (9e6, "104d")]
)
def test_ages(seconds, text):
    assert store_open.format_age(seconds) == text


def test_clear(cli, kept):
    assert_one_line_error(cli("store", "clear"), "add --yes")
    assert_one_line_error(cli("store", "clear", "--namespace", "xy", "--yes"), "'xy'", "hexadecimal")
    unknown = "f" * 20
    assert_one_line_error(
        cli("store", "clear", "--namespace", unknown, "--yes"), "no namespace digest begins", OTHER.hex()[:16]
    )
    found = one_object(cli("store", "clear", "--namespace", OTHER.hex()[:6].upper(), "--yes", "--json").stdout)
    assert (found["cleared"], found["namespace"]) == (3, OTHER.hex())
    assert found["freed_bytes"] > 0
    assert "forgotten: 6 blocks" in cli("store", "clear", "--yes").stdout
    assert one_object(cli("store", "ls", "--json").stdout)["namespaces"] == []
    assert_one_line_error(cli("store", "clear", "--namespace", "0", "--yes"), "the store is empty")


def asked(kept, *arguments):
    """Start a command whose standard input is a terminal; return it with the other end."""
    here, there = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tierkv", "store", *map(str, arguments)],
        stdin=there, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
    )  # fmt: skip
    os.close(there)
    return process, here


@pytest.mark.parametrize(
    ("answer", "code", "left"), [(b"y\n", 0, 0), (b"YES\n", 0, 0), (b"n\n", 1, 9), (b"\n", 1, 9), (b"\x04", 1, 9)]
)
def test_clear_asks_where_there_is_a_terminal(cli, kept, answer, code, left):
    process, terminal = asked(kept, "clear", "--json")
    os.write(terminal, answer)
    ended, stdout, stderr = finish(process)
    os.close(terminal)
    assert ended == code
    assert f"Forget all of {kept}/prefix (9 blocks, 29.29KiB)? [y/N]" in stderr
    if code:
        assert stdout == ""
        assert stderr.splitlines()[-1].endswith("error: not confirmed; nothing was forgotten")
    else:
        assert one_object(stdout)["cleared"] == 9
    assert one_object(cli("store", "stats", "--json").stdout)["blocks"] == left


def test_ctrl_c_at_the_question(cli, kept):
    process, terminal = asked(kept, "clear")
    assert process.stderr.read(6) == "Forget"
    process.send_signal(signal.SIGINT)
    code, stdout, stderr = finish(process)
    os.close(terminal)
    assert (code, stdout) == (130, "")
    assert stderr.splitlines()[-1].endswith("interrupted")
    assert one_object(cli("store", "stats", "--json").stdout)["blocks"] == 9


SLOW_CHECKS = """
import sys, time
from tierkv.cli.app import main
from tierkv.storage.prefix_reader import PrefixReader
check = PrefixReader.check
def slowly(reader, found):
    sys.stderr.write("checking\\n")
    sys.stderr.flush()
    time.sleep(30)
    return check(reader, found)
PrefixReader.check = slowly
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_the_middle_leaves_a_sound_store(cli, kept, number, code):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_CHECKS, "store", "verify", "--json"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr.readline() == "checking\n"
    process.send_signal(number)
    ended, stdout, stderr = finish(process, 25)
    assert (ended, stdout) == (code, "")
    assert len(stderr.splitlines()) == 1
    assert (kept / "prefix" / "index.digest").exists(), "it was closed"
    assert cli("store", "verify").exit_code == 0


# -- export and import ------------------------------------------------------------------------------------------------


def test_a_chain_goes_to_another_store(cli, kept, tmp_path):
    leaf, file = chain(1, 5)[-1].key.hex(), tmp_path / "chain.tkvx"
    found = one_object(cli("store", "export", leaf[:10].upper(), file, "--json").stdout)
    assert (found["key"], found["blocks"], found["tokens"], found["namespace"]) == (leaf, 5, 20, NAMESPACE.hex())
    assert found["bytes"] == file.stat().st_size
    other = tmp_path / "other"
    with prefixes(other):
        pass
    for _ in range(2):
        found = one_object(cli("store", "import", file, "--path", other, "--json").stdout)
        assert (found["blocks"], found["stored"]) == (5, 5)
    assert "5 of the 5 blocks" in cli("store", "import", file, "--path", other).stdout
    with prefixes(other) as store:
        assert read_run(store, chain(1, 5)) == 5
        assert store.ls()[0].manifest == MANIFEST


def test_leaves_that_cannot_be_told(cli, kept, tmp_path):
    leaves = sorted(one["key"] for one in one_object(cli("store", "ls", "--blocks", "--json").stdout)["leaves"])
    file = tmp_path / "file"
    assert_one_line_error(cli("store", "export", "0x12", file), "'0x12'", "1 to 64 hexadecimal digits", "ls --blocks")
    near = leaves[0][:8] + ("0" if leaves[0][8] != "0" else "1")
    line = assert_named(
        cli("store", "export", near, file), f"no leaf key begins with {near}; the nearest: {leaves[0][:16]}"
    )
    assert "ls --blocks" in line
    inner = chain(1, 2)[1].key.hex()
    assert_named(cli("store", "export", inner, file), f"no leaf key begins with {inner}")
    assert not list(tmp_path.glob("*file*"))


def assert_named(result, text):
    assert_one_line_error(result, text)
    return result.stderr


def test_an_ambiguous_leaf_names_the_candidates(cli, clean_environment, tmp_path):
    with prefixes(clean_environment) as store:
        for number in range(40):
            put_all(store, chain(number, 1))
    keys = sorted(chain(number, 1)[0].key.hex() for number in range(40))
    digit = next(key[0] for key, after in pairwise(keys) if key[0] == after[0])
    same = [key for key in keys if key[0] == digit]
    line = assert_named(cli("store", "export", digit, tmp_path / "file"), f"{len(same)} leaf keys begin with {digit}: ")
    assert all((key[:16] in line) or len(same) > 5 for key in same)
    assert "give more digits" in line


def test_where_no_export_can_go(cli, kept, tmp_path):
    leaf = chain(1, 5)[-1].key.hex()
    assert_one_line_error(cli("store", "export", leaf, tmp_path), "Is a directory", "file that can be written")
    assert_one_line_error(cli("store", "export", leaf, "/proc/x/y"), "/proc/x/y", "file that can be written")
    damage(kept, chain(1, 2)[1])
    result = cli("store", "export", leaf, tmp_path / "file")
    assert result.exit_code == 1
    assert "is damaged" in result.stderr
    assert not list(tmp_path.glob("*file*"))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.unlink(), ["cannot read", "No such file"]),
        (lambda path: path.write_bytes(b"PK\3\4" + bytes(100)), ["no exported prefix"]),
        (lambda path: path.write_bytes(b""), ["no exported prefix"]),
        (lambda path: flip(path, 3000), ["is damaged", "checksum"]),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), ["is damaged"]),
        (lambda path: path.write_bytes(b"TKVX\x09\0" + bytes(100)), ["has format 9", "export it again"]),
    ],
)
def test_files_that_cannot_be_imported(cli, kept, tmp_path, spoil, said):
    file = tmp_path / "file.tkvx"
    assert cli("store", "export", chain(1, 5)[-1].key.hex(), file).exit_code == 0
    spoil(file)
    assert_one_line_error(cli("store", "import", file, "--json"), str(file), *said, "tierkv store export")


def test_a_store_too_small_for_a_chain_says_what_it_took(cli, tmp_path):
    with prefixes(tmp_path / "from", 32 * MIB) as store:
        put_all(store, chain(1, 60, 100_000))
    leaf, file = chain(1, 60)[-1].key.hex(), tmp_path / "file"
    assert cli("store", "export", leaf, file, "--path", tmp_path / "from").exit_code == 0
    with prefixes(tmp_path / "to", 4 * MIB):
        pass
    result = cli("store", "import", file, "--path", tmp_path / "to", "--json")
    assert result.exit_code == 1
    found = one_object(result.stdout)
    assert 0 <= found["stored"] < found["blocks"] == 60
    assert result.stderr.splitlines()[-1].startswith(f"error: only {found['stored']} of 60 blocks are stored")


def test_a_disk_that_refuses_an_import_is_a_failure(cli, kept, tmp_path, monkeypatch):
    file = tmp_path / "file"
    assert cli("store", "export", chain(1, 5)[-1].key.hex(), file).exit_code == 0
    monkeypatch.setattr(ShedQueue, "wait_finished", lambda *_: False)
    result = cli("store", "import", file)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "could not all be written" in result.stderr


# -- pin and unpin --------------------------------------------------------------------------------------------------------


def test_pin_and_unpin(cli, kept):
    leaf = chain(1, 5)[-1].key.hex()

    def pinned():
        leaves = one_object(cli("store", "ls", "--blocks", "--json").stdout)["leaves"]
        return next(one["pinned"] for one in leaves if one["key"] == leaf)

    assert not pinned()
    found = one_object(cli("store", "pin", leaf[:12], "--for", "2h", "--json").stdout)
    assert (found["key"], found["tokens"], found["pinned"], found["seconds"]) == (leaf, 20, True, 7200.0)
    assert pinned()
    assert one_object(cli("store", "gc", "--budget", "1", "--json").stdout)["blocks"] >= 5
    assert "may be evicted again" in cli("store", "unpin", leaf[:12]).stdout
    assert not pinned()
    assert_one_line_error(cli("store", "pin", "zz"), "'zz'", "hexadecimal")
    assert_one_line_error(cli("store", "pin", leaf[:12], "--for", "soon"), "--for", "'soon'")


def test_an_export_does_not_go_into_the_store_itself(cli, kept):
    before = snapshot(kept)
    leaf = chain(1, 5)[-1].key.hex()
    for name in ("format.json", "index/data.mdb", "new"):
        assert_one_line_error(cli("store", "export", leaf, kept / "prefix" / name), "in the store itself")
    assert {path: content for path, content in snapshot(kept).items() if path in before and path.suffix == ".json"}
    assert one_object(cli("store", "verify", "--json").stdout)["checked"] == 9
