"""attach: one line around a model's ``generate``, undone by ``close``.

What the wrapped ``generate`` does, in order: read the call; give it a cache or check the one it was given, so that no
call can silently produce other tokens than a fresh run; refuse what cannot fit before the prefill; run; and, should a
block be lost on the way, run once more from the ids.
"""

import functools
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import PurePath
from typing import Any, NoReturn, cast

import torch
from transformers import PreTrainedModel

from tierkv import publish
from tierkv.bandwidths import ModelFacts
from tierkv.config import CacheConfig, load_config
from tierkv.engine import Engine
from tierkv.errors import BlockLost, CapacityError, StoreFull, TierKVError, UnsafeCall, UnsupportedModel
from tierkv.integrations.hf_attention import first_seen, why_gathered, why_not_now
from tierkv.integrations.hf_cache import TieredCache
from tierkv.integrations.hf_call import GenerateCall
from tierkv.integrations.hf_compat import (
    block_layout,
    effective_mask,
    num_cache_layers,
    text_config,
    watched_modules,
)
from tierkv.integrations.hf_content import ForwardInputs
from tierkv.integrations.hf_forward import WatchedForward
from tierkv.integrations.hf_override import Override
from tierkv.integrations.hf_prefix import ModelPrefixes
from tierkv.integrations.hf_replay import Replay
from tierkv.integrations.hf_weights import ModelWeights
from tierkv.layout import BlockLayout
from tierkv.machine import resolve_budgets
from tierkv.sequences import SequenceBatch

log = logging.getLogger(__name__)

_ATTACHED = "tierkv_engine"


