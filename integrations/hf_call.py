"""GenerateCall: what one call of ``generate`` asks for, and how to make it safe on a cache that already holds tokens.

With stock transformers several calls on a filled cache silently give wrong tokens: the whole prompt already cached, a
cache longer than the prompt or of other content, assisted decoding or prompt lookup on a filled cache,
``use_cache=False`` with a cache, only the new ids without a mask. Each is made right here, or refused with a sentence.
"""

import inspect
import logging
from dataclasses import dataclass
from functools import cache as cached
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel

from tierkv.errors import UnsafeCall
from tierkv.integrations.hf_cache import TieredCache
from tierkv.integrations.hf_compat import CACHE_ARGUMENTS, effective_generation_config, max_length

log = logging.getLogger(__name__)


@dataclass
class GenerateCall:
    """One call of ``generate``.

    Attributes:
        args: positional arguments, passed on unchanged.
        kwargs: keyword arguments; the cache is always under ``cache``.
        config: the effective generation config.
        ids: prompt ids ``[batch, tokens]``, or None for embeddings.
        cache: the tiered cache that the user passed, or None.
        foreign: another cache that the user passed, or None.
        batch: prompts.
        prompt_tokens: tokens of each prompt, as passed.
        repeats: rows per prompt (beams or returned sequences).
        cached_tokens: tokens that the cache holds besides the ids that are passed.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    config: Any
    ids: torch.Tensor | None
    cache: TieredCache | None
    foreign: Any
    batch: int
    prompt_tokens: int
    repeats: int
    cached_tokens: int = 0

    @classmethod
    def read(cls, model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "GenerateCall":
        """Understand a call without running it."""
        kwargs = dict(kwargs)
        given = [kwargs.pop(name) for name in CACHE_ARGUMENTS if kwargs.get(name) is not None]
        chosen = given[0] if given else None
        named = dict(zip(_parameters(), args, strict=False)) | kwargs
        config_kwargs = {name: value for name, value in named.items() if name not in _parameters()}
        config = effective_generation_config(model, named.get("generation_config"), config_kwargs)
        ids = named.get("input_ids", named.get("inputs"))
        embeds = named.get("inputs_embeds")
        if embeds is not None and (ids is None or ids.shape[1] == 0):
            ids = None
            batch, tokens = embeds.shape[:2]
        else:
            batch, tokens = (ids.shape[0], ids.shape[1]) if ids is not None and ids.dim() == 2 else (1, 1)
        if chosen is not None:
            kwargs["cache"] = chosen
        return cls(
            args,
            kwargs,
            config,
            ids,
            chosen if isinstance(chosen, TieredCache) else None,
            None if isinstance(chosen, TieredCache) else chosen,
            batch,
            tokens,
            max(config.num_beams or 1, config.num_return_sequences or 1),
        )

    @property
    def rows(self) -> int:
        """Rows of the cache while the call runs."""
        return self.batch * self.repeats

    @property
    def longest(self) -> int:
        """The most tokens a row can reach, cached ones included."""
        return self.cached_tokens + max_length(self.config, self.prompt_tokens)

    @property
    def returns_cache(self) -> bool:
        """Whether the result carries the cache to the user."""
        return bool(self.config.return_dict_in_generate)

    @property
    def drafts(self) -> bool:
        """Whether candidates are drafted and verified (assisted decoding, prompt lookup)."""
        return (
            self.kwargs.get("assistant_model") is not None
            or self.config.prompt_lookup_num_tokens is not None
            or self.config.assistant_early_exit is not None
        )

    def use(self, cache: TieredCache) -> None:
        """Run the call on ``cache``."""
        self.kwargs["cache"] = cache

    def not_ours(self) -> str:
        """Return why tierkv must leave this call alone; empty when it need not.

        Raises:
            UnsafeCall: a tiered cache was passed to a call that would corrupt or ignore it.
        """
        if self.config.use_cache is False:
            if self.cache is not None:
                raise UnsafeCall(
                    "use_cache=False with a cache appends the whole sequence at every token and gives wrong tokens; "
                    "drop use_cache=False, or do not pass the cache"
                )
            return "use_cache=False asks for no cache"
        if self.config.assistant_early_exit is not None:
            if self.cache is not None:
                raise UnsafeCall(
                    "assistant_early_exit runs only the first layers over the cache, which a tiered cache would roll back; "
                    "use an assistant model or prompt_lookup_num_tokens instead"
                )
            return "assistant_early_exit runs only the first layers over the cache"
        if self.foreign is not None:
            return f"a cache of type {type(self.foreign).__name__} was passed, and it wins"
        if self.config.cache_implementation is not None and self.cache is None:
            return f"cache_implementation={self.config.cache_implementation!r} was set, and it wins"
        if isinstance(self.kwargs.get("custom_generate"), str):
            return "custom_generate runs code from elsewhere"
        return ""

    def make_safe(self, cache: TieredCache) -> None:
        """Bring a filled cache and this call together so that the tokens are those of a fresh run.

        Keeps the longest prefix that the ids share with the cache, at least one token short of the prompt; repeats rows
        for beams; starts over where drafting could not.

        Raises:
            UnsafeCall: the call cannot be made right; the message says how to make it.
        """
        held = cache.sequences.length
        if held == 0:
            return
        ids = self.ids
        if ids is None:
            raise UnsafeCall(
                "inputs_embeds cannot be compared with what the cache holds; pass ids, or an empty cache"
            )
        if not cache.content.known or cache.content.length != held:
            raise UnsafeCall(
                "this cache was filled by a forward whose ids are unknown (embeddings, or a part of the model called "
                "directly), so nobody can tell whether this call continues it; call cache.reset() and pass the full ids"
            )
        self._match_rows(cache, ids)
        mask = self.kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2 and mask.shape[1] != ids.shape[1]:
            if mask.shape[1] != held + ids.shape[1]:
                raise UnsafeCall(
                    f"the attention mask covers {mask.shape[1]} tokens; it must cover the ids ({ids.shape[1]}) or, where only "
                    f"new ids are passed, the {held} cached tokens and the ids ({held + ids.shape[1]})"
                )
            if self.drafts:
                raise UnsafeCall("assisted decoding on a filled cache needs the full ids, cached tokens included")
            self.cached_tokens = held
            self._repeat_rows(cache)
            return
        self._keep_prefix(cache, ids, held)
        self._repeat_rows(cache)

    def _match_rows(self, cache: TieredCache, ids: torch.Tensor) -> None:
        rows = cache.sequences.rows
        if rows not in (self.batch, self.rows):
            raise UnsafeCall(
                f"the cache holds {rows} rows and the call has {self.batch} prompts with {self.repeats} rows each; use "
                f"cache.batch_select_indices to choose the rows that the prompts continue, or cache.reset()"
            )

    def _keep_prefix(self, cache: TieredCache, ids: torch.Tensor, held: int) -> None:
        if cache.sequences.rows != ids.shape[0]:
            ids = ids.repeat_interleave(self.repeats, dim=0)
        shared = cache.content.common_prefix(ids)
        if shared == 0:
            raise UnsafeCall(
                f"the cache holds {held} tokens and the ids do not continue them; pass the full ids (cached tokens "
                f"included), or the new ids with a mask over all tokens, or call cache.reset() for a new text"
            )
        keep = min(shared, ids.shape[1] - 1)
        if self.drafts:
            keep = 0  # transformers feeds the whole prompt again there, whatever the cache holds
        if keep == held:
            return
        if shared < min(held, ids.shape[1]):
            log.warning("the ids continue only %d of the %d cached tokens; the rest is dropped and computed again", shared, held)
        cache.engine.count(tokens_cropped=held - keep)
        if keep and cache.is_croppable:
            cache.crop(keep - held)
        else:
            cache.reset()

    def _repeat_rows(self, cache: TieredCache) -> None:
        if cache.sequences.rows == self.batch and self.repeats > 1:
            cache.batch_repeat_interleave(self.repeats)


@cached
def _parameters() -> tuple[str, ...]:
    """Return the named parameters of ``generate``, in order."""
    parameters = inspect.signature(GenerationMixin.generate).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self")
