"""Conversations on one engine, and the stock run that their answers are compared with.

A turn is measured again and again, at every number of conversations. So after each round every conversation is cropped
back to its prompt, and a round always finds the same state: n prompts, and caches that other turns have pushed about.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers import DynamicCache

from tierkv.benchmarks.sessions_mix import Session
from tierkv.integrations.hf_content import ForwardInputs

GREEDY: Final = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "num_beams": 1}

Layer = tuple[torch.Tensor, torch.Tensor]
Advance = Callable[[], None]


@dataclass
class Reference:
    """What the stock cache gave for one conversation.

    Attributes:
        layers: K and V of its prompt, per layer.
        answer: the tokens of its turn.
        seconds: that the turn took.
        prefill_seconds: that its prompt took, with one token behind it.
    """

    layers: list[Layer]
    answer: list[int]
    seconds: float
    prefill_seconds: float = 0.0


def generate(model: Any, ids: Sequence[int], new_tokens: int, cache: Any) -> tuple[list[int], float]:
    """Generate exactly so many tokens greedily; return them and the seconds of the call."""
    fed = torch.tensor([ids], device=model.device)
    began = time.perf_counter()
    out = model.generate(
        fed, attention_mask=torch.ones_like(fed), cache=cache, max_new_tokens=new_tokens, min_new_tokens=new_tokens,
        **GREEDY,
    )  # fmt: skip
    answer = out[0, len(ids) :].tolist()  # reading them waits for the device
    return answer, time.perf_counter() - began


def reference_of(model: Any, session: Session, new_tokens: int) -> Reference:
    """Run one conversation on ``DynamicCache``. tierkv must not be attached to the model."""
    cache = DynamicCache(config=model.config)
    _, prefill_seconds = generate(model, session.prompt, 1, cache)
    # The tensors of the prompt stay as they are: the cache grows by making new ones.
    layers: list[Layer] = [(layer.keys, layer.values) for layer in cache.layers]  # type: ignore[misc]
    answer, seconds = generate(model, session.turn, new_tokens, cache)
    return Reference(layers, answer, seconds, prefill_seconds)


@dataclass
class Threads:
    """What came of conversations that several threads generated at once.

    Attributes:
        finished: seconds from the common beginning to the end of each thread's last turn.
        turn_seconds: of every turn, by conversation.
    """

    finished: list[float]
    turn_seconds: list[float]

    @property
    def spread(self) -> float:
        """How much earlier the first thread was done than the last, as a share of the whole time."""
        return (max(self.finished) - min(self.finished)) / max(self.finished)


@dataclass
class Conversations:
    """The open conversations of one engine: the first ones of the mix, each in a cache of its own.

    Attributes:
        engine: attached to the model.
        sessions: the mix.
        references: what each should answer.
        new_tokens: of every answer.
        advance: called after every prefill and every turn.
        caches: of the open ones, in order.
        computed: prompts that a forward computed here.
        copied: prompts whose K and V were the reference's, put in without a forward.
        unequal: ``(open conversations, conversation)`` of every answer that was not the reference's.
    """

    engine: Any
    sessions: Sequence[Session]
    references: Sequence[Reference]
    new_tokens: int
    advance: Advance = lambda: None
    caches: list[Any] = field(default_factory=list)
    computed: int = 0
    copied: int = 0
    unequal: list[tuple[int, int]] = field(default_factory=list)

    def open_next(self) -> None:
        """Prefill one more conversation.

        Raises:
            CapacityError: there is no room for it; nothing has changed.
        """
        index = len(self.caches)
        session, layers = self.sessions[index], self.references[index].layers
        cache = self.engine.new_cache()
        try:
            # What may begin with blocks that are there already takes the way of every call of generate.
            shares = session.has_system and self.engine.prefix.on
            if shares or not _can_copy(self.engine, session, layers):
                generate(self.engine.model, session.prompt, 1, cache)
                self.computed += 1
            else:
                _copy(self.engine, cache, session, layers)
                self.copied += 1
        except BaseException:
            cache.close()
            raise
        self.caches.append(cache)
        self.advance()

    def close_last(self) -> None:
        """End the conversation that was opened last."""
        self.caches.pop().close()

    def close(self) -> None:
        """End all."""
        while self.caches:
            self.close_last()

    @property
    def tables(self) -> list[Any]:
        """The block table of every open conversation."""
        return [table for cache in self.caches for table in cache.sequences.tables]

    def warm_up(self) -> None:
        """Run one turn that nobody times: it loads kernels."""
        try:
            self._turn(0)
        finally:
            self._restore()

    def round(self) -> list[float]:
        """Let every open conversation take its turn; return the seconds of each.

        Raises:
            CapacityError: the tiers could not hold the turns.
        """
        try:
            return [self._turn(index) for index in range(len(self.caches))]
        finally:
            self._restore()

    def threaded_round(self, threads: int) -> Threads:
        """Let every open conversation take its turn, ``threads`` of them at a time, each by a thread that has its share.

        Raises:
            BaseException: whatever a thread raised, of the first that did.
        """
        seconds = [0.0] * len(self.caches)
        finished = [0.0] * threads
        errors: list[BaseException] = []
        start, stop = threading.Barrier(threads + 1), threading.Event()
        begun = 0.0

        def work(number: int) -> None:
            try:
                start.wait()
                for index in range(number, len(self.caches), threads):
                    if stop.is_set():
                        return
                    seconds[index] = self._turn(index)
                finished[number] = time.perf_counter() - begun
            except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
                errors.append(error)
                stop.set()

        workers = [
            threading.Thread(target=work, args=(number,), name=f"conversations-{number}", daemon=True)
            for number in range(threads)
        ]
        try:
            for worker in workers:
                worker.start()
            begun = time.perf_counter()
            start.wait()
            for worker in workers:
                worker.join()
        finally:
            stop.set()
            start.abort()
            for worker in workers:
                if worker.ident is not None:
                    worker.join()  # at most one turn: the caches must be at rest before they are cropped
            self._restore()
        if errors:
            raise errors[0]
        return Threads(finished, seconds)

    def _turn(self, index: int) -> float:
        session = self.sessions[index]
        answer, seconds = generate(self.engine.model, session.turn, self.new_tokens, self.caches[index])
        if answer != self.references[index].answer:
            self.unequal.append((len(self.caches), index))
        self.advance()
        return seconds

    def _restore(self) -> None:
        """Make every conversation what it was when it was prefilled."""
        for session, cache in zip(self.sessions, self.caches, strict=False):
            more = cache.sequences.length - len(session.prompt)
            if more > 0:
                cache.crop(-more)


def _can_copy(engine: Any, session: Session, layers: Sequence[Layer]) -> bool:
    """Whether a prompt's K and V can be put in without a forward: attention reads blocks, and every layer keeps all."""
    whole = all(keys.shape[2] == len(session.prompt) for keys, _ in layers)
    return whole and not engine.gathered_because and len(engine.layout.layers) == len(layers)


def _copy(engine: Any, cache: Any, session: Session, layers: Sequence[Layer]) -> None:
    """Fill an empty cache as a prefill would, with K and V that a forward over the very same ids has computed.

    Of an empty cache a prefill's attention reads nothing, so these are the bytes that it would put there.

    Raises:
        CapacityError: there is no room, as a call of ``generate`` would be told.
    """
    count = len(session.prompt)
    engine.reserve(cache.sequences, 1, count + 1, paged=True)
    try:
        with engine.exclusive(), torch.inference_mode():
            cache.weights = engine.look_at_weights()
            _append(
                engine, cache, ForwardInputs(count, ids=torch.tensor([session.prompt], device=engine.device)), layers
            )
    finally:
        engine.end_call(cache.sequences)


def _append(engine: Any, cache: Any, inputs: ForwardInputs, layers: Sequence[Layer]) -> None:
    completed = False
    cache.begin_forward(inputs, ())
    try:
        for position, spec in enumerate(engine.layout.layers):
            cache.sequences.append_paged(position, *layers[spec.model_index])
            cache.sequences.attended(position)
        completed = True
    finally:
        cache.end_forward(completed=completed)
