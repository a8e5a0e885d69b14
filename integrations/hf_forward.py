"""WatchedForward: tells a tiered cache when a forward of the attached model begins and how it ends.

``update`` sees keys and values of one layer. It sees neither the ids that they come from nor a forward that was
interrupted between two layers, by an exception or by Ctrl-C. So the ``forward`` of the model, and that of the decoder
inside it (which somebody may call directly), are wrapped; hooks would not do, since PyTorch skips them on Ctrl-C.
"""

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from tierkv.errors import UnsafeCall
from tierkv.integrations.hf_arguments import FED, check_tensors
from tierkv.integrations.hf_attention import AttentionSwitch, first_seen
from tierkv.integrations.hf_cache import TieredCache
from tierkv.integrations.hf_compat import (
    CACHE_ARGUMENTS,
    deciding_arguments,
    forward_parameters,
    text_config,
)
from tierkv.integrations.hf_content import ForwardInputs
from tierkv.interrupts import deferred_interrupt

if TYPE_CHECKING:
    from tierkv.integrations.hf_generate import ModelEngine


class WatchedForward:
    """Stands in for the ``forward`` of one module of the attached model: ``wrapper`` is the function to call instead."""

    def __init__(self, engine: "ModelEngine", module: torch.nn.Module, *, outermost: bool) -> None:
        """Wrap the forward of ``module``, changing nothing; ``outermost`` where no watched module contains it."""
        self._engine = engine
        self._outermost = outermost
        self._switch = AttentionSwitch.of(text_config(engine.model))
        self._inner = module.forward
        self._names = forward_parameters(module)
        run = torch.compiler.disable(self._run, recursive=False)

        @functools.wraps(self._inner)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return run(args, kwargs)

        self.wrapper = forward

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = dict(zip(self._names, args, strict=False)) | kwargs
        cache = next((named[name] for name in CACHE_ARGUMENTS if named.get(name) is not None), None)
        nested = isinstance(cache, TieredCache) and cache.in_forward and not self._outermost
        if nested or self._engine.closed:
            return self._inner(*args, **kwargs)
        switch = self._switch
        if not isinstance(cache, TieredCache):
            with switch.off() if switch.mine else nullcontext():  # from a hook inside a tiered forward
                return self._inner(*args, **kwargs)
        if cache.engine is not self._engine:
            raise UnsafeCall(
                "the cache belongs to another model's engine; make one with this model's engine.new_cache()"
            )
        cache.engine.check_open()
        completed = False
        try:
            cache.engine.gate.enter()
            if not cache.sequences.length:
                cache.weights = self._engine.look_at_weights()
            inputs = self._read(named)
            cache.begin_forward(inputs, self._first_seen(inputs, named, cache.sequences.length))
            with switch.on() if cache.attends_in_place else nullcontext():
                output = self._inner(*args, **kwargs)
            completed = True
        finally:
            with deferred_interrupt():
                try:
                    cache.end_forward(completed=completed)
                finally:
                    cache.engine.gate.leave()
        return output

    def _first_seen(self, inputs: ForwardInputs, named: dict[str, Any], cached: int) -> Sequence[int] | None:
        """Return where each row begins, if this forward can attend over blocks; otherwise None."""
        if self._engine.gathered_because or named.get("output_attentions") or self._engine.gathers_now():
            return None
        return first_seen(inputs, cached)

    def _read(self, named: dict[str, Any]) -> ForwardInputs:
        """Find out what decides the KV of this forward."""
        check_tensors(named, FED)
        mask, embeds = named.get("attention_mask"), named.get("inputs_embeds")
        ids = named.get("input_ids") if embeds is None else None
        fed = embeds if ids is None else ids
        flat = isinstance(mask, torch.Tensor) and mask.dim() == 2
        return ForwardInputs(
            count=fed.shape[1] if fed is not None else 0,
            ids=ids,
            mask=mask if flat else None,
            positions=named.get("position_ids"),
            implied_positions="position_ids" not in self._names,
            usual_mask=mask is None or flat,
            ids_decide=not deciding_arguments(named),
        )