def attach(
    model: PreTrainedModel, config: str | os.PathLike[str] | Mapping[str, Any] | CacheConfig | None = None
) -> "ModelEngine":
    """Wrap ``model.generate`` so that its KV cache lives in tiers; the tokens stay the same.

    Until it is closed the engine is also ``model.tierkv_engine``, for whoever did not keep what ``attach`` returned.
    A copy or a pickle of an attached model is an ordinary model, not attached.

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
        raise TierKVError(f"tierkv is already attached to this model; call model.{_ATTACHED}.close() first")
    checked = load_config(config)
    publish.is_wanted()  # a mistake in its variable is one in the configuration, and said before anything is made
    layout, native_layers = block_layout(model, checked.block_size)
    budgets = resolve_budgets(checked, model.device)
    return ModelEngine(
        model,
        layout,
        checked,
        budgets,
        model.device,
        native_layers=native_layers,
        gathered_because=_why_gathered(model, checked, layout),
        facts=_facts(model),
    )


def _why_gathered(model: PreTrainedModel, config: CacheConfig, layout: BlockLayout) -> str:
    if config.attention.path == "gathered":
        return 'attention.path = "gathered" asks for it'
    computes_on_cpu = config.attention.cold_read == "compute"
    reason = why_gathered(model, text_config(model), layout, computes_on_cpu=computes_on_cpu)
    if reason and config.attention.path == "paged":
        raise UnsupportedModel(f'attention.path = "paged" is not possible: {reason}; use "auto" or "gathered"')
    return reason


def _facts(model: PreTrainedModel) -> ModelFacts | None:
    heads = getattr(text_config(model), "num_attention_heads", None)
    weight_bytes = sum(weight.nbytes for weight in model.parameters())
    return ModelFacts(heads, weight_bytes) if isinstance(heads, int) else None


def _short_name(model: PreTrainedModel) -> str:
    """Return what people call a model: the end of its path or hub id, or its class where it has none."""
    return PurePath(str(getattr(model.config, "_name_or_path", "") or "")).name or type(model).__name__


class ModelEngine(Engine):
    """An engine attached to one transformers model."""

    def __init__(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        """Make the engine and wrap the model; see ``Engine`` for the arguments. ``attach`` calls this."""
        super().__init__(*args, **kwargs)
        self.model = cast("Any", model)  # its type does not know the generate that GenerationMixin gives it
        self.name = _short_name(model)
        self._generate = self.model.generate

        @functools.wraps(self._generate)
        def generate(*args: Any, **kwargs: Any) -> Any:
            """Stand in for ``model.generate``; same arguments, same result."""
            return self._run_call(args, kwargs)

        self.weights = ModelWeights(model)
        self._prefixes = ModelPrefixes(self)
        if self.prefix.store is not None:
            self.look_at_weights()  # reading them all takes a moment, which no prompt shall wait for
        self._overrides = []
        for module in watched_modules(model):
            more = {"generate": generate, _ATTACHED: self} if module is model else {}
            watched = WatchedForward(self, module, outermost=module is model)
            self._overrides.append(Override(module, forward=watched.wrapper, **more))
        publish.add(self, self.name)

    def new_cache(self) -> TieredCache:
        """Return an empty cache for one batch of sequences, to pass as ``generate(cache=...)``.

        Raises:
            ClosedError: the engine is closed, or this is a forked child.
            UnsupportedModel: the model's config names other layers than when it was attached.
        """
        if not self._has_its_layers():
            raise UnsupportedModel(
                "the model's config names other layers than when tierkv was attached to it; put it back as it was, or close "
                "the engine and attach again"
            )
        return TieredCache(self, text_config(self.model), self._prefixes.publish)

    @torch.compiler.disable  # called from inside a forward, which somebody may have compiled
    def look_at_weights(self) -> bytes:
        """Return the stamp of the weights as they are now, for a cache that is about to be filled."""
        stamp = self.weights.stamp()
        self._prefixes.prepare(stamp)
        return stamp

    def forget_prefixes(self) -> None:
        """Forget every prefix that memory keeps. What caches hold stays theirs; what is kept on disk stays there."""
        self.check_open()
        self.prefix.forget()

    def close(self) -> None:
        """Undo ``attach``, end the threads and remove the spill files. Idempotent."""
        publish.remove(self)
        for override in self._overrides:
            override.remove()
        super().close()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TierKVError(
            "an engine cannot be copied or pickled: its threads, memory and files belong to this process; copy or pickle "
            "the model, and attach to the copy"
        )

    __reduce_ex__ = __deepcopy__  # type: ignore[assignment]

    def _run_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.closed:
            return self._generate(*args, **kwargs)
        self.check_open()
        call = GenerateCall.read(self.model, args, kwargs)
        reason = call.not_ours()
        if not reason and call.cache is None and not self._has_its_layers():
            reason = "it runs other layers than tierkv was attached to"  # early exit drafts so, with this very model
        if reason:
            log.warning("tierkv is attached but not used for this call: %s", reason)
            return self._generate(*args, **kwargs)
        call.measure(self.model)
        if call.cache is None:
            return self._run_on_own_cache(call)
        if call.cache.engine is not self:
            raise UnsafeCall("the cache belongs to another engine; make one with this engine's new_cache()")
        if call.cache.sequences.length and call.cache.weights != self.weights.stamp():
            raise UnsafeCall("the model's weights have changed since this cache was filled; call cache.reset()")
        cache, rows = call.cache, call.cache.sequences.rows
        with cache.in_use(lambda: self._prepare(call, cache)), self._call_of(cache.sequences):
            try:
                return self._generate(**call.arguments)
            except BaseException:
                now = cache.sequences.rows
                if 0 < rows < now:  # repeated for beams that came to nothing: any call may come next
                    with suppress(TierKVError):  # a torn or closed cache says so when it is used
                        cache.batch_select_indices(torch.arange(0, now, now // rows))
                raise

    @contextmanager
    def _call_of(self, sequences: SequenceBatch) -> Iterator[None]:
        try:
            yield
        finally:
            self.end_call(sequences)

    def _has_its_layers(self) -> bool:
        return num_cache_layers(self.model) == len(self.layout.layers) + self.native_layers

    def gathers_now(self) -> bool:
        """Whether the model, as it is at the moment, is one that cannot attend over blocks."""
        config = text_config(self.model)
        wants_weights = any(getattr(one, "output_attentions", False) for one in (config, self.model.config))
        return bool(self.model.training or wants_weights or why_not_now(config))

    def _attends_in_place(self, call: GenerateCall) -> bool:
        """Whether every forward of a call can be expected to attend over blocks."""
        mask = effective_mask(call.config, call.ids, call.mask) if call.ids is not None else call.mask
        if self.gathered_because or call.others or call.config.output_attentions or self.gathers_now():
            return False
        return first_seen(ForwardInputs(call.prompt_tokens, mask=mask), cached=1) is not None

    def _prepare(self, call: GenerateCall, cache: TieredCache) -> None:
        """Make sure that a call on the user's cache is safe and fits, and only then change the cache for it."""
        try:
            self._make_ready(call, cache)
        except BaseException:
            self.end_call(cache.sequences)
            raise

    def _make_ready(self, call: GenerateCall, cache: TieredCache) -> None:
        change = call.make_safe(cache)
        if not cache.sequences.length:
            change()
            self._admit(call, cache)
            return
        self._reserve(call, cache)
        change()
        if cache.sequences.length and self._prefixes.knows_more(call, cache):
            cache.reset()  # its own blocks are known too, and come back with the rest
        if not cache.sequences.length:
            self._prefixes.begin(call, cache)
        self._prefixes.expect_answer(call, cache)

    def _reserve(self, call: GenerateCall, cache: TieredCache) -> None:
        self.reserve(cache.sequences, call.rows, call.longest, paged=self._attends_in_place(call))

    def _admit(self, call: GenerateCall, cache: TieredCache) -> None:
        """Set room aside for a call on an empty cache, which begins with what is known of the prompts.

        Raises:
            CapacityError: there is no room, even though what others hold already needs none of its own.
        """
        try:
            self._reserve(call, cache)
        except CapacityError:
            with self.exclusive():  # nobody shall take in between what this one counts on
                self._prefixes.begin(call, cache, from_store=False)
                if not cache.sequences.length:
                    raise
                try:
                    self._reserve(call, cache)
                except CapacityError:
                    cache.reset()
                    raise
        else:
            self._prefixes.begin(call, cache)
        self._prefixes.expect_answer(call, cache)

    def _run_on_own_cache(self, call: GenerateCall) -> Any:
        """Run on a new cache; should a block be lost or refused by the disk, run once more from the ids."""
        cache = self.new_cache()
        call.use(cache)
        handed_over = False
        try:
            self._admit(call, cache)
            replay = Replay(call.arguments, self.device)
            output = None
            try:
                output = self._generate(**call.arguments)
            except (BlockLost, StoreFull) as error:
                log.warning("the disk tier failed (%s); generating again from the ids", error)
            if output is None:  # outside the handler, which keeps everything alive that the first run computed
                self.count(recomputes=1)
                cache.reset()
                self._reserve(call, cache)
                replay.start_over()
                output = self._generate(**call.arguments)
            handed_over = call.returns_cache
            return output
        finally:
            self.end_call(cache.sequences)
            if not handed_over:
                cache.close()
