"""attach: one line around a model's ``generate``, undone by ``close``.

What the wrapped ``generate`` does, in order: read the call; give it a cache or check the one it was given, so that no
call can silently produce other tokens than a fresh run; refuse what cannot fit before the prefill; run; and, should a
block be lost on the way, run once more from the ids.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from tierkv.config import CacheConfig, load_config
from tierkv.engine import Engine, resolve_budgets
from tierkv.errors import BlockLost, StoreFull, TierKVError, UnsupportedModel
from tierkv.integrations.hf_cache import TieredCache
from tierkv.integrations.hf_call import GenerateCall
from tierkv.integrations.hf_compat import CACHE_ARGUMENTS, block_layout, text_config
from tierkv.integrations.hf_replay import ReplayStreamer

log = logging.getLogger(__name__)

_ATTACHED = "_tierkv_engine"


def attach(
    model: PreTrainedModel, config: str | os.PathLike[str] | Mapping[str, Any] | CacheConfig | None = None
) -> "ModelEngine":
    """Wrap ``model.generate`` so that its KV cache lives in tiers; the tokens stay the same.

    Args:
        model: a decoder-only transformers model on one device.
        config: path of a ``tierkv.toml``, a mapping shaped like one, a ``CacheConfig``, or None for the defaults.

    Returns:
        The engine. Use it as a context manager, or call ``close`` to undo everything.

    Raises:
        ConfigError: a setting is wrong or does not fit this machine.
        UnsupportedModel: the model cannot be tiered; the message says why.
        TierKVError: tierkv is already attached to this model.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(f"attach takes a transformers model, not {type(model).__name__}")
    if getattr(model, _ATTACHED, None) is not None:
        raise TierKVError("tierkv is already attached to this model; close the engine that attach returned first")
    checked = load_config(config)
    layout, native_layers = block_layout(model, checked.block_size)
    budgets = resolve_budgets(checked, model.device)
    return ModelEngine(model, layout, checked, budgets, model.device, native_layers=native_layers)


class ModelEngine(Engine):
    """An engine attached to one transformers model."""

    def __init__(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        """Make the engine and wrap the model; see ``Engine`` for the arguments. ``attach`` calls this."""
        super().__init__(*args, **kwargs)
        self._model = model
        self._generate = model.generate
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True),
        ]
        self._overridden = model.__dict__.get("generate")
        model.generate = self._wrapped_generate  # type: ignore[method-assign]
        setattr(model, _ATTACHED, self)

    def new_cache(self) -> TieredCache:
        """Return an empty cache for one batch of sequences, to pass as ``generate(cache=...)``.

        Raises:
            ClosedError: the engine is closed, or this is a forked child.
        """
        return TieredCache(self, text_config(self._model))

    def close(self) -> None:
        """Undo ``attach``, end the threads and remove the spill files. Idempotent."""
        if getattr(self._model if hasattr(self, "_model") else None, _ATTACHED, None) is self:
            for hook in self._hooks:
                hook.remove()
            if self._overridden is None:
                del self._model.generate
            else:
                self._model.generate = self._overridden  # type: ignore[method-assign]
            delattr(self._model, _ATTACHED)
        super().close()

    # -- generate -------------------------------------------------------------------------------------------------

    def _wrapped_generate(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for ``model.generate``; same arguments, same result."""
        self.check_open()
        call = GenerateCall.read(self._model, args, kwargs)
        reason = call.not_ours()
        if reason:
            if reason != "quiet":
                log.warning("tierkv is attached but not used for this call: %s", reason)
            return self._generate(*args, **kwargs)
        cache = call.cache
        own = cache is None
        if cache is None:
            cache = self.new_cache()
            call.use(cache)
        elif cache.engine is not self:
            raise TierKVError("the cache belongs to another engine; make it with this engine's new_cache()")
        else:
            call.make_safe(cache)
        try:
            self.reserve(cache.sequences, call.rows, call.longest)
            if not own:
                return self._run(call)
            return self._run_with_retry(call, cache)
        except BaseException:
            own = own or False
            raise
        finally:
            self._leave_forward(cache)
            if own and not call.returns_cache:
                cache.close()

    def _run(self, call: GenerateCall) -> Any:
        return self._generate(*call.args, **call.kwargs)

    def _run_with_retry(self, call: GenerateCall, cache: TieredCache) -> Any:
        """Run; should a block be lost, run once more from the ids with the same random state."""
        states = _random_states(self.device)
        replay = ReplayStreamer.around(call)
        try:
            return self._run(call)
        except (BlockLost, StoreFull) as error:
            log.warning("the disk tier failed (%s); generating again from the ids", error)
            self.count(recomputes=1)
        self._leave_forward(cache)
        cache.reset()
        self.reserve(cache.sequences, call.rows, call.longest)
        if replay is not None:
            replay.start_over()
        _restore_random_states(self.device, states)
        return self._run(call)

    # -- forward hooks --------------------------------------------------------------------------------------------

    def _before_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = next((kwargs[name] for name in CACHE_ARGUMENTS if kwargs.get(name) is not None), None)
        if not isinstance(cache, TieredCache) or cache.engine is not self:
            return
        self.check_open()
        ids = kwargs.get("input_ids", args[0] if args else None)
        if kwargs.get("inputs_embeds") is not None:
            ids = None
        self.enter_forward()
        cache.begin_forward(ids, kwargs.get("attention_mask"))

    def _after_forward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache = next((kwargs[name] for name in CACHE_ARGUMENTS if kwargs.get(name) is not None), None)
        if isinstance(cache, TieredCache) and cache.engine is self:
            self._leave_forward(cache)

    def _leave_forward(self, cache: TieredCache) -> None:
        try:
            if not self.closed:
                cache.end_forward()
        finally:
            self.leave_forward()


def _random_states(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _restore_random_states(device: torch.device, states: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)
