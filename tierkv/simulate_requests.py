"""Requests of a simulation: who asks next and when, and the names of the blocks of a prompt.

Sessions    made-up sessions of several turns, in a closed loop: the next turn comes some time after the last answer
TraceTurns  a trace: each request comes at its time, but never before the answer that it continues

A name stands for all tokens up to the end of a block, as keys do. There are no token ids here, so names are made from
what is known instead: which tokens are whose.
"""

import hashlib
import heapq
import random
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, overload

from tierkv.traces import BLOCK_TOKENS, Request, Workload

_COMMON: Final = 0  # the number of what all sessions begin with


@dataclass(slots=True, eq=False)
class Names:
    """Keys of a sequence's full blocks as far as its tokens are known, and a number for each that tells it from others."""

    keys: list[bytes] = field(default_factory=list)
    numbers: list[tuple[int]] = field(default_factory=list)


class BlockIds(Sequence[int]):
    """Token ids of consecutive blocks, as ``SharedBlocks.find`` compares them, without any token ids.

    A slice of one block's tokens is a tuple of one number, equal for equal tokens and for no others.
    """

    def __init__(self, numbers: Sequence[tuple[int]], block_size: int) -> None:
        """Stand for the tokens of the blocks that have these numbers."""
        self._numbers = numbers
        self._block_size = block_size

    def __len__(self) -> int:
        return len(self._numbers) * self._block_size

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[int]: ...
    def __getitem__(self, at: int | slice) -> int | tuple[int]:
        if isinstance(at, slice):
            first: int = at.start
            return self._numbers[first // self._block_size]
        return self._numbers[at // self._block_size][0]


@dataclass(slots=True, eq=False)
class Turn:
    """One request.

    Attributes:
        arrival_seconds: when it came.
        input_tokens: tokens of its prompt.
        output_tokens: tokens of its answer.
        names: of the prompt's full blocks, and of the answer's where it is known who continues it.
        session: what it is a turn of, or None.
        ends_session: whether it is the last one, where that is known.
    """

    arrival_seconds: float
    input_tokens: int
    output_tokens: int
    names: Names
    session: Hashable | None = None
    ends_session: bool = False


class Source(ABC):
    """Where requests come from.

    Attributes:
        expected: about how many there are in all, or None; for progress.
    """

    expected: int | None = None

    @abstractmethod
    def next_seconds(self) -> float | None:
        """Return when the next request comes, or None where none does before one that was taken has ended."""

    @abstractmethod
    def take(self) -> Turn | None:
        """Return the request that comes next; None where it has to wait for another one of its session."""

    @abstractmethod
    def ended(self, turn: Turn, now: float) -> None:
        """A request was answered, or refused."""

    @abstractmethod
    def published(self, turn: Turn, tokens: int) -> None:
        """The first ``tokens`` tokens of a request's sequence have been computed, so that others could use them."""

    @abstractmethod
    def known_blocks(self, turn: Turn) -> int:
        """Return how many leading full blocks of a prompt were ever computed before: what unbounded tiers would hold."""


def extend_names(names: Names, session: int, common: int, count: int) -> None:
    """Name the first ``count`` blocks of a session's sequence, the first ``common`` of which all sessions share."""
    for index in range(len(names.keys), count):
        owner = _COMMON if index < common else session
        names.keys.append(owner.to_bytes(8, "big") + index.to_bytes(4, "big"))
        names.numbers.append((owner << 32 | index,))


@dataclass(slots=True, eq=False)
class _Session:
    number: int
    draw: random.Random
    tokens: int
    turns_left: int
    names: Names = field(default_factory=Names)
    published: int = 0


class Sessions(Source):
    """A workload in a closed loop: each client sends a turn, waits for its answer, pauses, and sends the next one.

    The numbers that describe a session are drawn from its own seed: they do not depend on how fast others are answered.
    """

    def __init__(self, workload: Workload, block_size: int, seed: int = 0) -> None:
        """Draw the sessions of ``workload``."""
        self.expected = workload.sessions * workload.turns
        self._workload = workload
        self._block_size = block_size
        self._seed = seed
        self._common = workload.system_tokens // block_size
        self._common_published = 0
        self._begun = 0
        draw = random.Random(seed)
        # Spread over the length of a session, as ``traces.generate`` does it: some are young and some old.
        span = workload.turns * workload.gap_seconds
        self._due: list[tuple[float, int, _Session]] = []
        for _ in range(min(workload.clients, workload.sessions)):
            self._begin(draw.uniform(0, span))

    def next_seconds(self) -> float | None:
        """Return when the next client sends something; None while all wait for answers."""
        return self._due[0][0] if self._due else None

    def take(self) -> Turn:
        """Return the next turn."""
        time, _, session = heapq.heappop(self._due)
        output = self._workload.output_tokens
        extend_names(session.names, session.number, self._common, (session.tokens + output) // self._block_size)
        return Turn(time, session.tokens, output, session.names, session, session.turns_left == 1)

    def ended(self, turn: Turn, now: float) -> None:
        """Let the client go on, with its session or with the next one."""
        session, workload = turn.session, self._workload
        assert isinstance(session, _Session)
        session.turns_left -= 1
        again = now + workload.gap_seconds * session.draw.lognormvariate(0, workload.gap_spread)
        if session.turns_left:
            more = _around(session.draw, workload.turn_tokens, workload.tokens_spread)
            session.tokens += max(more, workload.output_tokens)
            heapq.heappush(self._due, (again, session.number, session))
        elif self._begun < workload.sessions:
            self._begin(again)

    def published(self, turn: Turn, tokens: int) -> None:
        """Note how much of a session was computed."""
        session = turn.session
        assert isinstance(session, _Session)
        session.published = max(session.published, tokens // self._block_size)
        self._common_published = max(self._common_published, min(self._common, tokens // self._block_size))

    def known_blocks(self, turn: Turn) -> int:
        """Return the blocks of the session's earlier turns, or of what all begin like."""
        session = turn.session
        assert isinstance(session, _Session)
        return min(turn.input_tokens // self._block_size, max(session.published, self._common_published))

    def _begin(self, time: float) -> None:
        self._begun += 1
        workload, draw = self._workload, random.Random(f"{self._seed}/{self._begun}")
        session = _Session(
            number=self._begun,
            draw=draw,
            tokens=workload.system_tokens + _around(draw, workload.first_tokens, workload.tokens_spread),
            turns_left=max(1, round(workload.turns * draw.lognormvariate(0, workload.turns_spread))),
        )
        heapq.heappush(self._due, (time, session.number, session))


class TraceTurns(Source):
    """The requests of a trace.

    Where they name sessions, every turn begins with what was said before, answers included. Where they name blocks by
    ids alone, nobody knows what continues an answer: its blocks have no names, and are computed when they come back as
    part of a prompt. What is known of a session, or of ids, is kept to the end: a trace does not say when one is over.
    """

    def __init__(self, requests: Iterable[Request], block_size: int) -> None:
        """Read a trace as it is asked for.

        Raises:
            ValueError: the ids of a trace stand for ``BLOCK_TOKENS`` tokens, which blocks of this size do not divide.
        """
        self._requests = iter(requests)
        self._block_size = block_size
        self._next = next(self._requests, None)
        self._under_way: dict[str, deque[Request]] = {}  # sessions with a request that was taken, and what waits for it
        self._ready: list[tuple[float, int, Request]] = []
        self._taken = 0
        self._published: dict[Hashable, int] = {}
        self._seen: set[bytes] = set()

    def next_seconds(self) -> float | None:
        """Return when the next one comes, or can come as the one before it has ended."""
        times = [one[0] for one in self._ready[:1]]
        if self._next is not None:
            times.append(self._next.timestamp_seconds)
        return min(times, default=None)

    def take(self) -> Turn | None:
        """Return the next one; None where it continues one that is not answered yet."""
        first = self._next
        if self._ready and (first is None or self._ready[0][0] <= first.timestamp_seconds):
            time, _, request = heapq.heappop(self._ready)
            return self._turn(request, time)
        assert first is not None
        self._next = next(self._requests, None)
        if first.session is not None:
            if (waiting := self._under_way.get(first.session)) is not None:
                waiting.append(first)
                return None
            self._under_way[first.session] = deque()
        return self._turn(first, first.timestamp_seconds)

    def ended(self, turn: Turn, now: float) -> None:
        """Let the next request of the session come."""
        if not isinstance(turn.session, str):
            return
        waiting = self._under_way[turn.session]
        if waiting:
            self._taken += 1
            heapq.heappush(self._ready, (max(now, waiting[0].timestamp_seconds), self._taken, waiting.popleft()))
        else:
            del self._under_way[turn.session]

    def published(self, turn: Turn, tokens: int) -> None:
        """Note how much was computed."""
        blocks = tokens // self._block_size
        if turn.session is None:
            self._seen.update(turn.names.keys[:blocks])
        else:
            self._published[turn.session] = max(self._published.get(turn.session, 0), blocks)

    def known_blocks(self, turn: Turn) -> int:
        """Return the leading blocks of which all ids were there before, or those of the session's earlier turns."""
        blocks = turn.input_tokens // self._block_size
        if turn.session is not None:
            return min(blocks, self._published.get(turn.session, 0))
        return next((at for at, key in enumerate(turn.names.keys[:blocks]) if key not in self._seen), blocks)

    def _turn(self, request: Request, time: float) -> Turn:
        names = Names()
        if request.session is None:
            self._name_ids(names, request)
        else:
            number = int.from_bytes(
                hashlib.blake2b(request.session.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big"
            )
            blocks = (request.input_tokens + request.output_tokens) // self._block_size
            extend_names(names, number, 0, blocks)
        return Turn(time, request.input_tokens, request.output_tokens, names, request.session)

    def _name_ids(self, names: Names, request: Request) -> None:
        parts, rest = divmod(BLOCK_TOKENS, self._block_size)
        if rest:
            raise ValueError(
                f"a block of this trace has {BLOCK_TOKENS} tokens, which is no multiple of {self._block_size}; give a block "
                f"size that divides it"
            )
        key = b""
        for index in range(request.input_tokens // self._block_size):
            number, part = divmod(index, parts)
            if number == len(request.hash_ids):
                break  # the id of a last, partial block may be left out
            own = request.hash_ids[number] * parts + part
            key = hashlib.blake2b(key + str(own).encode(), digest_size=16).digest()
            names.keys.append(key)
            names.numbers.append((own,))


def _around(draw: random.Random, mean: float, spread: float) -> int:
    """Return a log-normal draw with that mean."""
    return max(1, round(mean * draw.lognormvariate(-spread * spread / 2, spread)))
