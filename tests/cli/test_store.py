"""``tierkv store``: what it shows, what it changes, what it refuses, and that others may use the store meanwhile."""

import os
import pty
import re
import signal
import subprocess
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cli.commands import assert_one_line_error, finish, one_object, wait_for
from tests.storage.prefix_child import size_of
from tests.storage.prefixes import (
    MIB,
    NAMESPACE,
    OTHER,
    chain,
    check_sound,
    files_below,
    keys_of,
    prefixes,
    put_all,
    read_run,
)  # fmt: skip
from tierkv.cli import store_open
from tierkv.cli.progress import Stage
from tierkv.storage.prefix_queue import ShedQueue

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = {"model": "/models/tiny-135M", "kv": {"dtype": "bfloat16", "block_size": 4}}
COMMANDS = (
    ["ls"],
    ["stats"],
    ["verify"],
    ["gc"],
    ["clear", "--yes"],
    ["export", "ab", "{tmp}/out"],
    ["import", "{tmp}/in"],
)


@pytest.fixture
def kept(clean_environment):
    """A store with two namespaces: chains of 5 and 2 blocks that share one, and one of 3 blocks."""
    with prefixes(clean_environment) as store:
        store.namespace(NAMESPACE, MANIFEST)
        put_all(store, chain(1, 5))
        put_all(store, [chain(1, 1)[0], branch()])
        put_all(store, chain(2, 3, 8000, OTHER), OTHER)
        store.touch(keys_of(chain(1, 5)))
        store.pin(keys_of(chain(2, 3, 8000, OTHER)), None)
        assert store.flush(10)
    return clean_environment


def branch():
    """A block that continues the first of chain 1 in another way."""
    from tierkv.keys import chain_keys
    from tierkv.storage.prefix_store import Block

    first = chain(1, 1)[0].key
    return Block(chain_keys(first, [7, 7, 7, 7], 4)[0], first, (7, 7, 7, 7), (bytes(1000),))


def snapshot(folder):
    return {path: path.read_bytes() for path in files_below(folder)}


def damage(root, block, namespace=NAMESPACE):
    """Flip one byte of a block's record in its slab."""
    with prefixes(root, None) as store:
        (found,) = store.match(namespace, [block.key])
        path = store._parts.slabs.path(found.slot_bytes)
    flip(path, found.slot * found.slot_bytes + 150)


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x40]))


def words(text):
    return " ".join(text.split())


# -- what is there ----------------------------------------------------------------------------------------------------


def test_ls(cli, kept):
    found = one_object(cli("store", "ls", "--json").stdout)
    assert found["path"] == str(kept / "prefix")
    assert "leaves" not in found
    big, small = found["namespaces"]
    assert (big["digest"], big["model"], big["blocks"], big["bytes"], big["hits"]) == (OTHER.hex(), None, 3, 24_000, 0)
    assert (small["model"], small["dtype"], small["block_size"]) == ("/models/tiny-135M", "bfloat16", 4)
    assert (small["blocks"], small["bytes"], small["hits"], small["manifest"]) == (6, 6000, 5, MANIFEST)
    assert 0 <= small["newest_seconds"] <= small["oldest_seconds"] < 60
    table = cli("store", "ls").stdout
    for word in ("namespace", "bfloat16", "tiny-135M", "23.43KiB", NAMESPACE.hex()[:12]):
        assert word in table
    assert len(table.splitlines()) == 3


def test_ls_of_chains(cli, kept):
    leaves = one_object(cli("store", "ls", "--blocks", "--json").stdout)["leaves"]
    by_key = {one["key"]: one for one in leaves}
    assert set(by_key) == {block.key.hex() for block in (chain(1, 5)[-1], branch(), chain(2, 3, namespace=OTHER)[-1])}
    long = by_key[chain(1, 5)[-1].key.hex()]
    assert (long["blocks"], long["tokens"], long["bytes"], long["hits"], long["pinned"]) == (5, 20, 5000, 1, False)
    assert long["namespace"] == NAMESPACE.hex()
    short = by_key[branch().key.hex()]
    assert (short["blocks"], short["tokens"], short["bytes"], short["hits"]) == (2, 8, 2000, 0)
    assert by_key[chain(2, 3, namespace=OTHER)[-1].key.hex()]["pinned"]
    assert 0 <= long["age_seconds"] < 60
    lines = cli("store", "ls", "--blocks").stdout.splitlines()
    assert len(lines) == 8
    assert sum("pinned" in line for line in lines[5:]) == 1


