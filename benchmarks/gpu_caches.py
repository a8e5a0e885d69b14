"""The caches that ``gpu_decode`` compares, filled with the same synthetic past, and the model that reads them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import tierkv
from tierkv.benchmarks.filled import twin
from tierkv.benchmarks.gpu_common import Layer, capacities
from tierkv.errors import TierKVError
from tierkv.integrations.hf_compat import block_layout
from tierkv.integrations.hf_content import ForwardInputs

ROOM: Final = 64
"""Tokens that may follow the past: every step appends one."""

KEY_SIZE: Final = 3.0
"""Factor of the random keys. With 1, attention would average so many tokens that no logit would show a wrong cache."""
CACHES: Final = (
    "dynamic", "offloaded", "tierkv-100", "tierkv-10-stream", "tierkv-50-stream", "tierkv-10-compute",
    "tierkv-50-compute", "tierkv-10-auto", "tierkv-50-auto", "tierkv-10-gathered", "tierkv-50-gathered",
)  # fmt: skip
"""The most telling first, for a machine that has no time for all. ``tierkv``: percent on the device, way to read."""


@dataclass
class Subject:
    """One cache, filled.

    Attributes:
        name: one of ``CACHES``.
        step: runs one token; returns its logits.
        row: what the record says of it.
        host_bytes: RAM that the cache takes.
        engine: where it is tiered.
        times: seconds of each timed step.
        logits: of the last step.
    """

    name: str
    step: Callable[[], torch.Tensor]
    row: dict[str, Any]
    host_bytes: Callable[[], int]
    engine: Any = None
    times: list[float] = field(default_factory=list)
    logits: torch.Tensor | None = None


class Past:
    """A model and the tokens that every cache is filled with."""

    def __init__(self, model: PreTrainedModel, context: int, device: torch.device) -> None:
        self.model, self.context, self.device = model, context, device
        self.layout, _ = block_layout(model, 32)
        self.on_gpu = device.type == "cuda"
        self.token = torch.tensor([[11]], device=device)

    def content(self, seed: int = 0) -> Iterator[Layer]:
        """Yield K and V of every layer, the same on every call with a seed."""
        generator = torch.Generator(self.device).manual_seed(self.context + seed)
        config = self.model.config
        shape = 1, config.num_key_value_heads, self.context, config.head_dim
        for _ in range(config.num_hidden_layers):
            keys, values = (
                torch.randn(shape, generator=generator, device=self.device, dtype=self.model.dtype) for _ in range(2)
            )
            yield keys * KEY_SIZE, values

    def stepper(self, model: PreTrainedModel, cache: Any) -> Callable[[], torch.Tensor]:
        def step() -> torch.Tensor:
            logits: torch.Tensor = model(input_ids=self.token, cache=cache, use_cache=True).logits[0, -1]
            return logits

        return step

    @contextmanager
    def filled(self, name: str, row: dict[str, Any]) -> Iterator[Subject]:
        """Fill a cache, one of ``CACHES``."""
        if name.startswith("tierkv"):
            with self._tiered(name, row) as subject:
                yield subject
            return
        if name == "offloaded" and not self.on_gpu:
            raise TierKVError("transformers' offloaded cache needs a CUDA device")
        cache = DynamicCache(config=self.model.config, offloading=name == "offloaded")
        for layer, (keys, values) in enumerate(self.content()):
            cache.update(keys, values, layer)

        def host_bytes() -> int:
            tensors = [one for layer in cache.layers for one in (layer.keys, layer.values)]
            return sum(one.nbytes for one in tensors if one.device.type == "cpu") if self.on_gpu else 0

        yield Subject(name, self.stepper(self.model, cache), row, host_bytes)

    @contextmanager
    def _tiered(self, name: str, row: dict[str, Any]) -> Iterator[Subject]:
        percent, read = (*name.split("-")[1:], "auto")[:2]
        tokens, gathered = self.context + ROOM, read == "gathered"
        sizes = capacities(self.layout, 1, tokens, int(percent) / 100, read)
        config = {
            "device": {"capacity": sizes["device"]},
            "host": {"capacity": sizes["host"]},
            "disk": {"capacity": 0},
            "attention": {"path": "gathered"} if gathered else {"path": "paged", "cold_read": read},
        }
        row |= {"device_capacity_bytes": sizes["device"], "host_capacity_bytes": sizes["host"]}
        with tierkv.attach(twin(self.model), config) as engine:
            cache = engine.new_cache()
            engine.reserve(cache.sequences, 1, tokens, paged=not gathered)
            cache.sequences.first_seen = ()
            for layer, (keys, values) in enumerate(self.content()):
                cache.sequences.append_paged(layer, keys, values)
                cache.sequences.attended(layer)
            cache.content.append(ForwardInputs(self.context), 1, self.context, self.device)
            host = engine.stats().tiers["host"]
            yield Subject(name, self.stepper(engine.model, cache), row, lambda: host.allocated_bytes, engine)
            cache.close()


def llama(layers: int, device: torch.device, *, tiny: bool) -> PreTrainedModel:
    """Return a random model of Llama-3.1-8B's shapes in bfloat16, made where it will run."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "head_dim": 128,
    }
    if tiny:
        sizes = {
            "vocab_size": 512,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_attention_heads": 8,
            "head_dim": 32,
        }
    config = LlamaConfig(
        **sizes, num_hidden_layers=layers, num_key_value_heads=sizes["num_attention_heads"] // 4,
        max_position_embeddings=262144, rope_theta=500000.0, tie_word_embeddings=False,
    )  # fmt: skip
    with device:
        model: PreTrainedModel = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)  # noqa: SLF001
    model.generation_config.eos_token_id = None
    model.eval()
    return model
