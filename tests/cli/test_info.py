"""``tierkv info``: the machine and what a config comes to on it."""

import builtins
import importlib.metadata
import tomllib

import pytest

from tests.cli.commands import assert_one_line_error, finish, one_object
from tierkv.cli import info
from tierkv.config import load_config


def test_json_says_what_was_found(cli, clean_environment):
    found = one_object(cli("info", "--json").stdout)
    assert found["versions"]["tierkv"] == "0.1.0"
    assert found["versions"]["torch"]
    assert found["device"] in {"cpu", "cuda"}
    assert found["ram_bytes"]["free"] > 0
    assert found["budget_bytes"]["device"] > 0
    assert found["store_path"] == str(clean_environment)
    assert found["store_writable"] is True
    assert found["settings"] == {"disk.path": str(clean_environment)}
    assert not clean_environment.exists(), "looking makes nothing"


def test_the_table_names_the_same(cli):
    stdout = cli("info").stdout
    for word in ("torch", "device", "disk", "RAM", "cgroup limit", "store"):
        assert word in stdout


def test_a_config_is_resolved(cli, tmp_path):
    file = tmp_path / "tierkv.toml"
    file.write_text('block_size = 64\n[device]\ncapacity = "64MiB"\n[disk]\ncapacity = 0\n')
    found = one_object(cli("info", "--config", file, "--json").stdout)
    assert found["budget_bytes"] == {"device": 64 << 20, "host": 0, "disk": 0}
    assert found["store_path"] is None
    assert found["settings"]["block_size"] == 64
    assert "off" in cli("info", "--config", file).stdout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("blok_size = 3", ["blok_size", "block_size"]),
        ("block_size = ", ["not valid TOML"]),
        ('[device]\ncapacity = "900TiB"', ["device.capacity", "does not fit"]),
    ],
)
def test_a_bad_config_is_its_own_one_line_error(cli, tmp_path, text, words):
    file = tmp_path / "tierkv.toml"
    file.write_text(text)
    assert_one_line_error(cli("info", "--config", file, "--json"), *words)


def test_a_missing_config_and_a_bad_variable(cli, tmp_path, monkeypatch):
    assert_one_line_error(cli("info", "--config", tmp_path / "none.toml"), "none.toml", "no such file")
    monkeypatch.setenv("TIERKV_DEVICE__CAPACITY", "lots")
    assert_one_line_error(cli("info"), "TIERKV_DEVICE__CAPACITY", "lots")


def test_the_default_config_is_a_file_to_begin_with(cli, tmp_path):
    text = cli("info", "--default-config").stdout
    assert tomllib.loads(text)
    file = tmp_path / "tierkv.toml"
    file.write_text(text)
    assert load_config(file, environ={}) == load_config(environ={})
    assert one_object(cli("info", "--default-config", "--json").stdout) == {"default_config": text}
    assert_one_line_error(cli("info", "--default-config", "--config", file), "--default-config")


def test_it_works_without_transformers_and_lmdb(cli, monkeypatch):
    real_import = builtins.__import__
    real_version = importlib.metadata.version

    def no_import(name, *args, **kwargs):
        if name.partition(".")[0] in {"transformers", "lmdb", "triton"}:
            raise ImportError(f"{name} is broken")
        return real_import(name, *args, **kwargs)

    def no_version(name):
        if name in {"transformers", "lmdb"}:
            raise importlib.metadata.PackageNotFoundError(name)
        return real_version(name)

    monkeypatch.setattr(builtins, "__import__", no_import)
    monkeypatch.setattr(info, "version", no_version)
    found = one_object(cli("info", "--json").stdout)
    assert found["versions"]["transformers"] is None
    assert "not installed" in cli("info").stdout


def test_a_store_that_cannot_be_written_to_is_named(cli, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIERKV_DISK__PATH", str(tmp_path / "file" / "store"))
    assert "cannot be used" in " ".join(cli("info").stdout.split())


@pytest.mark.parametrize(
    ("values", "key", "words"),
    [
        ({"DEVICE__CAPACITY": "1"}, "device.capacity", "device.capacity = 1 bytes cannot hold"),
        ({"HOST__CAPACITY": "1"}, "host.capacity", "host.capacity = 1 bytes cannot hold"),
        ({"DISK__CAPACITY": "1"}, "disk.capacity", "disk.capacity = 1 bytes holds no block"),
        ({"DISK__PATH": "/dev/null"}, "disk.path", "the disk path /dev/null cannot be used: Not a directory"),
        ({"DISK__PATH": "{tmp}/file"}, "disk.path", "/file cannot be used: Not a directory"),
        ({"DISK__PATH": "{tmp}/" + "b" * 300 + "/store"}, "disk.path", "/store cannot be used: File name too long"),
        ({"DISK__PATH": "{tmp}/closed"}, "disk.path", "/closed cannot be used: File exists"),
    ],
)
def test_what_generate_would_refuse_is_said_value_by_value(cli, tmp_path, monkeypatch, values, key, words):
    (tmp_path / "file").write_text("")
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "spill").write_text("")
    for name, text in values.items():
        monkeypatch.setenv(f"TIERKV_{name}", text.format(tmp=tmp_path))
    before = sorted(tmp_path.rglob("*"))
    problems = one_object(cli("info", "--json").stdout)["problems"]
    assert list(problems) == [key]
    assert words in problems[key]
    assert str(tmp_path / ".tierkv-") not in problems[key]
    assert f"problem: with this {key} no model" in cli("info").stdout
    assert sorted(tmp_path.rglob("*")) == before, "looking leaves nothing"


def test_every_problem_is_said_at_once_and_a_store_in_use_is_tried_where_it_lies(cli, clean_environment, monkeypatch):
    for tier in ("DEVICE", "HOST", "DISK"):
        monkeypatch.setenv(f"TIERKV_{tier}__CAPACITY", "1")
    problems = one_object(cli("info", "--json").stdout)["problems"]
    assert list(problems) == ["device.capacity", "host.capacity", "disk.capacity"]
    (clean_environment / "spill").mkdir(parents=True)
    monkeypatch.setenv("TIERKV_DISK__CAPACITY", "1GiB")
    assert "disk.path" not in one_object(cli("info", "--json").stdout)["problems"]
    assert list(clean_environment.rglob("*")) == [clean_environment / "spill"]


def test_a_path_without_any_room_is_refused_as_generate_does(cli, monkeypatch):
    monkeypatch.setenv("TIERKV_DISK__PATH", "/proc/x")
    line = cli("info").stderr
    assert_one_line_error(cli("info"), 'disk.path = "/proc/x"', "no free space", "another folder")
    assert cli("generate", "--model", "/no/such/model", "--prompt", "a").stderr == line


def test_cgroup_limits_of_both_versions(tmp_path):
    def put(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert info.cgroup_limit(tmp_path) is None
    put("proc/self/cgroup", "0::/app/job\n5:cpu:/\n4:memory:/old\n")
    put("sys/fs/cgroup/app/job/memory.max", "max\n")
    assert info.cgroup_limit(tmp_path) is None
    put("sys/fs/cgroup/app/memory.max", "5000000\n")
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert info.cgroup_limit(tmp_path) == 5_000_000
    put("sys/fs/cgroup/memory/old/memory.limit_in_bytes", "4000000\n")
    assert info.cgroup_limit(tmp_path) == 4_000_000


def test_it_runs_as_a_program(start, tmp_path):
    code, stdout, stderr = finish(start("info", "--json"))
    assert code == 0
    assert stderr == ""
    assert one_object(stdout)["versions"]["python"]