def test_an_empty_store(cli, clean_environment):
    with prefixes(clean_environment):
        pass
    assert cli("store", "ls").stdout == f"{clean_environment}/prefix is empty\n"
    found = one_object(cli("store", "ls", "--blocks", "--json").stdout)
    assert (found["namespaces"], found["leaves"]) == ([], [])
    with prefixes(clean_environment) as store:
        store.namespace(NAMESPACE, {"model": "a\x1b]0;b", "kv": 3})
    (one,) = one_object(cli("store", "ls", "--json").stdout)["namespaces"]
    assert (one["oldest_seconds"], one["blocks"], one["dtype"]) == (None, 0, None)
    assert "\x1b" not in cli("store", "ls").stdout, "names steer no terminal"


def test_stats(cli, kept):
    found = one_object(cli("store", "stats", "--json").stdout)
    assert (found["blocks"], found["bytes"], found["namespaces"]) == (9, 30_000, 2)
    assert (found["hits"], found["pinned"], found["damaged_slots"]) == (5, 3, 0)
    assert found["capacity_bytes"] == 8 * MIB
    assert found["fill"] == pytest.approx(found["allocated_bytes"] / (8 * MIB), abs=1e-3)
    assert 0 < found["allocated_bytes"] < 8 * MIB
    stdout = words(cli("store", "stats").stdout)
    assert "9 in 2 namespaces" in stdout
    assert "of 8MiB" in stdout


def test_the_path_comes_from_the_option_the_variable_or_the_config(cli, kept, tmp_path, monkeypatch):
    monkeypatch.delenv("TIERKV_DISK__PATH")
    assert one_object(cli("store", "stats", "--path", kept, "--json").stdout)["blocks"] == 9
    file = tmp_path / "tierkv.toml"
    file.write_text(f'[disk]\npath = "{kept}"\n[prefix]\neviction = "s3fifo"\n')
    monkeypatch.setenv("TIERKV_CONFIG", str(file))
    assert one_object(cli("store", "stats", "--json").stdout)["blocks"] == 9
    monkeypatch.setenv("TIERKV_DISK__PATH", str(tmp_path / "none"))
    assert_one_line_error(cli("store", "stats"), f"there is no prefix store in {tmp_path}/none/prefix")


def test_no_command_changes_the_capacity(cli, kept, tmp_path):
    leaf = chain(1, 5)[-1].key.hex()
    for command in (
        ["ls"],
        ["stats"],
        ["verify", "--repair"],
        ["gc", "--budget", "1MiB"],
        ["export", leaf, tmp_path / "file"],
    ):
        assert cli("store", *command).exit_code == 0
    assert cli("store", "clear", "--yes").exit_code == 0
    assert cli("store", "import", tmp_path / "file").exit_code == 0
    assert one_object(cli("store", "stats", "--json").stdout)["capacity_bytes"] == 8 * MIB


# -- verify -----------------------------------------------------------------------------------------------------------


def test_verify_and_repair(cli, kept):
    found = one_object(cli("store", "verify", "--json").stdout)
    assert (found["checked"], found["bad"], found["repaired"], found["damaged"]) == (9, 0, 0, [])
    assert found["seconds"] >= 0
    assert "9 records checked" in cli("store", "verify").stdout
    victim = chain(1, 3)[-1]
    damage(kept, victim)
    for _ in range(2):  # it is looked at, nothing is changed
        result = cli("store", "verify", "--json")
        assert result.exit_code == 1
        found = one_object(result.stdout)
        assert (found["checked"], found["bad"], found["repaired"]) == (9, 1, 0)
        assert found["damaged"] == [
            {"key": victim.key.hex(), "reason": "damaged record: its checksum does not match its bytes"}
        ]
        assert result.stderr.splitlines()[-1].startswith(f"error: {kept}/prefix holds damaged records (1); ")
        assert "--repair" in result.stderr
    result = cli("store", "verify", "--repair", "--json")
    assert result.exit_code == 0
    assert (one_object(result.stdout)["bad"], one_object(result.stdout)["repaired"]) == (1, 1)
    found = one_object(cli("store", "verify", "--json").stdout)
    assert (found["checked"], found["bad"]) == (6, 0), "what continued it is gone with it"
    assert one_object(cli("store", "stats", "--json").stdout)["damaged_slots"] == 1
    assert one_object(cli("store", "gc", "--json").stdout)["retired"] == 1


def test_a_repair_that_does_not_happen_is_a_failure(cli, kept, monkeypatch):
    damage(kept, chain(1, 5)[-1])
    monkeypatch.setattr(ShedQueue, "report_damage", lambda *_: None)
    result = cli("store", "verify", "--repair")
    assert result.exit_code == 1
    assert "1 are damaged, 0 of them taken out" in result.stdout
    assert "could not take them out" in result.stderr


def test_many_damaged_records_are_not_all_printed(cli, clean_environment):
    with prefixes(clean_environment) as store:
        put_all(store, chain(1, 30))
        path = store._parts.slabs.path(4096)
    path.write_bytes(bytes(path.stat().st_size))
    result = cli("store", "verify")
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) == 22
    assert "and 10 more" in result.stdout
    assert len(one_object(cli("store", "verify", "--json").stdout)["damaged"]) == 30


