"""Traces in CSV: what is read, what is refused, and that turns of a session are of one text."""

import pytest

from tierkv.traces import BLOCK_TOKENS, TraceError, read_csv_trace

HEADER = "timestamp_seconds,session,input_tokens,output_tokens"


def write(tmp_path, *lines, end="\n"):
    path = tmp_path / "turns.csv"
    path.write_bytes(end.join(lines).encode("utf-8", "surrogateescape"))
    return path


def test_a_line_becomes_a_request(tmp_path):
    path = write(tmp_path, HEADER, "0,a,600,10", "", ' 1.5 , "b, and c", 512 ,0', "2,a,1024,7", "2,x,0,1")
    requests = list(read_csv_trace(path))
    assert [(one.timestamp_seconds, one.session, one.input_tokens, one.output_tokens) for one in requests[:1]] == [
        (0.0, "a", 600, 10)
    ]
    assert [(one.timestamp_seconds, one.input_tokens, one.output_tokens) for one in requests[2:]] == [
        (2.0, 1024, 7),
        (2.0, 0, 1),
    ]
    assert [len(one.hash_ids) for one in requests] == [2, 1, 2, 0]


def test_turns_of_a_session_continue_each_other_and_sessions_share_nothing(tmp_path):
    path = write(tmp_path, HEADER, "0,a,600,10", "1,b,600,10", "2,a,1500,10", "3,a,600,10", "4,a,601,10")
    first, other, then, again, longer = list(read_csv_trace(path))
    full = first.input_tokens // BLOCK_TOKENS
    assert then.hash_ids[:full] == first.hash_ids[:full]
    assert then.hash_ids[full] != first.hash_ids[full]  # the partial block has grown
    assert not set(first.hash_ids) & set(other.hash_ids)
    assert again.hash_ids == first.hash_ids != longer.hash_ids


def test_it_is_the_same_in_every_process_and_in_other_spellings(tmp_path):
    plain = list(read_csv_trace(write(tmp_path, HEADER, "0,a,600,10")))
    assert plain[0].hash_ids == (2659687103863298178, 9612854102286307955)
    spelled = write(tmp_path, "\ufeff" + HEADER.replace(",", ", "), "0, a ,600,10", "", end="\r\n")
    assert list(read_csv_trace(spelled)) == plain
    assert list(read_csv_trace(write(tmp_path, HEADER))) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("1,a,5", "has 3 fields (legal: 4: timestamp_seconds,session,input_tokens,output_tokens)"),
        ("1,a,5,6,7", "has 5 fields"),
        ("x,a,5,6", '"timestamp_seconds" is wrong (legal: seconds, 0 to'),
        ("nan,a,5,6", '"timestamp_seconds" is wrong'),
        ("-1,a,5,6", '"timestamp_seconds" is wrong'),
        ("0.5,a,5,6", '"timestamp_seconds" is earlier than that of the line before (legal: ascending order)'),
        ("1, ,5,6", '"session" is empty (legal: any name)'),
        ("1,a,,6", '"input_tokens" is missing or wrong (legal: a whole number of tokens, 0 to'),
        ("1,a,5.0,6", '"input_tokens" is missing or wrong'),
        ("1,a,-5,6", '"input_tokens" is missing or wrong'),
        ("1,a,9999999999999,6", '"input_tokens" is missing or wrong'),
        ("1,a," + "9" * 5000 + ",6", '"input_tokens" is missing or wrong'),
        ("1,a,5,six", '"output_tokens" is missing or wrong'),
        ('1,"a,5,6', "unexpected end of data"),
        ('1,"a"b,5,6', "expected after"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, words):
    path = write(tmp_path, HEADER, "1,a,5,6", "", line)
    requests = read_csv_trace(path)
    assert next(requests).input_tokens == 5
    with pytest.raises(TraceError) as caught:
        next(requests)
    message = str(caught.value)
    assert message.startswith(f"{path}, line 4: ")
    assert words in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize("first", ["0,a,5,6", "time,session,input,output", "\udcff\udcfe", "", HEADER + ",more"])
def test_the_columns_must_be_named(tmp_path, first):
    with pytest.raises(TraceError, match=f"the columns are not named .legal: {HEADER}."):
        next(read_csv_trace(write(tmp_path, first)))


def test_a_file_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        next(read_csv_trace(tmp_path / "none"))
