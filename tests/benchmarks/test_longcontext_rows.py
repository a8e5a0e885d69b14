"""The rows of a long-context run: what they are compared with, and that none is lost."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.longcontext_made import row, settings
from tierkv.benchmarks.longcontext_rows import ROWS_FILE, SETTINGS_FILE, Key, RowLog, agreement, compare, key_of
from tierkv.benchmarks.longcontext_settings import differences
from tierkv.benchmarks.longcontext_summary import mismatches, unchecked
from tierkv.errors import ConfigError


@pytest.mark.parametrize(
    ("expected", "found", "share", "first"),
    [
        ([1, 2, 3], [1, 2, 3], 1.0, None),
        ([1, 2, 3], [1, 9, 3], 2 / 3, 1),
        ([1, 2], [1, 2, 3], 2 / 3, 2),
        ([1, 2, 3], [1, 2], 2 / 3, 2),
        ([1], [], 0.0, 0),
        ([], [], 1.0, None),
    ],
)
def test_how_tokens_agree(expected, found, share, first):
    found_share, found_first = agreement(expected, found)
    assert found_share == pytest.approx(share)
    assert found_first == first


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_only_equal_tokens_agree_wholly(one, other):
    share, first = agreement(one, other)
    assert (first is None) == (one == other) == (share == 1.0)
    assert first is None or (one[:first] == other[:first] and one[first : first + 1] != other[first : first + 1])


def test_a_row_is_compared_with_the_reference_of_the_same_sample():
    rows = {key_of(one): one for one in (row(), row(sample=1, error="no memory"))}
    other = row("static", tokens=(1, 2, 4))
    compare(other, rows)
    assert (other["agreement"], other["first_difference"]) == (pytest.approx(2 / 3), 2)
    for not_compared in (row(), row("static", sample=1), row("static", sample=2), row("static", error="gone")):
        compare(not_compared, rows)
        assert not_compared["agreement"] is None
    assert mismatches([other], must_match=True) == [other]
    assert mismatches([other], must_match=False) == []
    assert mismatches([other | {"cache": "quantized"}], must_match=True) == []
    assert unchecked([other, row("static", sample=2), row()]) == 1


# -- rows on disk ---------------------------------------------------------------------------------------------------------


def test_rows_are_kept_and_found_again(tmp_path):
    record = settings().record()
    with RowLog(tmp_path / "new" / "out", record, resume=False) as log:
        log.append(row())
        log.append(row(sample=1, output="zwölf ␟\u2028 \n"))
        with pytest.raises(ValueError, match="kept already"):
            log.append(row())
    with RowLog(tmp_path / "new" / "out", record, resume=True) as log:
        assert list(log.rows) == [Key("dynamic", 512, "needle", 0), Key("dynamic", 512, "needle", 1)]
        assert list(log.rows.values()) == [row(), row(sample=1, output="zwölf ␟\u2028 \n")]


@given(st.integers(1, 10_000))
def test_a_torn_last_line_is_dropped_and_the_row_comes_again(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("torn")
    with RowLog(folder, settings().record(), resume=False) as log:
        log.append(row())
        whole = (folder / ROWS_FILE).stat().st_size
        log.append(row(sample=1))
    data = (folder / ROWS_FILE).read_bytes()
    kept = whole + cut % (len(data) - whole)
    (folder / ROWS_FILE).write_bytes(data[:kept])
    with RowLog(folder, settings().record(), resume=True) as log:
        assert len(log.rows) == 1
        log.append(row(sample=1))
    assert (folder / ROWS_FILE).read_bytes() == data


def test_rows_of_another_run_are_not_mixed(tmp_path):
    with RowLog(tmp_path, settings().record(), resume=False) as log:
        log.append(row())
        with pytest.raises(ConfigError, match="another run is writing"):
            RowLog(tmp_path, settings().record(), resume=True)
    with pytest.raises(ConfigError, match="holds rows of another run; go on with it with --resume"):
        RowLog(tmp_path, settings().record(), resume=False)
    with pytest.raises(ConfigError, match="dtype was float32 and is bfloat16; samples was 2 and is 3; give the same"):
        RowLog(tmp_path, settings(dtype="bfloat16", samples=3).record(), resume=True)
    (tmp_path / SETTINGS_FILE).write_text("[]")
    with pytest.raises(ConfigError, match="holds no settings"):
        RowLog(tmp_path, settings().record(), resume=True)
    (tmp_path / SETTINGS_FILE).unlink()
    with pytest.raises(ConfigError, match="that says of what run"):
        RowLog(tmp_path, settings().record(), resume=True)


def test_settings_that_nothing_was_run_with_are_replaced(tmp_path):
    RowLog(tmp_path, settings().record(), resume=False).close()
    RowLog(tmp_path, settings(seed=5).record(), resume=False).close()
    assert json.loads((tmp_path / SETTINGS_FILE).read_text())["seed"] == 5


@pytest.mark.parametrize("line", ["{", "[]", "{}", "1"])
def test_a_damaged_line_is_named(tmp_path, line):
    with RowLog(tmp_path, settings().record(), resume=False) as log:
        log.append(row())
    with (tmp_path / ROWS_FILE).open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(ConfigError, match="line 2: is no row"):
        RowLog(tmp_path, settings().record(), resume=True)


def test_a_folder_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="give a folder that can be written to"):
        RowLog(tmp_path / "file", settings().record(), resume=False)


def test_files_count_by_their_content(tmp_path):
    file = tmp_path / "mine.jsonl"
    file.write_text("a")
    asked = settings(tasks=(str(file),))
    before = asked.record()
    assert differences(before, asked.record()) == []
    file.write_text("b")
    assert differences(before, asked.record()) == [f"the content of {file}"]
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        asked.record()