def test_progress_reaches_the_end(cli, clean_environment, monkeypatch):
    with prefixes(clean_environment) as store:
        for number in range(60):
            put_all(store, chain(number, 5))
    steps = []
    monkeypatch.setattr(Stage, "advance", lambda _, count=1: steps.append(count))
    result = cli("store", "verify")
    assert steps == [256, 44]
    assert re.fullmatch(r"checking records: \d+\.\d s\n", result.stderr)


def fill_with_10000(root):
    """Make a store of 10,000 small blocks in 100 chains."""
    with prefixes(root, 1024 * MIB, write_batch=512, write_queue_bytes=64 * MIB) as store:
        for number in range(100):
            for block in chain(number, 100, 200):
                assert store.put(NAMESPACE, block)
        assert store.flush(60)


@pytest.mark.slow
def test_verify_of_10000_blocks_before_and_after_a_flipped_byte(cli, start, clean_environment):
    fill_with_10000(clean_environment)
    code, stdout, _ = finish(start("store", "verify", "--json"))
    found = one_object(stdout)
    assert (code, found["checked"], found["bad"]) == (0, 10_000, 0)
    assert found["seconds"] < 60
    flip(clean_environment / "prefix" / "slab-4096.bin", 6543 * 4096 + 170)
    code, stdout, _ = finish(start("store", "verify", "--json"))
    found = one_object(stdout)
    assert (code, found["checked"], found["bad"], len(found["damaged"])) == (1, 10_000, 1, 1)
    tracemalloc.start()
    try:
        assert cli("store", "verify").exit_code == 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12 * MIB, "of 40 MiB of records one at a time; the index is read in chunks of 4 MiB when it is opened"
    assert cli("store", "verify", "--repair").exit_code == 0
    code, stdout, _ = finish(start("store", "verify", "--json"))
    assert (code, one_object(stdout)["bad"]) == (0, 0)
    assert len(one_object(cli("store", "ls", "--blocks", "--json").stdout)["leaves"]) == 100


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


# -- others meanwhile -------------------------------------------------------------------------------------------------


def test_every_command_while_another_process_writes(cli, clean_environment, tmp_path):
    root, capacity = clean_environment, 6 * MIB
    with prefixes(root, capacity) as store:
        store.namespace(NAMESPACE, MANIFEST)
        put_all(store, chain(1_000_001, 6))
        store.pin(keys_of(chain(1_000_001, 6)), None)
        assert store.flush(10)
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.storage.prefix_child", "fill", str(root), str(capacity), "0", "1000000"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert writer.stdout.readline() == "open\n"
        last = chain(1_000_001, 6)[-1].key.hex()
        for turn in range(4):
            wait_for(lambda: one_object(cli("store", "stats", "--json").stdout)["blocks"] > 50, writer)
            found = one_object(cli("store", "verify", "--json", *["--repair"] * (turn % 2)).stdout)
            assert found["checked"] > 0
            assert found["damaged"] == []
            leaves = one_object(cli("store", "ls", "--blocks", "--json").stdout)["leaves"]
            assert last in {one["key"] for one in leaves}
            assert one_object(cli("store", "export", last, tmp_path / "file", "--json").stdout)["blocks"] == 6
            assert one_object(cli("store", "gc", "--budget", "64KiB", "--json").stdout)["evicted"] > 0
            assert one_object(cli("store", "clear", "--yes", "--json").stdout)["cleared"] >= 6
            assert one_object(cli("store", "import", tmp_path / "file", "--json").stdout)["stored"] == 6
            with prefixes(root, None) as store:
                store.pin(keys_of(chain(1_000_001, 6)), None)
                assert store.flush(10)
            assert one_object(cli("store", "stats", "--json").stdout)["capacity_bytes"] == capacity
        assert writer.poll() is None, writer.communicate()
    finally:
        writer.kill()
        writer.communicate()
    with prefixes(root, capacity) as store:
        assert check_sound(store) >= 6
        assert read_run(store, chain(1_000_001, 6)) == 6
        for number in range(20):
            read_run(store, chain(number, 6, size_of(number)), size_of(number))


# -- help and start ---------------------------------------------------------------------------------------------------


def test_help_has_examples(cli):
    assert "verify" in cli("store").stdout
    for command in ("ls", "stats", "verify", "gc", "clear", "export", "import"):
        stdout = cli("store", command, "--help").stdout
        assert "Examples" in stdout
        assert f"tierkv store {command}" in stdout
        assert "--path" in stdout
        assert "--json" in stdout


def test_it_starts_without_torch(kept):
    code = (
        "import sys; from tierkv.cli.commands import app\n"
        "try:\n    app(['store', 'verify'])\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "print(*({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""
