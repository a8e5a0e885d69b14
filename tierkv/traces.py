"""Traces: who asked for which tokens when, read from a file or made up from published statistics.

read_trace("conversation_trace.jsonl")       ->  requests of a trace in the form that Mooncake publishes
read_csv_trace("turns.csv")                  ->  requests of sessions, one turn a line, without any ids
generate(PRESETS["chat"], seed=0)            ->  requests of made-up sessions of several turns each

All yield one request at a time. A request names its tokens by ids of blocks: equal ids at the same place mean equal
tokens from the first to the end of that block. As in the published traces the last block may be a partial one, with an
id of its own.
"""

import csv
import hashlib
import heapq
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

BLOCK_TOKENS: Final = 512
"""Tokens that an id of the published traces stands for."""
_MOST: Final = 10**12
CSV_COLUMNS: Final = ("timestamp_seconds", "session", "input_tokens", "output_tokens")
"""The first line of a trace in CSV."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call of a model.

    Attributes:
        timestamp_seconds: when it came, since the first one.
        input_tokens: tokens of its prompt, everything said before included.
        output_tokens: tokens of its answer.
        hash_ids: one for every ``BLOCK_TOKENS`` tokens of the prompt, the last one for what is left over.
        session: name of the session that it is a turn of, where the trace says so. All turns of a session are of one
            text: each prompt begins with what was said before it, answers included.
    """

    timestamp_seconds: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    session: str | None = None


class TraceError(ValueError):
    """A line of a trace cannot be used; the message names the file, the line and what is wrong."""


def read_trace(path: str | Path) -> Iterator[Request]:
    """Yield the requests of a file, one JSON object a line, in the form that Mooncake's traces have.

    That is ``{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}``, after Qin et al.,
    "Mooncake: trading more storage for less computation", FAST 2025. Other names are passed over, and so are empty lines.

    Raises:
        OSError: the file cannot be read.
        TraceError: a line is not of this form.
    """
    last = 0.0
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                request = _request(line)
                _check_order(request, last, "timestamp")
            except TraceError as error:
                raise TraceError(f"{path}, line {number}: {error}") from None
            last = request.timestamp_seconds
            yield request


def read_csv_trace(path: str | Path) -> Iterator[Request]:
    """Yield the requests of a CSV file whose first line is ``timestamp_seconds,session,input_tokens,output_tokens``.

    Each further line is one turn: when it came, any name for its session, the tokens of its prompt (all that was said
    before included) and those of its answer. All turns of a session are of one text; two sessions share nothing. Empty
    lines are passed over.

    Raises:
        OSError: the file cannot be read.
        TraceError: a line is not of this form.
    """
    last = 0.0
    with Path(path).open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = csv.reader(file, skipinitialspace=True, strict=True)
        try:
            _check_header(next(filter(None, rows), []))
            for request in map(_csv_request, filter(None, rows)):
                _check_order(request, last, CSV_COLUMNS[0])
                last = request.timestamp_seconds
                yield request
        except (TraceError, csv.Error) as error:
            raise TraceError(f"{path}, line {max(1, rows.line_num)}: {error}") from None


def _check_header(row: list[str]) -> None:
    if tuple(one.strip() for one in row) != CSV_COLUMNS:
        raise TraceError(f"the columns are not named (legal: {','.join(CSV_COLUMNS)})")


def _check_order(request: Request, last: float, name: str) -> None:
    if request.timestamp_seconds < last:
        raise _wrong(name, "is earlier than that of the line before", "ascending order")


