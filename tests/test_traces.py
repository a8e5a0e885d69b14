"""Traces: what is read from a file, what is refused, and what is made up."""

import itertools
import json
import statistics
import tracemalloc
from dataclasses import replace

import pytest

from tierkv.traces import BLOCK_TOKENS, PRESETS, Request, TraceError, Workload, generate, read_trace

LINE = {"timestamp": 1500, "input_length": 1025, "output_length": 7, "hash_ids": [0, 1, 2]}


def write(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return path


def test_a_line_becomes_a_request(tmp_path):
    path = write(tmp_path, LINE, "", {**LINE, "timestamp": 1500.5, "chat_id": 3, "hash_ids": [0, 1, 9]}, "  ")
    assert list(read_trace(path)) == [
        Request(1.5, 1025, 7, (0, 1, 2)),
        Request(1.5005, 1025, 7, (0, 1, 9)),
    ]


@pytest.mark.parametrize(("tokens", "ids"), [(0, 0), (1, 1), (511, 0), (512, 1), (513, 1), (513, 2)])
def test_the_last_id_may_stand_for_a_part_of_a_block_or_be_left_out(tmp_path, tokens, ids):
    path = write(tmp_path, {**LINE, "input_length": tokens, "hash_ids": list(range(ids))})
    assert len(next(read_trace(path)).hash_ids) == ids


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not a JSON object (legal: one object a line"),
        ("[1]", "not a JSON object"),
        ("\udcff\udcfe", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ({**LINE, "timestamp": None}, '"timestamp" is missing or wrong (legal: milliseconds, 0 to'),
        ({**LINE, "timestamp": True}, '"timestamp" is missing or wrong'),
        ({**LINE, "timestamp": -1}, '"timestamp" is missing or wrong'),
        ({**LINE, "timestamp": float("nan")}, '"timestamp" is missing or wrong'),
        ({**LINE, "timestamp": 10**400}, '"timestamp" is missing or wrong'),
        ({**LINE, "timestamp": 1499}, '"timestamp" is earlier than that of the line before (legal: ascending order)'),
        ({**LINE, "input_length": 10**400}, '"input_length" is missing or wrong'),
        ({**LINE, "input_length": "9"}, '"input_length" is missing or wrong (legal: a whole number of tokens, 0 to'),
        ({**LINE, "output_length": -1}, '"output_length" is missing or wrong'),
        ({**LINE, "output_length": True}, '"output_length" is missing or wrong'),
        ({"timestamp": 1, "input_length": 1}, '"output_length" is missing or wrong'),
        ({**LINE, "hash_ids": None}, '"hash_ids" is missing or wrong (legal: a list of whole numbers)'),
        ({**LINE, "hash_ids": [1, 2, "3"]}, '"hash_ids" is missing or wrong'),
        ({**LINE, "hash_ids": [1]}, '"hash_ids" has 1 ids for 1025 tokens (legal: one for every 512 tokens)'),
        ({**LINE, "hash_ids": [1, 2, 3, 4]}, '"hash_ids" has 4 ids for 1025 tokens'),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, words):
    path = write(tmp_path, LINE, "", line)
    requests = read_trace(path)
    assert next(requests).input_tokens == 1025
    with pytest.raises(TraceError) as caught:
        next(requests)
    message = str(caught.value)
    assert message.startswith(f"{path}, line 3: ")
    assert words in message
    assert len(message.splitlines()) == 1


def test_a_file_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        next(read_trace(tmp_path / "none"))


def by_session(requests):
    """Sort requests into sessions, by the first id that the session does not share with others."""
    requests = list(requests)
    common = set.intersection(*(set(one.hash_ids) for one in requests))
    sessions: dict[int, list[Request]] = {}
    for one in requests:
        sessions.setdefault(one.hash_ids[len(common)], []).append(one)
    return list(sessions.values())


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_what_they_say(name):
    workload = PRESETS[name]
    sessions = by_session(generate(workload, seed=1))
    requests = [one for session in sessions for one in session]
    assert len(sessions) == workload.sessions
    assert statistics.median(len(session) for session in sessions) == pytest.approx(workload.turns, rel=0.1)
    first = workload.system_tokens + workload.first_tokens
    assert statistics.mean(session[0].input_tokens for session in sessions) == pytest.approx(first, rel=0.1)
    steps = [b.input_tokens - a.input_tokens for session in sessions for a, b in itertools.pairwise(session)]
    assert statistics.mean(steps) == pytest.approx(workload.turn_tokens, rel=0.05)
    gaps = [b.timestamp_seconds - a.timestamp_seconds for session in sessions for a, b in itertools.pairwise(session)]
    assert statistics.median(gaps) == pytest.approx(workload.gap_seconds, rel=0.1)
    assert {one.output_tokens for one in requests} == {workload.output_tokens}


def test_agents_are_as_published():
    """Codex on SWE-bench Pro: the numbers that no parameter states by itself."""
    requests = list(generate(replace(PRESETS["agent"], sessions=610), seed=2))
    tokens_in, tokens_out = (sum(getattr(one, name) for one in requests) for name in ("input_tokens", "output_tokens"))
    assert tokens_in / tokens_out == pytest.approx(131, rel=0.05)
    last = [session[-1].input_tokens for session in by_session(requests)]
    assert statistics.median(last) == pytest.approx(80_000, rel=0.1)
    assert max(last) > 180_000
    gaps = [
        b.timestamp_seconds - a.timestamp_seconds
        for session in by_session(requests)
        for a, b in itertools.pairwise(session)
    ]
    assert statistics.quantiles(gaps, n=100)[-1] == pytest.approx(81.4, rel=0.1)


@pytest.mark.parametrize("name", PRESETS)
def test_each_turn_begins_with_all_full_blocks_of_the_one_before(name):
    for session in by_session(generate(replace(PRESETS[name], sessions=20), seed=3)):
        for one, then in itertools.pairwise(session):
            full = one.input_tokens // BLOCK_TOKENS
            assert then.hash_ids[:full] == one.hash_ids[:full]
            if one.input_tokens % BLOCK_TOKENS:
                assert one.hash_ids[full:] != then.hash_ids[full : full + 1]
            assert len(one.hash_ids) == -(-one.input_tokens // BLOCK_TOKENS)
            assert len(set(one.hash_ids)) == len(one.hash_ids)


def test_what_sessions_share_is_the_system_prompt():
    requests = list(generate(replace(PRESETS["chat"], sessions=5), seed=0))
    common = set.intersection(*(set(one.hash_ids) for one in requests))
    assert common == set(range(20_000 // BLOCK_TOKENS))


def test_equal_seeds_give_equal_traces_and_times_ascend():
    first, again, other = (list(generate(replace(PRESETS["agent"], sessions=9), seed)) for seed in (5, 5, 6))
    assert first == again != other
    times = [one.timestamp_seconds for one in first]
    assert times == sorted(times)


def test_a_made_up_trace_can_be_written_and_read(tmp_path):
    requests = list(generate(replace(PRESETS["hicache"], sessions=3), seed=0))
    lines = [
        {
            "timestamp": 1000 * one.timestamp_seconds,
            "input_length": one.input_tokens,
            "output_length": one.output_tokens,
            "hash_ids": one.hash_ids,
        }
        for one in requests
    ]
    found = list(read_trace(write(tmp_path, *lines)))
    assert [one.hash_ids for one in found] == [one.hash_ids for one in requests]
    assert [one.timestamp_seconds for one in found] == pytest.approx([one.timestamp_seconds for one in requests])


def test_no_more_sessions_than_clients_are_under_way():
    workload = Workload(
        sessions=30, clients=4, system_tokens=0, first_tokens=600, turn_tokens=600, output_tokens=1, turns=5
    )
    requests = list(generate(workload, seed=0))
    under_way: dict[int, int] = {}
    most = 0
    for one in requests:
        key = one.hash_ids[0]
        under_way[key] = under_way.get(key, 0) + 1
        most = max(most, len(under_way))
        if under_way[key] == 5:
            del under_way[key]
    assert (len(requests), most, under_way) == (150, 4, {})


def test_memory_does_not_grow_with_the_number_of_sessions():
    def peak(sessions):
        tracemalloc.start()
        for _ in generate(replace(PRESETS["hicache"], sessions=sessions, clients=4), seed=0):
            pass
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    assert peak(400) < 2 * peak(40)
