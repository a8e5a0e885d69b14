"""``tierkv store ls``, ``stats`` and ``verify``: what is shown, while others use the store too."""

import re
import subprocess
import sys
import tracemalloc

import pytest

from tests.cli.commands import assert_one_line_error, finish, one_object, wait_for
from tests.cli.stores import MANIFEST, ROOT, branch, damage, flip, words
from tests.storage.prefix_child import size_of
from tests.storage.prefixes import (
    MIB,
    NAMESPACE,
    OTHER,
    chain,
    check_sound,
    keys_of,
    prefixes,
    put_all,
    read_run,
)  # fmt: skip
from tierkv.cli.progress import Stage
from tierkv.storage.prefix_queue import ShedQueue

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
