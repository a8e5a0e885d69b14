"""The caches that ``tierkv bench longcontext`` compares, each with its best settings for a given number of tokens."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from transformers import DynamicCache, QuantizedCache, StaticCache

import tierkv
from tierkv.benchmarks.longcontext_settings import LOSSY, REFERENCE, TIERED, config_file, is_tiered
from tierkv.benchmarks.longcontext_wires import Rates, wires_of
from tierkv.config import CacheConfig, load_config
from tierkv.errors import CapacityError, ConfigError
from tierkv.integrations.hf_compat import block_layout

SHARES: Final = (0.25, 0.375, 0.5, 0.75, 1.25)
"""Of the KV of a length, in device memory and in host memory: the first with which tierkv can work."""
_SIZES: Final = (256, 128, 64, 32, 16)
_DEVICE_BLOCKS: Final = 12
"""Large blocks suit a disk; as large as leave the device so many."""
_SPARE_BYTES: Final = 1 << 26
_TRIED_TOKENS: Final = 8
_GROUP: Final = 64

Stats = dict[str, Any]


@dataclass
class Subject:
    """A cache for one conversation.

    Attributes:
        cache: what ``generate`` is given.
        engine: where it is tierkv's.
        before: counters of the engine when the conversation began.
        rates: what plain copies reach on this machine, by wire, where that was measured.
    """

    cache: Any
    engine: Any = None
    before: Stats = field(default_factory=dict)
    rates: Rates | None = None

    def measures(self) -> Stats:
        """Return what is known of where the KV lay, since the conversation began; call it before the cache closes."""
        if self.engine is None:
            held = tensor_bytes(self.cache)
            return {"tier_peak_bytes": None if held is None else {"device": held, "host": 0, "disk": 0}}
        stats, before = self.engine.stats().as_dict(), self.before
        counters, prefix = stats["counters"], stats["prefix"]
        prompt = prefix["prompt_tokens"] - before["prefix"]["prompt_tokens"]
        used = prefix["used_tokens"] - before["prefix"]["used_tokens"]
        lookups = prefix["lookups"] - before["prefix"]["lookups"]
        return {
            "tier_peak_bytes": {name: tier["peak_bytes"] for name, tier in stats["tiers"].items()},
            "tier_capacity_bytes": {name: tier["capacity_bytes"] for name, tier in stats["tiers"].items()},
            "tier_blocks": {name: tier["blocks"] for name, tier in stats["tiers"].items()},
            "moved_bytes": {
                wire: moved - before["moved_bytes"].get(wire, 0) for wire, moved in stats["moved_bytes"].items()
            },
            "wires": wires_of(stats, before, self.rates),
            "stall_seconds": round(counters["stall_seconds"] - before["counters"]["stall_seconds"], 6),
            "copy_seconds": round(counters["copy_seconds"] - before["counters"]["copy_seconds"], 6),
            "prefix_hit_ratio": round(used / prompt, 6) if lookups and prompt else None,
            "prefix_tokens": used,
            "read_path": stats["read_path"],
            "block_size": self.engine.config.block_size,
        }


class Caches:
    """Makes the caches of one kind, for conversations of up to so many tokens."""

    def __init__(self, model: Any, name: str, tokens: int, folder: Path, rates: Rates | None = None) -> None:
        """Find the settings.

        Args:
            model: on its device; tierkv must not be attached to it.
            name: of the cache.
            tokens: the most that a conversation comes to.
            folder: for tierkv's disk tier.
            rates: what plain copies reach on this machine, by wire.

        Raises:
            ConfigError: tierkv's configuration is impossible here.
            CapacityError: its tiers cannot hold so many tokens.
            UnsupportedModel: tierkv cannot tier the model.
        """
        self._model = model
        self._name = name
        self._tokens = tokens
        self._rates = rates
        self._engine: Any = None
        self.share: float | None = None
        self._config: CacheConfig | None = None
        if is_tiered(name):
            self._config = self._own_config(folder) if name == TIERED else load_config(config_file(name), environ={})
            if name != TIERED:
                _check(model, self._config, tokens)

    @contextmanager
    def conversation(self, tokens: int, *, keep: bool) -> Iterator[Subject]:
        """Give a cache for a conversation that comes to at most ``tokens``; what tierkv knows of others is forgotten.

        Args:
            tokens: the most that it can come to.
            keep: leave the engine open, so that the next conversation finds the prefixes of this one.
        """
        if self._config is None:
            yield Subject(self._make(tokens))
            return
        if self._engine is None:
            self._engine = tierkv.attach(self._model, self._config)
        cache = None
        try:
            before = self._engine.stats().as_dict()
            cache = self._engine.new_cache()
            yield Subject(cache, self._engine, before, self._rates)
        finally:
            if cache is not None:
                cache.close()
            if not keep:
                self.close()

    def close(self) -> None:
        """End the engine, and with it what it knows. Idempotent."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _make(self, tokens: int) -> Any:
        config = self._model.config
        if self._name == "static":
            return StaticCache(config=config, max_cache_len=tokens)
        return _MAKERS[self._name](config)

    def _own_config(self, folder: Path) -> CacheConfig:
        """Return a configuration that uses all tiers: a quarter of the KV on the device, a quarter in host memory.

        Short contexts need a larger part of theirs: a device holds at least a few blocks and the buffers.
        """
        layout, _ = block_layout(self._model, _SIZES[-1])
        token_bytes = layout.token_bytes
        problem: Exception | None = None
        for share in SHARES:
            part = int(share * self._tokens * token_bytes)
            size = next((size for size in _SIZES if part >= _DEVICE_BLOCKS * size * token_bytes), _SIZES[-1])
            sized, _ = block_layout(self._model, size)
            whole = sized.blocks_for(self._tokens) * sized.block_bytes
            config = load_config(
                {
                    "block_size": size,
                    "device": {"capacity": max(1, int(share * whole))},
                    "host": {"capacity": max(1, int(share * whole))},
                    "disk": {"capacity": 2 * whole + _SPARE_BYTES, "path": str(folder)},
                },
                environ={},
            )
            try:
                _check(self._model, config, self._tokens)
            except (ConfigError, CapacityError) as error:
                problem = error
                continue
            self.share = share
            return config
        assert problem is not None
        raise problem


