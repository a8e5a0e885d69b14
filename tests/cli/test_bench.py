"""``tierkv bench``: what is refused at once, and the contract of its JSON."""

import json

import pytest

from tests.cli.commands import assert_one_line_error, finish, one_object


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--contexts", "0"], ["--contexts", "'0'", "1 to 1,000,000"]),
        (["--contexts", "12,x"], ["'x'", "whole numbers"]),
        (["--contexts", ""], ["''", "whole numbers"]),
        (["--dtypes", "int8"], ["'int8'", "float32, bfloat16, float16"]),
        (["--caches", "dynamic,paged"], ["'paged'", "dynamic, static, quantized, tierkv"]),
        (["--contexts", "1000000", "--caches", "dynamic"], ["need about", "is free", "shorter --contexts"]),
        (["--rounds", "1"], ["--rounds", "5"]),
    ],
)
def test_bad_options_are_one_line(cli, options, words):
    assert_one_line_error(cli("bench", "decode", *options), *words)


@pytest.mark.parametrize("kind", ["decode", "kernels"])
def test_a_record_that_could_not_be_kept_is_refused_before_anything_runs(cli, tmp_path, kind):
    assert_one_line_error(cli("bench", kind, "--save", str(tmp_path)), "--save", "Is a directory")
    assert_one_line_error(cli("bench", kind, "--save", "/proc/x/y"), "--save /proc/x/y", "file that can be written")
    assert not list(tmp_path.iterdir())


def test_a_disk_path_that_is_a_file_is_one_line(cli, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert_one_line_error(cli("bench", "decode", "--disk-path", str(file)), f"--disk-path {file}", "give a folder")


@pytest.mark.slow
def test_without_a_compiler_there_is_one_line(start, tmp_path):
    code, _, stderr = finish(start("bench", "kernels", CXX="no-such-compiler", TIERKV_CACHE_DIR=str(tmp_path)))
    assert (code, stderr.count("\n")) == (2, 1)
    assert "there is no C++ compiler" in stderr


@pytest.mark.slow
def test_decode_prints_one_object_and_keeps_it(start, tmp_path):
    kept = tmp_path / "new" / "record.json"
    options = ["--contexts", "40,300", "--dtypes", "float32", "--rounds", "5", "--disk-path", str(tmp_path)]
    code, stdout, stderr = finish(start("bench", "decode", "--json", "--save", str(kept), *options))
    assert code == 0, stderr
    result = one_object(stdout)
    assert json.loads(kept.read_text()) == result
    rows = {(row["cache"], row["context"]): row for row in result["rows"]}
    assert {("dynamic", 40), ("static", 300), ("tierkv", 300), ("tierkv-25", 300)} <= set(rows)
    for row in rows.values():
        assert {"ms_per_token_median", "ms_per_token_min", "kv_bytes", "ram_bytes", "ratio_to_dynamic"} <= set(row)
        assert len(row["ms_per_token"]) == 5
    assert rows["tierkv", 300]["read_path"] == "paged"
    assert rows["tierkv", 300]["kv_bytes"] == 300 * 46080
    assert rows["tierkv-25", 300]["ram_bytes"] < rows["tierkv-25", 300]["kv_bytes"]
    assert result["attention_bytes_per_second"] > 0
    assert result["memory_read_bytes_per_second"] > 0
    assert "synthetic" in result["fill"]
    assert not list(tmp_path.glob("tierkv-bench-*"))


def test_kernels_are_timed_beside_torch(cli):
    done = cli("bench", "kernels", "--contexts", "100,600", "--dtypes", "bfloat16", "--rounds", "5", "--json")
    rows = one_object(done.stdout)["rows"]
    assert [row["context"] for row in rows] == [100, 600]
    assert rows[1]["kv_bytes"] == 600 * 2 * 3 * 64 * 2
    assert set(rows[0]["microseconds"]) == {"attention", "sdpa", "append", "merge"}


def test_the_group_alone_prints_its_help(cli):
    done = cli("bench")
    assert done.exit_code == 0
    assert "decode" in done.stdout