def _csv_request(row: list[str]) -> Request:
    if len(row) != len(CSV_COLUMNS):
        raise TraceError(f"has {len(row)} fields (legal: {len(CSV_COLUMNS)}: {','.join(CSV_COLUMNS)})")
    time, session, *counts = (one.strip() for one in row)
    try:
        seconds = float(time)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _MOST:
        raise _wrong(CSV_COLUMNS[0], "is wrong", f"seconds, 0 to {_MOST:,}")
    if not session:
        raise _wrong(CSV_COLUMNS[1], "is empty", "any name")
    tokens, output = (
        _count({name: int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None}, name)
        for name, text in zip(CSV_COLUMNS[2:], counts, strict=True)
    )
    ids = [_id_of(session, index, BLOCK_TOKENS) for index in range(tokens // BLOCK_TOKENS)]
    if rest := tokens % BLOCK_TOKENS:
        ids.append(_id_of(session, len(ids), rest))
    return Request(seconds, tokens, output, tuple(ids), session)


def _id_of(session: str, index: int, tokens: int) -> int:
    """Return the id of so many leading tokens of a session's block: the same each time, and another for any others."""
    text = f"{index}/{tokens}/{session}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def _request(line: bytes) -> Request:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise TraceError("not a JSON object (legal: one object a line, as in Mooncake's traces)")
    tokens, output = (_count(found, name) for name in ("input_length", "output_length"))
    time, ids = found.get("timestamp"), found.get("hash_ids")
    if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time <= _MOST:
        raise _wrong("timestamp", "is missing or wrong", f"milliseconds, 0 to {_MOST:,}")
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise _wrong("hash_ids", "is missing or wrong", "a list of whole numbers")
    if not tokens // BLOCK_TOKENS <= len(ids) <= -(-tokens // BLOCK_TOKENS):
        wanted = f"one for every {BLOCK_TOKENS} tokens"
        raise _wrong("hash_ids", f"has {len(ids)} ids for {tokens} tokens", wanted)
    return Request(time / 1000, tokens, output, tuple(ids))


def _count(found: dict[str, Any], name: str) -> int:
    value = found.get(name)
    if type(value) is not int or not 0 <= value <= _MOST:
        raise _wrong(name, "is missing or wrong", f"a whole number of tokens, 0 to {_MOST:,}")
    return value


def _wrong(name: str, what: str, legal: str) -> TraceError:
    return TraceError(f'"{name}" {what} (legal: {legal})')


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions of several turns: each turn's prompt is all that was said before and some more.

    Spreads are the sigma of a log-normal distribution; 0 makes every draw the same.

    Attributes:
        sessions: how many there are in all.
        clients: how many are under way at a time. When one ends, the next one begins in its place.
        system_tokens: tokens at the start that all sessions have in common.
        first_tokens: mean of the first prompt's own tokens, after those.
        turn_tokens: mean of what a turn adds to the next prompt: the answer and what is said or read after it.
        output_tokens: tokens of an answer.
        turns: median of the turns of a session.
        turns_spread: of that.
        tokens_spread: of ``first_tokens`` and ``turn_tokens``.
        gap_seconds: median time between two turns of a session.
        gap_spread: of that.
    """

    sessions: int
    clients: int
    system_tokens: int
    first_tokens: int
    turn_tokens: int
    output_tokens: int
    turns: int
    turns_spread: float = 0.0
    tokens_spread: float = 0.0
    gap_seconds: float = 5.2
    gap_spread: float = 1.18


PRESETS: Final = {
    "agent": Workload(
        sessions=200, clients=64, system_tokens=6_000, first_tokens=6_000, turn_tokens=2_242, output_tokens=408,
        turns=33, turns_spread=0.3, tokens_spread=0.8,
    ),
    "chat": Workload(
        sessions=200, clients=64, system_tokens=20_000, first_tokens=10_000, turn_tokens=2_948, output_tokens=900,
        turns=30,
    ),
    "hicache": Workload(
        sessions=80, clients=80, system_tokens=0, first_tokens=2_048, turn_tokens=2_049, output_tokens=1, turns=10,
        gap_spread=0.25,
    ),
}  # fmt: skip
"""Workloads after published numbers.

``agent``: coding agents, 610 traces of Codex on SWE-bench Pro: median 33 turns, context 12K at first and 80K in the end
(over 180K at most), 2,242 more tokens a turn, 131 tokens in for one out, between turns 5.2 s in the median and 81.4 s at
P99 (so the spread of gaps: ln(81.4 / 5.2) / 2.326 = 1.18). ``chat``: the configuration that vLLM's scaling benchmark
uses: 20K shared, 10K at first, 2,048 more a turn and 900 out, 30 turns. ``hicache``: SGLang's HiCache benchmark, 80
clients with 10 rounds of 2,048 in and 1 out.

Nobody publishes the rest, so these are assumptions: how many sessions go on at a time, that half of an agent's first
prompt is common to all, the spreads of turns and tokens, and the gaps of ``chat`` (as the agent's) and ``hicache``.
"""


@dataclass(slots=True)
class _Session:
    tokens: int
    turns_left: int
    ids: list[int] = field(default_factory=list)  # of full blocks


def generate(workload: Workload, seed: int = 0) -> Iterator[Request]:
    """Yield the requests of a workload by time; equal seeds give equal requests.

    Memory holds the sessions that are under way, and no others.
    """
    draw = random.Random(seed)
    shared = list(range(workload.system_tokens // BLOCK_TOKENS))
    next_id = len(shared)
    begun = min(workload.clients, workload.sessions)
    # Spread over the length of a session: from the start some are young and some old, as they are later.
    span = workload.turns * workload.gap_seconds
    due = [(draw.uniform(0, span), client) for client in range(begun)]
    heapq.heapify(due)
    live: dict[int, _Session] = {}
    while due:
        time, client = due[0]
        session = live.get(client)
        if session is None:
            session = live[client] = _Session(
                tokens=workload.system_tokens + _around(draw, workload.first_tokens, workload.tokens_spread),
                turns_left=max(1, round(workload.turns * draw.lognormvariate(0, workload.turns_spread))),
                ids=list(shared),
            )
        full = session.tokens // BLOCK_TOKENS
        new = range(next_id, next_id + full - len(session.ids))
        session.ids.extend(new)
        next_id += len(new)
        partial = () if full * BLOCK_TOKENS == session.tokens else (next_id,)
        next_id += len(partial)
        yield Request(time, session.tokens, workload.output_tokens, (*session.ids, *partial))
        session.tokens += max(_around(draw, workload.turn_tokens, workload.tokens_spread), workload.output_tokens)
        session.turns_left -= 1
        again = time + workload.gap_seconds * draw.lognormvariate(0, workload.gap_spread)
        if session.turns_left:
            heapq.heapreplace(due, (again, client))
            continue
        del live[client]
        if begun < workload.sessions:
            begun += 1
            heapq.heapreplace(due, (again, client))
        else:
            heapq.heappop(due)


def _around(draw: random.Random, mean: float, spread: float) -> int:
    """Return a log-normal draw with that mean."""
    return round(mean * draw.lognormvariate(-spread * spread / 2, spread))