_MAKERS: Final[dict[str, Callable[[Any], Any]]] = {
    REFERENCE: lambda config: DynamicCache(config=config),
    LOSSY: lambda config: QuantizedCache("quanto", config=config, nbits=4, q_group_size=_group_size(config)),
    "offloaded": lambda config: DynamicCache(config=config, offloading=True),
}


def _group_size(config: Any) -> int:
    """Return over how many numbers of a head a scale is shared: transformers' 64 where the head's size allows it."""
    text = config.get_text_config(decoder=True)
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return math.gcd(_GROUP, head)


def why_not(name: str, model: Any) -> str | None:
    """Say why a cache of transformers cannot run here, after trying; None where it can."""
    if name not in (LOSSY, "offloaded"):
        return None
    fed = torch.ones((1, _TRIED_TOKENS), dtype=torch.long, device=model.device)
    try:
        model.generate(
            fed, attention_mask=torch.ones_like(fed), cache=_MAKERS[name](model.config), max_new_tokens=2,
            do_sample=False, num_beams=1, pad_token_id=0,
        )  # fmt: skip
    except ImportError:
        return "it needs the package optimum-quanto"
    except (AssertionError, RuntimeError, NotImplementedError, ValueError, AttributeError, TypeError) as error:
        return f"transformers cannot run it with this model on {model.device.type}: {' '.join(str(error).split()).rstrip('.')}"
    return None


def tensor_bytes(cache: Any) -> int | None:
    """Count the bytes of all tensors that the layers of a cache hold; None where they are of other kinds as well."""
    if isinstance(cache, QuantizedCache):
        return None
    seen: dict[int, int] = {}
    for layer in cache.layers:
        for value in vars(layer).values():
            if isinstance(value, torch.Tensor):
                seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    return sum(seen.values())


def _check(model: Any, config: CacheConfig, tokens: int) -> None:
    """Find out whether an engine takes a conversation of so many tokens, without running one.

    Raises:
        ConfigError: it cannot be made.
        CapacityError: it does not.
    """
    with tierkv.attach(model, config) as engine:
        cache = engine.new_cache()
        try:
            engine.reserve(cache.sequences, 1, tokens, paged=not engine.gathered_because)
        finally:
            with suppress(Exception):
                engine.end_call(cache.sequences)
            cache.close()
