"""How fast one model decodes and prefills on this machine, as points that a cost model is fitted to.

All that is compared is set up first and then takes turns, so that a machine that slows down slows all of it. Decoding reads
synthetic K and V.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch
from transformers import PreTrainedModel

import tierkv
from tierkv.benchmarks.filled import Filled, filled, token_bytes, twin
from tierkv.cost import Read
from tierkv.fit import DecodePoint, PrefillPoint
from tierkv.tier import Tier

Residency = Literal["device", "host", "disk"]
RESIDENCIES: Final[tuple[Residency, ...]] = ("device", "host", "disk")
"""All on the device; a quarter there and the rest in host memory; a quarter there and the rest on disk."""

WARM_UP: Final = 2
SPARE_BYTES: Final = 24 * 2**20
"""Scratch, and blocks that are not full."""
LEAST_BLOCKS: Final = 12

Advance = Callable[[], None]
Pick = Callable[[Sequence[float]], float]
Settings = Mapping[str, Any]
"""Keys of a configuration by dotted name, besides the sizes."""


@dataclass(frozen=True)
class Decode:
    """A decoded token that is asked for."""

    context: int
    residency: Residency
    settings: Settings = field(default_factory=dict)


class Probe:
    """Measures one model. Files go to a folder of the disk that is meant."""

    def __init__(self, model: PreTrainedModel, folder: Path, pick: Pick = statistics.median) -> None:
        """Measure ``model``; ``pick`` says which of the repeated times counts."""
        self.model = model
        self.folder = folder
        self._pick = pick
        self.token_bytes = token_bytes(model)
        self._token = torch.ones((1, 1), dtype=torch.long, device=model.device)

    # -- decoding -------------------------------------------------------------------------------------------------

    def decode(self, wanted: Sequence[Decode], rounds: int, advance: Advance = lambda: None) -> list[DecodePoint]:
        """Time one decoded token of each, in turns; one of ``rounds``, see ``pick``.

        The page cache holds what the disk tier has written: that is the state of a spill that has just happened.

        Args:
            wanted: what to time.
            rounds: timed tokens of each.
            advance: called ``len(wanted) + rounds`` times.

        Raises:
            TierKVError: one does not fit.
        """
        with ExitStack() as stack, torch.inference_mode():
            steps, places, sizes = [], [], []
            for one in wanted:
                own = stack.enter_context(self._filled(one, rounds))
                if own.spill is not None:
                    own.spill.flush()  # a record that waits to be written is read from memory
                steps.append(own.stepper(self._token))
                places.append(own)
                sizes.append(own.engine.layout.block_bytes)
                advance()
            for _ in range(WARM_UP):
                for step in steps:
                    step()
            times: list[list[float]] = [[] for _ in wanted]
            for _ in range(rounds):
                for number, step in enumerate(steps):
                    times[number].append(self._timed(step))
                advance()
            return [
                DecodePoint(_lying(own), size, self._pick(some), read_of(own.engine))
                for own, size, some in zip(places, sizes, times, strict=True)
            ]

    @contextmanager
    def _filled(self, one: Decode, rounds: int) -> Iterator[Filled]:
        room = WARM_UP + rounds + 8
        kv_bytes = (one.context + room) * self.token_bytes
        # The blocks that always stay there, and some scratch: a short context may not need the tier below.
        least = LEAST_BLOCKS * int(one.settings.get("block_size", 32)) * self.token_bytes
        part = max(least, kv_bytes // 4 + min(SPARE_BYTES // 4, kv_bytes // 8))
        config: dict[str, Any] = {
            "device": {"capacity": kv_bytes + kv_bytes // 8 + SPARE_BYTES if one.residency == "device" else part},
            "host": {"capacity": kv_bytes + kv_bytes // 8 + SPARE_BYTES if one.residency == "host" else 0},
            "disk": {"capacity": 0},
            "prefix": {"persist": False},
        }
        if one.residency == "disk":
            config["disk"] = {"capacity": 2 * kv_bytes + 2**26, "path": str(self.folder)}
        with filled(self.model, one.context, room, merged(config, one.settings)) as own:
            yield own

    # -- prefill --------------------------------------------------------------------------------------------------

    def prefill(
        self, wanted: Sequence[tuple[int, int]], rounds: int, advance: Advance = lambda: None
    ) -> list[PrefillPoint]:
        """Time a forward of so many tokens behind so many others, ``(tokens, past)``; one of ``rounds``, see ``pick``.

        Args:
            wanted: what to time.
            rounds: forwards of each.
            advance: called ``rounds`` times.
        """
        longest = max(tokens + past for tokens, past in wanted)
        known = int(self.model.config.get_text_config(decoder=True).vocab_size)
        ids = torch.arange(longest, device=self.model.device)[None] % known
        times: list[list[float]] = [[] for _ in wanted]
        config = {
            "device": {"capacity": longest * self.token_bytes * 5 // 4 + SPARE_BYTES},
            "host": {"capacity": 0}, "disk": {"capacity": 0}, "prefix": {"share": False, "persist": False},
        }  # fmt: skip
        with torch.inference_mode(), tierkv.attach(twin(self.model), config) as engine:
            for turn in range(1 + rounds):  # the first one warms up
                for number, (tokens, past) in enumerate(wanted):
                    with closing(engine.new_cache()) as cache:
                        if past:
                            engine.model(input_ids=ids[:, :past], cache=cache, use_cache=True)
                        part = ids[:, past : past + tokens]
                        seconds = self._timed(
                            lambda part=part, cache=cache: engine.model(  # type: ignore[misc]
                                input_ids=part, cache=cache, use_cache=True, logits_to_keep=1
                            )
                        )
                        if turn:
                            times[number].append(seconds)
                if turn:
                    advance()
        return [
            PrefillPoint(tokens, past, self._pick(some)) for (tokens, past), some in zip(wanted, times, strict=True)
        ]

    # -- internals ------------------------------------------------------------------------------------------------

    def _timed(self, work: Callable[[], object]) -> float:
        synchronize(self.model)
        began = time.perf_counter()
        work()
        synchronize(self.model)
        return time.perf_counter() - began


def synchronize(model: PreTrainedModel) -> None:
    """Wait until the device has done what it was told."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def merged(config: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return a configuration with further keys, by dotted name, set in it."""
    result = {name: dict(value) if isinstance(value, Mapping) else value for name, value in config.items()}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        if section:
            result.setdefault(section, {})[name] = value
        else:
            result[name] = value
    return result


def read_of(engine: Any) -> Read:
    """Return how an engine's attention read host memory in its last step."""
    streams = engine.cold_reads.host_is_read == "streamed" and not engine.paged.cpu_attended
    return "stream" if streams else "compute"


def _lying(own: Filled) -> dict[Tier, int]:
    """Return the bytes that the next token reads, by the tier where they lie."""
    size, token = own.engine.layout.block_size, own.engine.layout.token_bytes
    lying: dict[Tier, int] = {}
    for table in own.cache.sequences.tables:
        for index, block in enumerate(table.blocks):
            tokens = min(size, table.length - index * size)
            lying[block.tier] = lying.get(block.tier, 0) + tokens * token
    return lying
